"""What a step runs in C instead of in many calls of Python: compiled once, by Triton's own builder and into its cache.

What Triton needs to launch kernels, a C compiler and Python's headers, is all that it takes. Tensors are asked through the functions
that torch exports for the code that Inductor compiles. ``native`` is None without a compiler, or if a trial shows anything else than
what is said here; callers then ask torch (runtime/addresses.py, runtime/staging.py).

The function that tells an address throws in C++ for a tensor without storage (sparse, or wrapped by a transform of torch.func, which is
a torch.Tensor too), and C cannot catch it: the process would end. So C asks only what has answered before: the same object over the
same TensorImpl. The others return an error.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Only tensors of these two types are asked, never one that overrides what it says. */
static PyTypeObject *plain, *parameter;
static void *(*data_ptr)(PyObject *);
static int32_t (*get_dtype)(void *, int32_t *), (*get_dim)(void *, int64_t *);
static int32_t (*get_sizes)(void *, int64_t **), (*get_strides)(void *, int64_t **);
static Py_ssize_t impl_at; /* where in the object the address of its TensorImpl stands */

static int is_plain(PyObject *object) { return Py_TYPE(object) == plain || Py_TYPE(object) == parameter; }
static void *impl(PyObject *tensor) { return *(void **)((char *)tensor + impl_at); }

static PyObject *setup(PyObject *self, PyObject *args) {
  unsigned long long asks[5];
  if (!PyArg_ParseTuple(args, "(KKKKK)O!O!n", asks, asks + 1, asks + 2, asks + 3, asks + 4, &PyType_Type, &plain, &PyType_Type,
                        &parameter, &impl_at)) return NULL;
  Py_INCREF(plain);
  Py_INCREF(parameter);
  data_ptr = (void *(*)(PyObject *))asks[0];
  get_dtype = (int32_t (*)(void *, int32_t *))asks[1];
  get_dim = (int32_t (*)(void *, int64_t *))asks[2];
  get_sizes = (int32_t (*)(void *, int64_t **))asks[3];
  get_strides = (int32_t (*)(void *, int64_t **))asks[4];
  Py_RETURN_NONE;
}

/* What each tensor was, in words, one after the other: its TensorImpl, its address, its storage, its dtype and rank; after all of
   these, in the same order, the sizes and strides of each. */
enum { IMPL, ADDRESS, STORAGE, KIND, WORDS };
#define AHEAD 8 /* tensors; what a step left in no cache comes in while those before are looked at */

static void fetch(PyObject *tensor, const uint64_t *was) {
  const char *at = (const char *)was[IMPL];
  __builtin_prefetch(tensor);
  for (int line = 0; line < 4; line++) __builtin_prefetch(at + 64 * line);
  __builtin_prefetch((const void *)was[STORAGE]);
}

static int is_laid_out(PyObject *tensor, uint64_t kind, const uint64_t *layout) {
  void *handle = (char *)tensor + impl_at; /* an at::Tensor is the address of its TensorImpl */
  int64_t dim, *sizes, *strides;
  int32_t dtype;
  if (get_dtype(handle, &dtype) || get_dim(handle, &dim) || ((uint64_t)dtype << 32 | (uint64_t)dim) != kind) return 0;
  if (get_sizes(handle, &sizes) || get_strides(handle, &strides)) return 0;
  for (int64_t i = 0; i < dim; i++)
    if ((uint64_t)sizes[i] != layout[i] || (uint64_t)strides[i] != layout[dim + i]) return 0;
  return 1;
}

/* kind(plain tensor): its dtype, as torch numbers it, and its rank in one number */
static PyObject *kind(PyObject *self, PyObject *tensor) {
  int64_t dim;
  int32_t dtype;
  if (!is_plain(tensor) || get_dtype((char *)tensor + impl_at, &dtype) || get_dim((char *)tensor + impl_at, &dim)) {
    PyErr_SetString(PyExc_TypeError, "kind: not a plain tensor");
    return NULL;
  }
  return PyLong_FromUnsignedLongLong((uint64_t)dtype << 32 | (uint64_t)dim);
}

/* same(what each was, list of tensors then, list of tensors now): whether each is the object that it was, still over that, at its
   address and laid out as it was */
static PyObject *same(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer facts;
  if (count != 3 || !PyList_Check(args[1]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "same: facts and two lists");
    return NULL;
  }
  if (PyObject_GetBuffer(args[0], &facts, PyBUF_SIMPLE)) return NULL;
  Py_ssize_t number = PyList_GET_SIZE(args[1]);
  const uint64_t *was = facts.buf, *layout = was + WORDS * number;
  int holds = number == PyList_GET_SIZE(args[2]);
  for (Py_ssize_t i = 0; holds && i < number && i < AHEAD; i++) fetch(PyList_GET_ITEM(args[1], i), was + WORDS * i);
  for (Py_ssize_t i = 0; holds && i < number; i++, was += WORDS) {
    if (i + AHEAD < number) fetch(PyList_GET_ITEM(args[1], i + AHEAD), was + WORDS * AHEAD);
    PyObject *tensor = PyList_GET_ITEM(args[2], i);
    holds = tensor == PyList_GET_ITEM(args[1], i) && is_plain(tensor) && (uint64_t)impl(tensor) == was[IMPL] &&
            (uint64_t)data_ptr(tensor) == was[ADDRESS] && is_laid_out(tensor, was[KIND], layout);
    layout += 2 * (uint32_t)was[KIND];
  }
  PyBuffer_Release(&facts);
  return PyBool_FromLong(holds);
}

/* Of a large input, as a block table, most is as it was some steps ago. Only runs that differ are written: what stays as it is has not to
   be taken back from the device, which has read it, nor to go to memory again. 128 KB take 3.4 us on an EPYC where nothing differs, as
   copying does, 4.2 where all does, and from no cache the same as copying. */
#define RUN 256 /* bytes */
static void renew(char *to, const char *from, size_t bytes) {
  if (bytes < 8 * RUN || (to < from + bytes && from < to + bytes)) { memmove(to, from, bytes); return; }
  size_t at = 0;
  for (; at + RUN <= bytes; at += RUN)
    if (memcmp(to + at, from + at, RUN)) memcpy(to + at, from + at, RUN);
  memcpy(to + at, from + at, bytes - at);
}

/* copy(addresses and bytes in turn, tuple of tensors): each tensor's bytes to its address */
static PyObject *copy(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer to;
  if (count != 2 || !PyTuple_Check(args[1])) { PyErr_SetString(PyExc_TypeError, "copy: addresses and a tuple"); return NULL; }
  if (PyObject_GetBuffer(args[0], &to, PyBUF_SIMPLE)) return NULL;
  size_t *each = (size_t *)to.buf;
  int fits = to.len == PyTuple_GET_SIZE(args[1]) * 2 * (Py_ssize_t)sizeof(size_t);
  for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(args[1]); i++, each += 2) {
    PyObject *tensor = PyTuple_GET_ITEM(args[1], i);
    if (!(fits = is_plain(tensor))) break;
    if (each[1]) renew((char *)each[0], data_ptr(tensor), each[1]);
  }
  PyBuffer_Release(&to);
  if (!fits) { PyErr_SetString(PyExc_TypeError, "copy: not the plain tensors that the addresses are for"); return NULL; }
  Py_RETURN_NONE;
}

/* table(out, held, rows, states, pages, shift): brings each row of ``out`` up to the row of ``pages`` that ``rows`` names for it. A
   state is a number and, in its low ``shift`` bits, how many entries the row has; with the same number they have the same entries as
   far as both go. held: states of what is in out, kept up to date. Returns how many entries were written. */
static PyObject *table(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer given[5];
  if (count != 6) { PyErr_SetString(PyExc_TypeError, "table: five arrays and a number"); return NULL; }
  long shift = PyLong_AsLong(args[5]);
  if (shift == -1 && PyErr_Occurred()) return NULL;
  int got = 0;
  while (got < 5 && !PyObject_GetBuffer(args[got], given + got, got < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) got++;
  int64_t *held = given[1].buf, *rows = given[2].buf, *states = given[3].buf, written = 0, widest = 0;
  int fits = got == 5 && shift > 0 && shift < 32;
  Py_ssize_t number = 0, most = 0, columns = 0;
  if (fits) {
    number = given[2].len / 8;
    most = given[3].len / 8;
    columns = most ? given[4].len / 4 / most : 0;
    fits = number <= most && given[1].len == given[3].len && given[4].len == most * columns * 4 && given[0].len == number * columns * 4;
  }
  int64_t mask = ((int64_t)1 << shift) - 1;
  for (Py_ssize_t i = 0; fits && i < number; i++) {
    if (!(fits = rows[i] >= 0 && rows[i] < most && (states[rows[i]] & mask) <= columns)) break;
    int64_t now = states[rows[i]], then = held[i];
    if ((now & mask) > widest) widest = now & mask;
    if (now == then) continue;
    int64_t begin = now >> shift == then >> shift ? then & mask : 0, entries = (now & mask) - begin;
    if (entries > 0) {
      memcpy((int32_t *)given[0].buf + i * columns + begin, (int32_t *)given[4].buf + rows[i] * columns + begin, entries * 4);
      written += entries;
    }
    held[i] = now;
  }
  if (fits) memset(held + number, 0, (most - number) * 8); /* others write padding there */
  while (got) PyBuffer_Release(given + --got);
  if (PyErr_Occurred()) return NULL;
  if (!fits) { PyErr_SetString(PyExc_ValueError, "table: the arrays do not fit each other"); return NULL; }
  return Py_BuildValue("LL", (long long)written, (long long)widest);
}

/* send(function, to, from, bytes, stream): what the function returns for the last four, called without the interpreter's lock */
static PyObject *send(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t given[5];
  if (count != 5) { PyErr_SetString(PyExc_TypeError, "send: a function, two addresses, bytes and a stream"); return NULL; }
  for (int i = 0; i < 5; i++) {
    given[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (given[i] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  int result;
  Py_BEGIN_ALLOW_THREADS
  result = ((int (*)(uint64_t, const void *, size_t, void *))given[0])(given[1], (const void *)given[2], given[3], (void *)given[4]);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(result);
}

static PyMethodDef methods[] = {
  {"setup", setup, METH_VARARGS, ""},
  {"kind", kind, METH_O, ""},
  {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, ""},
  {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, ""},
  {"table", (PyCFunction)(void (*)(void))table, METH_FASTCALL, ""},
  {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, ""},
  {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tkernels_native", NULL, -1, methods};
PyMODINIT_FUNC PyInit_tkernels_native(void) { return PyModule_Create(&module); }
"""


_SEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@functools.cache
def native() -> Any:
    """The compiled module, or None."""
    try:
        from triton.runtime.build import compile_module_from_src

        made = compile_module_from_src(_SOURCE, "tkernels_native")
        made.setup(_questions(), torch.Tensor, torch.nn.Parameter, _impl_at())
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError, OSError, ValueError, subprocess.SubprocessError):
        return None
    return made if _is_right(made) else None


def _questions() -> tuple[int, ...]:
    """Where the functions are that torch exports for compiled code to ask a tensor with: for its address by its object, for its
    dtype, rank, sizes and strides by its handle."""
    from torch._C._dynamo import guards

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))  # the one that is loaded
    named = [getattr(library, f"aoti_torch_get_{what}") for what in ("dtype", "dim", "sizes", "strides")]
    asks = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in named]
    return vars(guards)["_torchinductor_pyobject_tensor_data_ptr"], *asks


def _impl_at() -> int:
    """Where in a tensor's object the address of its TensorImpl stands, in bytes. ValueError: it does not."""
    tensors = [torch.ones(2, device="cpu"), torch.nn.Parameter(torch.ones(2, device="cpu"))]
    found = [_words_of(t).index(t._cdata) for t in tensors]
    if found[0] != found[1]:
        raise ValueError(f"the address of a TensorImpl stands at {found}")
    return found[0] * ctypes.sizeof(ctypes.c_void_p)


def _words_of(tensor: torch.Tensor) -> list[int | None]:
    """The object, as words of memory."""
    return list((ctypes.c_void_p * (torch.Tensor.__basicsize__ // ctypes.sizeof(ctypes.c_void_p))).from_address(id(tensor)))


def _is_right(made: Any) -> bool:
    block = torch.arange(6.0, device="cpu")
    tensors = [block[2:], torch.nn.Parameter(torch.ones(2, device="cpu")), torch.empty(0, device="cpu")]
    same = same_as(made, tensors)
    if not same(tensors) or same(tensors[:2]) or same([*tensors[:2], None]) or same([*tensors[:2], torch.empty(0, device="cpu")]):
        return False
    target = torch.zeros(4, device="cpu")
    made.copy(array("Q", [target.data_ptr(), target.nbytes]), (tensors[0],))
    square = torch.rand(2, 3, device="cpu")
    same_square, turned, whole = same_as(made, [square]), square.t(), square.data
    for other, holds in ((turned, False), (whole, True), (square.view(torch.int32), False), (whole.view(3, 2), False), (whole, True)):
        square.data = other
        if same_square([square]) is not holds:
            return False
    tensors[1].data = torch.ones(2, device="cpu")
    asked: list[tuple[int, ...]] = []
    function = _SEND(lambda *given: asked.append(given) or 7)  # type: ignore[func-returns-value]
    if made.send(ctypes.cast(function, ctypes.c_void_p).value, 1 << 40, 2, 3, 4) != 7 or asked != [(1 << 40, 2, 3, 4)]:
        return False
    return target.tolist() == [2.0, 3.0, 4.0, 5.0] and not same(tensors)


def same_as(made: Any, tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """``made.same`` for these tensors as they are now. Keeps them alive: another object made later could lie where one of them was."""
    facts = [word for t in tensors for word in (t._cdata, t.data_ptr(), t.untyped_storage()._cdata, made.kind(t))]
    layouts = [n for t in tensors for n in (*t.shape, *t.stride())]
    return functools.partial(made.same, array("Q", facts + layouts), list(tensors))
