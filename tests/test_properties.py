"""Property tests: no setting of AdamO destroys a weight, and a turn of AngularAdamW is a turn.

Each example is one optimizer with eight groups of their own options, rules and scales, so the run
covers thousands of option sets.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from adamo_optim import AdamO, AngularAdamW

SCALES = st.integers(-15, 15).map(lambda exponent: 10.0**exponent)
BETA = st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999])
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-6, 1e-3, 1e-1, 1.0, 10.0]),
        "betas": st.tuples(BETA, BETA),
        "eps": st.sampled_from([0.0, 1e-15, 1e-8, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 1e-3, 0.1, 1.0, 100.0]),
        "radial_lr_ratio": st.sampled_from([0.0, 1.0, 100.0, 1e6]),
        "radial_lr": st.sampled_from([None, 0.0, 1e-3, 0.1, 1e3]),
        "radial_beta": BETA,
        "curvature_target": st.sampled_from(["auto", None, 1e-12, 1.0, 1e12]),
        "curvature_beta": BETA,
        "previous_gradient": st.sampled_from(["exact", "bfloat16", "sampled"]),
        "decay_lr": st.sampled_from(["radial", "tangential"]),
        "block": st.sampled_from(["tensor", "row"]),
        "low_dim": st.sampled_from(["auto", None, 10]),
        "low_dim_scale": st.sampled_from([0.1, 1.0]),
        "delta": st.sampled_from([None, 0.1, 10.0]),
        "wd_ratio": st.sampled_from([0.0, 0.5, 1.0]),
        "maximize": st.booleans(),
        "rule": st.sampled_from(["auto", "general", "scale_invariant", "low_dim"]),
    }
).filter(lambda options: (options["block"], options["previous_gradient"]) != ("row", "sampled"))
GROUPS = st.lists(st.tuples(OPTIONS, SCALES, SCALES), min_size=8, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.float64])
KINDS = st.lists(
    st.sampled_from(["noise", "zero", "along", "against", "constant", "one_entry"]),
    min_size=1,
    max_size=6,
)


def gradient(kind: str, p: torch.Tensor, scale: float) -> torch.Tensor:
    if kind == "zero":
        return torch.zeros_like(p)
    if kind in ("along", "against"):
        g = p.detach() / p.detach().norm().clamp(min=1e-30)
        return g * (scale if kind == "along" else -scale)
    if kind == "constant":
        return torch.full_like(p, scale)
    if kind == "one_entry":
        g = torch.zeros_like(p)
        g.view(-1)[0] = scale
        return g
    return torch.randn_like(p) * scale


def build(groups: list[dict[str, Any]], **options: Any) -> AdamO:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strong decay is the point here
        return AdamO(groups, **options)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(GROUPS, DTYPES, KINDS, st.booleans(), st.integers(0, 2**31))
def test_weights_stay_finite_under_the_guard(
    sets: list[tuple[dict[str, Any], float, float]],
    dtype: torch.dtype,
    kinds: list[str],
    foreach: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    groups = []
    for options, weight_scale, _ in sets:
        shapes = ((3, 4), (5,))
        params = [nn.Parameter(torch.randn(s, dtype=dtype) * weight_scale) for s in shapes]
        groups.append({"params": params, **options})
    optimizer = build(groups, foreach=foreach)
    for kind in kinds * 2:
        before = {p: p.detach().clone() for group in groups for p in group["params"]}
        for group, (_, _, gradient_scale) in zip(groups, sets, strict=True):
            for p in group["params"]:
                p.grad = gradient(kind, p, gradient_scale)
        optimizer.step()
        for group in groups:
            for p in group["params"]:
                check_step(p, before[p], optimizer, group)


def check_step(
    p: torch.Tensor, old: torch.Tensor, optimizer: AdamO, options: dict[str, Any]
) -> None:
    state = optimizer.state[p]
    assert torch.isfinite(p).all()
    broken = [key for key, value in state.items() if not torch.isfinite(value).all()]
    assert not broken
    # a step at most doubles the norm and adds lr·100 per entry in the root mean square
    reach = options["lr"] * p.numel() ** 0.5 * 100
    assert float(p.detach().double().norm()) <= 2.001 * float(old.double().norm()) + 1.001 * reach


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(GROUPS, st.integers(0, 2**31))
def test_backends_agree_for_any_options(
    sets: list[tuple[dict[str, Any], float, float]], seed: int
) -> None:
    ends = []
    for foreach in (False, True):
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in sets]
        groups = [{"params": [p], **s[0]} for p, s in zip(params, sets, strict=True)]
        optimizer = build(groups, foreach=foreach)
        for _ in range(6):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- AngularAdamW: a turn is a turn ------------------------------------------------------------

# Where β₁² < β₂, and u = m̂/(√ŝ + ε) has a bound: elsewhere m outlives s, as in AdamW.
BETAS = st.tuples(BETA, BETA).filter(lambda betas: betas[0] == 0 or betas[0] ** 2 < betas[1])
TURNS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-6, 1e-3, 1e-1, 10.0]),
        "betas": BETAS,
        "eps": st.sampled_from([0.0, 1e-15, 1e-8, 1e-2]),
        "weight_decay": st.sampled_from([0.0, 0.1, 100.0]),
        "angular_rms": st.sampled_from([None, 1e-6, 0.015, 10.0]),
        "max_angle": st.sampled_from([1e-3, 0.05, 1.5]),
        "maximize": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(TURNS, SCALES, SCALES), min_size=8, max_size=8),
    KINDS,
    st.sampled_from([{"foreach": False}, {"foreach": True}, {"fused": True}]),
    st.integers(0, 2**31),
)
def test_a_turn_keeps_the_norm_and_its_bound(
    sets: list[tuple[dict[str, Any], float, float]],
    kinds: list[str],
    backend: dict[str, bool],
    seed: int,
) -> None:
    """For any options, scales and finite gradients: ‖w‖ = ρ₀, and the angle is bounded."""
    torch.manual_seed(seed)
    groups = []
    for options, weight_scale, _ in sets:
        p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64) * weight_scale)
        groups.append({"params": [p], "rule": "scale_invariant", **options})
    optimizer = AngularAdamW(groups, **backend)
    start = [float(group["params"][0].detach().norm()) for group in groups]
    for kind in kinds * 2:
        before = [group["params"][0].detach().clone() for group in groups]
        for group, (_, _, gradient_scale) in zip(groups, sets, strict=True):
            (p,) = group["params"]
            p.grad = gradient(kind, p, gradient_scale)
        optimizer.step()
        rows = optimizer.diagnostics(synchronize=True).values()
        for group, norm, old, row in zip(groups, start, before, rows, strict=True):
            (p,) = group["params"]
            assert all(bool(x.isfinite().all()) for x in (p, *optimizer.state[p].values()))
            assert float(p.detach().norm()) == pytest.approx(norm, rel=1e-9)
            m, t = optimizer.state[p]["exp_avg"], int(optimizer.state[p]["step"])
            bottom = (1 - group["betas"][0] ** t) * (
                (float(optimizer.state[p]["mean_square"]) / (1 - group["betas"][1] ** t)) ** 0.5
                + group["eps"]
            )
            rms = float(m.norm()) / bottom / 12**0.5 if bottom > 0 else 0.0
            assert row["angle"] <= group["max_angle"] * rms * (1 + 1e-6)
            if kind == "zero" and float(m.norm()) == 0:
                assert torch.equal(p, old)
