"""Tile sizes: a shipped table by architecture and shape class, and a heuristic for what the table lacks.

Everything here depends on the device and on shapes alone, never on data, so a captured graph may bake it in. BLOCK_N, which is part of
the arithmetic, depends on the shape of the model only, and in prefill on how many keys a row sees, so it is the same for a request in every
batch.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DecodeTiles:
    block_n: int  # keys per block
    programs_per_sm: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers a thread, so that programs_per_sm fit


@dataclass(frozen=True, kw_only=True)
class PrefillTiles:
    block_m: int  # query rows: tokens times the heads of a group
    block_n: int  # keys per block
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    overlap: bool = False  # products with values run while the next block's softmax does; for 16-bit caches
    beyond: int = 0  # for rows that see more keys than this

    @property
    def programs_per_sm(self) -> int:
        """That fit side by side: of 64 Ki registers, a thread may take 255 where it is not told otherwise."""
        return max(1, 65536 // (32 * self.num_warps * (self.maxnreg or 256)))


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads((Path(__file__).parent.parent / "tables" / "attention.json").read_text())


def _entry(kernel: str, arch: str, dim: int, itemsize: int, rows: int = 1, num_seqs: int = 0) -> dict[str, Any] | None:
    """The tiles of the table's first entry whose class holds the shape, which may be none. Entries are ordered: smallest dim first, most
    sequences first."""
    for entry in _table().get(arch, {}).get(kernel, []):
        if (
            dim <= entry["dim"]
            and itemsize == entry["itemsize"]
            and rows <= entry.get("max_rows", rows)
            and num_seqs >= entry.get("min_seqs", 0)
        ):
            return entry["tiles"]
    return None


@functools.cache
def decode_tiles(arch: str, dim: int, itemsize: int, rows: int, num_seqs: int) -> DecodeTiles:
    """arch: as in tkernels._target. dim: head dimension. itemsize: bytes of a cache element. rows: query tokens times heads of a group.
    num_seqs: rows of the block table, padding included."""
    if arch == "cpu":
        return DecodeTiles(block_n=16, programs_per_sm=1, num_warps=4, num_stages=1)
    entry = _entry("decode" if rows <= 16 else "decode_multi", arch, dim, itemsize, rows, num_seqs)
    if entry is not None:
        return DecodeTiles(**entry)
    # K and V of a block, once or twice in shared memory; blocks of 64 keys where they fit
    return DecodeTiles(
        block_n=64 if dim * itemsize <= 512 else 32, programs_per_sm=2 if dim * itemsize <= 512 else 1, num_warps=4, num_stages=2
    )


@functools.cache
def prefill_tiles(arch: str, dim: int, itemsize: int) -> PrefillTiles:
    if arch == "cpu":
        return PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=1)
    entry = _entry("prefill", arch, dim, itemsize)
    if entry is not None:
        return PrefillTiles(**entry)
    if dim * itemsize > 512:  # fp32 with large heads
        return PrefillTiles(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if dim * itemsize > 256:
        return PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=2)
    return PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=2)


@functools.cache
def long_prefill_tiles(arch: str, dim: int, itemsize: int) -> PrefillTiles | None:
    """For rows that see more than ``beyond`` keys, where tiles of their own are faster. None: ``prefill_tiles`` are for all rows."""
    if arch == "cpu":
        return PrefillTiles(block_m=32, block_n=32, num_warps=4, num_stages=1, overlap=itemsize == 2, beyond=40)
    entry = _entry("prefill_long", arch, dim, itemsize)
    return PrefillTiles(**entry) if entry is not None else None
