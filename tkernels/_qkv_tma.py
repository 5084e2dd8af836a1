"""``linear_rope_and_cache`` in tiles of kind "tma": where they can be used, and their launch. The kernels are in ``_qkv_sm90`` and, for
tiles of one slice, in ``_qkv_rows_sm90``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tkernels import _dependent, _linear_tma
from tkernels._checks import FLOATS
from tkernels._linear_tma import CHUNK, check_rows_tile, sizes, weight_descriptor, x_descriptor

if TYPE_CHECKING:
    from tkernels._linear_kernels import Tile


def refusal(
    tile: Tile, x: torch.Tensor, weight: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rot_dim: int, interleaved: bool
) -> str | None:
    """Why such a tile cannot rotate and store what it projects, or None; where it can be used at all (``_linear_tma.absence``)."""
    head_dim = k_cache.shape[3]
    if interleaved:
        return "interleaved: expected partners half a head apart"
    if rot_dim != head_dim:
        return f"{rot_dim} of {head_dim} elements of a head are rotated: expected all"
    if head_dim % tile.block_n:
        return f"heads of {head_dim}: expected a multiple of block_n, {tile.block_n}, since a program is of one head"
    for cache in (k_cache, v_cache):
        if cache.dtype not in FLOATS:
            return f"a cache of {str(cache.dtype).removeprefix('torch.')}: expected float16, bfloat16 or float32"
    return _linear_tma.refusal(tile, weight, x)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    tile: Tile,
) -> None:
    """As ``launch`` of ``_qkv_kernels``, where neither ``absence`` nor ``refusal`` has anything to say."""
    rows, k = x.shape
    pages, page_size, kv_heads, head_dim = k_cache.shape
    n, half, stride = weight.shape[0], head_dim // 2, weight.stride(0)
    w_desc = weight_descriptor(weight, tile, [2, tile.block_n // 2, CHUNK], [n // half, half, k], [half * stride, stride, 1])
    tensors = (bias, q, k_cache, v_cache, positions, cos_sin, slots)
    counts = (q.shape[1], kv_heads, cos_sin.shape[0], pages * page_size)
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3], positions.stride(0), cos_sin.stride(0), slots.stride(0))
    tiles, page_size = n // tile.block_n, max(page_size, 1)
    if tile.slices > 1:
        from tkernels._qkv_sm90 import qkv_sm90_kernel

        assert tile.splits == 1, "tables give splits to tiles of one slice"
        _dependent.launch(
            qkv_sm90_kernel, (tiles,), x.device, w_desc, x, norm_weight, *tensors, rows, x.stride(0), eps, *counts, *strides,
            page_size, head_dim, k, norm_weight is not None, bias is not None, *sizes(tile, rows, k), num_warps=tile.num_warps,
        )  # fmt: skip
        return
    from tkernels._qkv_rows_sm90 import qkv_rows_sm90_kernel

    check_rows_tile(tile, rows, k, norm_weight)
    _dependent.launch(
        qkv_rows_sm90_kernel, (tile.splits, tiles), x.device,
        w_desc, x_descriptor(x, tile), *tensors, *tile.workspace(tiles, rows, x.device), rows, *counts, *strides,
        page_size, head_dim, bias is not None, *sizes(tile, rows, k), num_warps=tile.num_warps,
    )  # fmt: skip
