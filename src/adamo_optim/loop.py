"""AdamO's three passes in torch calls; also the differentiable backend."""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Sums, batches
from .blocks import Blocks
from .law import ForMoments, ForWeights, root


def reduce(blocks: Blocks) -> tuple[list[Tensor], list[Tensor]]:
    """Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², ⟨m,w⟩ of every block, and its κ = ‖g − g⁻‖²."""
    sums, changes = Sums(blocks), Sums(blocks)
    for batch in batches(blocks, "w g m"):
        w, g, m = batch.tensors
        batch.add_products(sums, (w, w), (g, w), (g, g), (m, w))
    for batch in batches(blocks, "sampled previous"):
        g, previous = batch.tensors
        change = g.to(blocks.scalar) - previous
        batch.add_products(changes, (change, change))
    kappa = zip(blocks, changes.add_up(1), strict=True)
    return sums.add_up(4), [x if block.ratio == 1 else x * block.ratio for block, x in kappa]


def moments(blocks: Blocks, first: ForMoments) -> list[Tensor]:
    """Pass 2: m, v and g⁻; ⟨u,w⟩ and ‖u‖² of every block."""
    remember(blocks, first)
    sums = Sums(blocks)
    of_m = (first.beta1, -first.beta1 * first.q, (1 - first.beta1) * first.sign)
    of_v = (first.beta2, 1 - first.beta2)
    vectors = (first.live, first.use_gradient, -first.sign * first.p, *of_m, *of_v, *scales(first))
    for batch in batches(blocks, "w g m v", *vectors):
        w, g, m, v = batch.tensors
        live, use, minus_p, beta1, minus_q, rest1, beta2, rest2, *scale = batch.numbers
        # 0, and not 0·∞, for what the guard leaves alone
        w = torch.where(live, w.to(m.dtype), 0)
        g = torch.where(use, g.to(m.dtype), 0)

        # ±g^θ = g ∓ p·w
        g_tangential = torch.addcmul(g, w, minus_p)
        # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
        m = m * beta1 if blocks.replace else m.mul_(beta1)
        v = v * beta2 if blocks.replace else v.mul_(beta2)
        m.addcmul_(w, minus_q).addcmul_(g_tangential, rest1)
        v.addcmul_(g_tangential * g_tangential, rest2)
        batch.write("m", m)
        batch.write("v", v)
        del g, g_tangential  # the most that a step holds beside its state
        u = quotient(m, v, *scale, differentiable=blocks.replace)
        batch.add_products(sums, (u, w), (u, u))
        del u
    return sums.add_up(2)


def remember(blocks: Blocks, first: ForMoments) -> None:
    """Pass 2, g⁻ ← g where the law says so."""
    for batch in batches(blocks, "previous sampled", first.keep_gradient):
        previous, g = batch.tensors
        batch.write("previous", torch.where(batch.numbers[0], g.to(previous.dtype), previous))


def scales(first: ForMoments) -> tuple[Tensor, Tensor]:
    """What u = m̂/(√v̂ + ε) multiplies √v by, and adds to it, when it divides m by the sum."""
    return first.debias2.sqrt() / first.debias1, first.eps / first.debias1


def quotient(m: Tensor, v: Tensor, scale: Tensor, eps: Tensor, differentiable: bool) -> Tensor:
    """u = m̂/(√v̂ + ε)."""
    return m / torch.addcmul(eps, root(v) if differentiable else v.sqrt(), scale)


def apply(blocks: Blocks, first: ForMoments, second: ForWeights, step: Tensor) -> None:
    """Pass 3: w ← w + (a−1)·w − b·u, with u from m and v once more."""
    # the guard leaves a block alone or has met u = ∞: b is 0, and 0·∞ would be NaN
    lost = (second.guarded_update | ~first.live) & (second.b == 0)
    vectors = (lost, second.a1 == 0, second.a1, -second.b, step, *scales(first))
    for batch in batches(blocks, "w m v", *vectors):
        w, m, v = batch.tensors
        skip, still, a1, minus_b, t, *scale = batch.numbers
        u = torch.where(skip, 0, quotient(m, v, *scale, differentiable=blocks.replace))
        w = w.to(u.dtype)
        # 0·∞ again; but a differentiable step has a derivative by a1 where a1 is 0, too
        shift = (w if blocks.replace else torch.where(still, 0, w)) * a1
        shift.addcmul_(u, minus_b)
        batch.write_weight(w + shift if blocks.replace else w.add_(shift), t)
