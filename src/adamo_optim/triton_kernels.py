"""The passes as Triton kernels over all tensors of a bucket at once, and the laws between them.

A program of a pass works on one chunk of one tensor; tables on the device hold the tensors'
addresses. Programs leave partial sums, one per chunk, which the programs of a law (one per tensor)
add up in a fixed order: no atomics, the same result in every run. Sums and laws are in float64,
elementwise arithmetic is in WIDE (float32; float64 for weights that are), divisions and roots are
IEEE's. A complex tensor is one of real numbers, twice as many.

``settings`` (the options), ``traits``, ``memory`` and ``record`` are matrices with a row for each
number of ``law.py`` and a column for each block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import triton_laws as laws
from .law import RECORD, TURN_RECORD, Memory, TurnOptions

# rows of the matrices; a kernel reads no other globals than constexpr
WW, GW, GG, KAPPA, MW, UW, UU, ACTIVE = (
    tl.constexpr(RECORD.index(name))
    for name in ("ww", "gw", "gg", "kappa", "mw", "uw", "uu", "active")
)
LIVE, USE_GRADIENT, KEEP_GRADIENT, SIGN, P, Q, BETA1, BETA2, DEBIAS1, DEBIAS2, EPS = (
    tl.constexpr(RECORD.index(name))
    for name in (
        "live",
        "use_gradient",
        "keep_gradient",
        "sign",
        "p",
        "q",
        "beta1",
        "beta2",
        "debias1",
        "debias2",
        "eps",
    )
)
A1, B, GUARDED_UPDATE = (tl.constexpr(RECORD.index(name)) for name in ("a1", "b", "guarded_update"))
STEP = tl.constexpr(Memory._fields.index("step"))
TURN_WW, TURN_GG, TURN_MW, TURN_MM, TURN_ALL, TURN_A1, TURN_B, TURN_ACTIVE = (
    tl.constexpr(TURN_RECORD.index(name))
    for name in ("ww", "gg", "mw", "mm", "all_ww", "a1", "b", "active")
)
TURN_BETA1, TURN_SIGN = (
    tl.constexpr(TurnOptions._fields.index(name)) for name in ("beta1", "sign")
)


@triton.jit
def address(table, i, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The start of tensor ``i``; ALIGNED promises multiples of 16 bytes, for wide accesses.

    As a distance from the table: Triton knows nothing of a number that becomes a pointer, whatever
    it is told, and would read entry by entry.
    """
    distance = tl.load(table + i) - table.to(tl.int64)
    start = table.to(tl.pointer_type(tl.int8), bitcast=True) + distance
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """To the type of a tensor, to the nearest number and ties to even.

    bfloat16 by hand: Triton's interpreter, in which these kernels are tested, would truncate.
    """
    if dtype == tl.bfloat16:
        value = value.to(tl.float32)
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def narrow_at_random(value, offsets, key):
    """float32 → bfloat16 as ``rounding.round_stochastically``."""
    x = offsets.to(tl.uint32) * 0x9E3779B1 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    bits = value.to(tl.uint32, bitcast=True)
    noisy = (bits + ((x ^ (x >> 16)) & 0xFFFF)) >> 16
    kept = tl.where((bits & 0x7F800000) != 0x7F800000, noisy, bits >> 16)  # inf and NaN as they are
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fetch(pointer, offsets, end, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Entries in WIDE; a full tile goes without a mask, which would split wide loads."""
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < end, other=0.0).to(WIDE)
    return tl.load(pointer + offsets).to(WIDE)


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
    WIDE: tl.constexpr, CURVATURE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offsets = position + tl.arange(0, TILE)
    w = fetch(w_start, offsets, end, WIDE, MASKED).to(tl.float64)
    g = fetch(g_start, offsets, end, WIDE, MASKED) * scale
    wide = g.to(tl.float64)
    ww += w * w
    gw += wide * w
    gg += wide * wide
    mw += fetch(m_start, offsets, end, WIDE, MASKED).to(tl.float64) * w
    if CURVATURE == 1:  # g⁻ of the whole tensor
        if samples > 0:
            change = wide - fetch(previous_start, offsets, end, WIDE, MASKED).to(tl.float64)
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
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    CURVATURE: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 1: partial sums of ‖w‖², ⟨g,w⟩, ‖g‖², κ and ⟨m,w⟩."""
    program = base + tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    if tl.load(g_table + i) != 0:
        w = address(w_table, i, W, ALIGNED)
        g = address(g_table, i, G, ALIGNED)
        m = address(m_table, i, WIDE, ALIGNED)
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
                    ww, gw, gg, kappa, mw, WIDE, CURVATURE, False, TILE,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                ww, gw, gg, kappa, mw = reduce_tile(
                    w, g, m, previous, start + k, end, first_sample, count, scale,
                    ww, gw, gg, kappa, mw, WIDE, CURVATURE, True, TILE,
                )  # fmt: skip
        tl.store(partial + program, tl.sum(ww))
        tl.store(partial + chunks + program, tl.sum(gw))
        tl.store(partial + 2 * chunks + program, tl.sum(gg))
        tl.store(partial + 3 * chunks + program, tl.sum(kappa))
        tl.store(partial + 4 * chunks + program, tl.sum(mw))


# ---- pass 2 --------------------------------------------------------------------------------


@triton.jit
def quotient(m, v, debias1, debias2, eps):
    """u = m̂/(√v̂ + ε), to two units in the last place of float32.

    IEEE's division and root branch for every entry; without them a row's step is half as long.
    """
    return (m * debias1) / (tl.sqrt(v * debias2) + eps)


@triton.jit
def new_moments(w, g, m, v, use, sign, p, q, beta1, beta1c, beta2, beta2c):
    # g^θ = ±g − p·w
    g_tangential = tl.where(use, g, 0.0) * sign - w * p
    # m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ²
    m = (m - w * q) * beta1 + g_tangential * beta1c
    v = v * beta2 + g_tangential * g_tangential * beta2c
    return m, v


@triton.jit
def moments_tile(
    w_start, g_start, m_start, v_start, previous_start, position, end, sample_start, samples,
    scale, use, keep, sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
    WIDE: tl.constexpr, CURVATURE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offsets = position + tl.arange(0, TILE)
    w = fetch(w_start, offsets, end, WIDE, MASKED)
    g = fetch(g_start, offsets, end, WIDE, MASKED) * scale
    m = fetch(m_start, offsets, end, WIDE, MASKED)
    v = fetch(v_start, offsets, end, WIDE, MASKED)
    # g⁻ ← g
    if CURVATURE == 1:
        if keep:
            store(previous_start, offsets, g, end, MASKED)
    if CURVATURE == 2:
        if keep & touches(position, sample_start, samples, TILE):
            inside = (offsets >= sample_start) & (offsets < sample_start + samples)
            kept = narrow(g, previous_start.dtype.element_ty)
            tl.store(previous_start + (offsets - sample_start), kept, mask=inside)
    m, v = new_moments(w, g, m, v, use, sign, p, q, beta1, beta1c, beta2, beta2c)
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
    chunk_block, chunk_start, base, partial, chunks, record, blocks,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    CURVATURE: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 2: m, v and g⁻; partial sums of ⟨u,w⟩ and ‖u‖². Chunks in reverse, for the cache."""
    program = base + tl.num_programs(0) - 1 - tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    c = record + i
    if tl.load(c + LIVE * blocks) > 0:
        w = address(w_table, i, W, ALIGNED)
        g = address(g_table, i, G, ALIGNED)
        m = address(m_table, i, WIDE, ALIGNED)
        v = address(v_table, i, WIDE, ALIGNED)
        previous = address(previous_table, i, PREVIOUS, ALIGNED)
        first_sample = tl.load(sample_start + i)
        count = tl.load(samples + i)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        use = tl.load(c + USE_GRADIENT * blocks) > 0
        keep = (tl.load(c + KEEP_GRADIENT * blocks) > 0) & (count > 0)
        beta1, beta2 = tl.load(c + BETA1 * blocks), tl.load(c + BETA2 * blocks)
        beta1c, beta2c = (1 - beta1).to(WIDE), (1 - beta2).to(WIDE)
        beta1, beta2 = beta1.to(WIDE), beta2.to(WIDE)
        sign = tl.load(c + SIGN * blocks).to(WIDE)
        p = tl.load(c + P * blocks).to(WIDE)
        q = tl.load(c + Q * blocks).to(WIDE)
        debias1 = tl.load(c + DEBIAS1 * blocks).to(WIDE)
        debias2 = tl.load(c + DEBIAS2 * blocks).to(WIDE)
        eps = tl.load(c + EPS * blocks).to(WIDE)
        uw = tl.zeros([TILE // 4], tl.float64)
        uu = tl.zeros([TILE // 4], tl.float64)
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                uw, uu = moments_tile(
                    w, g, m, v, previous, start + k, end, first_sample, count, scale, use, keep,
                    sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
                    WIDE, CURVATURE, False, TILE,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                uw, uu = moments_tile(
                    w, g, m, v, previous, start + k, end, first_sample, count, scale, use, keep,
                    sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2, eps, uw, uu,
                    WIDE, CURVATURE, True, TILE,
                )  # fmt: skip
        tl.store(partial + program, tl.sum(uw))
        tl.store(partial + chunks + program, tl.sum(uu))


# ---- pass 3 --------------------------------------------------------------------------------


@triton.jit
def new_weight(w, u, a1, b, lost):
    """w ← w + (a−1)·w − b·u."""
    return w + (w * a1 - tl.where(lost, 0.0, u) * b)


@triton.jit
def apply_tile(
    w_start, m_start, v_start, offsets, end, debias1, debias2, eps, a1, b, lost, key,
    WIDE: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    w = fetch(w_start, offsets, end, WIDE, MASKED)
    m = fetch(m_start, offsets, end, WIDE, MASKED)
    u = quotient(m, fetch(v_start, offsets, end, WIDE, MASKED), debias1, debias2, eps)
    w = new_weight(w, u, a1, b, lost)
    if STOCHASTIC:
        w = narrow_at_random(w, offsets, key).to(WIDE)
    store(w_start, offsets, w, end, MASKED)


@triton.jit
def apply(
    w_table, m_table, v_table, numel, chunk_block, chunk_start, base, record, blocks, memory,
    number,
    W: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 3: w."""
    program = base + tl.program_id(0)
    i = tl.load(chunk_block + program)
    start = tl.multiple_of(tl.load(chunk_start + program), CHUNK)
    end = tl.load(numel + i)
    c = record + i
    if tl.load(c + LIVE * blocks) > 0:
        w = address(w_table, i, W, ALIGNED)
        m = address(m_table, i, WIDE, ALIGNED)
        v = address(v_table, i, WIDE, ALIGNED)
        debias1 = tl.load(c + DEBIAS1 * blocks).to(WIDE)
        debias2 = tl.load(c + DEBIAS2 * blocks).to(WIDE)
        eps = tl.load(c + EPS * blocks).to(WIDE)
        a1 = tl.load(c + A1 * blocks).to(WIDE)
        b = tl.load(c + B * blocks).to(WIDE)
        # the guard has met a u that is not finite: b is 0, and 0·∞ would be NaN
        lost = (tl.load(c + GUARDED_UPDATE * blocks) > 0) & (b == 0)
        key = tl.zeros([], tl.uint32)
        if STOCHASTIC:
            key += tl.load(memory + STEP * blocks + i).to(tl.int64).to(tl.uint32) * 0x9E3779B9
            key += tl.load(number + i).to(tl.uint32) * 0x85EBCA6B
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                offsets = start + k + tl.arange(0, TILE)
                apply_tile(
                    w, m, v, offsets, end, debias1, debias2, eps, a1, b, lost, key,
                    WIDE, STOCHASTIC, False,
                )  # fmt: skip
        else:
            for k in range(0, CHUNK, TILE):
                offsets = start + k + tl.arange(0, TILE)
                apply_tile(
                    w, m, v, offsets, end, debias1, debias2, eps, a1, b, lost, key,
                    WIDE, STOCHASTIC, True,
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
def before_moments(
    settings, traits, memory, record, blocks, g_table, found_inf, partial, chunks, first_chunk,
    last_chunk, ratio_of_samples, CHECKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The law between pass 1 and pass 2, for one block."""
    i = tl.program_id(0)
    active = tl.load(g_table + i) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    low, high = tl.load(first_chunk + i), tl.load(last_chunk + i)
    ww, gw, gg, kappa = add_up_four(partial, chunks, low, high, TILE)
    kappa *= tl.load(ratio_of_samples + i)
    mw = add_up(partial + 4 * chunks, low, high, TILE)
    c = record + i
    tl.store(c + WW * blocks, tl.where(active, ww, 0.0))
    tl.store(c + GW * blocks, tl.where(active, gw, 0.0))
    tl.store(c + GG * blocks, tl.where(active, gg, 0.0))
    tl.store(c + KAPPA * blocks, tl.where(active, kappa, 0.0))
    tl.store(c + MW * blocks, tl.where(active, mw, 0.0))
    tl.store(c + ACTIVE * blocks, active.to(tl.float64))
    numbers = laws.load_numbers(settings, traits, memory, blocks, i, i)
    first = laws.moments_law(numbers, (ww, gw, gg, kappa, mw), active)
    laws.store_moments(record, memory, blocks, i, first)


@triton.jit
def before_weights(
    settings, traits, memory, record, blocks, partial, chunks, first_chunk, last_chunk,
    TILE: tl.constexpr,
):  # fmt: skip
    """The law between pass 2 and pass 3, for one block."""
    i = tl.program_id(0)
    low, high = tl.load(first_chunk + i), tl.load(last_chunk + i)
    live = tl.load(record + LIVE * blocks + i) > 0  # else its partial sums are old
    uw = tl.where(live, add_up(partial, low, high, TILE), 0.0)
    uu = tl.where(live, add_up(partial + chunks, low, high, TILE), 0.0)
    tl.store(record + UW * blocks + i, uw)
    tl.store(record + UU * blocks + i, uu)
    numbers = laws.load_numbers(settings, traits, memory, blocks, i, i)
    first = laws.load_moments(record, memory, blocks, i)
    ww = tl.load(record + WW * blocks + i)
    second = laws.weights_law(numbers, (ww, 0.0, 0.0, 0.0, 0.0), first, (uw, uu))
    laws.store_weights(record, memory, blocks, i, second)


# ---- weights that turn -------------------------------------------------------------------------


@triton.jit
def turn_reduce_tile(
    w_start, g_start, m_start, position, end, scale, beta1, rest1, keep, ww, gg, mw, mm,
    WIDE: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    offsets = position + tl.arange(0, TILE)
    w = fetch(w_start, offsets, end, WIDE, MASKED)
    g = fetch(g_start, offsets, end, WIDE, MASKED) * scale
    # m ← β₁m + (1−β₁)(±g), in the precision of m
    m = fetch(m_start, offsets, end, WIDE, MASKED) * beta1 + g * rest1
    m = narrow(m, m_start.dtype.element_ty).to(WIDE)
    if keep:
        store(m_start, offsets, m, end, MASKED)
    w, g, m = w.to(tl.float64), g.to(tl.float64), m.to(tl.float64)
    ww += fold(w * w, TILE)
    gg += fold(g * g, TILE)
    mw += fold(m * w, TILE)
    mm += fold(m * m, TILE)
    return ww, gg, mw, mm


@triton.jit
def turn_chunk(
    i, chunk_start, numel, slots, offsets, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a chunk of block i: its tensor in the tables of addresses, where it and the block end."""
    start, end = tl.load(chunk_start), tl.load(numel + i)
    if ROWS:
        offset = tl.load(offsets + i)
        start += offset
        if ALIGNED:
            start = tl.multiple_of(start, 16)
        return tl.load(slots + i), start, offset + end
    else:
        return i, tl.multiple_of(start, CHUNK), end


@triton.jit
def turn_reduce(
    w_table, g_table, m_table, numel, grad_scale, found_inf, chunk_block, chunk_start, base,
    partial, chunks, settings, blocks, slots, offsets,
    W: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, CHECKED: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 1: m; partial sums of ‖w‖², ‖g‖², ⟨m,w⟩ and ‖m‖²."""
    program = base + tl.program_id(0)
    i = tl.load(chunk_block + program)
    slot, start, end = turn_chunk(
        i, chunk_start + program, numel, slots, offsets, ROWS, ALIGNED, CHUNK
    )  # fmt: skip
    if tl.load(g_table + slot) != 0:
        w = address(w_table, slot, W, ALIGNED)
        g = address(g_table, slot, G, ALIGNED)
        m = address(m_table, slot, W, ALIGNED)
        beta1 = tl.load(settings + TURN_BETA1 * blocks + i)
        rest1 = ((1 - beta1) * tl.load(settings + TURN_SIGN * blocks + i)).to(WIDE)
        beta1 = beta1.to(WIDE)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        keep = True
        if CHECKED:
            keep = tl.load(found_inf) == 0.0
        ww = tl.zeros([TILE // 4], tl.float64)
        gg = tl.zeros([TILE // 4], tl.float64)
        mw = tl.zeros([TILE // 4], tl.float64)
        mm = tl.zeros([TILE // 4], tl.float64)
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                ww, gg, mw, mm = turn_reduce_tile(
                    w, g, m, start + k, end, scale, beta1, rest1, keep, ww, gg, mw, mm,
                    WIDE, False, TILE,
                )  # fmt: skip
        else:
            for k in range(0, (end - start).to(tl.int32), TILE):
                ww, gg, mw, mm = turn_reduce_tile(
                    w, g, m, start + k, end, scale, beta1, rest1, keep, ww, gg, mw, mm,
                    WIDE, True, TILE,
                )  # fmt: skip
        tl.store(partial + program, tl.sum(ww))
        tl.store(partial + chunks + program, tl.sum(gg))
        tl.store(partial + 2 * chunks + program, tl.sum(mw))
        tl.store(partial + 3 * chunks + program, tl.sum(mm))


@triton.jit
def add_up_rows(partial, chunks, low, count, TILE: tl.constexpr):
    """Four sums of every block of a weight, each with ``count`` chunks."""
    a = tl.zeros([TILE], tl.float64)
    b = tl.zeros([TILE], tl.float64)
    c = tl.zeros([TILE], tl.float64)
    d = tl.zeros([TILE], tl.float64)
    for k in range(count):
        a += tl.load(partial + low + k)
        b += tl.load(partial + chunks + low + k)
        c += tl.load(partial + 2 * chunks + low + k)
        d += tl.load(partial + 3 * chunks + low + k)
    return a, b, c, d


@triton.jit
def keep_turn_sums(record, blocks, i, sums, active):
    c = record + i
    tl.store(c + TURN_WW * blocks, tl.where(active, sums[0], 0.0))
    tl.store(c + TURN_GG * blocks, tl.where(active, sums[1], 0.0))
    tl.store(c + TURN_MW * blocks, tl.where(active, sums[2], 0.0))
    tl.store(c + TURN_MM * blocks, tl.where(active, sums[3], 0.0))


@triton.jit
def finish_turn(numbers, scaled, whole, record, memory, blocks, i, active):
    """The second law of the blocks ``i`` of a weight."""
    c = record + i  # all_ww, all_uw and all_uu stand side by side
    tl.store(c + TURN_ALL * blocks, tl.where(active, whole[0], 0.0))
    tl.store(c + (TURN_ALL + 1) * blocks, tl.where(active, whole[1], 0.0))
    tl.store(c + (TURN_ALL + 2) * blocks, tl.where(active, whole[2], 0.0))
    tl.store(c + TURN_ACTIVE * blocks, active.to(tl.float64))
    turn = laws.turn_law(numbers, scaled, whole, active)
    laws.store_turn(record, memory, blocks, i, turn)


@triton.jit
def before_turn(
    settings, traits, memory, record, blocks, g_table, found_inf, partial, chunks, first_chunk,
    last_chunk, first_block, sizes, CHECKED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The laws between the two passes, for all blocks of one weight."""
    slot = tl.program_id(0)
    active = tl.load(g_table + slot) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    if ROWS:
        first, count = tl.load(first_block + slot), tl.load(sizes + slot)
        pieces = tl.load(last_chunk + first) - tl.load(first_chunk + first)
        ww = tl.zeros([TILE], tl.float64)
        uw = tl.zeros([TILE], tl.float64)
        uu = tl.zeros([TILE], tl.float64)
        # backwards: all blocks read the step of the first one, which the last tile writes
        for tile in range((count - 1) // TILE, -1, -1):
            place = tile * TILE + tl.arange(0, TILE)
            i = first + tl.minimum(place, count - 1)
            sums = add_up_rows(partial, chunks, tl.load(first_chunk + i), pieces, TILE)
            keep_turn_sums(record, blocks, i, sums, active)
            numbers = laws.load_turn_numbers(settings, traits, memory, blocks, i, first)
            scaled = laws.square_law(numbers, sums, active)
            tl.debug_barrier()  # lanes past the last row have its numbers, and all have the step
            laws.store_square(record, memory, blocks, i, scaled)
            ww += tl.where(place < count, sums[0], 0.0)
            uw += tl.where(place < count, scaled[1], 0.0)
            uu += tl.where(place < count, scaled[2], 0.0)
        whole = (tl.sum(ww), tl.sum(uw), tl.sum(uu))
        tl.debug_barrier()
        for tile in range((count - 1) // TILE + 1):
            i = first + tl.minimum(tile * TILE + tl.arange(0, TILE), count - 1)
            numbers = laws.load_turn_numbers(settings, traits, memory, blocks, i, first)
            scaled = laws.load_square(record, memory, blocks, i)
            finish_turn(numbers, scaled, whole, record, memory, blocks, i, active)
    else:
        low, high = tl.load(first_chunk + slot), tl.load(last_chunk + slot)
        sums = add_up_four(partial, chunks, low, high, TILE)
        keep_turn_sums(record, blocks, slot, sums, active)
        numbers = laws.load_turn_numbers(settings, traits, memory, blocks, slot, slot)
        scaled = laws.square_law(numbers, sums, active)
        laws.store_square(record, memory, blocks, slot, scaled)
        whole = (sums[0], scaled[1], scaled[2])
        finish_turn(numbers, scaled, whole, record, memory, blocks, slot, active)


@triton.jit
def turn_apply(
    w_table, m_table, numel, chunk_block, chunk_start, base, record, blocks, slots, offsets,
    W: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pass 2: w ← w + (a−1)·w − b·m. Chunks in reverse, for the cache."""
    program = base + tl.num_programs(0) - 1 - tl.program_id(0)
    i = tl.load(chunk_block + program)
    slot, start, end = turn_chunk(
        i, chunk_start + program, numel, slots, offsets, ROWS, ALIGNED, CHUNK
    )  # fmt: skip
    a1 = tl.load(record + TURN_A1 * blocks + i).to(WIDE)
    b = tl.load(record + TURN_B * blocks + i).to(WIDE)
    if tl.load(record + TURN_ACTIVE * blocks + i) > 0:
        w_start = address(w_table, slot, W, ALIGNED)
        m_start = address(m_table, slot, W, ALIGNED)
        if start + CHUNK <= end:
            for k in range(0, CHUNK, TILE):
                places = start + k + tl.arange(0, TILE)
                w = fetch(w_start, places, end, WIDE, False)
                m = fetch(m_start, places, end, WIDE, False)
                store(w_start, places, w + (w * a1 - m * b), end, False)
        else:
            for k in range(0, (end - start).to(tl.int32), TILE):
                places = start + k + tl.arange(0, TILE)
                w = fetch(w_start, places, end, WIDE, True)
                m = fetch(m_start, places, end, WIDE, True)
                store(w_start, places, w + (w * a1 - m * b), end, True)
