"""The scalar laws as Triton functions of one block.

Made of law.py by scripts/generate_laws.py (`make laws`): edit that file, not this one.
"""

# ruff: noqa
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(base, exponent):
    """base**exponent for a whole exponent >= 1, by squaring: a third of what exp and log take."""
    rest = exponent.to(tl.int32)
    square = base
    result = tl.where(rest % 2 == 1, base, 1.0)
    rest = rest // 2
    while rest > 0:
        square = square * square
        result = tl.where(rest % 2 == 1, result * square, result)
        rest = rest // 2
    return result


@triton.jit
def root(x):
    return tl.where(x > 0, tl.sqrt(x), x)


@triton.jit
def at_least(x, low):
    """NaN stays NaN."""
    return tl.where(x < low, low, x)


@triton.jit
def at_most(x, high):
    return tl.where(x > high, high, x)


@triton.jit
def isfinite(x):
    return tl.abs(x) <= 1.7976931348623157e+308


@triton.jit
def load_numbers(settings, traits, memory, blocks, i, parameter):
    return (
        tl.load(settings + 0 * blocks + parameter),
        tl.load(settings + 1 * blocks + parameter),
        tl.load(settings + 2 * blocks + parameter),
        tl.load(settings + 3 * blocks + parameter),
        tl.load(settings + 4 * blocks + parameter),
        tl.load(settings + 5 * blocks + parameter),
        tl.load(settings + 6 * blocks + parameter),
        tl.load(settings + 7 * blocks + parameter),
        tl.load(settings + 8 * blocks + parameter),
        tl.load(settings + 9 * blocks + parameter),
        tl.load(settings + 10 * blocks + parameter),
        tl.load(settings + 11 * blocks + parameter),
        tl.load(settings + 12 * blocks + parameter),
        tl.load(settings + 13 * blocks + parameter),
        tl.load(settings + 14 * blocks + parameter),
        tl.load(settings + 15 * blocks + parameter),
        tl.load(settings + 16 * blocks + parameter),
        tl.load(traits + 0 * blocks + parameter),
        tl.load(traits + 1 * blocks + parameter),
        tl.load(traits + 2 * blocks + parameter),
        tl.load(traits + 3 * blocks + parameter),
        tl.load(traits + 4 * blocks + parameter),
        tl.load(traits + 5 * blocks + parameter),
        tl.load(memory + 0 * blocks + i),
        tl.load(memory + 1 * blocks + i),
        tl.load(memory + 2 * blocks + i),
        tl.load(memory + 3 * blocks + i),
        tl.load(memory + 4 * blocks + i),
        tl.load(memory + 5 * blocks + i),
    )


@triton.jit
def moments_law(numbers, sums, active):
    o_lr = numbers[0]
    o_beta1 = numbers[1]
    o_beta2 = numbers[2]
    o_eps = numbers[3]
    o_radial_lr_ratio = numbers[6]
    o_radial_lr = numbers[7]
    o_radial_beta = numbers[8]
    o_curvature_auto = numbers[9]
    o_curvature_target = numbers[10]
    o_curvature_beta = numbers[11]
    o_delta = numbers[13]
    o_guard = numbers[15]
    o_sign = numbers[16]
    traits_low_dim = numbers[17]
    traits_scale_invariant = numbers[18]
    traits_inverse_root = numbers[19]
    traits_rounding = numbers[20]
    traits_smallest_eps = numbers[21]
    traits_largest_square = numbers[22]
    memory_step = numbers[23]
    memory_radial_momentum = numbers[24]
    memory_tau = numbers[25]
    memory_tau_reference = numbers[26]
    memory_curvature_step = numbers[27]
    memory_initial_norm = numbers[28]
    sums_ww = sums[0]
    sums_gw = sums[1]
    sums_gg = sums[2]
    sums_kappa = sums[3]
    sums_mw = sums[4]
    guard = o_guard > 0.0
    fits = (sums_gg <= traits_largest_square) & isfinite(sums_ww)
    live = active & (fits | (guard == 0))
    gw = tl.where(live, (o_sign * sums_gw), 0.0)
    gg = tl.where(live, sums_gg, 0.0)
    initial_norm = tl.where((live & (memory_initial_norm < 0.0)), root(sums_ww), memory_initial_norm)
    low_dim = ((traits_low_dim > 0.0) | (initial_norm == 0.0)) | (sums_ww == 0.0)
    moves = live & (low_dim == 0)
    ww = tl.where(moves, sums_ww, 1.0)
    norm = root(ww)
    inverse = 1.0 / ww
    step = memory_step + tl.where(live, 1.0, 0.0)
    t = at_least(step, tl.full([], 1.0, tl.float64))
    literal = o_curvature_target > 0.0
    adapts = moves & (literal | (o_curvature_auto > 0.0))
    kappa = at_most(sums_kappa, tl.full([], 1.7976931348623157e+308, tl.float64))
    curvature_count = memory_curvature_step + tl.where((adapts & (gg > 0.0)), 1.0, 0.0)
    curvature_counts = (adapts & (gg > 0.0)) & (curvature_count > 1.0)
    curvature_slower = (0.999 * memory_tau_reference) + ((1.0 - 0.999) * kappa)
    curvature_reference = tl.where(curvature_counts, curvature_slower, memory_tau_reference)
    curvature_debias = 1.0 - power(tl.full([], 0.999, tl.float64), at_least((curvature_count - 1.0), tl.full([], 1.0, tl.float64)))
    curvature_start = tl.where(literal, o_curvature_target, kappa)
    curvature_previous = tl.where((memory_tau < 0.0), curvature_start, memory_tau)
    curvature_smoothed = (o_curvature_beta * curvature_previous) + ((1.0 - o_curvature_beta) * kappa)
    curvature_tau = tl.where(((literal & adapts) | ((literal == 0) & curvature_counts)), curvature_smoothed, memory_tau)
    curvature_target = tl.where(literal, o_curvature_target, curvature_reference)
    curvature_known = (adapts & (literal | (curvature_count > 1.0))) & (curvature_target > 0.0)
    curvature_ratio = tl.where(curvature_known, tl.where(literal, curvature_tau, (curvature_tau * curvature_debias)), 1.0) / tl.where(curvature_known, curvature_target, 1.0)
    scale = tl.where(curvature_known, (1.0 / root((curvature_ratio + o_eps))), 1.0)
    tau = curvature_tau
    tau_reference = curvature_reference
    curvature_step = curvature_count
    guarded_scale = (guard & adapts) & ((scale < 0.1) | (scale > 10.0))
    scale = tl.where(guard, at_most(at_least(scale, tl.full([], 0.1, tl.float64)), tl.full([], 10.0, tl.float64)), scale)
    eta_radial = scale * ((o_radial_lr_ratio * o_lr) + o_radial_lr)
    by_test = (tl.abs(gw) < (((o_delta * traits_inverse_root) * root(gg)) * norm)) & (gg > 0.0)
    c = (o_radial_beta * memory_radial_momentum) + ((((1.0 - o_radial_beta) * gw) * norm) * inverse)
    across = at_least((gg - ((gw * gw) * inverse)), tl.full([], 0.0, tl.float64))
    noise = (guard & moves) & (across <= (traits_rounding * gg))
    return (
        live,
        live & (noise == 0),
        live & ((gg > 0.0) | literal),
        o_sign,
        tl.where((moves & (noise == 0)), (gw * inverse), 0.0),
        tl.where(moves, (sums_mw * inverse), 0.0),
        tl.where(live, o_beta1, 1.0),
        tl.where(live, o_beta2, 1.0),
        1.0 / (1.0 - power(o_beta1, t)),
        1.0 / (1.0 - power(o_beta2, t)),
        at_least(o_eps, traits_smallest_eps),
        low_dim,
        ((traits_scale_invariant > 0.0) | by_test) & (low_dim == 0),
        eta_radial,
        guarded_scale,
        step,
        tl.where(moves, c, memory_radial_momentum),
        tau,
        tau_reference,
        curvature_step,
        initial_norm,
    )


@triton.jit
def store_moments(record, memory, blocks, i, result):
    tl.store(record + 7 * blocks + i, result[0].to(tl.float64))
    tl.store(record + 8 * blocks + i, result[1].to(tl.float64))
    tl.store(record + 9 * blocks + i, result[2].to(tl.float64))
    tl.store(record + 10 * blocks + i, result[3].to(tl.float64))
    tl.store(record + 11 * blocks + i, result[4].to(tl.float64))
    tl.store(record + 12 * blocks + i, result[5].to(tl.float64))
    tl.store(record + 13 * blocks + i, result[6].to(tl.float64))
    tl.store(record + 14 * blocks + i, result[7].to(tl.float64))
    tl.store(record + 15 * blocks + i, result[8].to(tl.float64))
    tl.store(record + 16 * blocks + i, result[9].to(tl.float64))
    tl.store(record + 17 * blocks + i, result[10].to(tl.float64))
    tl.store(record + 18 * blocks + i, result[11].to(tl.float64))
    tl.store(record + 19 * blocks + i, result[12].to(tl.float64))
    tl.store(record + 20 * blocks + i, result[13].to(tl.float64))
    tl.store(record + 21 * blocks + i, result[14].to(tl.float64))
    tl.store(memory + 0 * blocks + i, result[15].to(tl.float64))
    tl.store(memory + 1 * blocks + i, result[16].to(tl.float64))
    tl.store(memory + 2 * blocks + i, result[17].to(tl.float64))
    tl.store(memory + 3 * blocks + i, result[18].to(tl.float64))
    tl.store(memory + 4 * blocks + i, result[19].to(tl.float64))
    tl.store(memory + 5 * blocks + i, result[20].to(tl.float64))


@triton.jit
def load_moments(record, memory, blocks, i):
    return (
        tl.load(record + 7 * blocks + i) > 0,
        tl.load(record + 8 * blocks + i) > 0,
        tl.load(record + 9 * blocks + i) > 0,
        tl.load(record + 10 * blocks + i),
        tl.load(record + 11 * blocks + i),
        tl.load(record + 12 * blocks + i),
        tl.load(record + 13 * blocks + i),
        tl.load(record + 14 * blocks + i),
        tl.load(record + 15 * blocks + i),
        tl.load(record + 16 * blocks + i),
        tl.load(record + 17 * blocks + i),
        tl.load(record + 18 * blocks + i) > 0,
        tl.load(record + 19 * blocks + i) > 0,
        tl.load(record + 20 * blocks + i),
        tl.load(record + 21 * blocks + i) > 0,
        tl.load(memory + 0 * blocks + i),
        tl.load(memory + 1 * blocks + i),
        tl.load(memory + 2 * blocks + i),
        tl.load(memory + 3 * blocks + i),
        tl.load(memory + 4 * blocks + i),
        tl.load(memory + 5 * blocks + i),
    )


@triton.jit
def weights_law(numbers, sums, first, products):
    o_lr = numbers[0]
    o_weight_decay = numbers[4]
    o_isotropic_decay = numbers[5]
    o_radial_beta = numbers[8]
    o_low_dim_scale = numbers[12]
    o_wd_ratio = numbers[14]
    o_guard = numbers[15]
    traits_inverse_root = numbers[19]
    memory_step = numbers[23]
    memory_radial_momentum = numbers[24]
    memory_tau = numbers[25]
    memory_tau_reference = numbers[26]
    memory_curvature_step = numbers[27]
    memory_initial_norm = numbers[28]
    sums_ww = sums[0]
    first_live = first[0]
    first_low_dim = first[11]
    first_scale_invariant = first[12]
    first_eta_radial = first[13]
    memory_step = first[15]
    memory_radial_momentum = first[16]
    memory_tau = first[17]
    memory_tau_reference = first[18]
    memory_curvature_step = first[19]
    memory_initial_norm = first[20]
    products_uw = products[0]
    products_uu = products[1]
    guard = o_guard > 0.0
    moves = first_live & (first_low_dim == 0)
    ww = tl.where(moves, sums_ww, 1.0)
    norm = root(ww)
    inverse = 1.0 / ww
    t = at_least(memory_step, tl.full([], 1.0, tl.float64))
    rms = root(products_uu) * traits_inverse_root
    guarded_update = (guard & first_live) & ((rms <= 100.0) == 0)
    overflow = guarded_update & (isfinite(products_uu) == 0)
    shrink = 100.0 / tl.where(guarded_update, rms, 100.0)
    shrink = tl.where(overflow, 0.0, shrink)
    uw = tl.where(overflow, 0.0, (shrink * products_uw))
    uu = tl.where(overflow, 0.0, ((shrink * shrink) * products_uu))
    along = uw * inverse
    u_across = at_least((uu - (uw * along)), tl.full([], 0.0, tl.float64))
    decay = (o_weight_decay * first_eta_radial) + (o_isotropic_decay * o_lr)
    decay = tl.where(first_scale_invariant, (o_wd_ratio * decay), decay)
    guarded_decay = (guard & moves) & (norm < (0.1 * memory_initial_norm))
    decay = tl.where(guarded_decay, 0.0, decay)
    momentum = memory_radial_momentum / (1.0 - power(o_radial_beta, t))
    pull = tl.where(first_scale_invariant, 0.0, (((first_eta_radial * momentum) * norm) * inverse))
    factor = (1.0 - decay) - pull
    guarded_factor = (guard & moves) & ((factor < 0.5) | (factor > 2.0))
    factor = tl.where(guard, at_most(at_least(factor, tl.full([], 0.5, tl.float64)), tl.full([], 2.0, tl.float64)), factor)
    a1 = tl.where(moves, ((factor - 1.0) + (o_lr * along)), 0.0)
    b = tl.where(moves, o_lr, tl.where(first_live, (o_low_dim_scale * o_lr), 0.0))
    ahead = (1.0 + a1) - (b * along)
    turned = ahead / root(at_least(((ahead * ahead) + (((b * b) * u_across) * inverse)), tl.full([], 2.2250738585072014e-308, tl.float64)))
    return (
        a1,
        shrink * b,
        guarded_factor,
        guarded_decay,
        guarded_update,
        memory_step,
        tl.where(moves, (memory_radial_momentum * turned), memory_radial_momentum),
        memory_tau,
        memory_tau_reference,
        memory_curvature_step,
        memory_initial_norm,
    )


@triton.jit
def store_weights(record, memory, blocks, i, result):
    tl.store(record + 22 * blocks + i, result[0].to(tl.float64))
    tl.store(record + 23 * blocks + i, result[1].to(tl.float64))
    tl.store(record + 24 * blocks + i, result[2].to(tl.float64))
    tl.store(record + 25 * blocks + i, result[3].to(tl.float64))
    tl.store(record + 26 * blocks + i, result[4].to(tl.float64))
    tl.store(memory + 0 * blocks + i, result[5].to(tl.float64))
    tl.store(memory + 1 * blocks + i, result[6].to(tl.float64))
    tl.store(memory + 2 * blocks + i, result[7].to(tl.float64))
    tl.store(memory + 3 * blocks + i, result[8].to(tl.float64))
    tl.store(memory + 4 * blocks + i, result[9].to(tl.float64))
    tl.store(memory + 5 * blocks + i, result[10].to(tl.float64))


@triton.jit
def load_turn_numbers(settings, traits, memory, blocks, i, parameter):
    return (
        tl.load(settings + 0 * blocks + parameter),
        tl.load(settings + 1 * blocks + parameter),
        tl.load(settings + 2 * blocks + parameter),
        tl.load(settings + 3 * blocks + parameter),
        tl.load(settings + 4 * blocks + parameter),
        tl.load(settings + 5 * blocks + parameter),
        tl.load(settings + 6 * blocks + parameter),
        tl.load(traits + 0 * blocks + parameter),
        tl.load(traits + 1 * blocks + parameter),
        tl.load(memory + 0 * blocks + parameter),
        tl.load(memory + 1 * blocks + i),
        tl.load(memory + 2 * blocks + parameter),
    )


@triton.jit
def square_law(numbers, sums, active):
    o_beta1 = numbers[1]
    o_beta2 = numbers[2]
    o_eps = numbers[3]
    traits_block_inverse_root = numbers[8]
    memory_step = numbers[9]
    memory_mean_square = numbers[10]
    memory_initial_norm = numbers[11]
    sums_gg = sums[1]
    sums_mw = sums[2]
    sums_mm = sums[3]
    step = memory_step + tl.where(active, 1.0, 0.0)
    t = at_least(step, tl.full([], 1.0, tl.float64))
    square = (sums_gg * traits_block_inverse_root) * traits_block_inverse_root
    averaged = (o_beta2 * memory_mean_square) + ((1.0 - o_beta2) * square)
    mean_square = tl.where(active, averaged, memory_mean_square)
    bottom = (1.0 - power(o_beta1, t)) * (root((mean_square / (1.0 - power(o_beta2, t)))) + o_eps)
    scale = tl.where((bottom > 0.0), (1.0 / tl.where((bottom > 0.0), bottom, 1.0)), 0.0)
    return (
        scale,
        scale * sums_mw,
        (scale * scale) * sums_mm,
        step,
        mean_square,
        memory_initial_norm,
    )


@triton.jit
def store_square(record, memory, blocks, i, result):
    tl.store(record + 4 * blocks + i, result[0].to(tl.float64))
    tl.store(record + 5 * blocks + i, result[1].to(tl.float64))
    tl.store(record + 6 * blocks + i, result[2].to(tl.float64))
    tl.store(memory + 0 * blocks + i, result[3].to(tl.float64))
    tl.store(memory + 1 * blocks + i, result[4].to(tl.float64))
    tl.store(memory + 2 * blocks + i, result[5].to(tl.float64))


@triton.jit
def load_square(record, memory, blocks, i):
    return (
        tl.load(record + 4 * blocks + i),
        tl.load(record + 5 * blocks + i),
        tl.load(record + 6 * blocks + i),
        tl.load(memory + 0 * blocks + i),
        tl.load(memory + 1 * blocks + i),
        tl.load(memory + 2 * blocks + i),
    )


@triton.jit
def turn_law(numbers, first, whole, active):
    o_lr = numbers[0]
    o_angular_rms = numbers[4]
    o_max_angle = numbers[5]
    traits_inverse_root = numbers[7]
    memory_step = numbers[9]
    memory_mean_square = numbers[10]
    memory_initial_norm = numbers[11]
    first_scale = first[0]
    memory_step = first[3]
    memory_mean_square = first[4]
    memory_initial_norm = first[5]
    whole_all_ww = whole[0]
    whole_all_uw = whole[1]
    whole_all_uu = whole[2]
    norm = root(whole_all_ww)
    initial_norm = tl.where((active & (memory_initial_norm < 0.0)), norm, memory_initial_norm)
    points = whole_all_ww > 0.0
    ww = tl.where(points, whole_all_ww, 1.0)
    along = whole_all_uw / ww
    across = at_least((whole_all_uu - (whole_all_uw * along)), tl.full([], 0.0, tl.float64))
    rms = tl.where((o_angular_rms > 0.0), o_angular_rms, (initial_norm * traits_inverse_root))
    asked = o_lr / tl.where(points, rms, 1.0)
    at_max_angle = (active & points) & (asked > o_max_angle)
    turn = at_most(asked, o_max_angle) * traits_inverse_root
    angle = turn * root(across)
    sinc = tl.where((angle > 0.0), (tl.sin(angle) / tl.where((angle > 0.0), angle, 1.0)), 1.0)
    turns = (active & points) & ((angle == 0.0) == 0)
    push = (initial_norm * turn) * sinc
    forward = (initial_norm / tl.where(points, norm, 1.0)) * tl.cos(angle)
    return (
        tl.where(turns, ((forward - 1.0) + (push * along)), 0.0),
        tl.where(turns, (push * first_scale), 0.0),
        tl.where(turns, angle, 0.0),
        at_max_angle,
        memory_step,
        memory_mean_square,
        initial_norm,
    )


@triton.jit
def store_turn(record, memory, blocks, i, result):
    tl.store(record + 10 * blocks + i, result[0].to(tl.float64))
    tl.store(record + 11 * blocks + i, result[1].to(tl.float64))
    tl.store(record + 12 * blocks + i, result[2].to(tl.float64))
    tl.store(record + 13 * blocks + i, result[3].to(tl.float64))
    tl.store(memory + 0 * blocks + i, result[4].to(tl.float64))
    tl.store(memory + 1 * blocks + i, result[5].to(tl.float64))
    tl.store(memory + 2 * blocks + i, result[6].to(tl.float64))
