/* The scalar laws for one block, on doubles.
   Made of law.py by scripts/generate_laws.py (`make laws`): edit that file, not this one. */

#ifndef ADAMO_LAW_H
#define ADAMO_LAW_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

static inline double root(double x)
{
    return x > 0 ? sqrt(x) : x;
}

/* NaN stays NaN. */
static inline double at_least(double x, double low)
{
    return x < low ? low : x;
}

static inline double at_most(double x, double high)
{
    return x > high ? high : x;
}

/* ---- AdamO ---- */

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, isotropic_decay, radial_lr_ratio, radial_lr,
        radial_beta, curvature_auto, curvature_target, curvature_beta, low_dim_scale, delta,
        wd_ratio, guard, sign;
} Options;

typedef struct {
    double low_dim, scale_invariant, inverse_root, rounding, smallest_eps, largest_square;
} Traits;

typedef struct {
    double step, radial_momentum, tau, tau_reference, curvature_step, initial_norm;
} Memory;

typedef struct {
    double ww, gw, gg, kappa, mw, uw, uu, live, use_gradient, keep_gradient, sign, p, q,
        beta1, beta2, debias1, debias2, eps, low_dim, scale_invariant, eta_radial,
        guarded_scale, a1, b, guarded_factor, guarded_decay, guarded_update, active;
} Row;

static void moments_law(const Options *o, const Traits *traits, Memory *memory, Row *row, bool active)
{
    bool guard = o->guard > 0.0;
    bool fits = (row->gg <= traits->largest_square) && isfinite(row->ww);
    bool live = active && (fits || !guard);
    double gw = live ? (o->sign * row->gw) : 0.0;
    double gg = live ? row->gg : 0.0;
    double initial_norm = (live && (memory->initial_norm < 0.0)) ? root(row->ww) : memory->initial_norm;
    bool low_dim = ((traits->low_dim > 0.0) || (initial_norm == 0.0)) || (row->ww == 0.0);
    bool moves = live && !low_dim;
    double ww = moves ? row->ww : 1.0;
    double norm = root(ww);
    double inverse = 1.0 / ww;
    double step = memory->step + (live ? 1.0 : 0.0);
    double t = at_least(step, 1.0);
    bool literal = o->curvature_target > 0.0;
    bool adapts = moves && (literal || (o->curvature_auto > 0.0));
    double kappa = at_most(row->kappa, 1.7976931348623157e+308);
    double curvature_count = memory->curvature_step + ((adapts && (gg > 0.0)) ? 1.0 : 0.0);
    bool curvature_counts = (adapts && (gg > 0.0)) && (curvature_count > 1.0);
    double curvature_slower = (0.999 * memory->tau_reference) + ((1.0 - 0.999) * kappa);
    double curvature_reference = curvature_counts ? curvature_slower : memory->tau_reference;
    double curvature_debias = 1.0 - pow(0.999, at_least((curvature_count - 1.0), 1.0));
    double curvature_start = literal ? o->curvature_target : kappa;
    double curvature_previous = (memory->tau < 0.0) ? curvature_start : memory->tau;
    double curvature_smoothed = (o->curvature_beta * curvature_previous) + ((1.0 - o->curvature_beta) * kappa);
    double curvature_tau = ((literal && adapts) || (!literal && curvature_counts)) ? curvature_smoothed : memory->tau;
    double curvature_target = literal ? o->curvature_target : curvature_reference;
    bool curvature_known = (adapts && (literal || (curvature_count > 1.0))) && (curvature_target > 0.0);
    double curvature_ratio = (curvature_known ? (literal ? curvature_tau : (curvature_tau * curvature_debias)) : 1.0) / (curvature_known ? curvature_target : 1.0);
    double scale = curvature_known ? (1.0 / root((curvature_ratio + o->eps))) : 1.0;
    double tau = curvature_tau;
    double tau_reference = curvature_reference;
    double curvature_step = curvature_count;
    bool guarded_scale = (guard && adapts) && ((scale < 0.1) || (scale > 10.0));
    scale = guard ? at_most(at_least(scale, 0.1), 10.0) : scale;
    double eta_radial = scale * ((o->radial_lr_ratio * o->lr) + o->radial_lr);
    bool by_test = (fabs(gw) < (((o->delta * traits->inverse_root) * root(gg)) * norm)) && (gg > 0.0);
    double c = (o->radial_beta * memory->radial_momentum) + ((((1.0 - o->radial_beta) * gw) * norm) * inverse);
    double across = at_least((gg - ((gw * gw) * inverse)), 0.0);
    bool noise = (guard && moves) && (across <= (traits->rounding * gg));
    row->live = live;
    row->use_gradient = live && !noise;
    row->keep_gradient = live && ((gg > 0.0) || literal);
    row->sign = o->sign;
    row->p = (moves && !noise) ? (gw * inverse) : 0.0;
    row->q = moves ? (row->mw * inverse) : 0.0;
    row->beta1 = live ? o->beta1 : 1.0;
    row->beta2 = live ? o->beta2 : 1.0;
    row->debias1 = 1.0 / (1.0 - pow(o->beta1, t));
    row->debias2 = 1.0 / (1.0 - pow(o->beta2, t));
    row->eps = at_least(o->eps, traits->smallest_eps);
    row->low_dim = low_dim;
    row->scale_invariant = ((traits->scale_invariant > 0.0) || by_test) && !low_dim;
    row->eta_radial = eta_radial;
    row->guarded_scale = guarded_scale;
    memory->step = step;
    memory->radial_momentum = moves ? c : memory->radial_momentum;
    memory->tau = tau;
    memory->tau_reference = tau_reference;
    memory->curvature_step = curvature_step;
    memory->initial_norm = initial_norm;
}

static void weights_law(const Options *o, const Traits *traits, Memory *memory, Row *row)
{
    bool guard = o->guard > 0.0;
    bool moves = (row->live > 0) && !(row->low_dim > 0);
    double ww = moves ? row->ww : 1.0;
    double norm = root(ww);
    double inverse = 1.0 / ww;
    double t = at_least(memory->step, 1.0);
    double rms = root(row->uu) * traits->inverse_root;
    bool guarded_update = (guard && (row->live > 0)) && !(rms <= 100.0);
    bool overflow = guarded_update && !isfinite(row->uu);
    double shrink = 100.0 / (guarded_update ? rms : 100.0);
    shrink = overflow ? 0.0 : shrink;
    double uw = overflow ? 0.0 : (shrink * row->uw);
    double uu = overflow ? 0.0 : ((shrink * shrink) * row->uu);
    double along = uw * inverse;
    double u_across = at_least((uu - (uw * along)), 0.0);
    double decay = (o->weight_decay * row->eta_radial) + (o->isotropic_decay * o->lr);
    decay = (row->scale_invariant > 0) ? (o->wd_ratio * decay) : decay;
    bool guarded_decay = (guard && moves) && (norm < (0.1 * memory->initial_norm));
    decay = guarded_decay ? 0.0 : decay;
    double momentum = memory->radial_momentum / (1.0 - pow(o->radial_beta, t));
    double pull = (row->scale_invariant > 0) ? 0.0 : (((row->eta_radial * momentum) * norm) * inverse);
    double factor = (1.0 - decay) - pull;
    bool guarded_factor = (guard && moves) && ((factor < 0.5) || (factor > 2.0));
    factor = guard ? at_most(at_least(factor, 0.5), 2.0) : factor;
    double a1 = moves ? ((factor - 1.0) + (o->lr * along)) : 0.0;
    double b = moves ? o->lr : ((row->live > 0) ? (o->low_dim_scale * o->lr) : 0.0);
    double ahead = (1.0 + a1) - (b * along);
    double turned = ahead / root(at_least(((ahead * ahead) + (((b * b) * u_across) * inverse)), 2.2250738585072014e-308));
    row->a1 = a1;
    row->b = shrink * b;
    row->guarded_factor = guarded_factor;
    row->guarded_decay = guarded_decay;
    row->guarded_update = guarded_update;
    memory->radial_momentum = moves ? (memory->radial_momentum * turned) : memory->radial_momentum;
}

/* ---- a weight that turns ---- */

typedef struct {
    double lr, beta1, beta2, eps, angular_rms, max_angle, sign;
} TurnOptions;

typedef struct {
    double inverse_root, block_inverse_root;
} TurnTraits;

typedef struct {
    double step, mean_square, initial_norm;
} TurnMemory;

typedef struct {
    double ww, gg, mw, mm, scale, uw, uu, all_ww, all_uw, all_uu, a1, b, angle, at_max_angle,
        active;
} TurnRow;

static void square_law(const TurnOptions *o, const TurnTraits *traits, TurnMemory *memory, TurnRow *row, bool active)
{
    double step = memory->step + (active ? 1.0 : 0.0);
    double t = at_least(step, 1.0);
    double square = (row->gg * traits->block_inverse_root) * traits->block_inverse_root;
    double averaged = (o->beta2 * memory->mean_square) + ((1.0 - o->beta2) * square);
    double mean_square = active ? averaged : memory->mean_square;
    double bottom = (1.0 - pow(o->beta1, t)) * (root((mean_square / (1.0 - pow(o->beta2, t)))) + o->eps);
    double scale = (bottom > 0.0) ? (1.0 / ((bottom > 0.0) ? bottom : 1.0)) : 0.0;
    row->scale = scale;
    row->uw = scale * row->mw;
    row->uu = (scale * scale) * row->mm;
    memory->step = step;
    memory->mean_square = mean_square;
}

static void turn_law(const TurnOptions *o, const TurnTraits *traits, TurnMemory *memory, TurnRow *row, bool active)
{
    double norm = root(row->all_ww);
    double initial_norm = (active && (memory->initial_norm < 0.0)) ? norm : memory->initial_norm;
    bool points = row->all_ww > 0.0;
    double ww = points ? row->all_ww : 1.0;
    double along = row->all_uw / ww;
    double across = at_least((row->all_uu - (row->all_uw * along)), 0.0);
    double rms = (o->angular_rms > 0.0) ? o->angular_rms : (initial_norm * traits->inverse_root);
    double asked = o->lr / (points ? rms : 1.0);
    bool at_max_angle = (active && points) && (asked > o->max_angle);
    double turn = at_most(asked, o->max_angle) * traits->inverse_root;
    double angle = turn * root(across);
    double sinc = (angle > 0.0) ? (sin(angle) / ((angle > 0.0) ? angle : 1.0)) : 1.0;
    bool turns = (active && points) && !(angle == 0.0);
    double push = (initial_norm * turn) * sinc;
    double forward = (initial_norm / (points ? norm : 1.0)) * cos(angle);
    row->a1 = turns ? ((forward - 1.0) + (push * along)) : 0.0;
    row->b = turns ? (push * row->scale) : 0.0;
    row->angle = turns ? angle : 0.0;
    row->at_max_angle = at_max_angle;
    memory->initial_norm = initial_norm;
}

#endif
