"""The consumer of the kernel for few query tokens: matrix products on the older tensor cores, softmax, the fold of a sequence.

Keys are the rows of S = K · qᵀ, the first product, and tokens times heads the columns (N, 8 to 32); the second is O = Vᵀ · P. Each warp
takes its own keys of a block, with a maximum, sums and an accumulator of its own, and inside a leaf meets others only where the compiler
has all wait for K together. With SPLIT 2, two warps take the same keys and half of the columns each. Columns do not mix: those past a
sequence's last token, and those that fill a group up, hold queries of others. Nothing is laid out anew between shared memory and the tensor
cores (wide_operands.py of a cache of 16 bits, fp8_operands.py). "warps" in shapes are those of different keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tkernels._gluon import barrier
from tkernels.attention._decode_sm90.consumer import end_segment, leave, merge
from tkernels.attention._decode_sm90.fp8_operands import column_warps, key_warps, load_k, load_q, load_v, transpose
from tkernels.attention._decode_sm90.shared import ONE_FIRST_BARRIER, Q_STAGES, read_segment
from tkernels.attention._decode_sm90.warps import merge_warps, whole_layout
from tkernels.attention._decode_sm90.wide_operands import first_product, load_k16, load_q16, load_v16, seen_keys
from tkernels.attention._sm90_gluon import cap, wait_work


@gluon.constexpr_function
def _arrive(threads):
    return f"{{ .reg .b32 n; clz.b32 n, $2; shr.u32 n, n, 6; add.u32 n, n, $1; bar.arrive n, {threads}; mov.u32 $0, n; }}"


@gluon.jit
def _give_back(number, x, SPLIT: gl.constexpr, THREADS: gl.constexpr):
    """bar.arrive at a named barrier, once the products x [warps, rows, N] are there, and so has been read what they were made from.

    A load that is still on its way does not hold the instruction up, and behind it TMA may write what the load is about to read. So the
    barrier's number takes a bit from an element of each instruction's result, which is always 0: there are at most 32 leading zeros.
    """
    WARPS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    N: gl.constexpr = x.shape[2]
    x, _ = gl.split(x.reshape([WARPS, ROWS, N // 2, 2]))
    x, _ = gl.split(x.reshape([WARPS, ROWS // 16, 2, 8, N // 2]).permute([0, 1, 3, 4, 2]))
    x = gl.max(gl.max(x, 1).reshape([WARPS, 8, N // 8 // SPLIT, SPLIT, 4]), 2).to(gl.int32, bitcast=True)
    number = gl.zeros_like(x) + number
    gl.inline_asm_elementwise(_arrive(THREADS), "=r,r,r,~{memory}", [number, x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _block(
    q, k_block, k_full, k_phase, k_number, v_block, v_full, v_phase, v_number, m, l, acc, scale, softcap, begin, end, seen_by_all, window,
    mma: gl.constexpr, GROUP_ROWS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, HANDSHAKE: gl.constexpr,
    MASKED: gl.constexpr, SCALE_FIRST: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The states (m [warps, N], l [warps, 8, N], acc [warps, D, N]) with the keys of a block; l is not yet summed over its second axis.

    Keys are counted from the block's first one: those from begin to end are seen by some token, the first ``seen_by_all`` by all, as far
    as the end goes, and each token sees one more than the one before it.
    m: running maximum of the logits in base 2, rounded up to a whole number; l: running sum of p = 2^(logit - m).
    """
    WARPS: gl.constexpr = key_warps(mma)
    SPLIT: gl.constexpr = column_warps(mma)
    WIDE: gl.constexpr = k_block.dtype == q.dtype
    if WIDE:
        seen = seen_keys(begin, end, mma, D, KEYS)  # while K is on its way
    mbarrier.wait(k_full, k_phase)
    zeros = gl.zeros([WARPS, KEYS, N], gl.float32, mma)
    if WIDE:
        s = first_product(load_k16(k_block, mma, D, KEYS), q, zeros)
        _give_back(k_number, s, SPLIT, HANDSHAKE)
        mbarrier.wait(v_full, v_phase)  # V lies in registers before it is wanted
        v = load_v16(v_block, seen, mma, D, KEYS, MASKED)
    else:
        s = mma_v2(load_k(k_block, mma, D, KEYS), q, zeros)
        _give_back(k_number, s, SPLIT, HANDSHAKE)
    factor = scale[None, :] + gl.zeros_like(m)
    if HAS_SOFTCAP:
        s = cap(s, factor[:, None, :], softcap)
    elif SCALE_FIRST:
        s = s * factor[:, None, :]
    if MASKED:
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))
        key = warp[:, None] * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
        sees = gl.minimum(seen_by_all + gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, mma))) // GROUP_ROWS, end)
        visible = key[:, :, None] < sees[None, None, :]
        if HAS_WINDOW:
            visible = visible & (key[:, :, None] >= (sees - window)[None, None, :])
        s = gl.where(visible, s, float("-inf"))
    largest = gl.max(s, 1)
    if not (HAS_SOFTCAP or SCALE_FIRST):
        largest = largest * factor
    m_new = gl.maximum(m, gl.ceil(largest))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: not exp2(-inf + inf)
    if not (HAS_SOFTCAP or SCALE_FIRST):
        p = gl.exp2(s * factor[:, None, :] - base[:, None, :])
    else:
        p = gl.exp2(s - base[:, None, :])
    before = gl.exp2(m - base)
    part = gl.sum(p.reshape([WARPS, KEYS // 8, 8, N]), 1)
    l = l * gl.convert_layout(before, gl.SliceLayout(1, l.type.layout))[:, None, :] + gl.convert_layout(part, l.type.layout)
    p = transpose(p.to(q.dtype), mma)
    acc = acc * before[:, None, :]
    if WIDE:
        acc = mma_v2(v, p, acc)
    else:
        mbarrier.wait(v_full, v_phase)
        acc = mma_v2(load_v(v_block, begin, end, mma, D, KEYS, MASKED), p, acc)
    _give_back(v_number, acc, SPLIT, HANDSHAKE)
    return m_new, l, acc


@gluon.jit
def one_consumer(
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, part_ptr, state_ptr, arrivals_ptr, cu_ptr,
    num_seqs, num_tokens, qk_scale, softcap, v_factor, window, stride_ks, stride_vs, stride_ot, stride_oh, stride_lt, stride_lh,
    q_shared, q_full, q_empty, ks, vs, scratch, segments,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SLOT_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, LEAVES: gl.constexpr, HANDSHAKE: gl.constexpr,
    MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_K_SCALE: gl.constexpr, HAS_V_SCALE: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps() // SPLIT
    KEYS: gl.constexpr = BLOCK_N // WARPS  # of a block, for each warp
    N: gl.constexpr = q_shared.shape[1]
    GROUP_ROWS: gl.constexpr = N // QUERIES  # columns of a token, heads of a group and what fills up
    DIM: gl.constexpr = q_shared.shape[2]
    WIDE: gl.constexpr = ks.blocks.dtype == q_shared.dtype  # a cache of 16 bits, like q
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, SPLIT], [1, 16, 8])
    sums: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [WARPS, 1, SPLIT], [2, 1, 0])
    whole: gl.constexpr = whole_layout(N, DIM, WARPS, SPLIT)
    rows: gl.constexpr = gl.SliceLayout(1, whole)
    if MIN_QUERIES == 1:
        _zero_rows(
            out_ptr, lse_ptr, cu_ptr, num_seqs, num_tokens, stride_ot, stride_oh, stride_lt, stride_lh,
            KV_HEADS * GROUP, HEAD_DIM, DIM, HAS_LSE,
        )  # fmt: skip
    row = gl.arange(0, N, rows)
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = wait_work(segments, k)
        blocks, first, head, length, first_row, query_len, begin, share, leaf, owner = read_segment(segments, at)
        barrier()  # all warps have read
        mbarrier.arrive(segments.empty.index(at), count=1)
        if blocks > 0:
            q_stage = k % Q_STAGES
            mbarrier.wait(q_full.index(q_stage), (k // Q_STAGES) & 1)
            if WIDE:
                q = load_q16(q_shared.index(q_stage), mma)
                power = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
            else:
                q, power = load_q(q_shared.index(q_stage), mma)
            is_cut = blocks < share
            scale = power * qk_scale
            if HAS_K_SCALE:
                scale = scale * gl.load(k_scale_ptr + head * stride_ks)
            seen_by_all = length  # keys
            if CAUSAL:
                seen_by_all = length - query_len + 1
            unseen = 0  # keys before the first token's window, and before the last one's
            unseen_by_last = 0
            if HAS_WINDOW:
                unseen = gl.maximum(length - query_len - window + 1, 0)
                unseen_by_last = length - window
            arrivals = owner * KV_HEADS + head
            slot0 = arrivals.to(gl.int64) * (LEAVES * SLOT_ROWS)
            m1 = gl.full([WARPS, N], float("-inf"), gl.float32, gl.SliceLayout(1, mma))  # state of the leaf, warp by warp
            l1 = gl.zeros([WARPS, 8, N], gl.float32, sums)
            acc1 = gl.zeros([WARPS, DIM, N], gl.float32, mma)
            m3 = gl.full([N], float("-inf"), gl.float32, rows)  # of the row
            l3 = gl.full([N], 0.0, gl.float32, rows)
            acc3 = gl.zeros([N, DIM], gl.float32, whole)
            left = leaf  # blocks of the leaf; a segment begins with one
            at_leaf = begin // leaf
            for block in range(first, first + blocks):
                start = block * BLOCK_N
                k_stage = i % K_STAGES
                k_block = ks.blocks.index(k_stage)
                k_full = ks.full.index(k_stage)
                k_phase = (i // K_STAGES) & 1
                v_stage = i % V_STAGES
                v_block = vs.blocks.index(v_stage)
                v_full = vs.full.index(v_stage)
                v_phase = (i // V_STAGES) & 1
                k_back = ONE_FIRST_BARRIER + k_stage
                v_back = ONE_FIRST_BARRIER + K_STAGES + v_stage
                if (seen_by_all < start + BLOCK_N) | (unseen_by_last > start):
                    m1, l1, acc1 = _block(
                        q, k_block, k_full, k_phase, k_back, v_block, v_full, v_phase, v_back,
                        m1, l1, acc1, scale, softcap, unseen - start, length - start, seen_by_all - start, window,
                        mma, GROUP_ROWS, N, DIM, KEYS, HANDSHAKE, True, HAS_K_SCALE, HAS_SOFTCAP, HAS_WINDOW,
                    )  # fmt: skip
                else:
                    m1, l1, acc1 = _block(
                        q, k_block, k_full, k_phase, k_back, v_block, v_full, v_phase, v_back,
                        m1, l1, acc1, scale, softcap, unseen - start, length - start, seen_by_all - start, window,
                        mma, GROUP_ROWS, N, DIM, KEYS, HANDSHAKE, False, HAS_K_SCALE, HAS_SOFTCAP, HAS_WINDOW,
                    )  # fmt: skip
                i += 1
                left -= 1
                done = begin + block - first + 1
                if (left == 0) | (done == share):
                    m2, l2, acc2 = merge_warps(m1, l1, acc1, scratch, SPLIT, WIDE)
                    if is_cut:
                        valid = (row // GROUP_ROWS < query_len) & (row % GROUP_ROWS < GROUP)
                        leave(part_ptr, state_ptr, slot0 + at_leaf * SLOT_ROWS, m2, l2, acc2, valid)
                    else:
                        m3, l3, acc3 = merge(m3, l3, acc3, m2, l2, acc2)
                    left = leaf
                    at_leaf += 1
                    m1 = gl.full([WARPS, N], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
                    l1 = gl.zeros([WARPS, 8, N], gl.float32, sums)
                    acc1 = gl.zeros([WARPS, DIM, N], gl.float32, mma)
            mbarrier.arrive(q_empty.index(q_stage), count=1)  # the leaf's end brought the warps together, behind all products with q
            head_factor = v_factor
            if HAS_V_SCALE:
                head_factor = v_factor * gl.load(v_scale_ptr + head * stride_vs)
            end_segment(
                out_ptr, lse_ptr, sinks_ptr, part_ptr, state_ptr, arrivals_ptr, arrivals, slot0, is_cut, blocks, share, leaf, m3, l3, acc3,
                first_row, query_len, length, head, head_factor, stride_ot, stride_oh, stride_lt, stride_lh,
                SLOT_ROWS, DIM, GROUP, GROUP_ROWS, HEAD_DIM, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
        k += 1


@gluon.jit
def _zero_rows(
    out_ptr, lse_ptr, cu_ptr, num_seqs, num_tokens, stride_ot, stride_oh, stride_lt, stride_lh,
    HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Rows that belong to no sequence are zero, so that nothing uninitialised reaches the next op."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    HEADS_UP: gl.constexpr = 256 // DIM * gl.num_warps()  # heads at once
    offs_h = gl.arange(0, HEADS_UP, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    token = gl.load(cu_ptr + num_seqs) + gl.program_id(0)
    while token < num_tokens:
        for first in range(0, HEADS, HEADS_UP):
            h = first + offs_h
            at = token.to(gl.int64) * stride_ot + h * stride_oh
            mask = (h < HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
            gl.store(out_ptr + at[:, None] + offs_d[None, :], gl.zeros([HEADS_UP, DIM], out_ptr.dtype.element_ty, layout), mask=mask)
            if HAS_LSE:
                lse = gl.full([HEADS_UP], float("-inf"), gl.float32, h.type.layout)
                gl.store(lse_ptr + token.to(gl.int64) * stride_lt + h * stride_lh, lse, mask=h < HEADS)
        token += gl.num_programs(0)
