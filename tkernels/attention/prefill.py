"""Prefill: attention of sequences with more than 8 query tokens over their paged KV cache, fresh, chunked or after a cached prefix.

A tile is BLOCK_M query rows of one KV head: BLOCK_M // group tokens times the heads of the group, so every GQA ratio fills it and the
causal diagonal wastes little. A program computes one, of a grid bounded by the number of tokens and sequences. It finds it from
``cu_seqlens_q`` and ``seq_lens`` on the device, longest first over the whole batch, head by head so that the keys of one head stay in L2.
Sequences with fewer query tokens belong to decode.py and are skipped.

Rows that see many keys may have tiles of their own, which are faster but leave the multiprocessor to one program, so that nothing hides its
beginning and its end. A launch takes the rows on its side of that bound, which is part of the table, and that of many keys has as many
programs as run at once, which take tiles as they come. Which tile a row is in follows from its position, so its bits do not depend on the
batch. The order of the sums is the same in chunks of a prompt; on a GPU the bits may not be, as a chunk's last block is computed by the
code for blocks that are loaded in part.

Source: arXiv 2307.08691 (FlashAttention-2); differs: rows are tokens times the heads of a group, tiles are found on the device.

The loop over the keys is in _fold_keys.py. Strides of pages and slots are compiled in, those of heads are not: where keys lie head by head
(padded.py) they grow with them.
"""

from __future__ import annotations

import torch

from tkernels import _dependent
from tkernels._counters import counters
from tkernels._dependent import depart, wait
from tkernels._target import target_of
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.attention._common import LOG2_E, finish, held, scaled_tile
from tkernels.attention._fold_keys import first_page_ids, fold_keys
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import PrefillTiles, long_prefill_tiles, prefill_tiles

ALL, SHORT, LONG = 0, 1, 2  # rows of a launch


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
def _rows(tile, head, first_row, query_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the tile's rows: token in the sequence, head, whether it is one, and row of q; [BLOCK_M] each."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # GROUP · TOKENS rows are used
    offs_m = tl.arange(0, BLOCK_M)
    token_m = tile * TOKENS + offs_m // GROUP
    head_m = head * GROUP + offs_m % GROUP
    mask_m = (token_m < query_len) & (offs_m < TOKENS * GROUP)
    return token_m, head_m, mask_m, (first_row + token_m).to(tl.int64)


@triton.jit
def _rows_of_part(query_len, length, MIN_QUERY: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, BEYOND: tl.constexpr):
    """(first, number) of a sequence's query tokens in this part: those that see at most BEYOND keys, or those that see more. Of a sequence
    with more query tokens than keys (lengths beyond the table's are cut) it is the first BEYOND tokens, and the others."""
    count = tl.where(query_len >= MIN_QUERY, query_len, 0)
    if PART == 0:
        first = 0
    else:
        if CAUSAL:
            first = tl.minimum(tl.maximum(BEYOND - tl.maximum(length - query_len, 0), 0), count)
        else:
            first = tl.where(length > BEYOND, 0, count)
        if PART == 1:
            count = first
            first = 0
        else:
            count -= first
    return first, count


@triton.jit
def _tile(
    item, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh,
    stride_kp: tl.constexpr, stride_kn: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vn: tl.constexpr, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MIN_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr, PART: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    """Write the item-th tile, if there are so many. Returns how many there are: of all heads, head by head, the most keys first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # of a tile
    PAD_D: tl.constexpr = BLOCK_D != DIM
    seqs = tl.arange(0, SEQS)
    live = seqs < num_seqs
    firsts = tl.load(cu_ptr + seqs, mask=live, other=0)
    query_lens = tl.load(cu_ptr + seqs + 1, mask=live, other=0) - firsts
    lengths = tl.minimum(tl.maximum(tl.load(lens_ptr + seqs, mask=live, other=0), 0), capacity)
    skipped, parts = _rows_of_part(query_lens, lengths, MIN_QUERY, CAUSAL, PART, BEYOND)
    counts = (parts + TOKENS - 1) // TOKENS
    bottoms = tl.maximum(lengths - query_lens + skipped, 0) // TOKENS
    tops = bottoms + counts - 1
    num_prompts = tl.sum(tl.minimum(counts, 1), 0)
    top = tl.max(tl.where(counts > 0, tops, 0), 0)
    num_tiles = tl.sum(counts, 0)
    if item < num_tiles * KV_HEADS:
        rank = item % num_tiles
        head = item // num_tiles
        # a level has a tile of each prompt at most; where all prompts have the same levels, this bound is the answer
        s, level = _tile_of(rank, top - rank // num_prompts, seqs, tops, bottoms, counts)
        first_row = tl.load(cu_ptr + s)
        query_len = tl.load(cu_ptr + s + 1) - first_row
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + s), 0), capacity)
        skip, part = _rows_of_part(query_len, length, MIN_QUERY, CAUSAL, PART, BEYOND)
        offset = length - query_len + skip  # position of the first of these queries
        first_row += skip
        query_len = part
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
            PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, STAGES, OVERLAP,
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
    return num_tiles * KV_HEADS


@triton.jit(do_not_specialize=["num_seqs", "capacity", "window", "stride_bt"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, counter_ptr,
    num_seqs, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh,
    stride_kp: tl.constexpr, stride_kn: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vn: tl.constexpr, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MIN_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr, PART: tl.constexpr, BEYOND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    if PART == 2:  # as many programs as run at once: where no row is of this part, more would cost more than they find
        item = tl.program_id(0)
        go = item >= 0
        while go:
            items = _tile(
                item, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
                num_seqs, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
                stride_bt, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh,
                stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
                KV_HEADS, GROUP, DIM, BLOCK_D, PAGE, MIN_QUERY, BLOCK_M, BLOCK_N, SEQS, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS,
                HAS_K_SCALE, HAS_V_SCALE, HAS_LSE, NORMALISE_Q, COMPUTE, STAGES, OVERLAP, PART, BEYOND,
            )  # fmt: skip
            go = item < items
            if go:
                done = tl.atomic_add(counter_ptr, 1)
                if done == items - 1:  # a launch counts every item once: the last one leaves the counter at zero
                    tl.atomic_xchg(counter_ptr, 0)
                item = done + tl.num_programs(0)
    else:
        _tile(
            tl.program_id(0), q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
            num_seqs, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
            stride_bt, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh,
            stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
            KV_HEADS, GROUP, DIM, BLOCK_D, PAGE, MIN_QUERY, BLOCK_M, BLOCK_N, SEQS, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS,
            HAS_K_SCALE, HAS_V_SCALE, HAS_LSE, NORMALISE_Q, COMPUTE, STAGES, OVERLAP, PART, BEYOND,
        )  # fmt: skip
    depart(PDL)


def prefill(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_query: int, tiles: PrefillTiles | None = None,
    long_tiles: PrefillTiles | None = None,
) -> None:  # fmt: skip
    """Write the rows of every sequence with at least ``min_query`` query tokens.

    tiles: the table's, both, if None. long_tiles: for rows that see more than ``beyond`` keys; None: ``tiles`` are for all rows. So they
    are with a window: comparing two ends of a row's keys costs the long tiles the registers that make them fast. So they are with groups
    that a tile does not hold: a larger one of so many keys does not fit shared memory.
    """
    x = inputs
    if tiles is None:
        arch = target_of(out.device).arch
        tiles, long_tiles = prefill_tiles(arch, x.dim, x.k_cache.element_size()), long_prefill_tiles(arch, x.dim, x.k_cache.element_size())
    if x.q.shape[0] < min_query:
        return
    group = x.heads // x.kv_heads
    if long_tiles is None or x.capacity <= long_tiles.beyond or x.window > 0 or group > long_tiles.block_m:
        _launch(x, out, lse, min_query, tiles, ALL, 0, _dependent.ALONE)
    else:
        counter = _launch(x, out, lse, min_query, long_tiles, LONG, long_tiles.beyond, _dependent.FIRST)
        _launch(x, out, lse, min_query, tiles, SHORT, long_tiles.beyond, _dependent.BESIDE)
        del counter  # which outlives the launch of the set's last kernel


def _launch(
    x: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_query: int, tiles: PrefillTiles, part: int, beyond: int, place: int
) -> torch.Tensor | None:
    """Returns the launch's counter, if it has one."""
    group = x.heads // x.kv_heads
    block_m = max(tiles.block_m, next_power_of_2(group))
    tokens = block_m // group
    # sum of ceil(query_len / tokens) over at most tokens // min_query sequences
    prompts = min(x.num_seqs, x.q.shape[0] // min_query)
    num_tiles = x.q.shape[0] // tokens + prompts
    programs = num_tiles * x.kv_heads
    if part == SHORT and x.causal:
        programs = min(num_tiles, prompts * cdiv(beyond, tokens)) * x.kv_heads
    elif part == LONG:
        programs = min(programs, target_of(out.device).num_sms * tiles.programs_per_sm)
    counter = counters(1, out.device) if part == LONG else None
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    _dependent.launch(
        _prefill_kernel, (programs,), out.device,
        x.q, x.k_cache, x.v_cache, out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale,
        counter,
        x.num_seqs, x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor, x.k_scale_stride, x.v_scale_stride,
        x.stride_table, x.q.stride(0), x.q.stride(1), out.stride(0), out.stride(1), stride_lt, stride_lh,
        *x.k_cache.stride()[:3], *x.v_cache.stride()[:3],
        KV_HEADS=x.kv_heads, GROUP=group, DIM=x.dim, BLOCK_D=max(16, next_power_of_2(x.dim)), PAGE=x.page_size, MIN_QUERY=min_query,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, SEQS=max(16, next_power_of_2(x.num_seqs)),
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=lse is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, STAGES=tiles.num_stages,
        OVERLAP=tiles.overlap, PART=part, BEYOND=beyond,
        num_warps=tiles.num_warps, maxnreg=tiles.maxnreg, place=place,
    )  # fmt: skip
    return counter
