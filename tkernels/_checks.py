"""Argument checks shared by the launchers. Each names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

_T = TypeVar("_T")

_MAX_ROWS = 2**31 - 2**16  # row numbers are 32-bit in kernels (offsets are not), with room for the last tile
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def check_float(name: str, x: torch.Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float16, bfloat16 or float32, got {describe(x)}")


def check_shape(name: str, x: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: expected {list(expected)} {why}, got {list(x.shape)}")


def check_dtype(name: str, x: torch.Tensor, expected: torch.dtype, why: str) -> None:
    if x.dtype != expected:
        raise TypeError(f"{name}: expected {str(expected).removeprefix('torch.')} {why}, got {describe(x)}")


def check_device(name: str, x: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    if x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device} like {like_name}, got {x.device}")


def check_last_stride(name: str, x: torch.Tensor) -> None:
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: expected last stride 1, got strides {list(x.stride())}; call .contiguous() first")


class Rows(NamedTuple):
    """A tensor [..., n] seen as rows: row r starts at ``(r // inner) * stride_outer + (r % inner) * stride_inner``."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    inner: int
    stride_outer: int
    stride_inner: int


def rows_of(name: str, x: torch.Tensor) -> Rows:
    """Fold the leading dimensions of ``x`` into at most two, without a copy.

    Raises ValueError when three or more leading dimensions cannot be folded; such a view needs ``.contiguous()``.
    """
    check_last_stride(name, x)
    folded: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    count = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if count > _MAX_ROWS:
        raise ValueError(f"{name}: expected at most {_MAX_ROWS} rows, got shape {list(x.shape)}; call it in parts")
    if len(folded) == 0:
        return Rows(count, 1, 0, 0)
    if len(folded) == 1:
        return Rows(count, 1, folded[0][1], 0)  # inner = 1 is a constant to Triton: the division disappears
    if len(folded) == 2:
        return Rows(count, max(folded[1][0], 1), folded[0][1], folded[1][1])
    raise ValueError(f"{name}: strides {list(x.stride())} of shape {list(x.shape)} do not fold into rows; call .contiguous() first")


def checked(check: Callable[..., None], reference: Callable[..., _T]) -> Callable[..., _T]:
    """``reference`` after ``check`` on the same arguments, so that the CPU refuses what the kernel refuses, in the same words."""

    def run(*args: Any, **kwargs: Any) -> _T:
        check(*args, **kwargs)
        return reference(*args, **kwargs)

    return run
