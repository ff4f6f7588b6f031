"""The scalar laws as functions of JAX arrays.

Made of law.py by scripts/generate_laws.py (`make laws`): edit that file, not this one.
"""

# ruff: noqa
from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array as Tensor

where, isfinite, absolute, cos, sin = jnp.where, jnp.isfinite, jnp.abs, jnp.cos, jnp.sin
UNSET = -1.0
REFERENCE_BETA = 0.999
SCALE_LOW = 0.1
SCALE_HIGH = 10.0
FACTOR_LOW = 0.5
FACTOR_HIGH = 2.0
NORM_FLOOR = 0.1
UPDATE_BOUND = 100.0
LARGEST = 1.7976931348623157e+308
SMALLEST = 2.2250738585072014e-308


def root(x: Tensor) -> Tensor:
    """√x with a finite derivative at 0."""
    positive = x > 0
    return where(positive, jnp.sqrt(where(positive, x, 1.0)), x)


def power(base: float | Tensor, exponent: Tensor) -> Tensor:
    return base**exponent


# float64's largest and smallest numbers are ∞ and 0 in float32: its own stand in for them


def at_least(x: Tensor, low: float | Tensor) -> Tensor:
    """NaN stays NaN."""
    if isinstance(low, float) and low > 0:
        low = max(low, float(jnp.finfo(x.dtype).tiny))
    return where(x < low, low, x)


def at_most(x: Tensor, high: float | Tensor) -> Tensor:
    if isinstance(high, float):
        high = min(high, float(jnp.finfo(x.dtype).max))
    return where(x > high, high, x)


# ---- AdamO -------------------------------------------------------------------------------------


class Options(NamedTuple):
    """The options of the blocks as numbers; what a word or None means is decided on the host."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor  # multiplied by η_ρ,t; 0 under decay_lr="tangential"
    isotropic_decay: Tensor  # multiplied by η_θ; 0 under decay_lr="radial"
    radial_lr_ratio: Tensor  # multiplied by lr; 0 where radial_lr is given
    radial_lr: Tensor  # absolute; 0 where the ratio holds
    radial_beta: Tensor
    curvature_auto: Tensor  # 1 or 0
    curvature_target: Tensor  # 0: "auto", or no curvature
    curvature_beta: Tensor
    low_dim_scale: Tensor
    delta: Tensor  # 0: no online test
    wd_ratio: Tensor
    guard: Tensor  # 1 or 0
    sign: Tensor  # -1 under maximize


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


class Sums(NamedTuple):
    """The inner products of pass 1, with the raw gradient (``maximize`` is applied here)."""

    ww: Tensor
    gw: Tensor
    gg: Tensor
    kappa: Tensor
    mw: Tensor


class ForMoments(NamedTuple):
    """What pass 2 needs, and what the second law takes over."""

    live: Tensor  # False: the block keeps its weight and its whole state
    use_gradient: Tensor  # False: g^θ is rounding noise, taken as 0
    keep_gradient: Tensor  # True: g becomes the next g⁻
    sign: Tensor
    p: Tensor
    q: Tensor
    beta1: Tensor
    beta2: Tensor
    debias1: Tensor  # 1/(1 − β₁ᵗ)
    debias2: Tensor  # 1/(1 − β₂ᵗ)
    eps: Tensor
    low_dim: Tensor
    scale_invariant: Tensor
    eta_radial: Tensor
    guarded_scale: Tensor


class Products(NamedTuple):
    """The inner products of pass 2."""

    uw: Tensor
    uu: Tensor


class ForWeights(NamedTuple):
    """The coefficients of pass 3."""

    a1: Tensor  # a − 1: near zero, so that a small decay survives in float32
    b: Tensor
    guarded_factor: Tensor
    guarded_decay: Tensor
    guarded_update: Tensor


def moments_law(
    o: Options, traits: Traits, memory: Memory, sums: Sums, active: Tensor
) -> tuple[ForMoments, Memory]:
    """From pass 1 to pass 2. ``active`` marks the blocks that have a gradient in this step."""
    guard = o.guard > 0
    fits = (sums.gg <= traits.largest_square) & isfinite(sums.ww)
    live = active & (fits | ~guard)
    gw = where(live, o.sign * sums.gw, 0.0)
    gg = where(live, sums.gg, 0.0)
    initial_norm = where(live & (memory.initial_norm < 0), root(sums.ww), memory.initial_norm)
    # ‖w₀‖ = 0 is for good: such a block must grow its norm, as Adam does and radial SGD does not.
    low_dim = (traits.low_dim > 0) | (initial_norm == 0) | (sums.ww == 0)
    moves = live & ~low_dim
    ww = where(moves, sums.ww, 1.0)  # a safe divisor
    norm, inverse = root(ww), 1 / ww
    step = memory.step + where(live, 1.0, 0.0)
    t = at_least(step, 1.0)

    # the radial step size, and how curvature adapts it
    literal = o.curvature_target > 0
    adapts = moves & (literal | (o.curvature_auto > 0))
    kappa = at_most(sums.kappa, LARGEST)
    scale, tau, tau_reference, curvature_step = curvature(
        o, memory, kappa, adapts, adapts & (gg > 0), literal
    )
    guarded_scale = guard & adapts & ((scale < SCALE_LOW) | (scale > SCALE_HIGH))
    scale = where(guard, at_most(at_least(scale, SCALE_LOW), SCALE_HIGH), scale)
    eta_radial = scale * (o.radial_lr_ratio * o.lr + o.radial_lr)

    # AdamP's test on the whole block; a zero gradient is no evidence
    by_test = (absolute(gw) < o.delta * traits.inverse_root * root(gg) * norm) & (gg > 0)
    # the radial momentum, and the part of the gradient across w
    c = o.radial_beta * memory.radial_momentum + (1 - o.radial_beta) * gw * norm * inverse
    across = at_least(gg - gw * gw * inverse, 0.0)  # ‖g^θ‖²
    noise = guard & moves & (across <= traits.rounding * gg)
    return ForMoments(
        live=live,
        use_gradient=live & ~noise,
        keep_gradient=live & ((gg > 0) | literal),
        sign=o.sign,
        p=where(moves & ~noise, gw * inverse, 0.0),
        q=where(moves, sums.mw * inverse, 0.0),
        beta1=where(live, o.beta1, 1.0),
        beta2=where(live, o.beta2, 1.0),
        debias1=1 / (1 - power(o.beta1, t)),
        debias2=1 / (1 - power(o.beta2, t)),
        eps=at_least(o.eps, traits.smallest_eps),
        low_dim=low_dim,
        scale_invariant=((traits.scale_invariant > 0) | by_test) & ~low_dim,
        eta_radial=eta_radial,
        guarded_scale=guarded_scale,
    ), Memory(
        step=step,
        radial_momentum=where(moves, c, memory.radial_momentum),
        tau=tau,
        tau_reference=tau_reference,
        curvature_step=curvature_step,
        initial_norm=initial_norm,
    )


def curvature(
    o: Options, memory: Memory, kappa: Tensor, adapts: Tensor, nonzero: Tensor, literal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """η_ρ,t/η_ρ before the guard, and the new τ, its slow reference and their counter.

    A number for τ_target is the paper: τ₀ = τ_target, g⁻₀ = 0, every gradient counts.
    "auto" compares τ with a slow average of the same κ; it starts with the second non-zero
    gradient (κ of the first one is ‖g‖², not a change) and passes over zero gradients.
    """
    count = memory.curvature_step + where(nonzero, 1.0, 0.0)
    counts = nonzero & (count > 1)
    slower = REFERENCE_BETA * memory.tau_reference + (1 - REFERENCE_BETA) * kappa
    reference = where(counts, slower, memory.tau_reference)
    debias = 1 - power(REFERENCE_BETA, at_least(count - 1, 1.0))

    start = where(literal, o.curvature_target, kappa)
    previous = where(memory.tau < 0, start, memory.tau)
    smoothed = o.curvature_beta * previous + (1 - o.curvature_beta) * kappa
    tau = where((literal & adapts) | (~literal & counts), smoothed, memory.tau)

    target = where(literal, o.curvature_target, reference)
    known = adapts & (literal | (count > 1)) & (target > 0)
    ratio = where(known, where(literal, tau, tau * debias), 1.0) / where(known, target, 1.0)
    return where(known, 1 / root(ratio + o.eps), 1.0), tau, reference, count


def weights_law(
    o: Options, traits: Traits, memory: Memory, sums: Sums, first: ForMoments, products: Products
) -> tuple[ForWeights, Memory]:
    """From pass 2 to pass 3. ``memory`` is the one that ``moments_law`` returned."""
    guard = o.guard > 0
    moves = first.live & ~first.low_dim
    ww = where(moves, sums.ww, 1.0)
    norm, inverse = root(ww), 1 / ww
    t = at_least(memory.step, 1.0)

    # Adam's quotient, in its radial and its tangential part
    rms = root(products.uu) * traits.inverse_root
    guarded_update = guard & first.live & ~(rms <= UPDATE_BOUND)  # NaN: ∞ on some ranks
    overflow = guarded_update & ~isfinite(products.uu)  # then even shrink·u means nothing
    shrink = UPDATE_BOUND / where(guarded_update, rms, UPDATE_BOUND)
    shrink = where(overflow, 0.0, shrink)
    uw = where(overflow, 0.0, shrink * products.uw)
    uu = where(overflow, 0.0, shrink * shrink * products.uu)
    along = uw * inverse
    u_across = at_least(uu - uw * along, 0.0)  # ‖u^θ‖²

    # decay, then the radial step: together one factor on ‖w‖
    decay = o.weight_decay * first.eta_radial + o.isotropic_decay * o.lr
    decay = where(first.scale_invariant, o.wd_ratio * decay, decay)
    guarded_decay = guard & moves & (norm < NORM_FLOOR * memory.initial_norm)
    decay = where(guarded_decay, 0.0, decay)
    momentum = memory.radial_momentum / (1 - power(o.radial_beta, t))
    pull = where(first.scale_invariant, 0.0, first.eta_radial * momentum * norm * inverse)
    factor = 1 - decay - pull
    guarded_factor = guard & moves & ((factor < FACTOR_LOW) | (factor > FACTOR_HIGH))
    factor = where(guard, at_most(at_least(factor, FACTOR_LOW), FACTOR_HIGH), factor)

    # the tangential step is u without its radial part; low-dimensional blocks follow Adam
    a1 = where(moves, factor - 1 + o.lr * along, 0.0)
    b = where(moves, o.lr, where(first.live, o.low_dim_scale * o.lr, 0.0))
    # m^ρ projected on w⁺: it loses the cosine of the turn. The length, not ⟨m^ρ,w⟩, is the state,
    # because it does not notice when rounding or somebody else rescales w after this.
    ahead = 1 + a1 - b * along
    turned = ahead / root(at_least(ahead * ahead + b * b * u_across * inverse, SMALLEST))
    return ForWeights(
        a1=a1,
        b=shrink * b,
        guarded_factor=guarded_factor,
        guarded_decay=guarded_decay,
        guarded_update=guarded_update,
    ), Memory(
        step=memory.step,
        radial_momentum=where(moves, memory.radial_momentum * turned, memory.radial_momentum),
        tau=memory.tau,
        tau_reference=memory.tau_reference,
        curvature_step=memory.curvature_step,
        initial_norm=memory.initial_norm,
    )


# ---- AngularAdamW: weights that turn -----------------------------------------------------------


class TurnOptions(NamedTuple):
    """The options of the blocks as numbers."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    angular_rms: Tensor  # 0: that of the weight's own first step
    max_angle: Tensor
    sign: Tensor  # -1 under maximize


class TurnTraits(NamedTuple):
    """What a block is."""

    inverse_root: Tensor  # 1/√numel of the weight
    block_inverse_root: Tensor  # the same of the block


TURN_SHARED = ("step", "initial_norm")  # memory that all blocks of a weight have in common


class TurnMemory(NamedTuple):
    """The scalar state of the blocks, under the names it has in ``optimizer.state``."""

    step: Tensor
    mean_square: Tensor  # s: the average of ‖g‖²/numel of the block
    initial_norm: Tensor  # ρ₀


class TurnSums(NamedTuple):
    """The inner products of pass 1, with the new m."""

    ww: Tensor
    gg: Tensor
    mw: Tensor
    mm: Tensor


class Scaled(NamedTuple):
    """A block's u = m̂/(√ŝ + ε) = scale·m."""

    scale: Tensor
    uw: Tensor
    uu: Tensor


class Whole(NamedTuple):
    """What the blocks of a weight add up to; the same for all of them."""

    all_ww: Tensor
    all_uw: Tensor
    all_uu: Tensor


class Turn(NamedTuple):
    """The coefficients of pass 2, and what diagnostics show."""

    a1: Tensor
    b: Tensor
    angle: Tensor
    at_max_angle: Tensor


def square_law(
    o: TurnOptions, traits: TurnTraits, memory: TurnMemory, sums: TurnSums, active: Tensor
) -> tuple[Scaled, TurnMemory]:
    """From pass 1 to the sums of a weight. ``active`` marks what has a gradient in this step."""
    step = memory.step + where(active, 1.0, 0.0)
    t = at_least(step, 1.0)
    square = sums.gg * traits.block_inverse_root * traits.block_inverse_root
    averaged = o.beta2 * memory.mean_square + (1 - o.beta2) * square
    mean_square = where(active, averaged, memory.mean_square)
    bottom = (1 - power(o.beta1, t)) * (root(mean_square / (1 - power(o.beta2, t))) + o.eps)
    scale = where(bottom > 0, 1 / where(bottom > 0, bottom, 1.0), 0.0)
    return Scaled(
        scale=scale,
        uw=scale * sums.mw,
        uu=scale * scale * sums.mm,
    ), TurnMemory(step=step, mean_square=mean_square, initial_norm=memory.initial_norm)


def turn_law(
    o: TurnOptions,
    traits: TurnTraits,
    memory: TurnMemory,
    first: Scaled,
    whole: Whole,
    active: Tensor,
) -> tuple[Turn, TurnMemory]:
    """From these to pass 2. ``memory`` is the one that ``square_law`` returned."""
    norm = root(whole.all_ww)
    initial_norm = where(active & (memory.initial_norm < 0), norm, memory.initial_norm)
    points = whole.all_ww > 0  # a weight of zeros has no direction to turn
    ww = where(points, whole.all_ww, 1.0)
    along = whole.all_uw / ww
    across = at_least(whole.all_uu - whole.all_uw * along, 0.0)  # ‖u^θ‖²

    # φ: what lr asks for, bounded, times the root mean square of u^θ
    rms = where(o.angular_rms > 0, o.angular_rms, initial_norm * traits.inverse_root)
    asked = o.lr / where(points, rms, 1.0)
    at_max_angle = active & points & (asked > o.max_angle)
    turn = at_most(asked, o.max_angle) * traits.inverse_root
    angle = turn * root(across)
    sinc = where(angle > 0, sin(angle) / where(angle > 0, angle, 1.0), 1.0)

    # w ← ρ₀(cos φ · w/‖w‖ − sin φ · u^θ/‖u^θ‖); where nothing asks for a turn, w stays as it is
    turns = active & points & ~(angle == 0)
    push = initial_norm * turn * sinc
    forward = initial_norm / where(points, norm, 1.0) * cos(angle)
    return Turn(
        a1=where(turns, forward - 1 + push * along, 0.0),
        b=where(turns, push * first.scale, 0.0),
        angle=where(turns, angle, 0.0),
        at_max_angle=at_max_angle,
    ), TurnMemory(step=memory.step, mean_square=memory.mean_square, initial_norm=initial_norm)


# ---- what a step leaves for diagnostics: one row per quantity, in every backend ----------------

# "active": whether the block took part at all; a GradScaler may have skipped the whole step
RECORD = (*Sums._fields, *Products._fields, *ForMoments._fields, *ForWeights._fields, "active")
TURN_RECORD = (*TurnSums._fields, *Scaled._fields, *Whole._fields, *Turn._fields, "active")
