/* Torch tensors seen from C, without torch's headers.

   torch.Tensor carries a table of C functions, DLPack's exchange interface, one of which fills in
   a DLTensor (pointer, type, shape, strides) for a Python tensor in a few nanoseconds. An
   older torch has no table, but makes a capsule with a DLTensor, in a microsecond. The structures
   below are that standard's, version 1.x: https://dmlc.github.io/dlpack/latest/ */

#ifndef ADAMO_TENSORS_H
#define ADAMO_TENSORS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    void *data;
    struct { int32_t type, index; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *older;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*view)(void *object, DLTensor *out); /* dltensor_from_py_object_no_sync */
    void *current_work_stream;
} DLPackExchangeAPI;

enum { DL_CPU = 1, DL_CUDA_HOST = 3, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 } Type;

static const DLPackExchangeAPI *exchange; /* NULL: this torch has no table */
static PyObject *to_dlpack;               /* torch's function that makes a capsule */
static PyTypeObject *tensor_type;

/* Find what torch offers; false with a Python error when it is nothing we know. */
static bool connect_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch.utils.dlpack");
    to_dlpack = torch ? PyObject_GetAttrString(torch, "to_dlpack") : NULL;
    Py_XDECREF(torch);
    torch = to_dlpack ? PyImport_ImportModule("torch") : NULL;
    PyObject *tensor = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    Py_XDECREF(torch);
    if (!tensor)
        return false;
    tensor_type = (PyTypeObject *)tensor; /* kept for good, as torch is */
    PyObject *capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return true;
    }
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (exchange && (exchange->version.major != 1 || !exchange->view)) {
        PyErr_SetString(PyExc_ImportError, "this torch has another version of DLPack than 1.x");
        return false;
    }
    return exchange != NULL;
}

/* The same without the table. The shape lives in the capsule, and the capsule in the list `kept`. */
static bool view_of_capsule(PyObject *object, DLTensor *tensor, PyObject *kept)
{
    PyObject *capsule = PyObject_CallFunctionObjArgs(to_dlpack, object, NULL);
    const DLTensor *seen = capsule ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;
    const bool good = seen && PyList_Append(kept, capsule) == 0;
    if (good)
        *tensor = *seen; /* the first entry of a DLManagedTensor */
    Py_XDECREF(capsule);
    return good;
}

/* What `object` holds; false with a Python error when it is no CPU tensor of a type we know. */
static bool view(PyObject *object, DLTensor *tensor, Type *type, PyObject *kept)
{
    if (!PyType_IsSubtype(Py_TYPE(object), tensor_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a torch.Tensor");
        return false;
    }
    if (exchange ? exchange->view(object, tensor) != 0 : !view_of_capsule(object, tensor, kept))
        return false;
    tensor->data = (char *)tensor->data + tensor->byte_offset;
    const int code = tensor->dtype.code, bits = tensor->dtype.bits;
    if (code == DL_FLOAT && bits == 32)
        *type = FLOAT32;
    else if (code == DL_FLOAT && bits == 64)
        *type = FLOAT64;
    else if (code == DL_FLOAT && bits == 16)
        *type = FLOAT16;
    else if (code == DL_BFLOAT && bits == 16)
        *type = BFLOAT16;
    else {
        PyErr_Format(PyExc_TypeError, "unsupported element type (DLPack %d:%d)", code, bits);
        return false;
    }
    const int device = tensor->device.type;
    if ((device != DL_CPU && device != DL_CUDA_HOST) || (uintptr_t)tensor->data % (bits / 8)) {
        PyErr_SetString(PyExc_ValueError, "expected an aligned tensor in CPU memory");
        return false;
    }
    return true;
}

static int64_t numel(const DLTensor *x)
{
    int64_t count = 1;
    for (int d = 0; d < x->ndim; d++)
        count *= x->shape[d];
    return count;
}

static bool is_contiguous(const DLTensor *x)
{
    int64_t expected = 1;
    for (int d = x->ndim - 1; d >= 0; d--) {
        if (x->shape[d] > 1 && x->strides[d] != expected)
            return false;
        expected *= x->shape[d];
    }
    return true;
}

/* Non-overlapping and dense: some order of the dimensions makes it contiguous. */
static bool is_dense(const DLTensor *x)
{
    const int64_t count = numel(x);
    if (count > 0 && !x->data)
        return false;
    int64_t expected = 1;
    for (int found = 1; expected < count && found; ) {
        found = 0;
        for (int d = x->ndim - 1; d >= 0; d--)
            if (x->shape[d] > 1 && x->strides[d] == expected) {
                expected *= x->shape[d];
                found = 1;
            }
    }
    return expected >= count;
}

/* Equal shapes, and the same element at the same place in memory. */
static bool same_layout(const DLTensor *x, const DLTensor *y)
{
    if (x->ndim != y->ndim || (!x->data && numel(x) > 0))
        return false;
    for (int d = 0; d < x->ndim; d++)
        if (x->shape[d] != y->shape[d] || (x->shape[d] > 1 && x->strides[d] != y->strides[d]))
            return false;
    return true;
}

#endif
