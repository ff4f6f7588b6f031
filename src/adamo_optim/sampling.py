"""The slice of g⁻ that ``previous_gradient="sampled"`` keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from .dtensor import indices_of_shard, is_sharded, local, place_like, rows_of_shard
from .geometry import real_numel

SAMPLE = 16  # about one gradient entry in SAMPLE is kept


def sample_range(shape: torch.Size, seed: int) -> tuple[int, int]:
    """First row and number of rows of the slice that "sampled" keeps: about 1/16 of dimension 0.

    Whole rows are one piece of memory in the usual layouts, and stay together when the first
    dimension is sharded. The slice is the same in every step; ``seed`` moves it per parameter.
    """
    length = -(-shape[0] // SAMPLE)
    return (seed * 2654435761 % 2**32) % (shape[0] - length + 1), length  # Knuth's hash


def sample(x: Tensor, seed: int) -> Tensor:
    """The slice of ``x`` that "sampled" keeps of the previous gradient."""
    return x.narrow(0, *sample_range(x.shape, seed)) if x.dim() else x


def sample_rows(p: Tensor, seed: int) -> tuple[int, int] | None:
    """The slice in rows of this rank's shard: first and number. None: it is the whole tensor."""
    if p.dim() == 0:
        return None
    begin, length = sample_range(p.shape, seed)
    if length == p.shape[0]:
        return None
    if not is_sharded(p):
        return begin, length
    start, count = rows_of_shard(p)
    low = min(max(begin - start, 0), count)
    high = min(max(begin + length - start, 0), count)
    return low, high - low


def sample_of(old: Tensor, p: Tensor, seed: int, rows: tuple[int, int]) -> Tensor:
    """A loaded g⁻ as this rank's part of the slice: from the whole tensor, or the whole slice."""
    whole = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    if old.shape == whole:
        return local(place_like(old, p)).narrow(0, *rows).clone()
    begin, length = sample_range(p.shape, seed)
    if not is_sharded(p) or old.shape != (length, *whole[1:]):
        return old
    first = rows[0] + rows_of_shard(p)[0] - begin if rows[1] else 0
    part = old.narrow(0, first, rows[1])
    for dim, index in enumerate(indices_of_shard(p)[1:], start=1):
        part = part.index_select(dim, index.flatten().to(part.device))
    return part.contiguous()


def sample_ratio(p: Tensor, previous: Tensor | None) -> float:
    """What κ of the kept entries is multiplied by: all entries over kept ones, of all ranks."""
    if previous is None or is_sharded(previous):
        return 1.0
    if is_sharded(p):
        return p.shape[0] / sample_range(p.shape, 0)[1]
    return real_numel(p) / max(previous.numel(), 1)
