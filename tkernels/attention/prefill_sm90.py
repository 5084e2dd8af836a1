"""Prefill on Hopper: the same result as prefill.py by the Gluon kernel of _prefill_sm90, where it applies.

One persistent program per multiprocessor computes tiles of 128 query tokens of one query head, handed out longest first. The grid
depends on shapes alone; lengths are read on the device; nothing syncs with the host. ``refusal`` says why a call is left to prefill.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tkernels import _repeats
from tkernels._counters import counters
from tkernels._target import target_of
from tkernels._triton import HAVE_TRITON, INTERPRETED, next_power_of_2
from tkernels.attention._common import LOG2_E
from tkernels.attention._inputs import MAX_SEQS, Inputs

_enabled = True
_TILE = 128  # query tokens of a tile, as in the kernel


@dataclass(frozen=True, kw_only=True)
class Sm90Tiles:
    """What a head dimension asks of a multiprocessor: 227 KiB of shared memory, 64 Ki registers for 12 warps, eight named barriers."""

    block_n: int  # keys of a block
    k_stages: int  # K and V blocks that are resident; their sum is at most 8
    v_stages: int
    consumer_registers: int = 240  # a thread, of the two warpgroups that compute
    worker_registers: int = 24  # of the third one: loaders, cleaner, scheduler. 2 · consumers + workers is at most 504


# By the head dimension rounded up to a power of two. Measured on an H200 for 128; registers are what ptxas needs to spill nothing
# (tests/tkernels/attention/test_prefill_sm90.py)
_TILES = {
    64: Sm90Tiles(block_n=128, k_stages=3, v_stages=3),
    128: Sm90Tiles(block_n=128, k_stages=2, v_stages=2),
    256: Sm90Tiles(block_n=64, k_stages=2, v_stages=2),  # the output takes 128 registers a thread: 32 are left for scores
}
_PAGES = (16, 32, 64, 128, 256)  # at most 8 TMA copies a block


@functools.cache
def _gluon_problem() -> str | None:
    """Why this Triton cannot compile the kernel."""
    if not HAVE_TRITON:
        return "triton is not installed"
    if INTERPRETED:
        return "Triton's interpreter has no Gluon"
    try:
        from tkernels.attention._prefill_sm90 import kernel  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this triton lacks what the Gluon kernel uses ({error})"
    return None


def enable(on: bool) -> None:
    """Whether calls that are made or captured from now on may come here. False sends them to prefill.py, to compare the two."""
    global _enabled
    _enabled = on
    _repeats.forget()  # an earlier call's launches are those of the other kernel


def absence(arch: str) -> str | None:
    """Why no call is computed by the Gluon kernel here, or None. arch: as in tkernels._target."""
    if arch != "sm_90":
        return f"architecture {arch}: the kernel is for sm_90"
    if not _enabled:
        return "switched off by tkernels.attention.prefill_sm90.enable(False)"
    return _gluon_problem()


def refusal(x: Inputs, out: torch.Tensor, arch: str) -> str | None:
    """Why prefill.py computes this call, or None where the Gluon kernel does.

    Depends on the device, the model's shape, strides and features alone, never on lengths or the batch, so that a sequence gets the same
    bits in every batch. arch: as in tkernels._target.
    """
    problem = absence(arch)
    if problem:
        return problem
    if x.q.dtype not in (torch.float16, torch.bfloat16) or x.k_cache.dtype != x.q.dtype:
        return f"{x.q.dtype} queries on a {x.k_cache.dtype} cache: expected float16 or bfloat16 for both"
    if next_power_of_2(x.dim) not in _TILES:
        return f"head dimension {x.dim}: expected 33 to 256"
    if x.page_size not in _PAGES:
        return f"page size {x.page_size}: expected one of {', '.join(map(str, _PAGES))}"
    if x.k_scale is not None or x.v_scale is not None:
        return "scales on the device: expected numbers or none for a cache of the queries' type"
    if MAX_SEQS * x.stride_table >= 1 << 31:  # a tile carries where its row of the table begins, in int32
        return f"block_table: a row stride of {x.stride_table}, expected fewer than {(1 << 31) // MAX_SEQS}"
    for name, tensor in (("q", x.q), ("k_cache", x.k_cache), ("v_cache", x.v_cache), ("out", out)):
        problem = _tma_problem(tensor)
        if problem:
            return f"{name}: {problem}"
    return None


def _tma_problem(tensor: torch.Tensor) -> str | None:
    """Why no TMA descriptor can describe ``tensor``."""
    if tensor.numel() == 0:
        return "empty"
    if tensor.data_ptr() % 16:
        return "its address is no multiple of 16 bytes"
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if size > 1 and (stride == 0 or stride * tensor.element_size() % 16):
            return f"strides {list(tensor.stride())}: expected multiples of 16 bytes"
    return None


def constants(x: Inputs, has_lse: bool, min_query: int) -> dict[str, Any]:
    """The kernel's constexpr arguments."""
    from triton.experimental.gluon import language as gl

    dim = next_power_of_2(x.dim)
    tiles = _TILES[dim]
    spare = 8 if x.softcap else 0  # registers that the workers beside consumers with a soft cap need more
    return dict(
        DTYPE=gl.bfloat16 if x.q.dtype == torch.bfloat16 else gl.float16,
        HEADS=x.heads, GROUP=x.heads // x.kv_heads, HEAD_DIM=x.dim, DIM=dim, PAGE=x.page_size, MIN_QUERY=min_query,
        BLOCK_N=tiles.block_n, K_STAGES=tiles.k_stages, V_STAGES=tiles.v_stages,
        CONSUMER_REGISTERS=tiles.consumer_registers - spare, WORKER_REGISTERS=tiles.worker_registers + spare,
        NARROW=dim > 128 or x.window > 0 or x.softcap > 0,
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None, HAS_LSE=has_lse,
        HALF_DIAGONAL=x.causal and not x.window and not x.softcap and tiles.block_n == _TILE,
    )  # fmt: skip


@functools.cache
def boxes(dtype: torch.dtype, dim: int, page_size: int) -> dict[str, tuple[list[int], Any]]:
    """Descriptor → (shape of what one TMA copies, its layout in shared memory)."""
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    dim = next_power_of_2(dim)
    rows = [64, 1, dim]
    keys = [1, min(page_size, _TILES[dim].block_n), 1, dim]
    swizzled = gl.NVMMASharedLayout.get_default_for(keys, element)
    return {
        "q_desc": (rows, gl.NVMMASharedLayout.get_default_for(rows, element)),
        "k_desc": (keys, swizzled),
        "v_desc": (keys, swizzled),
        "out_desc": ([64, 1, min(dim, 128)], gl.NVMMASharedLayout(64, 16, rank=3)),
    }


def _descriptor(tensor: torch.Tensor, box: list[int], layout: Any) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # the stride of a dimension of one element means nothing, but TMA wants a multiple of 16 bytes
    strides = [stride if size > 1 else 8 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:-1], 1], box, layout)


def prefill_sm90(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_query: int) -> Any:
    """Write the rows of every sequence with at least ``min_query`` query tokens. For calls that ``refusal`` does not refuse.

    Returns the compiled kernel, or None where no sequence can be that long.
    """
    from tkernels.attention._prefill_sm90.kernel import prefill_sm90_kernel

    x = inputs
    num_tokens = x.q.shape[0]
    if num_tokens < min_query:
        return None
    # sum of ceil(query_len / _TILE) over at most tokens // min_query sequences
    items = (num_tokens // _TILE + min(x.num_seqs, num_tokens // min_query)) * x.heads
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    box = boxes(x.q.dtype, x.dim, x.page_size)
    return prefill_sm90_kernel[(min(target_of(out.device).num_sms, items),)](
        _descriptor(x.q, *box["q_desc"]), _descriptor(x.k_cache, *box["k_desc"]), _descriptor(x.v_cache, *box["v_desc"]),
        _descriptor(out, *box["out_desc"]), out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, counters(1, out.device),
        x.num_seqs, x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.stride_table, out.stride(0), out.stride(1), stride_lt, stride_lh,
        **constants(x, lse is not None, min_query), num_warps=4,
    )  # fmt: skip
