"""What a user logs: norms, step sizes, radial shares, the angle turned, guard activity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def of_adamo(record: dict[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """The diagnostics of a step of AdamO as vectors over the blocks; no synchronisation.

    ========================  =================================================================
    norm                      ‖w‖ before the step
    gradient_norm             ‖g‖
    eta_radial                η_ρ,t
    tau                       smoothed curvature; NaN while there is none
    radial_share_gradient     ‖φ^ρ(g)‖²/‖g‖²
    radial_share_update       the same for the step of the weight, decay included
    angle                     how far the step turned w, in radians
    scale_invariant           1 where the scale-invariant rule was active
    guard_scale               1 where η_ρ,t/η_ρ met its bound
    guard_factor              1 where the radial factor of the step met its bound
    guard_decay               1 where decay was skipped for a small norm
    guard_update              1 where the root mean square of Adam's quotient met its bound
    guard_noise               1 where the tangential gradient was at rounding level
    guard_skipped             1 where ‖g‖² or ‖w‖² was more than the buffers hold, or not finite
    ========================  =================================================================
    """
    r = record
    nan = torch.full_like(r["ww"], torch.nan)
    ww = torch.where(r["ww"] > 0, r["ww"], nan)
    gg = torch.where(r["gg"] > 0, r["gg"], nan)
    along = torch.where(r["ww"] > 0, r["uw"] / r["ww"], 0)
    across = (r["uu"] - r["uw"] * along).clamp(min=0)  # ‖u^θ‖²
    radial = r["a1"] - r["b"] * along  # the step along w, in units of w
    radial_sq, tangential_sq = radial**2 * ww, r["b"] ** 2 * across
    tau = memory["tau"]
    return {
        "norm": r["ww"].sqrt(),
        "gradient_norm": r["gg"].sqrt(),
        "eta_radial": torch.where(r["low_dim"] > 0, nan, r["eta_radial"]),
        "tau": torch.where(tau < 0, nan, tau),
        "radial_share_gradient": r["gw"] ** 2 / (gg * ww),
        "radial_share_update": radial_sq / (radial_sq + tangential_sq),
        "angle": torch.atan2(tangential_sq.sqrt(), (1 + radial) * ww.sqrt()),
        "scale_invariant": r["scale_invariant"],
        "guard_scale": r["guarded_scale"],
        "guard_factor": r["guarded_factor"],
        "guard_decay": r["guarded_decay"],
        "guard_update": r["guarded_update"],
        "guard_noise": ((r["live"] > 0) & ~(r["use_gradient"] > 0)).to(ww.dtype),
        "guard_skipped": ((r["active"] > 0) & ~(r["live"] > 0)).to(ww.dtype),
    }


def of_turns(record: dict[str, Tensor], memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """The diagnostics of the weights that AngularAdamW turned.

    ========================  =================================================================
    norm                      ‖w‖ before the step; ρ₀ but for rounding
    gradient_norm             ‖g‖
    angle                     how far the step turned w, in radians
    at_max_angle              1 where ``max_angle`` bounded the turn
    ========================  =================================================================
    """
    return {
        "norm": record["all_ww"].sqrt(),
        "gradient_norm": record["gg"].sqrt(),
        "angle": record["angle"],
        "at_max_angle": record["at_max_angle"],
    }


def collect(buckets: Iterable[Any], synchronize: bool) -> dict[str, dict[str, Any]]:
    """For each parameter with a gradient in the last step, on the device or as floats.

    A parameter whose rows are blocks has the mean over its rows, or this rank's of them. A step
    that a GradScaler had the fused backend skip has no values: on a CPU no rows, and on CUDA, where
    the host does not know of it, NaN.
    """
    result: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        record = bucket.record()
        if record is None:
            continue
        memory = bucket.read()._asdict()
        vectors = bucket.quantities(record, memory)
        table = torch.stack(list(vectors.values()), dim=1).detach()
        table = torch.where((record["active"] > 0)[:, None], table, torch.nan)
        if bucket.blocks != len(bucket.members):
            table = torch.stack([part.mean(0) for part in table.split(bucket.sizes)])
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
