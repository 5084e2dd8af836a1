"""Decode: attention of the last 1 to 8 tokens of each sequence over its paged KV cache.

One launch whatever the batch holds (two beside prompts, ``decode_of_mixed``; where decode_one_sm90.py computes sequences of few tokens, one
for those of more), so one captured graph serves every length and every number of live rows. The work of the whole
batch is shared out in equal ranges of key blocks, found on the device (_decode_kernel.py).

**The arithmetic of a sequence is a tree fixed by its own length (and window and query length) alone**: blocks of BLOCK_N keys are
folded left to right into leaves (1, 2, 4, … blocks, so that there are at most _LEAVES), 8 leaves into a branch, at most 8 branches
into the row. Only *where the ranges are cut* (between leaves) depends on the batch, and the fold of a cut sequence repeats the same
operations in the same order. The running maximum of a state is rounded up to a whole number, so that every factor between two states
is a power of two and scaling is exact: only the order of the sums counts, not when they are scaled. Keys are the rows of both products
and query rows the columns, and nothing mixes columns. Hence the bits of a row are the same alone, in any batch, padded or not, and in
every bucket of ``max_query_len``. (One limit: what is below 2**-126 of the row's largest weight underflows, perhaps in one place and not
in the other. Only an output below 2**-100 can show that: V is 0 wherever the row looks.)

Source: arXiv 1805.02867 (the running maximum), Flash-Decoding (keys of one sequence split over programs); differs: the tree above.

Workspace: a slot per leaf of each cut sequence, and at most one cut sequence begins in a range, so it is bounded by the device. With 32
heads of 128 on 8 KV heads and 132 multiprocessors: 16 MiB for one query token, 128 MiB for up to 8, 16 and 64 MiB at once beside prompts.
It is allocated per call: inside a captured graph it belongs to the graph's pool and can neither grow nor move. The counters of arrivals
(_counters.py) are zero before and after each launch.
"""

from __future__ import annotations

import torch

from tkernels import _dependent
from tkernels._counters import counters, stood
from tkernels._target import target_of
from tkernels._triton import cdiv, next_power_of_2
from tkernels.attention._common import FP8, LOG2_E
from tkernels.attention._decode_kernel import decode_kernel
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import DecodeTiles, decode_tiles

QUERY_LEN = 8  # the longest query that takes this path, chosen per sequence on the device

_LEAVES = 64  # of a sequence with one query token
_LEAVES_MULTI = 32  # of one with more: its states are larger
_BRANCH = 8  # leaves per branch; _LEAVES / _BRANCH branches per row


def decode(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, queries: int, tiles: DecodeTiles | None = None, min_queries: int = 1,
    beside: bool = False, place: int = _dependent.ALONE,
) -> list[torch.Tensor]:  # fmt: skip
    """Write the rows of every sequence with ``min_queries`` to ``queries`` query tokens; with min_queries 1 also zeros into the rows of
    no sequence.

    inputs: of at least one sequence. queries: 1 or QUERY_LEN, a bucket that the caller's ``max_query_len`` fixes; not read from the data.
    beside: another launch takes other sequences, so there may be none for this one. place: among those launches, as in _dependent.py.
    Returns the temporaries.
    """
    x = inputs
    target = target_of(out.device)
    kv_heads, group = x.kv_heads, x.heads // x.kv_heads
    if tiles is None:
        tiles = decode_tiles(target.arch, x.dim, x.k_cache.element_size(), queries * group, x.num_seqs)
    rows = queries * group
    unit, copied = _units(x)
    # From 16 columns on triton takes wgmma, and 3.6 gets it wrong where keys come through registers: converted ones, and those that it
    # cannot copy asynchronously because it does not know that they lie on 16 bytes.
    block_m = min(32, max(8, next_power_of_2(rows))) if copied and x.k_cache.dtype != FP8 else 8
    row_tiles = cdiv(rows, block_m)
    block_d = max(16, next_power_of_2(x.dim))
    ranges = max(1, target.num_sms * tiles.programs_per_sm // (kv_heads * row_tiles))
    by_range = x.num_seqs > ranges
    owners = min(x.num_seqs, ranges)
    leaves = _LEAVES if min_queries == 1 else _LEAVES_MULTI
    slots = owners * kv_heads * leaves * rows
    parts = torch.empty((slots, block_d), dtype=torch.float32, device=out.device)
    states = torch.empty((slots, 4), dtype=torch.float32, device=out.device)
    arrivals = counters(owners * kv_heads * row_tiles, out.device)
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    _dependent.launch(
        decode_kernel, (ranges * kv_heads * row_tiles,), out.device,
        x.q, x.k_cache, x.v_cache, out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale,
        parts, states, arrivals,
        x.num_seqs, x.q.shape[0], x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.k_scale_stride, x.v_scale_stride,
        x.stride_table, *(s // unit for t in (x.q, x.k_cache, x.v_cache) for s in t.stride()[:-1]),
        out.stride(0), out.stride(1), stride_lt, stride_lh,
        KV_HEADS=kv_heads, GROUP=group, DIM=x.dim, BLOCK_D=block_d, PAGE=x.page_size,
        MIN_QUERIES=min_queries, QUERIES=queries, BESIDE=beside, BLOCK_M=block_m, BLOCK_N=tiles.block_n, SEQS=next_power_of_2(x.num_seqs),
        RANGES=ranges, UNIT=unit,
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=lse is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, LEAVES=leaves, LEAVES_MULTI=_LEAVES_MULTI, BRANCH=_BRANCH, BY_RANGE=by_range,
        SAME_STRIDES=x.same_strides, STAGES=tiles.num_stages, num_warps=tiles.num_warps, maxnreg=tiles.maxnreg,
        place=place if stood(arrivals) else _dependent.ALONE,
    )  # fmt: skip
    return [parts, states]


def _units(x: Inputs) -> tuple[int, bool]:
    """(what all strides of q and of the caches are passed in multiples of, whether all three can be copied by 16 bytes).

    Triton itself knows multiples of 16 only, which the heads of dimension 72 or 136 are not: those are passed as eighths.
    """
    tensors = (x.q, x.k_cache, x.v_cache)
    strides = [s for t in tensors for s in t.stride()[:-1]]
    known = all(s % 16 == 0 for s in strides)
    unit = 8 if not known and all(s % 8 == 0 and s < 2**31 for s in strides) else 1  # an int32 eighth must not overflow multiplied
    return unit, (known or unit == 8) and all(t.data_ptr() % 16 == 0 for t in tensors)


def decode_of_mixed(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> list[torch.Tensor]:
    """What ``decode(inputs, out, lse, QUERY_LEN)`` writes, for a batch that holds longer queries too: the same bits in two launches.

    Such a batch has many sequences of one query token, which cost a third more among the columns that eight would take, and few of 2 to 8
    (the ends of prompts), mostly none: then their launch ends at once.
    """
    kept = decode(inputs, out, lse, QUERY_LEN, min_queries=2, beside=True, place=_dependent.FIRST)
    return kept + decode(inputs, out, lse, 1, beside=True, place=_dependent.BESIDE)
