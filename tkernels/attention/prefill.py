"""Prefill: attention of sequences with more than 8 query tokens over their paged KV cache, fresh, chunked or after a cached prefix.

One program computes one tile of BLOCK_M query rows of one KV head: BLOCK_M // group tokens times the heads of the group, so every
GQA ratio fills the tile and the causal diagonal wastes little. The grid is bounded by the number of tokens and sequences; a program
finds its tile from ``cu_seqlens_q`` and ``seq_lens`` on the device, longest first over the whole batch, head by head so that the
keys of one head stay in L2. Sequences with fewer query tokens belong to decode.py and are skipped.

Source: arXiv 2307.08691 (FlashAttention-2); differs: rows are tokens times the heads of a group, tiles are found on the device.

Key blocks are of three kinds: cut by the window's start, seen by every row (no mask in that loop), cut by the diagonal or the end.
"""

from __future__ import annotations

import torch

from tkernels._target import target_of
from tkernels._triton import cast, next_power_of_2, tl, triton
from tkernels.attention._common import LOG2_E, cap_logits, finish, page_ids, page_slots, product, scaled_rows
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import PrefillTiles, prefill_tiles


@triton.jit
def _tiles_above(level, tops, counts):
    """How many tiles of the batch have at least this level (their last key's position in tiles)."""
    return tl.sum(tl.minimum(tl.maximum(tops - level + 1, 0), counts), 0)


@triton.jit
def block(
    q, m, l, acc, k_head, v_head, table_row, start, low, high, position, qk_scale, softcap, window,
    stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One block of keys. ``low`` and ``high``: keys outside of them are not even loaded."""
    offs_k = start + offs_n
    page = page_ids(table_row, start, offs_n, tl.maximum(high - 1, 0), PAGE, BLOCK_N).to(tl.int64)
    slot = page_slots(start, offs_n, PAGE, BLOCK_N)
    k_pages = page * stride_kp
    v_pages = k_pages if SAME_STRIDES else page * stride_vp
    v_stride_n = stride_kn if SAME_STRIDES else stride_vn
    k_ptrs = (k_head + k_pages)[:, None] + (slot[:, None] * stride_kn + offs_d[None, :])
    v_ptrs = (v_head + v_pages)[:, None] + (slot[:, None] * v_stride_n + offs_d[None, :])
    if MASKED:
        loaded = (offs_k >= low) & (offs_k < high)
        mask_kv = loaded[:, None] & mask_d[None, :]
        k = tl.load(k_ptrs, mask=mask_kv, other=0.0)
        v = tl.load(v_ptrs, mask=mask_kv, other=0.0)
    elif PAD_D:
        k = tl.load(k_ptrs, mask=mask_d[None, :], other=0.0)
        v = tl.load(v_ptrs, mask=mask_d[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    s = product(q, tl.trans(k.to(COMPUTE)), tl.zeros([m.shape[0], BLOCK_N], tl.float32))
    if HAS_SOFTCAP:
        s = cap_logits(s * qk_scale[:, None], softcap)
        qk_scale = tl.full(qk_scale.shape, 1.0, tl.float32)
    if MASKED:
        visible = loaded[None, :]
        if CAUSAL:
            visible = visible & (offs_k[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (offs_k[None, :] > position[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new * qk_scale
    if MASKED:
        base = tl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    p = tl.math.exp2(s * qk_scale[:, None] - base[:, None])
    a = tl.math.exp2(m * qk_scale - base)
    l = l * a + tl.sum(p, 1)
    acc = product(cast(p, COMPUTE), v.to(COMPUTE), acc * a[:, None])
    return m_new, l, acc


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "capacity", "window", "stride_bt"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, num_tiles, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_lh,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MIN_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    SAME_STRIDES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # of a tile; GROUP · TOKENS rows are used
    PAD_D: tl.constexpr = BLOCK_D != DIM
    rank = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles

    # the rank-th tile of the batch, the one with the most keys first
    seqs = tl.arange(0, SEQS)
    live = seqs < num_seqs
    firsts = tl.load(cu_ptr + seqs, mask=live, other=0)
    query_lens = tl.load(cu_ptr + seqs + 1, mask=live, other=0) - firsts
    lengths = tl.minimum(tl.maximum(tl.load(lens_ptr + seqs, mask=live, other=0), 0), capacity)
    counts = tl.where(query_lens >= MIN_QUERY, (query_lens + TOKENS - 1) // TOKENS, 0)
    bottoms = tl.maximum(lengths - query_lens, 0) // TOKENS
    tops = bottoms + counts - 1
    if rank < tl.sum(counts, 0):
        level = 0
        upper = tl.max(tops, 0)
        while level < upper:  # the highest level that has more than rank tiles at or above it
            middle = (level + upper + 1) // 2
            enough = _tiles_above(middle, tops, counts) > rank
            level = tl.where(enough, middle, level)
            upper = tl.where(enough, upper, middle - 1)
        index = rank - _tiles_above(level + 1, tops, counts)
        at_level = (counts > 0) & (tops >= level) & (bottoms <= level)
        s = tl.sum(tl.where(at_level & (tl.cumsum(at_level.to(tl.int32), 0) == index + 1), seqs, 0), 0)
        first_row = tl.load(cu_ptr + s)
        query_len = tl.load(cu_ptr + s + 1) - first_row
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + s), 0), capacity)
        offset = length - query_len  # position of the sequence's first query
        tile = level - tl.maximum(offset, 0) // TOKENS

        offs_m = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        offs_n = tl.arange(0, BLOCK_N)
        mask_d = offs_d < DIM
        token_m = tile * TOKENS + offs_m // GROUP
        head_m = head * GROUP + offs_m % GROUP
        mask_m = (token_m < query_len) & (offs_m < TOKENS * GROUP)
        rows = (first_row + token_m).to(tl.int64)
        q_ptrs = q_ptr + rows[:, None] * stride_qt + head_m.to(tl.int64)[:, None] * stride_qh + offs_d[None, :]
        q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        if HAS_K_SCALE:
            scale *= tl.load(k_scale_ptr + head * stride_ks_h)
        if HAS_V_SCALE:
            v_factor *= tl.load(v_scale_ptr + head * stride_vs_h)
        qk_scale = tl.full([BLOCK_M], 1.0, tl.float32) * scale
        if NORMALISE_Q:
            q, largest = scaled_rows(q, COMPUTE)
            qk_scale *= largest
        position = offset + token_m

        first_position = offset + tile * TOKENS
        last_position = offset + tl.minimum(tile * TOKENS + TOKENS, query_len) - 1
        high = length
        full_end = length // BLOCK_N  # blocks before it are seen whole by every row
        if CAUSAL:
            high = tl.maximum(tl.minimum(length, last_position + 1), 0)
            full_end = tl.maximum(tl.minimum(full_end, (first_position + 1) // BLOCK_N), 0)
        low = 0
        full_begin = 0
        if HAS_WINDOW:
            low = tl.maximum(first_position - window + 1, 0)
            full_begin = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
        end = (high + BLOCK_N - 1) // BLOCK_N
        full_begin = tl.minimum(full_begin, end)
        full_end = tl.maximum(full_end, full_begin)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        k_head = k_ptr + head.to(tl.int64) * stride_kh
        v_head = v_ptr + head.to(tl.int64) * stride_vh
        table_row = table_ptr + s.to(tl.int64) * stride_bt
        if HAS_WINDOW:
            for i in tl.range(low // BLOCK_N, full_begin, num_stages=1):
                m, l, acc = block(
                    q, m, l, acc, k_head, v_head, table_row, i * BLOCK_N, low, high, position, qk_scale, softcap, window,
                    stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
                    PAGE, BLOCK_N, True, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
                )  # fmt: skip
        for i in tl.range(full_begin, full_end, num_stages=STAGES):
            m, l, acc = block(
                q, m, l, acc, k_head, v_head, table_row, i * BLOCK_N, low, high, position, qk_scale, softcap, window,
                stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
                PAGE, BLOCK_N, False, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
            )  # fmt: skip
        for i in tl.range(full_end, end, num_stages=1):
            m, l, acc = block(
                q, m, l, acc, k_head, v_head, table_row, i * BLOCK_N, low, high, position, qk_scale, softcap, window,
                stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
                PAGE, BLOCK_N, True, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
            )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head_m).to(tl.float32)
            sink = tl.where(length > 0, sink, float("-inf"))
        else:
            sink = m
        if not HAS_SOFTCAP:
            m = m * qk_scale
        factor, lse = finish(m, l, sink, v_factor, HAS_SINKS)
        out_ptrs = out_ptr + rows[:, None] * stride_ot + head_m[:, None] * stride_oh + offs_d[None, :]
        tl.store(out_ptrs, cast(acc * factor[:, None], out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d[None, :])
        if HAS_LSE:
            tl.store(lse_ptr + rows * stride_lt + head_m * stride_lh, lse, mask=mask_m)


def prefill(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_query: int, tiles: PrefillTiles | None = None) -> None:
    """Write the rows of every sequence with at least ``min_query`` query tokens."""
    x = inputs
    group = x.heads // x.kv_heads
    if tiles is None:
        tiles = prefill_tiles(target_of(out.device).arch, x.dim, x.k_cache.element_size())
    block_m = max(tiles.block_m, next_power_of_2(group))
    # sum of ceil(query_len / tokens) over at most tokens // min_query sequences
    num_tokens = x.q.shape[0]
    num_tiles = num_tokens // (block_m // group) + min(x.num_seqs, num_tokens // min_query)
    if num_tiles == 0 or num_tokens < min_query:
        return
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    _prefill_kernel[(num_tiles * x.kv_heads,)](
        x.q, x.k_cache, x.v_cache, out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale,
        x.num_seqs, num_tiles, x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor, x.k_scale_stride, x.v_scale_stride,
        x.stride_table, x.q.stride(0), x.q.stride(1), *x.k_cache.stride()[:3], *x.v_cache.stride()[:3],
        out.stride(0), out.stride(1), stride_lt, stride_lh,
        GROUP=group, DIM=x.dim, BLOCK_D=max(16, next_power_of_2(x.dim)), PAGE=x.page_size, MIN_QUERY=min_query,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, SEQS=max(16, next_power_of_2(x.num_seqs)),
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=lse is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, SAME_STRIDES=x.same_strides, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, maxnreg=tiles.maxnreg,
    )  # fmt: skip
