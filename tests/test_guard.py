"""AdamO is safe by default: what the guard does, and what happens at the edges."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO

BACKENDS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])


def weight(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    source = torch.Generator().manual_seed(0)
    return nn.Parameter((torch.randn(shape, generator=source) * scale).to(dtype))


def norm(p: torch.Tensor) -> float:
    return float(p.detach().double().norm())


def last(optimizer: AdamO) -> dict[str, Any]:
    return next(iter(optimizer.diagnostics(synchronize=True).values()))


# ---- warnings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"lr": 1e-2}, False),
        ({"weight_decay": 0.01}, False),
        ({"weight_decay": 0.1}, True),
        ({"weight_decay": 1.0}, True),
        ({"lr": 3e-4, "weight_decay": 0.1}, True),
        ({"weight_decay": 1.0, "decay_lr": "tangential"}, False),
        ({"weight_decay": 0.1, "radial_lr": 1e-3}, False),
        ({"weight_decay": 0.1, "low_dim": 1000}, False),
        ({"lr": torch.tensor(1e-3), "weight_decay": 0.1}, True),
    ],
    ids=str,
)
def test_the_constructor_warns_of_collapsing_decay(options: dict[str, Any], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AdamO([weight(4, 3)], **options)
    assert len(caught) == int(warns)
    if warns:
        assert "of every weight away per step" in str(caught[0].message)
        assert caught[0].filename == __file__  # points at the user's line


def test_a_group_that_is_added_later_warns_as_well() -> None:
    optimizer = AdamO([weight(4, 3)])
    with pytest.warns(UserWarning, match="of every weight") as caught:
        optimizer.add_param_group({"params": [weight(4, 3)], "weight_decay": 0.1})
    assert len(caught) == 1
    assert caught[0].filename == __file__


# ---- bounds --------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("target", ["auto", 1.0, 1e-12, 1e12])
def test_the_scale_of_the_radial_step_is_bounded(target: float | str, foreach: bool) -> None:
    p = weight(8, 6)
    optimizer = AdamO([p], lr=1e-3, curvature_target=target, foreach=foreach)
    for step in range(60):
        p.grad = torch.randn_like(p) * (1.0 if step < 30 else 1e-8)
        optimizer.step()
        assert 0.01 * 0.999 <= last(optimizer)["eta_radial"] <= 1.0 * 1.001  # [0.1, 10]·η_ρ
    if target in (1e-12, 1e12):
        assert last(optimizer)["guard_scale"] == 1.0


@BACKENDS
def test_one_step_changes_the_norm_by_a_factor_of_two_at_most(foreach: bool) -> None:
    for sign, factor in ((1, 0.5), (-1, 2.0)):
        p = weight(8, 6)
        start = p.detach().clone()
        options = {"radial_lr": 1e6, "lr": 0.0, "weight_decay": 0.0}
        optimizer = AdamO([p], foreach=foreach, **options)
        p.grad = sign * start
        optimizer.step()
        torch.testing.assert_close(p.detach(), factor * start)
        assert last(optimizer)["guard_factor"] == 1.0


@BACKENDS
def test_decay_stops_at_a_tenth_of_the_initial_norm(foreach: bool) -> None:
    p = weight(8, 6)
    start = norm(p)
    with pytest.warns(UserWarning, match="of every weight"):
        optimizer = AdamO([p], weight_decay=1.0, foreach=foreach)
    for _ in range(300):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert 0.05 * start < norm(p) < 0.1 * start
    assert last(optimizer)["guard_decay"] == 1.0


@pytest.mark.filterwarnings("ignore:weight_decay")
def test_without_the_guard_the_same_decay_collapses_the_weight() -> None:
    p = weight(8, 6)
    start = norm(p)
    optimizer = AdamO([p], weight_decay=1.0, guard=False)
    for _ in range(300):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert norm(p) < 1e-6 * start


@pytest.mark.filterwarnings("ignore:weight_decay")
def test_the_literal_paper_flips_signs_and_the_guard_does_not() -> None:
    """The paper's grokking settings: η = 10⁻³, λ = 1, τ_target = 1, vanishing gradients."""
    signs = {}
    for guard in (False, True):
        p = weight(8, 6, dtype=torch.float64)
        start = p.detach().clone()
        options = {"weight_decay": 1.0, "curvature_target": 1.0, "guard": guard}
        optimizer = AdamO([p], radial_lr=1e-3, **options)
        smallest = 1.0
        for _ in range(300):
            p.grad = 1e-7 * start
            optimizer.step()
            smallest = min(smallest, float((p.detach() * start).sum() / start.square().sum()))
        signs[guard] = smallest
    assert signs[False] < 0 < signs[True]


# ---- rounding noise ------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 3), (64, 33), (300, 200)], ids=str)
def test_a_gradient_along_the_weight_does_not_turn_it(
    shape: tuple[int, ...], dtype: torch.dtype, foreach: bool
) -> None:
    p = weight(*shape, dtype=dtype)
    start = p.detach().double().clone()
    options = {"lr": 1e-2, "weight_decay": 0.0, "radial_lr": 1e-3}
    optimizer = AdamO([p], foreach=foreach, **options)
    for step in range(20):
        p.grad = p.detach() * (0.3 + 0.01 * step)
        optimizer.step()
        assert last(optimizer)["guard_noise"] == 1.0
    end = p.detach().double()
    cosine = float((end * start).sum() / (end.norm() * start.norm()))
    assert 1 - cosine < 4 * torch.finfo(dtype).eps ** 2 * 20 + 1e-12


def test_a_small_but_real_tangential_gradient_is_used() -> None:
    p = weight(30, 20)
    optimizer = AdamO([p], lr=1e-2)
    p.grad = p.detach() + 1e-4 * torch.randn_like(p)
    optimizer.step()
    assert last(optimizer)["guard_noise"] == 0.0
    assert last(optimizer)["angle"] > 1e-3


# ---- zero blocks ---------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"guard": False}, {"block": "row"}], ids=str)
def test_a_block_that_starts_at_zero_follows_adam_for_good(
    options: dict[str, Any], foreach: bool
) -> None:
    ours, theirs = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(5, 4))
    adamo = AdamO([("b", ours)], lr=1e-2, foreach=foreach, **options)
    assert adamo.explain()[0].rule == "low_dim"
    adam = torch.optim.Adam([theirs], lr=1e-2)
    source = torch.Generator().manual_seed(0)
    for _ in range(30):
        ours.grad = torch.randn(5, 4, generator=source)
        theirs.grad = ours.grad.clone()
        adamo.step()
        adam.step()
    torch.testing.assert_close(ours, theirs)
    row = adamo.explain()[0]
    assert row.rule == "low_dim"
    assert "norm was 0" in row.reason


def test_a_weight_that_becomes_zero_later_keeps_moving() -> None:
    p = weight(5, 4)
    optimizer = AdamO([p], lr=1e-2)
    p.grad = torch.randn_like(p)
    optimizer.step()
    with torch.no_grad():
        p.zero_()
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert torch.isfinite(p).all()
    assert norm(p) > 0
    assert optimizer.explain()[0].rule == "general"  # it started with a norm


def test_a_weight_of_one_entry_crosses_zero() -> None:
    """It has no direction to turn to, and factors on its norm would never lead across."""
    p = nn.Parameter(torch.full((1, 1), -0.5))
    optimizer = AdamO([p], lr=2e-2)
    for _ in range(400):
        p.grad = 2 * (p.detach() - 2)
        optimizer.step()
    assert p.item() == pytest.approx(2, abs=0.1)


def test_a_complex_number_has_a_direction() -> None:
    p = nn.Parameter(torch.full((1, 1), 1 + 1j))
    assert AdamO([p]).explain()[0].rule == "general"


# ---- non-finite gradients ------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_leaves_the_block_and_its_state_alone(
    bad: float, foreach: bool
) -> None:
    matrix, bias, other = weight(4, 3), weight(5), weight(3, 3)
    optimizer = AdamO([matrix, bias, other], foreach=foreach)
    for p in (matrix, bias, other):
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = {p: (p.detach().clone(), clone(optimizer.state[p])) for p in (matrix, bias, other)}
    matrix.grad.view(-1)[2] = bad
    bias.grad[0] = bad
    optimizer.step()
    for p in (matrix, bias):
        assert torch.equal(p, before[p][0])
        assert same(optimizer.state[p], before[p][1])
    assert not torch.equal(other, before[other][0])
    found = optimizer.diagnostics(synchronize=True)
    assert [row["guard_skipped"] for row in found.values()] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_is_left_alone_whatever_its_state_has_become(
    bad: float, moment: str, backend: dict[str, Any]
) -> None:
    params = [weight(4, 3), weight(5)]
    optimizer = AdamO(params, **backend)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    for p in params:
        optimizer.state[p][moment].view(-1)[0] = bad
        p.grad.view(-1)[1] = float("nan")
    optimizer.step()
    assert all(map(torch.equal, params, before))
    for p in params:  # a gradient that is in order does not bring them into the weight either
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_without_a_norm_is_left_alone(bad: float, backend: dict[str, Any]) -> None:
    """One entry must not take all the others with it; once it is mended, training goes on."""
    params = [weight(4, 3), weight(5)]
    before = [p.detach().clone() for p in params]
    optimizer = AdamO(params, **backend)
    for p in params:
        p.data.view(-1)[0] = bad
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p.view(-1)[1:], old.view(-1)[1:])
        assert all(x.isfinite().all() for x in optimizer.state[p].values())
    found = optimizer.diagnostics(synchronize=True).values()
    assert [row["guard_skipped"] for row in found] == [1.0, 1.0]
    for p, old in zip(params, before, strict=True):
        p.data.copy_(old)
    optimizer.step()
    assert all(
        p.isfinite().all() and (p != old).all() for p, old in zip(params, before, strict=True)
    )


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_gradient_whose_square_does_not_fit_into_v_is_left_out(backend: dict[str, Any]) -> None:
    """One step of 3e19 would make v infinite, and stop those entries for good."""
    params = [weight(4, 3), weight(5), weight(3, 2, dtype=torch.float64)]
    optimizer = AdamO(params, **backend)
    for g in (3e19, 1.0):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
            p.grad.view(-1)[0] = g
        optimizer.step()
        assert all(x.isfinite().all() for p in params for x in optimizer.state[p].values())
    assert all((p != old).all() for p, old in zip(params[:2], before, strict=False))
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 1, 2]


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype", "skipped"),
    [((8, 4), torch.float32, 0), ((32, 32), torch.float32, 1), ((32, 32), torch.float64, 0)],
    ids=["5.7e18", "3.2e19", "float64"],
)
def test_a_gradient_is_used_up_to_the_norm_that_is_stated(
    shape: tuple[int, int], dtype: torch.dtype, skipped: int, backend: dict[str, Any]
) -> None:
    """Entries of 10¹⁸: what counts is ‖g‖, up to 1.8·10¹⁹ in float32."""
    p = weight(*shape, dtype=dtype)
    before = p.detach().clone()
    optimizer = AdamO([p], **backend)
    p.grad = torch.full_like(p, 1e18)
    optimizer.step()
    assert last(optimizer)["guard_skipped"] == skipped
    assert torch.equal(p, before) == bool(skipped)
    assert p.isfinite().all()


@BACKENDS
def test_a_row_that_is_not_finite_leaves_the_others_alone(foreach: bool) -> None:
    p = weight(4, 3)
    before = p.detach().clone()
    optimizer = AdamO([p], block="row", foreach=foreach)
    p.grad = torch.ones_like(p)
    p.grad[2, 1] = float("nan")
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(p, before, strict=True)] == [
        False,
        False,
        True,
        False,
    ]
    assert optimizer.state[p]["step"].tolist() == [1, 1, 0, 1]
    assert p.isfinite().all()


def test_without_the_guard_a_nan_reaches_the_weight_as_in_adamw() -> None:
    p = weight(4, 3)
    optimizer = AdamO([p], guard=False)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert torch.isnan(p).any()


def test_a_first_gradient_that_is_not_finite_records_nothing() -> None:
    p = weight(4, 3)
    optimizer = AdamO([p])
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 0
    assert float(optimizer.state[p]["initial_norm"]) == -1


def clone(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.items()}


def same(state: dict[str, Any], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


@pytest.mark.parametrize("backend", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_quotient_that_overflows_leaves_the_weight_alone(backend: dict[str, Any]) -> None:
    """With β₂ = 0 and ε = 0 a gradient of 0 after a huge one makes m/√v infinite."""
    p = weight(8, 4)
    optimizer = AdamO([p], betas=(0.9, 0.0), eps=0.0, **backend)
    for g in (1e17, 0.0):
        p.grad = torch.full_like(p, g)
        optimizer.step()
    assert last(optimizer)["guard_update"] == 1.0
    assert p.isfinite().all()
