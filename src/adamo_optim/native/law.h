/* The scalar law of AdamO for one block: control.py line by line, on doubles.

   control.py is the law; this file only spells it without torch, because the kernel needs it
   between two passes over a block that is still in cache. tests/test_native.py compares the two
   on random scalars, field by field. The names are control.py's.

   `where(condition, x, y)` becomes `condition ? x : y`, and clamps keep NaN as torch's do. */

#ifndef ADAMO_LAW_H
#define ADAMO_LAW_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

static const double REFERENCE_BETA = 0.999;
static const double SCALE_LOW = 0.1, SCALE_HIGH = 10.0;   /* SCALE_BOUNDS */
static const double FACTOR_LOW = 0.5, FACTOR_HIGH = 2.0;  /* FACTOR_BOUNDS */
static const double NORM_FLOOR = 0.1;
static const double UPDATE_BOUND = 100.0;
static const double TURN_BOUND = 0.1;

/* These three have the fields of control.py's Options, Traits and Memory, in their order. */
typedef struct {
    double lr, beta1, beta2, eps, weight_decay, radial_lr_ratio, radial_lr, radial_beta;
    double curvature_auto, curvature_target, curvature_beta, decay_tangential, angular;
    double low_dim_scale, delta, wd_ratio, guard, sign, angular_rms, radial_adam;
    double second_moment, low_dim_decay;
} Options;

typedef struct {
    double low_dim, scale_invariant, inverse_root, rounding, smallest_eps, largest_square;
} Traits;

typedef struct {
    double step, radial_momentum, tau, tau_reference, curvature_step, initial_norm;
    double mean_square;
} Memory;

/* Everything one step computes about a block: the sums of the passes and control.py's First and
   Second. A row of the tensor behind Record, so the order is known to native/__init__.py. */
typedef struct {
    double ww, gw, gg, kappa, mw;                                             /* pass 1 */
    double uw, uu;                                                            /* pass 2 */
    double sign, p, q, beta1, beta2, debias1, debias2, eps, eta_radial;       /* law 1 */
    double a1, b;                                                             /* law 2 */
    double tau;
    bool live, use_gradient, keep_gradient, low_dim, scale_invariant, guarded_scale; /* law 1 */
    bool guarded_factor, guarded_decay, guarded_update, guarded_turn;         /* law 2 */
} Row;

static inline double clamp(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* η_ρ,t/η_ρ before the guard; updates τ, its slow reference and their counter. */
static double curvature(const Options *o, Memory *memory, double kappa, double gg, bool live)
{
    const bool literal = o->curvature_target > 0;
    live = live && (literal || o->curvature_auto > 0);
    if (!live)
        return 1;
    kappa = kappa > DBL_MAX ? DBL_MAX : kappa;

    const bool nonzero = gg > 0;
    memory->curvature_step += nonzero;
    const bool known_change = memory->curvature_step > 1;
    const bool counts = nonzero && known_change;
    if (counts)
        memory->tau_reference =
            REFERENCE_BETA * memory->tau_reference + (1 - REFERENCE_BETA) * kappa;

    if (literal || counts) {
        const double start = literal ? o->curvature_target : kappa;
        const double previous = memory->tau < 0 ? start : memory->tau;
        memory->tau = o->curvature_beta * previous + (1 - o->curvature_beta) * kappa;
    }

    double target = o->curvature_target;
    if (!literal)
        target = known_change
            ? memory->tau_reference / (1 - pow(REFERENCE_BETA, memory->curvature_step - 1)) : 0;
    return target > 0 ? 1 / sqrt(memory->tau / target + o->eps) : 1;
}

/* η_ρ before curvature adapts it. */
static double radial_rate(const Options *o)
{
    return isnan(o->radial_lr) ? o->radial_lr_ratio * o->lr : o->radial_lr;
}

/* A weight that turns and is declared scale-invariant: its norm sets neither the output nor the
   angle, so it is left alone. */
static bool keeps_norm(const Options *o, const Traits *traits)
{
    return o->angular > 0 && traits->scale_invariant > 0;
}

/* Law 1. `active`: the block has a gradient in this step. */
static void before(
    const Options *o, const Traits *traits, Memory *memory, bool active, Row *row)
{
    const bool guard = o->guard > 0;
    const bool finite = row->gg <= traits->largest_square && isfinite(row->ww);
    const bool live = active && (finite || !guard);
    const double gg = live ? row->gg : 0, gw = live ? o->sign * row->gw : 0;
    const double mw = live ? row->mw : 0;
    double ww = live ? row->ww : 0;

    if (live && memory->initial_norm < 0)
        memory->initial_norm = sqrt(ww);
    /* ‖w₀‖ = 0 is for good: such a block must grow its norm, which Adam does. */
    const bool low_dim = traits->low_dim > 0 || memory->initial_norm == 0 || ww == 0;
    const bool tangential = live && !low_dim;
    ww = low_dim ? 1 : ww; /* a safe divisor */

    memory->step += live;
    const double t = memory->step > 1 ? memory->step : 1;
    const bool moves = tangential && !keeps_norm(o, traits);
    const double scale = curvature(o, memory, live ? row->kappa : 0, gg, moves);
    const double bounded = guard ? clamp(scale, SCALE_LOW, SCALE_HIGH) : scale;

    /* AdamP's test on the whole tensor; a zero gradient is no evidence. */
    const double cosine_bound = o->delta * traits->inverse_root * sqrt(gg) * sqrt(ww);
    const bool by_test = fabs(gw) < cosine_bound && gg > 0;

    if (tangential)
        memory->radial_momentum =
            o->radial_beta * memory->radial_momentum + (1 - o->radial_beta) * gw / sqrt(ww);
    const bool projects = tangential && !(o->radial_adam > 0);
    const double left = gg - gw * gw / ww, across = left < 0 ? 0 : left; /* ‖g^θ‖² */
    const bool noise = guard && projects && across <= traits->rounding * gg;

    /* the mean of v, and where it stands for v: u = m̂/(0·√v + (√mean + ε)) */
    const double square = projects ? (noise ? 0 : across) : gg;
    const double share = traits->inverse_root * traits->inverse_root;
    if (live)
        memory->mean_square = o->beta2 * memory->mean_square + (1 - o->beta2) * square * share;
    const bool scale_invariant = (traits->scale_invariant > 0 || by_test) && !low_dim;
    const bool shared =
        tangential
        && (o->second_moment == 1 || (o->second_moment > 0 && traits->scale_invariant > 0));
    const double debias2 = 1 / (1 - pow(o->beta2, t));
    const double eps = o->eps > traits->smallest_eps ? o->eps : traits->smallest_eps;

    row->live = live;
    row->use_gradient = live && !noise;
    row->keep_gradient = live && (gg > 0 || o->curvature_target > 0);
    row->sign = o->sign;
    row->p = projects && !noise ? gw / ww : 0;
    row->q = projects ? mw / ww : 0;
    row->beta1 = live ? o->beta1 : 1;
    row->beta2 = live ? o->beta2 : 1;
    row->debias1 = 1 / (1 - pow(o->beta1, t));
    row->debias2 = shared ? 0 : debias2;
    row->eps = shared ? eps + sqrt(debias2 * memory->mean_square) : eps;
    row->low_dim = low_dim;
    row->scale_invariant = scale_invariant;
    row->eta_radial = bounded * radial_rate(o);
    row->guarded_scale = guard && tangential && (scale < SCALE_LOW || scale > SCALE_HIGH);
    row->tau = memory->tau;
}

/* The norm at which an additive step would turn a weight as far as an angular one does. */
static double unit_of_angles(const Options *o, const Traits *traits, bool scale_invariant,
                             double initial_norm)
{
    if (o->angular_rms > 0)
        return o->angular_rms / traits->inverse_root;
    const double eta = o->decay_tangential > 0 ? o->lr : radial_rate(o);
    const double rate = o->weight_decay * eta * (scale_invariant ? o->wd_ratio : 1);
    if (isnan(o->angular_rms) || !(rate > 0 && o->lr > 0))
        return initial_norm;
    return o->lr / (sqrt(2 * rate) * traits->inverse_root);
}

/* Law 2, with ⟨u,w⟩ and ‖u‖² in the row. */
static void after(const Options *o, const Traits *traits, Memory *memory, Row *row)
{
    const bool guard = o->guard > 0, radial = row->live && !row->low_dim;
    const double ww = radial ? row->ww : 1, norm = sqrt(ww);
    const double initial_norm = radial ? memory->initial_norm : 1;

    double decay = o->weight_decay * (o->decay_tangential > 0 ? o->lr : row->eta_radial);
    if (row->scale_invariant)
        decay *= o->wd_ratio;
    if (keeps_norm(o, traits))
        decay = 0;
    row->guarded_decay = guard && radial && norm < NORM_FLOOR * initial_norm;
    if (row->guarded_decay)
        decay = 0;

    /* Adam's quotient, in its radial and its tangential part */
    const double rms = sqrt(row->uu) * traits->inverse_root;
    row->guarded_update = guard && row->live && !(rms <= UPDATE_BOUND); /* NaN: ∞ on some ranks */
    const bool overflow = row->guarded_update && !isfinite(row->uu); /* u means nothing then */
    const double shrink = overflow ? 0 : row->guarded_update ? UPDATE_BOUND / rms : 1;
    const double uw = overflow ? 0 : shrink * row->uw;
    const double uu = overflow ? 0 : shrink * shrink * row->uu;
    const double along = uw / ww;
    const double left = uu - uw * along, across = left < 0 ? 0 : left; /* ‖u^θ‖² */

    /* decay, then the radial step, of SGD or Adam: together one factor on ‖w‖ */
    const double t = memory->step > 1 ? memory->step : 1;
    const double debias = 1 - pow(o->radial_beta, t);
    const double pull = o->radial_adam > 0 ? along : memory->radial_momentum / (debias * norm);
    const double asked = 1 - decay - (row->scale_invariant ? 0 : row->eta_radial * pull);
    row->guarded_factor = guard && radial && (asked < FACTOR_LOW || asked > FACTOR_HIGH);
    const double factor = guard ? clamp(asked, FACTOR_LOW, FACTOR_HIGH) : asked;

    /* the tangential step, u without its radial part: added, or a pure rotation */
    const bool angular = o->angular == 1 || keeps_norm(o, traits);
    const double unit = unit_of_angles(o, traits, row->scale_invariant, initial_norm);
    const double smallest = o->lr / (TURN_BOUND * traits->inverse_root);
    row->guarded_turn = guard && radial && angular && unit < smallest;
    const double k = o->lr * norm / (row->guarded_turn ? smallest : unit);
    const double stretch = sqrt(1 + k * k * across / ww);
    /* low-dimensional: Adam or, with decay, AdamW */
    const double shrinks = o->lr * o->low_dim_decay;
    double a1 = row->live ? -(guard && shrinks > 1 - FACTOR_LOW ? 1 - FACTOR_LOW : shrinks) : 0;
    double b = row->live ? o->low_dim_scale * o->lr : 0;
    if (radial && angular) {
        a1 = factor * (1 + k * along) / stretch - 1;
        b = factor * k / stretch;
    } else if (radial) {
        a1 = factor + o->lr * along - 1;
        b = o->lr;
    }

    /* m^ρ projected on w⁺: it loses the cosine of the turn. */
    if (radial) {
        const double ahead = 1 + a1 - b * along, aside = b * b * across / ww;
        const double squared = ahead * ahead + aside;
        memory->radial_momentum *= ahead / sqrt(squared < DBL_MIN ? DBL_MIN : squared);
    }
    row->a1 = a1;
    row->b = shrink * b;
}

#endif
