"""PyTorch's optimizer suite: state dictionaries, hooks, copies and pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing import assert_close

from adamo_optim import AdamO, AngularAdamW
from torch_kit import (
    ADAMO_ENTRY,
    ANGULAR_ENTRY,
    FEW,
    LATER_FLAGS,
    TURNING_ENTRY,
    Case,
    Entry,
    Regression,
    assert_same,
    assert_same_dict,
    build,
    clones,
    normed_net,
    over_backends,
    over_entries,
    over_inputs,
    train_net,
)

# torch tells those who step a capturable copy without a graph, where there is a CUDA device
pytestmark = pytest.mark.filterwarnings(
    "ignore:This instance was constructed with capturable:UserWarning"
)

eager = over_backends(skip=("differentiable",))
few = over_backends(only=FEW)
few_eager = over_backends(only=FEW, skip=("differentiable",))

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
NAMED = pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
NAMED_BOTH = pytest.mark.parametrize(
    ("from_named", "to_named"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["unnamed-to-unnamed", "unnamed-to-named", "named-to-unnamed", "named-to-named"],
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- state dictionaries ---------------------------------------------------------------------


@eager
def test_a_loaded_optimizer_continues_as_the_saved_one(case: Case) -> None:
    assert_loaded_continues(case, from_named=False, to_named=False)


@over_backends(skip=("differentiable",), only=("default",))
@NAMED_BOTH
def test_a_loaded_optimizer_continues_whatever_is_named(
    case: Case, from_named: bool, to_named: bool
) -> None:
    assert_loaded_continues(case, from_named, to_named)


def assert_loaded_continues(case: Case, from_named: bool, to_named: bool) -> None:
    saved, loaded = Regression(), Regression()
    optimizer = build(saved.named if from_named else saved.params, case)
    saved.train(optimizer, 2)
    with torch.no_grad():
        for p, q in zip(loaded.params, saved.params, strict=True):
            p.copy_(q)
    other = build(loaded.named if to_named else loaded.params, case)
    state = deepcopy(optimizer.state_dict())
    other.load_state_dict(state)
    assert_same_dict(state, optimizer.state_dict())  # loading changed nothing in it
    saved.train(optimizer, 2)
    loaded.train(other, 2)
    assert_same(clones(loaded.params), clones(saved.params))
    assert_same_dict(other.state_dict(), optimizer.state_dict(), ignore="param_names")


@few_eager
def test_repeated_groups_are_written_alike(case: Case) -> None:
    problem = Regression()
    optimizer = build(problem.params, case)
    problem.train(optimizer, 1)
    once = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"] == [*once, *once]


@few_eager
def test_an_older_state_dict_can_be_loaded(case: Case) -> None:
    net = normed_net()
    optimizer = build(net.parameters(), case)
    train_net(net, optimizer, 2)
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in LATER_FLAGS:
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    before = clones(net.parameters())
    train_net(net, optimizer, 1)
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("entry", "missing"),
    [
        pytest.param(entry, missing, id=f"{entry.name}-{missing}")
        for entry in (ADAMO_ENTRY, TURNING_ENTRY)
        for missing in sorted(entry.make(Regression().params).defaults)
        if missing not in ("schema", "betas", "amsgrad", "decoupled_weight_decay")
    ],
)
def test_an_option_missing_in_a_state_dict_stays_as_it_is(entry: Entry, missing: str) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params, lr=0.02, weight_decay=1e-4)
    problem.train(optimizer, 1)
    before = optimizer.param_groups[0][missing]
    old = deepcopy(optimizer.state_dict())
    del old["param_groups"][0][missing]
    optimizer.load_state_dict(old)
    problem.train(optimizer, 1)
    assert optimizer.param_groups[0][missing] == before


@over_inputs(only=("default",))
@NAMED_BOTH
def test_names_survive_loading(case: Case, from_named: bool, to_named: bool) -> None:
    net = normed_net()
    optimizer = build(net.named_parameters() if from_named else net.parameters(), case)
    train_net(net, optimizer, 1)
    other = build(net.named_parameters() if to_named else net.parameters(), case)
    other.load_state_dict(optimizer.state_dict())
    train_net(net, other, 1)
    written = other.state_dict()["param_groups"][0]
    assert written.get("param_names") == (NAMES if from_named or to_named else None)


@over_inputs()
@NAMED
def test_a_file_gives_back_the_same_state(case: Case, named: bool) -> None:
    problem = Regression()
    optimizer = build(problem.named if named else problem.params, case)
    problem.train(optimizer, 1)
    state = optimizer.state_dict()
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same_dict(torch.load(file, weights_only=weights_only), state)


@few_eager
def test_a_step_count_that_is_a_number_can_be_loaded(case: Case) -> None:
    problem, plain = Regression(), Regression()
    optimizer, other = build(problem.params, case), build(plain.params, case)
    problem.train(optimizer, 2)
    plain.train(other, 2)
    state = deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = entry["step"].item()
    optimizer.load_state_dict(state)
    problem.train(optimizer, 1)
    plain.train(other, 1)
    assert_same(clones(problem.params), clones(plain.params))
    assert optimizer.state[problem.weight]["step"] == 3


@few_eager
def test_state_of_a_capturable_optimizer_can_be_loaded_on_the_cpu(case: Case) -> None:
    """A checkpoint of a capturable run on a GPU, read with map_location="cpu"."""
    problem, plain = Regression(), Regression()
    optimizer, other = build(problem.params, case), build(plain.params, case)
    problem.train(optimizer, 1)
    plain.train(other, 1)
    state = deepcopy(optimizer.state_dict())
    state["param_groups"][0]["capturable"] = True
    continued = build(problem.params, case, capturable=True)
    continued.load_state_dict(state)
    if case.entry.cls is AngularAdamW:  # as in torch's test: AdamW refuses to step with it
        continued.param_groups[0]["capturable"] = False
    problem.train(continued, 1)
    plain.train(other, 1)
    assert_same(clones(problem.params), clones(plain.params))


@over_inputs(entries=[ADAMO_ENTRY])
def test_state_exists_before_the_first_step_of_adamo(case: Case) -> None:
    net = nn.Linear(5, 5)
    optimizer = build(net.parameters(), case)
    assert [len(optimizer.state[p]) > 0 for p in net.parameters()] == [True, True]
    keys = [optimizer.state[p].keys() for p in net.parameters()]
    net(torch.rand(2, 5)).sum().backward()
    optimizer.step()
    assert [optimizer.state[p].keys() for p in net.parameters()] == keys
    assert all((state["step"] == 1).all() for state in optimizer.state.values())


@over_inputs(entries=[ANGULAR_ENTRY, TURNING_ENTRY])
def test_state_begins_with_the_first_gradient_as_in_adamw(case: Case) -> None:
    """A weight that turns has one buffer and three numbers."""
    net = nn.Linear(5, 5)
    optimizer = build(net.parameters(), case)
    optimizer.step()
    assert not optimizer.state
    net(torch.rand(2, 5)).sum().backward()
    optimizer.step()
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    turning = {"step", "exp_avg", "mean_square", "initial_norm"}
    assert set(optimizer.state[net.weight]) == (turning if case.entry.turns else adamw)
    assert set(optimizer.state[net.bias]) == adamw
    assert all(state["step"] == 1 for state in optimizer.state.values())


@over_inputs()
def test_a_state_saved_before_the_first_step_starts_the_same_run(case: Case) -> None:
    one, other = Regression(), Regression()
    optimizer = build(one.params, case)
    loaded = build(other.params, case)
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))
    one.train(optimizer, 2)
    other.train(loaded, 2)
    assert_same(clones(other.params), clones(one.params))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@over_entries()
def test_state_can_be_loaded_for_parameters_of_another_dtype(
    entry: Entry, dtype: torch.dtype
) -> None:
    """AdamO's buffers are float32 at least; AdamW's have the dtype of the parameter."""
    problem, cast = Regression(), Regression(dtype=dtype)
    optimizer = entry.make(problem.params)
    problem.train(optimizer, 3)
    with torch.no_grad():
        for p, q in zip(cast.params, problem.params, strict=True):
            p.copy_(q)
    other = entry.make(cast.params)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    problem.train(optimizer, 2)
    cast.train(other, 2)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-3
    for p, q in zip(cast.params, problem.params, strict=True):
        assert p.dtype == dtype
        assert_close(p.float(), q.float(), rtol=tolerance, atol=tolerance)
        wide = entry.cls is AdamO and dtype != torch.float64
        assert other.state[p]["exp_avg"].dtype == (torch.float32 if wide else dtype)
        numbers = [x for key, x in other.state[p].items() if key in ("tau", "mean_square")]
        assert all(x.dtype == torch.float64 for x in numbers)


@pytest.mark.parametrize("reload", ["same optimizer", "other optimizer"])
@over_entries()
def test_groups_of_another_number_or_size_are_refused(entry: Entry, reload: str) -> None:
    problem = Regression()
    whole = entry.make(problem.params)
    parts = entry.make([{"params": [problem.weight]}, {"params": [problem.bias]}])
    half = entry.make([problem.weight])
    target = whole if reload == "same optimizer" else entry.make(Regression().params)
    for other in (parts, half):
        with pytest.raises(ValueError, match="this state_dict has groups of"):
            target.load_state_dict(other.state_dict())


# ---- hooks ----------------------------------------------------------------------------------


def parameters_for_hooks() -> list[torch.Tensor]:
    return [torch.tensor([1.0, 1.0]), torch.ones(2, 2)]


@few
def test_step_hooks_run_until_removed(case: Case) -> None:
    optimizer = build(parameters_for_hooks(), case)
    calls: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    optimizer.step()
    assert calls == ["before", "after"] * 2
    before.remove()
    optimizer.step()
    assert calls == ["before", "after"] * 2 + ["after"]
    after.remove()
    optimizer.step()
    assert calls == ["before", "after"] * 2 + ["after"]


@few
def test_global_hooks_surround_those_of_the_optimizer(case: Case) -> None:
    params, calls = parameters_for_hooks(), []
    optimizers = [build(params, case), torch.optim.SGD(params)]
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
        register_optimizer_step_post_hook(lambda *_: calls.append(3)),
    ]
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(lambda *_: calls.append(1)))
        handles.append(optimizer.register_step_post_hook(lambda *_: calls.append(2)))
    try:
        for optimizer in (*optimizers, optimizers[0]):
            optimizer.step()
        assert calls == [0, 1, 2, 3] * 3
    finally:
        for handle in handles:
            handle.remove()
    for optimizer in optimizers:
        optimizer.step()
    assert calls == [0, 1, 2, 3] * 3


@over_entries()
def test_a_step_hook_sees_and_replaces_the_arguments(entry: Entry) -> None:
    optimizer = entry.make(Regression().params)
    seen: list[Any] = []

    def before(opt: Any, args: Any, kwargs: Any) -> Any:
        seen.append((opt, args, kwargs))
        return (opt, lambda: "replaced"), kwargs

    optimizer.register_step_pre_hook(before)
    assert optimizer.step(lambda: "given") == "replaced"
    ((opt, args, _),) = seen
    assert opt is optimizer
    assert args[1]() == "given"


@few
def test_state_dict_hooks_see_and_replace_what_is_written(case: Case) -> None:
    optimizer = build([nn.Parameter(torch.rand(2, 3))], case)
    before = optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(mark=1))
    assert optimizer.state_dict()["state"]["mark"] == 1

    def after(opt: Any, written: dict[str, Any]) -> dict[str, Any]:
        return {**written, "found": written["state"].pop("mark", None)}

    optimizer.register_state_dict_post_hook(after)
    written = optimizer.state_dict()
    assert written["found"] == 1
    assert "mark" not in written["state"]
    before.remove()
    optimizer.state.pop("mark")
    assert optimizer.state_dict()["found"] is None
    optimizer.register_state_dict_post_hook(lambda _, written: {"wrapped": written})
    assert [*optimizer.state_dict()] == ["wrapped"]


@few
def test_load_hooks_run_in_order_and_may_replace_what_is_read(case: Case) -> None:
    optimizer = build([nn.Parameter(torch.rand(2, 3))], case)
    written = optimizer.state_dict()

    def change(opt: Any, read: dict[str, Any]) -> None:
        read["param_groups"][0]["lr"] = 0.002

    def replace(opt: Any, read: dict[str, Any]) -> dict[str, Any]:
        read = deepcopy(read)
        read["param_groups"][0]["lr"] = 0.003
        return read

    first = optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(written)
    assert optimizer.param_groups[0]["lr"] == 0.002
    earlier = optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(written)
    assert optimizer.param_groups[0]["lr"] == 0.002  # `change` had the last word
    earlier.remove()
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(written)
    assert optimizer.param_groups[0]["lr"] == 0.003
    first.remove()


@few
def test_load_hooks_run_after_loading_until_removed(case: Case) -> None:
    optimizer = build([nn.Parameter(torch.rand(2, 3))], case)
    written = deepcopy(optimizer.state_dict())
    written["param_groups"][0]["lr"] = 0.003
    seen: list[float] = []
    handle = optimizer.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.param_groups[0]["lr"])
    )
    optimizer.load_state_dict(written)
    handle.remove()
    optimizer.load_state_dict(written)
    assert seen == [0.003]


@over_entries()
def test_state_a_load_hook_replaces_is_the_state_that_is_used(entry: Entry) -> None:
    """The buffers come from the dictionary as the hooks left it, not as it was given."""
    problem = Regression()
    optimizer = entry.make(problem.params)
    problem.train(optimizer, 2)

    def double(opt: Any, read: dict[str, Any]) -> dict[str, Any]:
        read = deepcopy(read)
        for state in read["state"].values():
            state["exp_avg"] = 2 * state["exp_avg"]
            state["step"] = state["step"] + 5
        return read

    expected = 2 * optimizer.state[problem.weight]["exp_avg"]
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(optimizer.state[problem.weight]["exp_avg"], expected)
    assert [int(optimizer.state[p]["step"]) for p in problem.params] == [7, 7]


# ---- copies ---------------------------------------------------------------------------------


def public_attributes(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for name in vars(optimizer) if not name.startswith("_")}


def assert_continues_alike(problem: Regression, optimizer: Any, copy: Any) -> None:
    """The same gradients move both optimizers' parameters alike, each its own."""
    params, copied = optimizer.param_groups[0]["params"], copy.param_groups[0]["params"]
    before = clones(copied)
    problem.train(optimizer, 1)
    assert_same(clones(copied), before)
    for p, q in zip(params, copied, strict=True):
        assert p is not q
        q.grad = p.grad.clone()
    copy.step()
    assert_same(clones(copied), clones(params))
    assert_same_dict(copy.state_dict(), optimizer.state_dict())


@over_inputs()
def test_a_deepcopy_has_all_public_attributes_and_continues_alike(case: Case) -> None:
    problem = Regression()
    optimizer = build(problem.named, case)
    problem.train(optimizer, 2)
    copy = deepcopy(optimizer)
    assert public_attributes(copy) == public_attributes(optimizer)
    assert copy.defaults.keys() == optimizer.defaults.keys()
    assert_continues_alike(problem, optimizer, copy)


@few_eager
def test_a_pickle_continues_alike(case: Case) -> None:
    problem = Regression()
    optimizer = build(problem.named, case)
    problem.train(optimizer, 2)
    assert_continues_alike(problem, optimizer, pickle.loads(pickle.dumps(optimizer)))


@over_entries()
@pytest.mark.parametrize(
    "clone", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_takes_new_groups(entry: Entry, clone: Callable[[Any], Any]) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params, lr=0.005)
    problem.train(optimizer, 1)
    copy = clone(optimizer)
    new = nn.Parameter(torch.ones(2, 2))
    copy.add_param_group({"params": [new]})
    assert copy.param_groups[1]["lr"] == 0.005
    assert copy.param_groups[1].keys() >= optimizer.defaults.keys()
    new.grad = torch.ones(2, 2)
    copy.step()
    assert int(copy.state[new]["step"]) == 1
