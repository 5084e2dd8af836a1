"""The Gluon kernel of ``linear_rope_and_cache`` in a "tma" tile of several slices: the sums of ``_linear_sm90``, over weights that come as
partners. ``_qkv_rows_sm90`` has that of a tile of one slice.

A program takes BLOCK_N / 2 rows of the first half of a head and their partners in the second half. The descriptor sees the weight as
halves of heads, so one box holds both, where a plain one holds BLOCK_N neighbours: the sums do not know the difference. Positions, slots,
angles and caches are touched after ``wait`` only. Hopper only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels._gluon import enter
from tkernels._linear_sm90 import first_x, products, rounded, start


@gluon.constexpr_function
def partners_layout(pairs, warps, slices):
    """Of the sums [2, pairs, block_m], with SLICES [slices, 2, pairs, block_m]: a thread has both partners, and all slices of them."""
    lanes = min(32, pairs)
    if slices:
        return gl.BlockedLayout([slices, 2, 1, 1], [1, 1, lanes, 32 // lanes], [1, 1, 1, warps], [2, 3, 1, 0])
    return gl.BlockedLayout([2, 1, 1], [1, lanes, 32 // lanes], [1, 1, warps], [1, 2, 0])


@gluon.constexpr_function
def pairs_layout(pairs, warps):
    """Of either partner [pairs, block_m]."""
    lanes = min(32, pairs)
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _store(ptrs, y1, y2, mask, HALF: gl.constexpr):
    """The partners, rounded to the dtype that ptrs, of the first ones, point to."""
    gl.store(ptrs, y1.to(ptrs.dtype.element_ty), mask=mask)
    gl.store(ptrs + HALF, y2.to(ptrs.dtype.element_ty), mask=mask)


@gluon.jit
def angles(cos_sin_ptr, position, stride_table, max_positions, own, rotated, pair, HALF: gl.constexpr):
    """cos and sin of each pair and token [PAIRS, BLOCK_M]; NaN for a position that the table does not have."""
    known = own & (position >= 0) & (position < max_positions) & rotated
    table = cos_sin_ptr + (position * stride_table)[None, :] + pair[:, None]
    mask = known[None, :] & (pair < HALF)[:, None]
    return gl.load(table, mask=mask, other=float("nan")), gl.load(table + HALF, mask=mask, other=float("nan"))


@gluon.jit
def rotate_and_store(
    both, scale, bias_ptr, cos, sin, slot, head, pair, token, own, q_ptr, k_cache_ptr, v_cache_ptr, k_strides, v_strides,
    num_heads, num_kv_heads, num_slots, dtype: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The end of both kernels: the sums of partners [2, PAIRS, BLOCK_M] scaled, with bias, rotated, to q or to the caches."""
    HALF: gl.constexpr = HEAD_DIM // 2
    end: gl.constexpr = scale.type.layout
    rotated = head < num_heads + num_kv_heads
    y1, y2 = gl.split(gl.permute(both, (1, 2, 0)))
    y1, y2 = gl.convert_layout(y1, end), gl.convert_layout(y2, end)  # the same registers
    column = head * HEAD_DIM + pair
    y1 = rounded(y1, scale, bias_ptr, column, pair < HALF, dtype, HAS_NORM, HAS_BIAS).to(gl.float32)
    y2 = rounded(y2, scale, bias_ptr, column + HALF, pair < HALF, dtype, HAS_NORM, HAS_BIAS).to(gl.float32)
    if rotated:  # as ``rotate`` of _rope_kernels.py
        y1, y2 = gl.fma(y1, cos, -(y2 * sin)), gl.fma(y2, cos, y1 * sin)
    mask = own[None, :] & (pair < HALF)[:, None]
    if head < num_heads:
        q_rows = q_ptr + (token.to(gl.int64) * (num_heads * HEAD_DIM))[None, :]
        _store(q_rows + column[:, None], y1, y2, mask, HALF)
    else:
        mask = mask & ((slot >= 0) & (slot < num_slots))[None, :]
        slot = gl.maximum(slot, 0)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE  # int64, as slot_mapping is
        if rotated:
            k_head = (head - num_heads).to(gl.int64)
            k_rows = k_cache_ptr + (page * k_strides[0] + offset * k_strides[1] + k_head * k_strides[2])[None, :]
            _store(k_rows + pair[:, None], y1, y2, mask, HALF)
        else:
            v_head = (head - num_heads - num_kv_heads).to(gl.int64)
            v_rows = v_cache_ptr + (page * v_strides[0] + offset * v_strides[1] + v_head * v_strides[2])[None, :]
            _store(v_rows + pair[:, None], y1, y2, mask, HALF)


# as in _qkv_kernels.py
@gluon.jit(
    do_not_specialize=["rows", "stride_positions", "stride_slots", "num_heads", "num_kv_heads", "max_positions", "num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def qkv_sm90_kernel(
    w_desc, x_ptr, norm_ptr, bias_ptr, q_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, cos_sin_ptr, slots_ptr,
    rows, stride_xm, eps, num_heads, num_kv_heads, max_positions, num_slots,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, stride_positions, stride_table, stride_slots,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, K: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr,
    X_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, PIECE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """w_desc: the weight as [K / 64, 2 heads, HEAD_DIM / 2, 64] in boxes of [STAGE_CHUNKS, 2, BLOCK_N / 2, 64]. HEAD_DIM: a multiple of
    BLOCK_N, all of it rotated. The rest as in ``linear_sm90_kernel``."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    HALF: gl.constexpr = HEAD_DIM // 2
    PAIRS: gl.constexpr = BLOCK_N // 2
    partners: gl.constexpr = partners_layout(PAIRS, gl.num_warps(), SLICES)
    end: gl.constexpr = pairs_layout(PAIRS, gl.num_warps())
    head = gl.program_id(0) * BLOCK_N // HEAD_DIM
    first = gl.program_id(0) * BLOCK_N % HEAD_DIM // 2
    memory = start(w_desc, 2 * head, first, dtype, K, False, X_ROWS, BLOCK_N, STAGE_CHUNKS, STAGES, PIECE)
    offs_m, offs_k, norm = first_x(norm_ptr, K, HAS_NORM, X_ROWS, PIECE)
    x_ptrs = x_ptr + (offs_m.to(gl.int64) * stride_xm + offs_k)
    pair = first + gl.arange(0, PAIRS, gl.SliceLayout(1, end))
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, end))
    own = token < rows
    rotated = head < num_heads + num_kv_heads
    enter(PDL)
    x = gl.load(x_ptrs, mask=(offs_m < rows) & (offs_k < K), other=0.0)
    position = gl.load(positions_ptr + token.to(gl.int64) * stride_positions, mask=own, other=0)
    slot = gl.load(slots_ptr + token.to(gl.int64) * stride_slots, mask=own, other=-1)
    # The angles are on their way while the products are made.
    cos, sin = angles(cos_sin_ptr, position, stride_table, max_positions, own, rotated, pair, HALF)
    acc, _, scale = products(
        w_desc, memory, x, norm, x_ptrs, norm_ptr, offs_m, offs_k, rows, 2 * head, first, eps,
        K, HAS_NORM, False, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, SLICES, PIECE, PAIRS, end,
    )  # fmt: skip
    both = gl.sum(gl.convert_layout(gl.reshape(acc, [SLICES, 2, PAIRS, BLOCK_M]), partners), 0)
    rotate_and_store(
        both, scale, bias_ptr, cos, sin, slot, head, pair, token, own, q_ptr, k_cache_ptr, v_cache_ptr,
        (stride_kcp, stride_kcs, stride_kch), (stride_vcp, stride_vcs, stride_vch),
        num_heads, num_kv_heads, num_slots, dtype, PAGE_SIZE, HEAD_DIM, HAS_NORM, HAS_BIAS,
    )  # fmt: skip
