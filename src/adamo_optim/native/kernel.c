/* One step on the CPU for a list of parameters. AdamO: pass 1, law, pass 2, law, pass 3. A weight
   that turns: pass 1, its laws, pass 2. A block is a parameter, or each of its rows.

   Rows of AdamO and small parameters go through all of it on one thread, while they are in its
   cache. Of a weight that turns all rows are reduced before one is turned.
   A large block is split into chunks, which a thread takes one by one from a share of its own, the
   same in every pass: what another core has just written comes slower than what is in memory.
   Whoever finishes the last chunk of a pass applies the law and opens the next pass, and nobody
   waits while any thread's share of any parameter has something to do. Sums are kept per chunk and
   added in the order of the chunks: the result is the same, bit for bit, for any number of threads
   and any instruction set.

   Of a sharded parameter a block is this process's shard. Then Python calls one pass at a time and
   adds up the sums of all processes in between, and the laws come before the pass that needs them.

     law.h       the laws, made of law.py       tensors.h   reads torch tensors
     passes.h    the passes over one chunk      threads.h   the helper threads
     floats.h    bfloat16 and float16                                                         */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "floats.h"

/* The rows of a parameter have taken as many steps, so the laws ask for the same powers of the same
   four betas again and again; pow() was a third of their time. */
static double remembered_power(double base, double exponent)
{
    static _Thread_local struct { double base, exponent, power; } known[4];
    static _Thread_local unsigned next;
    for (int i = 0; i < 4; i++)
        if (known[i].base == base && known[i].exponent == exponent && exponent > 0)
            return known[i].power;
    const double power = pow(base, exponent);
    known[next % 4].base = base;
    known[next % 4].exponent = exponent;
    known[next++ % 4].power = power;
    return power;
}

#define pow remembered_power
#include "law.h"
#undef pow

#include "tensors.h"
#include "threads.h"

enum {
    LANES = 8,      /* partial sums of an inner product */
    TILE = 256,     /* entries that a pass handles at a time; a multiple of LANES */
    CHUNK = 16384,  /* entries of a task, and of one term in a total; a multiple of TILE */
    WHOLE = 4,      /* a block of more chunks than these is split */
    AHEAD = 512,    /* entries by which memory is asked for in advance, where no row comes next */
    SUMS = 5,       /* what pass 1 reduces: the first fields of a row, ww to mw */
    PRODUCTS = 2,   /* what pass 2 reduces: uw and uu */
    TURN_SUMS = 4,  /* what pass 1 reduces of a weight that turns: ww to mm */
    SCALED = 3,     /* what the law makes of these: scale, uw and uu */
    WHOLES = 3,     /* what its blocks add up to: all_ww to all_uu */
};

static inline int64_t min(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static inline int64_t max(int64_t x, int64_t y)
{
    return x > y ? x : y;
}

/* ---- the numbers of one block ------------------------------------------------------------------ */

typedef struct {
    Options options;
    Traits traits;
    Memory memory;
    Row row;
} AdamO;

typedef struct {
    TurnOptions options;
    TurnTraits traits;
    TurnMemory memory;
    TurnRow row;
} Turning;

/* All of them doubles, that are copied from and to columns of matrices. */
typedef union {
    AdamO adamo;
    Turning turning;
    double numbers[sizeof(AdamO) / sizeof(double)];
} Law;

/* A row for each number, a column for each block. */
enum { OPTIONS, TRAITS, MEMORY, RECORD, MATRICES };

typedef struct {
    int64_t columns;
    int64_t rows[MATRICES]; /* how many numbers of a block each holds, in the order of Law */
    double *data[MATRICES];
} Table;

/* The numbers in the matrices from `first` on to before `end`. */
static void gather(const Table *table, int64_t column, int first, int end, Law *law)
{
    double *number = law->numbers;
    for (int k = 0; k < end; number += table->rows[k++])
        for (int64_t row = 0; k >= first && row < table->rows[k]; row++)
            number[row] = table->data[k][row * table->columns + column];
}

/* What a step changes: memory and record. */
static void scatter(const Table *table, int64_t column, const Law *law)
{
    const double *number = law->numbers + table->rows[OPTIONS] + table->rows[TRAITS];
    for (int k = MEMORY; k < MATRICES; k++)
        for (int64_t row = 0; row < table->rows[k]; row++)
            table->data[k][row * table->columns + column] = *number++;
}

/* ---- parameters and their chunks ---------------------------------------------------------------- */

typedef struct {
    void *data;
    Type type;
} Array;

typedef enum { REDUCE, MOMENTS, APPLY, DONE } Phase;

/* Tasks that nobody has taken yet. */
typedef struct {
    int64_t next, end;
} Share;

typedef struct {
    int64_t start, end; /* of entries, in the order of memory */
} Span;

typedef struct Member Member;

/* One pass over at most CHUNK entries. `u` is room for as many numbers, which pass 2 leaves there
   for pass 3; or NULL. */
typedef void Pass(const Member *, const Law *, Span, void *u, double *sums);

struct Member {
    Array w, g, m, v;
    Array previous, slice;          /* g⁻, and the part of g that it is of */
    int64_t slice_numel;            /* 0: no g⁻ */
    bool whole_previous;            /* the slice is g itself */
    double ratio_of_samples;        /* what κ of the slice is multiplied by */
    double inverse_scale;           /* what gradients are multiplied by */
    bool stochastic;                /* bfloat16 weights are rounded at random, */
    uint32_t number;                /* with this and the step count as the key */

    int64_t blocks, length;         /* how many blocks it is, of how many entries each */
    int64_t row_stride;             /* of its first dimension */
    int64_t chunks;                 /* of a block */
    int64_t column;                 /* of its first block, in the matrices */
    bool active;                    /* it has a gradient on any rank */
    bool turns;                     /* which of the two optimizers it is updated by */
    Pass *const *passes;            /* by phase */

    int64_t ahead;                  /* where the entries lie that come to be needed next */
    int64_t per_task;               /* blocks of a task; 0: it is a single one, and split */
    int64_t tasks, finished;        /* of one in phases: of this one. Guarded by the job's lock. */
    Share *shares;                  /* of the tasks, one for each thread. Guarded by it, too. */
    Phase phase;                    /* of one that goes in phases */
    double whole[WHOLES];           /* what the blocks of one that turns add up to */
    Law law;
    double *sums;                   /* per chunk */
};

/* The tiles of a span; past the last one, n <= 0. */
typedef struct {
    int64_t start, n, end;
} Range;

static inline Range first_tile(Span span)
{
    return (Range){span.start, min(TILE, span.end - span.start), span.end};
}

static inline Range next_tile(Range tile)
{
    const int64_t start = tile.start + tile.n;
    return (Range){start, min(TILE, tile.end - start), tile.end};
}

/* ---- the passes, per instruction set and compute type ------------------------------------------ */

#define JOIN(name, type, version) JOIN_EXPANDED(name, type, version)
#define JOIN_EXPANDED(name, type, version) name##type##version

#define VERSION portable
#define TARGET
#define WIDTH 2
#define WIDEN_FLOAT(x) ((VECTOR){(x)[0], (x)[1]})
#define LOAD_DOUBLE(x) ((VECTOR){(x)[0], (x)[1]})
#define WIDEN_DIFFERENCE(x, y) ((VECTOR){(x)[0] - (y)[0], (x)[1] - (y)[1]})
#define ADD_EXACT_PRODUCT(sum, x, y) ((sum) += (x) * (y))
#define DOUBLE 0
#include "passes.h"
#define DOUBLE 1
#include "passes.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

#undef VERSION
#undef TARGET
#undef WIDTH
#undef WIDEN_FLOAT
#undef LOAD_DOUBLE
#undef WIDEN_DIFFERENCE
#undef ADD_EXACT_PRODUCT
/* Intrinsics, because GCC makes a detour of __builtin_convertvector. AVX-512 was no faster: what
   the passes wait for is memory. */
#define VERSION avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 4
#define WIDEN_FLOAT(x) _mm256_cvtps_pd(_mm_loadu_ps(x))
#define LOAD_DOUBLE(x) _mm256_loadu_pd(x)
#define WIDEN_DIFFERENCE(x, y) _mm256_cvtps_pd(_mm_sub_ps(_mm_loadu_ps(x), _mm_loadu_ps(y)))
#define ADD_EXACT_PRODUCT(sum, x, y) ((sum) = (VECTOR)_mm256_fmadd_pd(x, y, sum))
#define DOUBLE 0
#include "passes.h"
#define DOUBLE 1
#include "passes.h"

/* by instruction set, precision, optimizer and phase */
static Pass *const (*const versions[][2])[DONE] = {
    {passes_float_portable, passes_double_portable},
    {passes_float_avx2, passes_double_avx2},
};

/* 1 if the processor has AVX2 and FMA, and the operating system keeps their registers. Not by
   __builtin_cpu_supports, which needs a part of GCC's runtime that other linkers do not have. */
static int best_version(void)
{
    unsigned eax, ebx, ecx, edx, kept;
    const unsigned wanted = bit_FMA | bit_AVX | bit_OSXSAVE;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & wanted) != wanted)
        return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(edx) : "c"(0));
    return (kept & 6) == 6 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ebx & bit_AVX2;
}
#else
static Pass *const (*const versions[][2])[DONE] = {{passes_float_portable, passes_double_portable}};

static int best_version(void)
{
    return 0;
}
#endif

static int version; /* the one in use, an index into versions */

/* ---- one block --------------------------------------------------------------------------------- */

/* The laws of a weight that turns and is one block. */
static void apply_turn_laws(Turning *t, bool active)
{
    TurnRow *row = &t->row;
    row->active = active;
    square_law(&t->options, &t->traits, &t->memory, row, active);
    row->all_ww = row->ww;
    row->all_uw = row->uw;
    row->all_uu = row->uu;
    turn_law(&t->options, &t->traits, &t->memory, row, active);
}

/* The law that stands before a pass; false: the guard has decided that the block keeps its weight
   and its whole state. */
static bool apply_law(Law *law, bool turns, Phase next, bool active)
{
    AdamO *a = &law->adamo;
    if (turns) {
        apply_turn_laws(&law->turning, active);
        return active;
    }
    if (next == MOMENTS) {
        a->row.active = active;
        a->row.uw = a->row.uu = 0;
        moments_law(&a->options, &a->traits, &a->memory, &a->row, active);
    }
    if (next == APPLY || !(a->row.live > 0))
        weights_law(&a->options, &a->traits, &a->memory, &a->row);
    return a->row.live > 0;
}

/* The first pass that a call is for, after the law that it needs. `only`: a pass alone, or DONE. */
static Phase begin(const Member *member, Law *law, Phase only)
{
    if (only == REDUCE || only == DONE)
        return REDUCE;
    if (member->turns) /* the caller has applied the laws: they know all blocks of a weight */
        return member->active ? only : DONE;
    return apply_law(law, member->turns, only, member->active) ? only : DONE;
}

/* What a pass has summed in each of `chunks` chunks, and on to the next pass. */
static Phase proceed(
    const Member *member, Law *law, Phase phase, Phase only, const double *sums, int64_t chunks)
{
    Row *row = &law->adamo.row;
    double *totals = member->turns ? &law->turning.row.ww : phase == REDUCE ? &row->ww : &row->uw;
    const int count = phase == APPLY ? 0 : phase == MOMENTS ? PRODUCTS
        : member->turns ? TURN_SUMS : SUMS;
    for (int i = 0; i < count; i++) {
        totals[i] = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            totals[i] += sums[chunk * SUMS + i];
    }
    if (phase == REDUCE && !member->turns)
        row->kappa *= member->ratio_of_samples;
    const Phase next = member->turns && phase == REDUCE ? APPLY : phase + 1;
    return only == DONE && next != DONE && apply_law(law, member->turns, next, true) ? next : DONE;
}

static Span chunk_of(const Member *member, int64_t block, int64_t chunk)
{
    const int64_t start = block * member->length, inside = chunk * CHUNK;
    return (Span){start + inside, start + min(inside + CHUNK, member->length)};
}

/* The passes over a block that is not split. */
static void run_block(const Member *member, int64_t block, Law *law, Phase only, void *u)
{
    double total[SUMS], sums[SUMS] = {0};
    void *kept = member->chunks == 1 && only == DONE ? u : NULL;
    for (Phase phase = begin(member, law, only); phase != DONE;) {
        memset(total, 0, sizeof total);
        for (int64_t i = 0; i < member->chunks; i++) {
            /* every second pass goes backwards: it starts with what is still in cache */
            const int64_t chunk = phase == MOMENTS ? member->chunks - 1 - i : i;
            member->passes[phase](member, law, chunk_of(member, block, chunk), kept, sums);
            for (int k = 0; k < SUMS && phase != APPLY; k++)
                total[k] += sums[k];
        }
        phase = proceed(member, law, phase, only, total, 1);
    }
}

/* ---- all parameters on all threads --------------------------------------------------------------- */

typedef struct {
    const Table *table;
    Phase only;           /* a pass alone, or DONE: all of them */
    Member **queue;       /* those in phases first: the others fill the gaps at the end */
    int64_t count, first; /* those before `first` are done */
    int threads, arrived;
    fenv_t environment;   /* of the caller: rounding, flushing of denormals */
    pthread_mutex_t lock;
    pthread_cond_t progress;
} Job;

static bool is_split(const Member *member)
{
    return member->per_task == 0;
}

/* A pass over all of it must be finished before the next: the law looks at all of it. */
static bool in_phases(const Member *member)
{
    return is_split(member) || (member->turns && member->blocks > 1);
}

/* Every second pass goes backwards: it starts with what is still in cache. */
static bool goes_backwards(const Member *member)
{
    return in_phases(member) && member->phase == (member->turns ? APPLY : MOMENTS);
}

/* By turns where the first share goes: parameters of one task must not all be the same thread's. */
static void deal(Member *member, int threads)
{
    const int64_t tasks = member->tasks;
    for (int k = 0; k < threads; k++)
        member->shares[(member->column + k) % threads] =
            (Share){tasks * k / threads, tasks * (k + 1) / threads};
}

/* A task of a share: its owner's from one end, anybody else's from the other. */
static bool take_from(Member *member, int share, bool own, int64_t *task)
{
    Share *left = &member->shares[share];
    if (left->next == left->end)
        return false;
    *task = own != goes_backwards(member) ? left->next++ : --left->end;
    return true;
}

/* The next task: a parameter, and which of its tasks; somebody else's only where none of one's own
   is open, whatever the parameter. NULL: all is done. */
static Member *take(Job *job, int me, int64_t *task)
{
    for (;;) {
        while (job->first < job->count && job->queue[job->first]->tasks == 0)
            job->first++;
        if (job->first == job->count)
            return NULL;
        for (int k = 0; k < job->threads; k++)
            for (int64_t i = job->first; i < job->count; i++)
                if (take_from(job->queue[i], (me + k) % job->threads, k == 0, task))
                    return job->queue[i];
        pthread_cond_wait(&job->progress, &job->lock);
    }
}

/* One chunk of a pass over a split block. */
static void run_chunk(const Member *member, int64_t chunk)
{
    const Span span = chunk_of(member, 0, chunk);
    member->passes[member->phase](member, &member->law, span, NULL, member->sums + chunk * SUMS);
}

/* Some blocks of a parameter, from the first pass to the last. */
static void run_blocks(const Job *job, const Member *member, int64_t task)
{
    Law law;
    double u[CHUNK];
    const int64_t first = task * member->per_task, end = min(first + member->per_task, member->blocks);
    const int known = job->only == DONE ? RECORD : MATRICES; /* a whole step writes all of its record */
    gather(job->table, member->column + first, OPTIONS, MEMORY, &law);
    for (int64_t block = first; block < end; block++) {
        gather(job->table, member->column + block, MEMORY, known, &law);
        run_block(member, block, &law, job->only, u);
        scatter(job->table, member->column + block, &law);
    }
}

/* The numbers of one kind of all blocks, from a column on. */
#define KIND(table, matrix, type, field, column) \
    ((table)->data[matrix] + offsetof(type, field) / sizeof(double) * (table)->columns + (column))

static void fill(double *numbers, int64_t count, double x)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] = x;
}

/* Pass 1 over some rows of a weight that turns, and the law of each. All but the second moment is
   the same for all rows: only what differs is read and written row by row. */
static void reduce_rows(const Job *job, const Member *member, int64_t first, int64_t end)
{
    const Table *table = job->table;
    const int64_t column = member->column + first;
    double *square = KIND(table, MEMORY, TurnMemory, mean_square, column);
    double *record = table->data[RECORD] + column, sums[SUMS];
    Law law = member->law;
    Turning *t = &law.turning;
    const double step = t->memory.step;
    for (int64_t block = first; block < end; block++, square++, record++) {
        double *number = &t->row.ww;
        memset(number, 0, TURN_SUMS * sizeof *number);
        for (int64_t i = 0; i < member->chunks; i++) {
            member->passes[REDUCE](member, &law, chunk_of(member, block, i), NULL, sums);
            for (int k = 0; k < TURN_SUMS; k++)
                number[k] += sums[k];
        }
        if (job->only == DONE) {
            t->memory.step = step;
            t->memory.mean_square = *square;
            square_law(&t->options, &t->traits, &t->memory, &t->row, true);
            *square = t->memory.mean_square;
        }
        for (int k = 0; k < TURN_SUMS + SCALED; k++) /* ww to uu */
            record[k * table->columns] = number[k];
    }
    if (job->only == DONE)
        fill(KIND(table, MEMORY, TurnMemory, step, column), end - first, t->memory.step);
}

/* The law of the weight, and pass 2 over some of its rows. */
static void apply_rows(const Job *job, const Member *member, int64_t first, int64_t end)
{
    const Table *table = job->table;
    const int64_t column = member->column + first, count = end - first;
    const double *scale = KIND(table, RECORD, TurnRow, scale, column);
    double *b = KIND(table, RECORD, TurnRow, b, column);
    Law law = member->law;
    Turning *t = &law.turning;
    if (job->only == DONE) {
        TurnRow *row = &t->row;
        memcpy(&row->all_ww, member->whole, sizeof member->whole);
        row->scale = 1;
        turn_law(&t->options, &t->traits, &t->memory, row, true);
        for (int64_t i = 0; i < count; i++)
            b[i] = row->b * scale[i];
        fill(KIND(table, RECORD, TurnRow, all_ww, column), count, row->all_ww);
        fill(KIND(table, RECORD, TurnRow, all_uw, column), count, row->all_uw);
        fill(KIND(table, RECORD, TurnRow, all_uu, column), count, row->all_uu);
        fill(KIND(table, RECORD, TurnRow, a1, column), count, row->a1);
        fill(KIND(table, RECORD, TurnRow, angle, column), count, row->angle);
        fill(KIND(table, RECORD, TurnRow, at_max_angle, column), count, row->at_max_angle);
        fill(KIND(table, RECORD, TurnRow, active, column), count, 1);
        fill(KIND(table, MEMORY, TurnMemory, initial_norm, column), count, t->memory.initial_norm);
    }
    for (int64_t block = first; block < end; block++) {
        t->row.b = *b++;
        for (int64_t i = 0; i < member->chunks; i++)
            member->passes[APPLY](member, &law, chunk_of(member, block, i), NULL, NULL);
    }
}

static void run_rows(const Job *job, const Member *member, int64_t task)
{
    const int64_t first = task * member->per_task, end = min(first + member->per_task, member->blocks);
    (member->phase == REDUCE ? reduce_rows : apply_rows)(job, member, first, end);
}

/* After a pass over all rows: what they add up to, and on to the next pass. */
static Phase proceed_rows(const Job *job, Member *member)
{
    if (member->phase == APPLY || job->only != DONE)
        return DONE;
    const double *fields[WHOLES] = {
        KIND(job->table, RECORD, TurnRow, ww, member->column),
        KIND(job->table, RECORD, TurnRow, uw, member->column),
        KIND(job->table, RECORD, TurnRow, uu, member->column)};
    for (int k = 0; k < WHOLES; k++) {
        member->whole[k] = 0;
        for (int64_t block = 0; block < member->blocks; block++)
            member->whole[k] += fields[k][block];
    }
    return APPLY;
}

static void work(void *argument)
{
    Job *job = argument;
    int64_t task;
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(&job->environment);
    pthread_mutex_lock(&job->lock);
    const int me = job->arrived++;
    for (Member *member; (member = take(job, me, &task));) {
        const bool split = is_split(member), phased = in_phases(member);
        pthread_mutex_unlock(&job->lock);
        if (split)
            run_chunk(member, task);
        else if (phased)
            run_rows(job, member, task);
        else
            run_blocks(job, member, task);
        pthread_mutex_lock(&job->lock);
        if (++member->finished < member->tasks)
            continue;
        if (phased) {
            member->phase = !split ? proceed_rows(job, member) : proceed(
                member, &member->law, member->phase, job->only, member->sums, member->chunks);
            member->finished = 0;
        }
        if (!phased || member->phase == DONE)
            member->tasks = 0;
        deal(member, job->threads);
        pthread_cond_broadcast(&job->progress);
    }
    pthread_mutex_unlock(&job->lock);
    fesetenv(&environment);
}

/* How a parameter is cut into tasks. */
static void divide(Member *member, const Job *job)
{
    member->chunks = (member->length + CHUNK - 1) / CHUNK;
    member->ahead = member->blocks > 1 ? member->length : AHEAD;
    const bool split = member->blocks == 1 && member->chunks > WHOLE;
    member->per_task = split ? 0 : max(1, CHUNK / max(1, member->length));
    member->tasks = split ? member->chunks : (member->blocks - 1) / member->per_task + 1;
    if (in_phases(member)) {
        gather(job->table, member->column, OPTIONS, MATRICES, &member->law);
        member->phase = begin(member, &member->law, job->only);
        member->tasks = member->phase == DONE ? 0 : member->tasks;
    }
    deal(member, job->threads);
}

/* One step of all parameters or, of sharded ones, one pass after the law that it needs. False when
   there is not enough memory, and nothing has happened. */
static bool run(Member *members, int64_t count, const Table *table, int threads, Phase only)
{
    int64_t chunks = 0, numel = 0;
    for (int64_t i = 0; i < count; i++) {
        chunks += members[i].length / CHUNK + 1;
        numel += members[i].blocks * members[i].length;
    }
    double *sums = calloc((size_t)chunks * SUMS + 1, sizeof *sums), *next = sums;
    Job job = {.table = table, .only = only, .queue = calloc((size_t)count + 1, sizeof *job.queue)};
    /* to wake a thread takes about as long as a few chunks */
    job.threads = (int)max(1, min(threads, 1 + numel / (WHOLE * CHUNK)));
    Share *shares = calloc((size_t)(count * job.threads) + 1, sizeof *shares);
    const bool enough_memory = sums && job.queue && shares;
    if (enough_memory) {
        if (only == REDUCE || only == DONE)
            memset(table->data[RECORD], 0,
                   (size_t)(table->rows[RECORD] * table->columns) * sizeof(double));
        for (int64_t i = 0; i < count; i++) {
            members[i].shares = shares + i * job.threads;
            divide(&members[i], &job);
        }
        for (int phased = 1; phased >= 0; phased--)
            for (int64_t i = 0; i < count; i++)
                if (in_phases(&members[i]) == phased) {
                    job.queue[job.count++] = &members[i];
                    members[i].sums = next;
                    next += members[i].chunks * SUMS;
                }
        fegetenv(&job.environment);
        pthread_mutex_init(&job.lock, NULL);
        pthread_cond_init(&job.progress, NULL);
        parallel(job.threads, work, &job);
        pthread_cond_destroy(&job.progress);
        pthread_mutex_destroy(&job.lock);
        for (int64_t i = 0; i < count; i++)
            if (is_split(&members[i]))
                scatter(table, members[i].column, &members[i].law);
    }
    free(sums);
    free(shares);
    free(job.queue);
    return enough_memory;
}

/* ---- from Python ---------------------------------------------------------------------------------- */

static bool read_table(PyObject *matrices[MATRICES], bool turns, Table *table, PyObject *kept)
{
    const size_t sizes[2][MATRICES] = {
        {sizeof(Options), sizeof(Traits), sizeof(Memory), sizeof(Row)},
        {sizeof(TurnOptions), sizeof(TurnTraits), sizeof(TurnMemory), sizeof(TurnRow)}};
    for (int k = 0; k < MATRICES; k++) {
        DLTensor x;
        Type type;
        if (!view(matrices[k], &x, &type, kept))
            return false;
        const int64_t rows = (int64_t)(sizes[turns][k] / sizeof(double));
        if (x.ndim != 2 || x.shape[0] != rows || type != FLOAT64 || !is_contiguous(&x)
            || (k > 0 && x.shape[1] != table->columns)) {
            PyErr_Format(PyExc_ValueError, "expected a matrix of %d rows of float64", (int)rows);
            return false;
        }
        table->columns = x.shape[1];
        table->rows[k] = rows;
        table->data[k] = x.data;
    }
    return true;
}

enum { W, G, M, V, PREVIOUS, SLICE, TENSORS };

/* Lists with an entry for each parameter. */
typedef struct {
    PyObject *tensors[TENSORS];
    PyObject *columns, *blocks, *seeds, *ratios, *active; /* `active` is empty in a whole step */
} Lists;

/* The tensors of parameter i. `odd` is set when their layouts do not fit; an error returns false. */
static bool read_tensors(
    Member *member, const Lists *lists, Py_ssize_t i, PyObject *kept, bool *odd)
{
    DLTensor x[TENSORS];
    Type type[TENSORS];
    int count = V;
    if (!member->turns)
        count = PyList_GetItem(lists->tensors[PREVIOUS], i) == Py_None ? PREVIOUS : TENSORS;
    for (int k = 0; k < count; k++) {
        PyObject *tensor = PyList_GetItem(lists->tensors[k], i);
        if (!tensor || !view(tensor, &x[k], &type[k], kept))
            return false;
    }
    const Type real = type[W] == FLOAT64 ? FLOAT64 : FLOAT32;
    if (!member->turns && (type[M] != real || type[V] != real)) {
        PyErr_SetString(PyExc_TypeError, "exp_avg and exp_avg_sq must have the compute dtype");
        return false;
    }
    member->w = (Array){x[W].data, type[W]};
    member->g = (Array){x[G].data, type[G]};
    member->m = (Array){x[M].data, type[M]};
    member->length = numel(&x[W]);
    member->row_stride = x[W].ndim ? x[W].strides[0] : 0;
    member->passes = versions[version][real == FLOAT64][member->turns];
    *odd = !is_dense(&x[W]) || !same_layout(&x[G], &x[W]) || !same_layout(&x[M], &x[W]);
    if (count == V)
        return true;
    member->v = (Array){x[V].data, type[V]};
    *odd = *odd || !same_layout(&x[V], &x[W]);
    if (count < TENSORS)
        return true;
    member->previous = (Array){x[PREVIOUS].data, type[PREVIOUS]};
    member->slice = (Array){x[SLICE].data, type[SLICE]};
    member->slice_numel = numel(&x[PREVIOUS]);
    member->whole_previous = x[SLICE].data == x[G].data && member->slice_numel == member->length;
    *odd = *odd || !is_dense(&x[PREVIOUS]) || !same_layout(&x[SLICE], &x[PREVIOUS])
        || member->slice_numel > member->length;
    return true;
}

/* The blocks of parameter i and their columns, its ratio of samples, its seed (None: to nearest). */
static bool read_numbers(Member *member, const Lists *lists, Py_ssize_t i, int64_t columns)
{
    PyObject *column = PyList_GetItem(lists->columns, i);
    if (!column)
        return false;
    member->column = PyLong_AsLong(column);
    PyObject *blocks = PyList_GetItem(lists->blocks, i);
    if (!blocks)
        return false;
    member->blocks = PyLong_AsLong(blocks);
    member->active = PyList_Size(lists->active) == 0 || PyList_GetItem(lists->active, i) == Py_True;
    if (!member->turns) {
        PyObject *seed = PyList_GetItem(lists->seeds, i);
        PyObject *ratio = PyList_GetItem(lists->ratios, i);
        if (!seed || !ratio)
            return false;
        member->ratio_of_samples = PyFloat_AsDouble(ratio);
        member->stochastic = seed != Py_None && member->w.type == BFLOAT16;
        member->number = member->stochastic ? (uint32_t)PyLong_AsUnsignedLongMask(seed) : 0;
    }
    if (PyErr_Occurred())
        return false;
    if (member->column < 0 || member->blocks < 1 || member->column > columns - member->blocks) {
        PyErr_SetString(PyExc_IndexError, "a column is out of range");
        return false;
    }
    const bool in_pieces = (member->length && member->row_stride * member->blocks != member->length)
        || (member->slice_numel && !member->whole_previous);
    if (member->blocks > 1 && in_pieces) {
        PyErr_SetString(PyExc_ValueError, "a row that is a block must be one piece of memory");
        return false;
    }
    member->length /= member->blocks;
    return true;
}

/* All parameters. Returns the list of the odd ones, NULL on error. */
static PyObject *read_members(
    Member *members, const Lists *lists, const Table *table, bool turns, double inverse_scale,
    PyObject *kept)
{
    PyObject *odd_ones = PyList_New(0);
    for (Py_ssize_t i = 0; odd_ones && i < PyList_Size(lists->columns); i++) {
        Member *member = &members[i];
        member->turns = turns;
        member->inverse_scale = inverse_scale;
        bool odd = false, bad = !read_tensors(member, lists, i, kept, &odd);
        bad = bad || !read_numbers(member, lists, i, table->columns);
        if (odd) {
            PyObject *index = PyLong_FromSsize_t(i);
            bad = bad || !index || PyList_Append(odd_ones, index);
            Py_XDECREF(index);
        }
        if (bad)
            Py_CLEAR(odd_ones);
    }
    return odd_ones;
}

/* ---- what Python calls -------------------------------------------------------------------------- */

static PyObject *update_keeping(const Lists *lists, PyObject *matrices[MATRICES], bool turns,
                                double inverse_scale, int threads, int phase, PyObject *kept)
{
    Table table = {0};
    if (!read_table(matrices, turns, &table, kept))
        return NULL;
    const Py_ssize_t count = PyList_Size(lists->columns);
    const bool needs_flags = phase != REDUCE && phase != DONE;
    if (phase < REDUCE || phase > DONE || (needs_flags && PyList_Size(lists->active) != count)) {
        PyErr_SetString(PyExc_ValueError, "expected a phase from 0 to 3, and a flag per parameter");
        return NULL;
    }
    Member *members = calloc((size_t)count + 1, sizeof *members);
    if (!members)
        return PyErr_NoMemory();
    PyObject *odd_ones = read_members(members, lists, &table, turns, inverse_scale, kept);
    if (odd_ones && PyList_Size(odd_ones) == 0) {
        bool enough_memory;
        Py_BEGIN_ALLOW_THREADS
        enough_memory = run(members, count, &table, threads, (Phase)phase);
        Py_END_ALLOW_THREADS
        if (!enough_memory) {
            Py_CLEAR(odd_ones);
            PyErr_NoMemory();
        }
    }
    free(members);
    return odd_ones;
}

/* The part of `step` and `turn` that is the same. Columns that are not in the lists are left alone. */
static PyObject *update(const Lists *lists, PyObject *matrices[MATRICES], bool turns,
                        double inverse_scale, int threads, int phase)
{
    PyObject *kept = PyList_New(0), *odd_ones = NULL;
    if (kept)
        odd_ones = update_keeping(lists, matrices, turns, inverse_scale, threads, phase, kept);
    Py_XDECREF(kept);
    return odd_ones;
}

PyDoc_STRVAR(step_doc,
    "step(w, g, m, v, previous, slices, columns, blocks, seeds, ratios, active, options, traits, "
    "memory, record, inverse_scale, threads, phase)\n\nOne step of AdamO's parameters (phase 3), or "
    "one of its passes (0, 1 or 2; with a flag in\n`active` for each of them). Returns the indices "
    "of those whose tensors do not share one dense\nlayout; nothing has happened then.");

static PyObject *step(PyObject *module, PyObject *args)
{
    (void)module;
    Lists lists;
    PyObject *matrices[MATRICES], **x = lists.tensors;
    PyTypeObject *list = &PyList_Type;
    double inverse_scale;
    int threads, phase;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!O!O!OOOOdii", list, &x[W], list, &x[G], list,
            &x[M], list, &x[V], list, &x[PREVIOUS], list, &x[SLICE], list, &lists.columns, list,
            &lists.blocks, list, &lists.seeds, list, &lists.ratios, list, &lists.active,
            &matrices[OPTIONS], &matrices[TRAITS], &matrices[MEMORY], &matrices[RECORD],
            &inverse_scale, &threads, &phase))
        return NULL;
    return update(&lists, matrices, false, inverse_scale, threads, phase);
}

PyDoc_STRVAR(turn_doc,
    "turn(w, g, m, columns, blocks, active, options, traits, memory, record, inverse_scale, "
    "threads, phase)\n\nThe same for weights that turn, whose passes are phase 0 and 2; the caller of "
    "a single pass applies\nthe laws.");

static PyObject *turn(PyObject *module, PyObject *args)
{
    (void)module;
    Lists lists = {0};
    PyObject *matrices[MATRICES], **x = lists.tensors;
    PyTypeObject *list = &PyList_Type;
    double inverse_scale;
    int threads, phase;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!OOOOdii", list, &x[W], list, &x[G], list, &x[M], list,
            &lists.columns, list, &lists.blocks, list, &lists.active, &matrices[OPTIONS],
            &matrices[TRAITS], &matrices[MEMORY], &matrices[RECORD], &inverse_scale, &threads,
            &phase))
        return NULL;
    return update(&lists, matrices, true, inverse_scale, threads, phase);
}

PyDoc_STRVAR(laws_doc,
    "laws(options, traits, memory, record, active, turns)\n\nThe laws alone, on the sums that the "
    "record holds; for tests.");

static PyObject *laws(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *matrices[MATRICES], *active;
    int turns;
    Table table = {0};
    if (!PyArg_ParseTuple(args, "OOOOO!p", &matrices[OPTIONS], &matrices[TRAITS],
            &matrices[MEMORY], &matrices[RECORD], &PyList_Type, &active, &turns))
        return NULL;
    PyObject *kept = PyList_New(0);
    const bool good = kept && read_table(matrices, turns, &table, kept);
    Py_XDECREF(kept);
    if (!good)
        return NULL;
    if (PyList_Size(active) != table.columns) {
        PyErr_SetString(PyExc_ValueError, "expected one flag per block");
        return NULL;
    }
    for (int64_t column = 0; column < table.columns; column++) {
        const bool here = PyList_GetItem(active, column) == Py_True;
        Law law;
        gather(&table, column, OPTIONS, MATRICES, &law);
        Row *row = &law.adamo.row;
        const double products[] = {row->uw, row->uu};
        apply_law(&law, turns, turns ? APPLY : MOMENTS, here);
        if (!turns) {
            row->uw = products[0];
            row->uu = products[1];
            apply_law(&law, turns, APPLY, here);
        }
        scatter(&table, column, &law);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc,
    "use(version=-1, helpers=False)\n\nFor tests: which version of the passes to take, 0 portable, 1 "
    "AVX2, -1 the best of this\nmachine; and whether to use own helper threads in place of OpenMP's.");

static PyObject *use(PyObject *module, PyObject *args)
{
    (void)module;
    int wanted = -1, helpers = 0;
    if (!PyArg_ParseTuple(args, "|ip", &wanted, &helpers))
        return NULL;
    version = wanted < 0 ? best_version() : (int)min(wanted, best_version());
    find_openmp();
    if (helpers)
        openmp = NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"step", step, METH_VARARGS, step_doc},
    {"turn", turn, METH_VARARGS, turn_doc},
    {"laws", laws, METH_VARARGS, laws_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    (void)module;
    if (!connect_torch())
        return -1;
    version = best_version();
    prepare_threads();
    return 0;
}

static PyModuleDef_Slot slots_of_module[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernel",
    .m_doc = "One step of AdamO or AngularAdamW on the CPU.",
    .m_methods = methods,
    .m_slots = slots_of_module,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}
