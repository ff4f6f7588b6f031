"""PyTorch's optimizer suite on AdamO: errors, direction, groups, options, closures.

Complex, large and mixed tensors are in ``test_torch_suite_tensors.py``, state dictionaries, hooks
and copies in ``_state``, schedulers and weight averaging in ``_schedulers``, derivatives through a
step in ``_differentiable``, ``torch.compile`` in ``_compile``, CUDA in ``_gpu``.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from adamo_optim import AdamO
from torch_kit import (
    CLIQUEY,
    FEW,
    FOREACH,
    INFO,
    INPUTS,
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    Regression,
    assert_same,
    build,
    clones,
    gradients,
    over_backends,
    over_inputs,
    set_gradients,
    slug,
    step_schedulers,
)

eager = over_backends(skip=("differentiable",))
everywhere = over_backends()
few = over_backends(skip=("differentiable",), only=FEW)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- the kit --------------------------------------------------------------------------------


def test_inputs_cover_every_option() -> None:
    options = set(inspect.signature(AdamO).parameters) - {"params", *CLIQUEY}
    assert set().union(*INPUTS.values()) == options


@over_inputs()
def test_inputs_leave_the_backend_to_the_tests(case: OptimizerInput) -> None:
    assert not case.kwargs.keys() & set(CLIQUEY)


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    INFO.optim_error_inputs_func("cpu", torch.float32),
    ids=lambda error: slug(error.optimizer_error_input.desc),
)
def test_errors(error: ErrorOptimizerInput) -> None:
    case = error.optimizer_error_input
    expects = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with expects(error.error_type, match=error.error_regex):
            build(case.params, case)
    else:
        optimizer = build(case.params, case)
        with expects(error.error_type, match=error.error_regex):
            optimizer.step()


def test_error_inputs_cover_every_option() -> None:
    named = {
        name
        for error in INFO.optim_error_inputs_func("cpu", torch.float32)
        if error.error_type is ValueError
        for name in error.optimizer_error_input.kwargs
    }
    assert named == set(inspect.signature(AdamO).parameters) - {"params"}


@FOREACH
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", -1.0, "lr must be >= 0, got -1.0"),
        ("betas", (0.9, 1.0), "betas\\[1\\] must be >= 0 and < 1, got 1.0"),
        ("weight_decay", float("nan"), "weight_decay must be finite and >= 0, got nan"),
        ("radial_lr", -1.0, "radial_lr must be >= 0 \\(or None\\), got -1.0"),
        (
            "tangential",
            "other",
            "tangential must be one of 'additive', 'angular', 'auto', got 'other'",
        ),
        ("previous_gradient", "other", "previous_gradient must be one of .*, got 'other'"),
        ("second_moment", "other", "second_moment must be one of .*, got 'other'"),
        ("rule", "other", "rule must be one of .*, got 'other'"),
        ("guard", None, "guard must be True or False, got None"),
        ("betas", 0.9, "betas must be a pair of numbers, got 0.9"),
    ],
    ids=lambda x: slug(str(x))[:20],
)
def test_an_option_changed_for_the_worse_is_found_by_the_step(
    name: str, value: Any, message: str, foreach: bool
) -> None:
    problem = Regression()
    optimizer = AdamO(problem.params, foreach=foreach)
    problem.train(optimizer, 2)
    before = clones(problem.params)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(clones(problem.params), before)


def test_backends_that_exclude_each_other_are_found_by_the_step() -> None:
    problem = Regression()
    optimizer = AdamO(problem.params, foreach=True)
    problem.backward()
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        optimizer.step()


def test_a_parameter_given_twice_is_stepped_once() -> None:
    twice, once = Regression(), Regression()
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = AdamO([twice.weight, twice.weight, twice.bias])
    twice.train(optimizer, 3)
    once.train(AdamO([once.weight, once.bias]), 3)
    assert_same(clones(twice.params), clones(once.params))


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    problem, other = Regression(), Regression()
    optimizer = AdamO([problem.weight])
    optimizer_of_other = AdamO([other.weight])
    for bad in (
        {"params": [problem.weight]},
        {"params": [problem.bias], "lr": -1.0},
        {"params": [torch.arange(3)]},
    ):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    problem.train(optimizer, 2)
    other.train(optimizer_of_other, 2)
    assert_same(problem.weight, other.weight)


# ---- direction ------------------------------------------------------------------------------


def assert_right_direction(
    problem: Regression, optimizer: AdamO, schedulers: list[Any], steps: int = 10
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
def test_for_loop_goes_in_the_right_direction(case: OptimizerInput, contiguous: bool) -> None:
    problem = Regression(contiguous=contiguous)
    assert problem.weight.is_contiguous() == contiguous
    assert_right_direction(problem, build(problem.params, case, foreach=False), [])


@over_inputs()
@pytest.mark.parametrize("schedule", range(len(INFO.scheduler_inputs)))
def test_for_loop_goes_in_the_right_direction_with_schedulers(
    case: OptimizerInput, schedule: int
) -> None:
    problem = Regression(contiguous=schedule % 2 == 0)
    optimizer = build(problem.params, case, foreach=False)
    schedulers = [make(optimizer) for make in INFO.scheduler_inputs[schedule]]
    assert_right_direction(problem, optimizer, schedulers, steps=5)


@FOREACH
@pytest.mark.parametrize("schedule", range(len(INFO.scheduler_inputs)))
def test_groups_with_schedulers_go_in_the_right_direction(schedule: int, foreach: bool) -> None:
    problem = Regression()
    groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}]
    optimizer = AdamO(groups, foreach=foreach)
    schedulers = [make(optimizer) for make in INFO.scheduler_inputs[schedule]]
    assert_right_direction(problem, optimizer, schedulers)


@over_inputs()
def test_strided_parameters_step_like_contiguous_ones(case: OptimizerInput) -> None:
    for foreach in (False, True):
        one, other = Regression(contiguous=True), Regression(contiguous=False)
        one.train(build(one.params, case, foreach=foreach), 4)
        other.train(build(other.params, case, foreach=foreach), 4)
        assert_close(one.params, other.params)


# ---- groups ---------------------------------------------------------------------------------


@eager
def test_groups_with_their_own_weight_decay(case: OptimizerInput) -> None:
    problem = Regression()
    groups = [
        {"params": [problem.weight], **case.kwargs},
        {"params": [problem.bias], **case.kwargs, "weight_decay": 0.0},
    ]
    assert_right_direction(problem, AdamO(groups), [], steps=5)


@eager
def test_groups_with_their_own_lr(case: OptimizerInput) -> None:
    problem, irrelevant = Regression(), nn.Parameter(torch.randn(3, 2))
    before = irrelevant.detach().clone()
    options = {"lr": 1e-3, **build(problem.params, case).param_groups[0]}
    options |= {"params": problem.params, "rule": "auto"}
    optimizer = AdamO([options, {"params": [irrelevant]}], lr=1e-28)
    irrelevant.grad = torch.rand_like(irrelevant)
    assert_right_direction(problem, optimizer, [], steps=5)
    assert_close(irrelevant.detach(), before, rtol=1e-7, atol=0)
    assert optimizer.state[irrelevant]["step"] == 5


@eager
def test_groups_are_optimizers_of_their_own(case: OptimizerInput) -> None:
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


@eager
def test_tensor_lr_steps_like_a_float(case: OptimizerInput) -> None:
    assert_tensor_lr_is_a_float(case, dims=0)


@few
@pytest.mark.parametrize("dims", [1, 2], ids="{}-dim".format)
def test_tensor_lr_may_have_dimensions_of_size_one(case: OptimizerInput, dims: int) -> None:
    assert_tensor_lr_is_a_float(case, dims)


def assert_tensor_lr_is_a_float(case: OptimizerInput, dims: int) -> None:
    with_tensor, with_float = Regression(), Regression()
    lr = torch.full((1,) * dims, 2e-3, dtype=torch.float64)
    with_tensor.train(build(with_tensor.params, case, lr=lr), 2)
    with_float.train(build(with_float.params, case, lr=2e-3), 2)
    assert_same(clones(with_tensor.params), clones(with_float.params))
    assert_same(lr, torch.full((1,) * dims, 2e-3, dtype=torch.float64))


@FOREACH
@pytest.mark.parametrize("schedule", range(len(INFO.scheduler_inputs)))
def test_tensor_lr_is_scheduled_like_a_float(schedule: int, foreach: bool) -> None:
    ends = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        problem = Regression()
        optimizer = AdamO(problem.params, lr=lr, foreach=foreach)
        schedulers = [make(optimizer) for make in INFO.scheduler_inputs[schedule]]
        assert_right_direction(problem, optimizer, schedulers, steps=15)
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        assert float(optimizer.param_groups[0]["lr"]) < 0.01 or schedule == 1
        ends.append(clones(problem.params))
    assert_close(*ends)


@FOREACH
def test_every_number_may_be_a_tensor(foreach: bool) -> None:
    numbers: dict[str, Any] = {
        "lr": 2e-3,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 1e-3,
        "radial_lr_ratio": 50.0,
        "radial_beta": 0.7,
        "curvature_target": 2.0,
        "curvature_beta": 0.6,
        "low_dim_scale": 0.5,
        "low_dim_decay": 0.2,
        "delta": 0.3,
        "wd_ratio": 0.5,
        "angular_rms": 0.05,
    }

    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    tensors = {k: tensor(v) for k, v in numbers.items() if k != "betas"}
    tensors["betas"] = (tensor(0.8), tensor(0.95))
    ends = []
    for options in (numbers, tensors):
        problem = Regression()
        words = {"radial": "sgd", "tangential": "angular", "foreach": foreach}
        problem.train(AdamO(problem.params, **words, **options), 4)
        ends.append(clones(problem.params))
    assert_same(*ends)


# ---- steps that must do nothing, or only one thing ------------------------------------------


@everywhere
def test_a_step_without_gradients_changes_nothing(case: OptimizerInput) -> None:
    params = [torch.randn(2, 3), torch.randn(3), torch.randn(2, 3).requires_grad_()]
    before = clones(params)
    optimizer = build(params, case)
    loss = torch.tensor([1.0])
    assert optimizer.step(lambda: loss) is loss
    assert_same([p.detach() for p in params], before)
    assert all(state["step"] == 0 for state in optimizer.state.values())


@everywhere
def test_a_step_with_zero_gradients_and_no_decay_changes_nothing(case: OptimizerInput) -> None:
    start = [torch.randn(5, 1), torch.randn(4, 3), torch.randn(3)]
    params = [p.clone().requires_grad_() for p in start]
    if case.kwargs["differentiable"]:
        params = [p.clone() for p in params]  # not leaves: a differentiable step writes into them
    optimizer = build(params, case, weight_decay=0.0, low_dim_decay=0.0)
    for _ in range(2):
        set_gradients(params, [torch.zeros_like(p) for p in params])
        optimizer.step()
    assert_same([p.detach() for p in params], start)


@everywhere
def test_an_optimizer_can_be_printed(case: OptimizerInput) -> None:
    text = repr(build(Regression().params, case))
    assert text.startswith("AdamO (\nParameter Group 0\n")
    assert all(f"    {name}: " in text for name in case.kwargs)


@eager
def test_maximize_is_descent_on_negated_gradients(case: OptimizerInput) -> None:
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


@everywhere
def test_gradients_are_never_written_to(case: OptimizerInput) -> None:
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


@eager
def test_a_closure_is_called_once_with_gradients_enabled(case: OptimizerInput) -> None:
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


def test_an_error_in_the_closure_leaves_everything_as_it_was() -> None:
    problem = Regression()
    optimizer = AdamO(problem.params)
    problem.train(optimizer, 1)
    before = clones(problem.params)

    def closure() -> Tensor:
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(closure)
    assert_same(clones(problem.params), before)
    assert optimizer.state[problem.weight]["step"] == 1


# ---- gradient scaling -----------------------------------------------------------------------


@FOREACH
def test_a_scaler_that_found_an_infinity_takes_no_step(foreach: bool) -> None:
    problem, plain = Regression(), Regression()
    optimizer = AdamO(problem.params, foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = clones(problem.params)
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(problem.loss() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        if scale != 1.0:
            assert_same(clones(problem.params), before)
            assert optimizer.state[problem.weight]["step"] == 0
    plain.train(AdamO(plain.params, foreach=foreach), 1)
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


def test_the_decay_of_adamw_is_warned_of_where_it_destroys() -> None:
    AdamO(Regression().params, weight_decay=0.1)
    with pytest.warns(UserWarning, match="of every weight away per step"):
        AdamO.radial_sgd(Regression().params, weight_decay=0.1)


@FOREACH
@pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")
def test_strong_decay_shrinks_a_weight_and_leaves_a_bias(foreach: bool) -> None:
    problem = Regression()
    optimizer = AdamO.radial_sgd(problem.params, weight_decay=0.5, foreach=foreach)
    before = clones(problem.params)
    set_gradients(problem.params, [torch.zeros_like(p) for p in problem.params])
    optimizer.step()
    assert_close(problem.weight.detach(), before[0] * (1 - 0.5 * 100 * 1e-3))
    assert_same(problem.bias.detach(), before[1])
