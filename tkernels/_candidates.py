"""Which tiles of the few-row kernels are worth a measurement for a shape on a device: what ``python -m tkernels tune`` tries.

A projection of few rows reads its weights once and does little else. A device hides the latency of its memory only with several
megabytes on their way, so most multiprocessors must have a program, and all programs should be resident together: a second
wave of a few programs waits for memory with the device idle. Where the weights are smaller than what is on its way in the time of a
launch none of this counts, and all tiles are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tkernels._linear_kernels import Tile
from tkernels._linear_tma import CHUNK, shared_bytes, shares
from tkernels._triton import cdiv

_SHARED = 227 << 10  # bytes of a multiprocessor (Hopper); a device with less refuses what does not fit
_LAUNCH_BYTES = 4 << 20  # of weights: less takes no longer to read than a kernel takes to start, about a microsecond
_BUSY = 0.7  # of the multiprocessors, at the least
_VECTOR_WARPS = 12  # of a multiprocessor: what keeps registers full of weights on their way, without shared memory
_FULL = 0.75  # of the last wave, where there are several

_VECTOR = (  # block_n, block_k, num_warps
    (1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 256, 4), (8, 512, 4), (8, 1024, 8), (16, 512, 8),
)  # fmt: skip
_MATRIX = (  # block_n, block_k, slices, num_warps, num_stages
    (64, 64, 1, 4, 6), (64, 128, 1, 4, 4), (64, 256, 1, 4, 3), (32, 128, 1, 4, 5), (16, 256, 1, 4, 4), (128, 64, 1, 8, 5),
    (16, 64, 4, 4, 4), (16, 64, 4, 4, 6), (16, 128, 4, 4, 3), (16, 128, 4, 4, 4), (32, 64, 4, 4, 4), (32, 128, 4, 4, 3),
    (32, 128, 4, 4, 5), (16, 64, 8, 8, 4), (32, 64, 8, 8, 3),
)  # fmt: skip
_SPLIT = (  # with few inputs for each part, stages enough to ask for all of them at once
    (64, 64, 1, 4, 5), (64, 128, 1, 4, 3), (64, 128, 1, 4, 5), (32, 128, 1, 4, 4), (16, 128, 4, 4, 3), (32, 128, 4, 4, 3),
    (128, 64, 1, 8, 4), (128, 128, 1, 8, 4),
)  # fmt: skip


_DIRECT = ((16, 256, 8), (16, 256, 4), (16, 128, 8), (16, 128, 4), (32, 128, 8), (32, 128, 4))  # block_n, block_k, slices and warps

_TMA = (  # block_n, block_k (a stage), slices, num_warps, num_stages
    (16, 512, 8, 4, 3), (16, 512, 8, 8, 4), (16, 512, 8, 8, 6), (16, 512, 8, 8, 8), (16, 1024, 16, 4, 2), (16, 1024, 16, 8, 2),
    (16, 1024, 16, 8, 3), (16, 2048, 16, 8, 1), (16, 256, 4, 4, 8), (32, 512, 8, 8, 2), (32, 512, 8, 8, 4), (32, 512, 8, 8, 5),
    (32, 512, 8, 8, 6), (32, 256, 4, 8, 2), (32, 256, 4, 8, 3), (32, 256, 4, 8, 4), (32, 256, 4, 8, 6), (32, 256, 4, 8, 10),
    (64, 128, 2, 8, 2), (64, 128, 2, 8, 3), (64, 128, 2, 8, 4), (64, 128, 2, 8, 6), (64, 128, 2, 8, 10), (64, 256, 4, 8, 2),
    (64, 256, 4, 8, 5), (128, 128, 2, 8, 3), (16, 512, 8, 4, 4),
)  # fmt: skip
_TMA_ROWS = (  # block_n, block_k, num_warps, num_stages, of one slice: for many rows without a norm
    (64, 64, 4, 3), (64, 64, 4, 5), (64, 64, 4, 6), (64, 64, 4, 10), (64, 64, 8, 10), (64, 64, 8, 20), (64, 128, 4, 5), (64, 128, 8, 5),
    (64, 128, 4, 10), (64, 128, 8, 8), (64, 128, 8, 10), (64, 256, 4, 2), (64, 256, 8, 2), (64, 256, 4, 5), (64, 256, 8, 5),
    (64, 512, 8, 2), (128, 64, 8, 4), (128, 64, 8, 5), (128, 64, 8, 6), (128, 64, 4, 10), (128, 64, 8, 10), (128, 128, 8, 2),
    (128, 128, 8, 5), (128, 128, 4, 5), (128, 256, 8, 2), (256, 64, 8, 2), (256, 64, 8, 5), (256, 128, 8, 2),
)  # fmt: skip
_FEWEST_ROWS = 8  # of a tile of one slice: with fewer a tile of slices has all that memory gives


def _shared(tile: Tile, weights: int, block_m: int) -> int:
    """Bytes of shared memory that a program of a pipelined matrix tile takes for what is on its way."""
    warpgroup = tile.block_n >= 64 and tile.slices == 1  # wgmma reads the buffer itself; else a step is in registers by then
    buffers = tile.num_stages if warpgroup else tile.num_stages - 1
    return (weights + block_m) * tile.block_k * tile.slices * 2 * buffers


def _registers(tile: Tile, weights: int, rows_of_x: int, k: int) -> int:
    """32-bit registers that a thread of a direct tile takes, about: a step of weights, or two, and one of x. A norm takes what x does."""
    return 32 + (weights * min(2, tile.steps(k)) + rows_of_x) * tile.block_k // 64


def _holds(tile: Tile, weights: int, block_m: int, k: int) -> bool:
    """Whether shared memory and registers hold a matrix tile, and K a step of it."""
    if tile.block_k * tile.slices > 2 * k:
        return False
    if tile.num_stages == 1:
        return _registers(tile, weights, block_m, k) <= 216 and tile.steps(k) <= 8
    room = _SHARED - (7 << 10)  # a norm and the epilogue take some
    return _shared(tile, weights, block_m) <= room and weights * block_m * tile.slices <= 16384


def _tma_tiles(variant: str, rows: int, n: int, k: int, num_sms: int) -> Iterator[Tile]:
    """Tiles that fit, with programs for most multiprocessors and at most two for each, as the next kernel's come beside them."""
    factor = 2 if "gated" in variant else 1
    for sizes in _TMA:
        tile = Tile("tma", *sizes)
        programs, block_m = cdiv(n // factor, tile.block_n), tile.block_m(rows)
        sums = tile.block_n * factor * block_m * tile.slices // (32 * tile.num_warps)  # registers of a thread
        fits = shared_bytes(tile, rows, k, factor == 2) <= _SHARED - (2 << 10) and sums <= 64 and tile.block_k <= 2 * k
        if fits and ceil(_BUSY * num_sms) <= programs <= 2 * num_sms:
            yield tile
    if rows >= _FEWEST_ROWS and "norm" not in variant:
        yield from dict.fromkeys(_tma_row_tiles(variant, rows, n, k, num_sms))


def _tma_row_tiles(variant: str, rows: int, n: int, k: int, num_sms: int) -> Iterator[Tile]:
    """Those of one slice; some more than once, since a part of the inputs may have fewer stages than memory holds."""
    factor = 2 if "gated" in variant else 1
    for block_n, block_k, num_warps, num_stages in _TMA_ROWS:
        if "rope" in variant and block_n > 64:
            continue  # a program is of one head
        for splits in (1, 2, 4, 8, 16) if factor == 1 else (1,):
            steps = cdiv(k, block_k * splits)
            tile = Tile("tma", block_n, block_k, 1, num_warps, min(num_stages, steps), splits)
            block_m, programs = tile.block_m(rows), cdiv(n // factor, block_n) * splits
            outputs = block_n * block_m // (32 * num_warps)  # of a thread
            shared = shared_bytes(tile, rows, k, factor == 2) + (2 << 10)
            fits = shared <= _SHARED if programs <= num_sms else 2 * shared <= _SHARED + (1 << 10)
            instruction = block_m * block_n >= 128 * num_warps  # of 16 outputs and 8 rows for each warp
            refilled = tile.num_stages > 1 or steps == 1
            if (
                fits
                and instruction
                and refilled
                and outputs * factor <= 128  # registers
                and (splits == 1 or shares(tile, rows))
                and block_k * splits <= k
                and ceil(_BUSY * num_sms) <= programs <= 2 * num_sms
            ):
                yield tile


def _resident(tile: Tile, weights: int, block_m: int, k: int) -> int:
    """Programs of a matrix tile that a multiprocessor holds."""
    if tile.num_stages == 1:
        return max(1, 65536 // (32 * tile.num_warps * _registers(tile, weights, block_m, k)))
    return max(1, min(_SHARED // (_shared(tile, weights, block_m) + 1024), 64 // tile.num_warps))


def candidates(variant: str, rows: int, n: int, k: int, num_sms: int, tma: bool = False) -> Iterator[Tile]:
    """The tiles worth trying for a variant at a row class; n: rows of the weight, k: inputs, num_sms: multiprocessors; tma: also of that
    kind."""
    if tma and k % CHUNK == 0:
        yield from _tma_tiles(variant, rows, n, k, num_sms)
    factor = 2 if "gated" in variant else 1
    outputs, small = n // factor, n * k * 2 < _LAUNCH_BYTES
    if rows <= 4:
        vector = [
            Tile("vector", block_n, block_k, 1, warps, 1)
            for block_n, block_k, warps in _VECTOR
            if block_n >= (2 if "rope" in variant else 1)  # partners stay together
            and block_n * block_k * rows * factor <= 32768
            and block_k <= 2 * k
        ]
        warps = {tile: cdiv(outputs, tile.block_n) * tile.num_warps for tile in vector}
        least = min(_VECTOR_WARPS * num_sms, max(warps.values(), default=0))
        yield from (tile for tile in vector if small or warps[tile] >= least)
    matrix = [Tile("matrix", *sizes) for sizes in _MATRIX]
    if rows <= 16:  # with more, x alone would fill the registers
        matrix += [Tile("matrix", *sizes, sizes[2], 1) for sizes in _DIRECT]
    if variant in ("plain", "residual", "rope") and (small or cdiv(outputs, 64) < 2 * num_sms):  # else there are programs enough
        bases = [Tile("matrix", *sizes) for sizes in _SPLIT] + [tile for tile in matrix if tile.num_stages == 1]
        split = [replace(tile, splits=splits) for tile in bases for splits in (2, 4, 8)]
        matrix += [tile for tile in split if tile.splits * tile.block_k * tile.slices * (2 if tile.num_stages > 1 else 1) <= k]
    in_registers = 2 if "norm" in variant else 1
    block_m = {tile: tile.block_m(rows) * (in_registers if tile.num_stages == 1 else 1) for tile in matrix}
    matrix = [tile for tile in matrix if _holds(tile, tile.block_n * factor, block_m[tile], k)]
    programs = {tile: cdiv(outputs, tile.block_n) * tile.splits for tile in matrix}
    least = min(ceil(_BUSY * num_sms), max((programs[tile] for tile in matrix if tile.splits == 1), default=0))
    for tile in matrix:
        waves = programs[tile] / (num_sms * _resident(tile, tile.block_n * factor, block_m[tile], k))
        full = waves <= 1 or (tile.splits == 1 and waves / ceil(waves) >= _FULL)
        if small or (programs[tile] >= least and full):
            yield tile
