"""Attention of many query tokens over one prefix that all of them see whole, its keys split over the device: the shared part of cascade.py.

As one sequence the prefix would get one program per KV head and tile of query rows: 16 for 64 tokens of 8 KV heads, a tenth of a Hopper.
Here each of them is cut into ``splits`` equal runs of key blocks, and each run leaves a state (``merge.py`` folds them in one launch).

How many splits there are follows from shapes and the device alone, so a captured graph may bake it in. *Where* they lie follows from
the length on the device: a graph captured for a table of 131072 keys cuts a prefix of 2048 into parts of 128 keys, and what is past
the last part is empty. With the number of splits the length fixes every bit of a row.

Source: arXiv 2307.08691 (the loop, _fold_keys.py's), Flash-Decoding (keys of one sequence split over programs).
"""

from __future__ import annotations

import functools

import torch

from tkernels import _dependent
from tkernels._dependent import wait
from tkernels._triton import cdiv, next_power_of_2, tl, triton
from tkernels.attention._common import LOG2_E, finish, scaled_tile
from tkernels.attention._fold_keys import first_page_ids, fold_keys
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import PrefillTiles

_LEAST = 4  # blocks of a split: folding one more state costs what two or three blocks do


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "capacity", "splits"])
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, table_ptr, len_ptr, cu_ptr, k_scale_ptr, v_scale_ptr,
    num_seqs, num_tokens, capacity, splits, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_qt, stride_qh,
    stride_kp: tl.constexpr, stride_kn: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vn: tl.constexpr, stride_vh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # of a tile; GROUP · TOKENS rows are used
    # the tiles of a run of keys lie side by side: they read the same keys
    num_tiles = (num_tokens + TOKENS - 1) // TOKENS
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % KV_HEADS
    split = tl.program_id(0) // num_tiles // KV_HEADS
    live = tl.minimum(tl.load(cu_ptr + num_seqs), num_tokens)  # rows past it belong to no sequence: nobody reads what they get
    if tile * TOKENS < live:
        length = tl.minimum(tl.maximum(tl.load(len_ptr), 0), capacity)
        blocks = (length + BLOCK_N - 1) // BLOCK_N
        parts = tl.minimum(splits, (blocks + LEAST - 1) // LEAST)
        each = blocks // tl.maximum(parts, 1)
        longer = blocks - each * parts  # the first ones have a block more
        begin = tl.minimum(split * each + tl.minimum(split, longer), blocks)  # past the last part: blocks
        end = tl.minimum(begin + each + tl.where(split < longer, 1, 0), blocks)

        offs_m = tl.arange(0, BLOCK_M)
        offs_d = tl.arange(0, BLOCK_D)
        mask_d = offs_d < DIM
        token_m = tile * TOKENS + offs_m // GROUP
        head_m = head * GROUP + offs_m % GROUP
        mask_m = (token_m < live) & (offs_m < TOKENS * GROUP)
        rows = token_m.to(tl.int64)
        whole = tl.maximum(tl.minimum(end, length // BLOCK_N), begin)
        page, next_page = first_page_ids(table_ptr, begin, whole, PAGE, BLOCK_N)
        q_ptrs = q_ptr + rows[:, None] * stride_qt + head_m.to(tl.int64)[:, None] * stride_qh + offs_d[None, :]
        q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        q, qk_scale, v_factor = scaled_tile(
            q, head, scale, v_factor, k_scale_ptr, v_scale_ptr, stride_ks_h, stride_vs_h, HAS_K_SCALE, HAS_V_SCALE, NORMALISE_Q, COMPUTE
        )

        m, l, acc = fold_keys(
            q, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            k_ptr + head.to(tl.int64) * stride_kh, v_ptr + head.to(tl.int64) * stride_vh, table_ptr, page, next_page,
            0, length, begin, whole, end, begin, whole, token_m, tl.zeros([BLOCK_M], tl.int32) + (length - 1),
            qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
            PAGE, BLOCK_N, BLOCK_D != DIM, False, False, HAS_SOFTCAP, COMPUTE, STAGES, False,
        )  # fmt: skip
        if not HAS_SOFTCAP:
            m = m * qk_scale
        factor, lse = finish(m, l, m, v_factor, False)
        at = (split.to(tl.int64) * num_tokens + rows) * (KV_HEADS * GROUP) + head_m
        tl.store(lse_ptr + at, lse, mask=mask_m)
        # an empty state's values are not read
        mask = (mask_m & (begin < end))[:, None] & mask_d[None, :]
        tl.store(part_ptr + at[:, None] * DIM + offs_d[None, :], acc * factor[:, None], mask=mask)


def _tile_tokens(tiles: PrefillTiles, group: int) -> tuple[int, int]:
    """(query rows of a tile, tokens of a tile)."""
    block_m = max(tiles.block_m, next_power_of_2(group))
    return block_m, block_m // group


@functools.lru_cache(1024)
def splits_of(tiles: PrefillTiles, num_sms: int, tokens: int, heads: int, kv_heads: int, capacity: int) -> int:
    """Into how many parts the keys of the prefix are cut; 0: not at all, for ``tokens`` alone give work to half of the device.

    Then it is a job for prefill.py. capacity: keys that the prefix may have.
    """
    programs = cdiv(tokens, _tile_tokens(tiles, heads // kv_heads)[1]) * kv_heads
    if 2 * programs > num_sms:
        return 0
    # one wave of programs
    return max(1, min(num_sms * tiles.programs_per_sm // programs, cdiv(capacity, _LEAST * tiles.block_n)))


def prefix(
    inputs: Inputs, tiles: PrefillTiles, table: torch.Tensor, length: torch.Tensor, capacity: int, parts: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write the states over the keys of the prefix: of every query row before ``cu_seqlens_q[-1]``, one per split.

    inputs: queries and caches; its table, lengths, window and sinks are not used. table: [pages] int32, or anything that can be read
    where ``capacity`` is 0. length: [1] int32, cut at ``capacity`` keys. parts: [splits, tokens, heads, dim] fp32, contiguous; not written
    for an empty split. lse: [splits, tokens, heads] fp32, contiguous, natural log, -inf for an empty split.
    """
    x = inputs
    splits, num_tokens = parts.shape[:2]
    group = x.heads // x.kv_heads
    block_m, tile_tokens = _tile_tokens(tiles, group)
    _dependent.launch(
        _prefix_kernel, (cdiv(num_tokens, tile_tokens) * x.kv_heads * splits,), parts.device,
        x.q, x.k_cache, x.v_cache, parts, lse, table, length, x.cu_seqlens_q, x.k_scale, x.v_scale,
        x.num_seqs, num_tokens, capacity, splits, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor, x.k_scale_stride, x.v_scale_stride,
        x.q.stride(0), x.q.stride(1), *x.k_cache.stride()[:3], *x.v_cache.stride()[:3],
        KV_HEADS=x.kv_heads, GROUP=group, DIM=x.dim, BLOCK_D=max(16, next_power_of_2(x.dim)), PAGE=x.page_size,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, LEAST=_LEAST,
        HAS_SOFTCAP=x.softcap > 0, HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, maxnreg=tiles.maxnreg,
    )  # fmt: skip
