"""Whatever holds for torch.optim.AdamW holds here: checkpoints, layouts, a training's life."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections import Counter, UserList, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp._flat_param import FlatParameter

from adamo_optim import AdamO, AngularAdamW
from adamo_optim import adamo as adamo_module
from adamo_optim import buckets as buckets_module
from adamo_optim import state as state_module
from adamo_optim.options import PAPER
from torch_kit import ADAMO_ENTRY, TURNING_ENTRY, Entry, over_entries

BACKENDS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
EVERY = over_entries()
BOTH = over_entries([ADAMO_ENTRY, TURNING_ENTRY])  # where AdamW's own code has nothing to lose


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    before_step: Callable[[], Any] = lambda: None,
) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        x, y = (torch.randn(16, n, generator=source).to(dtype) for n in (6, 3))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        before_step()
        optimizer.step()


def tensors(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for p in model.parameters():
        yield p.detach()
        yield from (optimizer.state[p][key] for key in sorted(optimizer.state[p]))


def assert_identical(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> None:
    for x, y in zip(tensors(*a), tensors(*b), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


# ---- checkpoints ---------------------------------------------------------------------------

RESUMED: dict[str, tuple[Entry, dict[str, Any]]] = {
    "AdamO": (ADAMO_ENTRY, {}),
    "AdamO-paper": (ADAMO_ENTRY, PAPER),
    "AdamO-sampled": (ADAMO_ENTRY, {"previous_gradient": "sampled"}),
    "AdamO-bfloat16_previous": (ADAMO_ENTRY, {"previous_gradient": "bfloat16"}),
    "AdamO-online_test": (ADAMO_ENTRY, {"delta": 0.3, "wd_ratio": 0.5}),
    "AdamO-no_curvature": (ADAMO_ENTRY, {"curvature_target": None}),
    "AdamO-rows": (ADAMO_ENTRY, {"block": "row"}),
    "turning": (TURNING_ENTRY, {}),
    "turning-own_norm": (TURNING_ENTRY, {"angular_rms": None}),
}


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("entry", "options"), RESUMED.values(), ids=list(RESUMED))
def test_resume_is_bit_exact(
    entry: Entry, options: dict[str, Any], dtype: torch.dtype, flags: dict[str, bool]
) -> None:
    model = network(dtype)
    optimizer = entry.make(model.parameters(), **flags, **options)
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 10))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(dtype)
    resumed_optimizer = entry.make(resumed.parameters(), **flags, **options)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(5, 10))
    assert_identical((model, optimizer), (resumed, resumed_optimizer))


@BACKENDS
@BOTH
def test_the_number_of_threads_does_not_matter(entry: Entry, foreach: bool) -> None:
    ends = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        source = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, generator=source))
            for shape in ((331, 307), (64, 33, 7, 7), (70001,), (5, 3))
        ]
        optimizer = entry.make(params, foreach=foreach)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=source)
            optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in params])
    torch.set_num_threads(1)
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            assert all(map(torch.equal, a, b))


def test_state_keeps_its_dtype_through_load() -> None:
    model = network(torch.bfloat16)
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(3))
    dtypes = [[(k, v.dtype) for k, v in s.items()] for s in optimizer.state.values()]
    fresh = AdamO(model.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [[(k, v.dtype) for k, v in s.items()] for s in fresh.state.values()] == dtypes
    buffers = {v.dtype for s in fresh.state.values() for v in s.values() if v.dim()}
    assert buffers == {torch.float32}


@EVERY
def test_saving_a_fresh_optimizer_changes_neither_weights_nor_state(entry: Entry) -> None:
    """torch's get_optimizer_state_dict takes a step with lr=0 where there is no state."""
    model, twin = network(), network()
    optimizer, other = entry.make(model.parameters()), entry.make(twin.parameters())
    found = get_optimizer_state_dict(model, optimizer)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    if entry.cls is AdamO:  # AdamW's own state has counted that step
        assert all(float(state["step"]) == 0 for state in found["state"].values())
        train(model, optimizer, range(5))
        train(twin, other, range(5))
        assert_identical((model, optimizer), (twin, other))


@EVERY
def test_distributed_state_dict_round_trip(entry: Entry) -> None:
    model, other = network(), network()
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(5))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other.load_state_dict(model.state_dict())
    resumed = entry.make(other.parameters(), lr=0.5, weight_decay=0.0)
    set_optimizer_state_dict(other, resumed, saved)
    assert resumed.param_groups[0]["lr"] == 1e-3
    train(model, optimizer, range(5, 9))
    train(other, resumed, range(5, 9))
    assert_identical((model, optimizer), (other, resumed))


def test_user_hooks_may_rewrite_what_is_loaded() -> None:
    model = network(torch.bfloat16)
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(3))
    fresh = AdamO(model.parameters())

    def double_the_momentum(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["exp_avg"] *= 2
        return changed

    fresh.register_load_state_dict_pre_hook(double_the_momentum)
    fresh.load_state_dict(optimizer.state_dict())
    p = model[0].weight
    assert torch.equal(fresh.state[p]["exp_avg"], 2 * optimizer.state[p]["exp_avg"])


@EVERY
def test_loading_and_saving_changes_nothing_where_no_gradient_was(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.zeros_like(p)
    optimizer = entry.make([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], saved["state"], rtol=0, atol=0)


@EVERY
def test_a_state_may_be_loaded_for_a_model_on_the_meta_device(entry: Entry) -> None:
    model = network()
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(2))
    with torch.device("meta"):
        shapes = network()
    entry.make(shapes.parameters()).load_state_dict(optimizer.state_dict())


@BOTH
def test_pickles_grow_with_the_number_of_parameters_and_not_with_its_square(entry: Entry) -> None:
    def size(number: int, read: Callable[[Any], Any]) -> int:
        params = [nn.Parameter(torch.randn(2, 2)) for _ in range(number)]
        optimizer = entry.make(params)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        return len(pickle.dumps(read(optimizer)))

    for read in (entry.cls.state_dict, lambda optimizer: optimizer):
        assert size(400, read) < 4.5 * size(100, read)


@BOTH
def test_what_others_keep_beside_the_state_changes_nothing(entry: Entry) -> None:
    """Neither a value that changes in every step nor one under a key of its own."""
    model = network()
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(2))
    layout, p = optimizer._layout, next(model.parameters())
    for count in range(3):
        optimizer.state[p]["count"] = 1000 + count
        optimizer.state["theirs"] = {"count": count}  # type: ignore[index]
        train(model, optimizer, range(2))
        assert optimizer._layout is layout
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    train(model, optimizer, range(2))
    assert optimizer._layout is not layout


@pytest.mark.parametrize(
    ("entry", "number"),
    [(ADAMO_ENTRY, "tau"), (TURNING_ENTRY, "mean_square")],
    ids=["AdamO", "turning"],
)
def test_state_moved_by_a_trainer_is_picked_up(entry: Entry, number: str) -> None:
    """Trainers replace the state's tensors one by one (to move them to a device)."""
    model, twin = network(), network()
    optimizer, other = entry.make(model.parameters()), entry.make(twin.parameters())
    for steps in (range(3), range(3, 6)):
        train(model, optimizer, steps)
        train(twin, other, steps)
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
    assert_identical((model, optimizer), (twin, other))
    optimizer.state[model[0].weight][number] = torch.tensor(1e9, dtype=torch.float64)
    train(model, optimizer, range(6, 7))
    assert float(optimizer.state[model[0].weight][number]) > 1e8


# ---- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "ratio"),
    [
        (AdamO, {}, 3.0),
        (AdamO, {"curvature_target": None}, 2.0),
        (AdamO, {"previous_gradient": "bfloat16"}, 2.5),
        (AdamO, {"previous_gradient": "sampled"}, 2.0 + 1 / 16),
        (AdamO, {"low_dim": 10**6}, 2.0),
        (AdamO, {"rule": "scale_invariant"}, 3.0),
        (AngularAdamW, {"rule": "general"}, 2.0),
        (AngularAdamW, {"rule": "scale_invariant"}, 1.0),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x),
)
def test_state_memory(cls: Any, options: dict[str, Any], ratio: float) -> None:
    p = nn.Parameter(torch.randn(160, 40))
    optimizer = cls([{"params": [p], **options}])
    p.grad = torch.randn_like(p)
    optimizer.step()
    used = sum(x.numel() * x.element_size() for x in optimizer.state[p].values())
    assert used / (p.numel() * 4) == pytest.approx(ratio, abs=0.01)


# ---- layouts -------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    ("entry", "options"),
    [(ADAMO_ENTRY, {}), (ADAMO_ENTRY, {"previous_gradient": "sampled"}), (TURNING_ENTRY, {})],
    ids=["AdamO", "AdamO-sampled", "turning"],
)
def test_memory_layouts_do_not_matter(entry: Entry, options: dict[str, Any], foreach: bool) -> None:
    plain = nn.Parameter(torch.randn(32, 6, 3, 3, dtype=torch.float64))
    layouts = {
        "channels_last": plain.detach().clone(memory_format=torch.channels_last),
        "transposed": plain.detach().transpose(0, 3).contiguous().transpose(0, 3),
        "strided": torch.stack([plain.detach()] * 2, dim=-1)[..., 0],
    }
    params = {"plain": plain} | {k: nn.Parameter(v) for k, v in layouts.items()}
    assert not params["strided"].is_contiguous()
    for p in params.values():
        source = torch.Generator().manual_seed(3)
        optimizer = entry.make([p], foreach=foreach, **options)
        for _ in range(10):
            p.grad = torch.randn(p.shape, generator=source, dtype=p.dtype)
            if p is params["channels_last"]:
                p.grad = p.grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
    for p in params.values():
        torch.testing.assert_close(p, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "backend", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
)
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("rule", ["general", "scale_invariant"])
@pytest.mark.parametrize("cls", [AdamO, AngularAdamW])
def test_a_parameter_of_another_shape_is_an_error_that_names_it(
    cls: Any, rule: str, backend: dict[str, Any], rows: int
) -> None:
    memory = torch.zeros(8, 3)
    p = nn.Parameter(torch.ones(6, 3))
    optimizer = cls([{"params": [("table", p)], "rule": rule}], **backend)
    for _ in range(3):
        p.grad = torch.randn(6, 3)
        optimizer.step()
    p.data, p.grad = memory[:rows], None
    p.grad = torch.randn(rows, 3)
    with pytest.raises(RuntimeError, match=r"table had the shape \(6, 3\) and now has \(\d, 3\)"):
        optimizer.step()
    assert memory.count_nonzero() == 0
    if rule == "scale_invariant":
        memory[:] = torch.eye(8, 3)  # zeros have no direction
    optimizer.state.pop(p)
    optimizer.step()
    assert memory[:rows].count_nonzero() == 3 * rows
    assert optimizer.state[p]["step"] == 1


@BACKENDS
@BOTH
def test_state_whose_memory_is_moved_keeps_its_numbers(entry: Entry, foreach: bool) -> None:
    """``x.data = x.data.to(device)``, as people offload state, and later another layout."""
    ends = []
    for moves in (False, True):
        model = network()
        rules = {"rule": "scale_invariant"} if entry.cls is AngularAdamW else {}
        groups = [{"params": list(model.parameters()), **rules}]
        optimizer = entry.cls(groups, lr=1e-3, foreach=foreach)
        for start in (0, 5, 10):
            train(model, optimizer, range(start, start + 5))
            if moves and start == 0:
                for state in optimizer.state.values():
                    for x in state.values():
                        x.data = x.data.clone()
            if start == 5:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        steps = {float(s["step"]) for s in optimizer.state_dict()["state"].values() if "step" in s}
        assert max(steps) == 15
        ends.append([*tensors(model, optimizer)])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


ILLEGAL = [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.5, 0.9)}, {"eps": -1.0}]
ILLEGAL += [{"weight_decay": -3.0}, {"amsgrad": True}]


@pytest.mark.parametrize("options", ILLEGAL, ids=str)
def test_an_illegal_option_is_refused_at_the_next_step(options: dict[str, Any]) -> None:
    """Also where nothing turns and torch's lists are kept."""
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = AngularAdamW([{"params": [p], "rule": "general"}])
    for _ in range(3):
        p.grad = torch.ones(4, 3)
        optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=next(iter(options))):
        optimizer.step()
    assert torch.equal(p, before)


@BACKENDS
@BOTH
def test_expanded_gradients_empty_and_0d_parameters(entry: Entry, foreach: bool) -> None:
    params = [nn.Parameter(torch.randn(s)) for s in ((4, 5), (0, 3), (), (0,))]
    general = {"low_dim": None} if entry.cls is AdamO else {}
    optimizer = entry.make(params, foreach=foreach, **general)
    for _ in range(3):
        params[0].grad = torch.randn(5).expand(4, 5)
        for p in params[1:]:
            p.grad = torch.ones_like(p)
        grads = [p.grad.clone() for p in params]
        optimizer.step()
        assert all(map(torch.equal, grads, (p.grad for p in params)))
    assert all(torch.isfinite(p).all() for p in params)


@BACKENDS
@BOTH
def test_complex_parameters_use_the_real_inner_product(entry: Entry, foreach: bool) -> None:
    a = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    b = nn.Parameter(torch.view_as_real(a.detach()).clone())
    options = {"previous_gradient": "sampled"} if entry.cls is AdamO else {}
    first, second = (entry.make([p], foreach=foreach, **options) for p in (a, b))
    for _ in range(20):
        a.grad = torch.randn_like(a)
        b.grad = torch.view_as_real(a.grad).clone()
        first.step()
        second.step()
    torch.testing.assert_close(torch.view_as_real(a.detach()), b.detach(), rtol=1e-11, atol=1e-12)
    vector = AdamO([nn.Parameter(torch.randn(4, dtype=torch.complex64))])
    assert vector.explain()[0].rule == "low_dim"  # its real view has two dimensions


# ---- life of a training --------------------------------------------------------------------


def test_parameters_may_join_thaw_and_come_late() -> None:
    model = network()
    model[2].requires_grad_(False)
    optimizer = AdamO(model[0].named_parameters())
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": list(model[2].named_parameters()), "lr": 1e-2})
    assert "frozen" in optimizer.explain()[2].reason
    train(model, optimizer, range(3, 5))
    assert model[2].weight not in optimizer.state
    model[2].requires_grad_(True)
    train(model, optimizer, range(5, 7))
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    assert steps == [7, 7, 2, 2]


@EVERY
def test_the_model_may_move_after_the_optimizer_was_built(entry: Entry) -> None:
    model, twin = network(), network()
    optimizer = entry.make(model.parameters())
    model.double()
    other = entry.make(twin.double().parameters())
    train(model, optimizer, range(4))
    train(twin, other, range(4))
    assert_identical((model, optimizer), (twin, other))


@EVERY
def test_the_model_may_leave_the_meta_device_after_the_optimizer_was_built(entry: Entry) -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 3)
    optimizer = entry.make(layer.parameters())
    assert not optimizer.state
    p = layer.weight
    torch.utils.swap_tensors(p, nn.Parameter(torch.randn(3, 4)))
    p.grad = torch.randn(3, 4)
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1


@EVERY
def test_lazy_parameters_may_get_their_shape_after_the_optimizer_was_built(entry: Entry) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    optimizer = entry.make(model.parameters())
    assert not optimizer.state
    train(model, optimizer, range(2))
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2] * 4
    matrix = "scale_invariant" if entry.turns else "general"
    assert [row.rule for row in optimizer.explain()] == [matrix, "low_dim"] * 2


# ---- the user's hands in groups and state --------------------------------------------------

EVERY_BACKEND = pytest.mark.parametrize(
    "backend", [{}, {"foreach": True}, {"foreach": False}], ids=str
)
RESETS: dict[str, Callable[[Any, nn.Sequential], Any]] = {
    "new dictionary": lambda o, _: setattr(o, "state", defaultdict(dict)),
    "clear": lambda o, _: o.state.clear(),
    "pop": lambda o, m: [o.state.pop(p) for p in m.parameters()],
    "empty": lambda o, m: o.state.update({p: {} for p in m.parameters()}),
}


@EVERY_BACKEND
@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
@EVERY
def test_a_state_that_was_reset_begins_anew(
    entry: Entry, backend: dict[str, Any], reset: Callable[..., Any]
) -> None:
    model = network()
    optimizer = entry.make(model.parameters(), **backend)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    other = entry.make(twin.parameters(), **backend)
    reset(optimizer, model)
    assert "frozen" not in str(optimizer.explain())
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert_identical((model, optimizer), (twin, other))
    assert len(optimizer.state_dict()["state"]) == 4


@EVERY
def test_one_parameter_may_begin_anew(entry: Entry) -> None:
    model = network()
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(3))
    optimizer.state.pop(model[0].weight)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()["state"]
    assert [int(state[i]["step"]) for i in range(4)] == [2, 5, 5, 5]


def swap(model: nn.Sequential, optimizer: Any) -> None:
    """As trainers do that shard a model after its optimizer was built."""
    for layer in (model[0], model[2]):
        layer.weight, layer.bias = (
            nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias)
        )
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@EVERY
def test_parameters_may_be_replaced_before_the_first_step(
    entry: Entry, steps: int, reload: bool
) -> None:
    model = network()
    optimizer = entry.make(model.parameters())
    if reload:  # Accelerate does, to move the state to its device
        optimizer.load_state_dict(optimizer.state_dict())
    old = [weakref.ref(p) for p in model.parameters()]
    swap(model, optimizer)
    train(model, optimizer, range(steps))
    assert len(optimizer.state_dict()["state"]) == (4 if steps else 0)
    gc.collect()
    assert all(reference() is None for reference in old)


@EVERY
def test_state_that_steps_have_written_waits_for_its_parameter(entry: Entry) -> None:
    model = network()
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(2))
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = parameters[:2]
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["params"] = parameters
    train(model, optimizer, range(2))
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [6, 6, 4, 4]


@EVERY
def test_a_smaller_head_may_take_the_place_of_another(entry: Entry) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)))
    optimizer = entry.make(model.parameters())
    train(model, optimizer, range(1))
    model[1] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, range(1))
    assert int(optimizer.state[model[1].bias]["step"]) == 1


@EVERY
def test_fast_weights_may_take_the_place_of_parameters(entry: Entry) -> None:
    layer = nn.Linear(3, 2)
    optimizer = entry.make(layer.parameters(), differentiable=True)
    fast = [p.clone() for p in layer.parameters()]
    for p in fast:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["params"] = fast
    optimizer.step()
    assert all(p.grad_fn is not None for p in fast)


@pytest.mark.parametrize(
    "betas",
    [[0.9, 0.95], UserList([0.9, 0.95]), np.array([0.9, 0.95])],
    ids=lambda b: type(b).__name__,
)
@EVERY
def test_betas_may_be_any_sequence(entry: Entry, betas: Any) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    for optimizer in (entry.make([p], betas=betas), entry.make([{"params": [p], "betas": betas}])):
        group = optimizer.param_groups[0]
        assert group["betas"] == (0.9, 0.95)
        assert [type(beta) for beta in group["betas"]] == [float, float]


def test_every_state_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counter()

    def initialize(state: Any, p: nn.Parameter, *rest: Any) -> None:
        made[p] += 1
        state_module.initialize(state, p, *rest)

    monkeypatch.setattr(adamo_module, "initialize", initialize)
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(20)]
    AdamO([{"params": [p]} for p in params])
    assert [made[p] for p in params] == [1] * 20


@BOTH
def test_a_step_checks_the_groups_that_changed(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    check = buckets_module.check_numbers
    monkeypatch.setattr(
        buckets_module, "check_numbers", lambda g, **k: (checked.append(g["lr"]), check(g, **k))
    )
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(5)]
    optimizer = entry.make([{"params": [p]} for p in params])
    found = []
    for change in ({}, {}, {"lr": 2e-3}, {"lr": 3e-3, "eps": 1e-6}):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.param_groups[2].update(change)
        checked.clear()
        optimizer.step()
        found.append([*checked])
    assert found[1:] == [[], [2e-3], [3e-3]]


@BOTH
def test_groups_may_be_replaced_by_others(entry: Entry) -> None:
    """As wrappers such as SAM's do after loading: a step reads the groups there are now."""
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = entry.make([p], lr=1e-2)
    p.grad = torch.randn(4, 4)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": -5.0}
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step()


def test_a_ratio_takes_the_place_of_the_papers_absolute_rate() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    assert AdamO.paper([p]).param_groups[0]["radial_lr"] == 5e-3
    assert AdamO.paper([p], radial_lr_ratio=50.0).param_groups[0]["radial_lr"] is None
    both = AdamO.paper([p], radial_lr_ratio=50.0, radial_lr=1e-3).param_groups[0]
    assert both["radial_lr"] == 1e-3


def test_a_step_that_cannot_unscale_says_so() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer: Any = AdamO([p], foreach=False, fused=False)
    p.grad = torch.ones_like(p)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="grad_scale and found_inf are for fused=True"):
        optimizer.step()


@pytest.mark.parametrize("empty", [torch.ones(3, 0), torch.ones(8, 3).narrow(1, 0, 0)], ids=str)
def test_empty_tensors_take_any_backend(empty: torch.Tensor) -> None:
    p = nn.Parameter(empty)
    optimizer = AdamO([p, nn.Parameter(torch.ones(2, 2))])
    assert len({row.backend for row in optimizer.explain()}) == 1


CHANGES: list[tuple[Entry, dict[str, Any]]] = [
    *(
        (ADAMO_ENTRY, change)
        for change in (
            {"delta": 0.1, "wd_ratio": 0.5},
            {"curvature_target": None},
            {"curvature_target": 3.0},
            {"previous_gradient": "sampled"},
            {"previous_gradient": "bfloat16"},
            {"decay_lr": "tangential"},
            {"block": "row"},
            {"rule": "low_dim"},
            {"rule": "scale_invariant"},
            {"low_dim": None},
            {"guard": False},
            {"lr": 5e-3, "betas": (0.8, 0.9), "weight_decay": 0.0},
            {"radial_lr": 0.01},
            {"foreach": True},
            {"maximize": True},
        )
    ),
    *(
        (TURNING_ENTRY, change)
        for change in (
            {"rule": "general"},
            {"rule": "low_dim"},
            {"angular_rms": None},
            {"max_angle": 0.5},
            {"lr": 5e-3, "betas": (0.8, 0.9), "weight_decay": 0.0},
            {"foreach": True},
            {"fused": False},
            {"maximize": True},
        )
    ),
]


@pytest.mark.parametrize(
    ("entry", "change"), CHANGES, ids=lambda x: x.name if isinstance(x, Entry) else str(x)
)
def test_every_option_may_change_during_training_and_change_back(
    entry: Entry, change: dict[str, Any]
) -> None:
    model = network()
    optimizer = entry.make(model.parameters())
    group = optimizer.param_groups[0]
    old = {name: group[name] for name in change}
    for options in (change, old, change):
        train(model, optimizer, range(3))
        group.update(options)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, range(3, 6))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert not any(map(torch.equal, before, model.parameters()))
    assert {int(state["step"].max()) for state in optimizer.state.values()} == {18}
    buffers = {k for s in optimizer.state.values() for k in s}
    if entry is ADAMO_ENTRY:
        expected = change.get("curvature_target", 1) is not None and change.get("rule") != "low_dim"
        assert ("previous_grad" in buffers) == expected
    else:
        assert ("mean_square" in buffers) == ("rule" not in change)


def test_a_weight_that_no_longer_turns_goes_on_as_adamw_s() -> None:
    """Every entry begins with the block's average, and the count of steps goes on."""
    p = nn.Parameter(torch.randn(4, 3))
    optimizer = TURNING_ENTRY.make([p])
    for _ in range(3):
        p.grad = torch.randn(4, 3)
        optimizer.step()
    mean, moment = float(optimizer.state[p]["mean_square"]), optimizer.state[p]["exp_avg"].clone()
    optimizer.param_groups[0]["rule"] = "general"
    twin = nn.Parameter(p.detach().clone())
    adamw = torch.optim.AdamW([twin], fused=True)
    twin.grad = torch.zeros_like(twin)
    adamw.step()
    with torch.no_grad():
        twin.copy_(p)
    adamw.state[twin].update(
        step=torch.tensor(3.0), exp_avg=moment, exp_avg_sq=torch.full((4, 3), mean)
    )
    p.grad = torch.randn(4, 3)
    twin.grad = p.grad.clone()
    optimizer.step()
    adamw.step()
    assert torch.equal(p, twin)


def test_a_bad_change_during_training_is_refused() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(1))
    for name, value in (("lr", -1.0), ("decay_lr", "sideways"), ("delta", 0.0)):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            train(model, optimizer, range(1))
        optimizer.param_groups[0][name] = good
    train(model, optimizer, range(1))


@pytest.mark.parametrize("fused", [None, True], ids=["default", "fused"])
@EVERY
def test_gradscaler_and_skipped_steps(entry: Entry, fused: bool | None) -> None:
    """With fused=True the scaler leaves unscaling and skipping to the step."""
    model, twin = network(), network()
    optimizer = entry.make(model.parameters(), fused=fused)
    other = entry.make(twin.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    for step in range(6):
        source = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 6, generator=source), torch.randn(16, 3, generator=source)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            train(twin, other, range(step, step + 1))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert int(optimizer.state[p]["step"]) == 5


def test_a_step_sees_the_gradients_that_were_clipped() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(4), lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    norms = [r["gradient_norm"] for r in optimizer.diagnostics(synchronize=True).values()]
    assert sum(n * n for n in norms) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


@BOTH
def test_swapping_in_averaged_weights_and_back_changes_nothing(entry: Entry) -> None:
    model, twin = network(), network()
    optimizer, other = entry.make(model.parameters()), entry.make(twin.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        train(twin, other, range(step, step + 1))
        average.update_parameters(model)
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
                p.copy_(q)
            for p, q in zip(model.parameters(), kept, strict=True):
                p.copy_(q)
    assert_identical((model, optimizer), (twin, other))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@BOTH
def test_tensor_learning_rates(entry: Entry, shape: tuple[int, ...]) -> None:
    model, twin = network(torch.float64), network(torch.float64)
    lr = torch.full(shape, 2e-3, dtype=torch.float64)
    optimizer, other = entry.make(model.parameters(), lr=lr), entry.make(twin.parameters(), lr=2e-3)
    train(model, optimizer, range(3))
    train(twin, other, range(3))
    lr.mul_(0.5)  # in place: nobody tells the optimizer
    other.param_groups[0]["lr"] *= 0.5
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert_identical((model, optimizer), (twin, other))


# ---- what cannot work ----------------------------------------------------------------------


@BOTH
def test_sparse_gradients_are_refused(entry: Entry) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = entry.make([("table", table.weight)])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*table"):
        optimizer.step()


def test_flat_parameters_are_refused() -> None:
    flat = nn.Parameter(torch.zeros(10))
    flat._is_flat_param = True
    assert isinstance(flat, FlatParameter)  # FSDP1's own mark
    with pytest.raises(RuntimeError, match=r"FSDP1.*fully_shard"):
        AdamO([flat])
    model = network()
    optimizer = AdamO(model.parameters())
    model[0].weight.ds_id = 3
    with pytest.raises(RuntimeError, match="ZeRO"):
        AdamO(model.parameters())
    # DeepSpeed puts flat partitions into param_groups behind the optimizer's back
    optimizer.param_groups[0]["params"] = [torch.zeros(40, requires_grad=True)]
    optimizer.param_groups[0]["params"][0].grad = torch.ones(40)
    with pytest.raises(RuntimeError, match=r"in the place of.*flat"):
        optimizer.step()


def test_differentiable_stays_what_it_was() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamO([p])
    optimizer.param_groups[0]["differentiable"] = True
    p.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match="stay what it was when the optimizer was built"):
        optimizer.step()


def test_a_bias_may_be_replaced_after_a_group_was_dropped() -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizer = AdamO([{"params": list(layer.parameters())} for layer in layers])
    for layer in layers:
        layer(torch.ones(4, 3)).sum().backward()
    del optimizer.param_groups[1]
    optimizer.step()
    bias = layers[0].bias = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"][1] = bias
    layers[0](torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert bias.count_nonzero() == 2


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@EVERY
def test_another_default_device_changes_nothing(entry: Entry, backend: dict[str, Any]) -> None:
    if entry.cls is AngularAdamW and backend and torch.__version__ < (2, 13):
        pytest.skip("torch's AdamW counts its steps on the default device")
    ends = []
    for context in (nullcontext(), torch.device("meta")):
        p = nn.Parameter(torch.ones(3, 2))
        optimizer = entry.make([p], **backend)
        for _ in range(2):
            p.grad = torch.full((3, 2), 0.5)
            with context:
                optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_without_a_rule_a_sentence_says_once_that_nothing_turns() -> None:
    model = network()
    with pytest.warns(UserWarning, match=r"no group says .*param_groups\(model, exam") as seen:
        optimizer = AngularAdamW(model.parameters())
    assert [w.filename for w in seen] == [__file__]
    train(model, optimizer, range(3))  # and no more: a warning would be an error
    for entry in (TURNING_ENTRY, ADAMO_ENTRY):
        entry.cls([{"params": list(model.parameters()), "rule": "general"}])
