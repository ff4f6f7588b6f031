"""Which rule a parameter follows, and the table that explains it.

Algorithm 1 of the paper knows three kinds of blocks:

    low_dim          plain Adam, scaled by α (biases, norm weights, whatever starts at zero)
    scale_invariant  the tangential step and decay, no radial step
    general          radial SGD and tangential Adam
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


def rule_of(p: Tensor, group: dict[str, Any]) -> tuple[str, str]:
    """The rule of a parameter by declaration or shape, and why."""
    declared, reason = group["rule"], group["rule_reason"]
    if declared != "auto":
        return declared, reason or "declared by its group"
    threshold = group["low_dim"]
    if threshold is not None and p.dim() <= 1:
        return "low_dim", "dim <= 1"
    if isinstance(threshold, int) and p.numel() < threshold:
        return "low_dim", f"numel < {threshold}"
    return "general", reason or "by shape; scale invariance was not examined"


def needs_previous_gradient(rule: str, group: dict[str, Any]) -> bool:
    """Only the radial step size uses g⁻, and only with curvature."""
    return rule != "low_dim" and group["curvature_target"] is not None


@dataclass(frozen=True)
class Row:
    """One parameter in the explanation."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    backend: str
    note: str = ""  # why it is not a faster backend


class Explanation(list[Row]):
    """The rule and backend of every parameter; prints as a table."""

    def __str__(self) -> str:
        header = ("parameter", "shape", "rule", "backend", "why")
        cells = [
            (
                r.name,
                "×".join(map(str, r.shape)),
                r.rule,
                f"{r.backend} ({r.note})" if r.note else r.backend,
                r.reason,
            )
            for r in self
        ]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, tuple("-" * width for width in widths), *cells]
        ]
        return "\n".join(lines)
