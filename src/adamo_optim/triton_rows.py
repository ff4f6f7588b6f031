"""A whole step of AdamO in one pass, for blocks that fit into a program: rows, and small tensors.

A program holds its row in registers: it reads w, g, m, v and g⁻ once, sums, applies the laws and
writes w, m, v and g⁻ once. A row is HEAD + TAIL entries, two powers of two, because a tile must be
one: 768 = 512 + 256 and 4,608 = 4,096 + 512 then leave no thread idle. A longer row goes through
the tiles of ``triton_kernels``, three times; after the first time it comes from the cache.

OVERLAP: programs of the next launch may start as soon as all of this one have, for they work on
other rows; but a launch ends after the one before, so that what follows finds both done.

All threads load the block's memory before the first sum and some store it after that: the barriers
of the sums lie in between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import triton_kernels as passes
from . import triton_laws as laws
from .law import RECORD, ForMoments

WW, GW, GG, KAPPA, MW, UW, UU, ACTIVE = (
    tl.constexpr(RECORD.index(name))
    for name in ("ww", "gw", "gg", "kappa", "mw", "uw", "uu", "active")
)
STEP = tl.constexpr(len(ForMoments._fields))  # its place in what ``moments_law`` returns


@triton.jit
def total(x, N: tl.constexpr):
    """Four neighbours, which a thread holds, are added before float64: half of the conversions."""
    return tl.sum(tl.sum(tl.reshape(x, (N // 4, 4)), axis=1).to(tl.float64))


@triton.jit
def sums_of(w, g, m, previous, KEEPS: tl.constexpr, N: tl.constexpr):
    """Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ and ⟨m,w⟩.

    The first three tell a gradient along w from rounding: their products are exact.
    """
    mw = total(m * w, N)
    kappa = mw * 0.0
    if KEEPS:
        kappa = total((g - previous) * (g - previous), N)
    w, g = w.to(tl.float64), g.to(tl.float64)
    return tl.sum(w * w), tl.sum(g * w), tl.sum(g * g), kappa, mw


@triton.jit
def products_of(u, w, offsets, end, MASKED: tl.constexpr, N: tl.constexpr):
    """Pass 2: ⟨u,w⟩ and ‖u‖²."""
    if MASKED:
        u = tl.where(offsets < end, u, 0.0)
    return total(u * w, N), total(u * u, N)


@triton.jit
def store_weight(w_start, offsets, w, u, a1, b, lost, end, key, STOCHASTIC, MASKED):
    w = passes.new_weight(w, u, a1, b, lost)
    if STOCHASTIC:
        w = passes.narrow_at_random(w, offsets, key).to(tl.float32)
    passes.store(w_start, offsets, w, end, MASKED)


@triton.jit
def key_of(first, number, slot):
    """What the random bits of a row are drawn with."""
    key = first[STEP].to(tl.int64).to(tl.uint32) * 0x9E3779B9
    return key + tl.load(number + slot).to(tl.uint32) * 0x85EBCA6B


@triton.jit
def store_sums(record, blocks, i, sums):
    tl.store(record + WW * blocks + i, sums[0])
    tl.store(record + GW * blocks + i, sums[1])
    tl.store(record + GG * blocks + i, sums[2])
    tl.store(record + KAPPA * blocks + i, sums[3])
    tl.store(record + MW * blocks + i, sums[4])


@triton.jit
def store_products(record, blocks, i, products):
    tl.store(record + UW * blocks + i, products[0])
    tl.store(record + UU * blocks + i, products[1])


@triton.jit
def rows(
    w_table, g_table, m_table, v_table, previous_table, grad_scale, found_inf,
    program_slot, program_row, base, first_block, length_of,
    settings, traits, memory, record, blocks, number,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    KEEPS: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    ALIGNED: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One step of one row. MASKED: HEAD + TAIL is more than its length."""
    if OVERLAP:
        gdc_launch_dependents()
    program = base + tl.program_id(0)
    slot = tl.load(program_slot + program)
    row = tl.load(program_row + program)
    parameter = tl.load(first_block + slot)
    i = parameter + row
    active = tl.load(g_table + slot) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    tl.store(record + ACTIVE * blocks + i, active.to(tl.float64))
    if active:
        length = tl.load(length_of + slot)
        if ALIGNED:
            length = tl.multiple_of(length, 16)
        start = row.to(tl.int64) * length
        end = start + length
        w_start = passes.address(w_table, slot, W, ALIGNED)
        g_start = passes.address(g_table, slot, G, ALIGNED)
        m_start = passes.address(m_table, slot, WIDE, ALIGNED)
        v_start = passes.address(v_table, slot, WIDE, ALIGNED)
        previous_start = passes.address(previous_table, slot, PREVIOUS, ALIGNED)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        CUT: tl.constexpr = MASKED and TAIL == 0
        at = start + tl.arange(0, HEAD)
        w = passes.fetch(w_start, at, end, WIDE, CUT)
        g = passes.fetch(g_start, at, end, WIDE, CUT) * scale
        m = passes.fetch(m_start, at, end, WIDE, CUT)
        v = passes.fetch(v_start, at, end, WIDE, CUT)
        previous = w
        if KEEPS:
            previous = passes.fetch(previous_start, at, end, WIDE, CUT)
        if TAIL > 0:
            at2 = start + HEAD + tl.arange(0, TAIL)
            w2 = passes.fetch(w_start, at2, end, WIDE, MASKED)
            g2 = passes.fetch(g_start, at2, end, WIDE, MASKED) * scale
            m2 = passes.fetch(m_start, at2, end, WIDE, MASKED)
            v2 = passes.fetch(v_start, at2, end, WIDE, MASKED)
            previous2 = w2
            if KEEPS:
                previous2 = passes.fetch(previous_start, at2, end, WIDE, MASKED)
        numbers = laws.load_numbers(settings, traits, memory, blocks, i, parameter)

        # pass 1
        ww, gw, gg, kappa, mw = sums_of(w, g, m, previous, KEEPS, HEAD)
        if TAIL > 0:
            ww2, gw2, gg2, kappa2, mw2 = sums_of(w2, g2, m2, previous2, KEEPS, TAIL)
            ww, gw, gg, kappa, mw = ww + ww2, gw + gw2, gg + gg2, kappa + kappa2, mw + mw2
        sums = (ww, gw, gg, kappa, mw)
        first = laws.moments_law(numbers, sums, active)
        store_sums(record, blocks, i, sums)
        laws.store_moments(record, memory, blocks, i, first)
        live, use, keeps = first[0], first[1], first[2]
        sign, p, q = first[3].to(WIDE), first[4].to(WIDE), first[5].to(WIDE)
        beta1, beta2 = first[6].to(WIDE), first[7].to(WIDE)
        beta1c, beta2c = (1 - first[6]).to(WIDE), (1 - first[7]).to(WIDE)
        debias1, debias2 = first[8].to(WIDE), first[9].to(WIDE)
        eps = first[10].to(WIDE)

        # pass 2
        m, v = passes.new_moments(w, g, m, v, use, sign, p, q, beta1, beta1c, beta2, beta2c)
        u = passes.quotient(m, v, debias1, debias2, eps)
        uw, uu = products_of(u, w, at, end, CUT, HEAD)
        if TAIL > 0:
            m2, v2 = passes.new_moments(
                w2, g2, m2, v2, use, sign, p, q, beta1, beta1c, beta2, beta2c
            )
            u2 = passes.quotient(m2, v2, debias1, debias2, eps)
            uw2, uu2 = products_of(u2, w2, at2, end, MASKED, TAIL)
            uw, uu = uw + uw2, uu + uu2
        products = (tl.where(live, uw, 0.0), tl.where(live, uu, 0.0))
        # once more, from the cache: to keep them would take the registers of another program
        numbers = laws.load_numbers(settings, traits, memory, blocks, i, parameter)
        second = laws.weights_law(numbers, sums, first, products)
        store_products(record, blocks, i, products)
        laws.store_weights(record, memory, blocks, i, second)

        # pass 3, and all that is written
        if live:
            a1, b = second[0].to(WIDE), second[1].to(WIDE)
            lost = second[4] & (second[1] == 0)  # u is not finite, and 0·∞ would be NaN
            key = key_of(first, number, slot)
            passes.store(m_start, at, m, end, CUT)
            passes.store(v_start, at, v, end, CUT)
            store_weight(w_start, at, w, u, a1, b, lost, end, key, STOCHASTIC, CUT)
            if TAIL > 0:
                passes.store(m_start, at2, m2, end, MASKED)
                passes.store(v_start, at2, v2, end, MASKED)
                store_weight(w_start, at2, w2, u2, a1, b, lost, end, key, STOCHASTIC, MASKED)
            if KEEPS:  # noqa: SIM102 (one is known when it is compiled)
                if keeps:
                    passes.store(previous_start, at, g, end, CUT)
                    if TAIL > 0:
                        passes.store(previous_start, at2, g2, end, MASKED)
    if OVERLAP:
        gdc_wait()


@triton.jit
def long_rows(
    w_table, g_table, m_table, v_table, previous_table, grad_scale, found_inf,
    program_slot, program_row, base, first_block, length_of,
    settings, traits, memory, record, blocks, number,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    KEEPS: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One step of a row that registers do not hold: three times over it, tile by tile."""
    if OVERLAP:
        gdc_launch_dependents()
    program = base + tl.program_id(0)
    slot = tl.load(program_slot + program)
    row = tl.load(program_row + program)
    parameter = tl.load(first_block + slot)
    i = parameter + row
    active = tl.load(g_table + slot) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    tl.store(record + ACTIVE * blocks + i, active.to(tl.float64))
    if active:
        length = tl.load(length_of + slot)
        if ALIGNED:
            length = tl.multiple_of(length, 16)
        start = row.to(tl.int64) * length
        end = start + length
        w_start = passes.address(w_table, slot, W, ALIGNED)
        g_start = passes.address(g_table, slot, G, ALIGNED)
        m_start = passes.address(m_table, slot, WIDE, ALIGNED)
        v_start = passes.address(v_table, slot, WIDE, ALIGNED)
        previous_start = passes.address(previous_table, slot, PREVIOUS, ALIGNED)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        numbers = laws.load_numbers(settings, traits, memory, blocks, i, parameter)

        # pass 1
        ww = tl.zeros([TILE], tl.float64)
        gw = tl.zeros([TILE], tl.float64)
        gg = tl.zeros([TILE], tl.float64)
        kappa = tl.zeros([TILE], tl.float64)
        mw = tl.zeros([TILE], tl.float64)
        for k in range(0, length, TILE):
            ww, gw, gg, kappa, mw = passes.reduce_tile(
                w_start, g_start, m_start, previous_start, start + k, end, 0, length, scale,
                ww, gw, gg, kappa, mw, WIDE, KEEPS, True, TILE,
            )  # fmt: skip
        sums = (tl.sum(ww), tl.sum(gw), tl.sum(gg), tl.sum(kappa), tl.sum(mw))
        first = laws.moments_law(numbers, sums, active)
        store_sums(record, blocks, i, sums)
        laws.store_moments(record, memory, blocks, i, first)
        live, use, keeps = first[0], first[1], first[2]
        sign, p, q = first[3].to(WIDE), first[4].to(WIDE), first[5].to(WIDE)
        beta1, beta2 = first[6].to(WIDE), first[7].to(WIDE)
        beta1c, beta2c = (1 - first[6]).to(WIDE), (1 - first[7]).to(WIDE)
        debias1, debias2 = first[8].to(WIDE), first[9].to(WIDE)
        eps = first[10].to(WIDE)

        # pass 2
        uw = tl.zeros([TILE // 4], tl.float64)
        uu = tl.zeros([TILE // 4], tl.float64)
        if live:
            for k in range(0, length, TILE):
                uw, uu = passes.moments_tile(
                    w_start, g_start, m_start, v_start, previous_start, start + k, end, 0, length,
                    scale, use, keeps, sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2,
                    eps, uw, uu, WIDE, KEEPS, True, TILE,
                )  # fmt: skip
        products = (tl.sum(uw), tl.sum(uu))
        # once more, from the cache: to keep them would take the registers of another program
        numbers = laws.load_numbers(settings, traits, memory, blocks, i, parameter)
        second = laws.weights_law(numbers, sums, first, products)
        store_products(record, blocks, i, products)
        laws.store_weights(record, memory, blocks, i, second)

        # pass 3
        if live:
            a1, b = second[0].to(WIDE), second[1].to(WIDE)
            lost = second[4] & (second[1] == 0)
            key = key_of(first, number, slot)
            for k in range(0, length, TILE):
                passes.apply_tile(
                    w_start, m_start, v_start, start + k + tl.arange(0, TILE), end, debias1,
                    debias2, eps, a1, b, lost, key, WIDE, STOCHASTIC, True,
                )  # fmt: skip
    if OVERLAP:
        gdc_wait()
