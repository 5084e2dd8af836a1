"""Where tensors lie and how, asked of many at once: whether each is as it was; and copies to addresses that are known.

A step asks every parameter for its address and layout. torch answers one question in 0.07 µs, from Python or from C++ that is given
Python lists; a loop in C asks a tensor all five in 0.014 µs (runtime/native.py). What a step of the model has left of its parameters'
facts in the processor's caches is little, so the loop asks for those of later tensors before it looks at one. Where there is no C,
torch is asked.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from runtime.native import native, same_as

_data_ptr: Any = torch.Tensor.data_ptr
_IN_TURN = 48  # tensors whose layout is compared in one step where C cannot: 3 to 5 µs


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
        return same_as(native(), tensors)
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


@functools.cache
def _host_to_device() -> int:
    """Where the function of CUDA's driver that begins a copy from the host is in memory, or 0."""
    try:
        return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def sender(target: torch.Tensor, source: torch.Tensor) -> Callable[[int], int] | None:
    """A function of a stream, as the driver knows it, that begins the copy of pinned memory to the device on it: past torch's dispatcher,
    which takes most of the host time of such a copy. Not 0 is the driver's error; ask torch then, which knows what to do or to say.

    None where only torch can. The device must be the current one, or its default stream would be that of another; and who has not let
    torch copy on the stream before must keep the pinned memory until the copy is done, as torch's allocator does not know of it.
    """
    can = target.is_cuda and source.is_pinned() and target.is_contiguous() and source.is_contiguous()
    if not can or target.nbytes != source.nbytes or not source.nbytes or native() is None or not _host_to_device():
        return None
    return partial(native().send, _host_to_device(), target.data_ptr(), source.data_ptr(), source.nbytes)


class _Rows(ctypes.Structure):
    """CUDA's description of a copy of a part of each row (CUDA_MEMCPY2D)."""

    _fields_ = [
        (f"{end}_{what}", ctypes.c_size_t) for end in ("from", "to") for what in ("x", "y", "kind", "host", "device", "array", "pitch")
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


_HOST, _DEVICE = 1, 2  # CUmemorytype


@functools.cache
def _rows_to_device() -> Any:
    """The function of CUDA's driver that begins a copy of a part of each row, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError):
        return None


def rows_sender(target: torch.Tensor, source: torch.Tensor) -> Callable[[int, int], int] | None:
    """As ``sender``, for the first bytes of each row: a function of their number and of a stream. target, source: [rows, bytes] uint8."""
    function = _rows_to_device()
    if function is None or sender(target, source) is None:
        return None
    rows, pitch = target.shape
    asked = _Rows(
        from_kind=_HOST, from_host=source.data_ptr(), from_pitch=pitch, to_kind=_DEVICE, to_device=target.data_ptr(), to_pitch=pitch,
        height=rows,
    )  # fmt: skip
    at = ctypes.byref(asked)

    def send(width: int, stream: int) -> int:
        asked.width = width
        return int(function(at, ctypes.c_void_p(stream)))

    return send
