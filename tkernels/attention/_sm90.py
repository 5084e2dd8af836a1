"""What the launchers of the Gluon kernels share: whether one can run here, which calls it takes, and boxes for TMA."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tkernels import _repeats, _triton
from tkernels._tma import descriptor as descriptor
from tkernels._tma import tma_problem as tma_problem
from tkernels._triton import next_power_of_2
from tkernels.attention._common import FP8
from tkernels.attention._inputs import MAX_SEQS, Inputs

_PAGES = (16, 32, 64, 128, 256)  # at most 8 TMA copies a block of keys
_DTYPES = (torch.float16, torch.bfloat16)
_off: set[str] = set()  # kernels that are switched off: "prefill", "decode"


@functools.cache
def gluon_problem() -> str | None:
    """Why this Triton cannot compile the kernels."""

    def load() -> None:
        from tkernels.attention._decode_sm90 import kernel as _decode  # noqa: F401
        from tkernels.attention._decode_sm90 import one_kernel as _decode_one  # noqa: F401
        from tkernels.attention._prefill_sm90 import kernel as _prefill  # noqa: F401

    return _triton.gluon_problem(load)


def enable(kernel: str, on: bool) -> None:
    """Whether calls that are made or captured from now on may go to the kernel, "prefill" or "decode"."""
    (_off.discard if on else _off.add)(kernel)
    _repeats.forget()  # an earlier call's launches are those of the other kernel


def absence(kernel: str, arch: str) -> str | None:
    """Why no call is computed by the kernel here, or None. arch: as in tkernels._target."""
    if arch != "sm_90":
        return f"architecture {arch}: the kernel is for sm_90"
    if kernel in _off:
        return f"switched off by tkernels.attention.{kernel}_sm90.enable(False)"
    return gluon_problem()


def refusal(
    kernel: str, x: Inputs, arch: str, dims: tuple[int, int], dtypes: tuple[torch.dtype, ...] = _DTYPES, cache: torch.dtype | None = None
) -> str | None:
    """Why a call is left to the plain Triton kernel, as far as the Gluon kernels agree. dims: head dimensions that it takes; dtypes: of
    queries; cache: of the caches, the queries' own where None."""
    problem = absence(kernel, arch)
    if problem:
        return problem
    if x.q.dtype not in dtypes or x.k_cache.dtype != (cache or x.q.dtype):
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"{x.q.dtype} queries on a {x.k_cache.dtype} cache: expected {expected} {f'on {cache}' if cache else 'for both'}"
    if not dims[0] <= x.dim <= dims[1]:
        return f"head dimension {x.dim}: expected {dims[0]} to {dims[1]}"
    if x.page_size not in _PAGES:
        return f"page size {x.page_size}: expected one of {', '.join(map(str, _PAGES))}"
    if MAX_SEQS * x.stride_table >= 1 << 31:  # the kernels carry where a row of the table begins in int32
        return f"block_table: a row stride of {x.stride_table}, expected fewer than {(1 << 31) // MAX_SEQS}"
    for name, tensor in (("q", x.q), ("k_cache", x.k_cache), ("v_cache", x.v_cache)):
        problem = tma_problem(tensor)
        if problem:
            return f"{name}: {problem}"
    return None


@functools.cache
def box(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[list[int], Any]:
    """(shape of what one TMA copies, its last dimension rounded up to a power of two; its layout in shared memory)."""
    from triton.experimental.gluon import language as gl

    rounded = [*shape[:-1], next_power_of_2(shape[-1])]
    return rounded, gl.NVMMASharedLayout.get_default_for(rounded, element(dtype))


def element(dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}[dtype]
