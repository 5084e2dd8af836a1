"""The Gluon kernel of prefill_sm90.py, one function a role. Triton's interpreter cannot run it: prefill.py is its twin and its oracle.

A program (one per multiprocessor) is six roles that work on a stream of tiles, a tile being 2 · 64 query tokens of one query head:

- the scheduler (one warp) takes tiles from an atomic counter, writes what the others must know about each into shared memory and
  loads its queries; so no other role divides, searches or reads lengths;
- two loaders (one warp each) stream the K and the V blocks of the tile through rings of stages by TMA, last block first;
- the cleaner (one warp) zeroes the rows of V past a sequence's length before the consumers see them;
- two consumers (four warps each) compute 64 rows each: softmax of one block while the P · V of the block before runs.

The stream ends with a tile of no blocks, all of whose words are zero. By then every load has been waited for by who uses it, and
consumers wait for their stores.

Handshakes: mbarriers for what TMA fills and for tiles; named barriers (inline assembly) for stages that consumers give back, since an
``mbarrier.arrive`` of Gluon synchronises all the warps of its role first. Every role sees the same tiles in the same order and counts
its stages itself. Nothing is read beyond a tile's last page; TMA clips whatever page id the table holds to the cache.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

WARPGROUPS = gl.constexpr(2)  # consumers
ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one warpgroup MMA
TILE = gl.constexpr(128)  # query rows of a tile
SEQS = gl.constexpr(32)  # sequences that the scheduler reads at once
TILE_STAGES = gl.constexpr(4)  # tiles that the scheduler may be ahead, and one that the consumers are at
FIELDS = gl.constexpr(8)  # 32-bit words that describe a tile
HANDSHAKE = gl.constexpr(2 * 128 + 32)  # threads that meet at a named barrier: the consumers and a loader
FIRST_BARRIER = gl.constexpr(8)  # named barriers below it belong to the compiler (0, 1 and one a role)


class Tiles(NamedTuple):
    """The ring of tile descriptions: FIELDS words each, filled by the scheduler, read by the others."""

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Stages(NamedTuple):
    """A ring of K or V blocks. ``full`` is TMA's; stage i is given back at named barrier ``first + i``."""

    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.constexpr_function
def _named_barrier(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def _meet(kind: gl.constexpr, barrier):
    """bar.arrive or bar.sync at a named barrier, whose number may be a run-time value."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.full([32 * gl.num_warps()], 0, gl.int32, layout) + barrier
    gl.inline_asm_elementwise(_named_barrier(kind, HANDSHAKE), "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _here(x):
    """x, computed where it is used: sums with it do not leave the loop, where they would hold registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(a, b):
    return a + b


# ---- the scheduler


@gluon.jit
def _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY: gl.constexpr):
    """(query tiles, level) of the sequences ``first`` to ``first + SEQS``; level: the exponent of the length. Short ones have no tiles."""
    s = first + gl.arange(0, SEQS, gl.BlockedLayout([1], [32], [1], [0]))
    live = s < num_seqs
    query_len = gl.load(cu_ptr + s + 1, mask=live, other=0) - gl.load(cu_ptr + s, mask=live, other=0)
    length = gl.minimum(gl.maximum(gl.load(lens_ptr + s, mask=live, other=0), 0), capacity)
    count = gl.where(query_len >= MIN_QUERY, (query_len + TILE - 1) // TILE, 0)
    return count, (length + 1).to(gl.float32).to(gl.int32, bitcast=True) >> 23


@gluon.jit
def _next_item(counter_ptr, items):
    """The next item for this program. A launch fetches exactly ``items`` times: the last fetch leaves the counter at zero."""
    old = gl.atomic_add(counter_ptr, 1)
    if old == items - 1:
        gl.atomic_xchg(counter_ptr, 0)
    return old + gl.num_programs(0)


@gluon.jit
def _put(tiles, stage, field: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles.words.index(stage * FIELDS + field).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def _scheduler(
    q_desc, cu_ptr, lens_ptr, counter_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, tiles,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    MIN_QUERY: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Longest first: levels of length (powers of two) from the top; in a level one (sequence, KV head) after another, which keeps its
    keys in L2; in it the tile with the most keys first. Exact order of lengths inside a level would cost a sort and gain nothing."""
    num_tiles = 0
    level = 0
    for first in range(0, num_seqs, SEQS):
        count, levels = _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY)
        num_tiles += gl.sum(count, 0)
        level = gl.maximum(level, gl.max(gl.where(count > 0, levels, 0), 0))
    items = num_tiles * HEADS
    # a cursor that only moves on: ``passed`` query tiles lie before the SEQS sequences at ``first`` in this level, which have ``here``
    passed = 0
    here = 0
    first = num_seqs  # the first search begins the level below
    level += 1
    item = gl.program_id(0)
    k = 0
    go = item >= 0
    while go:
        go = item < items
        stage = k % TILE_STAGES
        mbarrier.wait(tiles.empty.index(stage), ((k // TILE_STAGES) & 1) ^ 1)
        if go:
            tile = item // HEADS
            while tile >= passed + here:
                passed += here
                first += SEQS
                if first >= num_seqs:
                    first = 0
                    level -= 1
                count, levels = _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY)
                here = gl.sum(gl.where(levels == level, count, 0), 0)
            count, levels = _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY)
            ends = gl.associative_scan(gl.where(levels == level, count, 0), 0, _add)
            before = ends <= tile - passed
            s = first + gl.sum(before.to(gl.int32), 0)
            item_of_seq = item - (passed + gl.max(gl.where(before, ends, 0), 0)) * HEADS
            first_row = gl.load(cu_ptr + s)
            query_len = gl.load(cu_ptr + s + 1) - first_row
            length = gl.minimum(gl.maximum(gl.load(lens_ptr + s), 0), capacity)
            query_tiles = (query_len + TILE - 1) // TILE
            kv_head = item_of_seq // (GROUP * query_tiles)
            rest = item_of_seq - kv_head * (GROUP * query_tiles)
            token = (query_tiles - 1 - rest // GROUP) * TILE
            head = kv_head * GROUP + rest % GROUP
            position = length - query_len + token
            end = length
            if CAUSAL:
                end = gl.minimum(length, position + TILE)
            # a tile that sees no key computes one block, all masked: its rows come out zero
            blocks = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
            low = 0
            if HAS_WINDOW:
                low = gl.minimum(gl.maximum(position - window + 1, 0) // BLOCK_N, blocks - 1)
            _put(tiles, stage, 0, blocks)
            _put(tiles, stage, 1, low)
            _put(tiles, stage, 2, head)
            _put(tiles, stage, 3, first_row + token)
            _put(tiles, stage, 4, query_len - token)
            _put(tiles, stage, 5, position)
            _put(tiles, stage, 6, length)
            _put(tiles, stage, 7, s * stride_bt)
            mbarrier.arrive(tiles.full.index(stage), count=1)
            mbarrier.wait(q_empty, (k & 1) ^ 1)
            mbarrier.expect(q_full, TILE * DIM * 2)
            for w in gl.static_range(WARPGROUPS):
                tma.async_copy_global_to_shared(q_desc, [first_row + token + w * ROWS, head, 0], q_full, q_shared.index(w))
            k += 1
            item = _next_item(counter_ptr, items)
        else:
            # no blocks: the roles end. They read other words before they know that, and the stage may never have held a tile, so that
            # shared memory would say what an earlier kernel left there: a first block of -2^30, say, and the loaders would run on to it
            for field in gl.static_range(FIELDS):
                _put(tiles, stage, field, 0)
            mbarrier.arrive(tiles.full.index(stage), count=1)


# ---- the loaders


@gluon.jit
def _get(tiles, stage, field: gl.constexpr):
    return gl.sum(tiles.words.index(stage * FIELDS + field).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _wait_tile(tiles, k):
    """The stage of the ring where tile k lies now."""
    stage = k % TILE_STAGES
    mbarrier.wait(tiles.full.index(stage), (k // TILE_STAGES) & 1)
    return stage


@gluon.jit
def _loader(
    desc, table_ptr, window, ring, tiles, BARRIER: gl.constexpr, STAGES: gl.constexpr, CLEAN: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Streams the K or the V blocks of every tile. A page id past the sequence's last page is never read: the last page stands in.

    CLEAN (V): a block with slots that no query of the tile may see, those past the sequence's length and those before the window of its
    first query, lands at the cleaner's barrier, not at the consumers'.
    """
    PAGES: gl.constexpr = BLOCK_N // PAGE if BLOCK_N > PAGE else 1  # in a block
    BLOCKS: gl.constexpr = PAGE // BLOCK_N if PAGE > BLOCK_N else 1  # in a page
    PART: gl.constexpr = BLOCK_N // PAGES  # keys that one TMA brings
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = _wait_tile(tiles, k)
        blocks = _get(tiles, at, 0)
        low = _get(tiles, at, 1)
        kv_head = _get(tiles, at, 2) // GROUP
        length = _get(tiles, at, 6)
        table_row = _get(tiles, at, 7)
        start = 0  # the first key that a query of the tile sees
        if CLEAN and HAS_WINDOW:
            start = _get(tiles, at, 5) - window + 1
        mbarrier.arrive(tiles.empty.index(at), count=1)
        last_page = gl.maximum((length + PAGE - 1) // PAGE - 1, 0)
        block = blocks - 1
        while block >= low:
            stage = i % STAGES
            land = stage
            if CLEAN:
                dirty = length < (block + 1) * BLOCK_N
                if HAS_WINDOW:
                    dirty = dirty | (start > block * BLOCK_N)
                land += gl.where(dirty, STAGES, 0)
            first_page = block * PAGES // BLOCKS
            row = table_ptr + table_row
            page = gl.load(row + gl.minimum(first_page, last_page))  # before the wait, which hides its latency
            if i >= STAGES:
                _meet("sync", BARRIER + stage)
            mbarrier.expect(ring.full.index(land), BLOCK_N * DIM * 2)
            for p in gl.static_range(PAGES):
                now = page
                if p + 1 < PAGES:  # one ahead, and not more: registers are few, and what waits for a TMA in uniform ones spills
                    page = gl.load(row + gl.minimum(first_page + p + 1, last_page))
                to = ring.blocks.index(stage)
                if PAGES > 1:
                    to = to.slice(p * PART, PART)
                tma.async_copy_global_to_shared(desc, [now, (block % BLOCKS) * BLOCK_N, kv_head, 0], ring.full.index(land), to)
            i += 1
            block -= 1
        k += 1
    for last in range(gl.maximum(i - STAGES, 0), i):  # no named barrier is left half full at the program's end
        _meet("sync", BARRIER + last % STAGES)


@gluon.jit
def _zero(atoms, first, last, base, begin, end, DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zeroes the rows before ``begin`` and from ``end`` on in the atoms ``first`` to ``last`` of each column; base: first of the block."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for atom in range(first, last):
        keep = row + atom * 8 < end
        if begin is not None:
            keep = keep & (row + atom * 8 >= begin)
        for column in gl.static_range(DIM // 64):
            part = atoms.index(base + column * (BLOCK_N // 8) + atom)
            part.store(gl.where(keep[:, None], part.load(layout), 0.0).to(DTYPE))


@gluon.jit
def _clean(ring, stage, parities, begin, end, DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the block in ``stage``, zero its rows before ``begin`` (None: no such rows) and from ``end`` on, and give it on."""
    ATOMS: gl.constexpr = BLOCK_N // 8  # in a column
    atoms = ring.blocks._reinterpret(DTYPE, [STAGES * (DIM // 64) * ATOMS, 8, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    mbarrier.wait(ring.full.index(STAGES + stage), (parities >> stage) & 1)
    base = stage * (DIM // 64) * ATOMS
    if begin is not None:
        _zero(atoms, 0, gl.minimum((begin + 7) // 8, ATOMS), base, begin, end, DTYPE, DIM, BLOCK_N)
    _zero(atoms, end // 8, ATOMS, base, None, end, DTYPE, DIM, BLOCK_N)
    fence_async_shared()  # written as usual, read by the tensor cores
    mbarrier.arrive(ring.full.index(stage), count=1)
    return parities ^ (1 << stage)


@gluon.jit
def _cleaner(
    ring, tiles, window,
    DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Zeroes the rows of V that no query of the tile may see, and gives the block on: those past a sequence's length hold whatever a page's
    tail holds, those before the window whatever the next owner of a freed page wrote (0 · NaN is NaN).

    Only the first block of a tile has rows of the one kind, and only its last block of the other. A block is seen as the atoms of its
    128-byte swizzle, 8 rows × 64 columns, one column of atoms after another, so that a loop can index them. ``full[STAGES + i]`` is the
    barrier at which such a block lands in stage i.
    """
    i = 0
    k = 0
    parities = 0  # bit i: parity of the uses of the barrier of stage i
    blocks = 1
    while blocks > 0:
        at = _wait_tile(tiles, k)
        blocks = _get(tiles, at, 0)
        low = _get(tiles, at, 1)
        length = _get(tiles, at, 6)
        if HAS_WINDOW:
            start = _get(tiles, at, 5) - window + 1
        mbarrier.arrive(tiles.empty.index(at), count=1)
        if HAS_WINDOW:
            for j in range(0, blocks - low, gl.maximum(blocks - low - 1, 1)):  # the tile's first block and its last one
                begin = start - (blocks - 1 - j) * BLOCK_N
                end = gl.maximum(length - (blocks - 1 - j) * BLOCK_N, 0)
                if (end < BLOCK_N) | (begin > 0):
                    parities = _clean(ring, (i + j) % STAGES, parities, begin, end, DTYPE, DIM, BLOCK_N, STAGES)
        else:
            end = gl.maximum(length - (blocks - 1) * BLOCK_N, 0)
            if (blocks > 0) & (end < BLOCK_N):
                parities = _clean(ring, i % STAGES, parities, None, end, DTYPE, DIM, BLOCK_N, STAGES)
        i += blocks - low
        k += 1


# ---- the consumers


@gluon.jit
def _softmax(
    s, m, l, position, key, qk_scale, softcap, window,
    FIRST: gl.constexpr, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores s [ROWS, keys] of one block → (p, m, l, factor of what was summed before).

    m: running maximum of the scores (with a soft cap: of the capped ones, in base 2); l: running sum of p = 2^(scaled score - maximum).
    """
    if HAS_SOFTCAP:  # softcap · tanh(x / softcap) by one exponential, as in _common.cap_logits
        x = s * qk_scale
        t = gl.exp2(gl.abs(x) * (-2.0 * 1.4426950408889634 / softcap))
        s = gl.where(x < 0, -softcap, softcap) * ((1.0 - t) / (1.0 + t))
        qk_scale = 1.0
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.max(s, 1)
    if not FIRST:
        m_new = gl.maximum(m, m_new)
    base = m_new * qk_scale
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    p = gl.exp2(s * qk_scale - base[:, None])
    l_new = gl.sum(p, 1)
    factor = base
    if not FIRST:
        factor = gl.exp2(m * qk_scale - base)
        l_new = l * factor + l_new
    return p, m_new, l_new, factor


@gluon.jit
def _first_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The block of a tile that is computed first, its last one: (p, m, l). Always masked."""
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    _meet("arrive", FIRST_BARRIER + stage)
    sees = gl.convert_layout(sees, gl.SliceLayout(1, LAYOUT))
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    p, m, l, _factor = _softmax(s, none, none, sees, key, qk_scale, softcap, window, True, True, HAS_WINDOW, HAS_SOFTCAP)
    return p, m, l


@gluon.jit
def _first_half_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The same where no row sees the right half of the block: half the products and exponentials."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS // 2, 16])
    p, m, l = _first_block(q, k.slice(0, KEYS // 2), sees, stage, qk_scale, softcap, window, half, KEYS // 2, HAS_WINDOW, HAS_SOFTCAP)
    p = gl.join(p, gl.zeros([ROWS, KEYS // 2], gl.float32, half)).permute((0, 2, 1)).reshape([ROWS, KEYS])
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return gl.convert_layout(p, LAYOUT), gl.convert_layout(m, rows), gl.convert_layout(l, rows)


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
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    stage = i % K_STAGES
    v_stage = (i - 1) % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_narrow = p if NARROW else gl.convert_layout(p.to(DTYPE), p_layout)
    mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
    acc = warpgroup_mma(p_narrow, vs.blocks.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    _meet("arrive", FIRST_BARRIER + stage)
    p, m, l, factor = _softmax(s, m, l, position, key, qk_scale, softcap, window, False, MASKED, HAS_WINDOW, HAS_SOFTCAP)
    if NARROW:
        p = gl.convert_layout(p.to(DTYPE), p_layout)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
    else:
        acc, p_narrow, p = warpgroup_mma_wait(0, [acc, p_narrow, p])
    _meet("arrive", FIRST_BARRIER + K_STAGES + v_stage)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return acc, m, l, p


@gluon.jit
def _begin_tile(tiles, k, HAS_WINDOW: gl.constexpr):
    at = _wait_tile(tiles, k)
    low = 0
    if HAS_WINDOW:
        low = _get(tiles, at, 1)
    return _get(tiles, at, 0), low, _get(tiles, at, 5), _get(tiles, at, 6)


@gluon.jit
def _end_tile(tiles, k):
    """What only the store needs, read last: held over the loops it would cost registers that they lack."""
    stage = k % TILE_STAGES
    head = _get(tiles, stage, 2)
    row = _get(tiles, stage, 3)
    rows = _get(tiles, stage, 4)
    length = _get(tiles, stage, 6)
    mbarrier.arrive(tiles.empty.index(stage), count=1)
    return head, row, rows, length


@gluon.jit
def _consumer(
    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, WG: gl.constexpr,
    DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    NARROW: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, HALF_DIAGONAL: gl.constexpr, STORE_BY_TMA: gl.constexpr,
):  # fmt: skip
    """Rows WG · ROWS to (WG + 1) · ROWS of every tile. Blocks of keys from the last to the first: cut by the diagonal or the end,
    seen by every row (no mask in that loop), cut by the window's start."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    i = 0  # blocks this role has begun: their stages follow from it
    k = 0
    blocks, low, position, length = _begin_tile(tiles, 0, HAS_WINDOW)
    while blocks > 0:
        first_position = position + WG * ROWS
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
            p = gl.convert_layout(p.to(DTYPE), p_layout)
        acc = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        i += 1
        for j in range(1, blocks - full):
            acc, m, l, p = _next_block(
                q, ks, vs, i, acc, m, l, p, offs_m + _here(first_position - base + j * BLOCK_N), offs_n,
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
                    q, ks, vs, i, acc, m, l, p, offs_m + _here(first_position - base + j * BLOCK_N), offs_n,
                    qk_scale, softcap, window, zeros, True, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES, NARROW, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
                i += 1
        mbarrier.arrive(q_empty, count=1)
        v_stage = (i - 1) % V_STAGES
        p_narrow = p if NARROW else gl.convert_layout(p.to(DTYPE), p_layout)
        mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
        acc = warpgroup_mma(p_narrow, vs.blocks.index(v_stage), acc, is_async=True)
        # while the last P · V runs
        head, row, rows, seq_len = _end_tile(tiles, k)
        row += WG * ROWS
        rows -= WG * ROWS  # that exist; may be negative
        k += 1
        blocks, low, position, length = _begin_tile(tiles, k, HAS_WINDOW)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
        _meet("arrive", FIRST_BARRIER + K_STAGES + v_stage)

        if not HAS_SOFTCAP:
            m = m * qk_scale
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
            factor = none + v_factor
        empty = l == 0.0  # no key seen: zero output, LSE -inf
        divisor = gl.where(empty, 1.0, l)
        factor = gl.convert_layout(gl.where(empty, 0.0, factor / divisor), gl.SliceLayout(1, o_layout))
        out = (acc * factor[:, None]).to(DTYPE)
        if STORE_BY_TMA:
            if rows >= ROWS:
                tma.store_wait(0)
                out_shared.index(WG).store(out)
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [row, head, 0], out_shared.index(WG))
            else:
                _store_rows(out_ptr, out, row, rows, head, stride_ot, stride_oh, DIM)
        else:
            _store_rows(out_ptr, out, row, rows, head, stride_ot, stride_oh, DIM)
        if HAS_LSE:
            lse = gl.where(empty, float("-inf"), (m + gl.log2(divisor)) * 0.6931471805599453)
            at = (row + offs_m).to(gl.int64) * stride_lt + head * stride_lh
            gl.store(lse_ptr + at, lse, mask=offs_m < rows)
    if STORE_BY_TMA:
        tma.store_wait(0)


@gluon.jit
def _store_rows(out_ptr, out, row, rows, head, stride_ot, stride_oh, DIM: gl.constexpr):
    layout: gl.constexpr = out.type.layout
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = (row + offs_m).to(gl.int64) * stride_ot + head * stride_oh
    gl.store(out_ptr + at[:, None] + offs_d[None, :], out, mask=(offs_m < rows)[:, None])


@gluon.jit(do_not_specialize=["num_seqs", "capacity", "window", "stride_bt", "stride_lt", "stride_lh"])
def prefill_sm90_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, counter_ptr,
    num_seqs, capacity, window, qk_scale, softcap, v_factor, stride_bt, stride_ot, stride_oh, stride_lt, stride_lh,
    DTYPE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, MIN_QUERY: gl.constexpr,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr, NARROW: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, HALF_DIAGONAL: gl.constexpr, STORE_BY_TMA: gl.constexpr,
):  # fmt: skip
    """q_desc, out_desc: [tokens, heads, DIM] in boxes of [ROWS, 1, DIM]. k_desc, v_desc: [pages, PAGE, kv_heads, DIM] in boxes of
    [1, min(PAGE, BLOCK_N), 1, DIM]. counter_ptr: an int32 that is zero and is zero again at the end. qk_scale, softcap: in base 2."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], DTYPE)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_shared = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, ROWS, DIM], layout)
    k_blocks = gl.allocate_shared_memory(DTYPE, [K_STAGES, BLOCK_N, DIM], layout)
    v_blocks = gl.allocate_shared_memory(DTYPE, [V_STAGES, BLOCK_N, DIM], layout)
    if STORE_BY_TMA:
        # a 64-byte swizzle needs half the address registers of a 128-byte one, and its stores meet no bank conflicts either
        out_shared = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, ROWS, DIM], gl.NVMMASharedLayout(64, 16, rank=2))
    else:
        out_shared = q_shared  # not used
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], barrier)  # the second half is the cleaner's
    tile_full = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], barrier)
    tile_empty = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], barrier)
    words = gl.allocate_shared_memory(gl.int32, [TILE_STAGES * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=WARPGROUPS)
    for stage in gl.static_range(TILE_STAGES):
        mbarrier.init(tile_full.index(stage), count=1)
        mbarrier.init(tile_empty.index(stage), count=WARPGROUPS + 3)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(2 * V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    fence_async_shared()
    tiles = Tiles(words, tile_full, tile_empty)
    ks = Stages(k_blocks, k_full)
    vs = Stages(v_blocks, v_full)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
                    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, 0, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES,
                    NARROW, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HALF_DIAGONAL, STORE_BY_TMA,
                ),
            ),
            (
                _consumer,
                (
                    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
                    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, 1, DTYPE, DIM, BLOCK_N, K_STAGES, V_STAGES,
                    NARROW, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HALF_DIAGONAL, STORE_BY_TMA,
                ),
            ),
            (_loader, (k_desc, table_ptr, window, ks, tiles, FIRST_BARRIER, K_STAGES, False, GROUP, DIM, PAGE, BLOCK_N, HAS_WINDOW)),
            (
                _loader,
                (v_desc, table_ptr, window, vs, tiles, FIRST_BARRIER + K_STAGES, V_STAGES, True, GROUP, DIM, PAGE, BLOCK_N, HAS_WINDOW),
            ),
            (_cleaner, (vs, tiles, window, DTYPE, DIM, BLOCK_N, V_STAGES, HAS_WINDOW)),
            (
                _scheduler,
                (
                    q_desc, cu_ptr, lens_ptr, counter_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, tiles,
                    HEADS, GROUP, DIM, BLOCK_N, MIN_QUERY, CAUSAL, HAS_WINDOW,
                ),
            ),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
