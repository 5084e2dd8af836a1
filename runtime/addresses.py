"""Where tensors lie, asked of many at once: whether each is where it was, and a copy of each to an address.

A step asks every parameter for its address. torch answers one question in 0.07 µs, from Python or from C++ that is given Python
lists; a loop in C takes a tenth of that. So 40 lines of C are compiled once, by Triton's own builder and into its cache: what Triton
needs to launch kernels, a C compiler and Python's headers, is all that it takes. They ask through the function that torch
exports for the code that Inductor compiles. Without a compiler, or if a trial shows anything else than what is said here, torch is asked.

That function throws in C++ for a tensor without storage (sparse, or wrapped by a transform of torch.func, which is a torch.Tensor too),
and C cannot catch it: the process would end. So C asks only what has answered before: the same object over the same TensorImpl.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

/* Only tensors of these two types are asked, never one that overrides what it says. */
static PyTypeObject *plain, *parameter;
static void *(*data_ptr)(PyObject *);
static Py_ssize_t impl_at; /* where in the object the address of its TensorImpl stands */

static int is_plain(PyObject *object) { return Py_TYPE(object) == plain || Py_TYPE(object) == parameter; }
static void *impl(PyObject *tensor) { return *(void **)((char *)tensor + impl_at); }

static PyObject *setup(PyObject *self, PyObject *args) {
  PyObject *address;
  if (!PyArg_ParseTuple(args, "OO!O!n", &address, &PyType_Type, &plain, &PyType_Type, &parameter, &impl_at)) return NULL;
  Py_INCREF(plain);
  Py_INCREF(parameter);
  data_ptr = (void *(*)(PyObject *))PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

/* same(TensorImpls and addresses in turn, list of tensors then, list of tensors now): whether each is the object that it was, still
   over that, and at its address */
static PyObject *same(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  Py_buffer facts;
  if (count != 3 || !PyList_Check(args[1]) || !PyList_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "same: facts and two lists");
    return NULL;
  }
  if (PyObject_GetBuffer(args[0], &facts, PyBUF_SIMPLE)) return NULL;
  void **each = (void **)facts.buf;
  Py_ssize_t number = PyList_GET_SIZE(args[1]);
  int holds = number == PyList_GET_SIZE(args[2]) && facts.len == number * 2 * (Py_ssize_t)sizeof(void *);
  for (Py_ssize_t i = 0; holds && i < number; i++, each += 2) {
    PyObject *tensor = PyList_GET_ITEM(args[2], i);
    holds = tensor == PyList_GET_ITEM(args[1], i) && is_plain(tensor) && impl(tensor) == each[0] && data_ptr(tensor) == each[1];
  }
  PyBuffer_Release(&facts);
  return PyBool_FromLong(holds);
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
    if (each[1]) memmove((void *)each[0], data_ptr(tensor), each[1]);
  }
  PyBuffer_Release(&to);
  if (!fits) { PyErr_SetString(PyExc_TypeError, "copy: not the plain tensors that the addresses are for"); return NULL; }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
  {"setup", setup, METH_VARARGS, ""},
  {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, ""},
  {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, ""},
  {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tkernels_addresses", NULL, -1, methods};
PyMODINIT_FUNC PyInit_tkernels_addresses(void) { return PyModule_Create(&module); }
"""

_data_ptr: Any = torch.Tensor.data_ptr


@functools.cache
def native() -> Any:
    """The compiled module, or None."""
    try:
        from torch._C._dynamo import guards
        from triton.runtime.build import compile_module_from_src

        made = compile_module_from_src(_SOURCE, "tkernels_addresses")
        made.setup(vars(guards)["_torchinductor_pyobject_tensor_data_ptr"], torch.Tensor, torch.nn.Parameter, _impl_at())
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError, OSError, ValueError, subprocess.SubprocessError):
        return None
    return made if _is_right(made) else None


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
    same = _same(made, tensors)
    if not same(tensors) or same(tensors[:2]) or same([*tensors[:2], None]) or same([*tensors[:2], torch.empty(0, device="cpu")]):
        return False
    target = torch.zeros(4, device="cpu")
    made.copy(array("Q", [target.data_ptr(), target.nbytes]), (tensors[0],))
    tensors[1].data = torch.ones(2, device="cpu")
    return target.tolist() == [2.0, 3.0, 4.0, 5.0] and not same(tensors)


def _same(made: Any, tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """Keeps the tensors alive: another object made later could lie where one of them was."""
    return partial(made.same, array("Q", [number for t in tensors for number in (t._cdata, t.data_ptr())]), list(tensors))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether C may ask for its address and take what lies there for its values: of torch's own types, dense, in memory, and with no
    conjugation, negation or zero that is still to be carried out."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # wrapped by a transform of torch.func
        return False
    return True


def stays(tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """A function of a list of as many objects: whether each is a tensor at the address where that of ``tensors`` lies now. It may say
    no to another object at the same address, and raise where one is no tensor or has no memory."""
    pointers = [t.data_ptr() for t in tensors]
    if native() is not None and all(map(is_plain, tensors)):
        return _same(native(), tensors)
    in_torch = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # in CUDA builds
    if in_torch is not None:
        indices = list(range(len(pointers)))
        return lambda now: in_torch(now, pointers, indices)
    return lambda now: list(map(_data_ptr, now)) == pointers


def copier(targets: Iterable[torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], object]:
    """A function that copies contiguous plain tensors on the host, which have the dtypes and shapes of ``targets``, into these."""
    made, kept = native(), list(targets)
    if made is None:
        return lambda tensors: torch._foreach_copy_(kept, tensors)
    copy = partial(made.copy, array("Q", [number for t in kept for number in (t.data_ptr(), t.nbytes)]))
    return copy if all(t.is_contiguous() for t in kept) else lambda tensors: torch._foreach_copy_(kept, tensors)
