"""The transposer of 8-bit V: its products read keys contiguous, and in a page the columns are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tkernels.attention._prefill_sm90.shared import GIVE_RAW, GIVE_TRANSPOSED
from tkernels.attention._sm90_gluon import get_word, meet, wait_work

_INTERLEAVE = gl.constexpr(
    "{ .reg .b32 x, y, z, w; prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; prmt.b32 z, $6, $7, 0x5140; "
    "prmt.b32 w, $6, $7, 0x7362; prmt.b32 $0, x, z, 0x5410; prmt.b32 $1, x, z, 0x7632; prmt.b32 $2, y, w, 0x5410; "
    "prmt.b32 $3, y, w, 0x7632; }"
)


@gluon.constexpr_function
def _raw_words(dim):
    """A block of 128 keys × ``dim`` bytes as TMA brings it, in 32-bit words, seen with the two keys of each pair exchanged in every second
    16 keys: (its layout in shared memory, the layout in registers of the 128 threads).

    A thread reads 16 bytes of four keys, 8 lanes at once those of 4 pairs in two groups of 16 keys: as they are exchanged, from 8
    different rows of the swizzle, so without bank conflicts. Lanes are the words of one row where the block is stored transposed.
    """
    words = dim // 4
    chunks = [[0, 4 << i] for i in range((words // 4).bit_length() - 1)]  # of 16 bytes in a row: 4 or 8
    swizzled = [[key, 4 << i] for i, key in enumerate((1, 2, 4))]
    if dim == 64:  # two rows in 128 bytes: TMA's swizzle of 64 bytes takes the row's number from its second bit on
        swizzled = [[1, 0], [2, 4], [4, 8]]
    shared = gl.SharedLinearLayout([[0, 1], [0, 2], *chunks, *swizzled, [8, 0], [17, 0], [32, 0], [64, 0]])
    registers = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], *chunks[2:]], [[2, 0], [4, 0], [16, 0], [32, 0], [64, 0]], chunks[:2], [], [128, words]
    )
    return shared, registers


@gluon.jit
def _transpose(raw, transposed, begin, end, CLEAN: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """raw [BLOCK_N, DIM / 4], transposed [DIM, BLOCK_N / 4]: words of four bytes in shared memory. CLEAN: keys before ``begin`` and from
    ``end`` on become zero.

    The keys of a row are in the order in which a thread of the consumers holds their scores: the four of a word are
    2t, 2t + 1, 8 + 2t and 9 + 2t of 16 (in every second 16 the two of a pair exchanged), t being the word.
    """
    layout: gl.constexpr = _raw_words(DIM)[1]
    x = raw.load(layout)
    if CLEAN:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
        key = row ^ ((row >> 4) & 1)
        x = gl.where(((key >= begin) & (key < end))[:, None], x, 0)
    x = x.reshape([BLOCK_N // 16, 2, 4, 2, DIM // 4]).permute((0, 2, 4, 1, 3))  # group of 16 keys, t, word | half, which of the pair
    first, second = x.split()
    a, c = first.split()
    b, d = second.split()
    o0, o1, o2, o3 = gl.inline_asm_elementwise(
        _INTERLEAVE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    y = gl.join(gl.join(o0, o1), gl.join(o2, o3))  # group, t, word, column of the word: lower bit, upper bit
    transposed.store(y.permute((2, 4, 3, 0, 1)).reshape([DIM, BLOCK_N // 4]))


@gluon.jit
def transposer(
    raw, ring, tiles, window, RAW_BARRIER: gl.constexpr, BARRIER: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Writes each block of V that TMA has brought into ``raw`` transposed into ``ring``. Keys that no query of the tile may see become
    zero, as the cleaner makes them: only the first block of a tile and its last one have such."""
    raw_words = raw.blocks._reinterpret(gl.int32, [RAW_STAGES, BLOCK_N, DIM // 4], _raw_words(DIM)[0])
    words = ring.blocks._reinterpret(gl.int32, [STAGES, DIM, BLOCK_N // 4], gl.NVMMASharedLayout(BLOCK_N, 32, rank=2))
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
            raw_stage = i % RAW_STAGES
            stage = i % STAGES
            begin = start - block * BLOCK_N
            end = length - block * BLOCK_N
            mbarrier.wait(raw.full.index(raw_stage), (i // RAW_STAGES) & 1)
            if i >= STAGES:
                meet("sync", BARRIER + stage, GIVE_TRANSPOSED)
            if (begin > 0) | (end < BLOCK_N):
                _transpose(raw_words.index(raw_stage), words.index(stage), begin, end, True, DIM, BLOCK_N)
            else:
                _transpose(raw_words.index(raw_stage), words.index(stage), begin, end, False, DIM, BLOCK_N)
            meet("arrive", RAW_BARRIER + raw_stage, GIVE_RAW)  # what was stored depends on what was read, so that has been read
            fence_async_shared()  # written as usual, read by the tensor cores
            mbarrier.arrive(ring.full.index(stage), count=1)
            i += 1
            block -= 1
        k += 1
    for last in range(gl.maximum(i - STAGES, 0), i):  # as in the loader
        meet("sync", BARRIER + last % STAGES, GIVE_TRANSPOSED)
