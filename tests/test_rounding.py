"""Stochastic rounding of bfloat16 weights: unbiased, repeatable, and worth having."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adamo_optim import AdamO
from adamo_optim.geometry import round_stochastically


@pytest.mark.parametrize("value", [1.0, 1.003, -0.7, 3e-5, 1e30, 0.0])
def test_rounding_is_unbiased(value: float) -> None:
    x = torch.full((400_000,), value)
    rounded = round_stochastically(x, torch.tensor(3), 5).double()
    spacing = float(rounded.max() - rounded.min())
    assert len(rounded.unique()) <= 2  # one of the two neighbours
    error = float(rounded.mean()) - float(x[0])
    assert abs(error) <= 5 * spacing / 2 / len(x) ** 0.5 + 1e-7 * abs(value)


def test_rounding_differs_by_step_parameter_and_place_and_repeats() -> None:
    x = torch.full((1000,), 1.003)
    draws = [round_stochastically(x, torch.tensor(t), n) for t, n in ((1, 0), (2, 0), (1, 1))]
    assert torch.equal(draws[0], round_stochastically(x, torch.tensor(1), 0))
    for other in draws[1:]:
        assert 0.3 < float((draws[0] != other).float().mean()) < 0.7
    state = torch.get_rng_state()
    round_stochastically(x, torch.tensor(1), 0)
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_finite_stays_what_it_is() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    rounded = round_stochastically(x, torch.tensor(1), 0)
    assert rounded[0] == float("inf")
    assert rounded[1] == -float("inf")
    assert rounded[2].isnan()
    assert rounded[3] == 1.0


@pytest.mark.parametrize(("rounding", "decays"), [("nearest", False), ("stochastic", True)])
def test_small_decay_survives_bfloat16_only_with_stochastic_rounding(
    rounding: str, decays: bool
) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64).bfloat16())
    start = float(p.detach().double().norm())
    optimizer = AdamO([p], weight_decay=0.05, rounding=rounding, curvature_target=None)  # 1e-4
    for _ in range(1000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    shrunk = float(p.detach().double().norm()) / start
    expected = (1 - 1e-4) ** 1000
    assert shrunk == pytest.approx(expected if decays else 1.0, rel=5e-3)


def test_float16_is_refused_and_float32_unaffected() -> None:
    with pytest.raises(ValueError, match=r"rounding='stochastic'.*float16"):
        AdamO([nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))], rounding="stochastic")
    ends = []
    for rounding in ("nearest", "stochastic"):
        p = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        optimizer = AdamO([p], rounding=rounding)
        p.grad = torch.linspace(0, 1, 12).reshape(3, 4).cos()
        optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
