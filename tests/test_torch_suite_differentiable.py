"""PyTorch's differentiable-optimizer suite: derivatives through steps, by gradcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from adamo_optim import AdamO, AngularAdamW
from torch_kit import (
    ADAMO_ENTRY,
    ANGULAR_ENTRY,
    ENTRIES,
    TURNING_ENTRY,
    Case,
    Entry,
    Regression,
    assert_same,
    build,
    clones,
    gradients,
    over_entries,
    over_inputs,
    set_gradients,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def leaf(values: Any, **options: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, **options).requires_grad_()


def begin_state(optimizer: Any, p: Tensor) -> dict[str, Any]:
    """The state a first step makes, with the names and shapes the optimizer keeps."""
    probe = p.detach().clone()
    probe.grad = torch.ones_like(probe)
    optimizer.param_groups[0]["params"] = [probe]
    with torch.no_grad():
        optimizer.step()
    return optimizer.state[probe]


def differentiable_state(p: Tensor, kept: dict[str, Any]) -> dict[str, Tensor]:
    """A state in the middle of a run, in the names and shapes the optimizer keeps."""
    numbers = {"radial_momentum": 0.3, "tau": 1.7, "tau_reference": 0.02, "mean_square": 0.6}
    shapes = {key: kept[key].shape for key in numbers.keys() & kept.keys()}
    state = {key: leaf(torch.full(shape, numbers[key])) for key, shape in shapes.items()}
    state["exp_avg"] = leaf(0.1 * torch.rand_like(p))
    if "exp_avg_sq" in kept:
        state["exp_avg_sq"] = leaf(0.1 + torch.rand_like(p))
    if "initial_norm" in kept:
        state["initial_norm"] = leaf(torch.full(kept["initial_norm"].shape, 1.3))
    if "previous_grad" in kept and kept["previous_grad"].dtype == torch.float64:
        state["previous_grad"] = leaf(torch.rand_like(kept["previous_grad"]))
    return dict(sorted(state.items()))


def step_function(
    make: Callable[..., Any], names: list[str], kept: dict[str, Any]
) -> Callable[..., tuple[Tensor, ...]]:
    """(p, g, state, options) → (p⁺, state⁺): one step as a function of everything it reads."""

    def step(p: Tensor, g: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        p = p.clone()
        p.grad = g
        optimizer = make(p, *values[len(names) :])
        state = optimizer.state[p]
        state.update({key: value.detach().clone() for key, value in kept.items()})
        state["step"] = torch.full_like(state["step"], 9.0)
        if "curvature_step" in state:
            state["curvature_step"] = torch.full_like(state["curvature_step"], 9.0)
        state.update(zip(names, (x.clone() for x in values), strict=False))
        optimizer.step()
        return (p, *(state[name] for name in names if name != "initial_norm"))

    return step


def check(
    make: Callable[..., Any],
    options: tuple[Tensor, ...] = (),
    shape: tuple[int, ...] = (3, 2),
    checker: Callable[..., bool] = gradcheck,
    **how: Any,
) -> None:
    p, g = leaf(torch.rand(shape) + 0.5), leaf(torch.rand(shape) - 0.3)
    kept = begin_state(make(p.clone(), *options), p)
    state = differentiable_state(p, kept)
    function = step_function(make, list(state), kept)
    assert checker(function, (p, g, *state.values(), *options), **how)


# ---- one step, differentiated by everything it reads ----------------------------------------


def check_case(case: Case, rule: str = "auto") -> None:
    check(
        lambda p: build([{"params": [p], "rule": rule}], case, differentiable=True), fast_mode=True
    )


@over_inputs()
def test_a_step_is_differentiable_with_every_option(case: Case) -> None:
    check_case(case, "scale_invariant" if case.entry.turns else "general")


@over_inputs(
    only=("maximize", "curvature number", "online test", "no guard"), entries=[ADAMO_ENTRY]
)
def test_a_scale_invariant_step_is_differentiable(case: Case) -> None:
    check_case(case, "scale_invariant")


@over_inputs(
    only=("maximize", "betas and eps", "low dim scale", "no guard", "tensor betas"),
    entries=[ADAMO_ENTRY],
)
def test_a_low_dim_step_is_differentiable(case: Case) -> None:
    check_case(case, "low_dim")


KINDS = [
    pytest.param(AdamO, "general", id="AdamO-general"),
    pytest.param(AdamO, "scale_invariant", id="AdamO-scale_invariant"),
    pytest.param(AdamO, "low_dim", id="AdamO-low_dim"),
    pytest.param(AngularAdamW, "scale_invariant", id="turning"),
]
every_kind = pytest.mark.parametrize(("cls", "rule"), KINDS)


@every_kind
@pytest.mark.parametrize("shape", [(3, 2), ()], ids=str)
def test_every_entry_of_the_jacobian_is_right(cls: Any, rule: str, shape: tuple[int, ...]) -> None:
    check(lambda p: cls([{"params": [p], "rule": rule}], differentiable=True), shape=shape)


@every_kind
def test_second_derivatives_are_right(cls: Any, rule: str) -> None:
    check(
        lambda p: cls([{"params": [p], "rule": rule}], differentiable=True),
        shape=(2, 2),
        checker=gradgradcheck,
        fast_mode=True,
    )


OPTIONS: dict[str, tuple[tuple[Tensor, ...], Callable[..., dict[str, Any]]]] = {
    "lr": ((leaf(0.05),), lambda lr: {"lr": lr}),
    "lr-1-dim": ((leaf([0.05]),), lambda lr: {"lr": lr}),
    "weight_decay": ((leaf(0.01),), lambda decay: {"weight_decay": decay, "radial_lr": 0.02}),
    "radial_lr": ((leaf(0.05),), lambda lr: {"radial_lr": lr}),
    "betas": ((leaf(0.8), leaf(0.9)), lambda *betas: {"betas": betas}),
    "eps": ((leaf(0.01),), lambda eps: {"eps": eps}),
    "radial_beta": ((leaf(0.7),), lambda beta: {"radial_beta": beta}),
    "curvature": (
        (leaf(1.1), leaf(0.6)),
        lambda target, beta: {"curvature_target": target, "curvature_beta": beta},
    ),
    "radial_lr_ratio": ((leaf(20.0),), lambda ratio: {"radial_lr_ratio": ratio}),
    "low_dim_scale": ((leaf(0.4),), lambda scale: {"low_dim_scale": scale}),
    "wd_ratio": ((leaf(0.5),), lambda ratio: {"wd_ratio": ratio}),
    "lr-and-weight_decay": (
        (leaf(0.02), leaf(0.01)),
        lambda lr, decay: {"lr": lr, "weight_decay": decay, "radial_lr_ratio": 1.0},
    ),
    "angular_rms": ((leaf(0.3),), lambda rms: {"angular_rms": rms}),
    "max_angle": ((leaf(0.1),), lambda angle: {"lr": 0.5, "max_angle": angle}),
}
TURNING = ("lr", "lr-1-dim", "betas", "eps", "angular_rms", "max_angle")


@pytest.mark.parametrize(
    ("cls", "name", "rule"),
    [
        *((AdamO, name, "general") for name in OPTIONS if name not in TURNING[4:]),
        *((AdamO, name, "scale_invariant") for name in ("lr", "weight_decay", "wd_ratio")),
        *((AdamO, name, "low_dim") for name in ("lr", "betas", "eps", "low_dim_scale")),
        *((AngularAdamW, name, "scale_invariant") for name in TURNING),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
@pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")
def test_a_step_is_differentiable_by_its_options(cls: Any, name: str, rule: str) -> None:
    values, options = OPTIONS[name]
    check(
        lambda p, *x: cls([{"params": [p], "rule": rule}], differentiable=True, **options(*x)),
        values,
        fast_mode=True,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_requires_grad_is_no_reason_to_warn(name: str) -> None:
    """`float(tensor)` of one makes torch warn, once per process unless it is told to repeat."""
    values, options = OPTIONS[name]
    p = torch.rand(3, 2, dtype=torch.float64).requires_grad_().clone()
    p.grad = torch.rand_like(p)
    torch.set_warn_always(True)
    try:
        if name not in TURNING[4:]:
            AdamO([p], differentiable=True, **{"weight_decay": 1e-5, **options(*values)}).step()
        if name in TURNING:
            group = {"params": [p.clone()], "rule": "scale_invariant"}
            group["params"][0].grad = torch.rand_like(p)
            AngularAdamW([group], differentiable=True, **options(*values)).step()
    finally:
        torch.set_warn_always(False)


# ---- many steps -----------------------------------------------------------------------------


@every_kind
def test_hypergradients_through_unrolled_training(cls: Any, rule: str) -> None:
    """d(loss after three steps)/d(lr, first weight), the gradients being part of the graph."""
    data = torch.rand(4, 2, dtype=torch.float64)

    def train(w: Tensor, lr: Tensor) -> Tensor:
        w = w.clone()
        radial = {"radial_lr": 1e-2} if cls is AdamO else {"angular_rms": 0.3}
        optimizer = cls([{"params": [w], "rule": rule}], lr=lr, differentiable=True, **radial)
        for _ in range(3):
            (w.grad,) = torch.autograd.grad((data @ w).pow(2).sum(), w, create_graph=True)
            optimizer.step()
        return (data @ w).pow(2).sum()

    assert gradcheck(train, (leaf(torch.rand(2, 3) + 0.2), leaf(0.01)))


@over_inputs()
def test_the_differentiable_backend_steps_like_the_for_loop(case: Case) -> None:
    plain, start = Regression(), Regression()
    params = [p.clone() for p in start.params]
    optimizer = build(plain.params, case, foreach=False)
    differentiable = build(params, case, differentiable=True)
    for seed in range(4):
        grads = gradients(plain.params, seed)
        set_gradients(plain.params, grads)
        set_gradients(params, grads)
        optimizer.step()
        differentiable.step()
    # torch's own two forms of AdamW add up in another order
    compare = assert_same if case.entry.cls is AdamO else assert_close
    compare(clones(params), clones(plain.params))
    for p, q in zip(params, plain.params, strict=True):
        state = {k: x.detach() for k, x in differentiable.state[p].items()}
        assert state.keys() == optimizer.state[q].keys()
        assert_close(state, dict(optimizer.state[q]))


@over_entries()
def test_a_step_without_differentiable_leaves_no_graph(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.make(problem.params)
    problem.train(optimizer, 2)
    assert all(p.is_leaf and p.requires_grad for p in problem.params)
    assert not any(x.requires_grad for state in optimizer.state.values() for x in state.values())


# ---- where a derivative could be lost in 0 · ∞ ----------------------------------------------


def derivatives(cls: Callable[..., Any], start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    p, g = leaf(start), leaf(grad)
    moved = p.clone()
    moved.grad = g.clone()
    cls([moved], lr=1e-3, differentiable=True).step()
    by_p, by_g = torch.autograd.grad(moved.sum(), (p, g))
    return by_p, by_g


@pytest.mark.parametrize("shape", [(4, 3), (5,)], ids=["matrix", "bias"])
def test_a_block_that_starts_at_zero_has_derivatives(shape: tuple[int, ...]) -> None:
    """Biases do. Such a block follows Adam or AdamW, and its derivatives are theirs."""
    start, grad = torch.zeros(shape, dtype=torch.float64), torch.rand(shape) + 0.1
    pairs = [(AdamO, torch.optim.Adam)]
    pairs += [(entry.make, torch.optim.AdamW) for entry in (ANGULAR_ENTRY, TURNING_ENTRY)]
    for ours, theirs in pairs:
        found = derivatives(ours, start, grad)
        assert_close(found, derivatives(theirs, start, grad))
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("zeros", [1, None], ids=["first-row", "all"])
@pytest.mark.parametrize("shape", [(4, 3), (5,)], ids=["matrix", "bias"])
def test_zeros_in_the_gradient_leave_the_derivative_by_the_parameter(
    shape: tuple[int, ...], zeros: int | None
) -> None:
    """√v at v = 0 spoils the derivative by that gradient entry, in torch's Adam too, no other."""
    start, grad = torch.rand(shape) + 0.5, torch.rand(shape) + 0.1
    grad[:zeros] = 0.0
    for entry in ENTRIES:
        by_p, _ = derivatives(entry.make, start, grad)
        assert by_p.isfinite().all()
