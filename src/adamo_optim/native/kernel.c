/* One step of AdamO on the CPU for a list of blocks: pass 1, law 1, pass 2, law 2, pass 3.

   A small block goes through all of it on one thread, so that its later passes find it in cache.
   A large one is split into chunks, which the threads take one by one; whoever finishes the last
   chunk of a pass applies the law and opens the next pass, and nobody waits while another block
   has chunks left. Sums are kept per chunk and added in the order of the chunks: the result is
   the same, bit for bit, for any number of threads.

   tensors.h   reads torch tensors        law.h       the two laws of control.py
   passes.h    the passes over a chunk    threads.h   the helper threads                          */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "law.h"
#include "tensors.h"
#include "threads.h"

enum {
    LANES = 8,        /* partial sums of an inner product */
    TILE = 1024,      /* elements that a pass converts at a time: a multiple of LANES */
    CHUNK = 16 * TILE, /* elements in one task, and in one partial sum */
    WHOLE = 4,        /* a block of at most this many chunks is one task */
};

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct {
    void *data;
    Type type;
} Array;

typedef enum { REDUCE, MOMENTS, APPLY, DONE } Phase;

typedef struct Passes Passes;

typedef struct {
    Array w, g, m, v, previous, sampled; /* previous: g⁻; sampled: the part of g it is of */
    int64_t numel, sampled_numel, chunks;
    bool is_sampled;
    double inverse_scale;                /* what the gradients are multiplied by */
    const Passes *passes;
    int64_t slot;                        /* its place in the vectors of the law */
    Options options;
    Traits traits;
    Memory memory;
    Row *row;
    double *sums;                        /* per chunk */
    Phase phase;
    int64_t tasks, taken, finished;      /* of this phase; guarded by the job's lock */
} Block;

struct Passes {
    void (*reduce)(const Block *, int64_t chunk, double *sums);
    void (*moments)(const Block *, const Row *, int64_t chunk, double *sums);
    void (*apply)(const Block *, const Row *, int64_t chunk);
};

enum { SUMS = 5, PRODUCTS = 2 }; /* what pass 1 and pass 2 reduce */

typedef struct {
    int64_t start, n, end;
} Range;

static inline int64_t min(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

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

/* ---- low precision --------------------------------------------------------------------------- */

static inline float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t x)
{
    return as_float((uint32_t)x << 16);
}

static inline uint16_t to_bfloat16(float x)
{
    const uint32_t bits = as_bits(x), even = bits >> 16 & 1;
    return (uint16_t)(x != x ? 0x7FC0 : (bits + 0x7FFF + even) >> 16);
}

/* The exponent is moved by a multiplication, which also normalises float16's denormals. */
static inline float from_float16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = (uint32_t)(x & 0x7FFF) << 13;
    const uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f);
    const bool special = (x & 0x7FFF) >= 0x7C00; /* infinite or NaN */
    return as_float(sign | (special ? magnitude | 0x7F800000 : finite));
}

/* Denormals are rounded by an addition that pushes their excess bits out of the mantissa. */
static inline uint16_t to_float16(float x)
{
    const uint32_t sign = as_bits(x) >> 16 & 0x8000, bits = as_bits(x) & 0x7FFFFFFF;
    const uint32_t normal = (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
    const uint32_t denormal = as_bits(as_float(bits) + 0.5f) - 0x3F000000;
    const uint32_t magnitude = bits > 0x7F800000 ? 0x7E00
        : bits >= 0x47800000 ? 0x7C00
        : bits < 0x38800000 ? denormal : normal;
    return (uint16_t)(sign | magnitude);
}

/* ---- the passes, for every instruction set and compute type ---------------------------------- */

#define JOIN(name, type, version) JOIN_EXPANDED(name, type, version)
#define JOIN_EXPANDED(name, type, version) name##type##version

#define VERSION portable
#define TARGET
#define WIDTH 2
#define WIDEN_FLOAT(x) ((VECTOR){(x)[0], (x)[1]})
#define LOAD_DOUBLE(x) ((VECTOR){(x)[0], (x)[1]})
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
#define VERSION avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 4
#define WIDEN_FLOAT(x) _mm256_cvtps_pd(_mm_loadu_ps(x))
#define LOAD_DOUBLE(x) _mm256_loadu_pd(x)
#define DOUBLE 0
#include "passes.h"
#define DOUBLE 1
#include "passes.h"

#undef VERSION
#undef TARGET
#undef WIDTH
#undef WIDEN_FLOAT
#undef LOAD_DOUBLE
#define VERSION avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")))
#define WIDTH 8
#define WIDEN_FLOAT(x) _mm512_cvtps_pd(_mm256_loadu_ps(x))
#define LOAD_DOUBLE(x) _mm512_loadu_pd(x)
#define DOUBLE 0
#include "passes.h"
#define DOUBLE 1
#include "passes.h"

static const Passes *const versions[][2] = {
    {&passes_float_portable, &passes_double_portable},
    {&passes_float_avx2, &passes_double_avx2},
    {&passes_float_avx512, &passes_double_avx512},
};

static int best_version(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
static const Passes *const versions[][2] = {{&passes_float_portable, &passes_double_portable}};

static int best_version(void)
{
    return 0;
}
#endif

static int version; /* index into versions */

/* ---- one step of a block --------------------------------------------------------------------- */

static void add_up(const double *parts, int64_t chunks, int count, double *totals)
{
    memset(totals, 0, (size_t)count * sizeof *totals);
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int i = 0; i < count; i++)
            totals[i] += parts[chunk * count + i];
}

/* One chunk of the current pass; pass 2 walks backwards, towards what pass 1 left in cache. */
static void run_chunk(const Block *block, int64_t number)
{
    const Passes *passes = block->passes;
    const int64_t last = block->chunks - 1 - number;
    if (block->phase == REDUCE)
        passes->reduce(block, number, block->sums + number * SUMS);
    else if (block->phase == MOMENTS)
        passes->moments(block, block->row, last, block->sums + last * PRODUCTS);
    else
        passes->apply(block, block->row, number);
}

/* The law that follows the current pass, and with it the next pass. */
static void end_pass(Block *block)
{
    Row *row = block->row;
    if (block->phase == REDUCE) {
        double sums[SUMS];
        add_up(block->sums, block->chunks, SUMS, sums);
        const int64_t sampled = block->sampled_numel > 0 ? block->sampled_numel : 1;
        row->ww = sums[0];
        row->gw = sums[1];
        row->gg = sums[2];
        row->kappa = sums[3] * ((double)block->numel / (double)sampled);
        row->mw = sums[4];
        before(&block->options, &block->traits, &block->memory, true, row);
    } else if (block->phase == MOMENTS) {
        double products[PRODUCTS];
        add_up(block->sums, block->chunks, PRODUCTS, products);
        row->uw = products[0];
        row->uu = products[1];
        after(&block->options, &block->traits, &block->memory, row);
    }
    block->phase++;
    if (!row->live) { /* the guard: the block keeps its weight and its whole state */
        row->uw = row->uu = 0;
        after(&block->options, &block->traits, &block->memory, row);
        block->phase = DONE;
    }
}

static void run_whole(Block *block)
{
    while (block->phase != DONE) {
        for (int64_t chunk = 0; chunk < block->chunks; chunk++)
            run_chunk(block, chunk);
        end_pass(block);
    }
}

/* ---- all blocks on all threads --------------------------------------------------------------- */

typedef struct {
    Block **queue; /* large blocks first, so that small ones fill the gaps at the end */
    int64_t count, first; /* blocks before `first` are done */
    pthread_mutex_t lock;
    pthread_cond_t progress;
} Job;

/* The next task: a block and, if it is split, one of its chunks. NULL: all is done. */
static Block *take(Job *job, int64_t *chunk)
{
    for (;;) {
        bool pending = false;
        for (int64_t i = job->first; i < job->count; i++) {
            Block *block = job->queue[i];
            if (block->taken < block->tasks) {
                *chunk = block->taken++;
                return block;
            }
            if (block->tasks > 0)
                pending = true; /* taken, and not finished */
            else if (!pending)
                job->first = i + 1;
        }
        if (!pending)
            return NULL;
        pthread_cond_wait(&job->progress, &job->lock);
    }
}

static void work(void *argument)
{
    Job *job = argument;
    int64_t chunk;
    pthread_mutex_lock(&job->lock);
    for (Block *block; (block = take(job, &chunk)); ) {
        const bool split = block->tasks > 1;
        pthread_mutex_unlock(&job->lock);
        if (split)
            run_chunk(block, chunk);
        else
            run_whole(block);
        pthread_mutex_lock(&job->lock);
        if (++block->finished == block->tasks) {
            if (split)
                end_pass(block);
            block->taken = block->finished = 0;
            if (block->phase == DONE)
                block->tasks = 0;
            pthread_cond_broadcast(&job->progress);
        }
    }
    pthread_mutex_unlock(&job->lock);
}

static bool run(Block *blocks, int64_t count, int threads)
{
    int64_t chunks = 0, numel = 0;
    for (int64_t i = 0; i < count; i++) {
        blocks[i].chunks = (blocks[i].numel + CHUNK - 1) / CHUNK;
        blocks[i].tasks = blocks[i].chunks > WHOLE ? blocks[i].chunks : 1;
        chunks += blocks[i].chunks;
        numel += blocks[i].numel;
    }
    double *sums = calloc((size_t)chunks * SUMS + 1, sizeof *sums);
    Job job = {.queue = calloc((size_t)count + 1, sizeof *job.queue)};
    if (sums && job.queue) {
        double *next = sums;
        for (int large = 1; large >= 0; large--)
            for (int64_t i = 0; i < count; i++)
                if ((blocks[i].tasks > 1) == large) {
                    job.queue[job.count++] = &blocks[i];
                    blocks[i].sums = next;
                    next += blocks[i].chunks * SUMS;
                }
        pthread_mutex_init(&job.lock, NULL);
        pthread_cond_init(&job.progress, NULL);
        /* waking a thread costs as much as a few chunks */
        parallel((int)min(threads, 1 + numel / (WHOLE * CHUNK)), work, &job);
        pthread_cond_destroy(&job.progress);
        pthread_mutex_destroy(&job.lock);
    }
    const bool enough_memory = sums && job.queue;
    free(sums);
    free(job.queue);
    return enough_memory;
}

/* ---- Python ---------------------------------------------------------------------------------- */

/* A vector of the law, float64 (or float32 for the step count), one entry per block. */
typedef struct {
    char *data;
    int64_t stride;
    Type type;
} Vector;

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

enum {
    OPTIONS = sizeof(Options) / sizeof(double),
    TRAITS = sizeof(Traits) / sizeof(double),
    MEMORY = sizeof(Memory) / sizeof(double),
    ROW = sizeof(Row) / sizeof(double),
};

/* The vectors of the law, and the rows of the record. */
typedef struct {
    int64_t count; /* blocks */
    Vector options[OPTIONS], traits[TRAITS], memory[MEMORY];
    Row *rows;
} Table;

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
    if (x.ndim != 2 || x.shape[1] != ROW || type != FLOAT64 || x.strides[1] != 1
        || (x.shape[0] > 1 && x.strides[0] != ROW)) {
        PyErr_Format(PyExc_ValueError, "expected rows of %d numbers of type float64", (int)ROW);
        return false;
    }
    table->count = x.shape[0];
    table->rows = x.data;
    return read_vectors(options, OPTIONS, table->count, table->options)
        && read_vectors(traits, TRAITS, table->count, table->traits)
        && read_vectors(memory, MEMORY, table->count, table->memory);
}

/* The scalars of a slot; structures of doubles are filled like arrays. */
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

/* Fill in the tensors of a block. `odd` is set when a layout does not fit; errors return false. */
static bool read_block(Block *block, PyObject *lists[6], Py_ssize_t i, bool *odd)
{
    enum { W, G, M, V, PREVIOUS, SAMPLED };
    DLTensor x[6];
    Type type[6];
    PyObject *previous = PyList_GetItem(lists[PREVIOUS], i);
    if (!previous)
        return false;
    const int count = previous == Py_None ? PREVIOUS : SAMPLED + 1;
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
    *odd = !is_dense(&x[W]) || !same_layout(&x[G], &x[W]) || !same_layout(&x[M], &x[W])
        || !same_layout(&x[V], &x[W]);
    block->w = (Array){x[W].data, type[W]};
    block->g = (Array){x[G].data, type[G]};
    block->m = (Array){x[M].data, real};
    block->v = (Array){x[V].data, real};
    block->numel = numel(&x[W]);
    block->is_sampled = true;
    block->passes = versions[version][real == FLOAT64];
    if (count > PREVIOUS) {
        block->previous = (Array){x[PREVIOUS].data, type[PREVIOUS]};
        block->sampled = (Array){x[SAMPLED].data, type[SAMPLED]};
        block->sampled_numel = numel(&x[PREVIOUS]);
        block->is_sampled = block->sampled.data != block->g.data || block->numel != block->sampled_numel;
        *odd = *odd || !is_dense(&x[PREVIOUS]) || !same_layout(&x[SAMPLED], &x[PREVIOUS])
            || block->sampled_numel > block->numel;
    }
    return true;
}

/* All blocks; a list of those with an odd layout (new reference), NULL on error. */
static PyObject *read_blocks(
    Block *blocks, PyObject *lists[6], PyObject *slots, const Table *table, double inverse_scale)
{
    PyObject *odd_ones = PyList_New(0);
    const Py_ssize_t count = PyList_Size(slots);
    for (Py_ssize_t i = 0; odd_ones && i < count; i++) {
        bool odd = false;
        const long slot = PyLong_AsLong(PyList_GetItem(slots, i));
        if (!PyErr_Occurred() && (slot < 0 || slot >= table->count))
            PyErr_SetString(PyExc_IndexError, "slot out of range");
        if (PyErr_Occurred() || !read_block(&blocks[i], lists, i, &odd)) {
            Py_DECREF(odd_ones);
            return NULL;
        }
        blocks[i].slot = slot;
        blocks[i].inverse_scale = inverse_scale;
        blocks[i].row = &table->rows[slot];
        gather(table, slot, &blocks[i].options, &blocks[i].traits, &blocks[i].memory);
        if (odd) {
            PyObject *index = PyLong_FromSsize_t(i);
            if (!index || PyList_Append(odd_ones, index))
                Py_CLEAR(odd_ones);
            Py_XDECREF(index);
        }
    }
    return odd_ones;
}

/* Blocks without a gradient keep their memory; the law still fills in their rows. */
static void idle(const Table *table, int64_t slot)
{
    Options options;
    Traits traits;
    Memory memory;
    gather(table, slot, &options, &traits, &memory);
    memset(&table->rows[slot], 0, sizeof(Row));
    before(&options, &traits, &memory, false, &table->rows[slot]);
    after(&options, &traits, &memory, &table->rows[slot]);
}

PyDoc_STRVAR(step_doc,
    "step(w, g, m, v, previous, sampled, slots, options, traits, memory, rows, inverse_scale, "
    "threads)\n\nOne step of the blocks. Returns the indices of blocks whose tensors do not share "
    "one dense layout;\nnothing has happened then.");

static PyObject *step(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *lists[6], *slots, *options, *traits, *memory, *rows;
    double inverse_scale;
    int threads;
    PyTypeObject *list = &PyList_Type;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!OOOOdi", list, &lists[0], list, &lists[1], list,
            &lists[2], list, &lists[3], list, &lists[4], list, &lists[5], list, &slots, &options,
            &traits, &memory, &rows, &inverse_scale, &threads))
        return NULL;
    Table table;
    if (!read_table(options, traits, memory, rows, &table))
        return NULL;
    const Py_ssize_t count = PyList_Size(slots);
    Block *blocks = calloc((size_t)count + 1, sizeof *blocks);
    if (!blocks)
        return PyErr_NoMemory();
    PyObject *odd = read_blocks(blocks, lists, slots, &table, inverse_scale);
    if (odd && PyList_Size(odd) == 0) {
        bool enough_memory;
        Py_BEGIN_ALLOW_THREADS
        for (int64_t slot = 0, i = 0; slot < table.count; slot++)
            if (i < count && blocks[i].slot == slot)
                i++;
            else
                idle(&table, slot);
        enough_memory = run(blocks, count, threads);
        if (enough_memory)
            for (Py_ssize_t i = 0; i < count; i++)
                scatter(&table, blocks[i].slot, &blocks[i].memory);
        Py_END_ALLOW_THREADS
        if (!enough_memory) {
            Py_CLEAR(odd);
            PyErr_NoMemory();
        }
    }
    free(blocks);
    return odd;
}

PyDoc_STRVAR(law_doc,
    "law(options, traits, memory, rows, active)\n\nThe two laws alone, on the sums that the rows "
    "hold; for tests.");

static PyObject *law(PyObject *module, PyObject *args)
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
    for (int64_t slot = 0; slot < table.count; slot++) {
        Options o;
        Traits t;
        Memory state;
        const bool present = PyObject_IsTrue(PyList_GetItem(active, slot)) == 1;
        gather(&table, slot, &o, &t, &state);
        before(&o, &t, &state, present, &table.rows[slot]);
        after(&o, &t, &state, &table.rows[slot]);
        scatter(&table, slot, &state);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc,
    "use(version)\n\nTake this version of the passes from now on: 0 portable, 1 AVX2, 2 AVX-512, at "
    "most what the\nmachine has; for tests. Returns the one used before.");

static PyObject *use(PyObject *module, PyObject *args)
{
    (void)module;
    const int before_this = version;
    int wanted;
    if (!PyArg_ParseTuple(args, "i", &wanted))
        return NULL;
    version = wanted < 0 ? 0 : wanted > best_version() ? best_version() : wanted;
    return PyLong_FromLong(before_this);
}

static PyMethodDef methods[] = {
    {"step", step, METH_VARARGS, step_doc},
    {"law", law, METH_VARARGS, law_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    if (!connect_torch())
        return -1;
    version = best_version();
    prepare_for_fork();
    return PyModule_AddIntConstant(module, "ROW", ROW);
}

static PyModuleDef_Slot slots_of_module[] = {{Py_mod_exec, execute}, {0, NULL}};

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
