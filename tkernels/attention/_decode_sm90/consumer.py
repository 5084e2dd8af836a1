"""The consumer: matrix products, softmax, the fold of a sequence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from tkernels._gluon import barrier
from tkernels.attention._decode_sm90.shared import FOLD_ROWS, HANDSHAKE, Q_STAGES, ROWS, read_segment
from tkernels.attention._sm90_gluon import FIRST_BARRIER, cap, meet, wait_work


@gluon.jit
def merge(m, l, acc, mb, lb, accb):
    """Fold the state (mb, lb, accb) into (m, l, acc): m, l [M]; acc [M, D]. Factors are powers of two, so that only the order counts."""
    m_new = gl.maximum(m, mb)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # two empty states: not exp2(-inf + inf)
    a = gl.exp2(m - base)
    b = gl.exp2(mb - base)
    wide: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = gl.fma(acc, gl.convert_layout(a, wide)[:, None] + gl.zeros_like(acc), accb * gl.convert_layout(b, wide)[:, None])
    return m_new, gl.fma(l, a, lb * b), acc


@gluon.jit
def _softmax(s, m, l, sees, key, qk_scale, window, HAS_WINDOW: gl.constexpr):
    """Scores s [ROWS, keys] of one block → (p, m, l, factor of what was summed before). sees: the last key that a row sees.

    m: running maximum of the logits in base 2, rounded up to a whole number; l: running sum of p = 2^(logit - m).
    """
    visible = key[None, :] <= sees[:, None]
    if HAS_WINDOW:
        visible = visible & (key[None, :] > (sees - window)[:, None])
    s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(m, gl.ceil(gl.max(s, 1) * qk_scale))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: not exp2(-inf + inf)
    p = gl.exp2(s * qk_scale - base[:, None])
    factor = gl.exp2(m - base)
    return p, m_new, gl.fma(l, factor, gl.sum(p, 1)), factor


@gluon.jit
def _clean(block, begin, end, PART: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the rows of V before ``begin`` and from ``end`` on: what no query may see may be NaN, and 0 · NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for p in gl.static_range(BLOCK_N // PART):
        if (end < (p + 1) * PART) | (begin > p * PART):
            part = block.slice(p * PART, PART)
            keep = (row + p * PART < end) & (row + p * PART >= begin)
            v = part.load(layout)
            part.store(gl.where(keep[:, None], v, 0.0).to(v.dtype))
    fence_async_shared()  # written as usual, read by the tensor cores


@gluon.jit
def _finish(m, l, sink, v_factor, HAS_SINKS: gl.constexpr):
    """(factor for acc, natural LSE) of a finished state, with the sink's logit in base 2 in the denominator."""
    factor = gl.full([m.shape[0]], 1.0, gl.float32, m.type.layout)
    if HAS_SINKS:
        m_new = gl.maximum(m, sink)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        factor = gl.exp2(m - base)
        l = gl.fma(l, factor, gl.exp2(sink - base))
        m = m_new
    empty = l == 0.0  # no key seen: zero output, LSE -inf
    divisor = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (m + gl.log2(divisor)) * 0.6931471805599453)
    return gl.where(empty, 0.0, v_factor * factor / divisor), lse


@gluon.jit
def _store(
    out_ptr, lse_ptr, sinks_ptr, m, l, acc, begin, first_row, query_len, length, head, v_factor, stride_ot, stride_oh, stride_lt, stride_lh,
    GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = acc.type.layout
    row = begin + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    m = gl.convert_layout(m, gl.SliceLayout(1, layout))
    l = gl.convert_layout(l, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    token = row // GROUP_ROWS
    head_m = head * GROUP + row % GROUP_ROWS
    valid = (token < query_len) & (row % GROUP_ROWS < GROUP)
    sink = m
    if HAS_SINKS:
        sink = gl.load(sinks_ptr + head_m, mask=valid, other=0.0).to(gl.float32) * 1.4426950408889634
        sink = gl.where(length > 0, sink, float("-inf"))
    factor, lse = _finish(m, l, sink, v_factor, HAS_SINKS)
    out = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
    at = (first_row + token).to(gl.int64) * stride_ot + head_m.to(gl.int64) * stride_oh
    gl.store(out_ptr + at[:, None] + offs_d[None, :], out, mask=valid[:, None] & (offs_d < HEAD_DIM)[None, :])
    if HAS_LSE:
        gl.store(lse_ptr + (first_row + token).to(gl.int64) * stride_lt + head_m.to(gl.int64) * stride_lh, lse, mask=valid)


@gluon.jit
def _fold(
    part_ptr, state_ptr, first, leaves, out_ptr, lse_ptr, sinks_ptr, first_row, query_len, length, head, v_factor,
    stride_ot, stride_oh, stride_lt, stride_lh,
    SLOT_ROWS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A cut sequence from the states of its leaves, in their order: SLOT_ROWS rows each, the first leaf's from row ``first`` on.

    FOLD_ROWS rows at a time, and none past the last query: one program reads what many have left, as fast as its loads come back.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, max(4, DIM // 32)], [max(128 // DIM, 1), min(DIM // 4, 32)], [gl.num_warps(), 1], [1, 0])
    UNROLL: gl.constexpr = 16 if DIM <= 128 else 8  # leaves that are on their way, in 128 registers a thread
    ROWS_AT_ONCE: gl.constexpr = min(FOLD_ROWS * gl.num_warps() // 4, SLOT_ROWS)
    last = gl.minimum(query_len * GROUP_ROWS, SLOT_ROWS)
    rows = gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    for row in range(0, last, ROWS_AT_ONCE):
        m3 = gl.full([ROWS_AT_ONCE], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        l3 = gl.full([ROWS_AT_ONCE], 0.0, gl.float32, gl.SliceLayout(1, layout))
        acc3 = gl.full([ROWS_AT_ONCE, DIM], 0.0, gl.float32, layout)
        for leaf in range(0, leaves, UNROLL):
            slot = first + (leaf * SLOT_ROWS + row) + rows
            state_ptrs = state_ptr + slot * 2
            part_ptrs = part_ptr + slot[:, None] * DIM + offs_d[None, :]
            states = ()
            m_new = m3
            for u in gl.static_range(UNROLL):
                has = (row + rows < last) & (leaf + u < leaves)
                m = gl.load(state_ptrs + u * (SLOT_ROWS * 2), mask=has, other=float("-inf"))
                l = gl.load(state_ptrs + (u * (SLOT_ROWS * 2) + 1), mask=has, other=0.0)
                acc = gl.load(part_ptrs + u * (SLOT_ROWS * DIM), mask=has[:, None], other=0.0)
                states += ((m, l, acc),)  # type: ignore[assignment]  # a longer tuple each time
                m_new = gl.maximum(m_new, m)
            # ``merge`` of one after another, but that all are scaled at once: exactly, so that the sums are the same, but for what
            # underflows (decode.py) or overflows before the largest maximum is met
            base = gl.where(m_new == float("-inf"), 0.0, m_new)
            a = gl.exp2(m3 - base)
            m3 = m_new
            l3 = l3 * a
            acc3 = acc3 * a[:, None]
            for u in gl.static_range(UNROLL):
                a = gl.exp2(states[u][0] - base)
                l3 = gl.fma(states[u][1], a, l3)
                acc3 = gl.fma(states[u][2], a[:, None] + gl.zeros_like(acc3), acc3)
        _store(
            out_ptr, lse_ptr, sinks_ptr, m3, l3, acc3, row, first_row, query_len, length, head, v_factor,
            stride_ot, stride_oh, stride_lt, stride_lh, GROUP, GROUP_ROWS, HEAD_DIM, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def leave(part_ptr, state_ptr, slot, m, l, acc, valid):
    """Write the state of the valid rows from row ``slot`` on."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], m.type.layout)
    gl.store(state_ptr + (slot + row) * 2, m, mask=valid)
    gl.store(state_ptr + (slot + row) * 2 + 1, l, mask=valid)
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    gl.store(part_ptr + (slot + row)[:, None] * acc.shape[1] + offs_d[None, :], acc, mask=valid[:, None])


@gluon.jit
def end_segment(
    out_ptr, lse_ptr, sinks_ptr, part_ptr, state_ptr, arrivals_ptr, arrivals, slot0, is_cut, blocks, share, leaf, m, l, acc,
    first_row, query_len, length, head, head_factor, stride_ot, stride_oh, stride_lt, stride_lh,
    SLOT_ROWS: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Store a sequence that the segment holds whole, (m, l, acc); of a cut one fold the leaves, if all of its blocks are in now."""
    if is_cut:
        barrier()  # all threads have stored before one of them releases
        arrived = gl.atomic_add(arrivals_ptr + arrivals, blocks, sem="acq_rel", scope="gpu")
        if arrived + blocks == share:  # all of its blocks are in, so this program folds them
            barrier()  # no thread reads before the one that acquires
            gl.store(arrivals_ptr + arrivals, 0)  # for the next launch
            leaves = (share + leaf - 1) // leaf
            _fold(
                part_ptr, state_ptr, slot0, leaves, out_ptr, lse_ptr, sinks_ptr,
                first_row, query_len, length, head, head_factor, stride_ot, stride_oh, stride_lt, stride_lh,
                SLOT_ROWS, DIM, GROUP, GROUP_ROWS, HEAD_DIM, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
    else:
        _store(
            out_ptr, lse_ptr, sinks_ptr, m, l, acc, 0, first_row, query_len, length, head, head_factor,
            stride_ot, stride_oh, stride_lt, stride_lh, GROUP, GROUP_ROWS, HEAD_DIM, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def consumer(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, part_ptr, state_ptr, arrivals_ptr,
    qk_scale, softcap, v_factor, window, stride_ks, stride_vs, stride_ot, stride_oh, stride_lt, stride_lh,
    q_shared, q_full, q_empty, ks, vs, segments,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, SLOT_ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, DTYPE: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, LEAVES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_K_SCALE: gl.constexpr, HAS_V_SCALE: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    nothing = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = wait_work(segments, k)
        blocks, first, head, length, first_row, query_len, begin, share, leaf, owner = read_segment(segments, at)
        mbarrier.arrive(segments.empty.index(at), count=1)
        if blocks > 0:
            q_stage = k % Q_STAGES
            q = q_shared.index(q_stage)
            mbarrier.wait(q_full.index(q_stage), (k // Q_STAGES) & 1)
            is_cut = blocks < share
            token = row // GROUP_ROWS
            position = gl.full([ROWS], 0, gl.int32, row.type.layout) + (length - 1)  # the last key that a row sees
            if CAUSAL:
                position = length - query_len + token
                position = gl.minimum(position, length - 1)
            head_scale = qk_scale
            if HAS_K_SCALE:
                head_scale = qk_scale * gl.load(k_scale_ptr + head * stride_ks)
            unseen = 0  # keys before the first query's window
            if HAS_WINDOW:
                unseen = gl.maximum(length - query_len - window + 1, 0)
            arrivals = owner * KV_HEADS + head
            slot0 = arrivals.to(gl.int64) * (LEAVES * SLOT_ROWS)
            m1 = nothing  # state of the leaf, of the row
            l1 = gl.full([ROWS], 0.0, gl.float32, row.type.layout)
            acc1 = gl.zeros([ROWS, DIM], gl.float32, o_layout)
            m3 = nothing
            l3 = l1
            acc3 = acc1
            left = leaf  # blocks of the leaf; a segment begins with one
            at_leaf = begin // leaf
            for block in range(first, first + blocks):
                stage = i % K_STAGES
                mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
                s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
                if HAS_SOFTCAP:
                    s = cap(s, head_scale, softcap)
                elif HAS_K_SCALE:
                    s = s * head_scale
                start = block * BLOCK_N
                p, m1, l1, factor = _softmax(
                    s, m1, l1, position - start, offs_n, 1.0 if HAS_SOFTCAP or HAS_K_SCALE else qk_scale, window, HAS_WINDOW
                )
                p_narrow = gl.convert_layout(p.to(DTYPE), p_layout)
                acc1 = acc1 * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
                v_stage = i % V_STAGES
                v = vs.blocks.index(v_stage)
                mbarrier.wait(vs.full.index(v_stage), (i // V_STAGES) & 1)
                if (length < start + BLOCK_N) | (unseen > start):
                    _clean(v, unseen - start, length - start, 16, BLOCK_N)
                acc1 = warpgroup_mma(p_narrow, v, acc1, is_async=True)
                acc1, p_narrow = warpgroup_mma_wait(0, [acc1, p_narrow])
                meet("arrive", FIRST_BARRIER + K_STAGES + v_stage, HANDSHAKE)
                i += 1
                left -= 1
                done = begin + block - first + 1
                if (left == 0) | (done == share):
                    if is_cut:
                        slot = slot0 + at_leaf * SLOT_ROWS
                        leave(part_ptr, state_ptr, slot, m1, l1, acc1, token < query_len)
                    else:
                        m3, l3, acc3 = merge(m3, l3, acc3, m1, l1, acc1)
                    left = leaf
                    at_leaf += 1
                    m1 = nothing
                    l1 = gl.full([ROWS], 0.0, gl.float32, row.type.layout)
                    acc1 = gl.zeros([ROWS, DIM], gl.float32, o_layout)
            mbarrier.arrive(q_empty.index(q_stage), count=1)
            head_factor = v_factor
            if HAS_V_SCALE:
                head_factor = v_factor * gl.load(v_scale_ptr + head * stride_vs)
            end_segment(
                out_ptr, lse_ptr, sinks_ptr, part_ptr, state_ptr, arrivals_ptr, arrivals, slot0, is_cut, blocks, share, leaf, m3, l3, acc3,
                first_row, query_len, length, head, head_factor, stride_ot, stride_oh, stride_lt, stride_lh,
                SLOT_ROWS, DIM, GROUP, GROUP_ROWS, HEAD_DIM, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
        k += 1
