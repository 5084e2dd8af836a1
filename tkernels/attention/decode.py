"""Decode: attention of the last 1 to 8 tokens of each sequence over its paged KV cache.

Two launches whatever the batch holds, so one captured graph serves every length and every number of live rows:

- ``_decode_kernel``: programs of one KV head each take an equal, contiguous range of the key blocks of the *whole batch*, which they
  find from ``seq_lens`` on the device, in one software-pipelined loop that runs through the sequences without a bubble. A sequence
  that lies in one range is finished in registers; a sequence cut between ranges leaves partial states in a workspace.
- ``_combine_kernel``: folds the partial states of cut sequences; leaves at once for the others.

**The arithmetic of a sequence is a tree fixed by its own length (and window and query length) alone**: blocks of BLOCK_N keys are
folded left to right into leaves (1, 2, 4, … blocks, so that there are at most _LEAVES), 8 leaves into a branch, at most 8 branches
into the row. Only *where the ranges are cut* (between leaves) depends on the batch, and the combine repeats the same folds with the
same operations in the same order. The running maximum of a state is rounded up to a whole number, so that every factor between two states
is a power of two and scaling is exact: only the order of the sums counts, not when they are scaled. Keys are the rows of both products
and query rows the columns, and nothing mixes columns. Hence the bits of a row are the same alone, in any batch, padded or not, and in
every bucket of ``max_query_len``. (One limit: what is below 2**-126 of the row's largest weight underflows, perhaps in one place and not
in the other. Only an output below 2**-100 can show that: V is 0 wherever the row looks.)

Workspace: a slot per leaf of each cut sequence, and at most one cut sequence begins in a range, so it is bounded by the device.
It is allocated per call: inside a captured graph it belongs to the graph's pool and can neither grow nor move.
"""

from __future__ import annotations

import torch

from tkernels._target import target_of
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.attention._common import LOG2_E, cap_logits, finish, merge_states, product, read, token_slots
from tkernels.attention._inputs import Inputs
from tkernels.attention._tiles import DecodeTiles, decode_tiles

QUERY_LEN = 8  # the longest query that takes this path, chosen per sequence on the device

_LEAVES = 64  # of a sequence with one query token
_LEAVES_MULTI = 32  # of one with more: its states are larger
_BRANCH = 8  # leaves per branch; _LEAVES / _BRANCH branches per row


@triton.jit
def _plan(length, query_len, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, LEAVES: tl.constexpr, LEAVES_MULTI: tl.constexpr):
    """(first block that a query of the sequence sees, blocks from there, blocks per leaf), for scalars and vectors alike.

    An empty sequence counts as one block: someone has to write its zeros.
    """
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - query_len - window + 1, 0) // BLOCK_N
    blocks = tl.maximum((length + BLOCK_N - 1) // BLOCK_N - first, 1)
    leaf = tl.where(query_len > 1, (blocks - 1) // LEAVES_MULTI, (blocks - 1) // LEAVES)
    leaf |= (blocks > 16).to(tl.int32)  # leaves of one block only where a short sequence alone needs all the programs
    # rounded up to a power of two
    leaf |= leaf >> 1
    leaf |= leaf >> 2
    leaf |= leaf >> 4
    leaf |= leaf >> 8
    leaf |= leaf >> 16
    return first, blocks, leaf + 1


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "capacity", "window", "stride_bt"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    part_ptr, state_ptr, cuts_ptr,
    num_seqs, num_tokens, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_lh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr, RANGES: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    LEAVES: tl.constexpr, LEAVES_MULTI: tl.constexpr, BRANCH: tl.constexpr, BY_RANGE: tl.constexpr,
    SAME_STRIDES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    rank = pid // (KV_HEADS * TILES)
    tile = pid % TILES
    head = pid // TILES % KV_HEADS
    tail = tl.load(cu_ptr + num_seqs)

    # where the blocks of each sequence end in the whole batch
    seqs = tl.arange(0, SEQS)
    live = seqs < num_seqs
    firsts = tl.load(cu_ptr + seqs, mask=live, other=0)
    query_lens = tl.load(cu_ptr + seqs + 1, mask=live, other=0) - firsts
    lengths = tl.minimum(tl.maximum(tl.load(lens_ptr + seqs, mask=live, other=0), 0), capacity)
    _, shares, leaves = _plan(lengths, query_lens, window, HAS_WINDOW, BLOCK_N, LEAVES, LEAVES_MULTI)
    shares = tl.where((query_lens > 0) & (query_lens <= QUERIES), shares, 0)
    ends = tl.cumsum(shares, 0)
    begins = ends - shares
    total = tl.max(ends, 0)
    # As few ranges as keep the longest as short: sequences of one length then end where ranges do, and none is cut.
    longest = tl.maximum((total + RANGES - 1) // RANGES, 1)
    used = tl.maximum((total + longest - 1) // longest, 1)
    quota = total // used  # of every range; the first ``larger`` ones take one block more
    larger = total % used

    # this program's range: an equal share, moved up to the next end of a leaf; both ends in one reduction
    x_begin = rank * quota + tl.minimum(rank, larger)
    x_end = x_begin + quota + (rank < larger).to(tl.int32)
    cut_begin = begins + tl.minimum((x_begin - begins + leaves - 1) & -leaves, shares)
    cut_end = begins + tl.minimum((x_end - begins + leaves - 1) & -leaves, shares)
    cut_begin = tl.where((begins <= x_begin) & (x_begin < ends), cut_begin, 0).to(tl.int64)
    cut_end = tl.where((begins <= x_end) & (x_end < ends), cut_end, 0).to(tl.int64)
    cuts = tl.sum(cut_begin + (cut_end << 32), 0)
    x_begin = tl.where(x_begin < total, cuts & 0xFFFFFFFF, total).to(tl.int32)
    x_end = tl.where(x_end < total, cuts >> 32, total).to(tl.int32)
    counted = shares.to(tl.int64) + 4294967296  # blocks, and 1 in the upper half

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < DIM
    token_m = offs_m // GROUP  # query rows of one KV head: token by token, the heads of the group inside
    head_m = head * GROUP + offs_m % GROUP
    if HAS_K_SCALE:
        scale *= tl.load(k_scale_ptr + head * stride_ks_h)
    if HAS_V_SCALE:
        v_factor *= tl.load(v_scale_ptr + head * stride_vs_h)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head_m).to(tl.float32)
    else:
        sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    q_head = q_ptr + head_m.to(tl.int64)[:, None] * stride_qh + offs_d[None, :]
    k_head = k_ptr + head.to(tl.int64) * stride_kh
    v_head = v_ptr + head.to(tl.int64) * stride_vh
    v_stride_n = stride_kn if SAME_STRIDES else stride_vn

    opened = 0  # leaves of the cut sequence that begins in this range, and which one it is
    opened_s = 0
    m1 = tl.full([BLOCK_M], float("-inf"), tl.float32)  # state of the leaf, of the branch, of the row
    p1 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # not yet summed over the keys of a block
    acc1 = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    m2 = m1
    l2 = tl.zeros([BLOCK_M], tl.float32)
    acc2 = acc1
    m3 = m1
    l3 = l2
    acc3 = acc1
    s = rank * 0  # the sequence at hand, and what _plan says of it
    base = 0
    first_row = 0
    query_len = 0
    length = 0
    first_block = 0
    share = 0
    leaf = 1
    row_end = 0
    for x in tl.range(x_begin, x_end, num_stages=STAGES):
        if x >= row_end:  # the next sequence that has blocks: it holds block x, and this many blocks lie before it
            before = tl.sum(tl.where(ends <= x, counted, 0), 0)
            s = tl.minimum((before >> 32).to(tl.int32), num_seqs - 1)  # the pipeline asks for blocks past the last one
            base = (before & 0xFFFFFFFF).to(tl.int32)
            first_row = read(cu_ptr + s)
            query_len = read(cu_ptr + s + 1) - first_row
            length = tl.minimum(tl.maximum(read(lens_ptr + s), 0), capacity)
            first_block, share, leaf = _plan(length, query_len, window, HAS_WINDOW, BLOCK_N, LEAVES, LEAVES_MULTI)
            row_end = base + share
        rows = (first_row + token_m).to(tl.int64)
        mask_m = token_m < query_len
        start = (first_block + x - base) * BLOCK_N
        offs_k = start + offs_n
        seen = offs_k < length
        if HAS_WINDOW:  # pages before the window may have been freed
            seen = seen & (offs_k > length - query_len - window)
        page, slot = token_slots(table_ptr + s.to(tl.int64) * stride_bt, start, offs_n, tl.maximum(length - 1, 0), PAGE, BLOCK_N)
        k_pages = page * stride_kp
        v_pages = k_pages if SAME_STRIDES else page * stride_vp
        mask_kv = seen[:, None]
        mask_vt = seen[None, :]
        mask_q = mask_m[:, None]
        if BLOCK_D != DIM:
            mask_kv = mask_kv & mask_d[None, :]
            mask_vt = mask_vt & mask_d[:, None]
            mask_q = mask_q & mask_d[None, :]
        q = tl.load(q_head + rows[:, None] * stride_qt, mask=mask_q, other=0.0)
        k = tl.load((k_head + k_pages)[:, None] + (slot[:, None] * stride_kn + offs_d[None, :]), mask=mask_kv, other=0.0).to(COMPUTE)
        v = tl.load((v_head + v_pages)[None, :] + (slot[None, :] * v_stride_n + offs_d[:, None]), mask=mask_vt, other=0.0).to(COMPUTE)

        qk_scale = scale
        if NORMALISE_Q:  # fp8 caches are multiplied in fp16: q is brought into its range
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)
            largest = tl.where(largest > 0.0, largest, 1.0)
            q = cast(q.to(tl.float32) / largest[:, None], COMPUTE)
            qk_scale = (largest * scale)[None, :]
        logits = product(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * qk_scale
        if HAS_SOFTCAP:
            logits = cap_logits(logits, softcap)
        visible = seen[:, None]
        if CAUSAL and QUERIES > 1:
            position = length - query_len + token_m
            visible = visible & (offs_k[:, None] <= position[None, :])
            if HAS_WINDOW:
                visible = visible & (offs_k[:, None] > position[None, :] - window)
        logits = tl.where(visible, logits, float("-inf"))
        m_new = tl.maximum(m1, tl.ceil(tl.max(logits, 0)))  # whole numbers: see the head of this file
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: not exp2(-inf + inf)
        p = tl.math.exp2(logits - m_base[None, :])
        a = tl.math.exp2(m1 - m_base)[None, :]
        m1 = m_new
        p1 = p1 * a + p
        acc1 = product(v, cast(p, COMPUTE), acc1 * a)

        done = x - base + 1
        if ((done & (leaf - 1)) == 0) | (done == share):
            m2, l2, acc2 = merge_states(m2, l2, acc2, m1, tl.sum(p1, 0), acc1, 0)
            m1 = tl.full([BLOCK_M], float("-inf"), tl.float32)
            p1 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc1 = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
            # a branch that this range holds whole is folded here, one that is cut leaves its leaves
            is_cut = (base < x_begin) | (base + share > x_end)
            branch = leaf * BRANCH
            branch_begin = (done - 1) & -branch
            branch_end = tl.minimum(branch_begin + branch, share)
            inside = (base + branch_begin >= x_begin) & (base + branch_end <= x_end)
            if (done == branch_end) | (inside == 0):
                m3, l3, acc3 = merge_states(m3, l3, acc3, m2, l2, acc2, 0)
                m2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
                l2 = tl.zeros([BLOCK_M], tl.float32)
                acc2 = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
                if is_cut | (done == share):
                    if is_cut:
                        if BY_RANGE:  # the range that holds the sequence's first block names the workspace, else the sequence
                            edge = larger * (quota + 1)
                            owner = tl.where(base < edge, base // (quota + 1), larger + (base - edge) // tl.maximum(quota, 1))
                        else:
                            owner = s
                        leaf_index = tl.where(inside, branch_begin, done - 1) // leaf
                        at = ((owner * KV_HEADS + head).to(tl.int64) * LEAVES + leaf_index) * (QUERIES * GROUP) + offs_m
                        tl.store(state_ptr + at * 4, m3, mask=mask_m)
                        tl.store(state_ptr + at * 4 + 1, l3, mask=mask_m)
                        tl.store(state_ptr + at * 4 + 2, tl.zeros([BLOCK_M], tl.float32) + tl.where(inside, 1.0, 0.0), mask=mask_m)
                        tl.store(part_ptr + at[None, :] * BLOCK_D + offs_d[:, None], acc3, mask=mask_m[None, :])
                    else:
                        factor, lse = finish(m3, l3, tl.where(length > 0, sink, float("-inf")), v_factor, HAS_SINKS)
                        out = cast(acc3 * factor[None, :], out_ptr.dtype.element_ty)
                        out_ptrs = out_ptr + rows[None, :] * stride_ot + head_m[None, :] * stride_oh + offs_d[:, None]
                        tl.store(out_ptrs, out, mask=mask_m[None, :] & mask_d[:, None])
                        if HAS_LSE:
                            tl.store(lse_ptr + rows * stride_lt + head_m * stride_lh, lse, mask=mask_m)
                    if base >= x_begin:
                        count = tl.where(is_cut, (share + leaf - 1) // leaf, 0)
                        if BY_RANGE:
                            opened = count
                            opened_s = s
                        else:
                            if tile == 0:
                                tl.store(cuts_ptr + (s * KV_HEADS + head) * 2, count)
                    m3 = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    l3 = tl.zeros([BLOCK_M], tl.float32)
                    acc3 = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    if BY_RANGE and tile == 0:
        tl.store(cuts_ptr + (rank * KV_HEADS + head) * 2, opened)
        tl.store(cuts_ptr + (rank * KV_HEADS + head) * 2 + 1, opened_s)

    # rows that belong to no sequence are zero, so that nothing uninitialised reaches the next op
    row = tail + pid
    while row < num_tokens:
        for h in range(KV_HEADS * GROUP):
            out_row = out_ptr + row.to(tl.int64) * stride_ot + h * stride_oh
            tl.store(out_row + offs_d, tl.zeros([BLOCK_D], out_ptr.dtype.element_ty), mask=mask_d)
            if HAS_LSE:
                tl.store(lse_ptr + row.to(tl.int64) * stride_lt + h * stride_lh, float("-inf"))
        row += tl.num_programs(0)


@triton.jit
def _combine_kernel(
    out_ptr, lse_ptr, cu_ptr, sinks_ptr, v_scale_ptr, part_ptr, state_ptr, cuts_ptr,
    v_factor, stride_vs_h, stride_ot, stride_oh, stride_lt, stride_lh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SLICE_D: tl.constexpr,
    QUERIES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr,
    LEAVES: tl.constexpr, BRANCH: tl.constexpr, BY_RANGE: tl.constexpr,
):  # fmt: skip
    """One program per cut sequence, query head, query token and slice of the head dimension; 16 leaves in flight.

    Scales are powers of two, so weighing every leaf by the row's largest exponent gives the bits that folding with a running one gives.
    The code is short on purpose: it runs once, so most of its time is fetching instructions and waiting for the first loads.
    """
    ROWS: tl.constexpr = QUERIES * GROUP
    SLICES: tl.constexpr = BLOCK_D // SLICE_D
    pid = tl.program_id(0)
    part = pid % SLICES
    m_row = pid // SLICES % ROWS
    head = pid // (SLICES * ROWS) % KV_HEADS
    owner = pid // (SLICES * ROWS * KV_HEADS)
    offs_d = part * SLICE_D + tl.arange(0, SLICE_D)
    slot = (owner * KV_HEADS + head).to(tl.int64) * LEAVES * ROWS + m_row
    # loaded before it is known whether they hold anything, to save a round trip to memory
    leaves = tl.minimum(tl.load(cuts_ptr + (owner * KV_HEADS + head) * 2), LEAVES)
    leaf = tl.arange(0, LEAVES)
    exponents = tl.load(state_ptr + (slot + leaf * ROWS) * 4)
    folded = tl.load(state_ptr + (slot + leaf // BRANCH * (BRANCH * ROWS)) * 4 + 2) == 1.0
    if BY_RANGE:
        s = tl.load(cuts_ptr + (owner * KV_HEADS + head) * 2 + 1)
    else:
        s = owner
    first_row = tl.load(cu_ptr + s)
    query_len = tl.load(cu_ptr + s + 1) - first_row
    # without BY_RANGE nothing was written for a sequence that belongs to the prefill kernel
    if (m_row < query_len * GROUP) & (query_len <= QUERIES):
        if leaves > 0:
            written = (leaf < leaves) & ((folded == 0) | (leaf % BRANCH == 0))
            m = tl.max(tl.where(written, exponents, float("-inf")), 0)
            m_base = tl.where(m == float("-inf"), 0.0, m)
            l = 0.0
            acc = tl.zeros([SLICE_D], tl.float32)
            for start in tl.range(0, leaves, 2 * BRANCH, num_stages=1):
                for i in tl.static_range(2):
                    at = slot + (start + i * BRANCH) * ROWS
                    live = start + i * BRANCH < leaves
                    whole = tl.load(state_ptr + at * 4 + 2, mask=live, other=1.0) == 1.0  # the branch was folded already
                    l_branch = 0.0
                    acc_branch = tl.zeros([SLICE_D], tl.float32)
                    for j in tl.static_range(BRANCH):
                        if j == 0:
                            has = live
                        else:
                            has = (start + i * BRANCH + j < leaves) & (whole == 0)
                        weight = tl.math.exp2(tl.load(state_ptr + (at + j * ROWS) * 4, mask=has, other=float("-inf")) - m_base)
                        lj = tl.load(state_ptr + (at + j * ROWS) * 4 + 1, mask=has, other=0.0)
                        accj = tl.load(part_ptr + (at + j * ROWS) * BLOCK_D + offs_d, mask=has, other=0.0)
                        l_branch = tl.fma(lj, weight, l_branch)
                        acc_branch = tl.fma(accj, tl.broadcast_to(weight, acc.shape), acc_branch)
                    l += l_branch
                    acc += acc_branch
            query_head = head * GROUP + m_row % GROUP
            row = (first_row + m_row // GROUP).to(tl.int64)
            if HAS_V_SCALE:
                v_factor *= tl.load(v_scale_ptr + head * stride_vs_h)
            sink = float("-inf")
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + query_head).to(tl.float32)
            factor, lse = finish(m, l, sink, v_factor, HAS_SINKS)
            out = cast(acc * factor, out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * stride_ot + query_head * stride_oh + offs_d, out, mask=offs_d < DIM)
            if HAS_LSE:
                if part == 0:
                    tl.store(lse_ptr + row * stride_lt + query_head * stride_lh, lse)


def decode(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, queries: int, tiles: DecodeTiles | None = None) -> None:
    """Write the rows of every sequence with 1 to ``queries`` query tokens, and zeros into the rows of no sequence.

    queries: 1 or QUERY_LEN, a bucket that the caller's ``max_query_len`` fixes; not read from the data.
    """
    x = inputs
    if x.num_seqs == 0:  # rows of no sequence
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    target = target_of(out.device)
    kv_heads, group = x.kv_heads, x.heads // x.kv_heads
    if tiles is None:
        tiles = decode_tiles(target.arch, x.dim, x.k_cache.element_size(), queries * group, x.num_seqs)
    rows = queries * group
    # fp8 values are converted in registers. triton 3.6 multiplies them wrongly where it then takes wgmma, which it does from 16 columns on.
    block_m = 8 if x.normalise_q else min(32, max(8, next_power_of_2(rows)))
    row_tiles = cdiv(rows, block_m)
    block_d = max(16, next_power_of_2(x.dim))
    ranges = max(1, target.num_sms * tiles.programs_per_sm // (kv_heads * row_tiles))
    by_range = x.num_seqs > ranges
    owners = min(x.num_seqs, ranges)
    slots = owners * kv_heads * _LEAVES * rows
    parts = torch.empty((slots, block_d), dtype=torch.float32, device=out.device)
    states = torch.empty((slots, 4), dtype=torch.float32, device=out.device)
    cuts = torch.empty((owners * kv_heads, 2), dtype=torch.int32, device=out.device)
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    shared = dict(
        KV_HEADS=kv_heads, GROUP=group, QUERIES=queries,
        HAS_SINKS=x.sinks is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=lse is not None,
        LEAVES=_LEAVES, BRANCH=_BRANCH, BY_RANGE=by_range,
    )  # fmt: skip
    _decode_kernel[(ranges * kv_heads * row_tiles,)](
        x.q, x.k_cache, x.v_cache, out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale,
        parts, states, cuts,
        x.num_seqs, x.q.shape[0], x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.k_scale_stride, x.v_scale_stride,
        x.stride_table, x.q.stride(0), x.q.stride(1), *x.k_cache.stride()[:3], *x.v_cache.stride()[:3],
        out.stride(0), out.stride(1), stride_lt, stride_lh,
        DIM=x.dim, BLOCK_D=block_d, PAGE=x.page_size,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, SEQS=max(16, next_power_of_2(x.num_seqs)), RANGES=ranges,
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_K_SCALE=x.k_scale is not None,
        NORMALISE_Q=x.normalise_q, COMPUTE=x.compute, LEAVES_MULTI=_LEAVES_MULTI,
        SAME_STRIDES=x.same_strides, STAGES=tiles.num_stages, num_warps=tiles.num_warps, maxnreg=tiles.maxnreg, **shared,
    )  # fmt: skip
    slice_d = min(128, block_d)
    _combine_kernel[(owners * kv_heads * rows * (block_d // slice_d),)](
        out, lse, x.cu_seqlens_q, x.sinks, x.v_scale, parts, states, cuts,
        x.v_factor, x.v_scale_stride, out.stride(0), out.stride(1), stride_lt, stride_lh,
        DIM=x.dim, BLOCK_D=block_d, SLICE_D=slice_d, num_warps=1, **shared,
    )  # fmt: skip
