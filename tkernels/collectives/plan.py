"""Which algorithm and which grid a message gets: pure functions of what all ranks share, from measured tables.

Measured on 2 and 4 H200s (NVLink, no multicast); see docs/collectives.md. Worlds without a row use the next larger one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tkernels._triton import INTERPRETED, cdiv, next_power_of_2
from tkernels.collectives.fused import MAX_SPLIT, MAX_SPLIT_ROWS
from tkernels.collectives.lamport import HEADER_BYTES, MAX_GRID

Kind = Literal["one_shot", "two_shot", "library"]
MAX_WORLD = 8  # beyond one NVLink host the library's collectives are used

_KIB, _MIB = 1 << 10, 1 << 20
# World size: bytes up to which one trip, and in pieces of max_bytes two trips, are the fastest.
_ONE_SHOT = {2: 4 * _MIB, 4: 192 * _KIB, 8: 96 * _KIB}
_TWO_SHOT = {2: 1 << 40, 4: 128 * _MIB, 8: 128 * _MIB}
_GATHER = {2: 1 * _MIB, 4: 1 * _MIB, 8: 512 * _KIB}  # bytes a rank contributes to all_gather, or gets from reduce_scatter
_FUSED_ONE_SHOT = {2: 1 * _MIB, 4: 128 * _KIB, 8: 64 * _KIB}
_NARROW_GRID = 264  # programs of the fused one-shot kernel for rows of at most 128 vectors


@dataclass(frozen=True)
class Launch:
    """lanes: vectors of a program at a time, 32 a warp. loop: a program takes several. split: programs a row (fused one-shot)."""

    kind: Kind
    lanes: int = 0
    grid: int = 0
    loop: bool = False
    split: int = 1


@dataclass(frozen=True)
class Sizes:
    """Byte sizes of a workspace: two halves, each of ``world`` slots of ``one`` bytes, or of 2 · world slots of ``two`` bytes."""

    one: int
    two: int
    half: int

    @classmethod
    def of(cls, max_bytes: int, world: int) -> Sizes:
        """Room for messages of max_bytes: about four times max_bytes in all."""
        one = _aligned(min(max_bytes, max(_row(_ONE_SHOT, world), _row(_GATHER, world)))) + HEADER_BYTES
        two = _aligned(-(-max_bytes // world)) + 2 * HEADER_BYTES
        return cls(one, two, max(world * one, 2 * world * two))

    @property
    def one_shot_bytes(self) -> int:
        return self.one - HEADER_BYTES


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def _row(table: dict[int, int], world: int) -> int:
    return next(table[size] for size in sorted(table) if size >= min(world, MAX_WORLD))


def plan_all_reduce(nbytes: int, world: int, sizes: Sizes, max_bytes: int) -> Launch:
    """For a message of ``nbytes``. Longer ones than max_bytes go in pieces of it as long as two trips beat the library."""
    if nbytes <= min(_row(_ONE_SHOT, world), sizes.one_shot_bytes):
        vectors = -(-nbytes // 16) + 1  # and the header
        lanes = 128 if vectors <= 8192 else 256 if vectors <= 65536 else 512
        grid = min(cdiv(vectors, lanes), MAX_GRID if lanes < 512 else MAX_GRID // 2)
        return Launch("one_shot", lanes, grid, loop=grid * lanes < vectors)
    if nbytes <= _row(_TWO_SHOT, world):
        stripe = cdiv(cdiv(min(nbytes, max_bytes), 16), world) + 1
        lanes = 64 if stripe <= 8192 else 256
        return Launch("two_shot", lanes, min(cdiv(stripe, lanes), MAX_GRID))
    return Launch("library")


def plan_gather(nbytes: int, world: int, sizes: Sizes) -> Launch:
    """For all_gather of, or reduce_scatter to, ``nbytes`` a rank."""
    if nbytes > min(_row(_GATHER, world), sizes.one_shot_bytes):
        return Launch("library")
    vectors = -(-nbytes // 16) + 1
    lanes = 128 if vectors <= 16384 else 256
    return Launch("one_shot", lanes, min(cdiv(vectors, lanes), MAX_GRID))


def plan_fused(rows: int, hidden: int, itemsize: int, world: int, sizes: Sizes, max_bytes: int) -> Launch:
    """For all_reduce_add_rms_norm. "library" here: the plain all-reduce (of whichever kind), then add_rms_norm."""
    per = 16 // itemsize
    row_vectors = cdiv(hidden, per)
    nbytes = rows * row_vectors * 16
    if row_vectors <= 4096 and nbytes <= min(_row(_FUSED_ONE_SHOT, world), sizes.one_shot_bytes):
        split = 1
        if rows <= MAX_SPLIT_ROWS and row_vectors > 512 and not INTERPRETED:  # the interpreter runs programs one by one
            split = min(MAX_SPLIT, next_power_of_2(cdiv(row_vectors, 128)))
        lanes = max(32, next_power_of_2(cdiv(row_vectors, split)))
        # two programs a multiprocessor: 455 × 576 takes 1.2 µs over the plain kernel so, and 1.5 with a program a row
        grid = min(rows * split + 1, _NARROW_GRID if lanes <= 128 and split == 1 else MAX_GRID + 1 - split)
        return Launch("one_shot", lanes, grid, loop=grid < rows * split + 1, split=split)
    part = cdiv(row_vectors, world)
    if hidden % per == 0 and part <= 1024 and nbytes <= max_bytes and rows * part * 16 <= sizes.two - 2 * HEADER_BYTES:
        lanes = max(32, next_power_of_2(part))
        return Launch("two_shot", lanes, min(rows + 1, MAX_GRID))
    return Launch("library")
