"""Whatever holds for torch.optim.AdamW holds here: checkpoints, layouts, a training's life."""

from __future__ import annotations

import copy
import gc
import inspect
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

from adamo_optim import AdamO
from adamo_optim import optimizer as optimizer_module
from adamo_optim import options as options_module
from adamo_optim import state as state_module
from adamo_optim.options import DEFAULTS, FORM, PAPER, RADIAL_SGD

BACKENDS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])


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


def tensors(model: nn.Module, optimizer: AdamO) -> Iterator[torch.Tensor]:
    for p in model.parameters():
        yield p.detach()
        yield from optimizer.state[p].values()


def assert_identical(a: tuple[nn.Module, AdamO], b: tuple[nn.Module, AdamO]) -> None:
    for x, y in zip(tensors(*a), tensors(*b), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


# ---- checkpoints ---------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "radial_sgd": RADIAL_SGD,
    "paper": PAPER,
    "sampled": {"previous_gradient": "sampled"},
    "bfloat16_previous": {"previous_gradient": "bfloat16"},
    "angular": {"tangential": "angular", "delta": 0.3, "wd_ratio": 0.5},
    "no_curvature": {"curvature_target": None},
    "block": {"second_moment": "block"},
}


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", RESUMED.values(), ids=list(RESUMED))
def test_resume_is_bit_exact(options: dict[str, Any], dtype: torch.dtype, foreach: bool) -> None:
    model = network(dtype)
    optimizer = AdamO(model.parameters(), foreach=foreach, **options)
    train(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(7, 15))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(dtype)
    resumed_optimizer = AdamO(resumed.parameters(), foreach=foreach, **options)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(7, 15))
    assert_identical((model, optimizer), (resumed, resumed_optimizer))


@BACKENDS
def test_the_number_of_threads_does_not_matter(foreach: bool) -> None:
    ends = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        source = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, generator=source))
            for shape in ((331, 307), (64, 33, 7, 7), (70001,), (5, 3))
        ]
        optimizer = AdamO(params, foreach=foreach)
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


def test_saving_a_fresh_optimizer_changes_neither_weights_nor_state() -> None:
    model, twin = network(), network()
    optimizer, other = AdamO(model.parameters()), AdamO(twin.parameters())
    found = get_optimizer_state_dict(model, optimizer)
    assert all(float(state["step"]) == 0 for state in found["state"].values())
    assert_identical((model, optimizer), (twin, other))
    train(model, optimizer, range(5))
    train(twin, other, range(5))
    assert_identical((model, optimizer), (twin, other))


def test_distributed_state_dict_round_trip() -> None:
    model, other = network(), network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(5))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other.load_state_dict(model.state_dict())
    resumed = AdamO(other.parameters(), lr=0.5, weight_decay=0.0)
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


def test_checkpoints_of_other_optimizers_and_of_the_future_are_refused() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    before = optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"not written by AdamO.*from_adamw"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters(), lr=0.5).state_dict())
    future = copy.deepcopy(optimizer.state_dict())
    future["param_groups"][0]["schema"] = 99
    with pytest.raises(ValueError, match="schema 99"):
        optimizer.load_state_dict(future)
    assert optimizer.param_groups[0]["lr"] == before
    train(model, optimizer, range(2))


def test_checkpoints_without_later_options_load() -> None:
    model = network()
    optimizer = AdamO(model.parameters(), lr=5e-3)
    train(model, optimizer, range(3))
    old = copy.deepcopy(optimizer.state_dict())
    for name in ("wd_ratio", "previous_gradient", "rule", "rule_reason", *FORM):
        del old["param_groups"][0][name]
    for state in old["state"].values():
        del state["tau_reference"]
    optimizer.load_state_dict(old)
    assert {name: optimizer.param_groups[0][name] for name in FORM} == FORM
    train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_without_the_mean_of_v_gets_it_from_v(in_place: bool) -> None:
    """``in_place``: loaded over a fresh state, as torch.distributed.checkpoint does."""
    model = network(torch.float64)
    optimizer = AdamO(model.parameters(), second_moment="block")
    train(model, optimizer, range(5))
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        if in_place:
            state["mean_square"].zero_()
        else:
            del state["mean_square"]
    resumed = copy.deepcopy(model)
    again = AdamO(resumed.parameters(), second_moment="block")
    again.load_state_dict(old)
    train(model, optimizer, range(5, 8))
    train(resumed, again, range(5, 8))
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(optimizer.state[p], again.state[q], rtol=1e-10, atol=1e-14)


def test_the_mean_of_v_leaves_out_what_has_overflowed() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones_like(p)
    optimizer = AdamO([p])
    optimizer.step()
    old = copy.deepcopy(optimizer.state_dict())
    old["state"][0]["exp_avg_sq"] = torch.tensor([[1.0, 2.0], [torch.inf, 3.0]])
    del old["state"][0]["mean_square"]
    optimizer.load_state_dict(old)
    optimizer.step()
    expected = 0.999 * (1 + 2 + 3) / 4 + 0.001
    assert float(optimizer.state[p]["mean_square"]) == pytest.approx(expected)


def test_loading_and_saving_changes_nothing_where_no_gradient_was() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.zeros_like(p)
    optimizer = AdamO([p])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], saved["state"], rtol=0, atol=0)


def test_a_state_may_be_loaded_for_a_model_on_the_meta_device() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(2))
    with torch.device("meta"):
        shapes = network()
    AdamO(shapes.parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(clone: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(4))
    twin, other = clone((model, optimizer))
    train(model, optimizer, range(4, 8))
    train(twin, other, range(4, 8))
    assert_identical((model, optimizer), (twin, other))


def test_pickles_grow_with_the_number_of_parameters_and_not_with_its_square() -> None:
    def size(number: int, read: Callable[[AdamO], Any]) -> int:
        params = [nn.Parameter(torch.randn(2, 2)) for _ in range(number)]
        optimizer = AdamO(params)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        return len(pickle.dumps(read(optimizer)))

    for read in (AdamO.state_dict, lambda optimizer: optimizer):
        assert size(400, read) < 4.5 * size(100, read)


def test_what_others_keep_beside_the_state_changes_nothing() -> None:
    """Neither a value that changes in every step nor one under a key of its own."""
    model = network()
    optimizer = AdamO(model.parameters())
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


def test_state_moved_by_a_trainer_is_picked_up() -> None:
    """Trainers replace the state's tensors one by one (to move them to a device)."""
    model, twin = network(), network()
    optimizer, other = AdamO(model.parameters()), AdamO(twin.parameters())
    for steps in (range(3), range(3, 6)):
        train(model, optimizer, steps)
        train(twin, other, steps)
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
    assert_identical((model, optimizer), (twin, other))
    optimizer.state[model[0].weight]["tau"] = torch.tensor(1e9, dtype=torch.float64)
    train(model, optimizer, range(6, 7))
    assert float(optimizer.state[model[0].weight]["tau"]) > 1e8


# ---- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({}, 3.0),
        ({"curvature_target": None}, 2.0),
        ({"previous_gradient": "bfloat16"}, 2.5),
        ({"previous_gradient": "sampled"}, 2.0 + 1 / 16),
        ({"low_dim": 10**6}, 2.0),
        ({"rule": "scale_invariant"}, 2.0),
        ({"rule": "scale_invariant", "tangential": "additive"}, 3.0),
    ],
    ids=str,
)
def test_state_memory(options: dict[str, Any], ratio: float) -> None:
    p = nn.Parameter(torch.randn(160, 40))
    optimizer = AdamO([{"params": [p], **options}])
    p.grad = torch.randn_like(p)
    optimizer.step()
    used = sum(x.numel() * x.element_size() for x in optimizer.state[p].values())
    assert used / (p.numel() * 4) == pytest.approx(ratio, abs=0.01)


# ---- layouts -------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"previous_gradient": "sampled"}], ids=str)
def test_memory_layouts_do_not_matter(options: dict[str, Any], foreach: bool) -> None:
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
        optimizer = AdamO([p], foreach=foreach, **options)
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
def test_a_parameter_of_another_shape_is_an_error_that_names_it(
    backend: dict[str, Any], rows: int
) -> None:
    memory = torch.zeros(8, 3)
    p = nn.Parameter(torch.ones(6, 3))
    optimizer = AdamO([("table", p)], **backend)
    p.grad = torch.ones(6, 3)
    optimizer.step()
    p.data, p.grad = memory[:rows], None
    p.grad = torch.ones(rows, 3)
    with pytest.raises(RuntimeError, match=r"table had the shape \(6, 3\) and now has \(\d, 3\)"):
        optimizer.step()
    assert memory.count_nonzero() == 0
    optimizer.state.pop(p)
    optimizer.step()
    assert memory.count_nonzero() == 3 * rows
    assert optimizer.state[p]["step"] == 1


@BACKENDS
def test_expanded_gradients_empty_and_0d_parameters(foreach: bool) -> None:
    params = [nn.Parameter(torch.randn(s)) for s in ((4, 5), (0, 3), (), (0,))]
    optimizer = AdamO(params, foreach=foreach, low_dim=None)
    for _ in range(3):
        params[0].grad = torch.randn(5).expand(4, 5)
        for p in params[1:]:
            p.grad = torch.ones_like(p)
        grads = [p.grad.clone() for p in params]
        optimizer.step()
        assert all(map(torch.equal, grads, (p.grad for p in params)))
    assert all(torch.isfinite(p).all() for p in params)


@BACKENDS
def test_complex_parameters_use_the_real_inner_product(foreach: bool) -> None:
    a = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    b = nn.Parameter(torch.view_as_real(a.detach()).clone())
    options = {"foreach": foreach, "previous_gradient": "sampled"}
    first, second = AdamO([a], **options), AdamO([b], **options)
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


def test_the_model_may_move_after_the_optimizer_was_built() -> None:
    model, twin = network(), network()
    optimizer = AdamO(model.parameters())
    model.double()
    other = AdamO(twin.double().parameters())
    train(model, optimizer, range(4))
    train(twin, other, range(4))
    assert_identical((model, optimizer), (twin, other))


def test_the_model_may_leave_the_meta_device_after_the_optimizer_was_built() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 3)
    optimizer = AdamO(layer.parameters())
    assert not optimizer.state
    p = layer.weight
    torch.utils.swap_tensors(p, nn.Parameter(torch.randn(3, 4)))
    p.grad = torch.randn(3, 4)
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1


def test_lazy_parameters_may_get_their_shape_after_the_optimizer_was_built() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    optimizer = AdamO(model.parameters())
    assert not optimizer.state
    train(model, optimizer, range(2))
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2] * 4
    assert [row.rule for row in optimizer.explain()] == ["general", "low_dim"] * 2


# ---- the user's hands in groups and state --------------------------------------------------

EVERY_BACKEND = pytest.mark.parametrize(
    "backend", [{}, {"foreach": True}, {"foreach": False}], ids=str
)
RESETS: dict[str, Callable[[AdamO, nn.Sequential], Any]] = {
    "new dictionary": lambda o, _: setattr(o, "state", defaultdict(dict)),
    "clear": lambda o, _: o.state.clear(),
    "pop": lambda o, m: [o.state.pop(p) for p in m.parameters()],
    "empty": lambda o, m: o.state.update({p: {} for p in m.parameters()}),
}


@EVERY_BACKEND
@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_state_that_was_reset_begins_anew(
    backend: dict[str, Any], reset: Callable[..., Any]
) -> None:
    model = network()
    optimizer = AdamO(model.parameters(), **backend)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    other = AdamO(twin.parameters(), **backend)
    reset(optimizer, model)
    assert "frozen" not in str(optimizer.explain())
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert_identical((model, optimizer), (twin, other))
    assert len(optimizer.state_dict()["state"]) == 4


def test_one_parameter_may_begin_anew() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(3))
    optimizer.state.pop(model[0].weight)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()["state"]
    assert [int(state[i]["step"]) for i in range(4)] == [2, 5, 5, 5]


def swap(model: nn.Sequential, optimizer: AdamO) -> None:
    """As trainers do that shard a model after its optimizer was built."""
    for layer in (model[0], model[2]):
        layer.weight, layer.bias = (
            nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias)
        )
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_may_be_replaced_before_the_first_step(steps: int, reload: bool) -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    if reload:  # Accelerate does, to move the state to its device
        optimizer.load_state_dict(optimizer.state_dict())
    old = [weakref.ref(p) for p in model.parameters()]
    swap(model, optimizer)
    train(model, optimizer, range(steps))
    assert len(optimizer.state_dict()["state"]) == (4 if steps else 0)
    gc.collect()
    assert all(reference() is None for reference in old)


def test_state_that_steps_have_written_waits_for_its_parameter() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(2))
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = parameters[:2]
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["params"] = parameters
    train(model, optimizer, range(2))
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [6, 6, 4, 4]


def test_a_smaller_head_may_take_the_place_of_another() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)))
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(1))
    model[1] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, range(1))
    assert int(optimizer.state[model[1].bias]["step"]) == 1


def test_fast_weights_may_take_the_place_of_parameters() -> None:
    layer = nn.Linear(3, 2)
    optimizer = AdamO(layer.parameters(), differentiable=True)
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
def test_betas_may_be_any_sequence(betas: Any) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    for optimizer in (AdamO([p], betas=betas), AdamO([{"params": [p], "betas": betas}])):
        group = optimizer.param_groups[0]
        assert group["betas"] == (0.9, 0.95)
        assert [type(beta) for beta in group["betas"]] == [float, float]


def test_every_state_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counter()

    def initialize(state: Any, p: nn.Parameter, *rest: Any) -> None:
        made[p] += 1
        state_module.initialize(state, p, *rest)

    monkeypatch.setattr(optimizer_module, "initialize", initialize)
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(20)]
    AdamO([{"params": [p]} for p in params])
    assert [made[p] for p in params] == [1] * 20


def test_a_step_checks_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a group, but of one whose lr a scheduler moves only that."""
    checked: list[Any] = []
    check, check_number = options_module.check_options, options_module.check_number
    monkeypatch.setattr(
        options_module, "check_options", lambda g, **k: (checked.append(g["eps"]), check(g, **k))
    )
    monkeypatch.setattr(
        options_module,
        "check_number",
        lambda *a, **k: (checked.append(a[0]), check_number(*a, **k)),
    )
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(5)]
    optimizer = AdamO([{"params": [p]} for p in params])
    found = []
    for change in ({}, {}, {"lr": 2e-3}, {"lr": 1e-3, "eps": 1e-6}):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.param_groups[2].update(change)
        checked.clear()
        optimizer.step()
        found.append([*checked])
    assert found[1:3] == [[], ["lr"]]
    assert found[3][0] == 1e-6
    assert {"lr", "eps"} < set(found[3])


def test_groups_may_be_replaced_by_others() -> None:
    """As wrappers such as SAM's do after loading: a step reads the groups there are now."""
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = AdamO([p], lr=1e-2)
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


def test_other_groups_are_called_so() -> None:
    model = network()
    by_kind = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (1, 2)]
    saved = AdamO(model.parameters()).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamO(by_kind).load_state_dict(saved)


CHANGES: list[dict[str, Any]] = [
    {"delta": 0.1, "wd_ratio": 0.5},
    {"curvature_target": None},
    {"curvature_target": 3.0},
    {"previous_gradient": "sampled"},
    {"previous_gradient": "bfloat16"},
    {"tangential": "angular"},
    {"decay_lr": "tangential"},
    RADIAL_SGD,
    {"tangential": "angular", "angular_rms": None},
    {"tangential": "angular", "angular_rms": "equilibrium"},
    {"tangential": "additive"},
    {"second_moment": "entry"},
    {"second_moment": "block"},
    {"low_dim_decay": 0.0},
    {"rule": "low_dim"},
    {"low_dim": None},
    {"guard": False},
    {"lr": 5e-3, "betas": (0.8, 0.9), "weight_decay": 0.0},
    {"radial_lr": 0.01},
    {"foreach": True},
    {"maximize": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_may_change_during_training_and_change_back(change: dict[str, Any]) -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    group = optimizer.param_groups[0]
    old = {name: group[name] for name in change}
    for options in (change, old, change):
        train(model, optimizer, range(3))
        group.update(options)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, range(3, 6))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert not any(map(torch.equal, before, model.parameters()))
    buffers = {k for s in optimizer.state.values() for k in s}
    expected = change.get("curvature_target", 1) is not None and change.get("rule") != "low_dim"
    assert ("previous_grad" in buffers) == expected


def test_a_bad_change_during_training_is_refused() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    train(model, optimizer, range(1))
    for name, value in (("lr", -1.0), ("tangential", "sideways"), ("delta", 0.0)):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=name):
            train(model, optimizer, range(1))
        optimizer.param_groups[0][name] = good
    train(model, optimizer, range(1))


def test_gradscaler_and_skipped_steps() -> None:
    model, twin = network(), network()
    optimizer, other = AdamO(model.parameters()), AdamO(twin.parameters())
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


def test_gradient_clipping_and_accumulation() -> None:
    model, twin = network(), network()
    optimizer, other = AdamO(model.parameters()), AdamO(twin.parameters())

    def clip(net: nn.Module) -> Callable[[], Any]:
        return lambda: nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    train(model, optimizer, range(4), clip(model))
    train(twin, other, range(4), clip(twin))
    assert_identical((model, optimizer), (twin, other))
    norms = [r["gradient_norm"] for r in optimizer.diagnostics(synchronize=True).values()]
    assert sum(n * n for n in norms) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("make", [AdamO, AdamO.radial_sgd], ids=["defaults", "radial_sgd"])
def test_swapping_in_averaged_weights_and_back_changes_nothing(make: Callable[..., AdamO]) -> None:
    model, twin = network(), network()
    optimizer, other = make(model.parameters()), make(twin.parameters())
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
def test_tensor_learning_rates(shape: tuple[int, ...]) -> None:
    model, twin = network(torch.float64), network(torch.float64)
    lr = torch.full(shape, 2e-3, dtype=torch.float64)
    optimizer, other = AdamO(model.parameters(), lr=lr), AdamO(twin.parameters(), lr=2e-3)
    train(model, optimizer, range(3))
    train(twin, other, range(3))
    lr.mul_(0.5)  # in place: nobody tells the optimizer
    other.param_groups[0]["lr"] *= 0.5
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert_identical((model, optimizer), (twin, other))


# ---- what cannot work ----------------------------------------------------------------------


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = AdamO([("table", table.weight)])
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


def test_a_bad_group_leaves_the_optimizer_as_it_was() -> None:
    model = network()
    optimizer = AdamO(model.parameters())
    new = nn.Parameter(torch.randn(3, 3))
    with pytest.raises(ValueError, match="radial_beta"):
        optimizer.add_param_group({"params": [new], "radial_beta": 1.0})
    with pytest.raises(TypeError, match="floating or complex"):
        optimizer.add_param_group({"params": [torch.zeros(3, dtype=torch.long)]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(2))


def test_the_signature_has_the_defaults_of_the_table() -> None:
    parameters = inspect.signature(AdamO.__init__).parameters
    stated = {n: p.default for n, p in parameters.items() if n not in ("self", "params")}
    assert stated == {
        n: v for n, v in DEFAULTS.items() if n not in ("rule", "rule_reason", "schema")
    }


def test_differentiable_stays_what_it_was() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = AdamO([p])
    optimizer.param_groups[0]["differentiable"] = True
    p.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match="stay what it was when AdamO was built"):
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


def test_a_state_of_sgd_is_called_foreign() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    sgd = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones(3, 2)
    sgd.step()
    with pytest.raises(ValueError, match="was not written by AdamO"):
        AdamO([p]).load_state_dict(sgd.state_dict())


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_another_default_device_changes_nothing(backend: dict[str, Any]) -> None:
    ends = []
    for context in (nullcontext(), torch.device("meta")):
        p = nn.Parameter(torch.ones(3, 2))
        optimizer = AdamO([p], **backend)
        for _ in range(2):
            p.grad = torch.full((3, 2), 0.5)
            with context:
                optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
