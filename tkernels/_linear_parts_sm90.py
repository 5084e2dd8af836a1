"""How the programs of a "tma" tile of one slice that share its inputs add their sums. Hopper only.

Each leaves its sums in fp32, waits for the others, and adds all parts of its share of the outputs, in the order of the parts. One program
that added everything would read for it as much as for its products: 128 outputs of 64 rows in 8 parts are 256 KiB, like their weights with
1024 inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels._gluon import barrier


@gluon.constexpr_function
def share_shape(block_n, block_m, splits):
    """Outputs and rows of what one of the programs that share a tile adds: all outputs of 8 rows or more; or, with splits left, fewer."""
    rows = max(8, block_m // splits)
    return block_n * block_m // (splits * rows), rows


@gluon.constexpr_function
def _parts_layout(warps, splits):
    """Of the parts [splits, elements] of a share: a thread has all of an element."""
    return gl.BlockedLayout([splits, 4], [1, 32], [1, warps], [1, 0])


@gluon.jit
def leave(acc, part_ptr, SPLITS: gl.constexpr):
    """Leave the sums [N, M] of this part of the inputs for the programs that add them; returns where those of all parts are.

    In memory they are [M / 8, N / 32, 2, 8, 4, 2, 2]: what a thread of a wgmma has of 16 outputs and 8 rows lies together, 16 bytes, and
    an output beside its partner N / 2 after it.
    """
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    parts = part_ptr + gl.program_id(1).to(gl.int64) * (SPLITS * N * M)
    y = gl.permute(gl.reshape(acc, [2, N // 32, 2, 8, M // 8, 4, 2]), (4, 1, 0, 3, 5, 2, 6))
    y = gl.reshape(y, [N * M])
    gl.store(parts + gl.program_id(0) * (N * M) + gl.arange(0, N * M, y.type.layout), y)
    return parts


@gluon.jit
def meet(arrivals_ptr, SPLITS: gl.constexpr, PATIENCE: gl.constexpr):
    """Say that this program has left its part, and wait until all of its tile have. Returns a bit for each share that it is to add, and
    for ``reset`` what counts the departures.

    No program may wait for good: others of the tile may not run before it has ended. One that has asked PATIENCE times departs, and says
    so; whoever arrives last has its share too. The word of a tile: arrivals, 8 bits; departures, 8 bits; the shares of those that did not
    wait, 16 bits.
    """
    split = gl.program_id(0)
    word = arrivals_ptr + gl.program_id(1)
    barrier()  # all threads have stored before one of them releases
    seen = gl.atomic_add(word, 1, sem="acq_rel", scope="gpu") + 1
    shares = 1 << split
    if (seen & 0xFF) == SPLITS:
        shares |= (seen >> 16) & 0xFFFF
    asked = 0
    while ((seen & 0xFF) < SPLITS) & (asked < PATIENCE):
        seen = gl.atomic_add(word, 0, sem="acquire", scope="gpu")
        asked += 1
    if (seen & 0xFF) < SPLITS:
        seen = gl.atomic_add(word, 0x10000 << split, sem="acq_rel", scope="gpu")
        if (seen & 0xFF) < SPLITS:  # else the last one has come meanwhile, and has not seen it
            shares = 0
    barrier()  # no thread reads before the one that acquires
    # One thread's, so that none waits for the answer before it is needed, at the end.
    thread = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    departed = gl.atomic_add(word + thread * 0, gl.full_like(thread, 0x100), mask=thread == 0, sem="relaxed", scope="gpu")
    return shares, departed


@gluon.jit
def reset(departed, arrivals_ptr, SPLITS: gl.constexpr):
    """The end of a program that has met the others: the last to depart leaves their word at zero for the next launch."""
    thread = gl.arange(0, 32 * gl.num_warps(), departed.type.layout)
    last = ((departed >> 8) & 0xFF) == SPLITS - 1
    gl.store(arrivals_ptr + gl.program_id(1) + thread * 0, gl.zeros_like(thread), mask=(thread == 0) & last)


@gluon.jit
def add_parts(parts, share, N: gl.constexpr, M: gl.constexpr, SPLITS: gl.constexpr):
    """The sums of all parts, in order, of a share [outputs, rows] of [N, M]; the first half of its outputs are partners of the second."""
    SHAPE: gl.constexpr = share_shape(N, M, SPLITS)
    LENGTH: gl.constexpr = SHAPE[0] * SHAPE[1]
    layout: gl.constexpr = _parts_layout(gl.num_warps(), SPLITS)
    one = gl.allocate_shared_memory(gl.float32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one.store(gl.full([1], 1.0, gl.float32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, layout))[:, None]
    element = gl.arange(0, LENGTH, gl.SliceLayout(0, layout))[None, :]
    values = gl.load(parts + share * LENGTH + (split * (N * M) + element))
    # The assembler, to save registers, would have the loads wait in turn. Behind the barrier are none, and what is multiplied by a number
    # that is read there cannot come before it.
    barrier()
    factor = gl.sum(one.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    LEVELS: gl.constexpr = gl.constexpr(SPLITS.bit_length() - 1)
    for level in gl.static_range(LEVELS):  # neighbours first
        left, right = gl.split(gl.permute(gl.reshape(values, [values.shape[0] // 2, 2, LENGTH]), (0, 2, 1)))
        values = gl.fma(left, factor, right) if level == 0 else left + right
    y = gl.reshape(values, [SHAPE[1] // 8, SHAPE[0] // 32, 2, 8, 4, 2, 2])  # as ``leave`` has it
    return gl.reshape(gl.permute(y, (2, 1, 5, 3, 0, 4, 6)), [SHAPE[0], SHAPE[1]])
