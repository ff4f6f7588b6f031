"""Which backend updates a parameter, and why not a faster one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices


def choose(p: Tensor, group: dict[str, Any], name: str) -> tuple[str, str]:
    """The fastest backend that can honour the group's options, and a note for ``explain()``.

    As in torch: ``fused=None, foreach=None`` may fall back, an explicit request that cannot be
    honoured raises ``RuntimeError``.
    """
    if group["differentiable"]:
        return "differentiable", ""
    fused, foreach, note = group["fused"], group["foreach"], ""
    if fused or (fused is None and foreach is None):
        note = why_not_fused(p)
        if not note:
            return "fused", ""
        if fused:
            raise RuntimeError(f"fused=True cannot be honoured for {name}: {note}")
    if foreach is None:
        native = type(p) in (Tensor, torch.nn.Parameter)
        supported = p.device.type in _get_foreach_kernels_supported_devices()
        foreach = fused is None and native and supported and p.device.type != "cpu"
    return ("foreach" if foreach else "for-loop"), note


def why_not_fused(p: Tensor) -> str:
    """The reason why no fused kernel can update ``p``; empty if one can."""
    return f"no fused kernel for {p.device.type}"
