"""The three passes over lists of tensors with torch's foreach functions.

The coefficients stay on the device (a list of Python numbers would need a synchronisation), so
every foreach call takes one 0-D tensor per block. The reductions are those of the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import Blocks
from .control import First, Second
from .loop import finite, inner_products, reduce, remember

__all__ = ["apply", "moments", "reduce"]


def moments(blocks: Blocks, first: First) -> tuple[list[Tensor], list[Tensor]]:
    """Pass 2: m and v; returns u, and ⟨u,w⟩ and ‖u‖² of every block."""
    if len(blocks) == 0:  # of a mesh whose parameters are all frozen; foreach wants one
        return [], []
    remember(blocks, first)
    pick, m, v = blocks.pick, blocks.m, blocks.v
    w = masked(blocks.w, pick(first.live), m)
    g_tangential = masked(blocks.g, pick(first.use_gradient), m)

    # g^θ = ±g − p·w
    torch._foreach_mul_(g_tangential, pick(first.sign))
    torch._foreach_addcmul_(g_tangential, w, pick(first.p), -1)
    # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
    torch._foreach_addcmul_(m, w, pick(first.q), -1)
    torch._foreach_mul_(m, pick(first.beta1))
    torch._foreach_addcmul_(m, g_tangential, pick(1 - first.beta1))
    torch._foreach_mul_(v, pick(first.beta2))
    torch._foreach_mul_(g_tangential, g_tangential)
    torch._foreach_addcmul_(v, g_tangential, pick(1 - first.beta2))
    # u = m̂/(√v̂ + ε)
    del g_tangential
    updates = list(torch._foreach_mul(m, pick(first.debias1)))
    debias2 = pick(first.debias2)
    denominators = torch._foreach_mul(v, debias2)
    if blocks.shared:  # and not 0·∞
        denominators = [
            torch.where(d > 0, x, 0) for d, x in zip(debias2, denominators, strict=True)
        ]
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, pick(first.eps))
    torch._foreach_div_(updates, denominators)

    rows = [inner_products(u, x, blocks.scalar) for u, x in zip(updates, w, strict=True)]
    return updates, rows


def masked(tensors: list[Tensor], used: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """In the dtype of m, and 0 where they are not used: 0·∞ would be NaN."""
    zipped = zip(tensors, used, like, strict=True)
    return [torch.where(use, x.to(y.dtype), 0) for x, use, y in zipped]


def apply(
    blocks: Blocks, updates: list[Tensor], first: First, second: Second, step: Tensor
) -> None:
    """Pass 3: w ← w + (a−1)·w − b·u."""
    if len(blocks) == 0:
        return
    w = [x.to(u.dtype) for x, u in zip(blocks.w, updates, strict=True)]
    change = [
        torch.where(a1 == 0, 0, x * a1) for x, a1 in zip(w, blocks.pick(second.a1), strict=True)
    ]
    updates = finite(blocks, updates, first, second)
    torch._foreach_addcmul_(change, updates, blocks.pick(second.b), -1)
    torch._foreach_add_(w, change)
    steps = blocks.pick(step)
    for i, x in enumerate(w):
        if x is not blocks.w[i]:  # a copy in float32 of a low-precision weight
            blocks.write_weight(i, x, steps)
