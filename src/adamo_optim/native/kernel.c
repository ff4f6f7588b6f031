/* One step of AdamO on the CPU for a list of blocks: pass 1, law 1, pass 2, law 2, pass 3.

   A small block goes through all of it on one thread, so that its later passes find it in cache.
   A large one is split into chunks, which the threads take one by one; whoever finishes the last
   chunk of a pass applies the law and opens the next pass, and nobody waits while another block
   has something to do. Sums are kept per chunk and added in the order of the chunks: the result
   is the same, bit for bit, for any number of threads and any instruction set.

   Of a sharded parameter a block is this process's shard. Then Python calls one pass at a time and
   adds up the sums of all processes in between, and the laws come before the pass that needs them.

     law.h       the two laws of control.py     tensors.h   reads torch tensors
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
    SUMS = 5,          /* what pass 1 reduces */
    PRODUCTS = 2,      /* what pass 2 reduces */
};

/* ---- blocks and chunks ------------------------------------------------------------------------ */

typedef struct {
    void *data;
    Type type;
} Array;

typedef struct Passes Passes;

typedef struct {
    Array w, g, m, v;
    Array previous, slice;          /* g⁻, and the part of g that it is of */
    int64_t numel, slice_numel;     /* slice_numel = 0: no g⁻ */
    bool whole_previous;            /* the slice is g itself */
    double ratio_of_samples;        /* what κ of the slice is multiplied by */
    double inverse_scale;           /* what gradients are multiplied by */
    bool stochastic;                /* bfloat16 weights are rounded at random, */
    uint32_t number;                /* with this and the step count as the key */

    int64_t slot;                   /* its place in the vectors of the law */
    Options options;
    Traits traits;
    Memory memory;
    Row *row;

    const Passes *passes;
    int64_t chunks;
    double *sums;                   /* per chunk */
    enum { REDUCE, MOMENTS, APPLY, DONE } phase;
    bool alone;                     /* this pass only: its sums are not the whole block's */
    int64_t tasks, taken, finished; /* of this phase; 0 tasks: done. Guarded by the job's lock. */
} Block;

struct Passes {
    void (*reduce)(const Block *, int64_t chunk, double *sums);
    void (*moments)(const Block *, const Row *, int64_t chunk, double *sums);
    void (*apply)(const Block *, const Row *, int64_t chunk);
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

/* One chunk of the current pass. Pass 2 goes backwards: it starts with what pass 1 left in cache. */
static void run_chunk(const Block *block, int64_t chunk)
{
    const Passes *passes = block->passes;
    const int64_t mirrored = block->chunks - 1 - chunk;
    if (block->phase == REDUCE)
        passes->reduce(block, chunk, block->sums + chunk * SUMS);
    else if (block->phase == MOMENTS)
        passes->moments(block, block->row, mirrored, block->sums + mirrored * PRODUCTS);
    else
        passes->apply(block, block->row, chunk);
}

static void add_up(const Block *block, int count, double *totals)
{
    memset(totals, 0, (size_t)count * sizeof *totals);
    for (int64_t chunk = 0; chunk < block->chunks; chunk++)
        for (int i = 0; i < count; i++)
            totals[i] += block->sums[chunk * count + i];
}

/* The law that follows the current pass, and on to the next pass. */
static void end_pass(Block *block)
{
    Row *row = block->row;
    double totals[SUMS];
    if (block->phase == REDUCE) {
        add_up(block, SUMS, totals);
        row->ww = totals[0];
        row->gw = totals[1];
        row->gg = totals[2];
        row->kappa = totals[3] * block->ratio_of_samples;
        row->mw = totals[4];
        row->uw = row->uu = 0;
    } else if (block->phase == MOMENTS) {
        add_up(block, PRODUCTS, totals);
        row->uw = totals[0];
        row->uu = totals[1];
    }
    if (block->alone) {
        block->phase = DONE;
        return;
    }
    if (block->phase == REDUCE)
        before(&block->options, &block->traits, &block->memory, true, row);
    if (block->phase == MOMENTS || !row->live)
        after(&block->options, &block->traits, &block->memory, row);
    /* not live, the guard's decision: the block keeps its weight and its whole state */
    block->phase = row->live ? block->phase + 1 : DONE;
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

/* ---- the vectors of the law --------------------------------------------------------------------- */

enum {
    OPTIONS = sizeof(Options) / sizeof(double),
    TRAITS = sizeof(Traits) / sizeof(double),
    MEMORY = sizeof(Memory) / sizeof(double),
    ROW = sizeof(Row) / sizeof(double),
};

typedef struct {
    char *data;
    int64_t stride;
    Type type; /* FLOAT64, or FLOAT32 for step counts */
} Vector;

typedef struct {
    int64_t count; /* blocks */
    Vector options[OPTIONS], traits[TRAITS], memory[MEMORY];
    Row *rows;
} Table;

static double get(const Vector *vector, int64_t slot)
{
    const void *entry = vector->data + slot * vector->stride;
    return vector->type == FLOAT64 ? *(const double *)entry : *(const float *)entry;
}

static void set(const Vector *vector, int64_t slot, double value)
{
    void *entry = vector->data + slot * vector->stride;
    if (vector->type == FLOAT64)
        *(double *)entry = value;
    else
        *(float *)entry = (float)value;
}

static bool read_vectors(PyObject *tuple, int length, int64_t count, Vector *vectors)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != length) {
        PyErr_Format(PyExc_ValueError, "expected a tuple of %d vectors", length);
        return false;
    }
    for (int i = 0; i < length; i++) {
        DLTensor x;
        Type type;
        if (!view(PyTuple_GetItem(tuple, i), &x, &type))
            return false;
        if (x.ndim != 1 || x.shape[0] != count || (type != FLOAT64 && type != FLOAT32)) {
            PyErr_SetString(PyExc_ValueError, "expected a vector with one number per block");
            return false;
        }
        vectors[i] = (Vector){x.data, x.strides[0] * (type == FLOAT64 ? 8 : 4), type};
    }
    return true;
}

static bool read_table(
    PyObject *options, PyObject *traits, PyObject *memory, PyObject *rows, Table *table)
{
    DLTensor x;
    Type type;
    if (!view(rows, &x, &type))
        return false;
    if (x.ndim != 2 || x.shape[1] != ROW || type != FLOAT64 || !is_contiguous(&x)) {
        PyErr_Format(PyExc_ValueError, "expected rows of %d numbers of type float64", (int)ROW);
        return false;
    }
    table->count = x.shape[0];
    table->rows = x.data;
    return read_vectors(options, OPTIONS, table->count, table->options)
        && read_vectors(traits, TRAITS, table->count, table->traits)
        && read_vectors(memory, MEMORY, table->count, table->memory);
}

/* The scalars of one slot. Structures of doubles are filled and read like arrays. */
static void gather(const Table *table, int64_t slot, Options *o, Traits *traits, Memory *memory)
{
    for (int i = 0; i < OPTIONS; i++)
        ((double *)o)[i] = get(&table->options[i], slot);
    for (int i = 0; i < TRAITS; i++)
        ((double *)traits)[i] = get(&table->traits[i], slot);
    for (int i = 0; i < MEMORY; i++)
        ((double *)memory)[i] = get(&table->memory[i], slot);
}

static void scatter(const Table *table, int64_t slot, const Memory *memory)
{
    for (int i = 0; i < MEMORY; i++)
        set(&table->memory[i], slot, ((const double *)memory)[i]);
}

/* The laws of one slot, on the sums in its row. */
static void apply_laws(const Table *table, int64_t slot, bool active)
{
    Options options;
    Traits traits;
    Memory memory;
    gather(table, slot, &options, &traits, &memory);
    before(&options, &traits, &memory, active, &table->rows[slot]);
    after(&options, &traits, &memory, &table->rows[slot]);
    scatter(table, slot, &memory);
}

/* ---- blocks from Python ------------------------------------------------------------------------- */

enum { W, G, M, V, PREVIOUS, SLICE, TENSORS };

typedef struct {
    PyObject *slots, *seeds, *ratios; /* lists with an entry per block */
} Numbers;

/* The tensors of block i. `odd` is set when their layouts do not fit; an error returns false. */
static bool read_block(Block *block, PyObject *lists[TENSORS], Py_ssize_t i, bool *odd)
{
    DLTensor x[TENSORS];
    Type type[TENSORS];
    PyObject *previous = PyList_GetItem(lists[PREVIOUS], i);
    const int count = previous == Py_None ? PREVIOUS : TENSORS;
    for (int k = 0; k < count; k++) {
        PyObject *tensor = PyList_GetItem(lists[k], i);
        if (!tensor || !view(tensor, &x[k], &type[k]))
            return false;
    }
    const Type real = type[W] == FLOAT64 ? FLOAT64 : FLOAT32;
    if (type[M] != real || type[V] != real) {
        PyErr_SetString(PyExc_TypeError, "exp_avg and exp_avg_sq must have the compute dtype");
        return false;
    }
    block->w = (Array){x[W].data, type[W]};
    block->g = (Array){x[G].data, type[G]};
    block->m = (Array){x[M].data, type[M]};
    block->v = (Array){x[V].data, type[V]};
    block->numel = numel(&x[W]);
    block->passes = versions[version][real == FLOAT64];
    *odd = !is_dense(&x[W]) || !same_layout(&x[G], &x[W]) || !same_layout(&x[M], &x[W])
        || !same_layout(&x[V], &x[W]);
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
    PyObject *slot = PyList_GetItem(numbers->slots, i), *seed = PyList_GetItem(numbers->seeds, i);
    PyObject *ratio = PyList_GetItem(numbers->ratios, i);
    if (!slot || !seed || !ratio)
        return false;
    block->ratio_of_samples = PyFloat_AsDouble(ratio);
    block->slot = PyLong_AsLong(slot);
    block->stochastic = seed != Py_None && block->w.type == BFLOAT16;
    block->number = block->stochastic ? (uint32_t)PyLong_AsUnsignedLongMask(seed) : 0;
    if (!PyErr_Occurred() && (block->slot < 0 || block->slot >= count))
        PyErr_SetString(PyExc_IndexError, "a slot is out of range");
    return !PyErr_Occurred();
}

/* All blocks. Returns the list of the odd ones, NULL on error. */
static PyObject *read_blocks(
    Block *blocks, PyObject *lists[TENSORS], const Numbers *numbers, const Table *table,
    double inverse_scale)
{
    PyObject *odd_ones = PyList_New(0);
    for (Py_ssize_t i = 0; odd_ones && i < PyList_Size(numbers->slots); i++) {
        Block *block = &blocks[i];
        bool odd = false, bad = !read_block(block, lists, i, &odd);
        bad = bad || !read_numbers(block, numbers, i, table->count);
        if (!bad) {
            block->inverse_scale = inverse_scale;
            block->row = &table->rows[block->slot];
            gather(table, block->slot, &block->options, &block->traits, &block->memory);
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

/* One step: what the blocks' passes and laws are run for. Slots without a block: the laws alone. */
static bool run_step(Block *blocks, int64_t count, const Table *table, int threads)
{
    memset(table->rows, 0, (size_t)table->count * sizeof *table->rows);
    for (int64_t slot = 0, i = 0; slot < table->count; slot++)
        if (i < count && blocks[i].slot == slot)
            i++;
        else
            apply_laws(table, slot, false);
    const bool enough_memory = run(blocks, count, threads);
    for (int64_t i = 0; i < count; i++)
        scatter(table, blocks[i].slot, &blocks[i].memory);
    return enough_memory;
}

/* One pass alone, after the law that it needs for every slot; `active` is for law 1. */
static bool run_pass(
    Block *blocks, int64_t count, const Table *table, int threads, int phase, const bool *active)
{
    Options options;
    Traits traits;
    Memory memory;
    if (phase == REDUCE)
        memset(table->rows, 0, (size_t)table->count * sizeof *table->rows);
    for (int64_t slot = 0; phase != REDUCE && slot < table->count; slot++) {
        gather(table, slot, &options, &traits, &memory);
        if (phase == MOMENTS)
            before(&options, &traits, &memory, active[slot], &table->rows[slot]);
        else
            after(&options, &traits, &memory, &table->rows[slot]);
        scatter(table, slot, &memory);
    }
    for (int64_t i = 0; i < count; i++) {
        blocks[i].alone = true;
        blocks[i].phase = phase == REDUCE || blocks[i].row->live ? phase : DONE;
    }
    return run(blocks, count, threads);
}

PyDoc_STRVAR(step_doc,
    "step(w, g, m, v, previous, slices, slots, seeds, ratios, options, traits, memory, rows, "
    "inverse_scale, threads, phase=3, active=[])\n\nOne step of the blocks, or one of its passes: "
    "phase 0, 1 or 2, with one flag per slot for 1.\nReturns the indices of those whose tensors do "
    "not share one dense layout; nothing has happened then.");

static PyObject *step(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *lists[TENSORS], *options, *traits, *memory, *rows, *flags = NULL;
    PyTypeObject *list = &PyList_Type;
    Numbers numbers;
    double inverse_scale;
    int threads, phase = DONE;
    Table table;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!OOOOdi|iO!", list, &lists[W], list, &lists[G],
            list, &lists[M], list, &lists[V], list, &lists[PREVIOUS], list, &lists[SLICE], list,
            &numbers.slots, list, &numbers.seeds, list, &numbers.ratios, &options, &traits, &memory,
            &rows, &inverse_scale, &threads, &phase, list, &flags)
        || !read_table(options, traits, memory, rows, &table))
        return NULL;
    if (phase < REDUCE || phase > DONE
        || (phase == MOMENTS && (!flags || PyList_Size(flags) != table.count))) {
        PyErr_SetString(PyExc_ValueError, "expected a phase from 0 to 3, and flags for phase 1");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(numbers.slots);
    Block *blocks = calloc((size_t)count + 1, sizeof *blocks);
    bool *active = calloc((size_t)table.count + 1, sizeof *active);
    PyObject *odd_ones = NULL;
    if (blocks && active)
        odd_ones = read_blocks(blocks, lists, &numbers, &table, inverse_scale);
    else
        PyErr_NoMemory();
    for (int64_t slot = 0; phase == MOMENTS && active && slot < table.count; slot++)
        active[slot] = PyList_GetItem(flags, slot) == Py_True;
    if (odd_ones && PyList_Size(odd_ones) == 0) {
        bool enough_memory;
        Py_BEGIN_ALLOW_THREADS
        enough_memory = phase == DONE
            ? run_step(blocks, count, &table, threads)
            : run_pass(blocks, count, &table, threads, phase, active);
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

PyDoc_STRVAR(laws_doc,
    "laws(options, traits, memory, rows, active)\n\nThe two laws alone, on the sums that the rows "
    "hold; for tests.");

static PyObject *laws(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *options, *traits, *memory, *rows, *active;
    Table table;
    if (!PyArg_ParseTuple(args, "OOOOO!", &options, &traits, &memory, &rows, &PyList_Type, &active)
        || !read_table(options, traits, memory, rows, &table))
        return NULL;
    if (PyList_Size(active) != table.count) {
        PyErr_SetString(PyExc_ValueError, "expected one flag per block");
        return NULL;
    }
    for (int64_t slot = 0; slot < table.count; slot++)
        apply_laws(&table, slot, PyList_GetItem(active, slot) == Py_True);
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
    .m_doc = "One step of AdamO on the CPU.",
    .m_methods = methods,
    .m_slots = slots_of_module,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}
