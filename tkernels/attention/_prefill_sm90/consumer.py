"""The consumers: matrix products, softmax, the rows' end."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tkernels.attention._prefill_sm90.shared import GIVE_TRANSPOSED, HANDSHAKE, OUT_COLUMNS, ROWS, SHIFT, TILE, here, mma_layout
from tkernels.attention._sm90_gluon import FIRST_BARRIER, WORK_STAGES, cap, get_word, meet, wait_work


@gluon.jit
def _max(s, CHAINS: gl.constexpr):
    """The largest score of each row. CHAINS: by four chains of comparisons in a thread, not by one: they are what the exponentials of a
    block wait for, and products of 8 bits leave less to do meanwhile."""
    if CHAINS:
        KEYS: gl.constexpr = s.shape[1]
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        four = gl.max(s.reshape([ROWS, 2, KEYS // 16, 4, 2]), 2)  # half, (of its groups of 8 keys), t, which of the pair
        return gl.convert_layout(gl.max(gl.max(gl.max(four, 3), 1), 1), rows)
    else:
        return gl.max(s, 1)


@gluon.jit
def _softmax(
    s, m, l, position, key, qk_scale, softcap, window,
    FIRST: gl.constexpr, MASKED: gl.constexpr, EIGHT: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores s [ROWS, keys] of one block → (p, m, l, factor of what was summed before).

    m: running maximum of the scores (with a soft cap: of the capped ones, in base 2); l: running sum of p = 2^(scaled score - maximum),
    which is 2^SHIFT times as large where it is rounded to 8 bits (EIGHT).
    """
    if HAS_SOFTCAP:
        s = cap(s, qk_scale, softcap)
        qk_scale = 1.0
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
    m_new = _max(s, EIGHT)
    if not FIRST:
        m_new = gl.maximum(m, m_new)
    base = m_new * qk_scale
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    if EIGHT:
        p = gl.exp2(s * qk_scale - (base - SHIFT)[:, None])
    else:
        p = gl.exp2(s * qk_scale - base[:, None])
    l_new = gl.sum(p, 1)
    factor = base
    if not FIRST:
        factor = gl.exp2(m * qk_scale - base)
        l_new = l * factor + l_new
    return p, m_new, l_new, factor


@gluon.jit
def _round(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """p rounded: the left operand of P · V; of 8 bits its words of four [ROWS, keys / 4], as single bytes would be carried one a register.

    Of 8 bits, the operand holds keys 4t to 4t + 3 of 16 in the thread that has the scores of keys 2t, 2t + 1, 8 + 2t and 9 + 2t. So keys
    change their order, as those of V did in the transposer, and nothing moves between threads.
    """
    if DTYPE.primitive_bitwidth == 8:
        KEYS: gl.constexpr = p.shape[1]
        p = p.reshape([ROWS, KEYS // 32, 2, 2, 4, 2]).permute((0, 1, 4, 3, 5, 2))  # t, half, which of the pair, group of 16
        even, odd = p.split()
        first, second = odd.split()
        p = gl.join(even, gl.join(second, first)).permute((0, 1, 5, 2, 3, 4))  # group, t, half, which
        first, second = p.split()
        a, c = first.split()
        b, d = second.split()
        word = gl.inline_asm_elementwise(
            "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }",
            "=r,f,f,f,f", [a, b, c, d], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return word.reshape([ROWS, KEYS // 4])
    else:
        return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 2))


@gluon.jit
def _operand(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """The left operand of P · V of what ``_round`` gave."""
    if DTYPE.primitive_bitwidth == 8:
        p = gl.join(p, p)
        p = gl.join(p, p).reshape([ROWS, 4 * p.shape[1]])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 4))
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [p], gl.float8e4nv, is_pure=True, pack=4)
    return p


@gluon.jit
def _first_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The block of a tile that is computed first, its last one: (p, m, l). Always masked."""
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    sees = gl.convert_layout(sees, gl.SliceLayout(1, LAYOUT))
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    EIGHT: gl.constexpr = q.dtype.primitive_bitwidth == 8
    p, m, l, _factor = _softmax(s, none, none, sees, key, qk_scale, softcap, window, True, True, EIGHT, HAS_WINDOW, HAS_SOFTCAP)
    return p, m, l


@gluon.jit
def _first_half_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The same where no row sees the right half of the block: half the products and exponentials."""
    half: gl.constexpr = mma_layout(KEYS // 2, q.dtype)
    p, m, l = _first_block(q, k.slice(0, KEYS // 2), sees, stage, qk_scale, softcap, window, half, KEYS // 2, HAS_WINDOW, HAS_SOFTCAP)
    p = gl.join(p, gl.zeros([ROWS, KEYS // 2], gl.float32, half)).permute((0, 2, 1)).reshape([ROWS, KEYS])
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return gl.convert_layout(p, LAYOUT), gl.convert_layout(m, rows), gl.convert_layout(l, rows)


@gluon.jit
def _values(vs, stage):
    """The block of V in ``stage`` as [keys, columns]; of 8 bits it lies transposed."""
    values = vs.blocks.index(stage)
    if values.dtype.primitive_bitwidth == 8:
        values = values.permute((1, 0))
    return values


@gluon.jit
def _give_values(vs, stage, K_STAGES: gl.constexpr):
    THREADS: gl.constexpr = GIVE_TRANSPOSED if vs.blocks.dtype.primitive_bitwidth == 8 else HANDSHAKE
    meet("arrive", FIRST_BARRIER + K_STAGES + stage, THREADS)


@gluon.constexpr_function
def _arrive_after_assembly(threads):
    return f"{{ .reg .b32 n; shr.u32 n, $1, 31; add.u32 n, n, $2; bar.arrive n, {threads}; mov.b32 $0, $2; }}"


@gluon.jit
def _arrive_after(x, barrier, THREADS: gl.constexpr):
    """bar.arrive at a named barrier once ``x`` is known, of which each thread holds one, never negative: its sign is added to the number.

    ptxas keeps the order of arrivals and waits for products, not that of other instructions around them.
    """
    number = gl.full(x.shape, 0, gl.int32, x.type.layout) + barrier
    gl.inline_asm_elementwise(_arrive_after_assembly(THREADS), "=r,r,r", [x, number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _halves(x):
    """What a thread holds of x [ROWS, …] of its two rows, apart."""
    return x.reshape([4, 2, 8, x.numel // ROWS]).permute((0, 2, 3, 1)).split()


@gluon.jit
def _all_sums(l):
    """The larger sum of a thread's two rows, 0 for NaN. Known when all exponentials are."""
    a, b = _halves(l)
    return gl.maximum(gl.maximum(a, b), 0.0).to(gl.int32, bitcast=True)


@gluon.jit
def _all_words(words):
    """The words of a thread in one, that is of its weights, which have no sign."""
    a, b = _halves(words)
    x = a | b
    LEVELS: gl.constexpr = _exponent(x.shape[2] // 4)
    for _ in gl.static_range(LEVELS):
        a, b = x.reshape([4, 8, x.shape[2] // 8, 2, 4]).permute((0, 1, 2, 4, 3)).reshape([4, 8, x.shape[2] // 2, 2]).split()
        x = a | b
    return x


@gluon.constexpr_function
def _exponent(n):
    return n.bit_length() - 1


@gluon.jit
def _next_block(
    q, ks, vs, i, acc, m, l, p, position, key, qk_scale, softcap, window, zeros,
    MASKED: gl.constexpr, DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, NARROW: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Block i of this role: its Q · Kᵀ is issued, then the P · V of block i - 1, under which the softmax of block i runs.

    p is carried in fp32 and rounded under the Q · Kᵀ, which is faster; with NARROW it is carried rounded, which takes 32 registers
    fewer at the peak (p, s and acc at once).
    """
    o_layout: gl.constexpr = mma_layout(DIM, DTYPE)
    EIGHT: gl.constexpr = DTYPE.primitive_bitwidth == 8
    stage = i % K_STAGES
    v_stage = (i - 1) % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_narrow = p if NARROW else _round(p, DTYPE, DIM)
    mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
    acc = warpgroup_mma(_operand(p_narrow, DTYPE, DIM), _values(vs, v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    if not EIGHT:
        meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    p, m, l, factor = _softmax(s, m, l, position, key, qk_scale, softcap, window, False, MASKED, EIGHT, HAS_WINDOW, HAS_SOFTCAP)
    if EIGHT:
        _arrive_after(_all_sums(l), FIRST_BARRIER + stage, HANDSHAKE)  # not the exponentials after the wait for P · V
    if NARROW:
        p = _round(p, DTYPE, DIM)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
    else:
        acc, p_narrow, p = warpgroup_mma_wait(0, [acc, p_narrow, p])
    if EIGHT and NARROW:  # not the new words in the registers of the old ones, which P · V still reads
        _arrive_after(_all_words(p_narrow), FIRST_BARRIER + K_STAGES + v_stage, GIVE_TRANSPOSED)
    else:
        _give_values(vs, v_stage, K_STAGES)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return acc, m, l, p


@gluon.jit
def _pass_block(ks, vs, i, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Give block i back unread, after it has come: an arrival before the loader has met the one before would count for that."""
    stage = i % K_STAGES
    v_stage = i % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    mbarrier.wait(vs.full.index(v_stage), (i // V_STAGES) & 1)
    _give_values(vs, v_stage, K_STAGES)
    return i + 1


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
                i = _pass_block(ks, vs, i, K_STAGES, V_STAGES)
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
                p, m, l = _first_half_block(
                    q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
                )
            else:
                p, m, l = _first_block(
                    q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
                )
        else:
            p, m, l = _first_block(
                q, ks.blocks.index(stage), sees, stage, qk_scale, softcap, window, s_layout, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP
            )
        if NARROW:
            p = _round(p, DTYPE, DIM)
        acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        i += 1
        for j in range(1, blocks - full):
            acc, m, l, p = _next_block(
                q, ks, vs, i, acc, m, l, p, offs_m + here(first_position - base + j * BLOCK_N), offs_n,
                qk_scale, softcap, window, zeros, True, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            i += 1
        for _j in range(gl.maximum(blocks - full, 1), blocks - open_low):
            acc, m, l, p = _next_block(
                q, ks, vs, i, acc, m, l, p, sees, offs_n, qk_scale, softcap, window, zeros,
                False, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            i += 1
        if HAS_WINDOW:
            for j in range(gl.maximum(blocks - open_low, 1), blocks - low):
                acc, m, l, p = _next_block(
                    q, ks, vs, i, acc, m, l, p, offs_m + here(first_position - base + j * BLOCK_N), offs_n,
                    qk_scale, softcap, window, zeros, True, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
                i += 1
        mbarrier.arrive(q_empty, count=1)
        v_stage = (i - 1) % V_STAGES
        p_narrow = p if NARROW else _round(p, DTYPE, DIM)
        mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
        acc = warpgroup_mma(_operand(p_narrow, DTYPE, DIM), _values(vs, v_stage), acc, is_async=True)
        # while the last P · V runs
        head, row, rows, seq_len = _end_tile(tiles, k)
        row += WG * ROWS
        rows -= WG * ROWS  # that exist; may be negative
        k += 1
        blocks, low, position, length = _begin_tile(tiles, k, HAS_WINDOW)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
        _give_values(vs, v_stage, K_STAGES)

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
