"""Prefill on Hopper: the same result as prefill.py by the Gluon kernel of _prefill_sm90, where it applies.

One persistent program per multiprocessor computes tiles of 128 query tokens of one query head, handed out longest first. The grid
depends on shapes alone; lengths are read on the device; nothing syncs with the host. ``refusal`` says why a call is left to prefill.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tkernels import _dependent
from tkernels._counters import counters, stood
from tkernels._target import target_of
from tkernels._triton import next_power_of_2
from tkernels.attention import _sm90
from tkernels.attention._common import FP8, LOG2_E
from tkernels.attention._inputs import Inputs
from tkernels.attention.ref import output_dtype

_TILE = 128  # query tokens of a tile, as in the kernel


@dataclass(frozen=True, kw_only=True)
class Sm90Tiles:
    """What a head dimension asks of a multiprocessor: 227 KiB of shared memory, 64 Ki registers for 12 warps (16 with 8 bits), eight named
    barriers."""

    block_n: int  # keys of a block
    k_stages: int  # K and V blocks that are resident; with raw_stages their sum is at most 8
    v_stages: int
    raw_stages: int = 0  # of 8-bit V, not yet transposed
    consumer_registers: int = 240  # a thread, of the two warpgroups that compute
    worker_registers: int = 24  # of the third one: loaders, cleaner, scheduler. 2 · consumers + workers is at most 504
    transposer_registers: int = 0  # of the fourth one, with 8 bits; then 2 · consumers + workers + transposer is at most 512


# By the head dimension rounded up to a power of two. Measured on an H200 for 128; registers are what ptxas needs to spill nothing
# (tests/tkernels/attention/test_prefill_sm90.py)
_TILES = {
    64: Sm90Tiles(block_n=128, k_stages=3, v_stages=3),
    128: Sm90Tiles(block_n=128, k_stages=2, v_stages=2),
    256: Sm90Tiles(block_n=64, k_stages=2, v_stages=2),  # the output takes 128 registers a thread: 32 are left for scores
}
_TILES_8_BIT = dict.fromkeys(
    (64, 128),
    Sm90Tiles(block_n=128, k_stages=3, v_stages=3, raw_stages=2, consumer_registers=208, worker_registers=32, transposer_registers=64),
)
_DIMS = (min(_TILES) // 2 + 1, max(_TILES))
_DIMS_8_BIT = (min(_TILES_8_BIT) // 2 + 1, max(_TILES_8_BIT))


def enable(on: bool) -> None:
    """Whether calls that are made or captured from now on may come here. False sends them to prefill.py, to compare the two."""
    _sm90.enable("prefill", on)


def absence(arch: str) -> str | None:
    """Why no call is computed by the Gluon kernel here, or None. arch: as in tkernels._target."""
    return _sm90.absence("prefill", arch)


def refusal(x: Inputs, out: torch.Tensor, arch: str) -> str | None:
    """Why prefill.py computes this call, or None where the Gluon kernel does.

    Depends on the device, the model's shape, strides and features alone, never on lengths or the batch, so that a sequence gets the same
    bits in every batch. arch: as in tkernels._target.
    """
    dims = _DIMS_8_BIT if x.q.dtype == FP8 else _DIMS
    problem = _sm90.refusal("prefill", x, arch, dims, (torch.float16, torch.bfloat16, FP8))
    if problem:
        return problem
    if x.q.dtype == FP8 and x.window and x.dim <= 64:  # ptxas spills
        return f"a window with float8_e4m3fn heads of dimension {x.dim}: expected more than 64"
    if x.k_scale is not None or x.v_scale is not None:
        return "scales on the device: expected numbers or none for a cache of the queries' type"
    problem = _sm90.tma_problem(out)
    return f"out: {problem}" if problem else None


def _tiles(dtype: torch.dtype, dim: int) -> Sm90Tiles:
    return (_TILES_8_BIT if dtype == FP8 else _TILES)[dim]


def constants(x: Inputs, has_lse: bool, min_query: int) -> dict[str, Any]:
    """The kernel's constexpr arguments."""
    dim = next_power_of_2(x.dim)
    eight = x.q.dtype == FP8
    tiles = _tiles(x.q.dtype, dim)
    spare = 8 if x.softcap and not eight else 0  # registers that the workers beside consumers with a soft cap need more
    return dict(
        DTYPE=_sm90.element(x.q.dtype),
        HEADS=x.heads, GROUP=x.heads // x.kv_heads, HEAD_DIM=x.dim, DIM=dim, PAGE=x.page_size, MIN_QUERY=min_query,
        BLOCK_N=tiles.block_n, K_STAGES=tiles.k_stages, V_STAGES=tiles.v_stages, RAW_STAGES=tiles.raw_stages,
        CONSUMER_REGISTERS=tiles.consumer_registers - spare, WORKER_REGISTERS=tiles.worker_registers + spare,
        TRANSPOSER_REGISTERS=tiles.transposer_registers, OUT_DTYPE=_sm90.element(output_dtype(x.q.dtype)),
        NARROW=not eight and (dim > 128 or x.window > 0 or x.softcap > 0),
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None, HAS_LSE=has_lse,
        HALF_DIAGONAL=x.causal and not x.window and not x.softcap and tiles.block_n == _TILE,
    )  # fmt: skip


def boxes(dtype: torch.dtype, dim: int, page_size: int) -> dict[str, tuple[list[int], Any]]:
    """Descriptor → (shape of what one TMA copies, its layout in shared memory)."""
    from triton.experimental.gluon import language as gl

    columns = next_power_of_2(dim)
    keys = _sm90.box(dtype, (1, min(page_size, _tiles(dtype, columns).block_n), 1, dim))
    return {
        "q_desc": _sm90.box(dtype, (64, 1, dim)),
        "k_desc": keys,
        "v_desc": keys,
        "out_desc": ([64, 1, min(columns, 128)], gl.NVMMASharedLayout(64, 16, rank=3)),
    }


def prefill_sm90(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_query: int, place: int = _dependent.ALONE) -> Any:
    """Write the rows of every sequence with at least ``min_query`` query tokens. For calls that ``refusal`` does not refuse.

    place: among the launches of a set, as in _dependent.py. Returns the compiled kernel, or None where no sequence can be that long.
    """
    from tkernels.attention._prefill_sm90.kernel import prefill_sm90_kernel

    x = inputs
    num_tokens = x.q.shape[0]
    if num_tokens < min_query:
        return None
    # sum of ceil(query_len / _TILE) over at most tokens // min_query sequences
    items = (num_tokens // _TILE + min(x.num_seqs, num_tokens // min_query)) * x.heads
    counter = counters(1, out.device)
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    box = boxes(x.q.dtype, x.dim, x.page_size)
    return _dependent.launch(
        prefill_sm90_kernel, (min(target_of(out.device).num_sms, items),), out.device,
        _sm90.descriptor(x.q, *box["q_desc"]), _sm90.descriptor(x.k_cache, *box["k_desc"]), _sm90.descriptor(x.v_cache, *box["v_desc"]),
        _sm90.descriptor(out, *box["out_desc"]), out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, counter,
        x.num_seqs, x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.stride_table, out.stride(0), out.stride(1), stride_lt, stride_lh,
        **constants(x, lse is not None, min_query), num_warps=4, place=place if stood(counter) else _dependent.ALONE,
    )  # fmt: skip
