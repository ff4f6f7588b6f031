r"""The scalar law of AdamO: from a block's inner products to the coefficients of its update.

One step is three passes over a block (w, g, m, v, g⁻) with two laws between them:

    pass 1   reduce  ‖w‖², ⟨g,w⟩, ‖g‖², κ = ‖g − g⁻‖², ⟨m,w⟩
    before   τ, η_ρ,t, the radial state c, the scale-invariance test      →  First
    pass 2   g^θ = ±g − p·w;  m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
             u = m̂/(√v̂ + ε);  reduce ⟨u,w⟩, ‖u‖²
    after    decay, radial step, guard, additive or angular, α           →  Second
    pass 3   w ← w + (a−1)·w − b·u

Every rule, ablation, guard and variant is a choice of these scalars, so they all live here, once.
Under ``radial="adam"``, for example, p = q = 0 and the radial step is η_ρ,t⟨u,w⟩/‖w‖² of w; under
``second_moment="block"`` v̂ counts as 0 in u, and the root of its mean is in ε.
Everything below is a vector with one entry per block; the functions are pure (no in-place
arithmetic, no Python branch on a device value), so that they run on any device without a
synchronisation, can be captured, compiled and differentiated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNSET = -1.0  # "not recorded yet", for quantities that are never negative
REFERENCE_BETA = 0.999  # the slow average of κ that "auto" curvature compares τ with
SCALE_BOUNDS = (0.1, 10.0)  # guard: η_ρ,t / η_ρ
FACTOR_BOUNDS = (0.5, 2.0)  # guard: what one step's radial part may multiply ‖w‖ by
NORM_FLOOR = 0.1  # guard: no decay while ‖w‖ < NORM_FLOOR·‖w₀‖
# guard: root mean square of u = m̂/(√v̂ + ε). Adam stays below it for any β₁² < β₂ < 0.9999;
# otherwise m can outlive v, and the quotient has no bound.
UPDATE_BOUND = 100.0
TURN_BOUND = 0.1  # of an angular step, in radians, where the root mean square of u is 1


class Options(NamedTuple):
    """The options of the blocks; flags are 0 or 1, an option that is off is NaN."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    radial_lr_ratio: Tensor
    radial_lr: Tensor  # NaN: use the ratio
    radial_beta: Tensor
    curvature_auto: Tensor
    curvature_target: Tensor  # NaN: "auto" or off
    curvature_beta: Tensor
    decay_tangential: Tensor
    angular: Tensor  # 1: every block, 0.5: those declared scale-invariant
    low_dim_scale: Tensor
    delta: Tensor  # NaN: no online test
    wd_ratio: Tensor
    guard: Tensor
    sign: Tensor  # -1 under maximize
    angular_rms: Tensor  # NaN: ‖w₀‖ says what angle a step is; 0: the norm of AdamW's equilibrium
    radial_adam: Tensor  # moments of the whole gradient, radial part of Adam's quotient
    second_moment: Tensor  # of the block, in place of the entries'. As for angular: 1, 0.5
    low_dim_decay: Tensor


class Traits(NamedTuple):
    """What a block is, decided on the host when the optimizer lays out its state."""

    low_dim: Tensor
    scale_invariant: Tensor
    inverse_root: Tensor  # 1/√numel
    rounding: Tensor  # squared relative size under which a tangential gradient is rounding noise
    smallest_eps: Tensor  # what ε = 0 means: enough to keep 0/0 and underflow out of m̂/√v̂
    largest_square: Tensor  # ‖g‖² up to which v holds the square of every entry


class Memory(NamedTuple):
    """The scalar state of the blocks, under the names it has in ``optimizer.state``."""

    step: Tensor
    radial_momentum: Tensor  # c = ⟨m^ρ, w⟩/‖w‖: the signed length of m^ρ, which is parallel to w
    tau: Tensor
    tau_reference: Tensor  # uncorrected slow average of κ
    curvature_step: Tensor  # non-zero gradients seen
    initial_norm: Tensor  # ‖w₀‖
    mean_square: Tensor  # the mean of v over the block, by the recursion of v itself


class Sums(NamedTuple):
    """The inner products of pass 1, with the raw gradient (``maximize`` is applied here)."""

    ww: Tensor
    gw: Tensor
    gg: Tensor
    kappa: Tensor
    mw: Tensor


class First(NamedTuple):
    """Law 1: what pass 2 needs, and what law 2 takes over."""

    live: Tensor  # False: the block keeps its weight and its whole state
    use_gradient: Tensor  # False: g^θ is rounding noise, taken as 0
    keep_gradient: Tensor  # True: g becomes the next g⁻
    sign: Tensor
    p: Tensor
    q: Tensor
    beta1: Tensor
    beta2: Tensor
    debias1: Tensor  # 1/(1 − β₁ᵗ)
    debias2: Tensor  # 1/(1 − β₂ᵗ); 0 where the block's second moment, then in eps, stands for v
    eps: Tensor
    low_dim: Tensor
    scale_invariant: Tensor
    eta_radial: Tensor
    guarded_scale: Tensor


class Second(NamedTuple):
    """Law 2: the coefficients of pass 3."""

    a1: Tensor  # a − 1: near zero, so that a small decay survives in float32
    b: Tensor
    guarded_factor: Tensor
    guarded_decay: Tensor
    guarded_update: Tensor
    guarded_turn: Tensor


def root(x: Tensor) -> Tensor:
    """√x with a finite derivative at 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), x)


def radial_rate(o: Options) -> Tensor:
    """η_ρ before curvature adapts it."""
    return torch.where(torch.isnan(o.radial_lr), o.radial_lr_ratio * o.lr, o.radial_lr)


def keeps_norm(o: Options, traits: Traits) -> Tensor:
    """A weight that turns and is declared scale-invariant.

    Its norm sets neither the output nor the angle, so it is left alone: no decay, and no need for
    η_ρ,t. AdamP's test does not count here, because it passes now and then by chance.
    """
    return (o.angular > 0) & (traits.scale_invariant > 0)


def before(
    o: Options, traits: Traits, memory: Memory, sums: Sums, active: Tensor
) -> tuple[First, Memory]:
    """Law 1. ``active`` marks the blocks that have a gradient in this step."""
    guard, zero = o.guard > 0, torch.zeros_like(sums.ww)
    finite = (sums.gg <= traits.largest_square) & torch.isfinite(sums.ww)
    live = active & (finite | ~guard)
    sums = Sums(*(torch.where(live, x, zero) for x in sums))
    gw = o.sign * sums.gw

    unset = live & (memory.initial_norm < 0)
    initial_norm = torch.where(unset, root(sums.ww), memory.initial_norm)
    # ‖w₀‖ = 0 is for good: such a block must grow its norm, as Adam does and radial SGD does not.
    low_dim = (traits.low_dim > 0) | (initial_norm == 0) | (sums.ww == 0)
    ww = torch.where(low_dim, torch.ones_like(zero), sums.ww)  # a safe divisor

    step = torch.where(live, memory.step.to(zero.dtype) + 1, memory.step.to(zero.dtype))
    t = step.clamp(min=1)
    moves = live & ~low_dim & ~keeps_norm(o, traits)
    scale, tau, tau_reference, curvature_step = curvature(o, memory, sums, moves)
    low, high = SCALE_BOUNDS
    guarded_scale = guard & ((scale < low) | (scale > high))
    scale = torch.where(guard, scale.clamp(low, high), scale)
    eta_radial = scale * radial_rate(o)

    # AdamP's test on the whole tensor; a zero gradient is no evidence.
    cosine_bound = o.delta * traits.inverse_root * root(sums.gg) * ww.sqrt()
    by_test = (gw.abs() < cosine_bound) & (sums.gg > 0)
    scale_invariant = ((traits.scale_invariant > 0) | by_test) & ~low_dim

    tangential = live & ~low_dim
    c = o.radial_beta * memory.radial_momentum + (1 - o.radial_beta) * gw / ww.sqrt()
    c = torch.where(tangential, c, memory.radial_momentum)
    projects = tangential & ~(o.radial_adam > 0)
    g_across = (sums.gg - gw * gw / ww).clamp(min=0)  # ‖g^θ‖²
    noise = guard & projects & (g_across <= traits.rounding * sums.gg)

    # the mean of v, and where it stands for v: u = m̂/(0·√v + (√mean + ε))
    square = torch.where(projects, torch.where(noise, zero, g_across), sums.gg)
    square = o.beta2 * memory.mean_square + (1 - o.beta2) * square * traits.inverse_root**2
    mean_square = torch.where(live, square, memory.mean_square)
    shared = (o.second_moment == 1) | ((o.second_moment > 0) & (traits.scale_invariant > 0))
    shared = shared & tangential
    debias2 = 1 / (1 - o.beta2**t)
    eps = torch.maximum(o.eps, traits.smallest_eps)
    first = First(
        live=live,
        use_gradient=live & ~noise,
        keep_gradient=live & ((sums.gg > 0) | (o.curvature_target > 0)),
        sign=o.sign,
        p=torch.where(projects & ~noise, gw / ww, zero),
        q=torch.where(projects, sums.mw / ww, zero),
        beta1=torch.where(live, o.beta1, 1 + zero),
        beta2=torch.where(live, o.beta2, 1 + zero),
        debias1=1 / (1 - o.beta1**t),
        debias2=torch.where(shared, zero, debias2),
        eps=torch.where(shared, eps + root(debias2 * mean_square), eps),
        low_dim=low_dim,
        scale_invariant=scale_invariant,
        eta_radial=eta_radial,
        guarded_scale=guarded_scale & tangential,
    )
    return first, Memory(step, c, tau, tau_reference, curvature_step, initial_norm, mean_square)


def curvature(
    o: Options, memory: Memory, sums: Sums, live: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """η_ρ,t/η_ρ before the guard, and the new τ, its slow reference and their counter.

    A number for τ_target is the paper: τ₀ = τ_target, g⁻₀ = 0, every gradient counts.
    "auto" compares τ with a slow average of the same κ; it starts with the second non-zero
    gradient (κ of the first one is ‖g‖², not a change) and passes over zero gradients.
    """
    one = torch.ones_like(sums.kappa)
    literal = o.curvature_target > 0
    live = live & (literal | (o.curvature_auto > 0))
    kappa = sums.kappa.clamp(max=torch.finfo(sums.kappa.dtype).max)

    nonzero = live & (sums.gg > 0)
    curvature_step = memory.curvature_step + nonzero.to(one.dtype)
    counts = nonzero & (curvature_step > 1)
    reference = REFERENCE_BETA * memory.tau_reference + (1 - REFERENCE_BETA) * kappa
    reference = torch.where(counts, reference, memory.tau_reference)
    debias = 1 - REFERENCE_BETA ** (curvature_step - 1).clamp(min=1)

    start = torch.where(literal, o.curvature_target, kappa)
    previous = torch.where(memory.tau < 0, start, memory.tau)
    tau = o.curvature_beta * previous + (1 - o.curvature_beta) * kappa
    tau = torch.where(torch.where(literal, live, counts), tau, memory.tau)

    target = torch.where(literal, o.curvature_target, reference / debias)
    known = live & (literal | (curvature_step > 1)) & (target > 0)
    ratio = torch.where(known, tau, one) / torch.where(known, target, one)
    scale = torch.where(known, 1 / (ratio + o.eps).sqrt(), one)
    return scale, tau, reference, curvature_step


def after(
    o: Options, traits: Traits, first: First, memory: Memory, sums: Sums, uw: Tensor, uu: Tensor
) -> tuple[Second, Memory]:
    """Law 2. ``memory`` is the one law 1 returned; ``uw`` = ⟨u,w⟩, ``uu`` = ‖u‖²."""
    guard, zero = o.guard > 0, torch.zeros_like(uw)
    radial = first.live & ~first.low_dim
    ww = torch.where(radial, sums.ww, 1 + zero)
    norm, initial_norm = ww.sqrt(), torch.where(radial, memory.initial_norm, 1 + zero)

    decay = o.weight_decay * torch.where(o.decay_tangential > 0, o.lr, first.eta_radial)
    decay = torch.where(first.scale_invariant, o.wd_ratio * decay, decay)
    decay = torch.where(keeps_norm(o, traits), zero, decay)
    guarded_decay = guard & radial & (norm < NORM_FLOOR * initial_norm)
    decay = torch.where(guarded_decay, zero, decay)

    # Adam's quotient, in its radial and its tangential part
    rms = root(uu) * traits.inverse_root
    guarded_update = guard & first.live & ~(rms <= UPDATE_BOUND)  # NaN: ∞ on some ranks
    overflow = guarded_update & ~torch.isfinite(uu)  # then even shrink·u means nothing
    shrink = UPDATE_BOUND / torch.where(guarded_update, rms, UPDATE_BOUND + zero)
    shrink = torch.where(overflow, zero, shrink)
    uw, uu = (torch.where(overflow, zero, x) for x in (shrink * uw, shrink * shrink * uu))
    along = uw / ww
    u_across = (uu - uw * along).clamp(min=0)  # ‖u^θ‖²

    # decay, then the radial step, of SGD or Adam: together one factor on ‖w‖
    debias = 1 - o.radial_beta ** memory.step.clamp(min=1)
    pull = torch.where(o.radial_adam > 0, along, memory.radial_momentum / (debias * norm))
    pull = torch.where(first.scale_invariant, zero, first.eta_radial * pull)
    factor = 1 - decay - pull
    low, high = FACTOR_BOUNDS
    guarded_factor = guard & radial & ((factor < low) | (factor > high))
    factor = torch.where(guard, factor.clamp(low, high), factor)

    # the tangential step, u without its radial part: added, or a pure rotation
    angular = (o.angular == 1) | keeps_norm(o, traits)
    unit = unit_of_angles(o, traits, first.scale_invariant, initial_norm)
    smallest = o.lr / (TURN_BOUND * traits.inverse_root)
    guarded_turn = guard & radial & angular & (unit < smallest)
    k = o.lr * norm / torch.where(guarded_turn, smallest, unit)
    stretch = (1 + k * k * u_across / ww).sqrt()
    a1 = torch.where(angular, factor * (1 + k * along) / stretch, factor + o.lr * along) - 1
    b = torch.where(angular, factor * k / stretch, o.lr)

    # low-dimensional: Adam or, with decay, AdamW
    shrinks = o.lr * o.low_dim_decay
    shrinks = torch.where(guard, shrinks.clamp(max=1 - low), shrinks)
    a1 = torch.where(radial, a1, torch.where(first.live, -shrinks, zero))
    b = torch.where(radial, b, torch.where(first.live, o.low_dim_scale * o.lr, zero))
    # m^ρ projected on w⁺: it loses the cosine of the turn. The length, not ⟨m^ρ,w⟩, is the state,
    # because it does not notice when rounding or somebody else rescales w after this.
    ahead, aside = 1 + a1 - b * along, b * b * u_across / ww
    turned = ahead / (ahead * ahead + aside).clamp(min=torch.finfo(ww.dtype).tiny).sqrt()
    c = memory.radial_momentum * torch.where(radial, turned, 1 + zero)
    flags = (guarded_factor, guarded_decay, guarded_update, guarded_turn)
    second = Second(a1, shrink * b, *flags)
    return second, memory._replace(radial_momentum=c)


def unit_of_angles(
    o: Options, traits: Traits, scale_invariant: Tensor, initial_norm: Tensor
) -> Tensor:
    """The norm at which an additive step would turn a weight as far as an angular one does.

    With ``angular_rms="equilibrium"`` it is the one at which AdamW's weight would come to rest in
    noise: decay takes 2ηλ‖w‖² from ‖w‖² in a step, and the gradients, each of which moves every
    entry by about lr in the end, add lr²·numel.
    """
    rate = o.weight_decay * torch.where(o.decay_tangential > 0, o.lr, radial_rate(o))
    rate = torch.where(scale_invariant, o.wd_ratio * rate, rate)
    decays = (rate > 0) & (o.lr > 0)
    resting = o.lr / (2 * torch.where(decays, rate, torch.ones_like(rate))).sqrt()
    resting = torch.where(decays, resting / traits.inverse_root, initial_norm)
    chosen = torch.where(o.angular_rms > 0, o.angular_rms / traits.inverse_root, resting)
    return torch.where(torch.isnan(o.angular_rms), initial_norm, chosen)
