/* The passes over one chunk of a block: AdamO's three, in the phases of loop.py, and the two of a
   weight that turns, in those of turning.py.

   kernel.c includes this file once per instruction set and compute type, with
     DOUBLE     1: compute in double; 0: in float
     VERSION    the instruction set; ends every name
     TARGET     the attribute that allows its instructions in a function
     WIDTH      how many doubles one of its vectors holds
     WIDEN_FLOAT(x), LOAD_DOUBLE(x)   WIDTH numbers at x as doubles
     WIDEN_DIFFERENCE(x, y)           x − y in float, as doubles
     ADD_EXACT_PRODUCT(sum, x, y)     sum += x·y for doubles that came from floats: the product is
                                      exact, so a fused multiply-add gives the same bits

   Elementwise loops are plain C for the compiler to vectorise. The sums are spelled out, because
   they must depend neither on alignment nor on the instruction set: LANES partial sums in double,
   element i of a chunk in lane i % LANES. What is not in memory as REAL (low precision, scaled
   gradients, the ragged end of a block) goes through a buffer of one TILE. A row is asked for while
   the one before it is computed: 20 % of the time of a step by rows. */

#if DOUBLE
#define REAL double
#define REAL_TYPE FLOAT64
#define ROOT sqrt
#define LOAD(x) ((VECTOR)LOAD_DOUBLE(x))
#define DIFFERENCE(x, y) (LOAD(x) - LOAD(y))
#define ADD_PRODUCT(sum, x, y) ((sum) += (x) * (y))
#define NAME(name) JOIN(name, _double_, VERSION)
#else
#define REAL float
#define REAL_TYPE FLOAT32
#define ROOT sqrtf
#define LOAD(x) ((VECTOR)WIDEN_FLOAT(x))
#define DIFFERENCE(x, y) ((VECTOR)WIDEN_DIFFERENCE(x, y))
#define ADD_PRODUCT(sum, x, y) ADD_EXACT_PRODUCT(sum, x, y)
#define NAME(name) JOIN(name, _float_, VERSION)
#endif
#define VECTOR NAME(vector)
#define VECTORS (LANES / WIDTH)
#define COEFFICIENTS NAME(coefficients)

/* Entries of a span of a parameter, with the numbers of the block that they belong to. */
#define PASS(name) TARGET static void NAME(name)( \
    const Member *member, const Law *law, Span span, void *kept, double *sums)

typedef double VECTOR __attribute__((vector_size(8 * WIDTH)));

/* ---- arrays as REAL and back ----------------------------------------------------------------- */

/* A tile of an array, with zeros up to a multiple of LANES: in place if the memory is like that,
   else in the buffer. */
TARGET static REAL *NAME(fetch)(Array array, Range tile, REAL *buffer)
{
    if (array.type == REAL_TYPE && tile.n % LANES == 0)
        return (REAL *)array.data + tile.start;
#define CONVERT(type, expression)                                  \
    for (int64_t i = 0; i < tile.n; i++) {                         \
        const type x = ((const type *)array.data)[tile.start + i]; \
        buffer[i] = (REAL)(expression);                            \
    }
    switch (array.type) {
    case FLOAT32: CONVERT(float, x) break;
    case FLOAT64: CONVERT(double, x) break;
    case BFLOAT16: CONVERT(uint16_t, from_bfloat16(x)) break;
    case FLOAT16: CONVERT(uint16_t, from_float16(x)) break;
    }
#undef CONVERT
    for (int64_t i = tile.n; i % LANES; i++)
        buffer[i] = 0;
    return buffer;
}

/* The same for gradients, divided by the loss scale of mixed precision. */
TARGET static const REAL *NAME(fetch_gradient)(
    const Member *member, Array array, Range tile, REAL *buffer)
{
    const REAL *g = NAME(fetch)(array, tile, buffer), scale = (REAL)member->inverse_scale;
    if (scale == 1)
        return g;
    for (int64_t i = 0; i < tile.n; i++)
        buffer[i] = g[i] * scale;
    return buffer;
}

TARGET static void NAME(store)(Array array, Range tile, const REAL *x)
{
#define CONVERT(type, expression)           \
    for (int64_t i = 0; i < tile.n; i++)    \
        ((type *)array.data)[tile.start + i] = (expression);
    switch (array.type) {
    case FLOAT32: CONVERT(float, (float)x[i]) break;
    case FLOAT64: CONVERT(double, (double)x[i]) break;
    case BFLOAT16: CONVERT(uint16_t, to_bfloat16((float)x[i])) break;
    case FLOAT16: CONVERT(uint16_t, to_float16((float)x[i])) break;
    }
#undef CONVERT
}

/* The new weights, in the precision of the parameter. */
TARGET static void NAME(store_weight)(
    const Member *member, const Law *law, Range tile, const REAL *w)
{
    if (!member->stochastic) {
        NAME(store)(member->w, tile, w);
        return;
    }
    uint16_t *out = (uint16_t *)member->w.data + tile.start;
    const uint32_t place = (uint32_t)tile.start;
    const uint32_t step = (uint32_t)(uint64_t)law->adamo.memory.step;
    const uint32_t key = step * 0x9E3779B9 + member->number * 0x85EBCA6B;
    for (int64_t i = 0; i < tile.n; i++)
        out[i] = to_bfloat16_at_random((float)w[i], place + (uint32_t)i, key);
}

TARGET static double NAME(total)(const VECTOR *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane / WIDTH][lane % WIDTH];
    return sum;
}

/* ---- pass 1 ---------------------------------------------------------------------------------- */

/* κ where g⁻ is of a slice of g. */
TARGET static double NAME(reduce_slice)(const Member *member, Span span)
{
    span.end = min(span.end, member->slice_numel);
    REAL buffer[2][TILE];
    VECTOR kappa[VECTORS] = {{0}};
    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        const REAL *g = NAME(fetch_gradient)(member, member->slice, tile, buffer[0]);
        const REAL *previous = NAME(fetch)(member->previous, tile, buffer[1]);
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const int64_t at = i + k * WIDTH;
                const VECTOR change = DIFFERENCE(g + at, previous + at);
                ADD_PRODUCT(kappa[k], change, change);
            }
    }
    return NAME(total)(kappa);
}

/* Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ, ⟨m,w⟩. */
PASS(reduce)
{
    const int64_t ahead = member->ahead;
    REAL buffer[4][TILE];
    VECTOR ww[VECTORS] = {{0}}, gw[VECTORS] = {{0}}, gg[VECTORS] = {{0}};
    VECTOR kappa[VECTORS] = {{0}}, mw[VECTORS] = {{0}};

    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        const REAL *w = NAME(fetch)(member->w, tile, buffer[0]);
        const REAL *g = NAME(fetch_gradient)(member, member->g, tile, buffer[1]);
        const REAL *m = NAME(fetch)(member->m, tile, buffer[2]);
        const REAL *previous = member->whole_previous
            ? NAME(fetch)(member->previous, tile, buffer[3]) : g;
        /* one loop for all of them: several streams together make the most of the memory */
        for (int64_t i = 0; i < tile.n; i += LANES) {
            __builtin_prefetch(w + i + ahead, 0, 2);
            __builtin_prefetch(g + i + ahead, 0, 2);
            for (int k = 0; k < VECTORS; k++) {
                const int64_t at = i + k * WIDTH;
                const VECTOR x = LOAD(w + at), y = LOAD(g + at), z = LOAD(m + at);
                const VECTOR change = DIFFERENCE(g + at, previous + at);
                ADD_PRODUCT(ww[k], x, x);
                ADD_PRODUCT(gw[k], y, x);
                ADD_PRODUCT(gg[k], y, y);
                ADD_PRODUCT(mw[k], z, x);
                ADD_PRODUCT(kappa[k], change, change);
            }
        }
    }
    sums[0] = NAME(total)(ww);
    sums[1] = NAME(total)(gw);
    sums[2] = NAME(total)(gg);
    sums[3] = member->whole_previous ? NAME(total)(kappa) : NAME(reduce_slice)(member, span);
    sums[4] = NAME(total)(mw);
}

/* ---- pass 2 ---------------------------------------------------------------------------------- */

/* A row's coefficients in the precision of the arithmetic. */
typedef struct {
    REAL sign, p, q, beta1, rest1, beta2, rest2, debias1, debias2, eps;
} COEFFICIENTS;

/* `next` are the places of m, v and g⁻ that the divisions leave time to ask for. */
TARGET static void NAME(update_moments)(
    COEFFICIENTS c, int64_t n, const REAL *restrict w, const REAL *restrict g,
    REAL *restrict m, REAL *restrict v, REAL *restrict u, REAL *restrict previous,
    const REAL *const next[3])
{
    for (int64_t start = 0; start < n; start += LANES) {
        for (int k = 0; k < 3; k++)
            __builtin_prefetch(next[k] + start, 0, 2);
        for (int64_t i = start; i < start + LANES; i++) {
            /* g^θ = ±g − p·w */
            const REAL g_tangential = g[i] * c.sign - w[i] * c.p;
            /* m ← β₁(m − q·w) + (1−β₁)g^θ;  v ← β₂v + (1−β₂)g^θ² */
            m[i] = (m[i] - w[i] * c.q) * c.beta1 + g_tangential * c.rest1;
            v[i] = v[i] * c.beta2 + g_tangential * g_tangential * c.rest2;
            /* u = m̂/(√v̂ + ε) */
            u[i] = m[i] * c.debias1 / (ROOT(v[i] * c.debias2) + c.eps);
            previous[i] = g[i];
        }
    }
}

/* g⁻ ← g where g⁻ is of a slice of g. */
TARGET static void NAME(remember_slice)(const Member *member, Span span)
{
    span.end = min(span.end, member->slice_numel);
    REAL buffer[TILE];
    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile))
        NAME(store)(member->previous, tile, NAME(fetch_gradient)(member, member->slice, tile, buffer));
}

/* Pass 2: m, v and, where the law says so, g⁻; ⟨u,w⟩ and ‖u‖². */
PASS(moments)
{
    const Row *row = &law->adamo.row;
    const COEFFICIENTS c = {
        .sign = (REAL)(row->use_gradient ? row->sign : 0),
        .p = (REAL)row->p,
        .q = (REAL)row->q,
        .beta1 = (REAL)row->beta1,
        .rest1 = (REAL)(1 - row->beta1),
        .beta2 = (REAL)row->beta2,
        .rest2 = (REAL)(1 - row->beta2),
        .debias1 = (REAL)row->debias1,
        .debias2 = (REAL)row->debias2,
        .eps = (REAL)row->eps,
    };
    const int64_t ahead = member->ahead;
    const bool keep = row->keep_gradient && member->whole_previous;
    const bool in_place = keep && member->previous.type == REAL_TYPE;
    REAL buffer[6][TILE];
    VECTOR uw[VECTORS] = {{0}}, uu[VECTORS] = {{0}};

    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        const REAL *w = NAME(fetch)(member->w, tile, buffer[0]);
        const REAL *g = NAME(fetch_gradient)(member, member->g, tile, buffer[1]);
        REAL *m = NAME(fetch)(member->m, tile, buffer[2]);
        REAL *v = NAME(fetch)(member->v, tile, buffer[3]);
        REAL *u = kept ? (REAL *)kept + (tile.start - span.start) : buffer[4];
        REAL *previous = in_place && tile.n % LANES == 0
            ? (REAL *)member->previous.data + tile.start : buffer[5];
        const REAL *const next[3] = {m + ahead, v + ahead, (in_place ? previous : m) + ahead};
        NAME(update_moments)(c, tile.n, w, g, m, v, u, previous, next);
        if (keep && previous == buffer[5])
            NAME(store)(member->previous, tile, g);
        if (m == buffer[2]) {
            NAME(store)(member->m, tile, m);
            NAME(store)(member->v, tile, v);
        }
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const int64_t at = i + k * WIDTH;
                const VECTOR x = LOAD(u + at), y = LOAD(w + at);
                ADD_PRODUCT(uw[k], x, y);
                ADD_PRODUCT(uu[k], x, x);
            }
    }
    if (row->keep_gradient && !member->whole_previous)
        NAME(remember_slice)(member, span);
    sums[0] = NAME(total)(uw);
    sums[1] = NAME(total)(uu);
}

/* ---- pass 3 ---------------------------------------------------------------------------------- */

/* Pass 3: w ← w + (a−1)·w − b·u, with the u that was kept, or from m and v once more. */
PASS(apply)
{
    const Row *row = &law->adamo.row;
    const REAL debias1 = (REAL)row->debias1, debias2 = (REAL)row->debias2, eps = (REAL)row->eps;
    const REAL a1 = (REAL)row->a1, b = (REAL)row->b;
    const bool overflow = row->guarded_update && row->b == 0; /* u = ∞, and 0·∞ would be NaN */
    REAL buffer[2][TILE];

    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        REAL *restrict w = NAME(fetch)(member->w, tile, buffer[0]);
        const REAL *restrict m = (const REAL *)member->m.data + tile.start;
        const REAL *restrict v = (const REAL *)member->v.data + tile.start;
        REAL *restrict u = kept ? (REAL *)kept + (tile.start - span.start) : buffer[1];
        if (!kept)
            for (int64_t i = 0; i < tile.n; i++)
                u[i] = m[i] * debias1 / (ROOT(v[i] * debias2) + eps);
        for (int64_t i = 0; i < tile.n; i++)
            w[i] += w[i] * a1 - (overflow ? 0 : u[i] * b);
        if (w == buffer[0])
            NAME(store_weight)(member, law, tile, w);
    }
}

/* ---- weights that turn ----------------------------------------------------------------------- */

/* Pass 1: m ← β₁m + (1−β₁)(±g), in the precision of m; ‖w‖², ‖g‖², ⟨m,w⟩, ‖m‖². */
PASS(turn_reduce)
{
    const TurnOptions *o = &law->turning.options;
    const REAL beta1 = (REAL)o->beta1, rest1 = (REAL)(o->sign * (1 - o->beta1));
    REAL buffer[3][TILE];
    VECTOR ww[VECTORS] = {{0}}, gg[VECTORS] = {{0}}, mw[VECTORS] = {{0}}, mm[VECTORS] = {{0}};

    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        const REAL *w = NAME(fetch)(member->w, tile, buffer[0]);
        const REAL *g = NAME(fetch_gradient)(member, member->g, tile, buffer[1]);
        REAL *m = NAME(fetch)(member->m, tile, buffer[2]);
        if (member->blocks > 1)
            for (int64_t i = 0; i < tile.n; i += LANES) {
                __builtin_prefetch(w + i + member->length, 0, 2);
                __builtin_prefetch(g + i + member->length, 0, 2);
                __builtin_prefetch(m + i + member->length, 1, 2);
            }
        for (int64_t i = 0; i < tile.n; i++)
            m[i] = m[i] * beta1 + g[i] * rest1;
        if (m == buffer[2]) {
            NAME(store)(member->m, tile, m);
            m = NAME(fetch)(member->m, tile, buffer[2]); /* as it was rounded */
        }
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const int64_t at = i + k * WIDTH;
                const VECTOR x = LOAD(w + at), y = LOAD(g + at), z = LOAD(m + at);
                ADD_PRODUCT(ww[k], x, x);
                ADD_PRODUCT(gg[k], y, y);
                ADD_PRODUCT(mw[k], z, x);
                ADD_PRODUCT(mm[k], z, z);
            }
    }
    sums[0] = NAME(total)(ww);
    sums[1] = NAME(total)(gg);
    sums[2] = NAME(total)(mw);
    sums[3] = NAME(total)(mm);
}

/* Pass 2: w ← w + (a−1)·w − b·m. */
PASS(turn_apply)
{
    const TurnRow *row = &law->turning.row;
    const REAL a1 = (REAL)row->a1, b = (REAL)row->b;
    REAL buffer[2][TILE];
    for (Range tile = first_tile(span); tile.n > 0; tile = next_tile(tile)) {
        REAL *restrict w = NAME(fetch)(member->w, tile, buffer[0]);
        const REAL *restrict m = NAME(fetch)(member->m, tile, buffer[1]);
        for (int64_t i = 0; i < tile.n; i++)
            w[i] += w[i] * a1 - m[i] * b;
        if (w == buffer[0])
            NAME(store)(member->w, tile, w);
    }
}

static Pass *const NAME(passes)[2][DONE] = {
    {NAME(reduce), NAME(moments), NAME(apply)},
    {NAME(turn_reduce), NULL, NAME(turn_apply)},
};

#undef REAL
#undef REAL_TYPE
#undef ROOT
#undef LOAD
#undef DIFFERENCE
#undef ADD_PRODUCT
#undef NAME
#undef VECTOR
#undef VECTORS
#undef COEFFICIENTS
#undef PASS
#undef DOUBLE
