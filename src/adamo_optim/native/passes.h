/* The three passes over one chunk of a block, in the phases of loop.py.

   kernel.c includes this file once per instruction set and compute type, with
     DOUBLE     1: compute in double; 0: in float
     VERSION    the instruction set, which ends every name
     TARGET     the attribute that allows its instructions in a function
     WIDTH      how many doubles its vectors hold
     WIDEN_FLOAT(x), LOAD_DOUBLE(x)   WIDTH numbers at x, as a vector of doubles

   Elementwise loops are plain C for the compiler to vectorise. The sums are spelled out, because
   they must depend neither on alignment nor on the instruction set: LANES partial sums in double,
   element i of a chunk in lane i % LANES. Arrays of another type than REAL, scaled gradients and
   the ragged end of a block pass through a buffer of one TILE, which the first-level cache holds. */

#if DOUBLE
#define REAL double
#define REAL_TYPE FLOAT64
#define ROOT sqrt
#define LOAD(x) ((VECTOR)LOAD_DOUBLE(x))
#define NAME(name) JOIN(name, _double_, VERSION)
#else
#define REAL float
#define REAL_TYPE FLOAT32
#define ROOT sqrtf
#define LOAD(x) ((VECTOR)WIDEN_FLOAT(x))
#define NAME(name) JOIN(name, _float_, VERSION)
#endif
#define VECTOR NAME(vector)
#define VECTORS (LANES / WIDTH)

typedef double VECTOR __attribute__((vector_size(8 * WIDTH)));

/* `n` numbers of an array as REAL, and zeros up to a multiple of LANES: in place where the memory
   is like that already, else in the buffer. */
TARGET static REAL *NAME(fetch)(Array array, int64_t start, int64_t n, REAL *buffer)
{
    if (array.type == REAL_TYPE && n % LANES == 0)
        return (REAL *)array.data + start;
#define CONVERT(type, expression)                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                                \
        const type x = ((const type *)array.data)[start + i];                                     \
        buffer[i] = (REAL)(expression);                                                           \
    }
    switch (array.type) {
    case FLOAT32: CONVERT(float, x) break;
    case FLOAT64: CONVERT(double, x) break;
    case BFLOAT16: CONVERT(uint16_t, from_bfloat16(x)) break;
    case FLOAT16: CONVERT(uint16_t, from_float16(x)) break;
    }
#undef CONVERT
    for (int64_t i = n; i % LANES; i++)
        buffer[i] = 0;
    return buffer;
}

/* The same for gradients, divided by the loss scale of mixed precision. */
TARGET static const REAL *NAME(fetch_gradient)(
    const Block *block, Array array, int64_t start, int64_t n, REAL *buffer)
{
    const REAL *g = NAME(fetch)(array, start, n, buffer), scale = (REAL)block->inverse_scale;
    if (scale == 1)
        return g;
    for (int64_t i = 0; i < n; i++)
        buffer[i] = g[i] * scale;
    return buffer;
}

/* The way back: `n` numbers into an array, rounded to nearest. */
TARGET static void NAME(store)(Array array, int64_t start, int64_t n, const REAL *x)
{
#define CONVERT(type, expression)                                                                 \
    for (int64_t i = 0; i < n; i++)                                                                  \
        ((type *)array.data)[start + i] = (expression);
    switch (array.type) {
    case FLOAT32: CONVERT(float, (float)x[i]) break;
    case FLOAT64: CONVERT(double, (double)x[i]) break;
    case BFLOAT16: CONVERT(uint16_t, to_bfloat16((float)x[i])) break;
    case FLOAT16: CONVERT(uint16_t, to_float16((float)x[i])) break;
    }
#undef CONVERT
}

TARGET static double NAME(total)(const VECTOR *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane / WIDTH][lane % WIDTH];
    return sum;
}

/* Pass 1, κ where g⁻ is of a slice of g, or of nothing. */
TARGET static double NAME(reduce_sampled)(const Block *block, int64_t chunk)
{
    REAL buffer[2][TILE];
    VECTOR kappa[VECTORS] = {{0}};
    for (Range tile = first_tile(block->sampled_numel, chunk); tile.n > 0; tile = next_tile(tile)) {
        const REAL *g = NAME(fetch_gradient)(block, block->sampled, tile.start, tile.n, buffer[0]);
        const REAL *previous = NAME(fetch)(block->previous, tile.start, tile.n, buffer[1]);
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const VECTOR change = LOAD(g + i + k * WIDTH) - LOAD(previous + i + k * WIDTH);
                kappa[k] += change * change;
            }
    }
    return NAME(total)(kappa);
}

/* Pass 1: ‖w‖², ⟨g,w⟩, ‖g‖², κ, ⟨m,w⟩ of one chunk. */
TARGET static void NAME(reduce)(const Block *block, int64_t chunk, double *sums)
{
    REAL buffer[4][TILE];
    VECTOR ww[VECTORS] = {{0}}, gw[VECTORS] = {{0}}, gg[VECTORS] = {{0}};
    VECTOR kappa[VECTORS] = {{0}}, mw[VECTORS] = {{0}};

    for (Range tile = first_tile(block->numel, chunk); tile.n > 0; tile = next_tile(tile)) {
        const REAL *w = NAME(fetch)(block->w, tile.start, tile.n, buffer[0]);
        const REAL *g = NAME(fetch_gradient)(block, block->g, tile.start, tile.n, buffer[1]);
        const REAL *m = NAME(fetch)(block->m, tile.start, tile.n, buffer[2]);
        const REAL *previous = g;
        if (!block->is_sampled)
            previous = NAME(fetch)(block->previous, tile.start, tile.n, buffer[3]);
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const VECTOR x = LOAD(w + i + k * WIDTH), y = LOAD(g + i + k * WIDTH);
                const VECTOR z = LOAD(m + i + k * WIDTH);
                const VECTOR change = y - LOAD(previous + i + k * WIDTH);
                ww[k] += x * x;
                gw[k] += y * x;
                gg[k] += y * y;
                mw[k] += z * x;
                kappa[k] += change * change;
            }
    }
    sums[0] = NAME(total)(ww);
    sums[1] = NAME(total)(gw);
    sums[2] = NAME(total)(gg);
    sums[3] = block->is_sampled ? NAME(reduce_sampled)(block, chunk) : NAME(total)(kappa);
    sums[4] = NAME(total)(mw);
}

/* Pass 2, g⁻ ← g where g⁻ is of a slice of g. */
TARGET static void NAME(remember_sampled)(const Block *block, int64_t chunk)
{
    REAL buffer[TILE];
    for (Range tile = first_tile(block->sampled_numel, chunk); tile.n > 0; tile = next_tile(tile)) {
        const REAL *g = NAME(fetch_gradient)(block, block->sampled, tile.start, tile.n, buffer);
        NAME(store)(block->previous, tile.start, tile.n, g);
    }
}

typedef struct {
    REAL sign, p, q, beta1, rest1, beta2, rest2, debias1, debias2, eps, a1, b;
} NAME(Coefficients);

/* The row's numbers in the precision of the arithmetic. */
TARGET static NAME(Coefficients) NAME(coefficients)(const Row *row)
{
    return (NAME(Coefficients)){
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
        .a1 = (REAL)row->a1,
        .b = (REAL)row->b,
    };
}

/* Pass 2, elementwise. */
TARGET static void NAME(update_moments)(
    NAME(Coefficients) c, int64_t n, const REAL *restrict w, const REAL *restrict g,
    REAL *restrict m, REAL *restrict v, REAL *restrict u, REAL *restrict previous)
{
    for (int64_t i = 0; i < n; i++) {
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

/* Pass 2: m, v and g⁻ of one chunk; ⟨u,w⟩ and ‖u‖². */
TARGET static void NAME(moments)(const Block *block, const Row *row, int64_t chunk, double *sums)
{
    const NAME(Coefficients) c = NAME(coefficients)(row);
    const bool keep = row->keep_gradient && !block->is_sampled;
    const bool in_place = keep && block->previous.type == REAL_TYPE;
    REAL buffer[4][TILE];
    VECTOR uw[VECTORS] = {{0}}, uu[VECTORS] = {{0}};

    for (Range tile = first_tile(block->numel, chunk); tile.n > 0; tile = next_tile(tile)) {
        const REAL *w = NAME(fetch)(block->w, tile.start, tile.n, buffer[0]);
        const REAL *g = NAME(fetch_gradient)(block, block->g, tile.start, tile.n, buffer[1]);
        REAL *u = buffer[2];
        REAL *previous = in_place ? (REAL *)block->previous.data + tile.start : buffer[3];
        NAME(update_moments)(c, tile.n, w, g, (REAL *)block->m.data + tile.start,
            (REAL *)block->v.data + tile.start, u, previous);
        for (int64_t i = tile.n; i % LANES; i++)
            u[i] = 0;
        for (int64_t i = 0; i < tile.n; i += LANES)
            for (int k = 0; k < VECTORS; k++) {
                const VECTOR x = LOAD(u + i + k * WIDTH), y = LOAD(w + i + k * WIDTH);
                uw[k] += x * y;
                uu[k] += x * x;
            }
        if (keep && !in_place)
            NAME(store)(block->previous, tile.start, tile.n, g);
    }
    if (row->keep_gradient && block->is_sampled)
        NAME(remember_sampled)(block, chunk);
    sums[0] = NAME(total)(uw);
    sums[1] = NAME(total)(uu);
}

/* Pass 3: w ← w + (a−1)·w − b·u of one chunk, with u from m and v once more. */
TARGET static void NAME(apply)(const Block *block, const Row *row, int64_t chunk)
{
    const REAL debias1 = (REAL)row->debias1, debias2 = (REAL)row->debias2, eps = (REAL)row->eps;
    const REAL a1 = (REAL)row->a1, b = (REAL)row->b;
    const bool overflow = row->guarded_update && row->b == 0; /* u = ∞, of which 0·u is NaN */
    REAL buffer[TILE];

    for (Range tile = first_tile(block->numel, chunk); tile.n > 0; tile = next_tile(tile)) {
        REAL *restrict w = NAME(fetch)(block->w, tile.start, tile.n, buffer);
        const REAL *restrict m = (const REAL *)block->m.data + tile.start;
        const REAL *restrict v = (const REAL *)block->v.data + tile.start;
        for (int64_t i = 0; i < tile.n; i++) {
            const REAL u = m[i] * debias1 / (ROOT(v[i] * debias2) + eps);
            w[i] += w[i] * a1 - (overflow ? 0 : u * b);
        }
        if (w == buffer)
            NAME(store)(block->w, tile.start, tile.n, w);
    }
}

static const Passes NAME(passes) = {NAME(reduce), NAME(moments), NAME(apply)};

#undef REAL
#undef REAL_TYPE
#undef ROOT
#undef LOAD
#undef NAME
#undef VECTOR
#undef VECTORS
#undef DOUBLE
