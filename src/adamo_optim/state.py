"""AdamO's state of one parameter: buffers and numbers, brought up to the options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dtensor import (
    as_real,
    holds_whole_rows,
    is_sharded,
    lay_out_like,
    local,
    place_like,
    rows_like,
    shard_like,
    whole,
)
from .geometry import compute_dtype, row_count, scalar_dtype
from .law import UNSET, Memory
from .rules import needs_previous_gradient, rule_of
from .sampling import sample_of, sample_range, sample_rows

MOMENTS = ("exp_avg", "exp_avg_sq")
BUFFERS = (*MOMENTS, "previous_grad")
NUMBERS = Memory._fields
CURVATURE = ("tau", "tau_reference", "curvature_step")
START = {key: UNSET if key in ("tau", "initial_norm") else 0.0 for key in NUMBERS}


def rows_of(p: Tensor, group: dict[str, Any], rule: str) -> int | None:
    """How many blocks ``block="row"`` makes of a parameter; None where it is one block."""
    return None if group["block"] == "tensor" or rule == "low_dim" else row_count(p)


def initialize(state: dict[str, Any], p: Tensor, group: dict[str, Any], number: int) -> None:
    """Create, convert or drop what the options ask for."""
    dtype, scalar = compute_dtype(p), scalar_dtype(p.device)
    rule = rule_of(p, group).name
    rows = rows_of(p, group, rule)
    apart = rows is not None and holds_whole_rows(p)  # every rank has the numbers of its own rows
    shape = () if rows is None else (local(p).shape[0] if apart else rows,)
    for key, start in START.items():
        old: Any = state.get(key, start)
        if not isinstance(old, Tensor):
            old = torch.tensor(float(old), dtype=scalar, device=p.device)
        elif apart and old.shape == p.shape[:1]:
            old = local(place_like(old, p))
        elif is_sharded(old):  # those of all rows
            old = whole(old)
        if old.shape != shape:  # block has changed: what is known of the whole, or of all rows
            mean = old.mean() if old.numel() else torch.full((), start, dtype=scalar)
            old = mean.expand(shape).contiguous()
        if old.device != p.device or old.dtype != scalar or not isinstance(state.get(key), Tensor):
            old = move(old, p.device, scalar)
        state[key] = rows_like(old, p) if apart else old
    for key in MOMENTS:
        state[key] = buffer(state.get(key), p, dtype)
    _initialize_previous(state, p, group, number, rule)


def _initialize_previous(
    state: dict[str, Any], p: Tensor, group: dict[str, Any], number: int, rule: str
) -> None:
    if not needs_previous_gradient(rule, group):
        if state.pop("previous_grad", None) is not None:
            _forget_curvature(state)
        return
    kind = group["previous_gradient"]
    dtype = torch.bfloat16 if kind == "bfloat16" else compute_dtype(p)
    like, old = as_real(p.detach()), state.get("previous_grad")
    rows = sample_rows(p, number) if kind == "sampled" else None
    if rows is not None:
        like = local(like).narrow(0, *rows)
        if old is not None and not old.is_meta:
            old = sample_of(old, p, number, rows)
    fresh = old is None or old.shape != like.shape or old.is_meta
    state["previous_grad"] = buffer(None if fresh else old, like, dtype)
    if fresh:
        _forget_curvature(state)  # a new g⁻ knows nothing


def _forget_curvature(state: dict[str, Any]) -> None:
    for key in CURVATURE:
        state[key] = torch.full_like(state[key], START[key])


def buffer(old: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """``old`` on the device, in the dtype and in the memory layout it needs, or zeros."""
    if like.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    if old is None or old.is_meta:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return lay_out_like(move(place_like(old, like), like.device, dtype), like)


def move(old: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if old.is_meta and device.type != "meta":
        raise RuntimeError("optimizer state on the meta device has no values to continue from")
    return old.to(device=device, dtype=dtype)


def sampled_state(previous: Tensor, p: Tensor) -> bool:
    """True if g⁻ is kept of a slice only."""
    if is_sharded(p):
        return not is_sharded(previous)
    return previous.shape != as_real(p).shape


def is_previous(previous: object, p: Tensor) -> bool:
    """True if this can be a g⁻ of the whole parameter or of a slice."""
    if not isinstance(previous, Tensor) or previous.layout is not torch.strided:
        return False
    whole = as_real(p).shape
    kept = (sample_range(p.shape, 0)[1], *whole[1:]) if p.dim() else whole
    return tuple(previous.shape) in (tuple(whole), tuple(kept))


def whole_previous(previous: Tensor, p: Tensor, number: int) -> Tensor:
    """What a checkpoint holds for the slice of a sharded parameter: g⁻ in full, 0 outside of it.

    The ranks' parts of the slice differ in size, which no placement describes; at full size any
    other number of ranks can load it.
    """
    shard = torch.zeros_like(as_real(local(p)), dtype=previous.dtype)
    rows = sample_rows(p, number)
    if rows is not None:
        shard.narrow(0, *rows).copy_(previous)
    return shard_like(shard, p)
