"""Limits in which the optimizers are something known, and what their geometry promises."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AdamO, AngularAdamW
from adamo_optim.reference import algorithm1

FOREACH = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
BACKENDS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=["for-loop", "foreach", "fused"])


def blocks(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=source, dtype=dtype)) for s in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    source = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source, dtype=p.dtype)


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach() - expected.detach()).norm() / expected.detach().norm())


# ---- AdamO is the paper ------------------------------------------------------------------------


@EVERY_BACKEND
@pytest.mark.parametrize("rule", ["general", "scale_invariant", "low_dim"])
def test_without_the_guard_and_with_a_number_adamo_is_algorithm_1(
    rule: str, backend: dict[str, bool]
) -> None:
    """By default, with no other argument: η_ρ = 100·η_θ and λ = 10⁻³."""
    (p,) = blocks((6, 5))
    optimizer = AdamO([{"params": [p], "rule": rule}], guard=False, curvature_target=2.0, **backend)
    w, state = p.detach().clone(), {}
    options = {"lr": 1e-3, "radial_lr": 0.1, "weight_decay": 1e-3, "curvature_target": 2.0}
    flags = {"low_dim": rule == "low_dim", "scale_invariant": rule == "scale_invariant"}
    for step in range(120):
        give_gradients([p], step)
        w = algorithm1(w, p.grad, state, **options, **flags)
        optimizer.step()
    assert relative(p, w) < 1e-10
    kept = optimizer.state[p]
    assert relative(kept["exp_avg"], state["m_tangential"]) < 1e-10
    assert relative(kept["exp_avg_sq"], state["v_tangential"]) < 1e-10


@EVERY_BACKEND
def test_the_paper_s_settings_are_algorithm_1_s_own_defaults(backend: dict[str, bool]) -> None:
    (p,) = blocks((6, 5))
    optimizer = AdamO.paper([p], **backend)
    w, state = p.detach().clone(), {}
    for step in range(120):
        give_gradients([p], step)
        w = algorithm1(w, p.grad, state)
        optimizer.step()
    assert relative(p, w) < 1e-10


@EVERY_BACKEND
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_low_dim_is_adam(dtype: torch.dtype, maximize: bool, backend: dict[str, bool]) -> None:
    ours = blocks((6, 5), (7,), (3, 2, 2), dtype=dtype)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    common: dict[str, Any] = {"lr": 3e-3, "maximize": maximize}
    groups = [{"params": ours, "rule": "low_dim"}]
    trained(AdamO(groups, weight_decay=7.0, **backend, **common), ours, 100)  # which takes no part
    trained(torch.optim.Adam(theirs, **common), theirs, 100)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@FOREACH
def test_low_dim_scale_shrinks_the_step(foreach: bool) -> None:
    (a,), (b,) = blocks((8,)), blocks((8,))
    start = a.detach().clone()
    for p, alpha in ((a, 1.0), (b, 0.25)):
        give_gradients([p], 0)
        AdamO([p], low_dim_scale=alpha, foreach=foreach).step()
    torch.testing.assert_close((b - start) * 4, a - start)


def without_radial(**options: Any) -> dict[str, Any]:
    return {"weight_decay": 0.0, "radial_lr": 0.0, "curvature_target": None, **options}


@FOREACH
def test_the_tangential_step_is_orthogonal_to_the_weight(foreach: bool) -> None:
    """So the norm grows by the second order of the step: Pythagoras."""
    (p,) = blocks((9, 4))
    optimizer = AdamO([p], lr=0.1, foreach=foreach, **without_radial())
    for step in range(20):
        before = p.detach().clone()
        give_gradients([p], step)
        optimizer.step()
        change = p.detach() - before
        assert float(change.norm()) > 0.01
        assert abs(float((change * before).sum())) < 1e-12 * float(change.norm() * before.norm())
        expected = (before.norm() ** 2 + change.norm() ** 2).sqrt()
        assert float(p.detach().norm()) == pytest.approx(float(expected), rel=1e-13)


def test_the_radial_step_is_sgd_with_momentum_on_the_norm() -> None:
    """Without curvature, decay and tangential step ‖w‖ moves by η_ρ·m̂^ρ; its direction stays."""
    (p,) = blocks((9, 4))
    start = p.detach().clone()
    options = {"lr": 0.0, "radial_lr": 0.02, "weight_decay": 0.0, "radial_beta": 0.8}
    optimizer = AdamO([p], curvature_target=None, guard=False, **options)
    size, momentum = float(start.norm()), 0.0
    for step in range(20):
        give_gradients([p], step)
        along = float((p.grad * start).sum() / start.norm())
        momentum = 0.8 * momentum + 0.2 * along
        size -= 0.02 * momentum / (1 - 0.8 ** (step + 1))
        optimizer.step()
        torch.testing.assert_close(p.detach(), start * (size / start.norm()), rtol=1e-11, atol=0)


def test_a_scale_invariant_weight_takes_no_radial_step() -> None:
    (p,) = blocks((9, 4))
    start = p.detach().clone()
    groups = [{"params": [p], "rule": "scale_invariant"}]
    optimizer = AdamO(groups, lr=0.0, radial_lr=0.5, weight_decay=1e-3, curvature_target=None)
    trained(optimizer, [p], 10)
    torch.testing.assert_close(p.detach(), start * (1 - 5e-4) ** 10, rtol=1e-12, atol=0)


def test_the_online_test_makes_every_weight_scale_invariant_at_a_large_delta() -> None:
    ends = []
    for options in ({"delta": 1e6}, {"rule": "scale_invariant"}):
        (p,) = blocks((9, 4))
        trained(AdamO([{"params": [p], "wd_ratio": 0.5, **options}]), [p], 20)
        ends.append(p)
    assert torch.equal(*ends)


def test_a_row_is_a_block_of_its_own() -> None:
    """``block="row"`` of a matrix is ``block="tensor"`` of its rows."""
    (p,) = blocks((4, 7))
    rows = [nn.Parameter(row.detach().clone().view(1, 7)) for row in p]
    together, apart = AdamO([p], block="row"), AdamO(rows)
    for step in range(30):
        give_gradients([p], step)
        for row, g in zip(rows, p.grad, strict=True):
            row.grad = g.view(1, 7).clone()
        together.step()
        apart.step()
    torch.testing.assert_close(p.detach(), torch.cat(rows).detach(), rtol=1e-11, atol=1e-12)


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


# ---- AngularAdamW is AdamW where nothing turns -------------------------------------------------


class Attention(nn.Module):
    """A block of a GPT without QK-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.middle = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.middle(x))))


class GPT(nn.Module):
    def __init__(self, words: int = 17, width: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
    )


def loss_of(model: nn.Module, step: int) -> Tensor:
    source = torch.Generator().manual_seed(step)
    if isinstance(model, nn.Sequential):
        target = torch.randint(0, 5, (4,), generator=source)
        return F.cross_entropy(model(torch.randn(4, 8, generator=source)), target)
    tokens = torch.randint(0, 17, (2, 9), generator=source)
    if isinstance(model, nn.Embedding):
        return model(tokens).square().mean() - model(tokens[:, ::2]).sum()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {"MLP": mlp, "GPT": GPT, "embedding": lambda: nn.Embedding(17, 6)}


@EVERY_BACKEND
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_where_nothing_turns_200_steps_are_adamw_s_bit_for_bit(
    make: Any, backend: dict[str, bool]
) -> None:
    ends = []
    for cls in (AngularAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = make()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no group says")
            optimizer = cls(model.parameters(), lr=3e-3, weight_decay=0.1, **backend)
        for step in range(200):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_kept_lists_give_adamws_bits_whatever_happens_between_steps() -> None:
    """Missing and new gradients, other numbers, replaced state, other layouts: as torch does."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.randn(n, 4)) for n in (3, 5, 7)] for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    angular = AngularAdamW([{"params": ours, "rule": "general"}], lr=1e-2, fused=True)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    events: dict[int, Callable[[torch.optim.Optimizer], None]] = {
        6: lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
        9: lambda o: o.param_groups[0].update(lr=torch.tensor(5e-3)),
        11: lambda o: o.param_groups[0].update(lr=2e-3, betas=(0.8, 0.99)),
        13: lambda o: o.state[o.param_groups[0]["params"][0]].update(
            exp_avg=torch.ones(3, 4), exp_avg_sq=torch.ones(3, 4)
        ),
        15: lambda o: o.state[o.param_groups[0]["params"][1]].update(note="a user's"),
    }
    for t in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = None if t in (3, 17) and p is ours[1] else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
        for optimizer in (angular, adamw):
            events.get(t, lambda o: None)(optimizer)
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q), t
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(angular.state[p][key], adamw.state[q][key]), (t, key)


def test_no_gradient_outlives_zero_grad() -> None:
    """The lists that are kept between steps hold none."""
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = AngularAdamW([{"params": [p], "rule": "general"}], fused=True)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        gone = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gone() is None


@EVERY_BACKEND
@pytest.mark.parametrize("start", ["zero", "one entry"])
def test_what_has_no_direction_follows_adamw_though_it_is_declared(
    start: str, backend: dict[str, bool]
) -> None:
    shape = (5, 4) if start == "zero" else (1, 1)
    ours, theirs = (nn.Parameter(torch.full(shape, 0.0 if start == "zero" else 0.5)) for _ in "ab")
    angular = AngularAdamW([{"params": [ours], "rule": "scale_invariant"}], lr=1e-2, **backend)
    adamw = torch.optim.AdamW([theirs], lr=1e-2, **backend)
    assert "AdamW" in angular.explain()[0].reason or "norm is 0" in angular.explain()[0].reason
    for step in range(30):
        give_gradients([ours], step)
        theirs.grad = ours.grad.clone()
        angular.step()
        adamw.step()
    assert torch.equal(ours, theirs)
    assert angular.explain()[0].rule == "general"


# ---- weights that turn -------------------------------------------------------------------------


def turning(p: nn.Parameter, **options: Any) -> AngularAdamW:
    return AngularAdamW([{"params": [p], "rule": "scale_invariant"}], **options)


def angle(p: Tensor, q: Tensor) -> float:
    a, b = (x.detach().double().flatten() for x in (p, q))
    return 2 * math.atan2(
        float((a / a.norm() - b / b.norm()).norm()), float((a / a.norm() + b / b.norm()).norm())
    )


@pytest.mark.parametrize(
    ("backend", "steps"),
    [({"foreach": False}, 2_000), ({"fused": True}, 100_000)],
    ids=["2000-for-loop", "100000-fused"],
)
def test_the_norm_of_a_float32_weight_is_what_it_was(backend: dict[str, bool], steps: int) -> None:
    (p,) = blocks((8, 6), dtype=torch.float32)
    start = float(p.detach().double().norm())
    optimizer = turning(p, lr=7e-4, **backend)
    source = torch.Generator().manual_seed(1)
    draws = torch.randn(512, 8, 6, generator=source)
    p.grad = draws[0].clone()
    for step in range(steps):
        p.grad.copy_(draws[step % 512])
        optimizer.step()
    assert float(p.detach().double().norm()) == pytest.approx(start, rel=1e-6)


def test_the_norm_of_a_bfloat16_weight_does_not_drift() -> None:
    """Every step rounds to 3 digits; the next one starts from what is there, and aims at ρ₀."""
    (p,) = blocks((16, 16), dtype=torch.bfloat16)
    start = float(p.detach().double().norm())
    optimizer = turning(p, lr=7e-4)
    source = torch.Generator().manual_seed(1)
    draws = torch.randn(512, 16, 16, generator=source).bfloat16()
    norms = []
    for step in range(10_000):
        p.grad = draws[step % 512]
        optimizer.step()
        if step % 100 == 99:
            norms.append(float(p.detach().double().norm()) / start)
    # the rounding of one step: 2⁻⁹ of each entry at most, at random
    assert max(abs(norm - 1) for norm in norms) < 2**-9
    halves = sum(norms[:50]) / 50, sum(norms[50:]) / 50
    assert halves[0] == pytest.approx(halves[1], abs=2e-4)


@EVERY_BACKEND
@pytest.mark.parametrize("angular_rms", [0.015, None], ids=str)
@pytest.mark.parametrize("lr", [1e-3, 1.0])
def test_an_angle_is_never_above_its_bound(
    lr: float, angular_rms: float | None, backend: dict[str, bool]
) -> None:
    """max_angle·rms(u), u of the step as the reference has it; and at most what is bounded."""
    (p,) = blocks((20, 9))
    optimizer = turning(p, lr=lr, angular_rms=angular_rms, max_angle=0.05, **backend)
    m, s, bounded = torch.zeros_like(p), 0.0, 0
    for step in range(40):
        give_gradients([p], step)
        p.grad *= 10.0 ** (step % 7 - 3)  # gradients that shrink: m outlives s
        m = 0.9 * m + 0.1 * p.grad
        s = 0.999 * s + 0.001 * float(p.grad.square().mean())
        u = m / (1 - 0.9 ** (step + 1)) / (math.sqrt(s / (1 - 0.999 ** (step + 1))) + 1e-8)
        rms, before = float(u.square().mean().sqrt()), p.detach().clone()
        optimizer.step()
        found = optimizer.diagnostics(synchronize=True)["group0.param0"]
        assert found["angle"] <= 0.05 * rms * (1 + 1e-9)
        assert angle(p, before) == pytest.approx(found["angle"], rel=1e-6, abs=1e-9)
        bounded += int(found["at_max_angle"])
    asked = lr / (0.015 if angular_rms else float(optimizer.state[p]["initial_norm"]) / 180**0.5)
    assert bounded == (40 if asked > 0.05 else 0)


@EVERY_BACKEND
def test_one_angle_for_weights_of_any_size(backend: dict[str, bool]) -> None:
    """The first u has entries around ±1, so the first angle is about lr/angular_rms."""
    params = blocks((6, 5), (40, 30), (3, 200))
    with torch.no_grad():
        params[1].mul_(20)
        params[2].mul_(0.01)
    groups = [{"params": params, "rule": "scale_invariant"}]
    optimizer = AngularAdamW(groups, lr=1e-3, angular_rms=0.1, **backend)
    give_gradients(params, 0)
    optimizer.step()
    angles = [row["angle"] for row in optimizer.diagnostics(synchronize=True).values()]
    assert angles == pytest.approx([0.01] * 3, rel=0.02)


@EVERY_BACKEND
@pytest.mark.parametrize("second_moment", ["tensor", "row"])
def test_numbers_of_a_weight_are_edited_in_place(
    second_moment: str, backend: dict[str, bool]
) -> None:
    """For all of its rows, many tasks of them."""
    (p,) = blocks((200, 300))
    optimizer = turning(p, second_moment=second_moment, **backend)
    give_gradients([p], 0)
    optimizer.step()
    optimizer.state[p]["initial_norm"].fill_(50.0)
    optimizer.state[p]["step"].fill_(7.0)
    optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(50.0, rel=1e-12)
    assert int(optimizer.state[p]["step"]) == 8
    u = 0.19 / (1 - 0.9**8) / math.sqrt((1 - 0.999**2) / (1 - 0.999**8))  # of one gradient, twice
    (found,) = optimizer.diagnostics(synchronize=True).values()
    assert found["angle"] == pytest.approx(0.05 * u, rel=0.01)


@EVERY_BACKEND
@pytest.mark.parametrize("second_moment", ["tensor", "row"])
@pytest.mark.parametrize("size", [1e-27, 1e27])
def test_squares_that_float32_does_not_hold(
    size: float, second_moment: str, backend: dict[str, bool]
) -> None:
    """Without ε the size of the gradients cannot matter."""
    (p,) = blocks((32, 48), dtype=torch.float32)
    q = nn.Parameter(p.detach().double())
    options: dict[str, Any] = {"eps": 0.0, "second_moment": second_moment}
    optimizers = turning(p, **options, **backend), turning(q, **options)
    for step in range(5):
        give_gradients([q], step)
        q.grad *= size
        p.grad = q.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(p.detach().double(), q.detach(), rtol=1e-4, atol=1e-6)


@EVERY_BACKEND
def test_a_zero_gradient_without_momentum_leaves_the_weight(backend: dict[str, bool]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (p,) = blocks((8, 6), dtype=dtype)
        start = p.detach().clone()
        optimizer = turning(p, weight_decay=0.5, **backend)
        for _ in range(5):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        assert torch.equal(p, start)
        assert int(optimizer.state[p]["step"]) == 5


@EVERY_BACKEND
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_does_what_it_does_under_adamw(
    bad: float, backend: dict[str, bool]
) -> None:
    (p,), (q,) = blocks((4, 3), dtype=torch.float32), blocks((4, 3), dtype=torch.float32)
    for weight, optimizer in ((p, turning(p, **backend)), (q, torch.optim.AdamW([q], **backend))):
        give_gradients([weight], 0)
        weight.grad[1, 2] = bad
        optimizer.step()
        assert not weight.isfinite().all()


@EVERY_BACKEND
def test_decay_does_not_act_on_a_weight_that_turns(backend: dict[str, bool]) -> None:
    ends = []
    for decay in (0.0, 5.0):
        (p,) = blocks((9, 4))
        start = float(p.detach().norm())
        trained(turning(p, weight_decay=decay, **backend), [p], 50)
        assert float(p.detach().norm()) == pytest.approx(start, rel=1e-12)
        ends.append(p)
    assert torch.equal(*ends)


def test_turning_the_space_of_a_weight_turns_all_its_steps() -> None:
    """One second moment knows no axes, unlike Adam's."""
    source = torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(30, 30, generator=source, dtype=torch.float64)).Q
    (a,) = blocks((6, 5))
    b = nn.Parameter((turn @ a.detach().flatten()).view(6, 5))
    optimizer = AngularAdamW([{"params": [a, b], "rule": "scale_invariant"}], lr=0.1)
    for step in range(10):
        give_gradients([a], step)
        b.grad = (turn @ a.grad.flatten()).view(6, 5)
        optimizer.step()
    assert relative(b.detach().flatten(), turn @ a.detach().flatten()) < 1e-12


def two_networks(scale: float) -> list[nn.Sequential]:
    """The same function twice: a weight before BatchNorm differs by a factor."""
    networks = []
    for factor in (1.0, scale):
        torch.manual_seed(1)
        first, norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-200)
        networks.append(nn.Sequential(first, norm, nn.Linear(8, 2)).double())
        with torch.no_grad():
            first.weight.mul_(factor)
    return networks


@pytest.mark.parametrize(
    ("angular_rms", "rates"),
    [(0.05, (1e-2, 1e-2)), (None, (1e-2, 5e-2))],
    ids=["angular_rms", "the weight's own norm"],
)
def test_the_scale_of_a_scale_invariant_weight_changes_nothing(
    angular_rms: float | None, rates: tuple[float, float]
) -> None:
    """The directions, and with them the function, stay the same, step after step; relative to the
    weight's own norm they do at a learning rate that grows with it."""
    networks, optimizers = two_networks(5.0), []
    for net, lr in zip(networks, rates, strict=True):
        groups = [
            {"params": [net[0].weight], "rule": "scale_invariant", "lr": lr},
            {"params": [*net[1].parameters(), *net[2].parameters()], "lr": 1e-2},
        ]
        options = {"angular_rms": angular_rms, "max_angle": 0.5, "eps": 1e-150}
        optimizers.append(AngularAdamW(groups, **options))
    for step in range(30):
        source = torch.Generator().manual_seed(step)
        x, y = (torch.randn(32, n, generator=source, dtype=torch.float64) for n in (6, 2))
        losses = []
        for net, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    one, other = (net[0].weight for net in networks)
    assert angle(one, other) < 1e-9
    assert float(other.detach().norm() / one.detach().norm()) == pytest.approx(5.0, rel=1e-12)


def test_the_angle_of_a_first_step_relative_to_its_own_norm_is_adamw_s() -> None:
    """angular_rms=None: the first angle is the one AdamW's first step would have, up to β and ε."""
    (p,), (q,) = blocks((40, 30)), blocks((40, 30))
    for weight, optimizer in (
        (p, turning(p, lr=1e-2, angular_rms=None)),
        (q, torch.optim.AdamW([q], lr=1e-2, weight_decay=0.0)),
    ):
        draw = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
        weight.grad = draw.sign().double()
        optimizer.step()
    (start,) = blocks((40, 30))
    assert angle(p, start) == pytest.approx(angle(q, start), rel=1e-3)
