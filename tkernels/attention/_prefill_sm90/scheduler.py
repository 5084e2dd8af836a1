"""The scheduler: which tile is next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tkernels.attention._prefill_sm90.shared import ROWS, SEQS, TILE, WARPGROUPS, WIDE
from tkernels.attention._sm90_gluon import add, end_work, lengths_of, put_word, sequence, wait_room


@gluon.jit
def _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY: gl.constexpr, COUNT: gl.constexpr):
    """(query tiles, level) of the sequences ``first`` to ``first + COUNT``; level: the exponent of the length. Short ones have no tiles."""
    s = first + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [1], [0]))
    _first_row, query_len, length = lengths_of(cu_ptr, lens_ptr, s, num_seqs, capacity)
    count = gl.where(query_len >= MIN_QUERY, (query_len + TILE - 1) // TILE, 0)
    return count, (length + 1).to(gl.float32).to(gl.int32, bitcast=True) >> 23


@gluon.jit
def _next_item(counter_ptr, items):
    """The next item for this program. A launch fetches exactly ``items`` times: the last fetch leaves the counter at zero."""
    old = gl.atomic_add(counter_ptr, 1)
    if old == items - 1:
        gl.atomic_xchg(counter_ptr, 0)
    # the number of programs is read here each time: held over the loop, it would cost a register that the scheduler lacks
    return gl.inline_asm_elementwise(
        "{ .reg .u32 n; mov.u32 n, %nctaid.x; add.u32 $0, $1, n; }", "=r,r", [old], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def scheduler(
    q_desc, cu_ptr, lens_ptr, counter_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, tiles,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    MIN_QUERY: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Longest first: levels of length (powers of two) from the top; in a level one (sequence, KV head) after another, which keeps its
    keys in L2; in it the tile with the most keys first. Exact order of lengths inside a level would cost a sort and gain nothing."""
    num_tiles = 0
    level = 0
    first = 0  # where the search for a tile begins: SEQS before the first sequences that reach the highest level
    for start in range(0, num_seqs, WIDE):
        count, levels = _query_tiles(cu_ptr, lens_ptr, start, num_seqs, capacity, MIN_QUERY, WIDE)
        num_tiles += gl.sum(count, 0)
        highest = gl.max(gl.where(count > 0, levels, 0), 0)
        seqs = start + gl.arange(0, WIDE, levels.type.layout)
        there = gl.min(gl.where((count > 0) & (levels == highest), seqs, num_seqs), 0)  # prompts often stand behind many decode rows
        first = gl.where(highest > level, there // SEQS * SEQS, first)
        level = gl.maximum(level, highest)
    items = num_tiles * HEADS
    # a cursor that only moves on: ``passed`` query tiles lie before the SEQS sequences at ``first`` in this level, which have ``here``
    passed = 0
    here = 0
    first -= SEQS
    item = gl.program_id(0)
    k = 0
    go = item >= 0
    while go:
        go = item < items
        stage = wait_room(tiles, k)
        if go:
            tile = item // HEADS
            while tile >= passed + here:
                passed += here
                first += SEQS
                if first >= num_seqs:
                    first = 0
                    level -= 1
                count, levels = _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY, SEQS)
                here = gl.sum(gl.where(levels == level, count, 0), 0)
            count, levels = _query_tiles(cu_ptr, lens_ptr, first, num_seqs, capacity, MIN_QUERY, SEQS)
            ends = gl.associative_scan(gl.where(levels == level, count, 0), 0, add)
            before = ends <= tile - passed
            s = first + gl.sum(before.to(gl.int32), 0)
            item_of_seq = item - (passed + gl.max(gl.where(before, ends, 0), 0)) * HEADS
            first_row, query_len, length = sequence(cu_ptr, lens_ptr, s, capacity)
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
            put_word(tiles, stage, 0, blocks)
            put_word(tiles, stage, 1, low)
            put_word(tiles, stage, 2, head)
            put_word(tiles, stage, 3, first_row + token)
            put_word(tiles, stage, 4, query_len - token)
            put_word(tiles, stage, 5, position)
            put_word(tiles, stage, 6, length)
            put_word(tiles, stage, 7, s * stride_bt)
            mbarrier.arrive(tiles.full.index(stage), count=1)
            mbarrier.wait(q_empty, (k & 1) ^ 1)
            mbarrier.expect(q_full, TILE * DIM * (q_shared.dtype.primitive_bitwidth // 8))
            for w in gl.static_range(WARPGROUPS):
                tma.async_copy_global_to_shared(q_desc, [first_row + token + w * ROWS, head, 0], q_full, q_shared.index(w))
            k += 1
            item = _next_item(counter_ptr, items)
        else:
            end_work(tiles, stage, False)
