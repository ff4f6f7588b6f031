"""Legal values of the options, and the sentence for a number that is none. Without torch."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

RULES = ("auto", "general", "scale_invariant", "low_dim")
CHOICES: dict[str, tuple[str, ...]] = {
    "previous_gradient": ("exact", "bfloat16", "sampled"),
    "decay_lr": ("radial", "tangential"),
    "block": ("tensor", "row"),
    "second_moment": ("tensor", "row"),
    "rounding": ("nearest", "stochastic"),
    "rule": RULES,
}

# name: (lower bound, is it legal itself, upper bound, is it legal itself)
Bounds = tuple[float, bool, float, bool]
NOT_NEGATIVE: Bounds = (0.0, True, math.inf, False)
POSITIVE: Bounds = (0.0, False, math.inf, False)
SHARE: Bounds = (0.0, True, 1.0, False)
RANGES: dict[str, Bounds] = {
    "lr": NOT_NEGATIVE,
    "eps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "radial_lr_ratio": NOT_NEGATIVE,
    "radial_lr": NOT_NEGATIVE,
    "radial_beta": SHARE,
    "curvature_target": POSITIVE,
    "curvature_beta": SHARE,
    "low_dim_scale": (0.0, False, 1.0, True),
    "delta": POSITIVE,
    "wd_ratio": NOT_NEGATIVE,
    "angular_rms": POSITIVE,
    "max_angle": (0.0, False, math.pi / 2, True),
}
OPTIONAL = ("radial_lr", "curvature_target", "delta", "angular_rms")  # None switches them off


def check_inside(name: str, value: Any, bounds: Bounds) -> None:
    """Raise ``ValueError`` with name, value and legal range, unless it is a number inside."""
    low, low_legal, high, high_legal = bounds
    above = ">=" if low_legal else ">"
    legal = f"{above} {low:g}"
    if math.isfinite(high):
        legal += f" and {'<=' if high_legal else '<'} {high:g}"
    alternatives = " (or None)" if name in OPTIONAL else ""
    if name == "curvature_target":
        alternatives = ' (or "auto", or None)'
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number {legal}{alternatives}, got {value!r}")
    value = float(value)
    inside = (value >= low if low_legal else value > low) and (
        value <= high if high_legal else value < high
    )
    if not inside:
        finite = "" if math.isfinite(value) or math.isfinite(high) else "finite and "
        raise ValueError(f"{name} must be {finite}{legal}{alternatives}, got {value}")
