"""The scalar laws as Triton functions of one block.

Made of law.py by scripts/generate_laws.py (`make laws`): edit that file, not this one.
"""

# ruff: noqa
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power(base, exponent):
    """base**exponent for base in [0, 1) and exponent >= 1."""
    safe = tl.where(base > 0, base, 1.0)
    return tl.where(base > 0, tl.exp(exponent * tl.log(safe)), 0.0)


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
def moments_law(
    settings, traits, memory, record, blocks, i, parameter,
    sums_ww, sums_gw, sums_gg, sums_kappa, sums_mw, active,
):
    tl.debug_barrier()
    o_guard = tl.load(settings + 15 * blocks + parameter)
    traits_largest_square = tl.load(traits + 5 * blocks + parameter)
    o_sign = tl.load(settings + 16 * blocks + parameter)
    memory_initial_norm = tl.load(memory + 5 * blocks + i)
    traits_low_dim = tl.load(traits + 0 * blocks + parameter)
    memory_step = tl.load(memory + 0 * blocks + i)
    o_curvature_target = tl.load(settings + 10 * blocks + parameter)
    o_curvature_auto = tl.load(settings + 9 * blocks + parameter)
    memory_curvature_step = tl.load(memory + 4 * blocks + i)
    memory_tau_reference = tl.load(memory + 3 * blocks + i)
    memory_tau = tl.load(memory + 2 * blocks + i)
    o_curvature_beta = tl.load(settings + 11 * blocks + parameter)
    o_eps = tl.load(settings + 3 * blocks + parameter)
    o_radial_lr_ratio = tl.load(settings + 6 * blocks + parameter)
    o_lr = tl.load(settings + 0 * blocks + parameter)
    o_radial_lr = tl.load(settings + 7 * blocks + parameter)
    o_delta = tl.load(settings + 13 * blocks + parameter)
    traits_inverse_root = tl.load(traits + 2 * blocks + parameter)
    o_radial_beta = tl.load(settings + 8 * blocks + parameter)
    memory_radial_momentum = tl.load(memory + 1 * blocks + i)
    traits_rounding = tl.load(traits + 3 * blocks + parameter)
    o_beta1 = tl.load(settings + 1 * blocks + parameter)
    o_beta2 = tl.load(settings + 2 * blocks + parameter)
    traits_smallest_eps = tl.load(traits + 4 * blocks + parameter)
    traits_scale_invariant = tl.load(traits + 1 * blocks + parameter)
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
    curvature_target = tl.where(literal, o_curvature_target, (curvature_reference / curvature_debias))
    curvature_known = (adapts & (literal | (curvature_count > 1.0))) & (curvature_target > 0.0)
    curvature_ratio = tl.where(curvature_known, curvature_tau, 1.0) / tl.where(curvature_known, curvature_target, 1.0)
    scale = tl.where(curvature_known, (1.0 / root((curvature_ratio + o_eps))), 1.0)
    tau = curvature_tau
    tau_reference = curvature_reference
    curvature_step = curvature_count
    guarded_scale = (guard & adapts) & ((scale < 0.1) | (scale > 10.0))
    scale = tl.where(guard, at_most(at_least(scale, tl.full([], 0.1, tl.float64)), tl.full([], 10.0, tl.float64)), scale)
    eta_radial = scale * ((o_radial_lr_ratio * o_lr) + o_radial_lr)
    by_test = (tl.abs(gw) < (((o_delta * traits_inverse_root) * root(gg)) * norm)) & (gg > 0.0)
    c = (o_radial_beta * memory_radial_momentum) + (((1.0 - o_radial_beta) * gw) / norm)
    across = at_least((gg - ((gw * gw) / ww)), tl.full([], 0.0, tl.float64))
    noise = (guard & moves) & (across <= (traits_rounding * gg))
    live_ = live
    use_gradient_ = live & (noise == 0)
    keep_gradient_ = live & ((gg > 0.0) | literal)
    sign_ = o_sign
    p_ = tl.where((moves & (noise == 0)), (gw / ww), 0.0)
    q_ = tl.where(moves, (sums_mw / ww), 0.0)
    beta1_ = tl.where(live, o_beta1, 1.0)
    beta2_ = tl.where(live, o_beta2, 1.0)
    debias1_ = 1.0 / (1.0 - power(o_beta1, t))
    debias2_ = 1.0 / (1.0 - power(o_beta2, t))
    eps_ = at_least(o_eps, traits_smallest_eps)
    low_dim_ = low_dim
    scale_invariant_ = ((traits_scale_invariant > 0.0) | by_test) & (low_dim == 0)
    eta_radial_ = eta_radial
    guarded_scale_ = guarded_scale
    tl.debug_barrier()
    tl.store(record + 7 * blocks + i, (live_).to(tl.float64))
    tl.store(record + 8 * blocks + i, (use_gradient_).to(tl.float64))
    tl.store(record + 9 * blocks + i, (keep_gradient_).to(tl.float64))
    tl.store(record + 10 * blocks + i, (sign_).to(tl.float64))
    tl.store(record + 11 * blocks + i, (p_).to(tl.float64))
    tl.store(record + 12 * blocks + i, (q_).to(tl.float64))
    tl.store(record + 13 * blocks + i, (beta1_).to(tl.float64))
    tl.store(record + 14 * blocks + i, (beta2_).to(tl.float64))
    tl.store(record + 15 * blocks + i, (debias1_).to(tl.float64))
    tl.store(record + 16 * blocks + i, (debias2_).to(tl.float64))
    tl.store(record + 17 * blocks + i, (eps_).to(tl.float64))
    tl.store(record + 18 * blocks + i, (low_dim_).to(tl.float64))
    tl.store(record + 19 * blocks + i, (scale_invariant_).to(tl.float64))
    tl.store(record + 20 * blocks + i, (eta_radial_).to(tl.float64))
    tl.store(record + 21 * blocks + i, (guarded_scale_).to(tl.float64))
    tl.store(memory + 0 * blocks + i, (step).to(tl.float64))
    tl.store(memory + 1 * blocks + i, (tl.where(moves, c, memory_radial_momentum)).to(tl.float64))
    tl.store(memory + 2 * blocks + i, (tau).to(tl.float64))
    tl.store(memory + 3 * blocks + i, (tau_reference).to(tl.float64))
    tl.store(memory + 4 * blocks + i, (curvature_step).to(tl.float64))
    tl.store(memory + 5 * blocks + i, (initial_norm).to(tl.float64))
    return live_, use_gradient_, keep_gradient_, sign_, p_, q_, beta1_, beta2_, debias1_, debias2_, eps_, low_dim_, scale_invariant_, eta_radial_, guarded_scale_


@triton.jit
def weights_law(
    settings, traits, memory, record, blocks, i, parameter,
    products_uw, products_uu,
):
    tl.debug_barrier()
    o_guard = tl.load(settings + 15 * blocks + parameter)
    first_live = tl.load(record + 7 * blocks + i) > 0
    first_low_dim = tl.load(record + 18 * blocks + i) > 0
    sums_ww = tl.load(record + 0 * blocks + i)
    memory_step = tl.load(memory + 0 * blocks + i)
    traits_inverse_root = tl.load(traits + 2 * blocks + parameter)
    o_weight_decay = tl.load(settings + 4 * blocks + parameter)
    first_eta_radial = tl.load(record + 20 * blocks + i)
    o_isotropic_decay = tl.load(settings + 5 * blocks + parameter)
    o_lr = tl.load(settings + 0 * blocks + parameter)
    first_scale_invariant = tl.load(record + 19 * blocks + i) > 0
    o_wd_ratio = tl.load(settings + 14 * blocks + parameter)
    memory_initial_norm = tl.load(memory + 5 * blocks + i)
    memory_radial_momentum = tl.load(memory + 1 * blocks + i)
    o_radial_beta = tl.load(settings + 8 * blocks + parameter)
    o_low_dim_scale = tl.load(settings + 12 * blocks + parameter)
    guard = o_guard > 0.0
    moves = first_live & (first_low_dim == 0)
    ww = tl.where(moves, sums_ww, 1.0)
    norm = root(ww)
    t = at_least(memory_step, tl.full([], 1.0, tl.float64))
    rms = root(products_uu) * traits_inverse_root
    guarded_update = (guard & first_live) & ((rms <= 100.0) == 0)
    overflow = guarded_update & (isfinite(products_uu) == 0)
    shrink = 100.0 / tl.where(guarded_update, rms, 100.0)
    shrink = tl.where(overflow, 0.0, shrink)
    uw = tl.where(overflow, 0.0, (shrink * products_uw))
    uu = tl.where(overflow, 0.0, ((shrink * shrink) * products_uu))
    along = uw / ww
    u_across = at_least((uu - (uw * along)), tl.full([], 0.0, tl.float64))
    decay = (o_weight_decay * first_eta_radial) + (o_isotropic_decay * o_lr)
    decay = tl.where(first_scale_invariant, (o_wd_ratio * decay), decay)
    guarded_decay = (guard & moves) & (norm < (0.1 * memory_initial_norm))
    decay = tl.where(guarded_decay, 0.0, decay)
    momentum = memory_radial_momentum / (1.0 - power(o_radial_beta, t))
    pull = tl.where(first_scale_invariant, 0.0, ((first_eta_radial * momentum) / norm))
    factor = (1.0 - decay) - pull
    guarded_factor = (guard & moves) & ((factor < 0.5) | (factor > 2.0))
    factor = tl.where(guard, at_most(at_least(factor, tl.full([], 0.5, tl.float64)), tl.full([], 2.0, tl.float64)), factor)
    a1 = tl.where(moves, ((factor - 1.0) + (o_lr * along)), 0.0)
    b = tl.where(moves, o_lr, tl.where(first_live, (o_low_dim_scale * o_lr), 0.0))
    ahead = (1.0 + a1) - (b * along)
    turned = ahead / root(at_least(((ahead * ahead) + (((b * b) * u_across) / ww)), tl.full([], 2.2250738585072014e-308, tl.float64)))
    a1_ = a1
    b_ = shrink * b
    guarded_factor_ = guarded_factor
    guarded_decay_ = guarded_decay
    guarded_update_ = guarded_update
    tl.debug_barrier()
    tl.store(record + 22 * blocks + i, (a1_).to(tl.float64))
    tl.store(record + 23 * blocks + i, (b_).to(tl.float64))
    tl.store(record + 24 * blocks + i, (guarded_factor_).to(tl.float64))
    tl.store(record + 25 * blocks + i, (guarded_decay_).to(tl.float64))
    tl.store(record + 26 * blocks + i, (guarded_update_).to(tl.float64))
    tl.store(memory + 1 * blocks + i, (tl.where(moves, (memory_radial_momentum * turned), memory_radial_momentum)).to(tl.float64))
    return a1_, b_, guarded_factor_, guarded_decay_, guarded_update_


@triton.jit
def turn_law(
    settings, traits, memory, record, blocks, i, parameter,
    sums_ww, sums_gg, sums_mw, sums_mm, active,
):
    tl.debug_barrier()
    memory_initial_norm = tl.load(memory + 2 * blocks + i)
    memory_step = tl.load(memory + 0 * blocks + i)
    traits_inverse_root = tl.load(traits + 0 * blocks + parameter)
    o_beta2 = tl.load(settings + 2 * blocks + parameter)
    memory_mean_square = tl.load(memory + 1 * blocks + i)
    o_beta1 = tl.load(settings + 1 * blocks + parameter)
    o_eps = tl.load(settings + 3 * blocks + parameter)
    o_angular_rms = tl.load(settings + 4 * blocks + parameter)
    o_lr = tl.load(settings + 0 * blocks + parameter)
    o_max_angle = tl.load(settings + 5 * blocks + parameter)
    norm = root(sums_ww)
    initial_norm = tl.where((active & (memory_initial_norm < 0.0)), norm, memory_initial_norm)
    step = memory_step + tl.where(active, 1.0, 0.0)
    t = at_least(step, tl.full([], 1.0, tl.float64))
    square = (sums_gg * traits_inverse_root) * traits_inverse_root
    averaged = (o_beta2 * memory_mean_square) + ((1.0 - o_beta2) * square)
    mean_square = tl.where(active, averaged, memory_mean_square)
    bottom = (1.0 - power(o_beta1, t)) * (root((mean_square / (1.0 - power(o_beta2, t)))) + o_eps)
    scale = tl.where((bottom > 0.0), (1.0 / tl.where((bottom > 0.0), bottom, 1.0)), 0.0)
    points = sums_ww > 0.0
    ww = tl.where(points, sums_ww, 1.0)
    along = (scale * sums_mw) / ww
    across = at_least(((scale * scale) * (sums_mm - ((sums_mw * sums_mw) / ww))), tl.full([], 0.0, tl.float64))
    rms = tl.where((o_angular_rms > 0.0), o_angular_rms, (initial_norm * traits_inverse_root))
    asked = o_lr / tl.where(points, rms, 1.0)
    at_max_angle = (active & points) & (asked > o_max_angle)
    turn = at_most(asked, o_max_angle) * traits_inverse_root
    angle = turn * root(across)
    sinc = tl.where((angle > 0.0), (tl.sin(angle) / tl.where((angle > 0.0), angle, 1.0)), 1.0)
    turns = (active & points) & ((angle == 0.0) == 0)
    push = (initial_norm * turn) * sinc
    forward = (initial_norm / tl.where(points, norm, 1.0)) * tl.cos(angle)
    a1_ = tl.where(turns, ((forward - 1.0) + (push * along)), 0.0)
    b_ = tl.where(turns, (push * scale), 0.0)
    angle_ = tl.where(turns, angle, 0.0)
    at_max_angle_ = at_max_angle
    tl.debug_barrier()
    tl.store(record + 4 * blocks + i, (a1_).to(tl.float64))
    tl.store(record + 5 * blocks + i, (b_).to(tl.float64))
    tl.store(record + 6 * blocks + i, (angle_).to(tl.float64))
    tl.store(record + 7 * blocks + i, (at_max_angle_).to(tl.float64))
    tl.store(memory + 0 * blocks + i, (step).to(tl.float64))
    tl.store(memory + 1 * blocks + i, (mean_square).to(tl.float64))
    tl.store(memory + 2 * blocks + i, (initial_norm).to(tl.float64))
    return a1_, b_, angle_, at_max_angle_
