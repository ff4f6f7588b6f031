"""A whole step of AdamO in one pass, for blocks that fit into a program: rows, and small tensors.

A program holds its rows in registers: it reads w, g, m, v and g⁻ once, sums, applies the laws and
writes w, m, v and g⁻ once. A row is HEAD + TAIL entries, two powers of two, because a tile must be
one: 768 = 512 + 256 and 4,608 = 4,096 + 512 then leave no thread idle. Longer rows go through the
tiles of ``triton_kernels``, three times; after the first time they come from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import triton_kernels as passes
from . import triton_laws as laws
from .law import RECORD, Memory

WW, GW, GG, KAPPA, MW, UW, UU, ACTIVE = (
    tl.constexpr(RECORD.index(name))
    for name in ("ww", "gw", "gg", "kappa", "mw", "uw", "uu", "active")
)
STEP = tl.constexpr(Memory._fields.index("step"))


@triton.jit
def fetch(pointer, offsets, inside, WIDE: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=inside, other=0.0).to(WIDE)
    return tl.load(pointer + offsets).to(WIDE)


@triton.jit
def sums_of_rows(w, g, m, previous, KEEPS: tl.constexpr):
    """Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ and ⟨m,w⟩ of every row."""
    w, g, m = w.to(tl.float64), g.to(tl.float64), m.to(tl.float64)
    ww, gw, gg, mw = tl.sum(w * w, 1), tl.sum(g * w, 1), tl.sum(g * g, 1), tl.sum(m * w, 1)
    kappa = tl.zeros_like(ww)  # without a g⁻
    if KEEPS:
        change = g - previous.to(tl.float64)
        kappa = tl.sum(change * change, 1)
    return ww, gw, gg, kappa, mw


@triton.jit
def products_of_rows(u, w, inside, MASKED: tl.constexpr):
    """Pass 2: ⟨u,w⟩ and ‖u‖² of every row."""
    if MASKED:
        u = tl.where(inside, u, 0.0)
    u, w = u.to(tl.float64), w.to(tl.float64)
    return tl.sum(u * w, 1), tl.sum(u * u, 1)


@triton.jit
def store_moments(m_start, v_start, previous_start, offsets, m, v, g, here, keep, KEEPS):
    tl.store(m_start + offsets, m, mask=here)
    tl.store(v_start + offsets, v, mask=here)
    if KEEPS:
        kept = passes.narrow(g, previous_start.dtype.element_ty)
        tl.store(previous_start + offsets, kept, mask=here & keep)


@triton.jit
def store_weight(w_start, offsets, w, u, a1, b, lost, here, key, STOCHASTIC: tl.constexpr):
    w = passes.new_weight(w, u, a1, b, lost)
    if STOCHASTIC:
        value = passes.narrow_at_random(w, offsets, key)
    else:
        value = passes.narrow(w, w_start.dtype.element_ty)
    tl.store(w_start + offsets, value, mask=here)


@triton.jit
def column(x, WIDE: tl.constexpr):
    """A number for each row, to multiply a tile of rows."""
    return x.to(WIDE)[:, None]


@triton.jit
def keep_sums(record, blocks, i, ww, gw, gg, kappa, mw):
    tl.store(record + WW * blocks + i, ww)
    tl.store(record + GW * blocks + i, gw)
    tl.store(record + GG * blocks + i, gg)
    tl.store(record + KAPPA * blocks + i, kappa)
    tl.store(record + MW * blocks + i, mw)


@triton.jit
def rows(
    w_table, g_table, m_table, v_table, previous_table, grad_scale, found_inf,
    program_slot, program_row, base, first_block, length_of,
    settings, traits, memory, record, blocks, number,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    KEEPS: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One step of ROWS adjoining rows of a tensor. MASKED: HEAD + TAIL is more than their length."""
    program = base + tl.program_id(0)
    slot = tl.load(program_slot + program)
    row = tl.load(program_row + program)
    parameter = tl.load(first_block + slot) + tl.zeros([ROWS], tl.int64)
    i = parameter + row + tl.arange(0, ROWS)
    active = tl.load(g_table + slot) != 0
    if CHECKED:
        active = active & (tl.load(found_inf) == 0.0)
    tl.store(record + ACTIVE * blocks + i, tl.zeros([ROWS], tl.float64) + active.to(tl.float64))
    if active:
        length = tl.load(length_of + slot)
        if ALIGNED:
            length = tl.multiple_of(length, 16)
        w_start = passes.address(w_table, slot, W, ALIGNED)
        g_start = passes.address(g_table, slot, G, ALIGNED)
        m_start = passes.address(m_table, slot, WIDE, ALIGNED)
        v_start = passes.address(v_table, slot, WIDE, ALIGNED)
        previous_start = passes.address(previous_table, slot, PREVIOUS, ALIGNED)
        scale = 1.0
        if SCALED:
            scale = 1.0 / tl.load(grad_scale)
        lines = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * length
        offsets = lines + tl.arange(0, HEAD)[None, :]
        inside = (tl.arange(0, HEAD)[None, :] < length) & (lines >= 0)
        HEAD_MASKED: tl.constexpr = MASKED and TAIL == 0
        w = fetch(w_start, offsets, inside, WIDE, HEAD_MASKED)
        g = fetch(g_start, offsets, inside, WIDE, HEAD_MASKED) * scale
        m = fetch(m_start, offsets, inside, WIDE, HEAD_MASKED)
        v = fetch(v_start, offsets, inside, WIDE, HEAD_MASKED)
        previous = w
        if KEEPS:
            previous = fetch(previous_start, offsets, inside, WIDE, HEAD_MASKED)
        if TAIL > 0:
            offsets2 = lines + (HEAD + tl.arange(0, TAIL))[None, :]
            inside2 = ((HEAD + tl.arange(0, TAIL))[None, :] < length) & (lines >= 0)
            w2 = fetch(w_start, offsets2, inside2, WIDE, MASKED)
            g2 = fetch(g_start, offsets2, inside2, WIDE, MASKED) * scale
            m2 = fetch(m_start, offsets2, inside2, WIDE, MASKED)
            v2 = fetch(v_start, offsets2, inside2, WIDE, MASKED)
            previous2 = w2
            if KEEPS:
                previous2 = fetch(previous_start, offsets2, inside2, WIDE, MASKED)

        ww, gw, gg, kappa, mw = sums_of_rows(w, g, m, previous, KEEPS)
        if TAIL > 0:
            ww2, gw2, gg2, kappa2, mw2 = sums_of_rows(w2, g2, m2, previous2, KEEPS)
            ww, gw, gg, kappa, mw = ww + ww2, gw + gw2, gg + gg2, kappa + kappa2, mw + mw2
        keep_sums(record, blocks, i, ww, gw, gg, kappa, mw)
        (
            live, use, keep, sign, p, q, beta1, beta2, debias1, debias2, eps, _, _, _, _,
        ) = laws.moments_law(
            settings, traits, memory, record, blocks, i, parameter,
            ww, gw, gg, kappa, mw, i >= 0,
        )  # fmt: skip
        alive, use, keep = live[:, None], use[:, None], keep[:, None]
        beta1c, beta2c = column(1 - beta1, WIDE), column(1 - beta2, WIDE)
        beta1, beta2, sign = column(beta1, WIDE), column(beta2, WIDE), column(sign, WIDE)
        p, q, eps = column(p, WIDE), column(q, WIDE), column(eps, WIDE)
        debias1, debias2 = column(debias1, WIDE), column(debias2, WIDE)

        here = alive & inside
        m, v = passes.new_moments(w, g, m, v, use, sign, p, q, beta1, beta1c, beta2, beta2c)
        u = passes.quotient(m, v, debias1, debias2, eps)
        store_moments(m_start, v_start, previous_start, offsets, m, v, g, here, keep, KEEPS)
        uw, uu = products_of_rows(u, w, inside, HEAD_MASKED)
        if TAIL > 0:
            here2 = alive & inside2
            m2, v2 = passes.new_moments(
                w2, g2, m2, v2, use, sign, p, q, beta1, beta1c, beta2, beta2c
            )
            u2 = passes.quotient(m2, v2, debias1, debias2, eps)
            store_moments(
                m_start, v_start, previous_start, offsets2, m2, v2, g2, here2, keep, KEEPS
            )
            more_uw, more_uu = products_of_rows(u2, w2, inside2, MASKED)
            uw, uu = uw + more_uw, uu + more_uu
        uw, uu = tl.where(live, uw, 0.0), tl.where(live, uu, 0.0)
        tl.store(record + UW * blocks + i, uw)
        tl.store(record + UU * blocks + i, uu)
        a1, b, _, _, guarded = laws.weights_law(
            settings, traits, memory, record, blocks, i, parameter, uw, uu
        )
        lost = (guarded & (b == 0))[:, None]  # u is not finite, and 0·∞ would be NaN
        a1, b = column(a1, WIDE), column(b, WIDE)
        key = tl.zeros([ROWS], tl.uint32)[:, None]
        if STOCHASTIC:
            tl.debug_barrier()  # the step is what the law has just stored
            step = tl.load(memory + STEP * blocks + i).to(tl.int64).to(tl.uint32)
            key += step[:, None] * 0x9E3779B9
            key += tl.load(number + slot).to(tl.uint32) * 0x85EBCA6B
        store_weight(w_start, offsets, w, u, a1, b, lost, here, key, STOCHASTIC)
        if TAIL > 0:
            store_weight(w_start, offsets2, w2, u2, a1, b, lost, here2, key, STOCHASTIC)


@triton.jit
def long_rows(
    w_table, g_table, m_table, v_table, previous_table, grad_scale, found_inf,
    program_slot, program_row, base, first_block, length_of,
    settings, traits, memory, record, blocks, number,
    W: tl.constexpr, G: tl.constexpr, PREVIOUS: tl.constexpr, WIDE: tl.constexpr,
    KEEPS: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One step of a row that registers do not hold: three times over it, tile by tile."""
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
        ww, gw, gg, kappa, mw = tl.sum(ww), tl.sum(gw), tl.sum(gg), tl.sum(kappa), tl.sum(mw)
        keep_sums(record, blocks, i, ww, gw, gg, kappa, mw)
        (
            live, use, keep, sign, p, q, beta1, beta2, debias1, debias2, eps, _, _, _, _,
        ) = laws.moments_law(
            settings, traits, memory, record, blocks, i, parameter,
            ww, gw, gg, kappa, mw, active,
        )  # fmt: skip
        beta1c, beta2c = (1 - beta1).to(WIDE), (1 - beta2).to(WIDE)
        beta1, beta2, sign = beta1.to(WIDE), beta2.to(WIDE), sign.to(WIDE)
        p, q, eps = p.to(WIDE), q.to(WIDE), eps.to(WIDE)
        debias1, debias2 = debias1.to(WIDE), debias2.to(WIDE)
        uw = tl.zeros([TILE // 4], tl.float64)
        uu = tl.zeros([TILE // 4], tl.float64)
        if live:
            for k in range(0, length, TILE):
                uw, uu = passes.moments_tile(
                    w_start, g_start, m_start, v_start, previous_start, start + k, end, 0, length,
                    scale, use, keep, sign, p, q, beta1, beta1c, beta2, beta2c, debias1, debias2,
                    eps, uw, uu, WIDE, KEEPS, True, TILE,
                )  # fmt: skip
        sum_uw, sum_uu = tl.sum(uw), tl.sum(uu)
        tl.store(record + UW * blocks + i, sum_uw)
        tl.store(record + UU * blocks + i, sum_uu)
        a1, b, _, _, guarded = laws.weights_law(
            settings, traits, memory, record, blocks, i, parameter, sum_uw, sum_uu
        )
        lost = guarded & (b == 0)
        a1, b = a1.to(WIDE), b.to(WIDE)
        key = tl.zeros([], tl.uint32)
        if STOCHASTIC:
            tl.debug_barrier()
            key += tl.load(memory + STEP * blocks + i).to(tl.int64).to(tl.uint32) * 0x9E3779B9
            key += tl.load(number + slot).to(tl.uint32) * 0x85EBCA6B
        if live:
            for k in range(0, length, TILE):
                offsets = start + k + tl.arange(0, TILE)
                passes.apply_tile(
                    w_start, m_start, v_start, offsets, end, debias1, debias2, eps, a1, b, lost,
                    key, WIDE, STOCHASTIC, True,
                )  # fmt: skip
