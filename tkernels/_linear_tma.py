"""Tiles of kind "tma": where they can be used, and their launch. The kernels are in ``_linear_sm90`` and, for tiles of one slice, in
``_linear_rows_sm90``, which only Gluon can compile."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tkernels import _dependent
from tkernels._tma import described, tma_problem
from tkernels._triton import cdiv, gluon_problem, next_power_of_2

if TYPE_CHECKING:
    from tkernels._linear_kernels import Tile

CHUNK = 64  # inputs of a line that TMA swizzles
_LINE = 2 * CHUNK  # bytes
_PIECE = 32 << 10  # bytes of x that are brought at once
MOST_SPLITS = 16  # of a tile of one slice: a word counts its programs
PATIENCE = 32  # how often a program asks whether the others of its tile have come, 10 us and more, before it leaves its work to the last
_X_RING = 64 << 10  # bytes of x that are on their way in a tile of one slice, at most, but for two stages


@functools.cache
def _gluon_problem() -> str | None:
    """Why this Triton cannot compile the kernel."""

    def load() -> None:
        from tkernels import _linear_rows_sm90, _linear_sm90  # noqa: F401

    return gluon_problem(load)


def absence(arch: str) -> str | None:
    """Why no call takes such a tile here, or None: a function of the device and the installation. arch: as in tkernels._target."""
    return _gluon_problem() if arch == "sm_90" else f"architecture {arch}: the kernel is for sm_90"


def refusal(tile: Tile, weight: torch.Tensor, x: torch.Tensor) -> str | None:
    """Why such a tile cannot read ``weight`` [outputs, inputs] or ``x`` [.., inputs], whose last strides are 1, or None."""
    if weight.shape[1] % CHUNK:
        return f"{weight.shape[1]} inputs: expected a multiple of {CHUNK}"
    problem = tma_problem(weight)
    if problem is None and tile.slices == 1:
        problem = tma_problem(x)
        return problem and f"x: {problem}"
    return problem


def piece_chunks(tile: Tile, rows: int, k: int) -> int:
    """Chunks of x that are brought at once in a tile of slices, whole stages: all where they take 32 KiB at most; else half as much, or
    with many rows, whose loads are many, as much. Powers of two."""
    stage, lines = tile.block_k // CHUNK, _x_lines(tile, rows)
    everything = stage * next_power_of_2(cdiv(k, tile.block_k))
    most = _PIECE // (_LINE * lines)
    return min(everything, max(stage, most if everything <= most or lines > 16 else most // 2))


def _x_lines(tile: Tile, rows: int) -> int:
    """Of a chunk of x in shared memory, in a tile of slices: of one row each warp can spread one over the columns of its products."""
    return 1 if rows == 1 else tile.block_m(rows)


def _steps(tile: Tile, k: int) -> int:
    """Stages of a part of the inputs."""
    return cdiv(k, tile.block_k * tile.splits)


def _x_stages(tile: Tile, rows: int, k: int) -> int:
    """Stages of x on their way in a tile of one slice: half as many as of weights, since x lies in the L2 cache."""
    most = _X_RING // (tile.block_m(rows) * tile.block_k * 2)
    return min(_steps(tile, k), max(2, min(cdiv(tile.num_stages, 2), most)))


def shared_bytes(tile: Tile, rows: int, k: int, gated: bool) -> int:
    """Shared memory of a program, but for barriers and what the norm takes."""
    stage = tile.block_k * tile.block_n * (4 if gated else 2)
    if tile.slices == 1:
        x = _x_stages(tile, rows, k) * tile.block_m(rows) * tile.block_k * 2
        return min(tile.num_stages, _steps(tile, k)) * stage + x
    piece = piece_chunks(tile, rows, k)
    return tile.num_stages * stage + piece * _x_lines(tile, rows) * _LINE * (2 if piece * CHUNK < k else 1)


def weight_descriptor(weight: torch.Tensor, tile: Tile, box: list[int], shape: list[int], strides: list[int]) -> Any:
    """Of the weight as ``shape`` with ``strides`` in boxes of ``box``, inputs last, CHUNK of them in a box, and a stage in a box of boxes,
    in which the lines of one chunk lie together."""
    from triton.experimental.gluon import language as gl

    box, strides = [tile.block_k // CHUNK, *box], [CHUNK, *strides]
    return described(weight, [shape[-1] // CHUNK, *shape[:-1], CHUNK], strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def x_descriptor(x: torch.Tensor, tile: Tile) -> Any:
    """Of x [rows, k] for a tile of one slice, as of the weight; what is past the last row reads as zeros."""
    (rows, k), stride = x.shape, x.stride(0)
    return weight_descriptor(x, tile, [tile.block_m(rows), CHUNK], [rows, k], [stride if rows > 1 else k, 1])


def sizes(tile: Tile, rows: int, k: int) -> tuple[int, ...]:
    """The last constants of the kernels for tiles of slices: X_ROWS, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, SLICES, PIECE; of those for
    tiles of one: BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES, STEPS, SPLITS, PATIENCE."""
    block_m, chunks = tile.block_m(rows), tile.block_k // CHUNK
    if tile.slices == 1:
        steps = _steps(tile, k)
        return block_m, tile.block_n, chunks, min(tile.num_stages, steps), _x_stages(tile, rows, k), steps, tile.splits, PATIENCE
    return 1 if rows == 1 else block_m, block_m, tile.block_n, chunks, tile.num_stages, tile.slices, piece_chunks(tile, rows, k)


def shares(tile: Tile, rows: int) -> bool:
    """Whether each of the programs that share the inputs of a tile of one slice has a share of the sums: 32 outputs of 8 rows, at least."""
    return tile.splits <= min(MOST_SPLITS, tile.block_n * tile.block_m(rows) // 256)


def check_rows_tile(tile: Tile, rows: int, k: int, norm_weight: torch.Tensor | None) -> None:
    """What a table must hold to for a tile of one slice."""
    assert norm_weight is None, "tables join norms with tiles of slices"
    assert tile.num_stages > 1 or _steps(tile, k) == 1, "a stage is filled again while the next one is used"
    assert tile.splits & (tile.splits - 1) == 0, "parts are added in pairs"
    assert tile.splits == 1 or shares(tile, rows), "each program adds the parts of a share"


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    eps: float,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """As ``launch`` of ``_linear_kernels``, where neither ``absence`` nor ``refusal`` has anything to say."""
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    stride = weight.stride(0) if weight.shape[0] > 1 else k
    w_desc = weight_descriptor(weight, tile, [tile.block_n, CHUNK], list(weight.shape), [stride, 1])
    flags = (norm_weight is not None, bias is not None, gated, residual is not None)
    stride_rm, tiles = 0 if residual is None else residual.stride(0), cdiv(n, tile.block_n)
    if tile.slices > 1:
        from tkernels._linear_sm90 import linear_sm90_kernel

        assert tile.splits == 1, "tables give splits to tiles of one slice"
        _dependent.launch(
            linear_sm90_kernel, (tiles,), x.device,
            w_desc, x, norm_weight, bias, residual, y, rows, n, x.stride(0), stride_rm, eps, k, *flags, *sizes(tile, rows, k),
            num_warps=tile.num_warps,
        )  # fmt: skip
        return
    from tkernels._linear_rows_sm90 import linear_rows_sm90_kernel

    check_rows_tile(tile, rows, k, norm_weight)
    assert tile.splits == 1 or not gated, "tables give splits to what has no gate"
    _dependent.launch(
        linear_rows_sm90_kernel, (tile.splits, tiles), x.device,
        w_desc, x_descriptor(x, tile), bias, residual, y, *tile.workspace(tiles, rows, x.device), rows, n, stride_rm,
        *flags[1:], *sizes(tile, rows, k), num_warps=tile.num_warps,
    )  # fmt: skip
