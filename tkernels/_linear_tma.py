"""Tiles of kind "tma": where they can be used, and their launch. The kernel is in ``_linear_sm90``, which only Gluon can compile."""

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


@functools.cache
def _gluon_problem() -> str | None:
    """Why this Triton cannot compile the kernel."""

    def load() -> None:
        from tkernels import _linear_sm90  # noqa: F401

    return gluon_problem(load)


def absence(arch: str) -> str | None:
    """Why no call takes such a tile here, or None: a function of the device and the installation. arch: as in tkernels._target."""
    return _gluon_problem() if arch == "sm_90" else f"architecture {arch}: the kernel is for sm_90"


def refusal(weight: torch.Tensor) -> str | None:
    """Why such a tile cannot read ``weight`` [outputs, inputs], whose last stride is 1, or None."""
    if weight.shape[1] % CHUNK:
        return f"{weight.shape[1]} inputs: expected a multiple of {CHUNK}"
    return tma_problem(weight)


def _x_lines(tile: Tile, rows: int) -> int:
    """Of a chunk of x in shared memory: one row takes one only where each warp can spread it over the columns of its products."""
    return 1 if rows == 1 and tile.slices > 1 else tile.block_m(rows)


def piece_chunks(tile: Tile, rows: int, k: int) -> int:
    """Chunks of x that are brought at once, whole stages: all where they take 32 KiB at most; else half as much, or with many rows, whose
    loads are many, as much. Powers of two."""
    stage, lines = tile.block_k // CHUNK, _x_lines(tile, rows)
    everything = stage * next_power_of_2(cdiv(k, tile.block_k))
    most = _PIECE // (_LINE * lines)
    return min(everything, max(stage, most if everything <= most or lines > 16 else most // 2))


def shared_bytes(tile: Tile, rows: int, k: int, gated: bool) -> int:
    """Shared memory of a program, but for barriers and what the norm takes."""
    piece = piece_chunks(tile, rows, k)
    x = piece * _x_lines(tile, rows) * _LINE * (2 if piece * CHUNK < k else 1)
    return tile.num_stages * tile.block_k * tile.block_n * (4 if gated else 2) + x


def weight_descriptor(weight: torch.Tensor, tile: Tile, box: list[int], shape: list[int], strides: list[int]) -> Any:
    """Of the weight as ``shape`` with ``strides`` in boxes of ``box``, inputs last, CHUNK of them in a box.

    For tiles with slices one box brings a whole stage, in which the lines of one chunk lie together.
    """
    from triton.experimental.gluon import language as gl

    if tile.slices > 1:
        box, strides = [tile.block_k // CHUNK, *box], [CHUNK, *strides]
        shape = [shape[-1] // CHUNK, *shape[:-1], CHUNK]
    return described(weight, shape, strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def sizes(tile: Tile, rows: int, k: int) -> tuple[int, ...]:
    """The last constants of both kernels: X_ROWS, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, SLICES, PIECE."""
    block_m = tile.block_m(rows)
    slices = tile.slices if tile.slices > 1 else 0
    x_rows = 1 if rows == 1 else block_m
    return x_rows, block_m, tile.block_n, tile.block_k // CHUNK, tile.num_stages, slices, piece_chunks(tile, rows, k)


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
    """As ``launch`` of ``_linear_kernels``, for outputs only, where neither ``absence`` nor ``refusal`` has anything to say."""
    from tkernels._linear_sm90 import linear_sm90_kernel

    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    stride = weight.stride(0) if weight.shape[0] > 1 else k
    _dependent.launch(
        linear_sm90_kernel, (cdiv(n, tile.block_n),), x.device,
        weight_descriptor(weight, tile, [tile.block_n, CHUNK], list(weight.shape), [stride, 1]),
        x, norm_weight, bias, residual, y, rows, n, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        k, norm_weight is not None, bias is not None, gated, residual is not None,
        *sizes(tile, rows, k), num_warps=tile.num_warps,
    )  # fmt: skip
