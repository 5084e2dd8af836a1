"""The scheduler: which blocks of which sequence are next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tkernels.attention._decode_sm90.shared import (
    Q_STAGES,
    blocks_from,
    divide,
    first_block,
    leaf_of,
    make_ranges,
    range_begin,
    range_of,
)
from tkernels.attention._sm90_gluon import add, end_work, lengths_of, put_words, touch, wait_room


@gluon.jit
def _lengths(cu_ptr, lens_ptr, first, num_seqs, capacity, SEQS: gl.constexpr):
    """(first query row, query tokens, keys) of the sequences ``first`` to ``first + SEQS``; 0 of those past the last one."""
    s = first + gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [1], [0]))
    return lengths_of(cu_ptr, lens_ptr, s, num_seqs, capacity)


@gluon.jit
def _ends(lengths, window, MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of sequences of these ``lengths``: the blocks of each, where they end among all of theirs, and how many those are. None are of
    sequences with other than MIN_QUERIES to QUERIES query tokens."""
    query_len = lengths[1]
    length = lengths[2]
    blocks = blocks_from(first_block(length, query_len, window, HAS_WINDOW, BLOCK_N), length, BLOCK_N)
    blocks = gl.where((query_len >= MIN_QUERIES) & (query_len <= QUERIES), blocks, 0)
    return blocks, gl.associative_scan(blocks, 0, add), gl.sum(blocks, 0)


@gluon.jit
def _of(own, values):
    """The value at the one place that ``own`` marks."""
    return gl.sum(gl.where(own, values, 0), 0)


@gluon.jit
def scheduler(
    q_desc, table_ptr, cu_ptr, lens_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, segments,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    PROGRAMS: gl.constexpr, LEAVES: gl.constexpr, UNCUT: gl.constexpr, LEAST: gl.constexpr, BY_RANGE: gl.constexpr,
    MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """Ranges of the blocks of one KV head, all sequences one after another; a program takes its own.
    A range is cut into segments, a part of one sequence each, and both of its ends move up to the next end of a leaf.

    Nothing is on its way from the cache before this warp has found a program's first segment. So it loads the lengths once, and takes from
    its registers what it must know of a sequence. SEQS: sequences that it searches at once, a multiple of 32."""
    layout: gl.constexpr = gl.BlockedLayout([SEQS // 32], [32], [1], [0])
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    # a cursor: ``passed`` blocks lie before the SEQS sequences at ``group``, which have ``here``, and end at ``ends``
    group = 0
    passed = 0
    first_rows, query_lens, lens = _lengths(cu_ptr, lens_ptr, group, num_seqs, capacity, SEQS)
    counts, ends, here = _ends((first_rows, query_lens, lens), window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N)
    total = here
    for first in range(SEQS, num_seqs, SEQS):
        of_group = _lengths(cu_ptr, lens_ptr, first, num_seqs, capacity, SEQS)
        _counts, _of_group, blocks = _ends(of_group, window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N)
        total += blocks
    ranges = make_ranges(total, PROGRAMS)
    k = 0
    for item in range(gl.program_id(0), PROGRAMS * KV_HEADS, gl.num_programs(0)):
        j = item // KV_HEADS
        head = item - j * KV_HEADS
        x = range_begin(ranges, j)
        stop = range_begin(ranges, j + 1)
        if x < passed:  # back to the first sequences
            group = -SEQS
            passed = 0
            here = 0
        while x < stop:
            while x >= passed + here:
                passed += here
                group += SEQS
                first_rows, query_lens, lens = _lengths(cu_ptr, lens_ptr, group, num_seqs, capacity, SEQS)
                counts, ends, here = _ends((first_rows, query_lens, lens), window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N)
            own = (ends > x - passed) & (ends - counts <= x - passed)
            s = group + _of(own, gl.arange(0, SEQS, layout))
            base = passed + _of(own, ends - counts)
            share = _of(own, counts)
            length = _of(own, lens)
            query_len = _of(own, query_lens)
            leaf = leaf_of(share, LEAVES, UNCUT, LEAST)
            begin = gl.minimum(divide(x - base + leaf - 1, leaf) * leaf, share)
            end = gl.minimum(divide(stop - base + leaf - 1, leaf) * leaf, share)
            if end > begin:
                first = first_block(length, query_len, window, HAS_WINDOW, BLOCK_N) + begin
                last_page = gl.maximum((length + PAGE - 1) // PAGE - 1, 0)
                page = first * (BLOCK_N // PAGE) if BLOCK_N > PAGE else first // (PAGE // BLOCK_N)
                touch(table_ptr + s * stride_bt + gl.minimum(page + lane, last_page))  # the loaders' first page ids
                first_row = _of(own, first_rows)
                owner = s
                if BY_RANGE:
                    owner = range_of(ranges, base)
                stage = wait_room(segments, k)
                put_words(
                    segments, stage, (end - begin, first, head, s * stride_bt, length, first_row, query_len, begin, share, leaf, owner)
                )
                mbarrier.arrive(segments.full.index(stage), count=1)
                q_stage = k % Q_STAGES
                mbarrier.wait(q_empty.index(q_stage), ((k // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(q_stage), QUERIES * GROUP_ROWS * DIM * 2)
                to = q_shared.index(q_stage)
                if to.shape[0] > QUERIES * GROUP_ROWS:
                    to = to.slice(0, QUERIES * GROUP_ROWS)
                tma.async_copy_global_to_shared(q_desc, [first_row, head * GROUP, 0], q_full.index(q_stage), to)
                k += 1
            x = base + share
    end_work(segments, wait_room(segments, k), True)
