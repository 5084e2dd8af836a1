"""The Gluon kernel of ``linear_rope_and_cache`` in a "tma" tile of one slice: the sums of ``_linear_rows_sm90``, over weights that come as
partners, as in ``_qkv_sm90``. Hopper only."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels._gluon import enter
from tkernels._linear_parts_sm90 import add_parts, leave, meet, reset, share_shape
from tkernels._linear_rows_sm90 import products, start, start_x
from tkernels._qkv_sm90 import angles, pairs_layout, partners_layout, rotate_and_store


@gluon.jit
def _tokens(
    first, share, head, positions_ptr, cos_sin_ptr, slots_ptr, rows, num_heads, num_kv_heads, max_positions,
    stride_positions, stride_table, stride_slots, HALF: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, end: gl.constexpr,
):  # fmt: skip
    """Pairs and rows of a share of the tile of pairs from ``first`` on, and what its rotation takes: cos, sin, slot."""
    SHAPE: gl.constexpr = share_shape(BLOCK_N, BLOCK_M, SPLITS)
    ALONG: gl.constexpr = BLOCK_N // SHAPE[0]  # shares of the same rows
    pair = first + share % ALONG * (SHAPE[0] // 2) + gl.arange(0, SHAPE[0] // 2, gl.SliceLayout(1, end))
    token = share // ALONG * SHAPE[1] + gl.arange(0, SHAPE[1], gl.SliceLayout(0, end))
    own = token < rows
    position = gl.load(positions_ptr + token.to(gl.int64) * stride_positions, mask=own, other=0)
    slot = gl.load(slots_ptr + token.to(gl.int64) * stride_slots, mask=own, other=-1)
    cos, sin = angles(cos_sin_ptr, position, stride_table, max_positions, own, head < num_heads + num_kv_heads, pair, HALF)
    return pair, token, cos, sin, slot


@gluon.jit(
    do_not_specialize=["rows", "stride_positions", "stride_slots", "num_heads", "num_kv_heads", "max_positions", "num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def qkv_rows_sm90_kernel(
    w_desc, x_desc, bias_ptr, q_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, cos_sin_ptr, slots_ptr, part_ptr, arrivals_ptr,
    rows, num_heads, num_kv_heads, max_positions, num_slots,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, stride_positions, stride_table, stride_slots,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    STEPS: gl.constexpr, SPLITS: gl.constexpr, PATIENCE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """w_desc, HEAD_DIM: as in ``qkv_sm90_kernel``; the rest as in ``linear_rows_sm90_kernel``."""
    dtype: gl.constexpr = w_desc.dtype
    HALF: gl.constexpr = HEAD_DIM // 2
    PAIRS: gl.constexpr = share_shape(BLOCK_N, BLOCK_M, SPLITS)[0] // 2
    partners: gl.constexpr = partners_layout(PAIRS, gl.num_warps(), 0)
    end: gl.constexpr = pairs_layout(PAIRS, gl.num_warps())
    split = gl.program_id(0)
    head = gl.program_id(1) * BLOCK_N // HEAD_DIM
    first = gl.program_id(1) * BLOCK_N % HEAD_DIM // 2
    begin = split * (STEPS * STAGE_CHUNKS)
    memory = start(w_desc, 2 * head, first, begin, dtype, False, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES)
    enter(PDL)
    start_x(x_desc, memory, begin, BLOCK_M, STAGE_CHUNKS, X_STAGES)
    pair, token, cos, sin, slot = _tokens(
        first, split, head, positions_ptr, cos_sin_ptr, slots_ptr, rows, num_heads, num_kv_heads, max_positions,
        stride_positions, stride_table, stride_slots, HALF, BLOCK_M, BLOCK_N, SPLITS, end,
    )  # fmt: skip
    acc, _ = products(w_desc, x_desc, memory, 2 * head, first, begin, STEPS, False, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES)
    scale = gl.full([1, 1], 1.0, gl.float32, end)
    if SPLITS > 1:
        parts = leave(acc, part_ptr, SPLITS)
        shares, departed = meet(arrivals_ptr, SPLITS, PATIENCE)
        for turn in range(SPLITS):
            share = (split + turn) % SPLITS
            if (shares >> share) & 1:
                if turn > 0:  # of one that did not wait
                    pair, token, cos, sin, slot = _tokens(
                        first, share, head, positions_ptr, cos_sin_ptr, slots_ptr, rows, num_heads, num_kv_heads, max_positions,
                        stride_positions, stride_table, stride_slots, HALF, BLOCK_M, BLOCK_N, SPLITS, end,
                    )  # fmt: skip
                both = gl.reshape(add_parts(parts, share, BLOCK_N, BLOCK_M, SPLITS), [2, PAIRS, token.shape[0]])
                rotate_and_store(
                    gl.convert_layout(both, partners), scale, bias_ptr, cos, sin, slot, head, pair, token, token < rows,
                    q_ptr, k_cache_ptr, v_cache_ptr, (stride_kcp, stride_kcs, stride_kch), (stride_vcp, stride_vcs, stride_vch),
                    num_heads, num_kv_heads, num_slots, dtype, PAGE_SIZE, HEAD_DIM, False, HAS_BIAS,
                )  # fmt: skip
        reset(departed, arrivals_ptr, SPLITS)
    else:
        both = gl.reshape(acc, [2, PAIRS, BLOCK_M])
        rotate_and_store(
            gl.convert_layout(both, partners), scale, bias_ptr, cos, sin, slot, head, pair, token, token < rows,
            q_ptr, k_cache_ptr, v_cache_ptr, (stride_kcp, stride_kcs, stride_kch), (stride_vcp, stride_vcs, stride_vch),
            num_heads, num_kv_heads, num_slots, dtype, PAGE_SIZE, HEAD_DIM, False, HAS_BIAS,
        )  # fmt: skip
