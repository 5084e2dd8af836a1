"""The scheduler: which blocks of which sequence are next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tkernels.attention._decode_sm90.shared import Q_STAGES, SEQS, make_ranges, plan, range_begin, range_of
from tkernels.attention._sm90_gluon import add, end_work, lengths_of, put_word, sequence, wait_room


@gluon.jit
def _ends(
    cu_ptr, lens_ptr, first, num_seqs, capacity, window,
    MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, LEAVES: gl.constexpr,
    UNCUT: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Of the sequences ``first`` to ``first + SEQS``: where the blocks of each end among all of theirs, and how many those are. None are of
    sequences with other than MIN_QUERIES to QUERIES query tokens."""
    s = first + gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [1], [0]))
    query_len, length = lengths_of(cu_ptr, lens_ptr, s, num_seqs, capacity)
    _first, blocks, _leaf = plan(length, query_len, window, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST)
    blocks = gl.where((query_len >= MIN_QUERIES) & (query_len <= QUERIES), blocks, 0)
    return gl.associative_scan(blocks, 0, add), gl.sum(blocks, 0)


@gluon.jit
def scheduler(
    q_desc, cu_ptr, lens_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, segments,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    PROGRAMS: gl.constexpr, LEAVES: gl.constexpr, UNCUT: gl.constexpr, LEAST: gl.constexpr, BY_RANGE: gl.constexpr,
    MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Ranges of the blocks of one KV head, all sequences one after another; a program takes its own.
    A range is cut into segments, a part of one sequence each, and both of its ends move up to the next end of a leaf."""
    # a cursor: ``passed`` blocks lie before the SEQS sequences at ``group``, which have ``here``, and end at ``ends``
    group = 0
    passed = 0
    ends, here = _ends(
        cu_ptr, lens_ptr, group, num_seqs, capacity, window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST
    )  # fmt: skip
    total = here
    for first in range(SEQS, num_seqs, SEQS):
        _of_group, blocks = _ends(
            cu_ptr, lens_ptr, first, num_seqs, capacity, window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST
        )  # fmt: skip
        total += blocks
    ranges = make_ranges(total, PROGRAMS)
    k = 0
    for item in range(gl.program_id(0), PROGRAMS * KV_HEADS, gl.num_programs(0)):
        j = item // KV_HEADS
        head = item - j * KV_HEADS
        x = range_begin(ranges, j)
        stop = range_begin(ranges, j + 1)
        if x < passed:
            group = 0
            passed = 0
            ends, here = _ends(
                cu_ptr, lens_ptr, group, num_seqs, capacity, window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST
            )  # fmt: skip
        while x < stop:
            while x >= passed + here:
                passed += here
                group += SEQS
                ends, here = _ends(
                    cu_ptr, lens_ptr, group, num_seqs, capacity, window, MIN_QUERIES, QUERIES, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST
                )  # fmt: skip
            before = ends <= x - passed
            s = group + gl.sum(before.to(gl.int32), 0)
            base = passed + gl.max(gl.where(before, ends, 0), 0)
            first_row, query_len, length = sequence(cu_ptr, lens_ptr, s, capacity)
            first_block, share, leaf = plan(length, query_len, window, HAS_WINDOW, BLOCK_N, LEAVES, UNCUT, LEAST)
            begin = gl.minimum((x - base + leaf - 1) // leaf * leaf, share)
            end = gl.minimum((stop - base + leaf - 1) // leaf * leaf, share)
            if end > begin:
                stage = wait_room(segments, k)
                put_word(segments, stage, 0, end - begin)
                put_word(segments, stage, 1, first_block + begin)
                put_word(segments, stage, 2, head)
                put_word(segments, stage, 3, s * stride_bt)
                put_word(segments, stage, 4, length)
                put_word(segments, stage, 5, first_row)
                put_word(segments, stage, 6, query_len)
                put_word(segments, stage, 7, begin)
                put_word(segments, stage, 8, share)
                put_word(segments, stage, 9, leaf)
                owner = s
                if BY_RANGE:
                    owner = range_of(ranges, base)
                put_word(segments, stage, 10, owner)
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
    end_work(segments, wait_room(segments, k))
