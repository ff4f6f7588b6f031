"""Algorithm 1 against steps worked out by hand, and the reference with options off against it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.reference import (
    ReferenceAdamO,
    ReferenceAngularAdamW,
    algorithm1,
    radial,
    tangential,
)

HAND: dict[str, Any] = {
    "lr": 0.1,
    "radial_lr": 0.5,
    "weight_decay": 0.1,
    "eps": 0.0,
    "betas": (0.9, 0.99),
    "radial_beta": 0.5,
    "curvature_beta": 0.5,
    "curvature_target": 1.0,
}


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, vector(*expected), rtol=1e-14, atol=1e-14)


def test_projections_split_a_vector() -> None:
    w, z = vector(3, 4), vector(1, 0)
    close(radial(z, w), 0.36, 0.48)
    close(tangential(z, w), 0.64, -0.48)


def test_first_step_by_hand() -> None:
    # κ = 1, τ = 1, η_ρ,t = 0.5; Δ^ρ = 0.5·(0.36, 0.48); u = (1, −1), φ^θ(u) = (1.12, −0.84)
    state: dict[str, Any] = {}
    close(algorithm1(vector(3, 4), vector(1, 0), state, **HAND), 2.558, 3.644)
    assert state["tau"] == 1.0
    close(state["m_radial"], 0.18, 0.24)
    close(state["m_tangential"], 0.064, -0.048)
    close(state["v_tangential"], 0.004096, 0.002304)


def test_second_step_by_hand() -> None:
    # worked out in 40-digit decimal arithmetic from the numbers of the first step
    state: dict[str, Any] = {}
    w = algorithm1(vector(3, 4), vector(1, 0), state, **HAND)
    close(algorithm1(w, vector(0, 2), state, **HAND), 2.2959664939138934, 3.2155065439852805)
    assert state["tau"] == pytest.approx(3.0)
    close(state["m_radial"], 0.556389938502984, 0.79260552615515)
    close(state["m_tangential"], -0.0351492929608871, 0.0246739548281968)
    close(state["v_tangential"], 0.0129004604824378, 0.0066397186913127)


def test_scale_invariant_step_by_hand() -> None:
    # no Δ^ρ: 0.95·(3, 4) − 0.1·(1.12, −0.84)
    w = algorithm1(vector(3, 4), vector(1, 0), {}, scale_invariant=True, **HAND)
    close(w, 2.738, 3.884)


def test_low_dim_step_by_hand() -> None:
    # Adam's first step is α·η_θ·sign(g), without decay
    w = algorithm1(vector(3, 4), vector(1, -2), {}, low_dim=True, low_dim_scale=0.5, **HAND)
    close(w, 2.95, 4.05)


RULES = ("general", "scale_invariant", "low_dim")
LITERAL: dict[str, Any] = {"lr": 1e-3, "radial_lr": 0.02, "weight_decay": 1e-3}
LITERAL |= {"eps": 1e-8, "betas": (0.9, 0.999), "radial_beta": 0.9, "curvature_beta": 0.9}
LITERAL |= {"curvature_target": 3.0}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [AdamO, ReferenceAdamO])
def test_without_the_guard_it_is_algorithm1(kind: Any, rule: str) -> None:
    """``AdamO(params, guard=False, curvature_target=<number>)``, with no other option of form."""
    flags = {"low_dim": rule == "low_dim", "scale_invariant": rule == "scale_invariant"}
    source = torch.Generator().manual_seed(0)
    w = torch.randn(5, 4, generator=source, dtype=torch.float64)
    p = torch.nn.Parameter(w.clone())
    optimizer = kind([{"params": [p], "rule": rule}], guard=False, **LITERAL)
    state: dict[str, Any] = {}
    for _ in range(300):
        g = torch.randn(w.shape, generator=source, dtype=torch.float64)
        w = algorithm1(w, g, state, **LITERAL, **flags)
        p.grad = g
        optimizer.step()
    torch.testing.assert_close(p.detach(), w, rtol=1e-10, atol=1e-12)


def test_the_literal_algorithm_flips_weights_at_its_printed_grokking_settings() -> None:
    # η = 10⁻³, λ = 1: once the gradient vanishes η_ρ,t grows by 10⁴ and 1 − η_ρ,t·λ passes zero.
    w = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    start, state, flips = w, {}, 0
    for _ in range(400):
        new = algorithm1(w, 1e-6 * start, state, lr=1e-3, radial_lr=1e-3, weight_decay=1.0)
        flips += float((new * w).sum()) < 0
        w = new
    assert flips > 0


def test_a_curvature_of_zero_without_eps_is_no_error() -> None:
    """The same gradient twice: τ = 0, and the guard bounds what 1/√0 would be."""
    p = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer = ReferenceAdamO([p], eps=0.0, curvature_beta=0.0, curvature_target=1.0)
    p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    assert optimizer.state[p]["tau"] == 0.0
    assert p.isfinite().all()


def test_a_turn_by_hand() -> None:
    # g ⟂ w, so u = g/rms(g) = (0, √2) and ‖u^θ‖/√n = 1: φ = lr/r = 0.1
    p = torch.nn.Parameter(vector(3, 0))
    optimizer = ReferenceAngularAdamW(
        [{"params": [p], "rule": "scale_invariant"}], lr=0.01, eps=0.0, angular_rms=0.1, max_angle=1
    )
    p.grad = vector(0, 5)
    optimizer.step()
    close(p.detach(), 3 * 0.9950041652780258, -3 * 0.09983341664682815)


def test_a_second_turn_by_hand() -> None:
    # β = 0: u = (√2, 0); from the angle −0.1 on, u^θ = √2·sin(0.1) across, φ = 0.1·sin(0.1),
    # and max_angle bounds lr/r, not φ
    p = torch.nn.Parameter(vector(3, 0))
    group = {"params": [p], "rule": "scale_invariant"}
    options: dict[str, Any] = {"lr": 7.0, "betas": (0.0, 0.0), "eps": 0.0, "max_angle": 0.1}
    optimizer = ReferenceAngularAdamW([group], **options)
    for g in (vector(0, 5), vector(2, 0)):
        p.grad = g
        optimizer.step()
    angle = -0.1 - 0.1 * math.sin(0.1)
    close(p.detach(), 3 * math.cos(angle), 3 * math.sin(angle))


@pytest.mark.parametrize("kind", [ReferenceAngularAdamW, AngularAdamW, ReferenceAdamO, AdamO])
def test_all_of_them_train_a_model(kind: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 16, bias=False),
        torch.nn.LayerNorm(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 1),
    ).double()
    x = torch.randn(64, 3, dtype=torch.float64)
    y = x[:, :1].abs()
    groups = [
        {"params": [model[0].weight], "rule": "scale_invariant"},
        {"params": [*model[1].parameters(), *model[3].parameters()]},
    ]
    optimizer = kind(groups, lr=5e-3)
    losses = []
    for _ in range(99):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_gradient_that_is_not_finite_leaves_nothing_behind() -> None:
    """The guard skips the block; the next g⁻ is still 0."""
    ends = []
    for kind in (ReferenceAdamO, AdamO):
        p = nn.Parameter(torch.linspace(-1.0, 2.0, 16, dtype=torch.float64).view(4, 4))
        optimizer = kind([p], lr=1e-3, curvature_target=1.0)
        for step in range(10):
            p.grad = torch.cos(torch.arange(16.0).double() + step).view(4, 4)
            p.grad[0, 0] = torch.nan if step == 0 else p.grad[0, 0]
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-10, atol=0)
