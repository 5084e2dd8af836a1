"""The kernels of ``tkernels.linear`` and the launch of one of them, in a given tile. Which tile, if any, is chosen there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tkernels import _dependent, _linear_tma
from tkernels._counters import counters
from tkernels._dependent import prefetch_rows, wait
from tkernels._linear_sums import (
    add_parts,
    arrive,
    direct_sums,
    direct_weights,
    matrix_end,
    matrix_sums,
    places,
    rounded,
    row_sum,
    share,
    stream,
    vector_sums,
)
from tkernels._sampling_kernels import key_of
from tkernels._triton import cast, cdiv, tl, triton
from tkernels.activation import activate

ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)  # a call with 5 rows uses the entry of 8


@dataclass(frozen=True)
class Tile:
    """One way to launch. kind "vector": products on the CUDA cores, for 1 to 4 rows; "matrix": tensor cores, 1 to 64 rows; "tma": tensor
    cores, with the weights on their way before x is there (Hopper, ``_linear_tma``).

    block_n: outputs a program; block_k: inputs a step; slices: parts of K that a program's warps sum apart; splits: parts of K
    that programs of their own sum, the last to arrive adding them in order (not with a norm or a gate). num_stages: of the pipeline
    through shared memory; 1 with "matrix" goes past it ("direct"), with a slice for each warp and block_k a multiple of 32.
    "tma": block_k inputs a stage, of all slices together, a multiple of 64 · slices. One slice is wgmma, with a multiple of 64 outputs,
    x by TMA too, no norm, and splits, a power of two, not with a gate, each of which adds the parts of its share of the outputs.
    """

    kind: str
    block_n: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def block_m(self, rows: int) -> int:
        """Rows that a program computes for a call of 1 to 64."""
        size = row_class(rows)
        return size if self.kind == "vector" else max(8 if self.num_stages == 1 or self.kind == "tma" else 16, size)

    def workspace(self, tiles: int, rows: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the splits of ``tiles`` tiles of outputs leave their sums and count who has arrived; nothing without splits."""
        if self.splits == 1:
            return None, None
        elements = tiles * self.splits * self.block_n * self.block_m(rows)
        return torch.empty(elements, dtype=torch.float32, device=device), counters(tiles, device)

    def steps(self, k: int) -> int:
        """Steps over K that are unrolled; 0: a loop."""
        if self.kind != "matrix" or self.num_stages > 1:
            return 0
        assert self.slices == self.num_warps > 1 and self.block_k % 32 == 0, "a table gives each warp a slice, and runs of 32 inputs"
        return cdiv(k, self.splits * self.slices * self.block_k)

    def even(self, n: int, k: int) -> bool:
        """Whether no program has outputs or inputs past the end."""
        part = self.block_k * self.slices * (self.splits if self.steps(k) else 1)  # a loop ends where its part does
        return n % self.block_n == 0 and k % part == 0


@triton.jit
def _finish(
    y, up, scale, bias_ptr, residual_ptr, y_ptr, offs_m, offs_n, mask, rows, n, stride_rm, dtype: tl.constexpr, AXIS_N: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Scale, bias, activation, residual and the store; offs_m and offs_n broadcast to y's shape, n is the number of outputs.

    An int64 y_ptr takes no outputs but, per program and row, the key of the largest: its value, then the lower id first.
    """
    y = rounded(y, scale, bias_ptr, offs_n, offs_n < n, dtype, HAS_NORM, HAS_BIAS)
    if GATED:
        up = rounded(up, scale, bias_ptr, n + offs_n, offs_n < n, dtype, HAS_NORM, HAS_BIAS)
        y = cast(activate(y.to(tl.float32), "silu") * up.to(tl.float32), dtype)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_m.to(tl.int64) * stride_rm + offs_n, mask=mask, other=0.0)
        y = cast(residual.to(tl.float32) + y.to(tl.float32), dtype)
    if y_ptr.dtype.element_ty == tl.int64:
        wide = y.to(tl.float32)
        wide = tl.where(wide == 0.0, 0.0, tl.where(wide == wide, wide, -float("inf")))
        keys = tl.where(mask, (key_of(wide, 0).to(tl.int64) << 32) | (0xFFFFFFFF - offs_n.to(tl.int64)), -0x7FFFFFFFFFFFFFFF)
        best = tl.expand_dims(tl.max(keys, AXIS_N), AXIS_N)
        tl.store(y_ptr + tl.program_id(0).to(tl.int64) * rows + offs_m, best, mask=offs_m < rows)
    else:
        tl.store(y_ptr + offs_m.to(tl.int64) * n + offs_n, y, mask=mask)


@triton.jit
def _row_end(
    acc, up, squares, m, rows, offs_n, pointers, n, stride_rm, eps, dtype: tl.constexpr, K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    y, y_up, scale = row_sum(acc, up, squares, eps, K, HAS_NORM, GATED)
    bias_ptr, residual_ptr, y_ptr = pointers
    _finish(
        y[None, :], y_up[None, :], scale, bias_ptr, residual_ptr, y_ptr, tl.full([1, 1], m, tl.int32), offs_n[None, :],
        ((offs_n < n) & (m < rows))[None, :], rows, n, stride_rm, dtype, 1, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _vector_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, stride_xm, stride_wn, stride_rm, eps,
    K: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A row of x lies along the lanes like a row of the weights, and each of its up to four rows has a sum of its own: one tile of three
    # dimensions would change its layout through shared memory at every step.
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + offs_n[:, None].to(tl.int64) * stride_wn + offs_k[None, :]
    up_ptrs = w_ptrs + tl.cast(n, tl.int64) * stride_wn  # an n of 1 is a constant to Triton and has no .to
    mask_n = (offs_n < n)[:, None]
    # The first weights are on their way before anything waits for x.
    w = stream(w_ptrs, mask_n & (offs_k < K)[None, :], EVEN)
    w_up = w
    if GATED:
        w_up = stream(up_ptrs, mask_n & (offs_k < K)[None, :], EVEN)
    wait(PDL)
    acc, up, squares = vector_sums(
        x_ptr, norm_ptr, w_ptrs, up_ptrs, w, w_up, mask_n, offs_k, rows, stride_xm, K, HAS_NORM, GATED, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
    )
    pointers = (bias_ptr, residual_ptr, y_ptr)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    _row_end(acc[0], up[0], squares[0], 0, rows, offs_n, pointers, n, stride_rm, eps, dtype, K, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL)
    if BLOCK_M > 1:
        _row_end(acc[1], up[1], squares[1], 1, rows, offs_n, pointers, n, stride_rm, eps, dtype, K, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL)
    if BLOCK_M > 2:
        _row_end(acc[2], up[2], squares[2], 2, rows, offs_n, pointers, n, stride_rm, eps, dtype, K, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL)
        _row_end(acc[3], up[3], squares[3], 3, rows, offs_n, pointers, n, stride_rm, eps, dtype, K, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["rows"])
def _matrix_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, arrivals_ptr,
    rows, n, stride_xm, stride_wn, stride_rm, eps, k_total,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, NUM_STAGES: tl.constexpr,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n
    mask_m = offs_m < rows
    place = tl.program_id(0) * BLOCK_N + places(BLOCK_N, STEPS > 0)
    w_rows = w_ptr + place.to(tl.int64) * stride_wn
    up_rows = w_rows + tl.cast(n, tl.int64) * stride_wn  # an n of 1 is a constant to Triton and has no .to
    k_begin, k_end = share(k_total, SPLITS, SLICES * BLOCK_K)
    if STEPS > 0:
        # The first weights are on their way before anything waits for x.
        w = direct_weights(w_rows, place < n, k_begin, k_total, EVEN, BLOCK_K, SLICES)
        w_up = w
        if GATED:
            w_up = direct_weights(up_rows, place < n, k_begin, k_total, EVEN, BLOCK_K, SLICES)
        wait(PDL)
        acc, acc_up, squares = direct_sums(
            x_ptr, norm_ptr, w_rows, up_rows, w, w_up, place < n, rows, stride_xm, k_begin, k_total,
            HAS_NORM, GATED, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SLICES, STEPS,
        )  # fmt: skip
    else:
        # The software pipeline fetches weights and x together, so before x is there the first steps' weights are only called into L2.
        LINES: tl.constexpr = (SLICES * BLOCK_K * (2 if NUM_STAGES > 2 else 1) + 63) // 64
        last = tl.cast(n, tl.int64) - 1
        prefetch_rows(w_ptr + tl.minimum(offs_n, last) * stride_wn, k_begin, k_total, LINES, PDL)
        if GATED:
            prefetch_rows(w_ptr + (tl.minimum(offs_n, last) + n) * stride_wn, k_begin, k_total, LINES, PDL)
        wait(PDL)
        acc, acc_up, squares = matrix_sums(
            x_ptr, norm_ptr, w_rows, up_rows, mask_n, rows, stride_xm, k_begin, k_end, k_total,
            HAS_NORM, GATED, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SLICES, NUM_STAGES,
        )  # fmt: skip
    acc, acc_up, scale = matrix_end(acc, acc_up, squares, eps, k_total, HAS_NORM, SLICES)
    if SPLITS > 1:
        parts, last_of_all = arrive(acc, part_ptr, arrivals_ptr, SPLITS)
        if last_of_all:
            acc = add_parts(parts, arrivals_ptr, SPLITS)
            _finish(
                acc, acc_up, scale, bias_ptr, residual_ptr, y_ptr, offs_m[None, :], offs_n[:, None], mask_n[:, None] & mask_m[None, :],
                rows, n, stride_rm, x_ptr.dtype.element_ty, 0, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL,
            )  # fmt: skip
    else:
        _finish(
            acc, acc_up, scale, bias_ptr, residual_ptr, y_ptr, offs_m[None, :], offs_n[:, None], mask_n[:, None] & mask_m[None, :],
            rows, n, stride_rm, x_ptr.dtype.element_ty, 0, HAS_NORM, HAS_BIAS, GATED, HAS_RESIDUAL,
        )  # fmt: skip


def row_class(rows: int) -> int:
    """The smallest class of ROW_CLASSES that holds ``rows``."""
    return next(size for size in ROW_CLASSES if rows <= size)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    eps: float,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Run one tile. x [rows, k], weight [n or 2 n, k], residual [rows, n], last strides 1, y [rows, n] contiguous; unchecked.

    An int64 y [n / block_n, rows] takes the key of each program's largest output instead of the outputs; not with a "tma" tile.
    """
    if tile.kind == "tma":
        _linear_tma.launch(x, weight, bias, norm_weight, residual, gated, eps, y, tile)
        return
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = tile.block_m(rows)
    grid = (cdiv(n, tile.block_n),)
    strides = (x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0))
    pointers, sizes = (x, norm_weight, weight, bias, residual, y), (rows, n, *strides, eps, k)
    flags = (norm_weight is not None, bias is not None, gated, residual is not None, tile.even(n, k))
    if tile.kind == "vector":
        blocks = (block_m, tile.block_n, tile.block_k)
        _dependent.launch(_vector_kernel, grid, x.device, *pointers, *sizes, *flags, *blocks, num_warps=tile.num_warps)
        return
    assert tile.splits == 1 or (norm_weight is None and not gated), "tables give splits to plain projections only"
    _dependent.launch(
        _matrix_kernel, (*grid, tile.splits), x.device,
        *pointers, *tile.workspace(grid[0], rows, x.device), *sizes, *flags,
        block_m, tile.block_n, tile.block_k, tile.slices, tile.num_stages, tile.splits, tile.steps(k),
        num_warps=tile.num_warps,
    )  # fmt: skip
