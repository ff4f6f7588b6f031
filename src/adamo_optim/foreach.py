"""AdamO's passes over lists of tensors with torch's foreach functions.

The coefficients stay on the device (a list of Python numbers would need a synchronisation), so
every foreach call takes one small tensor per piece. The reductions are those of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .blocks import LARGE_PIECE, PIECE, Block, Blocks, Piece
from .law import ForMoments, ForWeights
from .loop import reduce, remember

__all__ = ["apply", "moments", "reduce"]

Batch = list[tuple[int, Block, Piece]]  # the block's place in the list, it, and a piece of it


def batches(blocks: Blocks, *names: str) -> Iterator[Batch]:
    """The pieces of all blocks in lists of a bounded number of entries, or of a single one."""
    batch: Batch = []
    entries = 0
    for i, block in enumerate(blocks):
        for piece in block.pieces(*(getattr(block, name) for name in names)):
            count = piece.tensors[0].numel()
            limit = 4 * PIECE.get(block.w.device.type, LARGE_PIECE // 4)
            if batch and entries + count > limit:
                yield batch
                batch, entries = [], 0
            batch.append((i, block, piece))
            entries += count
    if batch:
        yield batch


def moments(blocks: Blocks, first: ForMoments) -> list[Tensor]:
    """Pass 2: m, v and g⁻; ⟨u,w⟩ and ‖u‖² of every block."""
    remember(blocks, first)
    rest = [blocks.pick(x) for x in (1 - first.beta1, 1 - first.beta2)]
    columns = list(map(blocks.pick, first))
    sums: list[list[Tensor]] = [[] for _ in blocks]
    for batch in batches(blocks, "w", "g", "m", "v"):
        c: Any = ForMoments._make([p.of(column[i]) for i, _, p in batch] for column in columns)
        rest1, rest2 = ([p.of(column[i]) for i, _, p in batch] for column in rest)
        m, v = ([p.tensors[k] for _, _, p in batch] for k in (2, 3))
        w = masked([p.tensors[0] for _, _, p in batch], c.live, m)
        g_tangential = masked([p.tensors[1] for _, _, p in batch], c.use_gradient, m)

        # g^θ = ±g − p·w
        torch._foreach_mul_(g_tangential, c.sign)
        torch._foreach_addcmul_(g_tangential, w, c.p, -1)
        # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
        torch._foreach_addcmul_(m, w, c.q, -1)
        torch._foreach_mul_(m, c.beta1)
        torch._foreach_addcmul_(m, g_tangential, rest1)
        torch._foreach_mul_(v, c.beta2)
        torch._foreach_mul_(g_tangential, g_tangential)
        torch._foreach_addcmul_(v, g_tangential, rest2)
        del g_tangential
        for u, x, (i, block, _) in zip(quotients(m, v, c), w, batch, strict=True):
            u, x = u.to(blocks.scalar), x.to(blocks.scalar)
            sums[i].append(blocks.products(block, [(u, x), (u, u)]))
    return [blocks.add(block, rows) for block, rows in zip(blocks, sums, strict=True)]


def quotients(m: list[Tensor], v: list[Tensor], c: Any) -> list[Tensor]:
    """u = m̂/(√v̂ + ε)."""
    u = list(torch._foreach_mul(m, c.debias1))
    denominators = torch._foreach_mul(v, c.debias2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, c.eps)
    torch._foreach_div_(u, denominators)
    return u


def masked(tensors: list[Tensor], used: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """In the dtype of m, and 0 where they are not used: 0·∞ would be NaN."""
    zipped = zip(tensors, used, like, strict=True)
    return [torch.where(use, x.to(y.dtype), 0) for x, use, y in zipped]


def apply(blocks: Blocks, first: ForMoments, second: ForWeights, step: Tensor) -> None:
    """Pass 3: w ← w + (a−1)·w − b·u, with u from m and v once more."""
    unused = (second.guarded_update | ~first.live) & (second.b == 0)  # as in the loop
    columns = [blocks.pick(x) for x in (*first, second.a1, second.b, unused)]
    steps = blocks.pick(step)
    for batch in batches(blocks, "w", "m", "v"):
        *coefficients, a1, b, lost = ([p.of(column[i]) for i, _, p in batch] for column in columns)
        m, v = ([p.tensors[k] for _, _, p in batch] for k in (1, 2))
        u = quotients(m, v, ForMoments._make(coefficients))
        w = [p.tensors[0].to(x.dtype) for (_, _, p), x in zip(batch, u, strict=True)]
        u = [torch.where(skip, 0, x) for skip, x in zip(lost, u, strict=True)]
        torch._foreach_mul_(u, b)
        shift = [torch.where(a == 0, 0, x * a) for x, a in zip(w, a1, strict=True)]
        torch._foreach_sub_(shift, u)
        torch._foreach_add_(w, shift)
        for (i, block, piece), x in zip(batch, w, strict=True):
            if x is not piece.tensors[0]:  # a copy in float32 of a low-precision weight
                blocks.write_weight(block, piece, x, steps[i])
