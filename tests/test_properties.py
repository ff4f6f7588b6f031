"""Property tests: with finite gradients and the guard, no setting destroys a weight.

Each example is one optimizer with eight groups of their own options, rules and scales, so the run
covers thousands of option sets.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from adamo_optim import AdamO

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
        "tangential": st.sampled_from(["additive", "angular", "auto"]),
        "angular_rms": st.sampled_from([None, 1e-6, 0.02, 10.0, "equilibrium"]),
        "second_moment": st.sampled_from(["entry", "block", "auto"]),
        "radial": st.sampled_from(["sgd", "adam"]),
        "low_dim": st.sampled_from(["auto", None, 10]),
        "low_dim_scale": st.sampled_from([0.1, 1.0]),
        "low_dim_decay": st.sampled_from([None, 0.0, 0.5, 1e6]),
        "delta": st.sampled_from([None, 0.1, 10.0]),
        "wd_ratio": st.sampled_from([0.0, 0.5, 1.0]),
        "maximize": st.booleans(),
        "rule": st.sampled_from(["auto", "general", "scale_invariant", "low_dim"]),
    }
)
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


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
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
    rms = options["angular_rms"]
    unit = rms * p.numel() ** 0.5 if isinstance(rms, float) else initial_norm(state)
    growth = 1 + float(old.norm()) / unit  # angular steps scale with the norm
    reach = options["lr"] * p.numel() ** 0.5 * 100 * growth
    assert float(p.detach().double().norm()) <= 2.001 * float(old.double().norm()) + reach


def initial_norm(state: dict[str, Any]) -> float:
    recorded = float(state["initial_norm"])
    return recorded if recorded > 0 else 1.0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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
