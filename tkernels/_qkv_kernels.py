"""The kernels of ``tkernels.linear_rope_and_cache`` and their launch: a few-row projection whose outputs are rotated and stored in place.

A program computes as many rows of the weight, in the same order of summation, as the one of ``tkernels.linear`` in the same tile. But it
takes rows that are partners in the rotation: blocks of RUN outputs, then the RUN outputs that stand half of the rotated elements
further on. So the outputs have the bits of ``linear``, and rotated, those of ``rope_and_cache``.
"""

from __future__ import annotations

import torch

from tkernels import _dependent, _qkv_tma
from tkernels._dependent import prefetch_rows, wait
from tkernels._linear_kernels import Tile
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
from tkernels._rope_kernels import rotate, store_as
from tkernels._triton import cdiv, tl, triton

_LONGEST_RUN = 8  # of the 16 rows of a tensor core's tile a thread holds two that are 8 apart


@triton.jit
def _column(place, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, RUN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The column of q | k | v that a program computes at ``place``: partners stand RUN places apart, in blocks of 2 RUN."""
    if INTERLEAVED:
        return place
    else:
        within = place % HEAD_DIM
        partnered = within // (2 * RUN) * RUN + within % RUN + within // RUN % 2 * (ROT_DIM // 2)
        return place - within + tl.where(within < ROT_DIM, partnered, within)


@triton.jit
def _partners(y, RUN: tl.constexpr):
    """[N, M] → the first and the second partner of each pair, [N / 2, M]."""
    N: tl.constexpr = y.shape[0]
    M: tl.constexpr = y.shape[1]
    y1, y2 = tl.split(tl.permute(tl.reshape(y, (N // (2 * RUN), 2, RUN, M)), (0, 2, 3, 1)))
    return tl.reshape(y1, (N // 2, M)), tl.reshape(y2, (N // 2, M))


@triton.jit
def _of_token(positions_ptr, slots_ptr, stride_positions, stride_slots, rows, BLOCK_M: tl.constexpr):
    """Position and slot of each row [BLOCK_M]; asked for ahead of the sums, since the cosines wait for them."""
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)  # by a stride that may be a wide table's
    position = tl.load(positions_ptr + offs_m * stride_positions, mask=offs_m < rows, other=0)
    slot = tl.load(slots_ptr + offs_m * stride_slots, mask=offs_m < rows, other=-1)
    return position, slot


@triton.jit
def _angles(
    place, position, cos_sin_ptr, stride_table, max_positions, rotated_heads, rows,
    HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, RUN: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Cosine and sine [N / 2, BLOCK_M] of the pairs whose first partner is at ``place``; a position outside the table gives NaN."""
    column = _column(place, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED)
    within = column % HEAD_DIM
    rotated = (place < rotated_heads * HEAD_DIM) & (within < ROT_DIM)
    known = (position >= 0) & (position < max_positions) & (tl.arange(0, position.shape[0]) < rows)
    table = cos_sin_ptr + position[None, :] * stride_table + (within // 2 if INTERLEAVED else within)[:, None]
    mask = rotated[:, None] & known[None, :]
    return tl.load(table, mask=mask, other=float("nan")), tl.load(table + ROT_DIM // 2, mask=mask, other=float("nan"))


@triton.jit
def _rotate_and_store(
    y, cos, sin, place, slot, q_ptr, k_cache_ptr, v_cache_ptr, k_strides, v_strides, num_heads, num_kv_heads, num_slots, rows,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, RUN: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """y [N, BLOCK_M], rounded: rotated and stored to q and the caches. place [N / 2]: of each pair's first partner."""
    x1, x2 = _partners(y, RUN)
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    column1 = _column(place, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED)
    column2 = _column(place + RUN, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED)
    head = (column1 // HEAD_DIM)[:, None]
    within1, within2 = (column1 % HEAD_DIM)[:, None], (column2 % HEAD_DIM)[:, None]
    rotated = (head < num_heads + num_kv_heads) & (within1 < ROT_DIM)
    y1, y2 = rotate(x1, x2, cos, sin)
    y1, y2 = tl.where(rotated, y1, x1), tl.where(rotated, y2, x2)
    offs_m = tl.arange(0, y.shape[1])[None, :]
    mask = offs_m < rows
    # All conditions of a branch are the same for all threads: most programs have outputs of q, of k or of v only.
    begin = tl.program_id(0) * y.shape[0]
    end = begin + y.shape[0]
    k_begin = num_heads * HEAD_DIM
    v_begin = k_begin + num_kv_heads * HEAD_DIM
    if begin < k_begin:
        q_rows = q_ptr + offs_m.to(tl.int64) * k_begin + head * HEAD_DIM
        mask_q = mask & (head < num_heads)
        store_as(q_rows + within1, y1, mask_q)
        store_as(q_rows + within2, y2, mask_q)
    if end > k_begin:
        written = mask & (slot >= 0)[None, :] & (slot < num_slots)[None, :]
        own = tl.maximum(slot, 0)[None, :]
        page, offset = own // PAGE_SIZE, own % PAGE_SIZE  # int64, as slot_mapping is
        if begin < v_begin:
            k_head = head - num_heads
            k_rows = k_cache_ptr + page * k_strides[0] + offset * k_strides[1] + k_head.to(tl.int64) * k_strides[2]
            mask_k = written & (k_head >= 0) & (k_head < num_kv_heads)
            store_as(k_rows + within1, y1, mask_k)
            store_as(k_rows + within2, y2, mask_k)
        if end > v_begin:
            v_head = head - num_heads - num_kv_heads
            v_rows = v_cache_ptr + page * v_strides[0] + offset * v_strides[1] + v_head.to(tl.int64) * v_strides[2]
            mask_v = written & (v_head >= 0) & (v_head < num_kv_heads)
            store_as(v_rows + within1, y1, mask_v)
            store_as(v_rows + within2, y2, mask_v)


@triton.jit
def _pair_places(BLOCK_N: tl.constexpr, RUN: tl.constexpr):
    pair = tl.arange(0, BLOCK_N // 2)
    return tl.program_id(0) * BLOCK_N + pair // RUN * (2 * RUN) + pair % RUN


# One number a row is read from positions and slots, so a slice that starts or steps otherwise must not mean another compilation, and
# nothing is gained by knowing that a count is 1 or a multiple of 16.
_UNSPECIALISED = {
    "do_not_specialize": ["rows", "stride_positions", "stride_slots", "num_heads", "num_kv_heads", "max_positions", "num_slots"],
    "do_not_specialize_on_alignment": ["positions_ptr", "slots_ptr"],
}


@triton.jit(**_UNSPECIALISED)
def _vector_qkv_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, q_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, cos_sin_ptr, slots_ptr,
    rows, stride_xm, stride_wn, eps, num_heads, num_kv_heads, max_positions, num_slots,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, stride_positions, stride_table, stride_slots,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, RUN: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    column = _column(offs_n, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED)
    mask_n = offs_n < (num_heads + 2 * num_kv_heads) * HEAD_DIM
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * stride_wn + offs_k[None, :]
    # The first weights are on their way before anything waits for x.
    w = stream(w_ptrs, mask_n[:, None] & (offs_k < K)[None, :], EVEN)
    wait(PDL)
    position, slot = _of_token(positions_ptr, slots_ptr, stride_positions, stride_slots, rows, BLOCK_M)
    acc, up, squares = vector_sums(
        x_ptr, norm_ptr, w_ptrs, w_ptrs, w, w, mask_n[:, None], offs_k, rows, stride_xm, K, HAS_NORM, False, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
    )
    place = _pair_places(BLOCK_N, RUN)
    cos, sin = _angles(
        place, position, cos_sin_ptr, stride_table, max_positions, num_heads + num_kv_heads, rows, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED
    )
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    y0, _, scale0 = row_sum(acc[0], up[0], squares[0], eps, K, HAS_NORM, False)
    y0 = rounded(y0, scale0, bias_ptr, column, mask_n, dtype, HAS_NORM, HAS_BIAS)
    if BLOCK_M == 1:
        y = y0[:, None]
    else:
        y1, _, scale1 = row_sum(acc[1], up[1], squares[1], eps, K, HAS_NORM, False)
        y1 = rounded(y1, scale1, bias_ptr, column, mask_n, dtype, HAS_NORM, HAS_BIAS)
        if BLOCK_M == 2:
            y = tl.join(y0, y1)
        else:
            y2, _, scale2 = row_sum(acc[2], up[2], squares[2], eps, K, HAS_NORM, False)
            y3, _, scale3 = row_sum(acc[3], up[3], squares[3], eps, K, HAS_NORM, False)
            y2 = rounded(y2, scale2, bias_ptr, column, mask_n, dtype, HAS_NORM, HAS_BIAS)
            y3 = rounded(y3, scale3, bias_ptr, column, mask_n, dtype, HAS_NORM, HAS_BIAS)
            y = tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), (BLOCK_N, BLOCK_M))
    _rotate_and_store(
        y, cos, sin, place, slot, q_ptr, k_cache_ptr, v_cache_ptr, (stride_kcp, stride_kcs, stride_kch),
        (stride_vcp, stride_vcs, stride_vch), num_heads, num_kv_heads, num_slots, rows, PAGE_SIZE, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED,
    )  # fmt: skip


@triton.jit(**_UNSPECIALISED)
def _matrix_qkv_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, q_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, cos_sin_ptr, slots_ptr, part_ptr, arrivals_ptr,
    rows, stride_xm, stride_wn, eps, k_total, num_heads, num_kv_heads, max_positions, num_slots,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, stride_positions, stride_table, stride_slots,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROT_DIM: tl.constexpr, RUN: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, NUM_STAGES: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = _column(offs_n, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED)
    mask_n = offs_n < n
    loaded = tl.program_id(0) * BLOCK_N + places(BLOCK_N, STEPS > 0)
    w_rows = w_ptr + _column(loaded, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED).to(tl.int64) * stride_wn
    k_begin, k_end = share(k_total, SPLITS, SLICES * BLOCK_K)
    if STEPS > 0:
        w = direct_weights(w_rows, loaded < n, k_begin, k_total, EVEN, BLOCK_K, SLICES)
    else:
        LINES: tl.constexpr = (SLICES * BLOCK_K * (2 if NUM_STAGES > 2 else 1) + 63) // 64
        prefetch_rows(w_ptr + tl.minimum(column, n - 1).to(tl.int64) * stride_wn, k_begin, k_total, LINES, PDL)
    wait(PDL)
    position, slot = _of_token(positions_ptr, slots_ptr, stride_positions, stride_slots, rows, BLOCK_M)
    if STEPS > 0:
        acc, up, squares = direct_sums(
            x_ptr, norm_ptr, w_rows, w_rows, w, w, loaded < n, rows, stride_xm, k_begin, k_total,
            HAS_NORM, False, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SLICES, STEPS,
        )  # fmt: skip
    else:
        acc, up, squares = matrix_sums(
            x_ptr, norm_ptr, w_rows, w_rows, mask_n, rows, stride_xm, k_begin, k_end, k_total,
            HAS_NORM, False, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, SLICES, NUM_STAGES,
        )  # fmt: skip
    last_of_all = True
    if SPLITS > 1:
        acc, _, scale = matrix_end(acc, up, squares, eps, k_total, HAS_NORM, SLICES)
        parts, last_of_all = arrive(acc, part_ptr, arrivals_ptr, SPLITS)
    if last_of_all:
        # The cosines are on their way while the sums come together.
        place = _pair_places(BLOCK_N, RUN)
        cos, sin = _angles(
            place, position, cos_sin_ptr, stride_table, max_positions, num_heads + num_kv_heads, rows, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED
        )
        if SPLITS > 1:
            y = add_parts(parts, arrivals_ptr, SPLITS)
        else:
            y, _, scale = matrix_end(acc, up, squares, eps, k_total, HAS_NORM, SLICES)
        y = rounded(y, scale, bias_ptr, column[:, None], mask_n[:, None], x_ptr.dtype.element_ty, HAS_NORM, HAS_BIAS)
        _rotate_and_store(
            y, cos, sin, place, slot, q_ptr, k_cache_ptr, v_cache_ptr, (stride_kcp, stride_kcs, stride_kch),
            (stride_vcp, stride_vcs, stride_vch), num_heads, num_kv_heads, num_slots, rows, PAGE_SIZE, HEAD_DIM, ROT_DIM, RUN, INTERLEAVED,
        )  # fmt: skip


def run_length(tile: Tile, head_dim: int, rot_dim: int, interleaved: bool) -> int:
    """How many outputs a program takes in a row before their partners; 0 where the tile cannot hold partners."""
    run = 1 if interleaved else min(_LONGEST_RUN, tile.block_n // 2)
    while run and (head_dim % (2 * run) or rot_dim % (2 * run)):
        run //= 2
    return run if tile.block_n >= 2 else 0


def takes(
    tile: Tile, x: torch.Tensor, weight: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rot_dim: int, interleaved: bool
) -> bool:
    """Whether a tile can rotate and store what it projects."""
    if tile.kind == "tma":
        return _qkv_tma.refusal(tile, x, weight, k_cache, v_cache, rot_dim, interleaved) is None
    return run_length(tile, k_cache.shape[3], rot_dim, interleaved) > 0


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
    q: torch.Tensor,
    tile: Tile,
) -> None:
    """Run one tile that ``takes`` the call, for 1 to 64 rows; q [rows, heads, head_dim] contiguous; unchecked."""
    if tile.kind == "tma":
        assert not interleaved
        _qkv_tma.launch(x, weight, bias, norm_weight, eps, positions, cos_sin, k_cache, v_cache, slots, q, tile)
        return
    rows, k = x.shape
    pages, page_size, kv_heads, head_dim = k_cache.shape
    n, rot_dim = weight.shape[0], cos_sin.shape[1]
    run = run_length(tile, head_dim, rot_dim, interleaved)
    block_m = tile.block_m(rows)
    grid = (cdiv(n, tile.block_n),)
    pointers = (x, norm_weight, weight, bias, q, k_cache, v_cache, positions, cos_sin, slots)
    counts = (q.shape[1], kv_heads, cos_sin.shape[0], pages * page_size)
    cache_strides = (*k_cache.stride()[:3], *v_cache.stride()[:3], positions.stride(0), cos_sin.stride(0), slots.stride(0))
    flags = (max(page_size, 1), head_dim, rot_dim, run, interleaved, norm_weight is not None, bias is not None, tile.even(n, k))
    if tile.kind == "vector":
        _dependent.launch(
            _vector_qkv_kernel, grid, x.device, *pointers, rows, x.stride(0), weight.stride(0), eps, *counts, *cache_strides, *flags,
            k, block_m, tile.block_n, tile.block_k, num_warps=tile.num_warps,
        )  # fmt: skip
        return
    assert tile.splits == 1 or norm_weight is None, "tables give splits to plain projections only"
    _dependent.launch(
        _matrix_qkv_kernel, (*grid, tile.splits), x.device,
        *pointers, *tile.workspace(grid[0], rows, x.device), rows, x.stride(0), weight.stride(0), eps, k, *counts, *cache_strides,
        *flags, block_m, tile.block_n, tile.block_k, tile.slices, tile.num_stages, tile.splits, tile.steps(k), num_warps=tile.num_warps,
    )  # fmt: skip
