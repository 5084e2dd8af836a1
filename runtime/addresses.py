"""Where tensors lie and how, asked of many at once: whether each is as it was; and a copy of each to an address.

A step asks every parameter for its address and layout. torch answers one question in 0.07 µs, from Python or from C++ that is given
Python lists; a loop in C asks a tensor all five in 0.014 µs. So 100 lines of C are compiled once, by Triton's own builder and into its
cache: what Triton needs to launch kernels, a C compiler and Python's headers, is all that it takes. They ask through the functions
that torch exports for the code that Inductor compiles. Without a compiler, or if a trial shows anything else than what is said here,
torch is asked. What a step of the model has left of its parameters' facts in the processor's caches is little, so the loop asks for
those of later tensors before it looks at one.

The function that tells an address throws in C++ for a tensor without storage (sparse, or wrapped by a transform of torch.func, which is
a torch.Tensor too), and C cannot catch it: the process would end. So C asks only what has answered before: the same object over the
same TensorImpl. The others return an error.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

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
  {"kind", kind, METH_O, ""},
  {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, ""},
  {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, ""},
  {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tkernels_addresses", NULL, -1, methods};
PyMODINIT_FUNC PyInit_tkernels_addresses(void) { return PyModule_Create(&module); }
"""

_data_ptr: Any = torch.Tensor.data_ptr
_IN_TURN = 48  # tensors whose layout is compared in one step where C cannot: 3 to 5 µs


@functools.cache
def native() -> Any:
    """The compiled module, or None."""
    try:
        from triton.runtime.build import compile_module_from_src

        made = compile_module_from_src(_SOURCE, "tkernels_addresses")
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
    same = _same(made, tensors)
    if not same(tensors) or same(tensors[:2]) or same([*tensors[:2], None]) or same([*tensors[:2], torch.empty(0, device="cpu")]):
        return False
    target = torch.zeros(4, device="cpu")
    made.copy(array("Q", [target.data_ptr(), target.nbytes]), (tensors[0],))
    square = torch.rand(2, 3, device="cpu")
    same_square, turned, whole = _same(made, [square]), square.t(), square.data
    for other, holds in ((turned, False), (whole, True), (square.view(torch.int32), False), (whole.view(3, 2), False), (whole, True)):
        square.data = other
        if same_square([square]) is not holds:
            return False
    tensors[1].data = torch.ones(2, device="cpu")
    return target.tolist() == [2.0, 3.0, 4.0, 5.0] and not same(tensors)


def _same(made: Any, tensors: Sequence[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """Keeps the tensors alive: another object made later could lie where one of them was."""
    facts = [word for t in tensors for word in (t._cdata, t.data_ptr(), t.untyped_storage()._cdata, made.kind(t))]
    layouts = [n for t in tensors for n in (*t.shape, *t.stride())]
    return partial(made.same, array("Q", facts + layouts), list(tensors))


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
    """A function of a list of as many objects: whether each is a tensor at the address where that of ``tensors`` lies now, and laid out
    as that is: shape, strides and dtype. It may say no to another object at the same address, and raise where one is no tensor or has
    no memory. Where C cannot tell, layouts are compared in turn, ``_IN_TURN`` in a call."""
    if native() is not None and all(map(is_plain, tensors)):
        return _same(native(), tensors)
    pointers = [t.data_ptr() for t in tensors]
    have_layouts = _Layouts(tensors)
    in_torch = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # in CUDA builds
    if in_torch is not None:
        indices = list(range(len(pointers)))
        return lambda now: in_torch(now, pointers, indices) and have_layouts(now)
    return lambda now: list(map(_data_ptr, now)) == pointers and have_layouts(now)


class _Layouts:
    """Whether tensors have the layouts that they had, asked of the next ``_IN_TURN`` of them, by the guards of torch.compile: a tenth of
    the time of asking in Python. Another layout at the same address takes an assignment to ``.data`` of a view of itself.

    Guards also look at what a graph does not care for (requires_grad, inference mode), so their no is looked into.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._then = list(map(layout_of, tensors))
        self._guards: dict[tuple[bool, int], Any] = {}
        self._turn = 0

    def __call__(self, now: list[Any]) -> bool:
        start = self._turn if self._turn < len(now) else 0
        end = self._turn = start + _IN_TURN
        mode, part = torch.is_inference_mode_enabled(), now[start:end]
        guard = self._guards.get((mode, start))
        if guard is not None and guard.check(*part):
            return True
        if list(map(layout_of, part)) != self._then[start:end]:
            return False
        if part:
            sizes: Any = [list(t.shape) for t in part]
            strides: Any = [list(t.stride()) for t in part]
            self._guards[mode, start] = TensorGuards(*part, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return True


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def copier(targets: Iterable[torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], object]:
    """A function that copies contiguous plain tensors on the host, which have the dtypes and shapes of ``targets``, into these."""
    made, kept = native(), list(targets)
    if made is None:
        return lambda tensors: torch._foreach_copy_(kept, tensors)
    copy = partial(made.copy, array("Q", [number for t in kept for number in (t.data_ptr(), t.nbytes)]))
    return copy if all(t.is_contiguous() for t in kept) else lambda tensors: torch._foreach_copy_(kept, tensors)
