"""Which backend updates a block, and why not a faster one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from .dtensor import holds_whole_rows, is_sharded, local, places_of_shard


def choose(p: Tensor, group: dict[str, Any], name: str, by_row: bool = False) -> tuple[str, str]:
    """The fastest backend that can honour AdamO's options, and a note for ``explain()``.

    As in torch: ``fused=None, foreach=None`` may fall back, an explicit request that cannot be
    honoured raises ``RuntimeError``.
    """
    if group["rounding"] == "stochastic" and p.dtype == torch.float16:
        raise ValueError(f"rounding='stochastic' is for bfloat16 parameters, {name} is float16")
    if group["differentiable"]:
        refuse_differentiable_shards(p, name)
        return "differentiable", ""
    whole, p = p, local(p)
    fused, foreach, note = group["fused"], group["foreach"], ""
    if fused or (fused is None and foreach is None):
        note = why_not_fused(p) or scattered_bits(whole, group) or scattered_rows(p, group, by_row)
        if by_row and is_sharded(whole) and not holds_whole_rows(whole):
            note = "the fused kernels know no block='row' whose rows several ranks share"
        if not note:
            return "fused", ""
        if fused:
            raise RuntimeError(f"fused=True cannot be honoured for {name}: {note}")
    if foreach is None:
        native = type(p) in (Tensor, torch.nn.Parameter)
        supported = p.device.type in _get_foreach_kernels_supported_devices()
        foreach = fused is None and native and supported and p.device.type != "cpu"
    return ("foreach" if foreach else "for-loop"), note


def refuse_differentiable_shards(p: Tensor, name: str) -> None:
    if is_sharded(p):
        raise RuntimeError(
            f"differentiable=True cannot be honoured for {name}, which is a DTensor: the sums "
            "over the ranks carry no gradient. Use ordinary tensors for meta-learning."
        )


def scattered_bits(p: Tensor, group: dict[str, Any]) -> str:
    """Fused kernels number random bits by the place in memory: a shard must be one piece of it."""
    stochastic = group["rounding"] == "stochastic" and p.dtype == torch.bfloat16
    if stochastic and is_sharded(p) and not isinstance(places_of_shard(p), int):
        return "rounding='stochastic' numbers the entries of the whole, which this shard scatters"
    return ""


def scattered_rows(p: Tensor, group: dict[str, Any], by_row: bool) -> str:
    """A row that is a block, and on CUDA the slice of "sampled", must be one piece of memory."""
    if not rows_are_scattered(p):
        return ""
    if by_row:
        return "the rows that block='row' updates one by one are scattered in this layout"
    if group["previous_gradient"] == "sampled" and p.device.type == "cuda":
        return "the rows that previous_gradient='sampled' keeps are scattered in this layout"
    return ""


def rows_are_scattered(p: Tensor) -> bool:
    several = p.dim() > 1 and p.shape[0] > 1 and p.numel() > 0
    return several and p.stride(0) != p.numel() // p.shape[0]


def why_not_fused(p: Tensor) -> str:
    """The reason why no kernel of ours can update ``p``; empty if one can."""
    if p.device.type in ("cuda", "cpu"):
        return fused_module(p.device).unsupported(p)
    return f"no fused kernel for {p.device.type}"


def fused_module(device: torch.device) -> Any:
    """The module with the device's fused backend, imported at its first use."""
    name = ".cuda" if device.type == "cuda" else ".native"
    return importlib.import_module(name, __package__)
