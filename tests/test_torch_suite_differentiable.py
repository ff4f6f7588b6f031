"""PyTorch's differentiable-optimizer suite on AdamO: derivatives through steps, by gradcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from adamo_optim import AdamO
from torch_kit import (
    OptimizerInput,
    Regression,
    assert_same,
    build,
    clones,
    gradients,
    over_inputs,
    set_gradients,
)

RULES = ("general", "scale_invariant", "low_dim")
every_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def leaf(values: Any, **options: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, **options).requires_grad_()


def differentiable_state(p: Tensor, kept: dict[str, Any]) -> dict[str, Tensor]:
    """A state in the middle of a run, in the names and shapes the optimizer keeps."""
    state = {
        "exp_avg": leaf(0.1 * torch.rand_like(p)),
        "exp_avg_sq": leaf(0.1 + torch.rand_like(p)),
        "radial_momentum": leaf(0.3),
        "tau": leaf(1.7),
        "tau_reference": leaf(0.02),
        "initial_norm": leaf(1.3),
        "mean_square": leaf(0.6),
    }
    if "previous_grad" in kept and kept["previous_grad"].dtype == torch.float64:
        state["previous_grad"] = leaf(torch.rand_like(kept["previous_grad"]))
    return state


def step_function(
    make: Callable[..., AdamO], names: list[str]
) -> Callable[..., tuple[Tensor, ...]]:
    """(p, g, state, options) → (p⁺, state⁺): one step as a function of everything it reads."""

    def step(p: Tensor, g: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        p = p.clone()
        p.grad = g
        optimizer = make(p, *values[len(names) :])
        state = optimizer.state[p]
        state["step"], state["curvature_step"] = torch.tensor(9.0), torch.tensor(9.0).double()
        state.update(zip(names, (x.clone() for x in values), strict=False))
        optimizer.step()
        return (p, *(state[name] for name in names if name != "initial_norm"))

    return step


def check(
    make: Callable[..., AdamO],
    options: tuple[Tensor, ...] = (),
    shape: tuple[int, ...] = (3, 2),
    checker: Callable[..., bool] = gradcheck,
    **how: Any,
) -> None:
    p, g = leaf(torch.rand(shape) + 0.5), leaf(torch.rand(shape) - 0.3)
    probe = p.clone()
    kept = make(probe, *options).state[probe]
    state = differentiable_state(p, kept)
    function = step_function(make, list(state))
    assert checker(function, (p, g, *state.values(), *options), **how)


# ---- one step, differentiated by everything it reads ----------------------------------------


def check_case(case: OptimizerInput, rule: str) -> None:
    check(
        lambda p: build([{"params": [p], "rule": rule}], case, differentiable=True), fast_mode=True
    )


@over_inputs()
def test_a_step_is_differentiable_with_every_option(case: OptimizerInput) -> None:
    check_case(case, "general")


@over_inputs(only=("maximize", "angular", "curvature number", "online test", "no guard"))
def test_a_scale_invariant_step_is_differentiable(case: OptimizerInput) -> None:
    check_case(case, "scale_invariant")


@over_inputs(only=("maximize", "betas and eps", "low dim scale", "no guard", "tensor betas"))
def test_a_low_dim_step_is_differentiable(case: OptimizerInput) -> None:
    check_case(case, "low_dim")


both_forms = pytest.mark.parametrize(
    "make", [AdamO, AdamO.radial_sgd], ids=["defaults", "radial_sgd"]
)


@both_forms
@every_rule
@pytest.mark.parametrize("shape", [(3, 2), (2, 1, 2), (4,), ()], ids=str)
def test_every_entry_of_the_jacobian_is_right(
    rule: str, shape: tuple[int, ...], make: Callable[..., AdamO]
) -> None:
    check(lambda p: make([{"params": [p], "rule": rule}], differentiable=True), shape=shape)


@both_forms
@every_rule
def test_second_derivatives_are_right(rule: str, make: Callable[..., AdamO]) -> None:
    check(
        lambda p: make([{"params": [p], "rule": rule}], differentiable=True),
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
    "radial_beta": ((leaf(0.7),), lambda beta: {"radial_beta": beta, "radial": "sgd"}),
    "curvature": (
        (leaf(1.1), leaf(0.6)),
        lambda target, beta: {"curvature_target": target, "curvature_beta": beta},
    ),
    "radial_lr_ratio": ((leaf(20.0),), lambda ratio: {"radial_lr_ratio": ratio}),
    "low_dim_scale": ((leaf(0.4),), lambda scale: {"low_dim_scale": scale}),
    "low_dim_decay": ((leaf(0.3),), lambda decay: {"low_dim_decay": decay}),
    "wd_ratio": ((leaf(0.5),), lambda ratio: {"wd_ratio": ratio}),
    "angular_rms": (
        (leaf(0.3),),
        lambda rms: {"tangential": "angular", "angular_rms": rms, "radial_lr": 0.02},
    ),
    "radial": ((leaf(0.03),), lambda lr: {"radial": "sgd", "radial_lr": lr}),
    "equilibrium": (
        (leaf(0.02), leaf(0.3)),
        lambda lr, decay: {
            "lr": lr,
            "weight_decay": decay,
            "tangential": "angular",
            "angular_rms": "equilibrium",
        },
    ),
    "second_moment": (
        (leaf(0.9), leaf(0.01)),
        lambda beta2, eps: {"betas": (0.8, beta2), "eps": eps, "second_moment": "block"},
    ),
    "second_moment-sgd": (
        (leaf(0.9),),
        lambda beta2: {"betas": (0.8, beta2), "radial": "sgd", "second_moment": "auto"},
    ),
    "lr-and-weight_decay": (
        (leaf(0.02), leaf(0.01)),
        lambda lr, decay: {"lr": lr, "weight_decay": decay, "radial_lr_ratio": 1.0},
    ),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, "general") for name in OPTIONS),
        *((name, "scale_invariant") for name in ("lr", "weight_decay", "wd_ratio", "equilibrium")),
        *((name, "scale_invariant") for name in ("second_moment", "second_moment-sgd")),
        *((name, "low_dim") for name in ("lr", "betas", "eps", "weight_decay")),
        *((name, "low_dim") for name in ("low_dim_scale", "low_dim_decay")),
    ],
)
@pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")
def test_a_step_is_differentiable_by_its_options(name: str, rule: str) -> None:
    values, options = OPTIONS[name]
    check(
        lambda p, *x: AdamO([{"params": [p], "rule": rule}], differentiable=True, **options(*x)),
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
        AdamO([p], differentiable=True, **{"weight_decay": 1e-5, **options(*values)}).step()
    finally:
        torch.set_warn_always(False)


# ---- many steps -----------------------------------------------------------------------------


@every_rule
def test_hypergradients_through_unrolled_training(rule: str) -> None:
    """d(loss after three steps)/d(lr, first weight), the gradients being part of the graph."""
    data = torch.rand(4, 2, dtype=torch.float64)

    def train(w: Tensor, lr: Tensor) -> Tensor:
        w = w.clone()
        optimizer = AdamO(
            [{"params": [w], "rule": rule}], lr=lr, radial_lr=1e-2, differentiable=True
        )
        for _ in range(3):
            (w.grad,) = torch.autograd.grad((data @ w).pow(2).sum(), w, create_graph=True)
            optimizer.step()
        return (data @ w).pow(2).sum()

    assert gradcheck(train, (leaf(torch.rand(2, 3) + 0.2), leaf(0.01)))


@over_inputs()
def test_the_differentiable_backend_steps_like_the_for_loop(case: OptimizerInput) -> None:
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
    assert_same(clones(params), clones(plain.params))
    for p, q in zip(params, plain.params, strict=True):
        assert_close(
            {k: x.detach() for k, x in differentiable.state[p].items()}, dict(optimizer.state[q])
        )


def test_a_step_without_differentiable_leaves_no_graph() -> None:
    problem = Regression()
    optimizer = AdamO(problem.params)
    problem.train(optimizer, 2)
    assert all(p.is_leaf and p.requires_grad for p in problem.params)
    assert not any(x.requires_grad for state in optimizer.state.values() for x in state.values())


# ---- where a derivative could be lost in 0 · ∞ ----------------------------------------------


def derivatives(cls: type, start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    p, g = leaf(start), leaf(grad)
    moved = p.clone()
    moved.grad = g.clone()
    cls([moved], lr=1e-3, differentiable=True).step()
    by_p, by_g = torch.autograd.grad(moved.sum(), (p, g))
    return by_p, by_g


@pytest.mark.parametrize("shape", [(4, 3), (5,)], ids=["matrix", "bias"])
def test_a_block_that_starts_at_zero_has_derivatives(shape: tuple[int, ...]) -> None:
    """Biases do. Such a block follows AdamW, so its derivatives are AdamW's."""
    start, grad = torch.zeros(shape, dtype=torch.float64), torch.rand(shape) + 0.1
    ours = derivatives(AdamO, start, grad)
    assert_close(ours, derivatives(torch.optim.AdamW, start, grad))
    assert all(x.isfinite().all() for x in ours)


@pytest.mark.parametrize("zeros", [1, None], ids=["first-row", "all"])
@pytest.mark.parametrize("shape", [(4, 3), (5,)], ids=["matrix", "bias"])
def test_zeros_in_the_gradient_leave_the_derivative_by_the_parameter(
    shape: tuple[int, ...], zeros: int | None
) -> None:
    """√v at v = 0 spoils the derivative by that gradient entry, in torch's Adam too, no other."""
    start, grad = torch.rand(shape) + 0.5, torch.rand(shape) + 0.1
    grad[:zeros] = 0.0
    by_p, _ = derivatives(AdamO, start, grad)
    assert by_p.isfinite().all()
    assert derivatives(torch.optim.Adam, start, grad)[0].isfinite().all()
