"""Conversion to fp8 (e4m3), the one convention of this package: ``stored = saturate(x / scale)`` and ``x ≈ stored · scale``.

Values beyond ±448 saturate, infinities included; NaN stays NaN. x is multiplied in fp32 by the reciprocal of the scale, itself
rounded to fp32, and the product is rounded to nearest even.
A dynamic scale is ``max |x| / 448`` over a token or over a block of its columns, and at least 2⁻¹² / 448: a row of zeros stays zero
and gives a scale that can be divided by. Infinities and NaN do not count in it, so they cannot take the other values with them.

Source: arXiv 2209.05433 (e4m3; here infinities saturate too).
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 2.0**-12
BLOCK = 128  # columns that share a scale, unless said otherwise
_TILE = 4096  # elements of one program


def to_fp8_ref(x: torch.Tensor) -> torch.Tensor:
    """x (fp32 or wider) saturated to ±448 and rounded to e4m3."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_fp8_ref(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The oracle of ``quantize_fp8``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return to_fp8_ref(wide * (1.0 / scale.to(wide.dtype).reshape(()))).contiguous()


def quantize_fp8_dynamic_ref(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of ``quantize_fp8_per_token`` (block 0) and ``quantize_fp8_per_block``; x may be fp32 or wider than it was."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    columns = x.shape[-1]
    groups, width = num_groups(columns, block), block or columns
    padded = torch.nn.functional.pad(wide, (0, groups * width - columns)).unflatten(-1, (groups, width))
    amax = torch.where(padded.isfinite(), padded.abs(), 0.0).amax(-1)
    # by a tensor: CUDA divides by a number as it multiplies by its reciprocal, and an ulp of the scale is lost
    scales = amax.clamp_min(MIN_AMAX) / torch.full_like(amax, FP8_MAX)
    y = to_fp8_ref(padded * (1.0 / scales)[..., None]).flatten(-2)[..., :columns]
    return y.contiguous(), scales.to(torch.float32)


def num_groups(columns: int, block: int) -> int:
    """Scales in a row of so many columns; block 0 is one for the whole row."""
    return -(-columns // block) if block else 1


@triton.jit
def to_fp8(x):
    """x (fp32) saturated to ±448 and rounded to e4m3. Comparisons rather than minimum and maximum, which would turn NaN into 448."""
    x = tl.where(x > 448.0, 448.0, x)
    x = tl.where(x < -448.0, -448.0, x)
    return cast(x, tl.float8e4nv)


@triton.jit
def divide(x, scale):
    """x / scale as x · (1 / scale): one correctly rounded division a scale, where one an element would cost more than its memory."""
    return x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def quantize_groups(y, mask, GROUP: tl.constexpr):
    """y [M, N] fp32 → e4m3 [M, N] and the scale [M, N / GROUP] of each GROUP columns."""
    groups: tl.constexpr = y.shape[1] // GROUP
    grouped = tl.reshape(tl.where(mask, y, 0.0), (y.shape[0], groups, GROUP))
    magnitude = tl.abs(grouped)
    amax = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 2)  # false for NaN too
    amax = tl.maximum(amax, 0.000244140625)
    scales = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    return tl.reshape(to_fp8(divide(grouped, scales[:, :, None])), (y.shape[0], y.shape[1])), scales


@triton.jit
def store_scales(scales_ptr, rows, scales, first_group, num_groups, mask_rows):
    """Store scales [M, G] of rows [M, 1] into the contiguous [rows, num_groups], from column first_group on."""
    groups = first_group + tl.arange(0, scales.shape[1])[None, :]
    tl.store(scales_ptr + rows.to(tl.int64) * num_groups + groups, scales, mask=mask_rows & (groups < num_groups))


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr, y_ptr, scale_ptr, x_inner, stride_xo, stride_xi, num_rows, width, num_groups,
    DYNAMIC: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows × BLOCK_N columns; a scale's columns are never shared between programs."""
    tiles_n = tl.cdiv(width, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tile = tl.program_id(0) % tiles_n
    offs = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_m = rows < num_rows
    mask = mask_m & (offs < width)
    # 64-bit: rows * stride passes 2**31 on large prompts
    x_rows = x_ptr + (rows // x_inner).to(tl.int64) * stride_xo + (rows % x_inner).to(tl.int64) * stride_xi
    x = tl.load(x_rows + offs, mask=mask, other=0.0).to(tl.float32)
    out = y_ptr + rows.to(tl.int64) * width + offs
    if DYNAMIC:
        y, scales = quantize_groups(x, mask, GROUP)
        tl.store(out, y, mask=mask)
        store_scales(scale_ptr, rows, scales, tile * (BLOCK_N // GROUP), num_groups, mask_m)
    else:
        tl.store(out, to_fp8(divide(x, tl.load(scale_ptr))), mask=mask)


def tile_of(width: int, block: int, tile: int) -> tuple[int, int]:
    """Columns of a program and of a group, powers of two, for a row of ``width``: a group never spans two programs."""
    row = next_power_of_2(width)
    if block == 0:
        return row, row
    return min(tile, max(row, 1)), min(block, row)


def check_scale(scale: torch.Tensor, x: torch.Tensor) -> None:
    _checks.check_dtype("scale", scale, torch.float32, "for a static scale")
    _checks.check_device("scale", scale, x, "x")
    if scale.numel() != 1:
        raise ValueError(f"scale: expected one element, got {list(scale.shape)}")


def check_block(block: int) -> None:
    if block not in (0, 16, 32, 64, 128, 256):
        raise ValueError(f"block: expected 16, 32, 64, 128 or 256 columns, or 0 for the whole row, got {block}")


def scales_like(x: torch.Tensor, columns: int, block: int) -> torch.Tensor:
    """Room for the scales of a result [..., columns] whose leading dimensions are x's."""
    return torch.empty((*x.shape[:-1], num_groups(columns, block)), dtype=torch.float32, device=x.device)


def _check_rows(x: torch.Tensor) -> None:
    _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    if not 0 < x.shape[-1] <= 131072:
        raise ValueError(f"x: expected a last dimension of 1 to 131072, got {list(x.shape)}")
    _checks.rows_of("x", x)


def _check_static(x: torch.Tensor, scale: torch.Tensor) -> None:
    _check_rows(x)
    check_scale(scale, x)


def _check_dynamic(x: torch.Tensor, block: int) -> None:
    _check_rows(x)
    check_block(block)


def _launch(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, block: int | None) -> None:
    """block None: static; 0: per token."""
    rows, width = _checks.rows_of("x", x), x.shape[-1]
    if rows.count:
        block_n, group = tile_of(width, BLOCK if block is None else block, _TILE)
        block_m = max(1, 1024 // block_n)
        _quantize_kernel[(cdiv(rows.count, block_m) * cdiv(width, block_n),)](
            x, y, scale, rows.inner, rows.stride_outer, rows.stride_inner, rows.count, width, num_groups(width, block or 0),
            DYNAMIC=block is not None, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=min(32, max(2, block_n // 512)),
        )  # fmt: skip


def _quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    _check_static(x, scale)
    y = torch.empty(x.shape, dtype=FP8, device=x.device)
    _launch(x, y, scale, None)
    return y


def _quantize_fp8_dynamic(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    _check_dynamic(x, block)
    y = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = scales_like(x, x.shape[-1], block)
    _launch(x, y, scales, block)
    return y, scales


_quantize_fp8_op = define(
    "quantize_fp8(Tensor x, Tensor scale) -> Tensor",
    kernel=_quantize_fp8,
    reference=_checks.checked(_check_static, quantize_fp8_ref),
    fake=lambda x, scale: torch.empty(x.shape, dtype=FP8, device=x.device),
)
_quantize_fp8_dynamic_op = define(
    "quantize_fp8_dynamic(Tensor x, int block) -> (Tensor, Tensor)",
    kernel=_quantize_fp8_dynamic,
    reference=_checks.checked(_check_dynamic, quantize_fp8_dynamic_ref),
    fake=lambda x, block: (torch.empty(x.shape, dtype=FP8, device=x.device), scales_like(x, x.shape[-1], block)),
)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y = saturate(x / scale) in e4m3, with a static scale.

    x: [..., n] fp16, bf16 or fp32, last stride 1; leading dimensions by strides. scale: one fp32 element on x's device.
    Returns [..., n] e4m3, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _quantize_fp8_op(x, scale)


def quantize_fp8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scales) with one scale per row: y [..., n] e4m3, scales [..., 1] fp32, ``x ≈ y · scales``. x and errors as in quantize_fp8."""
    return _quantize_fp8_dynamic_op(x, 0)


def quantize_fp8_per_block(x: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scales) with one scale per ``block`` columns (the last block may be short): scales [..., ceil(n / block)] fp32.

    block: 16, 32, 64, 128 or 256 columns. x and errors as in quantize_fp8.
    """
    if block == 0:
        raise ValueError("block: expected 16, 32, 64, 128 or 256 columns, got 0; quantize_fp8_per_token scales whole rows")
    return _quantize_fp8_dynamic_op(x, block)
