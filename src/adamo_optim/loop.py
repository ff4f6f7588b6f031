"""The three passes, one tensor at a time; also the differentiable backend."""

from __future__ import annotations

import torch
from torch import Tensor

from . import geometry
from .blocks import Blocks
from .control import First, Second, root


def reduce(blocks: Blocks) -> list[Tensor]:
    """Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ, ⟨m,w⟩ of every block."""
    rows, scalar, dot = [], blocks.scalar, geometry.dot
    for i in range(len(blocks)):
        products = [
            torch.stack([dot(w, w), dot(g, w), dot(g, g), dot(m, w)])
            for w, g, m in geometry.pieces(scalar, blocks.w[i], blocks.g[i], blocks.m[i])
        ]
        ww, gw, gg, mw = add(products).unbind()
        kappa = torch.zeros_like(ww)
        previous = blocks.previous[i]
        if previous is not None:
            changes = (x - y for x, y in geometry.pieces(scalar, blocks.sampled[i], previous))
            kappa = add([dot(change, change) for change in changes]) * blocks.ratios[i]
        rows.append(torch.stack([ww, gw, gg, kappa, mw]))
    return rows


def add(sums: list[Tensor]) -> Tensor:
    """The sum over the pieces, of which there is mostly one."""
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def remember(blocks: Blocks, first: First) -> None:
    """Pass 2, g⁻ ← g where the law says so."""
    for i, keep in enumerate(blocks.pick(first.keep_gradient)):
        previous = blocks.previous[i]
        if previous is not None:
            g = blocks.sampled[i].to(previous.dtype)
            blocks.write(blocks.previous, i, torch.where(keep, g, previous))


def moments(blocks: Blocks, first: First) -> tuple[list[Tensor], list[Tensor]]:
    """Pass 2: m and v; returns u, and ⟨u,w⟩ and ‖u‖² of every block."""
    remember(blocks, first)
    updates, rows = [], []
    for i, coefficients in enumerate(zip(*map(blocks.pick, first), strict=True)):
        c = First(*coefficients)
        m, v = blocks.m[i], blocks.v[i]
        # 0, and not 0·∞, for what the guard leaves alone
        w = torch.where(c.live, blocks.w[i].to(m.dtype), 0)
        g = torch.where(c.use_gradient, blocks.g[i].to(m.dtype), 0)

        # g^θ = ±g − p·w
        g_tangential = g * c.sign - w * c.p
        # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
        m = (m - w * c.q) * c.beta1 + g_tangential * (1 - c.beta1)
        v = v * c.beta2 + g_tangential * g_tangential * (1 - c.beta2)
        # u = m̂/(√v̂ + ε)
        v_hat = v * c.debias2
        if blocks.shared:
            v_hat = torch.where(c.debias2 > 0, v_hat, 0)  # and not 0·∞
        u = (m * c.debias1) / ((root(v_hat) if blocks.replace else v_hat.sqrt()) + c.eps)

        blocks.write(blocks.m, i, m)
        blocks.write(blocks.v, i, v)
        updates.append(u)
        rows.append(inner_products(u, w, blocks.scalar))
    return updates, rows


def inner_products(u: Tensor, w: Tensor, scalar: torch.dtype) -> Tensor:
    """Pass 2, ⟨u,w⟩ and ‖u‖² of one block."""
    dot = geometry.dot
    return add([torch.stack([dot(x, y), dot(x, x)]) for x, y in geometry.pieces(scalar, u, w)])


def apply(
    blocks: Blocks, updates: list[Tensor], first: First, second: Second, step: Tensor
) -> None:
    """Pass 3: w ← w + (a−1)·w − b·u."""
    a1s, bs, steps = map(blocks.pick, (second.a1, second.b, step))
    for i, (u, a1, b) in enumerate(
        zip(finite(blocks, updates, first, second), a1s, bs, strict=True)
    ):
        w = blocks.w[i].to(u.dtype)
        # 0·∞ again; but a differentiable step has a derivative by a1 where a1 is 0, too
        change = w * a1 if blocks.replace else torch.where(a1 == 0, 0, w * a1)
        blocks.write_weight(i, w + (change - u * b), steps)


def finite(blocks: Blocks, updates: list[Tensor], first: First, second: Second) -> list[Tensor]:
    """u, or 0 where the guard leaves a block alone or has met u = ∞: b is 0, and 0·∞ is NaN."""
    unused = blocks.pick((second.guarded_update | ~first.live) & (second.b == 0))
    return [torch.where(lost, 0, u) for lost, u in zip(unused, updates, strict=True)]
