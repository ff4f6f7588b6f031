"""What a user logs: norms, step sizes, radial shares, the angle turned, guard activity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import geometry
from .state import Bucket, Record


def quantities(last: Record) -> dict[str, Tensor]:
    """The diagnostics of one step as vectors over the blocks; no synchronisation.

    ========================  =================================================================
    norm                      ‖w‖ before the step
    gradient_norm             ‖g‖
    eta_radial                η_ρ,t
    tau                       smoothed curvature; NaN while there is none, or if the norm is kept
    radial_share_gradient     ‖φ^ρ(g)‖²/‖g‖²
    radial_share_update       the same for the step of the weight, decay included
    angle                     how far the step turned w, in radians
    scale_invariant           1 where the scale-invariant rule was active
    guard_scale               1 where η_ρ,t/η_ρ met its bound
    guard_factor              1 where the radial factor of the step met its bound
    guard_decay               1 where decay was skipped for a small norm
    guard_update              1 where the root mean square of Adam's quotient met its bound
    guard_turn                1 where the angle of a turn met its bound
    guard_noise               1 where the tangential gradient was at rounding level
    guard_nonfinite           1 where gradient or norm was not finite and the block was left alone
    ========================  =================================================================
    """
    sums, first, second = last.sums, last.first, last.second
    nan = torch.full_like(sums.ww, torch.nan)
    ww = torch.where(sums.ww > 0, sums.ww, nan)
    gg = torch.where(sums.gg > 0, sums.gg, nan)
    along = torch.where(sums.ww > 0, last.uw / sums.ww, 0)
    across = (last.uu - last.uw * along).clamp(min=0)  # ‖u^θ‖²
    radial = second.a1 - second.b * along  # the step along w, in units of w
    radial_sq, tangential_sq = radial**2 * ww, second.b**2 * across
    return {
        "norm": sums.ww.sqrt(),
        "gradient_norm": sums.gg.sqrt(),
        "eta_radial": torch.where(first.low_dim, nan, first.eta_radial),
        "tau": torch.where(last.tau < 0, nan, last.tau),
        "radial_share_gradient": sums.gw**2 / (gg * ww),
        "radial_share_update": radial_sq / (radial_sq + tangential_sq),
        "angle": torch.atan2(tangential_sq.sqrt(), (1 + radial) * ww.sqrt()),
        "scale_invariant": first.scale_invariant.to(ww.dtype),
        "guard_scale": first.guarded_scale.to(ww.dtype),
        "guard_factor": second.guarded_factor.to(ww.dtype),
        "guard_decay": second.guarded_decay.to(ww.dtype),
        "guard_update": second.guarded_update.to(ww.dtype),
        "guard_turn": second.guarded_turn.to(ww.dtype),
        "guard_noise": (first.live & ~first.use_gradient).to(ww.dtype),
        "guard_nonfinite": (last.active & ~first.live).to(ww.dtype),
    }


def collect(buckets: Iterable[Bucket], synchronize: bool) -> dict[str, dict[str, Any]]:
    """For each parameter with a gradient in the last step, on the device or as floats.

    A step that a GradScaler had the fused backend skip has no values. On a CPU it has no rows; on
    CUDA the host does not know of it, and they are NaN.
    """
    result: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        if bucket.last is None:
            continue
        last = bucket.last if isinstance(bucket.last, Record) else bucket.last()
        vectors = quantities(last)
        table = torch.stack(list(vectors.values()), dim=1).detach()
        table = torch.where(last.active[:, None], table, torch.nan)
        rows = table.tolist() if synchronize else [row.unbind() for row in table]
        for name, row, present in zip(bucket.names, rows, bucket.present, strict=True):
            if present:
                result[name] = dict(zip(vectors, row, strict=True))
    return result


def flatten_diagnostics(
    diagnostics: dict[str, dict[str, Any]], prefix: str = "adamo"
) -> dict[str, float]:
    """``{"adamo/norm/layer.weight": 1.2, ...}``, what loggers such as TensorBoard or W&B take."""
    return {
        f"{prefix}/{quantity}/{name}": float(value)
        for name, row in diagnostics.items()
        for quantity, value in row.items()
    }


def refine_rule(p: Tensor, state: dict[str, Any], rule: str, reason: str) -> tuple[str, str]:
    """What the first step decides: a block that starts at zero follows AdamW for good."""
    if "initial_norm" not in state:
        return rule, f"{reason}; {'' if p.requires_grad else 'frozen, '}no state yet"
    if rule == "low_dim":
        return rule, reason
    initial = float(state["initial_norm"])
    if initial == 0:
        return "low_dim", f"its norm was 0 at its first step (otherwise {rule}: {reason})"
    # a sharded one would need the other ranks, and not all of them may be asking
    if initial < 0 and not geometry.is_sharded(p) and not bool(p.detach().any()):
        return "low_dim", f"its norm is 0 and no step was taken (otherwise {rule}: {reason})"
    return rule, reason
