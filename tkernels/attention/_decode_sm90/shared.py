"""What the roles of the kernels share: sizes, rings, the tree of a sequence, where the work is cut."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tkernels.attention._sm90_gluon import WORK_STAGES, Stages, Work, get_word

ROWS = gl.constexpr(64)  # query rows of a sequence, tokens times heads of a group: the M of a warpgroup MMA
QUERIES = gl.constexpr(8)
FOLD_ROWS = gl.constexpr(8)  # query rows that four warps fold at once
FIELDS = gl.constexpr(16)  # 32-bit words that describe a segment, and what makes them a power of two
Q_STAGES = gl.constexpr(2)
ONE_FIRST_BARRIER = gl.constexpr(5)  # of the kernel for few tokens: its roles beside the consumer are three
HANDSHAKE = gl.constexpr(128 + 32)  # threads that meet at a named barrier: the consumer and a loader


class Ranges(NamedTuple):
    """Equal, contiguous ranges of the blocks of a KV head; the first ``larger`` ones have one block more."""

    total: gl.tensor
    quota: gl.tensor
    larger: gl.tensor


@gluon.jit
def divide(a, b):
    """a // b of what is not negative, without the instructions for signs: each division is in everyone's way before the first load."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def first_block(length, query_len, window, HAS_WINDOW: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first block that a query of the sequence sees, for scalars and vectors alike."""
    first = length * 0
    if HAS_WINDOW:
        first = gl.maximum(length - query_len - window + 1, 0) // BLOCK_N
    return first


@gluon.jit
def blocks_from(first, length, BLOCK_N: gl.constexpr):
    """Blocks of a sequence from block ``first`` on. An empty one counts as one block: someone has to write its zeros."""
    return gl.maximum((length + BLOCK_N - 1) // BLOCK_N - first, 1)


@gluon.jit
def leaf_of(blocks, LEAVES: gl.constexpr, UNCUT: gl.constexpr, LEAST: gl.constexpr):
    """Blocks per leaf. Up to UNCUT blocks are one leaf: one program is done with them before several would have folded. A longer sequence
    has leaves of LEAST blocks at least."""
    leaf = (blocks + LEAVES - 1) // LEAVES
    least = gl.maximum(1 + (blocks > 16).to(gl.int32), LEAST)  # one block only where a short sequence alone needs all the programs
    leaf = gl.maximum(leaf, least)
    if UNCUT > 1:
        leaf = gl.where(blocks <= UNCUT, blocks, leaf)
    return leaf


@gluon.jit
def make_ranges(total, PROGRAMS: gl.constexpr):
    """As few ranges as keep the longest as short: sequences of one length then end where ranges do, and none is cut.

    Multiprocessors differ by a quarter in how fast memory serves them. But a last part of each range that went to whoever is done first was
    slower by up to 6% on an H200: more sequences are cut, and who asks for a part waits for memory that is busy.
    """
    longest = gl.maximum((total + PROGRAMS - 1) // PROGRAMS, 1)
    used = gl.maximum(divide(total + longest - 1, longest), 1)
    quota = divide(total, used)
    return Ranges(total, quota, total - quota * used)


@gluon.jit
def range_begin(ranges, j):
    """Where range j begins; past the last one, where that ends."""
    return gl.minimum(j * ranges.quota + gl.minimum(j, ranges.larger), ranges.total)


@gluon.jit
def range_of(ranges, block):
    """The range that holds a block."""
    edge = ranges.larger * (ranges.quota + 1)
    late = ranges.larger + divide(gl.maximum(block - edge, 0), gl.maximum(ranges.quota, 1))
    return gl.where(block < edge, divide(block, ranges.quota + 1), late)


@gluon.jit
def make_rings(k_blocks, v_blocks):
    """(``full`` and ``empty`` of the queries' ring, the rings of K and V over their blocks, the ring of segments), ready for all roles."""
    K_STAGES: gl.constexpr = k_blocks.shape[0]
    V_STAGES: gl.constexpr = v_blocks.shape[0]
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier)
    segment_full = gl.allocate_shared_memory(gl.int64, [WORK_STAGES, 1], barrier)
    segment_empty = gl.allocate_shared_memory(gl.int64, [WORK_STAGES, 1], barrier)
    words = gl.allocate_shared_memory(gl.int32, [WORK_STAGES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # stage by stage: between two of one ring the compiler has the warps meet
    for stage in gl.static_range(max(Q_STAGES, WORK_STAGES, K_STAGES, V_STAGES)):
        if stage < Q_STAGES:
            mbarrier.init(q_full.index(stage), count=1)
            mbarrier.init(q_empty.index(stage), count=1)
        if stage < WORK_STAGES:
            mbarrier.init(segment_full.index(stage), count=1)
            mbarrier.init(segment_empty.index(stage), count=3)  # the consumer and two loaders
        if stage < K_STAGES:
            mbarrier.init(k_full.index(stage), count=1)
        if stage < V_STAGES:
            mbarrier.init(v_full.index(stage), count=1)
    fence_async_shared()
    return q_full, q_empty, Stages(k_blocks, k_full), Stages(v_blocks, v_full), Work(words, segment_full, segment_empty)


@gluon.jit
def read_segment(segments, at):
    """What a consumer must know of the segment at stage ``at``, as the scheduler wrote it. Word 3 is the loaders'."""
    blocks = get_word(segments, at, 0)
    first = get_word(segments, at, 1)
    head = get_word(segments, at, 2)
    length = get_word(segments, at, 4)
    first_row = get_word(segments, at, 5)
    query_len = get_word(segments, at, 6)
    begin = get_word(segments, at, 7)
    share = get_word(segments, at, 8)
    leaf = get_word(segments, at, 9)
    owner = get_word(segments, at, 10)
    return blocks, first, head, length, first_row, query_len, begin, share, leaf, owner
