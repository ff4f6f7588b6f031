"""AdamO's three passes and two laws as Triton kernels over all tensors of a bucket at once.

A program of a pass works on one chunk of one tensor; tables on the device hold the tensors'
addresses. Programs leave partial sums, one per chunk, which the programs of a law (one per tensor)
add up in a fixed order: no atomics, the same result in every run. Sums and laws are in float64,
elementwise arithmetic is in float32, divisions and roots are IEEE's.

Tables of scalars have a row for each and a column for each block. Those of ``coefficients`` are
``control.First``, ``control.Second`` and ``control.Sums`` in their order, then ⟨u,w⟩, ‖u‖², τ and
whether the block had a gradient. The laws are ``control.before`` and ``control.after`` for one
block; ``tests/test_triton.py`` compares them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import control
from .control import First, Options, Second, Sums, Traits

ROWS = len(First._fields + Second._fields + Sums._fields) + 4

# rows of `coefficients`
(
    LIVE, USE_GRADIENT, KEEP_GRADIENT, SIGN, P, Q, BETA1, BETA2, DEBIAS1, DEBIAS2, EPS, LOW_DIM,
    SCALE_INVARIANT, ETA_RADIAL, GUARDED_SCALE,  # First
    A1, B, GUARDED_FACTOR, GUARDED_DECAY, GUARDED_UPDATE, GUARDED_TURN,  # Second
    WW, GW, GG, KAPPA, MW,  # Sums
    UW, UU, TAU, ACTIVE,
) = map(tl.constexpr, range(ROWS))  # fmt: skip

# rows of `settings`, in the order of control.Options
(
    O_LR, O_BETA1, O_BETA2, O_EPS, O_WEIGHT_DECAY, O_RADIAL_LR_RATIO, O_RADIAL_LR, O_RADIAL_BETA,
    O_CURVATURE_AUTO, O_CURVATURE_TARGET, O_CURVATURE_BETA, O_DECAY_TANGENTIAL, O_ANGULAR,
    O_LOW_DIM_SCALE, O_DELTA, O_WD_RATIO, O_GUARD, O_SIGN, O_ANGULAR_RMS, O_RADIAL_ADAM,
    O_SECOND_MOMENT, O_LOW_DIM_DECAY,
) = map(tl.constexpr, range(len(Options._fields)))  # fmt: skip

# rows of `traits`, in the order of control.Traits
(
    T_LOW_DIM, T_SCALE_INVARIANT, T_INVERSE_ROOT, T_ROUNDING, T_SMALLEST_EPS, T_LARGEST_SQUARE,
) = map(tl.constexpr, range(len(Traits._fields)))  # fmt: skip

# control's numbers. A kernel reads no other globals than constexpr, and the interpreter wants them
# on the right of an operator.
REFERENCE_BETA = tl.constexpr(control.REFERENCE_BETA)
SCALE_LOW, SCALE_HIGH = map(tl.constexpr, control.SCALE_BOUNDS)
FACTOR_LOW, FACTOR_HIGH = map(tl.constexpr, control.FACTOR_BOUNDS)
MOST_DECAY = tl.constexpr(1 - control.FACTOR_BOUNDS[0])
NORM_FLOOR = tl.constexpr(control.NORM_FLOOR)
UPDATE_BOUND = tl.constexpr(control.UPDATE_BOUND)
TURN_BOUND = tl.constexpr(control.TURN_BOUND)
LARGEST = tl.constexpr(torch.finfo(torch.float64).max)
SMALLEST = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit
def address(table, i, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The start of tensor ``i``; ALIGNED promises multiples of 16 bytes, for wide accesses."""
    value = tl.load(table + i)
    if ALIGNED:
        value = tl.multiple_of(value, 16)
    return value.to(tl.pointer_type(dtype))


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """float32 → the type of a tensor, to the nearest number and ties to even.

    bfloat16 by hand: Triton's interpreter, in which these kernels are tested, would truncate.
    """
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def narrow_at_random(value, offsets, key):
    """float32 → bfloat16 as ``geometry.round_stochastically``."""
    x = offsets.to(tl.uint32) * 0x9E3779B1 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    bits = value.to(tl.uint32, bitcast=True)
    noisy = (bits + ((x ^ (x >> 16)) & 0xFFFF)) >> 16
    kept = tl.where((bits & 0x7F800000) != 0x7F800000, noisy, bits >> 16)  # inf and NaN as they are
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fetch(pointer, offsets, end, MASKED: tl.constexpr):
    """Entries in float32; a full tile goes without a mask, which would split wide loads."""
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < end, other=0.0).to(tl.float32)
    return tl.load(pointer + offsets).to(tl.float32)


@triton.jit
def store(pointer, offsets, value, end, MASKED: tl.constexpr):
    value = narrow(value, pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + offsets, value, mask=offsets < end)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def fold(x, TILE: tl.constexpr):
    """Four neighbours added, the ones a thread holds: a quarter of the float64 registers.

    It pays in pass 2; in pass 1, with its four sums, it made the kernel twice as slow.
    """
    return tl.sum(tl.reshape(x, (TILE // 4, 4)), axis=1)


@triton.jit
def touches(position, sample_start, samples, TILE: tl.constexpr):
    """Whether the tile at ``position`` holds entries of the sampled slice."""
    return (position < sample_start + samples) & (position + TILE > sample_start)


# ---- pass 1 --------------------------------------------------------------------------------


@triton.jit
def reduce_tile(
    w_start, g_start, m_start, previous_start, position, end, sample_start, samples, scale,
    ww, gw, gg, kappa, mw,
    READ_M: tl.constexpr, CURVATURE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offsets = position + tl.arange(0, TILE)
    w = fetch(w_start, offsets, end, MASKED).to(tl.float64)
    g = fetch(g_start, offsets, end, MASKED) * scale
    wide = g.to(tl.float64)
    ww += w * w
    gw += wide * w
    gg += wide * wide
    if READ_M:
        mw += fetch(m_start, offsets, end, MASKED).to(tl.float64) * w
    if CURVATURE == 1:  # g⁻ of the whole tensor
        if samples > 0:
            change = wide - fetch(previous_start, offsets, end, MASKED).to(tl.float64)
            kappa += change * change
    if CURVATURE == 2:  # g⁻ of a slice
        if touches(position, sample_start, samples, TILE):
            inside = (offsets >= sample_start) & (offsets < sample_start + samples)
            old = tl.load(previous_start + (offsets - sample_start), mask=inside, other=0.0)
            change = tl.where(inside, wide - old.to(tl.float64), 0.0)
            kappa += change * change
    return ww, gw, gg, kappa, mw


@triton.jit
def reduce(
    w_table, g_table, m_table, previous_table, numel, sample_start, samples, grad_scale,
    chunk_block, chunk_start, base, partial, chunks,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, READ_M: tl.constexpr,
    CURVATURE: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 1: partial sums of ‖w‖², ⟨g,w⟩, ‖g‖², κ and, with READ_M, ⟨m,w⟩."""
    program = base + tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    if tl.load(g_table + i) != 0:
        w = address(w_table, i, W, ALIGNED)
        g = address(g_table, i, G, ALIGNED)
        m = address(m_table, i, tl.float32, ALIGNED)
        previous = address(previous_table, i, PREVIOUS, ALIGNED)
        first_sample = tl.load(sample_start + i)
        count = tl.load(samples + i)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        ww = tl.zeros([TILE], tl.float64)
        gw = tl.zeros([TILE], tl.float64)
        gg = tl.zeros([TILE], tl.float64)
        kappa = tl.zeros([TILE], tl.float64)
        mw = tl.zeros([TILE], tl.float64)
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                ww, gw, gg, kappa, mw = reduce_tile(
                    w, g, m, previous, start + k, end, first_sample, count, scale,
                    ww, gw, gg, kappa, mw, READ_M, CURVATURE, False, TILE,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                ww, gw, gg, kappa, mw = reduce_tile(
                    w, g, m, previous, start + k, end, first_sample, count, scale,
                    ww, gw, gg, kappa, mw, READ_M, CURVATURE, True, TILE,
                )  # fmt: skip
        tl.store(partial + program, tl.sum(ww))
        tl.store(partial + chunks + program, tl.sum(gw))
        tl.store(partial + 2 * chunks + program, tl.sum(gg))
        tl.store(partial + 3 * chunks + program, tl.sum(kappa))
        if READ_M:
            tl.store(partial + 4 * chunks + program, tl.sum(mw))


# ---- pass 2 --------------------------------------------------------------------------------


@triton.jit
def quotient(m, v, debias1, debias2, eps):
    """u = m̂/(√v̂ + ε), without v̂ where the block has one second moment."""
    root = tl.where(debias2 > 0, tl.sqrt_rn(v * debias2), 0.0)
    return tl.div_rn(m * debias1, root + eps)


@triton.jit
def moments_tile(
    w_start, g_start, m_start, v_start, previous_start, position, end, sample_start, samples,
    scale, use, keep, sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
    CURVATURE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offsets = position + tl.arange(0, TILE)
    w = fetch(w_start, offsets, end, MASKED)
    g = fetch(g_start, offsets, end, MASKED) * scale
    m = fetch(m_start, offsets, end, MASKED)
    v = fetch(v_start, offsets, end, MASKED)
    # g⁻ ← g
    if CURVATURE == 1:
        if keep:
            store(previous_start, offsets, g, end, MASKED)
    if CURVATURE == 2:
        if keep & touches(position, sample_start, samples, TILE):
            inside = (offsets >= sample_start) & (offsets < sample_start + samples)
            kept = narrow(g, previous_start.dtype.element_ty)
            tl.store(previous_start + (offsets - sample_start), kept, mask=inside)
    # g^θ = ±g − p·w
    g_tangential = tl.where(use, g, 0.0) * sign - w * p
    # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
    m = (m - w * q) * beta1 + g_tangential * beta1c
    v = v * beta2 + g_tangential * g_tangential * beta2c
    # u = m̂/(√v̂ + ε)
    u = quotient(m, v, debias1, debias2, eps)
    store(m_start, offsets, m, end, MASKED)
    store(v_start, offsets, v, end, MASKED)
    if MASKED:
        u = tl.where(offsets < end, u, 0.0)
    wide = u.to(tl.float64)
    uw += fold(wide * w.to(tl.float64), TILE)
    uu += fold(wide * wide, TILE)
    return uw, uu


@triton.jit
def moments(
    w_table, g_table, m_table, v_table, previous_table, numel, sample_start, samples, grad_scale,
    chunk_block, chunk_start, base, partial, chunks, coefficients, blocks,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr,
    CURVATURE: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 2: m, v and g⁻; partial sums of ⟨u,w⟩ and ‖u‖². Chunks in reverse, for the cache."""
    program = base + tl.num_programs(0) - 1 - tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    c = coefficients + i
    if tl.load(c + LIVE * blocks) > 0:
        w = address(w_table, i, W, ALIGNED)
        g = address(g_table, i, G, ALIGNED)
        m = address(m_table, i, tl.float32, ALIGNED)
        v = address(v_table, i, tl.float32, ALIGNED)
        previous = address(previous_table, i, PREVIOUS, ALIGNED)
        first_sample = tl.load(sample_start + i)
        count = tl.load(samples + i)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        use = tl.load(c + USE_GRADIENT * blocks) > 0
        keep = (tl.load(c + KEEP_GRADIENT * blocks) > 0) & (count > 0)
        beta1, beta2 = tl.load(c + BETA1 * blocks), tl.load(c + BETA2 * blocks)
        beta1c, beta2c = (1 - beta1).to(tl.float32), (1 - beta2).to(tl.float32)
        beta1, beta2 = beta1.to(tl.float32), beta2.to(tl.float32)
        sign = tl.load(c + SIGN * blocks).to(tl.float32)
        p = tl.load(c + P * blocks).to(tl.float32)
        q = tl.load(c + Q * blocks).to(tl.float32)
        debias1 = tl.load(c + DEBIAS1 * blocks).to(tl.float32)
        debias2 = tl.load(c + DEBIAS2 * blocks).to(tl.float32)
        eps = tl.load(c + EPS * blocks).to(tl.float32)
        uw = tl.zeros([TILE // 4], tl.float64)
        uu = tl.zeros([TILE // 4], tl.float64)
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                uw, uu = moments_tile(
                    w, g, m, v, previous, start + k, end, first_sample, count, scale, use, keep,
                    sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
                    CURVATURE, False, TILE,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                uw, uu = moments_tile(
                    w, g, m, v, previous, start + k, end, first_sample, count, scale, use, keep,
                    sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
                    CURVATURE, True, TILE,
                )  # fmt: skip
        tl.store(partial + program, tl.sum(uw))
        tl.store(partial + chunks + program, tl.sum(uu))


# ---- pass 3 --------------------------------------------------------------------------------


@triton.jit
def apply_tile(
    w_start, m_start, v_start, offsets, end, debias1, debias2, eps, a1, b, lost, key,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    w = fetch(w_start, offsets, end, MASKED)
    m = fetch(m_start, offsets, end, MASKED)
    u = quotient(m, fetch(v_start, offsets, end, MASKED), debias1, debias2, eps)
    u = tl.where(lost, 0.0, u)
    # w ← w + (a−1)·w − b·u
    w = w + (w * a1 - u * b)
    if STOCHASTIC:
        w = narrow_at_random(w, offsets, key).to(tl.float32)
    else:
        w = narrow(w, w_start.dtype.element_ty).to(tl.float32)
    store(w_start, offsets, w, end, MASKED)


@triton.jit
def apply(
    w_table, m_table, v_table, numel, chunk_block, chunk_start, base, coefficients, blocks, step,
    number,
    W: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 3: w."""
    program = base + tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    c = coefficients + i
    if tl.load(c + LIVE * blocks) > 0:
        w = address(w_table, i, W, ALIGNED)
        m = address(m_table, i, tl.float32, ALIGNED)
        v = address(v_table, i, tl.float32, ALIGNED)
        debias1 = tl.load(c + DEBIAS1 * blocks).to(tl.float32)
        debias2 = tl.load(c + DEBIAS2 * blocks).to(tl.float32)
        eps = tl.load(c + EPS * blocks).to(tl.float32)
        a1 = tl.load(c + A1 * blocks).to(tl.float32)
        b = tl.load(c + B * blocks).to(tl.float32)
        # the guard has met a u that is not finite: b is 0, and 0·∞ would be NaN
        lost = (tl.load(c + GUARDED_UPDATE * blocks) > 0) & (b == 0)
        key = tl.zeros([], tl.uint32)
        if STOCHASTIC:
            key += tl.load(step + i).to(tl.uint32) * 0x9E3779B9
            key += tl.load(number + i).to(tl.uint32) * 0x85EBCA6B
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                offsets = start + k + tl.arange(0, TILE)
                apply_tile(
                    w, m, v, offsets, end, debias1, debias2, eps, a1, b, lost, key,
                    STOCHASTIC, False,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                offsets = start + k + tl.arange(0, TILE)
                apply_tile(
                    w, m, v, offsets, end, debias1, debias2, eps, a1, b, lost, key,
                    STOCHASTIC, True,
                )  # fmt: skip


# ---- the laws ------------------------------------------------------------------------------


@triton.jit
def add_up(partial, low, high, TILE: tl.constexpr):
    """The sum of partial[low:high] in a fixed order."""
    sums = tl.zeros([TILE], tl.float64)
    for k in range(low, high, TILE):
        offsets = k + tl.arange(0, TILE)
        sums += tl.load(partial + offsets, mask=offsets < high, other=0.0)
    return tl.sum(sums)


@triton.jit
def add_up_four(partial, chunks, low, high, TILE: tl.constexpr):
    """The same for four rows at once, so that their loads overlap."""
    a = tl.zeros([TILE], tl.float64)
    b = tl.zeros([TILE], tl.float64)
    c = tl.zeros([TILE], tl.float64)
    d = tl.zeros([TILE], tl.float64)
    for k in range(low, high, TILE):
        offsets = k + tl.arange(0, TILE)
        inside = offsets < high
        a += tl.load(partial + offsets, mask=inside, other=0.0)
        b += tl.load(partial + chunks + offsets, mask=inside, other=0.0)
        c += tl.load(partial + 2 * chunks + offsets, mask=inside, other=0.0)
        d += tl.load(partial + 3 * chunks + offsets, mask=inside, other=0.0)
    return tl.sum(a), tl.sum(b), tl.sum(c), tl.sum(d)


@triton.jit
def totals(partial, chunks, first_chunk, last_chunk, out, blocks, row, TILE: tl.constexpr):
    """One row of sums per block, for sharded blocks: the law follows after a collective."""
    i = tl.program_id(0)
    low, high = tl.load(first_chunk + i), tl.load(last_chunk + i)
    for k in range(row):
        tl.store(out + k * blocks + i, add_up(partial + k * chunks, low, high, TILE))


@triton.jit
def power(base, exponent):
    """base**exponent for base in [0, 1) and exponent >= 1."""
    safe = tl.where(base > 0, base, 1.0)
    return tl.where(base > 0, tl.exp(exponent * tl.log(safe)), 0.0)


@triton.jit
def clamp(x, low: tl.constexpr, high: tl.constexpr):
    """NaN stays NaN, as in torch and not in ``tl.clamp``."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def law_before(
    settings, traits, step, radial_momentum, tau, tau_reference, curvature_step, initial_norm,
    mean_square, g_table, found_inf, partial, chunks, first_chunk, last_chunk, ratio_of_samples,
    coefficients, blocks, READ_M: tl.constexpr, CHECKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Law 1 for one block, as ``control.before``."""
    i = tl.program_id(0)
    o, trait, c = settings + i, traits + i, coefficients + i
    lr = tl.load(o + O_LR * blocks)
    beta1 = tl.load(o + O_BETA1 * blocks)
    beta2 = tl.load(o + O_BETA2 * blocks)
    eps = tl.load(o + O_EPS * blocks)
    radial_lr_ratio = tl.load(o + O_RADIAL_LR_RATIO * blocks)
    radial_lr = tl.load(o + O_RADIAL_LR * blocks)
    radial_beta = tl.load(o + O_RADIAL_BETA * blocks)
    curvature_auto = tl.load(o + O_CURVATURE_AUTO * blocks) > 0
    curvature_target = tl.load(o + O_CURVATURE_TARGET * blocks)
    curvature_beta = tl.load(o + O_CURVATURE_BETA * blocks)
    angular = tl.load(o + O_ANGULAR * blocks)  # 1: every block, 0.5: those declared invariant
    delta = tl.load(o + O_DELTA * blocks)
    guard = tl.load(o + O_GUARD * blocks) > 0
    sign = tl.load(o + O_SIGN * blocks)
    radial_adam = tl.load(o + O_RADIAL_ADAM * blocks) > 0
    second_moment = tl.load(o + O_SECOND_MOMENT * blocks)  # 1 and 0.5 as for angular
    declared_low_dim = tl.load(trait + T_LOW_DIM * blocks) > 0
    declared_invariant = tl.load(trait + T_SCALE_INVARIANT * blocks) > 0
    inverse_root = tl.load(trait + T_INVERSE_ROOT * blocks)
    rounding = tl.load(trait + T_ROUNDING * blocks)
    smallest_eps = tl.load(trait + T_SMALLEST_EPS * blocks)
    largest_square = tl.load(trait + T_LARGEST_SQUARE * blocks)

    active = tl.load(g_table + i) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    low, high = tl.load(first_chunk + i), tl.load(last_chunk + i)
    ww, gw, gg, kappa = add_up_four(partial, chunks, low, high, TILE)
    kappa *= tl.load(ratio_of_samples + i)
    mw = tl.zeros([], tl.float64)
    if READ_M:
        mw += add_up(partial + 4 * chunks, low, high, TILE)
    tl.store(c + WW * blocks, tl.where(active, ww, 0.0))
    tl.store(c + GW * blocks, tl.where(active, gw, 0.0))
    tl.store(c + GG * blocks, tl.where(active, gg, 0.0))
    tl.store(c + KAPPA * blocks, tl.where(active, kappa, 0.0))
    tl.store(c + MW * blocks, tl.where(active, mw, 0.0))
    tl.store(c + ACTIVE * blocks, active.to(tl.float64))

    finite = (gg <= largest_square) & (ww <= LARGEST)  # False for inf and NaN
    live = active & (finite | (guard == 0))
    ww, gw, gg = tl.where(live, ww, 0.0), sign * tl.where(live, gw, 0.0), tl.where(live, gg, 0.0)
    kappa, mw = tl.where(live, kappa, 0.0), tl.where(live, mw, 0.0)

    norm0 = tl.load(initial_norm + i)
    norm0 = tl.where(live & (norm0 < 0), tl.sqrt(ww), norm0)
    low_dim = declared_low_dim | (norm0 == 0) | (ww == 0)
    safe = tl.where(low_dim, 1.0, ww)
    tangential = live & (low_dim == 0)
    t = tl.load(step + i).to(tl.float64) + live.to(tl.float64)
    tl.store(initial_norm + i, norm0)
    tl.store(step + i, t.to(step.dtype.element_ty))
    t = tl.maximum(t, 1.0)

    # curvature
    literal = curvature_target > 0
    keeps_norm = (angular > 0) & declared_invariant
    adapts = tangential & (keeps_norm == 0) & (literal | curvature_auto)
    kappa = tl.where(kappa > LARGEST, LARGEST, kappa)
    nonzero = adapts & (gg > 0)
    count = tl.load(curvature_step + i) + nonzero.to(tl.float64)
    counts = nonzero & (count > 1)
    reference = tl.load(tau_reference + i)
    moved = reference * REFERENCE_BETA + kappa * (1 - REFERENCE_BETA)
    reference = tl.where(counts, moved, reference)
    slow = tl.full([], REFERENCE_BETA, tl.float64)
    reference_debias = 1 - power(slow, tl.maximum(count - 1, 1.0))
    old_tau = tl.load(tau + i)
    start = tl.where(literal, curvature_target, kappa)
    new_tau = curvature_beta * tl.where(old_tau < 0, start, old_tau) + (1 - curvature_beta) * kappa
    new_tau = tl.where((literal & adapts) | ((literal == 0) & counts), new_tau, old_tau)
    target = tl.where(literal, curvature_target, reference / reference_debias)
    known = adapts & (literal | (count > 1)) & (target > 0)
    ratio = tl.where(known, new_tau, 1.0) / tl.where(known, target, 1.0)
    scale = tl.where(known, 1 / tl.sqrt(ratio + eps), 1.0)
    tl.store(curvature_step + i, count)
    tl.store(tau_reference + i, reference)
    tl.store(tau + i, new_tau)
    tl.store(c + TAU * blocks, new_tau)

    guarded_scale = guard & tangential & ((scale < SCALE_LOW) | (scale > SCALE_HIGH))
    scale = tl.where(guard, clamp(scale, SCALE_LOW, SCALE_HIGH), scale)
    eta_radial = scale * tl.where(radial_lr != radial_lr, radial_lr_ratio * lr, radial_lr)

    # AdamP's test, radial momentum, rounding noise
    bound = delta * inverse_root * tl.sqrt(gg) * tl.sqrt(safe)
    by_test = (tl.abs(gw) < bound) & (gg > 0)
    invariant = (declared_invariant | by_test) & (low_dim == 0)
    momentum = tl.load(radial_momentum + i)
    fresh = radial_beta * momentum + (1 - radial_beta) * gw / tl.sqrt(safe)
    tl.store(radial_momentum + i, tl.where(tangential, fresh, momentum))
    projects = tangential & (radial_adam == 0)
    across = gg - gw * gw / safe
    across = tl.where(across < 0, 0.0, across)
    noise = guard & projects & (across <= rounding * gg)

    # the mean of v, and where it stands for v: u = m̂/(0·√v + (√mean + ε))
    square = tl.where(projects, tl.where(noise, 0.0, across), gg)
    mean = tl.load(mean_square + i)
    new_mean = beta2 * mean + (1 - beta2) * square * inverse_root * inverse_root
    new_mean = tl.where(live, new_mean, mean)
    tl.store(mean_square + i, new_mean)
    shared = tangential & ((second_moment == 1.0) | ((second_moment > 0) & declared_invariant))
    debias2 = 1 / (1 - power(beta2, t))
    eps = tl.where(eps > smallest_eps, eps, smallest_eps)

    tl.store(c + LIVE * blocks, live.to(tl.float64))
    tl.store(c + USE_GRADIENT * blocks, (live & (noise == 0)).to(tl.float64))
    tl.store(c + KEEP_GRADIENT * blocks, (live & ((gg > 0) | literal)).to(tl.float64))
    tl.store(c + SIGN * blocks, sign)
    tl.store(c + P * blocks, tl.where(projects & (noise == 0), gw / safe, 0.0))
    tl.store(c + Q * blocks, tl.where(projects, mw / safe, 0.0))
    tl.store(c + BETA1 * blocks, tl.where(live, beta1, 1.0))
    tl.store(c + BETA2 * blocks, tl.where(live, beta2, 1.0))
    tl.store(c + DEBIAS1 * blocks, 1 / (1 - power(beta1, t)))
    tl.store(c + DEBIAS2 * blocks, tl.where(shared, 0.0, debias2))
    tl.store(c + EPS * blocks, tl.where(shared, eps + tl.sqrt(debias2 * new_mean), eps))
    tl.store(c + LOW_DIM * blocks, low_dim.to(tl.float64))
    tl.store(c + SCALE_INVARIANT * blocks, invariant.to(tl.float64))
    tl.store(c + ETA_RADIAL * blocks, eta_radial)
    tl.store(c + GUARDED_SCALE * blocks, guarded_scale.to(tl.float64))


@triton.jit
def law_after(
    settings, traits, step, radial_momentum, initial_norm, partial, chunks, first_chunk, last_chunk,
    coefficients, blocks, TILE: tl.constexpr,
):  # fmt: skip
    """Law 2 for one block, as ``control.after``."""
    i = tl.program_id(0)
    o, trait, c = settings + i, traits + i, coefficients + i
    lr = tl.load(o + O_LR * blocks)
    weight_decay = tl.load(o + O_WEIGHT_DECAY * blocks)
    radial_lr_ratio = tl.load(o + O_RADIAL_LR_RATIO * blocks)
    radial_lr = tl.load(o + O_RADIAL_LR * blocks)
    radial_beta = tl.load(o + O_RADIAL_BETA * blocks)
    decay_tangential = tl.load(o + O_DECAY_TANGENTIAL * blocks) > 0
    angular = tl.load(o + O_ANGULAR * blocks)  # 1: every block, 0.5: those declared scale-invariant
    low_dim_scale = tl.load(o + O_LOW_DIM_SCALE * blocks)
    low_dim_decay = tl.load(o + O_LOW_DIM_DECAY * blocks)
    wd_ratio = tl.load(o + O_WD_RATIO * blocks)
    guard = tl.load(o + O_GUARD * blocks) > 0
    angular_rms = tl.load(o + O_ANGULAR_RMS * blocks)
    radial_adam = tl.load(o + O_RADIAL_ADAM * blocks) > 0
    inverse_root = tl.load(trait + T_INVERSE_ROOT * blocks)
    live = tl.load(c + LIVE * blocks) > 0
    invariant = tl.load(c + SCALE_INVARIANT * blocks) > 0
    eta_radial = tl.load(c + ETA_RADIAL * blocks)
    radial = live & (tl.load(c + LOW_DIM * blocks) == 0)

    low, high = tl.load(first_chunk + i), tl.load(last_chunk + i)
    uw = tl.where(live, add_up(partial, low, high, TILE), 0.0)
    uu = tl.where(live, add_up(partial + chunks, low, high, TILE), 0.0)
    tl.store(c + UW * blocks, uw)
    tl.store(c + UU * blocks, uu)
    ww = tl.where(radial, tl.load(c + WW * blocks), 1.0)
    norm = tl.sqrt(ww)
    norm0 = tl.where(radial, tl.load(initial_norm + i), 1.0)

    decay = weight_decay * tl.where(decay_tangential, lr, eta_radial)
    decay = tl.where(invariant, wd_ratio * decay, decay)
    keeps_norm = (angular > 0) & (tl.load(trait + T_SCALE_INVARIANT * blocks) > 0)
    angular = (angular == 1.0) | keeps_norm
    decay = tl.where(keeps_norm, 0.0, decay)
    guarded_decay = guard & radial & (norm < norm0 * NORM_FLOOR)
    decay = tl.where(guarded_decay, 0.0, decay)

    # Adam's quotient, in its radial and its tangential part
    rms = tl.sqrt(uu) * inverse_root
    guarded_update = guard & live & ((rms <= UPDATE_BOUND) == 0)  # NaN: ∞ on some ranks
    overflow = guarded_update & ((uu <= LARGEST) == 0)
    bound = tl.full([], UPDATE_BOUND, tl.float64)
    shrink = bound / tl.where(guarded_update, rms, bound)
    shrink = tl.where(overflow, 0.0, shrink)
    uw = tl.where(overflow, 0.0, shrink * uw)
    uu = tl.where(overflow, 0.0, shrink * shrink * uu)
    along = uw / ww
    across = uu - uw * along
    across = tl.where(across < 0, 0.0, across)

    # decay, then the radial step, of SGD or Adam: together one factor on ‖w‖
    t = tl.maximum(tl.load(step + i).to(tl.float64), 1.0)
    momentum = tl.load(radial_momentum + i)
    pull = tl.where(radial_adam, along, momentum / ((1 - power(radial_beta, t)) * norm))
    factor = 1 - decay - tl.where(invariant, 0.0, eta_radial * pull)
    guarded_factor = guard & radial & ((factor < FACTOR_LOW) | (factor > FACTOR_HIGH))
    factor = tl.where(guard, clamp(factor, FACTOR_LOW, FACTOR_HIGH), factor)

    # the tangential step, u without its radial part: added, or a pure rotation
    radial_lr = tl.where(radial_lr != radial_lr, radial_lr_ratio * lr, radial_lr)
    rate = weight_decay * tl.where(decay_tangential, lr, radial_lr)
    rate = tl.where(invariant, wd_ratio * rate, rate)
    decays = (rate > 0) & (lr > 0)
    resting = lr / (tl.sqrt(2 * tl.where(decays, rate, 1.0)) * inverse_root)
    resting = tl.where(decays, resting, norm0)
    unit = tl.where(angular_rms > 0, angular_rms / inverse_root, resting)
    unit = tl.where(angular_rms != angular_rms, norm0, unit)
    smallest = lr / (inverse_root * TURN_BOUND)
    guarded_turn = guard & radial & angular & (unit < smallest)
    k = lr * norm / tl.where(guarded_turn, smallest, unit)
    stretch = tl.sqrt(1 + k * k * across / ww)
    a1 = tl.where(angular, factor * (1 + k * along) / stretch, factor + lr * along) - 1
    b = tl.where(angular, factor * k / stretch, lr)
    shrinks = lr * low_dim_decay
    shrinks = tl.where(guard, clamp(shrinks, 0.0, MOST_DECAY), shrinks)
    a1 = tl.where(radial, a1, tl.where(live, -shrinks, 0.0))
    b = tl.where(radial, b, tl.where(live, low_dim_scale * lr, 0.0))

    # m^ρ projected on w⁺ loses the cosine of the turn
    ahead, aside = 1 + a1 - b * along, b * b * across / ww
    square = ahead * ahead + aside
    turned = ahead / tl.sqrt(tl.where(square < SMALLEST, SMALLEST, square))
    tl.store(radial_momentum + i, momentum * tl.where(radial, turned, 1.0))
    tl.store(c + A1 * blocks, a1)
    tl.store(c + B * blocks, shrink * b)
    tl.store(c + GUARDED_FACTOR * blocks, guarded_factor.to(tl.float64))
    tl.store(c + GUARDED_DECAY * blocks, guarded_decay.to(tl.float64))
    tl.store(c + GUARDED_UPDATE * blocks, guarded_update.to(tl.float64))
    tl.store(c + GUARDED_TURN * blocks, guarded_turn.to(tl.float64))
