"""Stochastic rounding of bfloat16 weights: unbiased, repeatable, and worth having."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from adamo_optim import AdamO
from adamo_optim.rounding import round_stochastically

BACKENDS = pytest.mark.parametrize(
    "backend",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["for-loop", "foreach", "fused"],
)


def rounded(x: Tensor, step: int, number: int) -> Tensor:
    return round_stochastically(x, torch.tensor(step), number, torch.arange(x.numel()))


@pytest.mark.parametrize("value", [1.0, 1.003, -0.7, 3e-5, 1e30, 0.0])
def test_rounding_is_unbiased(value: float) -> None:
    x = torch.full((400_000,), value)
    found = rounded(x, 3, 5).double()
    spacing = float(found.max() - found.min())
    assert len(found.unique()) <= 2  # one of the two neighbours
    error = float(found.mean()) - float(x[0])
    assert abs(error) <= 5 * spacing / 2 / len(x) ** 0.5 + 1e-7 * abs(value)


def test_rounding_differs_by_step_parameter_and_place_and_repeats() -> None:
    x = torch.full((1000,), 1.003)
    draws = [rounded(x, t, n) for t, n in ((1, 0), (2, 0), (1, 1))]
    assert torch.equal(draws[0], rounded(x, 1, 0))
    for other in draws[1:]:
        assert 0.3 < float((draws[0] != other).float().mean()) < 0.7
    state = torch.get_rng_state()
    rounded(x, 1, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_finite_stays_what_it_is() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    found = rounded(x, 1, 0)
    assert found[0] == float("inf")
    assert found[1] == -float("inf")
    assert found[2].isnan()
    assert found[3] == 1.0


@pytest.mark.parametrize(("rounding", "decays"), [("nearest", False), ("stochastic", True)])
def test_small_decay_survives_bfloat16_only_with_stochastic_rounding(
    rounding: str, decays: bool
) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64).bfloat16())
    start = float(p.detach().double().norm())
    optimizer = AdamO([p], weight_decay=1e-3, rounding=rounding, curvature_target=None)  # 1e-4
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


def one_step(backend: dict[str, bool], number_of_steps: int, reload: bool = False) -> Tensor:
    """A small decay of ones, after so many steps."""
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = AdamO([p], rounding="stochastic", radial_lr=1.0, curvature_target=None, **backend)
    p.grad = torch.zeros_like(p)
    optimizer.state[p]["step"].fill_(number_of_steps)
    if reload:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == number_of_steps + 1
    return p.detach()


@BACKENDS
@pytest.mark.parametrize("start", [10, 2**24, 2**31, 2**32], ids="{:d}".format)
def test_rounding_draws_anew_in_every_step_however_many_there_were(
    start: int, backend: dict[str, bool]
) -> None:
    """2²⁴ is where a float32 that counts them stops; a checkpoint keeps the count, too."""
    ends = [one_step(backend, start + i, reload) for i in range(3) for reload in (False, True)]
    for a, b in zip(ends[::2], ends[1::2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ends[::2], ends[2::2], strict=False):
        assert 0.2 < float((a != b).float().mean()) < 0.8
    assert torch.equal(ends[0], one_step({"foreach": False}, start))
