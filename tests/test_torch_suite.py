"""PyTorch's optimizer suite: errors, direction, groups, options, closures.

Complex, large and mixed tensors are in ``test_torch_suite_tensors.py``, state dictionaries, hooks
and copies in ``_state``, schedulers and weight averaging in ``_schedulers``, derivatives through a
step in ``_differentiable``, ``torch.compile`` in ``_compile``, CUDA in ``_gpu``.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from adamo_optim import AdamO, AngularAdamW
from torch_kit import (
    ADAMO_ENTRY,
    ANGULAR_ENTRY,
    CLIQUEY,
    ENTRIES,
    FEW,
    FOREACH,
    SCHEDULES,
    TURNING_ENTRY,
    Case,
    Entry,
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    Regression,
    assert_same,
    build,
    clones,
    error_inputs,
    gradients,
    option_names,
    over_backends,
    over_entries,
    over_inputs,
    set_gradients,
    slug,
    step_schedulers,
    steps_of,
)

eager = over_backends(skip=("differentiable",))
everywhere = over_backends()
few = over_backends(skip=("differentiable",), only=FEW)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- the kit --------------------------------------------------------------------------------


@over_entries()
def test_inputs_cover_every_option(entry: Entry) -> None:
    assert set().union(*entry.inputs.values()) == option_names(entry) - set(CLIQUEY)


# ---- AngularAdamW without a rule is AdamW ---------------------------------------------------


@over_backends(entries=[ANGULAR_ENTRY])
def test_without_a_rule_every_step_is_that_of_adamw(case: Case) -> None:
    """Bit for bit, the state included, with torch's own class under the same flags."""
    ours, theirs = Regression(), Regression()
    params: list[list[Tensor]] = [list(problem.params) for problem in (ours, theirs)]
    if case.kwargs["differentiable"]:
        params = [[p.clone() for p in those] for those in params]
    own = ("angular_rms", "max_angle", "second_moment")
    options = {k: v for k, v in case.kwargs.items() if k not in own}
    optimizers = build(params[0], case), torch.optim.AdamW(params[1], **deepcopy(options))
    for seed in range(20):
        for those, optimizer in zip(params, optimizers, strict=True):
            grads: list[Tensor | None] = list(gradients(those, seed))
            if seed == 2 and not case.kwargs["differentiable"]:
                grads[1] = None
            set_gradients(those, grads)
            optimizer.step()
    assert_same(clones(params[0]), clones(params[1]))
    for p, q in zip(*params, strict=True):
        assert optimizers[0].state[p].keys() == optimizers[1].state[q].keys()
        assert_same(dict(optimizers[0].state[p]), dict(optimizers[1].state[q]))


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        pytest.param(entry, error, id=slug(f"{entry.name} & {error.optimizer_error_input.desc}"))
        for entry in ENTRIES
        for error in error_inputs(entry, "cpu", torch.float32)
        # torch 2.15 warns of a bare set, in which nothing can be declared to turn
        if not (entry.turns and issubclass(error.error_type, Warning))
    ],
)
def test_errors(entry: Entry, error: ErrorOptimizerInput) -> None:
    case = error.optimizer_error_input
    expects = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        params = Regression().params if case.params is None else case.params
        with expects(error.error_type, match=error.error_regex):
            entry.make(params, **case.kwargs)
    else:
        optimizer = entry.make(case.params, **case.kwargs)
        with expects(error.error_type, match=error.error_regex):
            optimizer.step()


@over_entries()
def test_error_inputs_cover_every_option(entry: Entry) -> None:
    named = {
        name
        for error in error_inputs(entry, "cpu", torch.float32)
        if error.error_type is ValueError
        for name in error.optimizer_error_input.kwargs
    }
    assert named == option_names(entry)


WORSE: list[tuple[str, Any, str]] = [
    ("lr", -1.0, "lr must be >= 0, got -1.0"),
    ("betas", (0.9, 1.0), "betas\\[1\\] must be >= 0 and < 1, got 1.0"),
    ("betas", 0.9, "betas must be a pair of numbers, got 0.9"),
    ("weight_decay", float("nan"), "weight_decay must be finite and >= 0, got nan"),
    ("rule", "other", "rule must be one of .*, got 'other'"),
    ("radial_lr", -1.0, "radial_lr must be >= 0 \\(or None\\), got -1.0"),
    ("previous_gradient", "other", "previous_gradient must be one of .*, got 'other'"),
    ("guard", None, "guard must be True or False, got None"),
    ("angular_rms", 0.0, "angular_rms must be > 0 \\(or None\\), got 0.0"),
    ("max_angle", 2.0, "max_angle must be > 0 and <= 1.5708, got 2.0"),
]


@FOREACH
@pytest.mark.parametrize(
    ("entry", "name", "value", "message"),
    [
        pytest.param(entry, *worse, id=slug(f"{entry.name} & {worse[0]}={worse[1]}"))
        for entry in ENTRIES
        for worse in WORSE
        if worse[0] in option_names(entry) | {"rule"}
        # what torch's code reads it does not check in a step
        if entry.turns or entry.cls is AdamO or worse[0] == "rule"
        if not entry.turns or worse[0] != "weight_decay"
    ],
)
def test_an_option_changed_for_the_worse_is_found_by_the_step(
    entry: Entry, name: str, value: Any, message: str, foreach: bool
) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params, foreach=foreach)
    problem.train(optimizer, 2)
    before = clones(problem.params)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(clones(problem.params), before)


@over_entries()
def test_backends_that_exclude_each_other_are_found_by_the_step(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params, foreach=True)
    problem.backward()
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        optimizer.step()


@over_entries([ADAMO_ENTRY, TURNING_ENTRY])  # AdamW takes a step for each time it is given
def test_a_parameter_given_twice_is_stepped_once(entry: Entry) -> None:
    twice, once = Regression(), Regression()
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = entry.make([twice.weight, twice.weight, twice.bias])
    twice.train(optimizer, 3)
    once.train(entry.make([once.weight, once.bias]), 3)
    assert_same(clones(twice.params), clones(once.params))


@over_entries()
def test_a_refused_group_leaves_the_optimizer_as_it_was(entry: Entry) -> None:
    problem, other = Regression(), Regression()
    optimizer, optimizer_of_other = entry.make([problem.weight]), entry.make([other.weight])
    for bad in (
        {"params": [problem.weight]},
        {"params": [problem.bias], "lr": -1.0},
        {"params": [torch.arange(4).view(2, 2)], "rule": "scale_invariant"},
    ):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    problem.train(optimizer, 2)
    other.train(optimizer_of_other, 2)
    assert_same(problem.weight, other.weight)


# ---- direction ------------------------------------------------------------------------------


def assert_right_direction(
    problem: Regression, optimizer: torch.optim.Optimizer, schedulers: list[Any], steps: int = 10
) -> None:
    before = problem.loss().item()
    for _ in range(steps):
        loss = problem.backward()
        optimizer.step()
        step_schedulers(schedulers, loss)
    after = problem.loss().item()
    maximize = optimizer.param_groups[0]["maximize"]
    assert (after > before) if maximize else (after < before), (before, after)


@over_inputs()
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_for_loop_goes_in_the_right_direction(case: Case, contiguous: bool) -> None:
    problem = Regression(contiguous=contiguous)
    assert problem.weight.is_contiguous() == contiguous
    assert_right_direction(problem, build(problem.params, case, foreach=False), [])


@over_inputs(only=FEW)
@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_for_loop_goes_in_the_right_direction_with_schedulers(case: Case, schedule: int) -> None:
    problem = Regression(contiguous=schedule % 2 == 0)
    optimizer = build(problem.params, case, foreach=False)
    schedulers = [make(optimizer) for make in SCHEDULES[schedule]]
    assert_right_direction(problem, optimizer, schedulers, steps=5)


@FOREACH
@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
@over_entries()
def test_groups_with_schedulers_go_in_the_right_direction(
    entry: Entry, schedule: int, foreach: bool
) -> None:
    problem = Regression()
    groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}]
    optimizer = entry.make(groups, foreach=foreach)
    schedulers = [make(optimizer) for make in SCHEDULES[schedule]]
    assert_right_direction(problem, optimizer, schedulers)


@over_backends(skip=("differentiable", "fused"))
def test_strided_parameters_step_like_contiguous_ones(case: Case) -> None:
    one, other = Regression(contiguous=True), Regression(contiguous=False)
    one.train(build(one.params, case), 4)
    other.train(build(other.params, case), 4)
    assert_close(one.params, other.params)


def test_fused_is_refused_for_strided_parameters() -> None:
    """Not where AngularAdamW follows AdamW: torch's fused kernel goes over memory."""
    refused = pytest.raises(RuntimeError, match="dense tensors only, and this one is strided")
    with refused:
        AdamO(Regression(contiguous=False).params, fused=True)
    problem = Regression(contiguous=False)
    groups = [{"params": problem.params, "rule": "scale_invariant"}]
    with refused:
        problem.train(AngularAdamW(groups, fused=True), 1)


@pytest.mark.parametrize(
    "layout",
    [
        "strided",
        "channels last",
        "channels last from step 1",
        "channels last from step 3",
        "expanded gradient",
    ],
)
@over_entries()
def test_the_default_form_takes_any_layout(entry: Entry, layout: str) -> None:
    """torch's fused kernel for CPUs is wrong in silence where the layouts differ."""
    change = int(layout[-1]) if "step" in layout else 5
    ends = []
    for flags in ({}, {"foreach": False}):
        source = torch.Generator().manual_seed(3)
        weight, bias = (torch.randn(shape, generator=source) for shape in ((6, 4, 3, 3), (6, 2)))
        if layout == "channels last":
            weight = weight.contiguous(memory_format=torch.channels_last)
        bias = bias[:, 0] if layout == "strided" else bias[:, 0].contiguous()
        params = [nn.Parameter(weight), nn.Parameter(bias)]
        optimizer = entry.make(params, **flags)
        for step in range(5):
            if step == change:
                params[0].grad = None
                params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
            params[0].grad = torch.randn(6, 4, 3, 3, generator=source)
            if step >= change:
                params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
            params[1].grad = torch.randn(6, generator=source)
            if layout == "expanded gradient":
                params[0].grad = torch.randn(3, generator=source).expand(6, 4, 3, 3)
                params[1].grad = torch.randn(1, generator=source).expand(6)
            optimizer.step()
        ends.append(clones(params))
    assert_close(*ends)


# ---- groups ---------------------------------------------------------------------------------


@few
def test_groups_with_their_own_weight_decay(case: Case) -> None:
    problem = Regression()
    groups = [
        {"params": [problem.weight], **case.kwargs},
        {"params": [problem.bias], **case.kwargs, "weight_decay": 0.0},
    ]
    assert_right_direction(problem, case.entry.make(groups), [], steps=5)


@few
def test_groups_with_their_own_lr(case: Case) -> None:
    problem, irrelevant = Regression(), nn.Parameter(torch.randn(3, 2))
    before = irrelevant.detach().clone()
    options = {"lr": 1e-3, **build(problem.params, case).param_groups[0]}
    options |= {"params": problem.params}
    optimizer = case.entry.make([options, {"params": [irrelevant]}], lr=1e-28)
    irrelevant.grad = torch.rand_like(irrelevant)
    assert_right_direction(problem, optimizer, [], steps=5)
    assert_close(irrelevant.detach(), before, rtol=1e-7, atol=0)
    assert steps_of(optimizer, irrelevant) == 5


@few
def test_groups_are_optimizers_of_their_own(case: Case) -> None:
    together, apart = Regression(), Regression()
    options = [{"lr": 2e-3}, {"lr": 5e-4, "betas": (0.8, 0.95), "eps": 1e-6}]
    groups = [{"params": [p], **o} for p, o in zip(together.params, options, strict=True)]
    optimizer = build(groups, case)
    optimizers = [build([p], case, **o) for p, o in zip(apart.params, options, strict=True)]
    for _ in range(3):
        together.backward()
        apart.backward()
        optimizer.step()
        for one in optimizers:
            one.step()
    assert_same(clones(together.params), clones(apart.params))


# ---- options as tensors ---------------------------------------------------------------------


@few
@pytest.mark.parametrize("dims", [0, 1, 2], ids="{}-dim".format)
def test_tensor_lr_steps_like_a_float(case: Case, dims: int) -> None:
    """Where torch's AdamW takes a tensor."""
    if dims and case.entry.cls is AngularAdamW and torch.__version__ < (2, 8):
        pytest.skip("torch's AdamW multiplies by such a tensor, and shapes do not fit")
    lr = torch.full((1,) * dims, 2e-3, dtype=torch.float64)
    if not case.entry.is_legal({**case.kwargs, "lr": lr}, "cpu"):
        with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
            build(Regression().params, case, lr=lr)
        return
    with_tensor, with_float = Regression(), Regression()
    with_tensor.train(build(with_tensor.params, case, lr=lr), 2)
    with_float.train(build(with_float.params, case, lr=2e-3), 2)
    # torch computes 1 − β₁ᵗ of tensor betas in their precision, and lr/(1 − β₁ᵗ) in the wider one
    torchs = case.entry.cls is AngularAdamW and isinstance(
        case.kwargs.get("betas", (0,))[0], Tensor
    )
    compare = assert_close if torchs else assert_same
    compare(clones(with_tensor.params), clones(with_float.params))
    assert_same(lr, torch.full((1,) * dims, 2e-3, dtype=torch.float64))


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
@over_backends(only=("default",), skip=("differentiable",))
def test_tensor_lr_is_scheduled_like_a_float(case: Case, schedule: int) -> None:
    tensor = torch.tensor(0.01, dtype=torch.float64)
    if not case.entry.is_legal({**case.kwargs, "lr": tensor}, "cpu"):
        return  # refused, see above
    ends = []
    for lr in (0.01, tensor):
        problem = Regression()
        optimizer = build(problem.params, case, lr=lr)
        schedulers = [make(optimizer) for make in SCHEDULES[schedule]]
        assert_right_direction(problem, optimizer, schedulers, steps=11)
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        assert float(optimizer.param_groups[0]["lr"]) < 0.01 or schedule == 1
        ends.append(clones(problem.params))
    assert_close(*ends)


NUMBERS: dict[str, dict[str, Any]] = {
    "AdamO": {
        "lr": 2e-3,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 1e-3,
        "radial_lr_ratio": 50.0,
        "radial_beta": 0.7,
        "curvature_target": 2.0,
        "curvature_beta": 0.6,
        "low_dim_scale": 0.5,
        "delta": 0.3,
        "wd_ratio": 0.5,
    },
    "turning": {"lr": 2e-3, "betas": (0.8, 0.95), "angular_rms": 0.05, "max_angle": 0.1},
}


@pytest.mark.parametrize(
    ("entry", "flags"),
    [
        (ADAMO_ENTRY, {"foreach": False}),
        (ADAMO_ENTRY, {"foreach": True}),
        (ADAMO_ENTRY, {"fused": True}),
        (TURNING_ENTRY, {"foreach": False}),
        (TURNING_ENTRY, {"fused": True}),
    ],
    ids=lambda x: getattr(x, "name", None) or slug(str(x)),
)
def test_every_number_may_be_a_tensor(entry: Entry, flags: dict[str, bool]) -> None:
    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    numbers = NUMBERS[entry.name]
    tensors = {k: tensor(v) for k, v in numbers.items() if k != "betas"}
    tensors["betas"] = (tensor(0.8), tensor(0.95))
    ends = []
    for options in (numbers, tensors):
        problem = Regression()
        problem.train(entry.make(problem.params, **flags, **options), 4)
        ends.append(clones(problem.params))
    assert_same(*ends)


# ---- steps that must do nothing, or only one thing ------------------------------------------


@over_backends(only=FEW)
def test_a_step_without_gradients_changes_nothing(case: Case) -> None:
    params = [torch.randn(2, 3), torch.randn(3), torch.randn(2, 3).requires_grad_()]
    before = clones(params)
    optimizer = build(params, case)
    loss = torch.tensor([1.0])
    assert optimizer.step(lambda: loss) is loss
    assert_same([p.detach() for p in params], before)
    assert all(steps_of(optimizer, p) == 0 for p in params)


@everywhere
def test_a_step_with_zero_gradients_and_no_decay_changes_nothing(case: Case) -> None:
    start = [torch.randn(5, 1), torch.randn(4, 3), torch.randn(3)]
    params = [p.clone().requires_grad_() for p in start]
    if case.kwargs["differentiable"]:
        params = [p.clone() for p in params]  # not leaves: a differentiable step writes into them
    optimizer = build(params, case, weight_decay=0.0)
    for _ in range(2):
        set_gradients(params, [torch.zeros_like(p) for p in params])
        optimizer.step()
    assert_same([p.detach() for p in params], start)


@over_inputs()
def test_an_optimizer_can_be_printed(case: Case) -> None:
    text = repr(build(Regression().params, case))
    assert text.startswith(f"{case.entry.cls.__name__} (\nParameter Group 0\n")
    assert all(f"    {name}: " in text for name in case.kwargs)


@over_inputs()
def test_maximize_is_descent_on_negated_gradients(case: Case) -> None:
    up, down = Regression(), Regression()
    maximize = not case.kwargs.get("maximize", False)
    up_optimizer = build(up.params, case, maximize=maximize)
    down_optimizer = build(down.params, case)
    for seed in range(4):
        grads = gradients(up.params, seed)
        set_gradients(up.params, grads)
        set_gradients(down.params, [-g for g in grads])
        up_optimizer.step()
        down_optimizer.step()
    assert_same(clones(up.params), clones(down.params))


@over_backends(only=(*FEW, "rows"))
def test_gradients_are_never_written_to(case: Case) -> None:
    problem = Regression()
    params: list[Tensor] = list(problem.params)
    if case.kwargs["differentiable"]:
        params = [p.clone() for p in params]
    optimizer = build(params, case)
    for seed in range(3):
        grads = gradients(params, seed)
        set_gradients(params, grads)
        held = [p.grad for p in params]
        versions = [g._version for g in held]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, held, strict=True))
        assert_same([g.detach() for g in held], grads)
        assert [g._version for g in held] == versions


# ---- closures -------------------------------------------------------------------------------


@few
def test_a_closure_is_called_once_with_gradients_enabled(case: Case) -> None:
    problem, plain = Regression(), Regression()
    optimizer = build(problem.params, case)
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return problem.backward()

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(2)]
    assert calls == [True, True]
    plain_optimizer = build(plain.params, case)
    for loss in losses:
        assert_same(loss.detach(), plain.backward().detach())
        assert plain_optimizer.step() is None
    assert_same(clones(problem.params), clones(plain.params))


@over_entries()
def test_an_error_in_the_closure_leaves_everything_as_it_was(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params)
    problem.train(optimizer, 1)
    before = clones(problem.params)

    def closure() -> Tensor:
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(closure)
    assert_same(clones(problem.params), before)
    assert optimizer.state[problem.weight]["step"] == 1


# ---- gradient scaling -----------------------------------------------------------------------


@over_backends(only=("default",), skip=("differentiable",))
def test_a_scaler_that_found_an_infinity_takes_no_step(case: Case) -> None:
    problem, plain = Regression(), Regression()
    optimizer = build(problem.params, case)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = clones(problem.params)
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(problem.loss() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        if scale != 1.0:
            assert_same(clones(problem.params), before)
            assert [steps_of(optimizer, p) for p in problem.params] == [0, 0]
    plain.train(build(plain.params, case), 1)
    assert_close(problem.params, plain.params)


# ---- capturable and strong decay ------------------------------------------------------------


@FOREACH
def test_capturable_changes_no_step_and_does_not_warn_on_the_cpu(foreach: bool) -> None:
    ends = []
    for capturable in (False, True):
        problem = Regression()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            problem.train(AdamO(problem.params, capturable=capturable, foreach=foreach), 3)
        assert not caught
        ends.append(clones(problem.params))
    assert_same(*ends)


def test_capturable_is_refused_on_the_cpu_where_adamw_refuses_it() -> None:
    for entry in (ANGULAR_ENTRY, TURNING_ENTRY):
        problem = Regression()
        optimizer = entry.make(problem.params, capturable=True, foreach=False)
        problem.backward()
        with pytest.raises(AssertionError, match="If capturable=True, params and state_steps"):
            optimizer.step()


@FOREACH
@pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")
def test_strong_decay_shrinks_a_weight_and_leaves_a_bias(foreach: bool) -> None:
    problem = Regression()
    optimizer = AdamO(problem.params, weight_decay=0.5, foreach=foreach)
    before = clones(problem.params)
    set_gradients(problem.params, [torch.zeros_like(p) for p in problem.params])
    optimizer.step()
    assert_close(problem.weight.detach(), before[0] * (1 - 0.5 * 100 * 1e-3))
    assert_same(problem.bias.detach(), before[1])


def test_decay_leaves_a_turning_weight_and_shrinks_a_bias() -> None:
    problem = Regression()
    optimizer = TURNING_ENTRY.make(problem.params, weight_decay=0.5)
    before = clones(problem.params)
    set_gradients(problem.params, [torch.zeros_like(p) for p in problem.params])
    optimizer.step()
    assert_same(problem.weight.detach(), before[0])
    assert_close(problem.bias.detach(), before[1] * (1 - 0.5 * 1e-3))
