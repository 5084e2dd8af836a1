"""The transposer of 8-bit V: its products read keys contiguous, and in a page the columns are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tkernels.attention._prefill_sm90.shared import GIVE_TRANSPOSED, here
from tkernels.attention._sm90_gluon import get_word, meet, wait_work

# of two keys of each half of 16, in two columns: the four bytes of the one column and of the other
_PICK = gl.constexpr("{ .reg .b32 other; xor.b32 other, $4, 0x1111; prmt.b32 $0, $2, $3, $4; prmt.b32 $1, $2, $3, other; }")


@gluon.constexpr_function
def _pairs(dim):
    """A block of 128 keys × ``dim`` bytes as 16-bit pairs of columns, in registers of the 128 threads: as transposing loads of 8 × 8 pairs
    bring it, two keys of a pair of columns in a register; a warp has a quarter of the columns, which takes the fewest addresses."""
    chunks = [[0, 8 << i] for i in range((dim // 16).bit_length() - 1)]  # of 16 bytes in a row
    return gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0], [64, 0], *chunks[2:]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], chunks[:2], [], [128, dim // 2]
    )


@gluon.constexpr_function
def _columns(dim):
    """A transposed block, a row for each column of V, as 16-bit pairs of keys in shared memory, seen with the two rows of each pair
    exchanged in every second 8 rows: the 8 rows of every second number that a warp writes at once then lie in different banks."""
    rows = [[16 << i, 0] for i in range((dim // 16).bit_length() - 1)]
    return gl.SharedLinearLayout([*([0, 1 << i] for i in range(6)), [1, 8], [2, 16], [4, 32], [9, 0], *rows])


@gluon.jit
def _clean(raw, begin, end, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Keys before ``begin`` and from ``end`` on become zero, in place: a thread has one key."""
    layout: gl.constexpr = gl.BlockedLayout([1, DIM // 2], [32, 1], [4, 1], [1, 0])
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    keep = gl.where((key >= begin) & (key < end), -1, 0).to(gl.int16)[:, None]
    raw.store(gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [raw.load(layout), keep], gl.int16, is_pure=True, pack=2))


@gluon.jit
def _transpose(raw, transposed, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """raw [BLOCK_N, DIM / 2], transposed [DIM, BLOCK_N / 2]: pairs of bytes in shared memory.

    The keys of a row are in the order in which a thread of the consumers holds their scores: four at a time are
    2t, 2t + 1, 8 + 2t and 9 + 2t of 16, t = 0 to 3.
    """
    x = raw.load(_pairs(DIM))
    x = x.reshape([BLOCK_N // 16, 2, 4, 2, DIM // 2]).permute((0, 2, 3, 4, 1))  # group of 16 keys, t, which of two, pair | half
    first, second = x.split()
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, first.type.layout)))
    swapped = (gl.arange(0, DIM // 2, pair) & 4) != 0
    pick = gl.where(swapped, 0x7531, 0x6420)[None, None, None, :]
    a, b = gl.inline_asm_elementwise(_PICK, "=r,=r,r,r,r,r", [first, second, pick], (gl.int16, gl.int16), is_pure=True, pack=2)
    y = gl.join(a, b).permute((3, 4, 0, 1, 2))  # pair, which of its columns | group, t, half
    transposed.store(y.reshape([DIM, BLOCK_N // 2]))


@gluon.jit
def transposer(
    raw, ring, tiles, window, BARRIER: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Writes each block of V that TMA has brought into ``raw`` transposed into ``ring``. Keys that no query of the tile may see become
    zero, as the cleaner makes them: only the first block of a tile and its last one have such."""
    raw_pairs = raw.blocks._reinterpret(gl.int16, [RAW_STAGES, BLOCK_N, DIM // 2], gl.NVMMASharedLayout(DIM, 16, rank=2))
    columns = ring.blocks._reinterpret(gl.int16, [STAGES, DIM, BLOCK_N // 2], _columns(DIM))
    i = 0
    k = 0
    blocks = 1
    while blocks > 0:
        at = wait_work(tiles, k)
        blocks = get_word(tiles, at, 0)
        low = get_word(tiles, at, 1)
        length = get_word(tiles, at, 6)
        start = 0
        if HAS_WINDOW:
            start = get_word(tiles, at, 5) - window + 1
        mbarrier.arrive(tiles.empty.index(at), count=1)
        block = blocks - 1
        while block >= low:
            raw_stage = here(i % RAW_STAGES)
            stage = here(i % STAGES)
            begin = start - block * BLOCK_N
            end = length - block * BLOCK_N
            mbarrier.wait(raw.full.index(raw_stage), (i // RAW_STAGES) & 1)
            if i >= STAGES:
                meet("sync", BARRIER + stage, GIVE_TRANSPOSED)
            if (begin > 0) | (end < BLOCK_N):
                _clean(raw_pairs.index(raw_stage), begin, end, DIM, BLOCK_N)
            _transpose(raw_pairs.index(raw_stage), columns.index(stage), DIM, BLOCK_N)
            fence_async_shared()  # written as usual, read by the tensor cores
            mbarrier.arrive(ring.full.index(stage), count=1)
            mbarrier.arrive(raw.empty.index(raw_stage), count=1)  # what was stored depends on what was read, so that has been read
            i += 1
            block -= 1
        k += 1
    for last in range(gl.maximum(i - STAGES, 0), i):  # as in the loader
        meet("sync", BARRIER + last % STAGES, GIVE_TRANSPOSED)
