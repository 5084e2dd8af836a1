"""Decode: the kernel. decode.py says what it computes and promises.

Programs of one KV head each take an equal, contiguous range of the key blocks of the *whole batch*, which they find from ``seq_lens`` on
the device, in one software-pipelined loop that runs through the sequences without a bubble. A sequence that lies in one range is
finished in registers. A sequence cut between ranges leaves partial states in a workspace, and the program that brings the last of its
blocks folds them: nobody waits for anybody, and who folds does not change what is folded, nor the order.
"""

from __future__ import annotations

from tkernels._dependent import depart, wait
from tkernels._triton import cast, tl, triton
from tkernels.attention._common import cap_logits, finish, merge_states, page_ids, page_slots, product, read, scaled_rows, widen


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


@triton.jit
def _owner(s, base, quota, larger, BY_RANGE: tl.constexpr):
    """Whose part of the workspace a cut sequence takes: the range's that holds its first block, or its own where sequences are fewer."""
    if BY_RANGE:
        edge = larger * (quota + 1)
        owner = tl.where(base < edge, base // (quota + 1), larger + (base - edge) // tl.maximum(quota, 1))
    else:
        owner = s
    return owner


@triton.jit
def _fold(part_ptrs, state_ptrs, leaves, mask_m, BRANCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of a whole sequence from the states of its leaves: the folds of the loop over keys, in the same order.

    part_ptrs [BLOCK_D, M], state_ptrs [M]: of the first leaf. A branch that one range held whole is one state, in its first leaf's place.
    """
    m3 = tl.full(mask_m.shape, float("-inf"), tl.float32)
    l3 = tl.zeros(mask_m.shape, tl.float32)
    acc3 = tl.zeros(part_ptrs.shape, tl.float32)
    for branch in tl.range(0, leaves, BRANCH, num_stages=1):
        at = branch * ROWS  # of at most 64 leaves
        whole = tl.load(state_ptrs + at * 4 + 2, mask=mask_m, other=1.0) == 1.0
        m2 = tl.full(mask_m.shape, float("-inf"), tl.float32)
        l2 = tl.zeros(mask_m.shape, tl.float32)
        acc2 = tl.zeros(part_ptrs.shape, tl.float32)
        for j in tl.static_range(BRANCH):  # no load waits for another: what was not written is dropped after it was read
            has = mask_m & (branch + j < leaves)
            m = tl.load(state_ptrs + (at + j * ROWS) * 4, mask=has, other=float("-inf"))
            l = tl.load(state_ptrs + (at + j * ROWS) * 4 + 1, mask=has, other=0.0)
            acc = tl.load(part_ptrs + (at + j * ROWS) * BLOCK_D, mask=has[None, :], other=0.0)
            if j > 0:
                m = tl.where(whole, float("-inf"), m)
                l = tl.where(whole, 0.0, l)
                acc = tl.where(whole[None, :], 0.0, acc)
            m2, l2, acc2 = merge_states(m2, l2, acc2, m, l, acc, 0)
        m3, l3, acc3 = merge_states(m3, l3, acc3, m2, l2, acc2, 0)
    return m3, l3, acc3


@triton.jit
def _zero_rows(
    out_ptr, lse_ptr, tail, num_tokens, stride_ot, stride_oh, stride_lt, stride_lh,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Rows that belong to no sequence are zero, so that nothing uninitialised reaches the next op."""
    offs_d = tl.arange(0, BLOCK_D)
    row = tail + tl.program_id(0)
    while row < num_tokens:
        for h in range(HEADS):
            out_row = out_ptr + row.to(tl.int64) * stride_ot + h * stride_oh
            tl.store(out_row + offs_d, tl.zeros([BLOCK_D], out_ptr.dtype.element_ty), mask=offs_d < DIM)
            if HAS_LSE:
                tl.store(lse_ptr + row.to(tl.int64) * stride_lt + h * stride_lh, float("-inf"))
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "capacity", "window", "stride_bt"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    part_ptr, state_ptr, arrivals_ptr,
    num_seqs, num_tokens, capacity, window, scale, softcap, v_factor, stride_ks_h, stride_vs_h,
    stride_bt, stride_qt, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_ot, stride_oh, stride_lt, stride_lh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    MIN_QUERIES: tl.constexpr, QUERIES: tl.constexpr, BESIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SEQS: tl.constexpr, RANGES: tl.constexpr, UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, HAS_LSE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
    LEAVES: tl.constexpr, LEAVES_MULTI: tl.constexpr, BRANCH: tl.constexpr, BY_RANGE: tl.constexpr,
    SAME_STRIDES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
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
    shares = tl.where((query_lens >= MIN_QUERIES) & (query_lens <= QUERIES), shares, 0)
    if BESIDE:  # perhaps there are none, and filling the pipeline of the loop below with nothing takes as long as a short launch
        if tl.max(shares, 0) == 0:
            if MIN_QUERIES == 1:
                _zero_rows(
                    out_ptr, lse_ptr, tail, num_tokens, stride_ot, stride_oh, stride_lt, stride_lh, KV_HEADS * GROUP, BLOCK_D, DIM, HAS_LSE
                )  # fmt: skip
            depart(PDL)
            return
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
    offs_kn = offs_n[:, None]
    offs_vn = offs_n[None, :]
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
    stride_qt, stride_qh = stride_qt * UNIT, stride_qh * UNIT
    stride_kp, stride_kn, stride_kh = stride_kp * UNIT, stride_kn * UNIT, stride_kh * UNIT
    stride_vp, stride_vn, stride_vh = stride_vp * UNIT, stride_vn * UNIT, stride_vh * UNIT
    if SAME_STRIDES:
        stride_vp, stride_vn = stride_kp, stride_kn
    q_head = q_ptr + head_m.to(tl.int64)[:, None] * stride_qh + offs_d[None, :]
    k_head = k_ptr + head.to(tl.int64) * stride_kh
    v_head = v_ptr + head.to(tl.int64) * stride_vh

    # the cut sequence that ends in this range: number, first block and blocks in the batch, blocks per leaf
    closed_s = rank * 0
    closed_base = 0
    closed_share = 0
    closed_leaf = 1
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
    table = table_ptr
    last = 0
    next_k = tl.zeros([BLOCK_N, 1], tl.int32)  # pages of the next block, as the rows of K and as the columns of V
    next_v = tl.zeros([1, BLOCK_N], tl.int32)
    for x in tl.range(x_begin, x_end, num_stages=STAGES):
        pages_k = next_k
        pages_v = next_v
        if x >= row_end:  # the next sequence that has blocks: it holds block x, and this many blocks lie before it
            before = tl.sum(tl.where(ends <= x, counted, 0), 0)
            s = tl.minimum((before >> 32).to(tl.int32), num_seqs - 1)  # the pipeline asks for blocks past the last one
            base = (before & 0xFFFFFFFF).to(tl.int32)
            first_row = read(cu_ptr + s)
            query_len = read(cu_ptr + s + 1) - first_row
            length = tl.minimum(tl.maximum(read(lens_ptr + s), 0), capacity)
            first_block, share, leaf = _plan(length, query_len, window, HAS_WINDOW, BLOCK_N, LEAVES, LEAVES_MULTI)
            row_end = base + share
            table = table_ptr + s.to(tl.int64) * stride_bt
            last = tl.maximum(length - 1, 0)
            pages_k = page_ids(table, first_block * BLOCK_N + (x - base) * BLOCK_N, offs_kn, last, PAGE, BLOCK_N)
            pages_v = page_ids(table, first_block * BLOCK_N + (x - base) * BLOCK_N, offs_vn, last, PAGE, BLOCK_N)
        rows = (first_row + token_m).to(tl.int64)
        mask_m = token_m < query_len
        start = (first_block + x - base) * BLOCK_N
        offs_k = start + offs_n
        seen = offs_k < length
        if HAS_WINDOW:  # pages before the window may have been freed
            seen = seen & (offs_k > length - query_len - window)
        # a block ahead, so that no copy of keys waits for the pages it reads
        next_k = page_ids(table, start + BLOCK_N, offs_kn, last, PAGE, BLOCK_N)
        next_v = page_ids(table, start + BLOCK_N, offs_vn, last, PAGE, BLOCK_N)
        mask_kv = seen[:, None]
        mask_vt = seen[None, :]
        mask_q = mask_m[:, None]
        if BLOCK_D != DIM:
            mask_kv = mask_kv & mask_d[None, :]
            mask_vt = mask_vt & mask_d[:, None]
            mask_q = mask_q & mask_d[None, :]
        q = tl.load(q_head + rows[:, None] * stride_qt, mask=mask_q, other=0.0)
        k_rows = k_head + pages_k.to(tl.int64) * stride_kp
        v_columns = v_head + pages_v.to(tl.int64) * stride_vp
        k = tl.load(k_rows + (page_slots(start, offs_kn, PAGE, BLOCK_N) * stride_kn + offs_d[None, :]), mask=mask_kv, other=0.0)
        v = tl.load(v_columns + (page_slots(start, offs_vn, PAGE, BLOCK_N) * stride_vn + offs_d[:, None]), mask=mask_vt, other=0.0)
        k = k.to(COMPUTE)
        if NORMALISE_Q:
            v = widen(v)
        else:
            v = v.to(COMPUTE)

        qk_scale = scale
        if NORMALISE_Q:
            q, largest = scaled_rows(q, COMPUTE)
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
        m_new = tl.maximum(m1, tl.ceil(tl.max(logits, 0)))  # whole numbers: decode.py says why
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
                        owner = _owner(s, base, quota, larger, BY_RANGE)
                        leaf_index = tl.where(inside, branch_begin, done - 1) // leaf
                        at = ((owner * KV_HEADS + head).to(tl.int64) * LEAVES + leaf_index) * (QUERIES * GROUP) + offs_m
                        tl.store(state_ptr + at * 4, m3, mask=mask_m)
                        tl.store(state_ptr + at * 4 + 1, l3, mask=mask_m)
                        tl.store(state_ptr + at * 4 + 2, tl.zeros([BLOCK_M], tl.float32) + tl.where(inside, 1.0, 0.0), mask=mask_m)
                        tl.store(part_ptr + at[None, :] * BLOCK_D + offs_d[:, None], acc3, mask=mask_m[None, :])
                        if done == share:
                            closed_s, closed_base, closed_share, closed_leaf = s, base, share, leaf
                    else:
                        factor, lse = finish(m3, l3, tl.where(length > 0, sink, float("-inf")), v_factor, HAS_SINKS)
                        out = cast(acc3 * factor[None, :], out_ptr.dtype.element_ty)
                        out_ptrs = out_ptr + rows[None, :] * stride_ot + head_m[None, :] * stride_oh + offs_d[:, None]
                        tl.store(out_ptrs, out, mask=mask_m[None, :] & mask_d[:, None])
                        if HAS_LSE:
                            tl.store(lse_ptr + rows * stride_lt + head_m * stride_lh, lse, mask=mask_m)
                    m3 = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    l3 = tl.zeros([BLOCK_M], tl.float32)
                    acc3 = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    # Up to two cut sequences have left states: one that ended here, and one that goes on in the next range.
    for _ in tl.range(0, 2, num_stages=1):
        blocks = tl.minimum(closed_base + closed_share, x_end) - tl.maximum(closed_base, x_begin)
        if blocks > 0:
            owner = _owner(closed_s, closed_base, quota, larger, BY_RANGE)
            arrivals = arrivals_ptr + (owner * KV_HEADS + head) * TILES + tile
            tl.debug_barrier()  # all threads have stored before one of them releases
            arrived = tl.atomic_add(arrivals, blocks, sem="acq_rel", scope="gpu")
            if arrived + blocks == closed_share:  # all of its blocks are in, so this program folds them
                tl.debug_barrier()  # no thread reads before the one that acquires
                tl.store(arrivals, 0)  # for the next launch
                first = ((owner * KV_HEADS + head).to(tl.int64) * LEAVES) * (QUERIES * GROUP) + offs_m
                m, l, acc = _fold(
                    part_ptr + first[None, :] * BLOCK_D + offs_d[:, None], state_ptr + first * 4,
                    (closed_share + closed_leaf - 1) // closed_leaf, offs_m < QUERIES * GROUP, BRANCH, QUERIES * GROUP, BLOCK_D,
                )  # fmt: skip
                first_row = read(cu_ptr + closed_s)
                mask_m = token_m < read(cu_ptr + closed_s + 1) - first_row
                rows = (first_row + token_m).to(tl.int64)
                factor, lse = finish(m, l, sink, v_factor, HAS_SINKS)  # an empty sequence is never cut
                out = cast(acc * factor[None, :], out_ptr.dtype.element_ty)
                out_ptrs = out_ptr + rows[None, :] * stride_ot + head_m[None, :] * stride_oh + offs_d[:, None]
                tl.store(out_ptrs, out, mask=mask_m[None, :] & mask_d[:, None])
                if HAS_LSE:
                    tl.store(lse_ptr + rows * stride_lt + head_m * stride_lh, lse, mask=mask_m)
        closed_s, closed_base, closed_leaf = s, base, leaf
        closed_share = tl.where(base + share > x_end, share, 0)

    if MIN_QUERIES == 1:
        _zero_rows(
            out_ptr, lse_ptr, tail, num_tokens, stride_ot, stride_oh, stride_lt, stride_lh, KV_HEADS * GROUP, BLOCK_D, DIM, HAS_LSE
        )  # fmt: skip
    depart(PDL)
