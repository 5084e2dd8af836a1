"""What the roles of the kernel share: sizes, the rings, their handshakes."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WARPGROUPS = gl.constexpr(2)  # consumers
ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one warpgroup MMA
TILE = gl.constexpr(128)  # query rows of a tile
SEQS = gl.constexpr(32)  # sequences that the scheduler searches at once
WIDE = gl.constexpr(128)  # sequences that it counts at once before the first tile
OUT_COLUMNS = gl.constexpr(128)  # of a row that the consumers stage for a store at once
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
def meet(kind: gl.constexpr, barrier):
    """bar.arrive or bar.sync at a named barrier, whose number may be a run-time value."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.full([32 * gl.num_warps()], 0, gl.int32, layout) + barrier
    gl.inline_asm_elementwise(_named_barrier(kind, HANDSHAKE), "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def here(x):
    """x, computed where it is used: sums with it do not leave the loop, where they would hold registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def get_word(tiles, stage, field: gl.constexpr):
    return gl.sum(tiles.words.index(stage * FIELDS + field).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def wait_tile(tiles, k):
    """The stage of the ring where tile k lies now."""
    stage = k % TILE_STAGES
    mbarrier.wait(tiles.full.index(stage), (k // TILE_STAGES) & 1)
    return stage


@gluon.jit
def put_word(tiles, stage, field: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles.words.index(stage * FIELDS + field).store(gl.full([1], 0, gl.int32, one) + value)
