"""Which backend updates a parameter, and why not a faster one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from . import geometry


def choose(p: Tensor, group: dict[str, Any], name: str) -> tuple[str, str]:
    """The fastest backend that can honour the group's options, and a note for ``explain()``.

    As in torch: ``fused=None, foreach=None`` may fall back, an explicit request that cannot be
    honoured raises ``RuntimeError``.
    """
    if group["rounding"] == "stochastic" and p.dtype == torch.float16:
        raise ValueError(f"rounding='stochastic' is for bfloat16 parameters, {name} is float16")
    if group["differentiable"]:
        if geometry.is_sharded(p):
            raise RuntimeError(
                f"differentiable=True cannot be honoured for {name}, which is a DTensor: the sums "
                "over the ranks carry no gradient. Use ordinary tensors for meta-learning."
            )
        return "differentiable", ""
    whole, p = p, geometry.local(p)
    fused, foreach, note = group["fused"], group["foreach"], ""
    if fused or (fused is None and foreach is None):
        note = scattered_bits(whole, group) or why_not_fused(p, group)
        if not note:
            return "fused", ""
        if fused:
            raise RuntimeError(f"fused=True cannot be honoured for {name}: {note}")
    if foreach is None:
        native = type(p) in (Tensor, torch.nn.Parameter)
        supported = p.device.type in _get_foreach_kernels_supported_devices()
        foreach = fused is None and native and supported and p.device.type != "cpu"
    return ("foreach" if foreach else "for-loop"), note


def scattered_bits(p: Tensor, group: dict[str, Any]) -> str:
    """Fused kernels number random bits by the place in memory: a shard must be one piece of it."""
    stochastic = group["rounding"] == "stochastic" and p.dtype == torch.bfloat16
    if stochastic and geometry.is_sharded(p) and not isinstance(geometry.places_of_shard(p), int):
        return "rounding='stochastic' numbers the entries of the whole, which this shard scatters"
    return ""


def why_not_fused(p: Tensor, group: dict[str, Any]) -> str:
    """The reason why no fused kernel can update ``p``; empty if one can."""
    if p.device.type == "cuda":
        return _module("cuda").unsupported(p, group)
    if p.device.type == "cpu":
        return _module("native").unsupported(p)
    return f"no fused kernel for {p.device.type}"


def fused_backend(device: torch.device) -> Any:
    """The module with the device's fused backend."""
    return _module("cuda" if device.type == "cuda" else "native")


def _module(name: str) -> Any:
    """A fused backend, imported at its first use."""
    return importlib.import_module(f".{name}", __package__)
