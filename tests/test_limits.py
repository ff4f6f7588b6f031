"""Limits in which AdamO is something known, and what its geometry promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO

BACKENDS = [False, True]
RADIAL = pytest.mark.parametrize("radial", ["adam", "sgd"])


def blocks(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=source, dtype=dtype)) for s in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    source = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source, dtype=p.dtype)


@pytest.mark.parametrize("foreach", BACKENDS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"), [(torch.optim.AdamW, {}), (torch.optim.Adam, {"low_dim_decay": 0.0})]
)
def test_all_low_dim_is_adamw_or_adam(
    cls: type[torch.optim.Optimizer],
    options: dict[str, float],
    dtype: torch.dtype,
    maximize: bool,
    foreach: bool,
) -> None:
    ours = blocks((6, 5), (7,), (3, 2, 2), dtype=dtype)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    common: dict[str, Any] = {"lr": 3e-3, "maximize": maximize}
    adam = cls(theirs, **common)  # type: ignore[arg-type]
    adamo = AdamO([{"params": ours, "rule": "low_dim"}], foreach=foreach, **common, **options)
    for step in range(100):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        adam.step()
        adamo.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()


ADAMW_AS_ADAMO = {"radial": "adam", "radial_lr_ratio": 1.0, "curvature_target": None}


@pytest.mark.parametrize("foreach", BACKENDS)
@pytest.mark.parametrize("maximize", [False, True])
def test_adams_radial_part_at_ratio_one_is_adamw(maximize: bool, foreach: bool) -> None:
    ours = blocks((6, 5), (4, 3, 2))
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 3e-3, "weight_decay": 0.2, "maximize": maximize}
    trained(AdamO(ours, foreach=foreach, **ADAMW_AS_ADAMO, **options), ours, 100)
    trained(torch.optim.AdamW(theirs, **options), theirs, 100)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_ratio_scales_adams_radial_part_and_leaves_the_rest() -> None:
    steps = []
    for ratio in (0.0, 1.0, 3.0):
        (p,) = blocks((6, 5))
        start = p.detach().clone()
        give_gradients([p], 0)
        AdamO([p], weight_decay=0.0, **{**ADAMW_AS_ADAMO, "radial_lr_ratio": ratio}).step()
        change = p.detach() - start
        along = (change * start).sum() / start.square().sum()
        steps.append((float(along), change - along * start))
    assert steps[0][0] == pytest.approx(0, abs=1e-15)
    assert abs(steps[1][0]) > 1e-5
    assert steps[2][0] == pytest.approx(3 * steps[1][0], rel=1e-9)
    for _, across in steps[1:]:
        torch.testing.assert_close(across, steps[0][1], rtol=1e-9, atol=1e-15)


def test_one_angle_for_blocks_of_any_size() -> None:
    params = blocks((6, 5), (40, 30), (3, 200))
    with torch.no_grad():
        params[1].mul_(20)
        params[2].mul_(0.01)
    options = {"lr": 1e-3, "angular_rms": 0.1, "tangential": "angular", **without_radial()}
    optimizer = AdamO(params, **options)
    give_gradients(params, 0)
    optimizer.step()  # the first quotient of Adam is ±1 everywhere
    angles = [row["angle"] for row in optimizer.diagnostics(synchronize=True).values()]
    assert angles == pytest.approx([0.01] * 3, rel=0.05)


def test_auto_turns_scale_invariant_blocks_and_adds_to_the_others() -> None:
    ends: dict[str, list[nn.Parameter]] = {}
    for tangential in ("additive", "angular", "auto"):
        a, b = ends[tangential] = blocks((6, 5), (6, 5))
        with torch.no_grad():
            b.copy_(a)
        groups = [
            {"params": [a], "rule": "scale_invariant"},
            {"params": [b], "rule": "general"},
        ]
        trained(AdamO(groups, lr=0.1, weight_decay=0.0, tangential=tangential), [a, b], 5)
    assert torch.equal(ends["auto"][0], ends["angular"][0])
    assert torch.equal(ends["auto"][1], ends["additive"][1])
    assert not torch.equal(ends["additive"][0], ends["angular"][0])


@RADIAL
@pytest.mark.parametrize(("moment", "alike"), [("block", True), ("entry", False)])
def test_one_second_moment_knows_no_axes(moment: str, alike: bool, radial: str) -> None:
    """Turning the space of a weight turns all its steps, as with SGD and not with Adam."""
    source = torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(30, 30, generator=source, dtype=torch.float64)).Q
    (a,) = blocks((6, 5))
    b = nn.Parameter((turn @ a.detach().flatten()).view(6, 5))
    optimizer = AdamO([a, b], lr=0.1, weight_decay=0.0, radial=radial, second_moment=moment)
    for step in range(10):
        give_gradients([a], step)
        b.grad = (turn @ a.grad.flatten()).view(6, 5)
        optimizer.step()
    difference = float((turn @ a.detach().flatten() - b.detach().flatten()).norm())
    assert (difference < 1e-12) is alike


def test_one_second_moment_moves_along_the_averaged_gradient() -> None:
    (p,) = blocks((6, 5))
    optimizer = AdamO([p], lr=0.1, second_moment="block")
    trained(optimizer, [p], 5)
    before = p.detach().clone()
    give_gradients([p], 5)
    optimizer.step()
    basis = torch.stack([before.flatten(), optimizer.state[p]["exp_avg"].flatten()], dim=1)
    change = (p.detach() - before).flatten()
    q = torch.linalg.qr(basis).Q
    assert float((change - q @ (q.T @ change)).norm()) < 1e-12 * float(change.norm())


@pytest.mark.parametrize(
    "asked",
    [{"second_moment": "block"}, {"second_moment": "auto", "rule": "scale_invariant"}],
    ids=["block", "auto"],
)
@pytest.mark.parametrize("backend", [{"foreach": False}, {"foreach": True}, {}], ids=str)
def test_one_second_moment_survives_entries_whose_square_is_too_large(
    backend: dict[str, Any], asked: dict[str, str]
) -> None:
    """v overflows in float32, and its mean, a float64, does not."""
    (p,) = blocks((6, 5), dtype=torch.float32)
    optimizer = AdamO([{"params": [p], **asked}], guard=False, **backend)
    for step in range(3):
        give_gradients([p], step)
        p.grad[0, 0] = 1e25
        before = p.detach().clone()
        optimizer.step()
        assert bool(p.isfinite().all())
        assert not torch.equal(p, before)
    assert bool(optimizer.state[p]["exp_avg_sq"].isinf().any())


@pytest.mark.parametrize("foreach", BACKENDS)
def test_low_dim_scale_shrinks_the_step(foreach: bool) -> None:
    (a,), (b,) = blocks((8,)), blocks((8,))
    start = a.detach().clone()
    for p, alpha in ((a, 1.0), (b, 0.25)):
        give_gradients([p], 0)
        AdamO([p], low_dim_scale=alpha, low_dim_decay=0.0, foreach=foreach).step()
    torch.testing.assert_close((b - start) * 4, a - start)


@pytest.mark.parametrize("foreach", BACKENDS)
def test_with_decay_low_dimensional_parameters_follow_adamw(foreach: bool) -> None:
    """Those that start at zero, too."""
    ours, theirs = ([*blocks((8,), (3,)), nn.Parameter(torch.zeros(5))] for _ in range(2))
    adamo = AdamO(ours, lr=0.01, low_dim_decay=0.4, weight_decay=7.0, foreach=foreach)
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.4)
    for step in range(5):
        for parameters, optimizer in ((ours, adamo), (theirs, adamw)):
            give_gradients(parameters, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def without_radial(**options: Any) -> dict[str, Any]:
    return {"weight_decay": 0.0, "radial_lr": 0.0, "curvature_target": None, **options}


@RADIAL
@pytest.mark.parametrize("foreach", BACKENDS)
def test_tangential_step_is_orthogonal_to_the_weight(foreach: bool, radial: str) -> None:
    (p,) = blocks((9, 4))
    optimizer = AdamO([p], lr=0.1, foreach=foreach, **without_radial(radial=radial))
    for step in range(20):
        before = p.detach().clone()
        give_gradients([p], step)
        optimizer.step()
        change = p.detach() - before
        assert float(change.norm()) > 0.01
        assert abs(float((change * before).sum())) < 1e-12 * float(change.norm() * before.norm())


@RADIAL
def test_additive_norm_grows_by_the_second_order_of_the_tangential_step(radial: str) -> None:
    (p,) = blocks((9, 4))
    optimizer = AdamO([p], lr=0.1, **without_radial(radial=radial))
    for step in range(10):
        before = p.detach().clone()
        give_gradients([p], step)
        optimizer.step()
        change = p.detach() - before
        expected = (before.norm() ** 2 + change.norm() ** 2).sqrt()  # Pythagoras
        assert float(p.detach().norm()) == pytest.approx(float(expected), rel=1e-13)


@RADIAL
@pytest.mark.parametrize("foreach", BACKENDS)
def test_angular_norm_moves_through_the_radial_part_alone(foreach: bool, radial: str) -> None:
    (p,) = blocks((9, 4))
    options = without_radial(radial=radial, tangential="angular")
    optimizer = AdamO([p], lr=0.1, foreach=foreach, **options)
    start = float(p.detach().norm())
    for step in range(50):
        give_gradients([p], step)
        optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(start, rel=1e-12)

    optimizer.param_groups[0].update(weight_decay=0.1, decay_lr="tangential")
    give_gradients([p], 99)
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(0.99 * start, rel=1e-12)


@RADIAL
@pytest.mark.parametrize(("tangential", "kept"), [("auto", True), ("additive", False)])
def test_a_turning_weight_that_is_scale_invariant_keeps_its_norm(
    tangential: str, kept: bool, radial: str
) -> None:
    """Whatever the decay: it would change nothing but the size of the gradient."""
    (p,) = blocks((9, 4))
    options = {"weight_decay": 1.0, "radial_lr": 1e-3, "tangential": tangential}
    groups = [{"params": [p], "rule": "scale_invariant"}]
    start = float(p.detach().norm())
    trained(AdamO(groups, lr=1e-3, radial=radial, **options), [p], 50)
    assert (float(p.detach().norm()) == pytest.approx(start, rel=1e-12)) is kept


@RADIAL
def test_a_weight_that_keeps_its_norm_has_no_use_for_curvature(radial: str) -> None:
    """η_ρ,t sets nothing there, so it is not computed, and the previous gradient is not kept."""
    ends = []
    for target in (3.0, "auto", None):
        (p,) = blocks((9, 4))
        groups = [{"params": [p], "rule": "scale_invariant"}]
        optimizer = AdamO(groups, radial=radial, curvature_target=target)
        trained(optimizer, [p], 20)
        assert "previous_grad" not in optimizer.state[p]
        seen = optimizer.diagnostics(synchronize=True)["group0.param0"]
        assert seen["eta_radial"] == pytest.approx(2e-3)
        assert math.isnan(seen["tau"])
        ends.append(p)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_curvature_begins_anew_when_a_weight_no_longer_keeps_its_norm() -> None:
    (p,) = blocks((9, 4))
    optimizer = AdamO([{"params": [p], "rule": "scale_invariant"}], tangential="additive")
    state, (group,) = optimizer.state[p], optimizer.param_groups
    for tangential, kept in (("additive", True), ("auto", False), ("angular", False)):
        group["tangential"] = tangential
        trained(optimizer, [p], 3)
        assert ("previous_grad" in state) is kept
        assert (float(state["tau"]) > 0) is kept
    group["tangential"] = "additive"
    trained(optimizer, [p], 3)
    assert torch.equal(state["previous_grad"], p.grad)
    assert int(state["curvature_step"]) == 3


def test_a_weight_that_passes_the_online_test_does_not_turn() -> None:
    """Chance lets ordinary weights pass now and then, and their step must not change its size."""
    ends = []
    for tangential in ("auto", "additive"):
        (p,) = blocks((9, 4))
        optimizer = AdamO([p], delta=1e6, tangential=tangential, second_moment="auto")
        trained(optimizer, [p], 5)
        assert optimizer.diagnostics(synchronize=True)["group0.param0"]["scale_invariant"]
        ends.append(p)
    assert torch.equal(*ends)


@pytest.mark.parametrize(("tangential", "same"), [("angular", True), ("additive", False)])
def test_the_turn_of_an_angular_step_does_not_depend_on_the_norm(
    tangential: str, same: bool
) -> None:
    angles = []
    for size in (1.0, 7.0):
        (p,) = blocks((9, 4))
        options = without_radial(tangential=tangential, angular_rms=None)
        optimizer = AdamO([p], lr=0.1, **options)
        give_gradients([p], 0)
        optimizer.step()  # records ‖w₀‖
        with torch.no_grad():
            p.mul_(size)
        before = p.detach().clone()
        give_gradients([p], 1)
        optimizer.step()
        cosine = (p.detach() * before).sum() / (p.detach().norm() * before.norm())
        angles.append(float(torch.arccos(cosine)))
    assert (angles[0] == pytest.approx(angles[1], rel=1e-6)) is same


def test_equilibrium_is_where_adamw_comes_to_rest() -> None:
    """In noise on a scale-invariant weight AdamW ends up with entries of √(lr/2wd), and turns by
    √(2·lr·wd·(1−β₁)/(1+β₁)) a step (Kosson, Messmer, Jaggi, 2023); with
    angular_rms="equilibrium" AdamO does so from the start, whatever the norm."""

    def angles(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: range) -> float:
        source, turned = torch.Generator().manual_seed(2), []
        for step in range(steps.stop):
            old = p.detach().clone()
            g = torch.randn(p.shape, generator=source, dtype=p.dtype) / old.norm()
            p.grad = g - (g * old).sum() / old.square().sum() * old
            optimizer.step()
            cosine = (old * p.detach()).sum() / (old.norm() * p.detach().norm())
            turned.append(float(cosine.clamp(max=1).acos()) if step in steps else 0.0)
        return sum(turned) / len(steps)

    for lr, decay in ((7e-3, 0.5), (1e-2, 0.45)):
        (theirs,) = blocks((40, 30))
        adamw = torch.optim.AdamW([theirs], lr=lr, weight_decay=decay)
        expected = (2 * lr * decay * 0.1 / 1.9) ** 0.5
        assert angles(adamw, theirs, range(1500, 2000)) == pytest.approx(expected, rel=0.05)
        for scale in (0.1, 10.0):
            (ours,) = blocks((40, 30))
            with torch.no_grad():
                ours.mul_(scale)
            group = {"params": [ours], "rule": "scale_invariant", "weight_decay": decay / 2}
            adamo = AdamO([group], lr=lr, angular_rms="equilibrium")  # radial_lr_ratio is 2
            assert angles(adamo, ours, range(50, 400)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, (1e-2, 1e-2)),
        # w₀ is 5 times larger, and so is the length that turns it by the same angle
        ({"tangential": "angular", "angular_rms": None}, (1e-2, 5e-2)),
    ],
    ids=["defaults", "angle relative to the first weight"],
)
def test_rescaling_a_scale_invariant_weight_changes_nothing_in_function_space(
    options: dict[str, Any], rates: tuple[float, float]
) -> None:
    """With the angular step, two copies of a network that differ by the scale of a weight in front
    of BatchNorm stay the same function, step after step."""
    torch.manual_seed(0)
    networks = []
    for _ in range(2):
        torch.manual_seed(1)
        first, norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-200)
        networks.append(nn.Sequential(first, norm, nn.Linear(8, 2)).double())
    with torch.no_grad():
        networks[1][0].weight.mul_(5.0)
    optimizers = []
    for net, lr in zip(networks, rates, strict=True):
        groups = [
            {"params": [net[0].weight], "rule": "scale_invariant", "lr": lr, "radial_lr": 0.1},
            {"params": [*net[1].parameters(), *net[2].parameters()], "lr": 1e-2},
        ]
        optimizers.append(AdamO(groups, eps=0.0, weight_decay=1e-3, **options))
    for _ in range(30):
        x, y = torch.randn(32, 6, dtype=torch.float64), torch.randn(32, 2, dtype=torch.float64)
        losses = []
        for net, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_auto_curvature_is_scale_free() -> None:
    """Multiplying the loss by a constant leaves η_ρ,t alone; a number for τ_target does not."""
    found: dict[object, list[float]] = {}
    for target in ("auto", 1.0):
        for scale in (1.0, 1e4):
            (p,) = blocks((6, 5))
            optimizer = AdamO([p], curvature_target=target, guard=False, radial_lr=1e-6)
            for step in range(30):
                give_gradients([p], step)
                assert p.grad is not None
                p.grad *= scale
                optimizer.step()
            rows = optimizer.diagnostics(synchronize=True)
            found.setdefault(target, []).append(rows["group0.param0"]["eta_radial"])
    assert found["auto"][0] == pytest.approx(found["auto"][1], rel=1e-6)
    assert found[1.0][0] > 1e3 * found[1.0][1]


@pytest.mark.filterwarnings("ignore:weight_decay=.*of every weight:UserWarning")
@pytest.mark.parametrize(("decay_lr", "step"), [("radial", 0.5), ("tangential", 0.01)])
def test_isotropic_decay_uses_the_tangential_step_size(decay_lr: str, step: float) -> None:
    (p,) = blocks((5, 4))
    start = float(p.detach().norm())
    p.grad = torch.zeros_like(p)
    options = {"lr": 0.01, "radial_lr": 0.5, "weight_decay": 0.1, "curvature_target": None}
    AdamO([p], decay_lr=decay_lr, **options).step()
    assert float(p.detach().norm()) == pytest.approx(start * (1 - step * 0.1), rel=1e-12)
