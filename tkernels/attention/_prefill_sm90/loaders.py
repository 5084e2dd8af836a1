"""The loaders of K and V, and the cleaner of V."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tkernels.attention._sm90_gluon import get_word, meet, wait_work


@gluon.jit
def loader(
    desc, table_ptr, window, ring, tiles, BARRIER: gl.constexpr, THREADS: gl.constexpr, STAGES: gl.constexpr,
    CLEAN: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Streams the K or the V blocks of every tile. A page id past the sequence's last page is never read: the last page stands in.

    THREADS: that meet at the named barrier of a stage, from BARRIER on, when it is given back. CLEAN (V of 16 bits): a block with slots
    that no query of the tile may see, those past the sequence's length and those before the window of its first query, lands at the
    cleaner's barrier, not at the consumers'.
    """
    PAGES: gl.constexpr = BLOCK_N // PAGE if BLOCK_N > PAGE else 1  # in a block
    BLOCKS: gl.constexpr = PAGE // BLOCK_N if PAGE > BLOCK_N else 1  # in a page
    PART: gl.constexpr = BLOCK_N // PAGES  # keys that one TMA brings
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = wait_work(tiles, k)
        blocks = get_word(tiles, at, 0)
        low = get_word(tiles, at, 1)
        kv_head = get_word(tiles, at, 2) // GROUP
        length = get_word(tiles, at, 6)
        table_row = get_word(tiles, at, 7)
        start = 0  # the first key that a query of the tile sees
        if CLEAN and HAS_WINDOW:
            start = get_word(tiles, at, 5) - window + 1
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
                meet("sync", BARRIER + stage, THREADS)
            mbarrier.expect(ring.full.index(land), BLOCK_N * DIM * (ring.blocks.dtype.primitive_bitwidth // 8))
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
        meet("sync", BARRIER + last % STAGES, THREADS)


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
def cleaner(
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
        at = wait_work(tiles, k)
        blocks = get_word(tiles, at, 0)
        low = get_word(tiles, at, 1)
        length = get_word(tiles, at, 6)
        if HAS_WINDOW:
            start = get_word(tiles, at, 5) - window + 1
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
