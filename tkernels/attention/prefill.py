"""Prefill: attention of sequences with more than 8 query tokens over their paged KV cache, fresh, chunked or after a cached prefix.

One program computes one tile of BLOCK_M query rows of one KV head: BLOCK_M // group tokens times the heads of the group, so every
GQA ratio fills the tile and the causal diagonal wastes little. The grid is bounded by the number of tokens and sequences; a program
finds its tile from ``cu_seqlens_q`` and ``seq_lens`` on the device, longest first over the whole batch, head by head so that the
keys of one head stay in L2. Sequences with fewer query tokens belong to decode.py and are skipped.

Source: arXiv 2307.08691 (FlashAttention-2); differs: rows are tokens times the heads of a group, tiles are found on the device.

Key blocks that lie in the cache whole go through one pipelined loop, and are masked in it where the diagonal or a window cuts them.
Outside of it, with masked loads, are only the block of the window's first key and that of the sequence's last one. So NaN or Inf in V of a
key reaches rows before it, of the same block: 0 · Inf. Strides of pages and slots are compiled in, those of heads are not: where keys lie
head by head (padded.py) they grow with them.
"""

from __future__ import annotations

import torch

from tkernels._target import target_of
from tkernels._triton import cast, next_power_of_2, tl, triton
from tkernels.attention._common import LOG2_E, cap_logits, finish, held, page_ids, page_slots, product, read, scaled_tile, whole_page_ptrs
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import PrefillTiles, prefill_tiles


@triton.jit
def _tiles_above(level, tops, counts):
    """How many tiles of the batch have at least this level (their last key's position in tiles)."""
    return tl.sum(tl.minimum(tl.maximum(tops - level + 1, 0), counts), 0)


@triton.jit
def _tile_of(rank, upper, seqs, tops, bottoms, counts):
    """(sequence, level) of the rank-th tile, the highest level first; its level is at most ``upper``, which is looked at first."""
    level = 0
    middle = upper
    while level < upper:  # the highest level that has more than rank tiles at or above it
        enough = _tiles_above(middle, tops, counts) > rank
        level = tl.where(enough, middle, level)
        upper = tl.where(enough, upper, middle - 1)
        middle = (level + upper + 1) // 2
    index = rank - _tiles_above(level + 1, tops, counts)
    at_level = (counts > 0) & (tops >= level) & (bottoms <= level)
    return tl.sum(tl.where(at_level & (tl.cumsum(at_level.to(tl.int32), 0) == index + 1), seqs, 0), 0), level


@triton.jit
def _block(
    q, m, l, acc, k_head, v_head, page, start, low, high, cut, first, last, qk_scale, softcap,
    stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One block of keys, its pages in ``page`` [BLOCK_N]. WHOLE: all its keys may be loaded, and unless ``cut`` every row sees them.
    Otherwise keys outside of ``low`` and ``high`` are not even loaded."""
    offs_k = start + offs_n
    slot = page_slots(start, offs_n, PAGE, BLOCK_N)
    v_stride_n = stride_kn if SAME_STRIDES else stride_vn
    page = page.to(tl.int64)
    k_pages = page * stride_kp
    v_pages = k_pages if SAME_STRIDES else page * stride_vp
    k_ptrs = (k_head + k_pages)[:, None] + (slot[:, None] * stride_kn + offs_d[None, :])
    v_ptrs = (v_head + v_pages)[:, None] + (slot[:, None] * v_stride_n + offs_d[None, :])
    if not WHOLE:
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
    if not WHOLE:
        s = _seen(s, start, first, last, HAS_WINDOW)
    elif CAUSAL:
        if cut:
            s = _seen(s, start, first, last, HAS_WINDOW)
    m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new * qk_scale
    if CAUSAL or not WHOLE:
        base = tl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    p = tl.math.exp2(s * qk_scale[:, None] - base[:, None])
    a = tl.math.exp2(m * qk_scale - base)
    l = l * a + tl.sum(p, 1)
    acc = product(cast(p, COMPUTE), v.to(COMPUTE), acc * a[:, None])
    return m_new, l, acc


@triton.jit
def _seen(s, start, first, last, HAS_WINDOW: tl.constexpr):
    """s [M, N] of the keys from ``start``, -inf where the key is before the row's ``first`` or after its ``last`` [M].

    Keys are counted as 8 i + j: i is a constant in every register of a tensor core's tile, whereas the keys' numbers would be kept in a
    quarter of N registers a thread all through the loop.
    """
    M: tl.constexpr = s.shape[0]
    N: tl.constexpr = s.shape[1]
    i8 = 8 * tl.arange(0, N // 8)[None, :, None]
    j = start + tl.arange(0, 8)[None, None, :]
    s = tl.where(tl.reshape(i8 <= last[:, None, None] - j, [M, N]), s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where(tl.reshape(i8 >= first[:, None, None] - j, [M, N]), s, float("-inf"))
    return s


@triton.jit
def first_page_ids(table_row, begin, whole, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the blocks ``begin`` and ``begin + 1`` for ``fold_keys``, any where those are not before ``whole``.

    Called before q is loaded: the compiler stores q to shared memory, and so waits for it, ahead of what ``fold_keys`` begins with.
    """
    offs_n = tl.arange(0, BLOCK_N)
    page = tl.load(whole_page_ptrs(table_row, begin, offs_n, PAGE, BLOCK_N), mask=begin < whole, other=0)
    next_page = tl.load(whole_page_ptrs(table_row, begin + 1, offs_n, PAGE, BLOCK_N), mask=begin + 1 < whole, other=0)
    zeros = tl.zeros([BLOCK_N], tl.int32)
    return page + zeros, next_page + zeros


@triton.jit
def _edge(
    q, m, l, acc, k_head, v_head, table_row, begin, end, low, high, first, last, qk_scale, softcap,
    stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """The state with the blocks begin : end, of which only keys between ``low`` and ``high`` are loaded."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, acc.shape[1])
    for i in tl.range(begin, end, num_stages=1):
        ids = page_ids(table_row, i * BLOCK_N, offs_n, high - 1, PAGE, BLOCK_N)
        m, l, acc = _block(
            q, m, l, acc, k_head, v_head, ids, i * BLOCK_N, low, high, True, first, last, qk_scale, softcap,
            stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
            PAGE, BLOCK_N, False, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
        )  # fmt: skip
    return m, l, acc


@triton.jit
def fold_keys(
    q, m, l, acc, k_head, v_head, table_row, page, next_page, low, high, begin, whole, end, seen_begin, seen_end, first, last,
    qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SAME_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The state (m, l, acc) with the keys that rows see between ``low`` and ``high``, those from ``first`` to ``last`` [BLOCK_M] of a row.

    Blocks begin : whole may be loaded whole, and those from seen_begin to seen_end every row sees whole. The one before ``begin`` (of
    windows) and those from ``whole`` to ``end`` are loaded between ``low`` and ``high`` only. page, next_page: of ``first_page_ids``.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, acc.shape[1])
    if HAS_WINDOW:
        m, l, acc = _edge(
            q, m, l, acc, k_head, v_head, table_row, low // BLOCK_N, begin, low, high, first, last, qk_scale, softcap,
            stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
            PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
        )  # fmt: skip
    zeros = tl.zeros([BLOCK_N], tl.int32)
    # page ids are read two blocks ahead: keys are loaded one block ahead, and an address that is not there yet would stop the loop
    if begin < whole:  # without it the assembler sees a way around the loop to its last wait, and waits after every product (d 64)
        for i in tl.range(begin, whole, num_stages=STAGES):
            # of three tf32 products, two ways through the loop spill more than the mask costs
            cut = True if q.dtype == tl.float32 else (i < seen_begin) | (i >= seen_end)
            m, l, acc = _block(
                q, m, l, acc, k_head, v_head, page, i * BLOCK_N, low, high, cut, first, last,
                qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
                PAGE, BLOCK_N, True, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
            )  # fmt: skip
            page = held(next_page)
            next_page = read(whole_page_ptrs(table_row, tl.minimum(i + 2, whole - 1), offs_n, PAGE, BLOCK_N)) + zeros
    return _edge(
        q, m, l, acc, k_head, v_head, table_row, whole, end, low, high, first, last, qk_scale, softcap,
        stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
        PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES,
    )  # fmt: skip


@triton.jit
def _rows(tile, head, first_row, query_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the tile's rows: token in the sequence, head, whether it is one, and row of q; [BLOCK_M] each."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # GROUP · TOKENS rows are used
    offs_m = tl.arange(0, BLOCK_M)
    token_m = tile * TOKENS + offs_m // GROUP
    head_m = head * GROUP + offs_m % GROUP
    mask_m = (token_m < query_len) & (offs_m < TOKENS * GROUP)
    return token_m, head_m, mask_m, (first_row + token_m).to(tl.int64)


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "capacity", "window", "stride_bt"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, num_tiles, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh,
    stride_kp: tl.constexpr, stride_kn: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vn: tl.constexpr, stride_vh,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MIN_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    SAME_STRIDES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # of a tile
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
    num_prompts = tl.sum(tl.minimum(counts, 1), 0)
    top = tl.max(tl.where(counts > 0, tops, 0), 0)
    if rank < tl.sum(counts, 0):
        # a level has a tile of each prompt at most; where all prompts have the same levels, this bound is the answer
        s, level = _tile_of(rank, top - rank // num_prompts, seqs, tops, bottoms, counts)
        first_row = tl.load(cu_ptr + s)
        query_len = tl.load(cu_ptr + s + 1) - first_row
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + s), 0), capacity)
        offset = length - query_len  # position of the sequence's first query
        tile = level - tl.maximum(offset, 0) // TOKENS

        offs_d = tl.arange(0, BLOCK_D)
        mask_d = offs_d < DIM
        token_m, head_m, mask_m, rows = _rows(tile, head, first_row, query_len, GROUP, BLOCK_M)

        first_position = offset + tile * TOKENS
        last_position = offset + tl.minimum(tile * TOKENS + TOKENS, query_len) - 1
        high = length
        if CAUSAL:
            high = tl.maximum(tl.minimum(length, last_position + 1), 0)
        end = (high + BLOCK_N - 1) // BLOCK_N
        whole = tl.minimum(length // BLOCK_N, end)
        seen_end = tl.maximum(first_position + 1, 0) // BLOCK_N if CAUSAL else whole
        low = 0
        begin = 0
        seen_begin = 0
        if HAS_WINDOW:
            low = tl.maximum(first_position - window + 1, 0)
            begin = tl.minimum((low + BLOCK_N - 1) // BLOCK_N, end)
            whole = tl.maximum(whole, begin)
            seen_begin = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
        table_row = table_ptr + s.to(tl.int64) * stride_bt
        page, next_page = first_page_ids(table_row, begin, whole, PAGE, BLOCK_N)
        q_ptrs = q_ptr + rows[:, None] * stride_qt + head_m.to(tl.int64)[:, None] * stride_qh + offs_d[None, :]
        q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        q, qk_scale, v_factor = scaled_tile(
            q, head, scale, v_factor, k_scale_ptr, v_scale_ptr, stride_ks_h, stride_vs_h, HAS_K_SCALE, HAS_V_SCALE, NORMALISE_Q, COMPUTE
        )
        first = tl.maximum(offset + token_m - window + 1, 0)
        last = tl.minimum(offset + token_m, high - 1) if CAUSAL else tl.zeros([BLOCK_M], tl.int32) + (high - 1)
        m, l, acc = fold_keys(
            q, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            k_ptr + head.to(tl.int64) * stride_kh, v_ptr + head.to(tl.int64) * stride_vh, table_row, page, next_page,
            low, high, begin, whole, end, seen_begin, seen_end, first, last,
            qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
            PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, SAME_STRIDES, STAGES,
        )  # fmt: skip
        # again, so that no registers hold them during the loop
        token_m, head_m, mask_m, rows = _rows(held(tile), head, first_row, query_len, GROUP, BLOCK_M)
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
        x.stride_table, x.q.stride(0), x.q.stride(1), out.stride(0), out.stride(1), stride_lt, stride_lh,
        *x.k_cache.stride()[:3], *x.v_cache.stride()[:3],
        GROUP=group, DIM=x.dim, BLOCK_D=max(16, next_power_of_2(x.dim)), PAGE=x.page_size, MIN_QUERY=min_query,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, SEQS=max(16, next_power_of_2(x.num_seqs)),
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=lse is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, SAME_STRIDES=x.same_strides, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, maxnreg=tiles.maxnreg,
    )  # fmt: skip
