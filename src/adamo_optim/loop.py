"""AdamO's three passes, one tensor at a time; also the differentiable backend."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Block, Blocks
from .law import ForMoments, ForWeights, root


def reduce(blocks: Blocks) -> list[Tensor]:
    """Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ, ⟨m,w⟩ of every block."""
    rows, scalar = [], blocks.scalar
    for block in blocks:
        sums = []
        for piece in block.pieces(block.w, block.g, block.m, whole=blocks.replace):
            w, g, m = (x.to(scalar) for x in piece.tensors)
            sums.append(blocks.products(block, [(w, w), (g, w), (g, g), (m, w)]))
        ww, gw, gg, mw = blocks.add(block, sums).unbind(-1)
        rows.append(torch.stack([ww, gw, gg, change(blocks, block, ww), mw], dim=-1))
    return rows


def change(blocks: Blocks, block: Block, like: Tensor) -> Tensor:
    """κ = ‖g − g⁻‖²; 0 without a g⁻."""
    if block.previous is None or block.sampled is None:
        return torch.zeros_like(like)
    sums = []
    for piece in block.pieces(block.sampled, block.previous, whole=blocks.replace):
        x, y = (x.to(blocks.scalar) for x in piece.tensors)
        sums.append(blocks.products(block, [(x - y, x - y)]))
    return blocks.add(block, sums)[..., 0] * block.ratio


def moments(blocks: Blocks, first: ForMoments) -> list[Tensor]:
    """Pass 2: m, v and g⁻; ⟨u,w⟩ and ‖u‖² of every block."""
    remember(blocks, first)
    rows = []
    for block, *coefficients in zip(blocks, *map(blocks.pick, first), strict=True):
        sums = []
        assert block.v is not None
        for piece in block.pieces(block.w, block.g, block.m, block.v, whole=blocks.replace):
            c = ForMoments(*map(piece.of, coefficients))
            w, g, m, v = piece.tensors
            # 0, and not 0·∞, for what the guard leaves alone
            w = torch.where(c.live, w.to(m.dtype), 0)
            g = torch.where(c.use_gradient, g.to(m.dtype), 0)

            # g^θ = ±g − p·w
            g_tangential = g * c.sign - w * c.p
            # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
            new_m = (m - w * c.q) * c.beta1 + g_tangential * (1 - c.beta1)
            new_v = v * c.beta2 + g_tangential * g_tangential * (1 - c.beta2)
            u = quotient(new_m, new_v, c, blocks.replace)
            blocks.write(block, "m", m, new_m)
            blocks.write(block, "v", v, new_v)
            u, w = u.to(blocks.scalar), w.to(blocks.scalar)
            sums.append(blocks.products(block, [(u, w), (u, u)]))
        rows.append(blocks.add(block, sums))
    return rows


def remember(blocks: Blocks, first: ForMoments) -> None:
    """Pass 2, g⁻ ← g where the law says so."""
    for block, keep in zip(blocks, blocks.pick(first.keep_gradient), strict=True):
        if block.previous is None or block.sampled is None:
            continue
        for piece in block.pieces(block.previous, block.sampled, whole=blocks.replace):
            old, g = piece.tensors
            value = torch.where(piece.of(keep), g.to(old.dtype), old)
            blocks.write(block, "previous", old, value)


def quotient(m: Tensor, v: Tensor, c: ForMoments, differentiable: bool) -> Tensor:
    """u = m̂/(√v̂ + ε)."""
    v_hat = v * c.debias2
    return (m * c.debias1) / ((root(v_hat) if differentiable else v_hat.sqrt()) + c.eps)


def apply(blocks: Blocks, first: ForMoments, second: ForWeights, step: Tensor) -> None:
    """Pass 3: w ← w + (a−1)·w − b·u, with u from m and v once more."""
    # the guard leaves a block alone or has met u = ∞: b is 0, and 0·∞ would be NaN
    unused = (second.guarded_update | ~first.live) & (second.b == 0)
    columns = map(blocks.pick, (*first, second.a1, second.b, unused, step))
    for block, *coefficients, a1, b, lost, t in zip(blocks, *columns, strict=True):
        assert block.v is not None
        for piece in block.pieces(block.w, block.m, block.v, whole=blocks.replace):
            w, m, v = piece.tensors
            u = quotient(m, v, ForMoments(*map(piece.of, coefficients)), blocks.replace)
            u, w = torch.where(piece.of(lost), 0, u), w.to(u.dtype)
            # 0·∞ again; but a differentiable step has a derivative by a1 where a1 is 0, too
            shift = w * piece.of(a1)
            shift = shift if blocks.replace else torch.where(piece.of(a1) == 0, 0, shift)
            blocks.write_weight(block, piece, w + (shift - u * piece.of(b)), t)
