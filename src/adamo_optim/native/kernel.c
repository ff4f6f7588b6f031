/* One step on the CPU for a list of blocks. AdamO: pass 1, law, pass 2, law, pass 3. A weight that
   turns: pass 1, law, pass 2.

   A small block goes through all of it on one thread, so that its later passes find it in cache.
   A large one is split into chunks, which the threads take one by one; whoever finishes the last
   chunk of a pass applies the law and opens the next pass, and nobody waits while another block
   has something to do. Sums are kept per chunk and added in the order of the chunks: the result
   is the same, bit for bit, for any number of threads and any instruction set.

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
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "floats.h"
#include "law.h"
#include "tensors.h"
#include "threads.h"

enum {
    LANES = 8,         /* partial sums of an inner product */
    TILE = 128,        /* elements that a pass handles at a time; a multiple of LANES */
    CHUNK = 16384,     /* elements of a task, and of one term in a total; a multiple of TILE */
    WHOLE = 4,         /* a block of at most this many chunks is a single task */
    SUMS = 5,          /* what pass 1 reduces: the first fields of a row, ww to mw */
    PRODUCTS = 2,      /* what pass 2 reduces: uw and uu */
    TURN_SUMS = 4,     /* what pass 1 reduces of a weight that turns: ww to mm */
};

/* ---- blocks and chunks ------------------------------------------------------------------------ */

typedef struct {
    void *data;
    Type type;
} Array;

typedef struct Passes Passes;

/* The numbers of one block, all of them doubles: they are copied from and to columns of matrices. */
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

typedef union {
    AdamO adamo;
    Turning turning;
    double numbers[sizeof(AdamO) / sizeof(double)];
} Law;

typedef enum { REDUCE, MOMENTS, APPLY, DONE } Phase;

typedef struct {
    Array w, g, m, v;
    Array previous, slice;          /* g⁻, and the part of g that it is of */
    int64_t numel, slice_numel;     /* slice_numel = 0: no g⁻ */
    bool whole_previous;            /* the slice is g itself */
    double ratio_of_samples;        /* what κ of the slice is multiplied by */
    double inverse_scale;           /* what gradients are multiplied by */
    bool stochastic;                /* bfloat16 weights are rounded at random, */
    uint32_t number;                /* with this and the step count as the key */

    bool turns;                     /* which of the two optimizers it is updated by */
    int64_t slot;                   /* its column in the matrices */
    Law law;

    const Passes *passes;
    int64_t chunks;
    double *sums;                   /* per chunk */
    Phase phase;
    bool alone;                     /* this pass only: its sums are not the whole block's */
    int64_t tasks, taken, finished; /* of this phase; 0 tasks: done. Guarded by the job's lock. */
} Block;

struct Passes {
    void (*reduce)(const Block *, int64_t chunk, double *sums);
    void (*moments)(const Block *, int64_t chunk, double *sums);
    void (*apply)(const Block *, int64_t chunk);
    void (*turn_reduce)(const Block *, int64_t chunk, double *sums);
    void (*turn_apply)(const Block *, int64_t chunk);
};

typedef struct {
    int64_t start, n, end;
} Range;

static inline int64_t min(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

/* The tiles of one chunk of an array; past the last one, n <= 0. */
static inline Range first_tile(int64_t numel, int64_t chunk)
{
    const int64_t start = chunk * CHUNK, end = min(start + CHUNK, numel);
    return (Range){start, min(TILE, end - start), end};
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

static const Passes *const versions[][2] = {
    {&passes_float_portable, &passes_double_portable},
    {&passes_float_avx2, &passes_double_avx2},
};

static int best_version(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
static const Passes *const versions[][2] = {{&passes_float_portable, &passes_double_portable}};

static int best_version(void)
{
    return 0;
}
#endif

static int version; /* the one in use, an index into versions */

/* ---- one block --------------------------------------------------------------------------------- */

/* One chunk of the current pass. The second pass goes backwards: it starts with what the first one
   left in cache. */
static void run_chunk(const Block *block, int64_t chunk)
{
    const Passes *passes = block->passes;
    const int64_t mirrored = block->chunks - 1 - chunk;
    double *sums = block->sums + chunk * SUMS;
    if (block->phase == REDUCE)
        (block->turns ? passes->turn_reduce : passes->reduce)(block, chunk, sums);
    else if (block->phase == MOMENTS)
        passes->moments(block, mirrored, block->sums + mirrored * SUMS);
    else if (block->turns)
        passes->turn_apply(block, mirrored);
    else
        passes->apply(block, chunk);
}

/* Add up what a pass has summed, in the order of the chunks. */
static void add_up(const Block *block, int count, double *totals)
{
    memset(totals, 0, (size_t)count * sizeof *totals);
    for (int64_t chunk = 0; chunk < block->chunks; chunk++)
        for (int i = 0; i < count; i++)
            totals[i] += block->sums[chunk * SUMS + i];
}

/* The law that stands before a pass; false: the guard has decided that the block keeps its weight
   and its whole state. */
static bool apply_law(Block *block, Phase next, bool active)
{
    AdamO *a = &block->law.adamo;
    Turning *t = &block->law.turning;
    if (block->turns) {
        t->row.active = active;
        turn_law(&t->options, &t->traits, &t->memory, &t->row, active);
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

static Phase after(const Block *block)
{
    return block->turns && block->phase == REDUCE ? APPLY : block->phase + 1;
}

/* What the current pass has summed, and on to the next one. */
static void end_pass(Block *block)
{
    AdamO *a = &block->law.adamo;
    if (block->phase == REDUCE && block->turns) {
        add_up(block, TURN_SUMS, &block->law.turning.row.ww);
    } else if (block->phase == REDUCE) {
        add_up(block, SUMS, &a->row.ww);
        a->row.kappa *= block->ratio_of_samples;
    } else if (block->phase == MOMENTS) {
        add_up(block, PRODUCTS, &a->row.uw);
    }
    const Phase next = block->alone ? DONE : after(block);
    block->phase = next == DONE || apply_law(block, next, true) ? next : DONE;
}

static void run_whole(Block *block)
{
    while (block->phase != DONE) {
        for (int64_t chunk = 0; chunk < block->chunks; chunk++)
            run_chunk(block, chunk);
        end_pass(block);
    }
}

/* ---- all blocks on all threads ------------------------------------------------------------------ */

typedef struct {
    Block **queue;        /* large blocks first: small ones fill the gaps at the end */
    int64_t count, first; /* the blocks before `first` are done */
    fenv_t environment;   /* of the caller: rounding, flushing of denormals */
    pthread_mutex_t lock;
    pthread_cond_t progress;
} Job;

/* The next task: a block and, if it is split, its next chunk. NULL: all is done. */
static Block *take(Job *job, int64_t *chunk)
{
    for (;;) {
        bool all_done = true;
        for (int64_t i = job->first; i < job->count; i++) {
            Block *block = job->queue[i];
            if (block->taken < block->tasks) {
                *chunk = block->taken++;
                return block;
            }
            all_done = all_done && block->tasks == 0;
            if (all_done)
                job->first = i + 1;
        }
        if (all_done)
            return NULL;
        pthread_cond_wait(&job->progress, &job->lock);
    }
}

static void work(void *argument)
{
    Job *job = argument;
    int64_t chunk;
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(&job->environment);
    pthread_mutex_lock(&job->lock);
    for (Block *block; (block = take(job, &chunk));) {
        const bool split = block->tasks > 1;
        pthread_mutex_unlock(&job->lock);
        if (split)
            run_chunk(block, chunk);
        else
            run_whole(block);
        pthread_mutex_lock(&job->lock);
        if (++block->finished < block->tasks)
            continue;
        if (split)
            end_pass(block);
        block->taken = block->finished = 0;
        if (block->phase == DONE)
            block->tasks = 0;
        pthread_cond_broadcast(&job->progress);
    }
    pthread_mutex_unlock(&job->lock);
    fesetenv(&environment);
}

/* One step of all blocks; false when there is not enough memory, and nothing has happened. */
static bool run(Block *blocks, int64_t count, int threads)
{
    int64_t chunks = 0, numel = 0;
    for (int64_t i = 0; i < count; i++) {
        blocks[i].chunks = (blocks[i].numel + CHUNK - 1) / CHUNK;
        blocks[i].tasks = blocks[i].chunks > WHOLE ? blocks[i].chunks : 1;
        if (blocks[i].phase == DONE)
            blocks[i].tasks = 0;
        chunks += blocks[i].chunks;
        numel += blocks[i].numel;
    }
    double *sums = calloc((size_t)chunks * SUMS + 1, sizeof *sums), *next = sums;
    Job job = {.queue = calloc((size_t)count + 1, sizeof *job.queue)};
    const bool enough_memory = sums && job.queue;
    if (enough_memory) {
        for (int split = 1; split >= 0; split--)
            for (int64_t i = 0; i < count; i++)
                if ((blocks[i].tasks > 1) == split) {
                    job.queue[job.count++] = &blocks[i];
                    blocks[i].sums = next;
                    next += blocks[i].chunks * SUMS;
                }
        fegetenv(&job.environment);
        pthread_mutex_init(&job.lock, NULL);
        pthread_cond_init(&job.progress, NULL);
        /* to wake a thread takes about as long as a few chunks */
        parallel((int)min(threads, 1 + numel / (WHOLE * CHUNK)), work, &job);
        pthread_cond_destroy(&job.progress);
        pthread_mutex_destroy(&job.lock);
    }
    free(sums);
    free(job.queue);
    return enough_memory;
}

/* ---- the matrices of the law: a row for each number, a column for each block -------------------- */

enum { OPTIONS, TRAITS, MEMORY, RECORD, MATRICES };

typedef struct {
    int64_t columns;
    int64_t rows[MATRICES]; /* how many numbers of a block each holds, in the order of Law */
    double *data[MATRICES];
} Table;

static bool read_table(PyObject *matrices[MATRICES], bool turns, Table *table)
{
    const size_t sizes[2][MATRICES] = {
        {sizeof(Options), sizeof(Traits), sizeof(Memory), sizeof(Row)},
        {sizeof(TurnOptions), sizeof(TurnTraits), sizeof(TurnMemory), sizeof(TurnRow)}};
    for (int k = 0; k < MATRICES; k++) {
        DLTensor x;
        Type type;
        if (!view(matrices[k], &x, &type))
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

static void gather(const Table *table, int64_t slot, Law *law)
{
    double *number = law->numbers;
    for (int k = 0; k < MATRICES; k++)
        for (int64_t row = 0; row < table->rows[k]; row++)
            *number++ = table->data[k][row * table->columns + slot];
}

/* What a step changes: memory and record. */
static void scatter(const Table *table, int64_t slot, const Law *law)
{
    const double *number = law->numbers + table->rows[OPTIONS] + table->rows[TRAITS];
    for (int k = MEMORY; k < MATRICES; k++)
        for (int64_t row = 0; row < table->rows[k]; row++)
            table->data[k][row * table->columns + slot] = *number++;
}

/* ---- blocks from Python ------------------------------------------------------------------------- */

enum { W, G, M, V, PREVIOUS, SLICE, TENSORS };

typedef struct {
    PyObject *slots, *seeds, *ratios; /* lists with an entry per block; a turning one has slots only */
} Numbers;

/* The tensors of block i. `odd` is set when their layouts do not fit; an error returns false. */
static bool read_block(Block *block, PyObject *lists[TENSORS], Py_ssize_t i, bool *odd)
{
    DLTensor x[TENSORS];
    Type type[TENSORS];
    int count = V;
    if (!block->turns)
        count = PyList_GetItem(lists[PREVIOUS], i) == Py_None ? PREVIOUS : TENSORS;
    for (int k = 0; k < count; k++) {
        PyObject *tensor = PyList_GetItem(lists[k], i);
        if (!tensor || !view(tensor, &x[k], &type[k]))
            return false;
    }
    const Type real = type[W] == FLOAT64 ? FLOAT64 : FLOAT32;
    if (!block->turns && (type[M] != real || type[V] != real)) {
        PyErr_SetString(PyExc_TypeError, "exp_avg and exp_avg_sq must have the compute dtype");
        return false;
    }
    block->w = (Array){x[W].data, type[W]};
    block->g = (Array){x[G].data, type[G]};
    block->m = (Array){x[M].data, type[M]};
    block->numel = numel(&x[W]);
    block->passes = versions[version][real == FLOAT64];
    *odd = !is_dense(&x[W]) || !same_layout(&x[G], &x[W]) || !same_layout(&x[M], &x[W]);
    if (count == V)
        return true;
    block->v = (Array){x[V].data, type[V]};
    *odd = *odd || !same_layout(&x[V], &x[W]);
    if (count < TENSORS)
        return true;
    block->previous = (Array){x[PREVIOUS].data, type[PREVIOUS]};
    block->slice = (Array){x[SLICE].data, type[SLICE]};
    block->slice_numel = numel(&x[PREVIOUS]);
    block->whole_previous = x[SLICE].data == x[G].data && block->slice_numel == block->numel;
    *odd = *odd || !is_dense(&x[PREVIOUS]) || !same_layout(&x[SLICE], &x[PREVIOUS])
        || block->slice_numel > block->numel;
    return true;
}

/* The slot of block i, its ratio of samples, and its seed (None: to nearest). */
static bool read_numbers(Block *block, const Numbers *numbers, Py_ssize_t i, int64_t count)
{
    PyObject *slot = PyList_GetItem(numbers->slots, i);
    if (!slot)
        return false;
    block->slot = PyLong_AsLong(slot);
    if (!block->turns) {
        PyObject *seed = PyList_GetItem(numbers->seeds, i);
        PyObject *ratio = PyList_GetItem(numbers->ratios, i);
        if (!seed || !ratio)
            return false;
        block->ratio_of_samples = PyFloat_AsDouble(ratio);
        block->stochastic = seed != Py_None && block->w.type == BFLOAT16;
        block->number = block->stochastic ? (uint32_t)PyLong_AsUnsignedLongMask(seed) : 0;
    }
    if (!PyErr_Occurred() && (block->slot < 0 || block->slot >= count))
        PyErr_SetString(PyExc_IndexError, "a slot is out of range");
    return !PyErr_Occurred();
}

/* All blocks. Returns the list of the odd ones, NULL on error. */
static PyObject *read_blocks(
    Block *blocks, PyObject *lists[TENSORS], const Numbers *numbers, const Table *table, bool turns,
    double inverse_scale)
{
    PyObject *odd_ones = PyList_New(0);
    for (Py_ssize_t i = 0; odd_ones && i < PyList_Size(numbers->slots); i++) {
        Block *block = &blocks[i];
        block->turns = turns;
        bool odd = false, bad = !read_block(block, lists, i, &odd);
        bad = bad || !read_numbers(block, numbers, i, table->columns);
        if (!bad) {
            block->inverse_scale = inverse_scale;
            gather(table, block->slot, &block->law);
        }
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

/* One step of the blocks, or, of sharded ones, one pass after the law that it needs: `active` then
   tells which blocks have a gradient on any rank. Blocks that are not in the list are left alone. */
static bool run_step(Block *blocks, int64_t count, const Table *table, int threads, Phase phase,
                     const bool *active)
{
    if (phase == REDUCE || phase == DONE)
        memset(table->data[RECORD], 0,
               (size_t)(table->rows[RECORD] * table->columns) * sizeof(double));
    for (int64_t i = 0; i < count && phase != DONE; i++) {
        blocks[i].alone = true;
        blocks[i].phase =
            phase == REDUCE || apply_law(&blocks[i], phase, active[i]) ? phase : DONE;
    }
    const bool enough_memory = run(blocks, count, threads);
    for (int64_t i = 0; i < count; i++)
        scatter(table, blocks[i].slot, &blocks[i].law);
    return enough_memory;
}

/* The part of `step` and `turn` that is the same. */
static PyObject *update(
    PyObject *lists[TENSORS], const Numbers *numbers, PyObject *matrices[MATRICES], bool turns,
    double inverse_scale, int threads, int phase, PyObject *flags)
{
    Table table = {0};
    if (!read_table(matrices, turns, &table))
        return NULL;
    const Py_ssize_t count = PyList_Size(numbers->slots);
    const bool needs_flags = phase != REDUCE && phase != DONE;
    if (phase < REDUCE || phase > DONE
        || (needs_flags && (!flags || PyList_Size(flags) != count))) {
        PyErr_SetString(PyExc_ValueError, "expected a phase from 0 to 3, and a flag per block");
        return NULL;
    }
    Block *blocks = calloc((size_t)count + 1, sizeof *blocks);
    bool *active = calloc((size_t)count + 1, sizeof *active);
    PyObject *odd_ones = NULL;
    if (blocks && active)
        odd_ones = read_blocks(blocks, lists, numbers, &table, turns, inverse_scale);
    else
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; needs_flags && active && i < count; i++)
        active[i] = PyList_GetItem(flags, i) == Py_True;
    if (odd_ones && PyList_Size(odd_ones) == 0) {
        bool enough_memory;
        Py_BEGIN_ALLOW_THREADS
        enough_memory = run_step(blocks, count, &table, threads, (Phase)phase, active);
        Py_END_ALLOW_THREADS
        if (!enough_memory) {
            Py_CLEAR(odd_ones);
            PyErr_NoMemory();
        }
    }
    free(blocks);
    free(active);
    return odd_ones;
}

PyDoc_STRVAR(step_doc,
    "step(w, g, m, v, previous, slices, slots, seeds, ratios, options, traits, memory, record, "
    "inverse_scale, threads, phase=3, active=[])\n\nOne step of AdamO's blocks, or one of its "
    "passes: phase 0, 1 or 2, with a flag per block for 1\nand 2. Returns the indices of those "
    "whose tensors do not share one dense layout; nothing has\nhappened then.");

static PyObject *step(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *lists[TENSORS], *matrices[MATRICES], *flags = NULL;
    PyTypeObject *list = &PyList_Type;
    Numbers numbers;
    double inverse_scale;
    int threads, phase = DONE;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!OOOOdi|iO!", list, &lists[W], list, &lists[G],
            list, &lists[M], list, &lists[V], list, &lists[PREVIOUS], list, &lists[SLICE], list,
            &numbers.slots, list, &numbers.seeds, list, &numbers.ratios, &matrices[OPTIONS],
            &matrices[TRAITS], &matrices[MEMORY], &matrices[RECORD], &inverse_scale, &threads,
            &phase, list, &flags))
        return NULL;
    return update(lists, &numbers, matrices, false, inverse_scale, threads, phase, flags);
}

PyDoc_STRVAR(turn_doc,
    "turn(w, g, m, slots, options, traits, memory, record, inverse_scale, threads, phase=3, "
    "active=[])\n\nThe same for weights that turn, whose passes are phase 0 and 2.");

static PyObject *turn(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *lists[TENSORS] = {0}, *matrices[MATRICES], *flags = NULL;
    PyTypeObject *list = &PyList_Type;
    Numbers numbers = {0};
    double inverse_scale;
    int threads, phase = DONE;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OOOOdi|iO!", list, &lists[W], list, &lists[G], list,
            &lists[M], list, &numbers.slots, &matrices[OPTIONS], &matrices[TRAITS],
            &matrices[MEMORY], &matrices[RECORD], &inverse_scale, &threads, &phase, list, &flags))
        return NULL;
    return update(lists, &numbers, matrices, true, inverse_scale, threads, phase, flags);
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
            &matrices[MEMORY], &matrices[RECORD], &PyList_Type, &active, &turns)
        || !read_table(matrices, turns, &table))
        return NULL;
    if (PyList_Size(active) != table.columns) {
        PyErr_SetString(PyExc_ValueError, "expected one flag per block");
        return NULL;
    }
    for (int64_t slot = 0; slot < table.columns; slot++) {
        const bool here = PyList_GetItem(active, slot) == Py_True;
        Block block = {.turns = turns};
        gather(&table, slot, &block.law);
        Row *row = &block.law.adamo.row;
        const double products[] = {row->uw, row->uu};
        apply_law(&block, turns ? APPLY : MOMENTS, here);
        if (!turns) {
            row->uw = products[0];
            row->uu = products[1];
            apply_law(&block, APPLY, here);
        }
        scatter(&table, slot, &block.law);
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
