"""The loaders of K and V."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tkernels.attention._sm90_gluon import get_word, meet, wait_work


@gluon.jit
def loader(
    desc, table_ptr, ring, segments,
    BARRIER: gl.constexpr, HANDSHAKE: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Streams the K or the V blocks of every segment. A page id past the sequence's last page is never read: the last page stands in.
    HANDSHAKE: threads that meet when a stage is given back, the consumer's and the loader's."""
    PAGES: gl.constexpr = BLOCK_N // PAGE if BLOCK_N > PAGE else 1  # in a block
    BLOCKS: gl.constexpr = PAGE // BLOCK_N if PAGE > BLOCK_N else 1  # in a page
    PART: gl.constexpr = BLOCK_N // PAGES  # keys that one TMA brings
    BYTES: gl.constexpr = BLOCK_N * DIM * ring.blocks.dtype.primitive_bitwidth // 8
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = wait_work(segments, k)
        blocks = get_word(segments, at, 0)
        first = get_word(segments, at, 1)
        head = get_word(segments, at, 2)
        row = table_ptr + get_word(segments, at, 3)
        length = get_word(segments, at, 4)
        last_page = gl.maximum((length + PAGE - 1) // PAGE - 1, 0)
        mbarrier.arrive(segments.empty.index(at), count=1)
        # page ids, a lane each, 32 at once and 32 ahead: a table that is not in the caches would hold up every block
        ahead = first * PAGES // BLOCKS // 32 * 32
        ids = gl.load(row + gl.minimum(ahead + lane, last_page))
        next_ids = gl.load(row + gl.minimum(ahead + 32 + lane, last_page))
        for block in range(first, first + blocks):
            page = block * PAGES // BLOCKS
            if page >= ahead + 32:
                ahead += 32
                ids = next_ids
                next_ids = gl.load(row + gl.minimum(ahead + 32 + lane, last_page))
            stage = i % STAGES
            if i >= STAGES:
                meet("sync", BARRIER + stage, HANDSHAKE)
            mbarrier.expect(ring.full.index(stage), BYTES)
            for p in gl.static_range(PAGES):
                to = ring.blocks.index(stage)
                if PAGES > 1:
                    to = to.slice(p * PART, PART)
                now = gl.sum(gl.where(lane == page - ahead + p, ids, 0), 0)
                tma.async_copy_global_to_shared(desc, [now, (block % BLOCKS) * BLOCK_N, head, 0], ring.full.index(stage), to)
            i += 1
        k += 1
    for last in range(gl.maximum(i - STAGES, 0), i):  # no named barrier is left half full at the program's end
        meet("sync", BARRIER + last % STAGES, HANDSHAKE)
