"""Linear layers for few rows: kernels that stream the weights once, at the memory's pace.

    y = x · weightᵀ + bias

With 1 to 64 rows a projection is bound by reading its weights. Two kernels do that; which one, with which tile, or cuBLAS after
all, is read from a table measured on the device (``tables/linear_<arch>.json``, made by ``python -m tkernels tune``). Shapes and
dtypes outside the table, other devices and fp32 go to ``torch.nn.functional.linear``.

The order of summation depends on the shape and the number of rows alone, so a call repeats bit for bit.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tkernels import _checks
from tkernels._op import define
from tkernels._target import Target, target_of
from tkernels._triton import cast, dot, tl, triton

MAX_ROWS = 64  # more rows than this are never in the table: cuBLAS has reached its stride by then
ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)  # a call with 5 rows uses the entry of 8


def linear_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The oracle."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class Tile:
    """One way to launch. kind "vector": products on the CUDA cores, for 1 to 4 rows; "matrix": tensor cores, 1 to 64 rows.

    block_n: weight rows (outputs) a program; block_k: inputs a step; slices: parts of K that a program's warps sum apart.
    """

    kind: str
    block_n: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int


@triton.jit
def _stream(ptrs, mask, EVEN: tl.constexpr):
    """Weights are read once: they should not push anything else out of L2."""
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def _vector_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, n, stride_xm, stride_wn,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + offs_n[:, None].to(tl.int64) * stride_wn + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :]
    mask_n = (offs_n < n)[:, None]
    mask_m = (offs_m < rows)[:, None]
    w = _stream(w_ptrs, mask_n & (offs_k < K)[None, :], EVEN)
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=mask_m & (offs_k + k < K)[None, :], other=0.0).to(tl.float32)
        acc += w.to(tl.float32)[None, :, :] * x[:, None, :]
        if k + BLOCK_K < K:
            w = _stream(w_ptrs + k + BLOCK_K, mask_n & (offs_k + k + BLOCK_K < K)[None, :], EVEN)
    y = tl.sum(acc, 2)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + offs_m[:, None].to(tl.int64) * n + offs_n[None, :], cast(y, y_ptr.dtype.element_ty), mask=mask_m & (offs_n < n)[None, :]
    )


@triton.jit(do_not_specialize=["rows"])
def _matrix_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, n, stride_xm, stride_wn, k_total,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # The weights are the left operand: 64 of their rows fill a warpgroup's tile, or 16 a warp's, whatever the rows of x.
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n
    w_rows = w_ptr + offs_n.to(tl.int64) * stride_wn
    x_rows = x_ptr + offs_m.to(tl.int64) * stride_xm
    offs_k = tl.arange(0, BLOCK_K)
    if SLICES == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, k_total, BLOCK_K, num_stages=NUM_STAGES):
            w_ptrs = w_rows[:, None] + (offs_k + k)[None, :]
            x_ptrs = x_rows[None, :] + (offs_k + k)[:, None]
            mask_x = (offs_m < rows)[None, :]
            mask_k = offs_k + k < k_total
            w = _stream(w_ptrs, mask_n[:, None] & mask_k[None, :], EVEN)
            x = tl.load(x_ptrs, mask=mask_x if EVEN else mask_x & mask_k[:, None], other=0.0)
            acc = dot(w, x, acc)
    else:
        # Slice s of a step holds its own BLOCK_K inputs; each warp multiplies its slices, and they are summed once at the end.
        offs_s = tl.arange(0, SLICES) * BLOCK_K
        sliced = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
        for k in tl.range(0, k_total, SLICES * BLOCK_K, num_stages=NUM_STAGES):
            at = k + offs_s[:, None] + offs_k[None, :]  # [SLICES, BLOCK_K]
            w_ptrs = w_rows[None, :, None] + at[:, None, :]
            x_ptrs = x_rows[None, None, :] + at[:, :, None]
            mask_x = (offs_m < rows)[None, None, :]
            w = _stream(w_ptrs, mask_n[None, :, None] & (at < k_total)[:, None, :], EVEN)
            x = tl.load(x_ptrs, mask=mask_x if EVEN else mask_x & (at < k_total)[:, :, None], other=0.0)
            sliced = dot(w, x, sliced)
        acc = tl.sum(sliced, 0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y_ptr + offs_m[None, :].to(tl.int64) * n + offs_n[:, None],
        cast(acc, y_ptr.dtype.element_ty),
        mask=mask_n[:, None] & (offs_m < rows)[None, :],
    )


def row_class(rows: int) -> int:
    """The smallest class of ROW_CLASSES that holds ``rows``."""
    return next(size for size in ROW_CLASSES if rows <= size)


@functools.cache
def _table(arch: str) -> dict[tuple[int, int, int], Tile]:
    """(row class, N, K) → tile. A shape that cuBLAS wins has no entry."""
    path = Path(__file__).parent / "tables" / f"linear_{arch}.json"
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {(e["rows"], e["n"], e["k"]): Tile(**e["tile"]) for e in entries}


def choose(target: Target, dtype: torch.dtype, rows: int, n: int, k: int) -> Tile | None:
    """The tile for a call, or None for cuBLAS: a function of the device, the dtype and the shape only."""
    if rows > MAX_ROWS or dtype not in (torch.bfloat16, torch.float16):
        return None
    return _table(target.arch).get((row_class(rows), n, k))


def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, tile: Tile) -> None:
    """Run one tile. x [rows, k] and weight [n, k] with last stride 1, y [rows, n] contiguous; shapes are the caller's duty."""
    rows, k = x.shape
    n = weight.shape[0]
    grid = (triton.cdiv(n, tile.block_n),)
    even = n % tile.block_n == 0 and k % (tile.block_k * tile.slices) == 0
    arguments = (x, weight, bias, y, rows, n, x.stride(0), weight.stride(0), k, bias is not None, even)
    if tile.kind == "vector":
        _vector_kernel[grid](*arguments, row_class(rows), tile.block_n, tile.block_k, num_warps=tile.num_warps)
    else:
        block_m = max(16, row_class(rows))
        _matrix_kernel[grid](
            *arguments, block_m, tile.block_n, tile.block_k, tile.slices, tile.num_stages, num_warps=tile.num_warps
        )  # fmt: skip


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    _checks.check_float("x", x)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out_features, in_features], got {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: expected a last dimension of {weight.shape[1]} like weight's, got {list(x.shape)}")
    _checks.check_dtype("weight", weight, x.dtype, "like x")
    _checks.check_device("weight", weight, x, "x")
    if bias is not None:
        _checks.check_shape("bias", bias, (weight.shape[0],), "like weight's first dimension")
        _checks.check_dtype("bias", bias, x.dtype, "like x")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    tile = choose(target_of(x.device), x.dtype, rows, n, k) if rows else None
    if tile is None or x.stride(-1) != 1 or weight.stride(1) != 1 or (x.dim() > 2 and not x.is_contiguous()):
        return F.linear(x, weight, bias)
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    launch(x.view(rows, k) if x.dim() != 2 else x, weight, bias, y.view(rows, n), tile)
    return y


_linear_op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    kernel=_linear,
    reference=linear_ref,
    fake=lambda x, weight, bias=None: torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device),
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x · weightᵀ + bias, like ``torch.nn.functional.linear``, with weight-streaming kernels for up to 64 rows.

    x: [..., in_features] fp16, bf16 or fp32. weight: [out_features, in_features], like x. bias: [out_features] or None.
    Returns [..., out_features] like x, contiguous. fp32 accumulation, one rounding.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _linear_op(x, weight, bias)
