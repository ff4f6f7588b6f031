"""Algorithm 1 against steps worked out by hand, and the reference with options off against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adamo_optim.options import DEFAULTS, FORM
from adamo_optim.reference import algorithm1, radial, reference_step, tangential

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


@pytest.mark.parametrize("rule", ["general", "scale_invariant", "low_dim"])
def test_reference_step_with_options_off_is_algorithm1(rule: str) -> None:
    options = {**DEFAULTS, **FORM, "radial_lr": 0.02, "curvature_target": 3.0, "guard": False}
    literal = {k: options[k] for k in ("lr", "radial_lr", "weight_decay", "eps", "betas")}
    literal |= {k: options[k] for k in ("radial_beta", "curvature_beta", "curvature_target")}
    flags = {"low_dim": rule == "low_dim", "scale_invariant": rule == "scale_invariant"}
    source = torch.Generator().manual_seed(0)
    a = b = torch.randn(5, 4, generator=source, dtype=torch.float64)
    a_state: dict[str, Any] = {}
    b_state: dict[str, Any] = {}
    for _ in range(300):
        g = torch.randn(a.shape, generator=source, dtype=torch.float64)
        a = algorithm1(a, g, a_state, **literal, **flags)
        b = reference_step(b, g, b_state, options, rule=rule)
    torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-12)
    for key in ("m_tangential", "v_tangential", "m_radial"):
        torch.testing.assert_close(b_state[key], a_state[key], rtol=1e-10, atol=1e-11)


def test_the_literal_algorithm_blows_up_at_its_printed_grokking_settings() -> None:
    # η = 10⁻³, λ = 1: once the gradient vanishes η_ρ,t grows by 10⁴ and 1 − η_ρ,t·λ passes zero.
    w = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    start, state = w, {}
    for _ in range(400):
        w = algorithm1(w, 1e-6 * start, state, lr=1e-3, radial_lr=1e-3, weight_decay=1.0)
    assert float(w.norm()) > 1e3 * float(start.norm()) or float((w * start).sum()) < 0


def test_a_curvature_of_zero_without_eps_is_no_error() -> None:
    """The same gradient twice: τ = 0, and the guard bounds what 1/√0 would be."""
    options = {**DEFAULTS, "eps": 0.0, "curvature_beta": 0.0, "curvature_target": 1.0}
    state: dict[str, Any] = {}
    w, g = torch.randn(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    for _ in range(2):
        w = reference_step(w, g, state, options)
    assert state["tau"] == 0.0
    assert w.isfinite().all()
