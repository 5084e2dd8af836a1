"""The consumers: matrix products, softmax, the rows' end."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tkernels.attention._prefill_sm90.blocks import first_block, first_half_block, give_values, next_block, pass_block, values
from tkernels.attention._prefill_sm90.shared import OUT_COLUMNS, ROWS, SHIFT, TILE, here, mma_layout
from tkernels.attention._prefill_sm90.softmax import operand, round_weights
from tkernels.attention._sm90_gluon import WORK_STAGES, get_word, wait_work


@gluon.jit
def _begin_tile(tiles, k, HAS_WINDOW: gl.constexpr):
    at = wait_work(tiles, k)
    low = 0
    if HAS_WINDOW:
        low = get_word(tiles, at, 1)
    return get_word(tiles, at, 0), low, get_word(tiles, at, 5), get_word(tiles, at, 6)


@gluon.jit
def _end_tile(tiles, k):
    """What only the store needs, read last: held over the loops it would cost registers that they lack."""
    stage = k % WORK_STAGES
    head = get_word(tiles, stage, 2)
    row = get_word(tiles, stage, 3)
    rows = get_word(tiles, stage, 4)
    length = get_word(tiles, stage, 6)
    mbarrier.arrive(tiles.empty.index(stage), count=1)
    return head, row, rows, length


@gluon.jit
def consumer(
    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, WG: gl.constexpr,
    DTYPE: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    NARROW: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, HALF_DIAGONAL: gl.constexpr,
):  # fmt: skip
    """Rows WG · ROWS to (WG + 1) · ROWS of every tile. Blocks of keys from the last to the first: cut by the diagonal or the end,
    seen by every row (no mask in that loop), cut by the window's start."""
    s_layout: gl.constexpr = mma_layout(BLOCK_N, DTYPE)
    o_layout: gl.constexpr = mma_layout(DIM, DTYPE)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    i = 0  # blocks this role has begun: their stages follow from it
    k = 0
    blocks, low, position, length = _begin_tile(tiles, 0, HAS_WINDOW)
    while blocks > 0:
        first_position = position + WG * ROWS
        if CAUSAL and WG == 0 and BLOCK_N < TILE:  # blocks that only the other consumer's rows see
            unseen = gl.minimum(blocks - 1 - gl.maximum(first_position + ROWS - 1, 0) // BLOCK_N, blocks - 1 - low)
            for _ in range(unseen):
                i = pass_block(ks, vs, i, K_STAGES, V_STAGES)
            blocks -= gl.maximum(unseen, 0)
        base = (blocks - 1) * BLOCK_N  # the last block's start: keys count from it in what follows
        full = blocks - 1  # blocks before it are not cut by the diagonal or the end
        if CAUSAL:
            full = gl.maximum(gl.minimum((first_position + 1) // BLOCK_N, full), low)
            sees = offs_m + (first_position - base)  # the last key that a row sees
        else:
            sees = gl.full([ROWS], 0, gl.int32, offs_m.type.layout) + (length - 1 - base)
        open_low = low  # blocks before it are cut by the window's start
        if HAS_WINDOW:
            open_low = (gl.maximum(first_position + ROWS - window, 0) + BLOCK_N - 1) // BLOCK_N
            open_low = gl.minimum(gl.maximum(open_low, low), full)
        stage = i % K_STAGES
        none = gl.full([ROWS], 0.0, gl.float32, offs_m.type.layout)
        q = q_shared.index(WG)
        mbarrier.wait(q_full, k & 1)
        mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
        if HALF_DIAGONAL and WG == 0:
            if first_position - base + ROWS <= BLOCK_N // 2:  # no row sees the right half of this block
                p, m, l = first_half_block(
                    q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
                )
            else:
                p, m, l = first_block(
                    q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
                )
        else:
            p, m, l = first_block(
                q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
            )
        if NARROW:
            p = round_weights(p, DTYPE, DIM)
        acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        i += 1
        for j in range(1, blocks - full):
            acc, m, l, p = next_block(
                q, ks, vs, i, acc, m, l, p, offs_m + here(first_position - base + j * BLOCK_N), offs_n,
                qk_scale, softcap, window, zeros, True, DTYPE, DIM, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            i += 1
        for _j in range(gl.maximum(blocks - full, 1), blocks - open_low):
            acc, m, l, p = next_block(
                q, ks, vs, i, acc, m, l, p, sees, offs_n, qk_scale, softcap, window, zeros,
                False, DTYPE, DIM, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            i += 1
        if HAS_WINDOW:
            for j in range(gl.maximum(blocks - open_low, 1), blocks - low):
                acc, m, l, p = next_block(
                    q, ks, vs, i, acc, m, l, p, offs_m + here(first_position - base + j * BLOCK_N), offs_n,
                    qk_scale, softcap, window, zeros, True, DTYPE, DIM, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
                i += 1
        mbarrier.arrive(q_empty, count=1)
        v_stage = (i - 1) % V_STAGES
        p_narrow = p if NARROW else round_weights(p, DTYPE, DIM)
        mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
        acc = warpgroup_mma(operand(p_narrow, DTYPE, DIM), values(vs, v_stage), acc, is_async=True)
        # while the last P · V runs
        head, row, rows, seq_len = _end_tile(tiles, k)
        row += WG * ROWS
        rows -= WG * ROWS  # that exist; may be negative
        k += 1
        blocks, low, position, length = _begin_tile(tiles, k, HAS_WINDOW)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
        give_values(vs, v_stage, K_STAGES)

        if not HAS_SOFTCAP:
            m = m * qk_scale
        if DTYPE.primitive_bitwidth == 8:
            m -= SHIFT
        if HAS_SINKS:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * 1.4426950408889634
            sink = none + gl.where(seq_len > 0, sink, float("-inf"))
            m_new = gl.maximum(m, sink)
            m_base = gl.where(m_new == float("-inf"), 0.0, m_new)
            factor = gl.exp2(m - m_base)
            l = l * factor + gl.exp2(sink - m_base)
            m = m_new
            factor = factor * v_factor
        else:
            factor = gl.full([ROWS], v_factor, gl.float32, none.type.layout)
        empty = l == 0.0  # no key seen: zero output, LSE -inf
        divisor = gl.where(empty, 1.0, l)
        factor = gl.convert_layout(gl.where(empty, 0.0, factor / divisor), gl.SliceLayout(1, o_layout))
        out = (acc * factor[:, None]).to(out_shared.dtype)
        if rows >= ROWS:  # tested this way round: ptxas spills with the other
            if DIM <= OUT_COLUMNS:
                _store_columns(out_desc, out_shared.index(WG), out, row, head, 0)
            else:
                half: gl.constexpr = mma_layout(DIM // 2, DTYPE)
                left, right = out.reshape([ROWS, 2, DIM // 2]).permute((0, 2, 1)).split()
                _store_columns(out_desc, out_shared.index(WG), gl.convert_layout(left, half), row, head, 0)
                _store_columns(out_desc, out_shared.index(WG), gl.convert_layout(right, half), row, head, DIM // 2)
        else:
            _store_rows(out_ptr, out, row, rows, head, stride_ot, stride_oh, HEAD_DIM, DIM)
        if HAS_LSE:
            lse = gl.where(empty, float("-inf"), (m + gl.log2(divisor)) * 0.6931471805599453)
            at = (row + offs_m).to(gl.int64) * here(stride_lt) + head * here(stride_lh)
            gl.store(lse_ptr + at, lse, mask=offs_m < rows)
    tma.store_wait(0)


@gluon.jit
def _store_columns(out_desc, shared, out, row, head, column):
    tma.store_wait(0)
    shared.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, head, column], shared)


@gluon.jit
def _store_rows(out_ptr, out, row, rows, head, stride_ot, stride_oh, HEAD_DIM: gl.constexpr, DIM: gl.constexpr):
    layout: gl.constexpr = out.type.layout
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = (row + offs_m).to(gl.int64) * here(stride_ot) + head * here(stride_oh)
    at = gl.multiple_of(at, 8)  # TMA asks that of strides
    mask = (offs_m < rows)[:, None]
    if HEAD_DIM != DIM:
        mask = mask & (offs_d < HEAD_DIM)[None, :]
    gl.store(out_ptr + at[:, None] + offs_d[None, :], out, mask=mask)
