"""RMSNorm, alone and after a residual add.

    y = x / sqrt(mean(x²) + eps) · (weight_offset + weight)

Source: arXiv 1910.07467. The statistics, the division and the weight multiply are in fp32 and rounded once, at the store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tkernels import _checks, _dependent
from tkernels._dependent import wait
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.quant import FP8, divide, num_groups, quantize_groups, scales_like, store_scales, tile_of, to_fp8

_MAX_HIDDEN = 131072  # one program holds a row in registers: up to 32768 without spills, beyond that right but slower


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """The oracle: computed in fp32 (fp64 for fp64 inputs), rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight_offset + weight.to(wide.dtype))
    return y.to(x.dtype).contiguous()


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: the sum is rounded to ``x.dtype`` before it is normalised, so the fused and the unfused path agree."""
    total = (x + residual).contiguous()
    return rms_norm_ref(total, weight, eps, weight_offset), total


@triton.jit(do_not_specialize=["num_rows", "stride_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, ids_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr,
    x_inner, stride_xo, stride_xi, residual_inner, stride_ro, stride_ri, stride_ids,
    num_rows, hidden, num_ids, num_scales, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, GATHER: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows. GATHER: row r is x[ids[r]]. QUANT: "none", "static" or "dynamic" scales of an e4m3 y."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK_N)[None, :]
    mask_m, mask_n = rows < num_rows, offs < hidden
    mask = mask_m & mask_n
    weight = tl.load(weight_ptr + offs, mask=mask_n, other=0.0).to(tl.float32) + weight_offset  # asked for before the sum that it waits on
    wait(PDL)
    out = rows.to(tl.int64) * hidden + offs
    if GATHER:
        ids = tl.load(ids_ptr + rows.to(tl.int64) * stride_ids, mask=mask_m, other=0)
        known = (ids >= 0) & (ids < num_ids)
        total = tl.load(x_ptr + tl.where(known, ids, 0) * stride_xo + offs, mask=mask & known, other=0.0).to(tl.float32)
        x = tl.where(known, total, float("nan"))
        tl.store(total_ptr + out, cast(x, total_ptr.dtype.element_ty), mask=mask)
    else:
        # 64-bit: rows * stride passes 2**31 on fused QKV views
        x_rows = x_ptr + (rows // x_inner).to(tl.int64) * stride_xo + (rows % x_inner).to(tl.int64) * stride_xi
        # with a residual both are dead once they are summed; alone, x is a residual that is read again
        x = tl.load(x_rows + offs, mask=mask, other=0.0, eviction_policy="evict_first" if HAS_RESIDUAL else "").to(tl.float32)
    if HAS_RESIDUAL:
        residual_rows = residual_ptr + (rows // residual_inner).to(tl.int64) * stride_ro + (rows % residual_inner).to(tl.int64) * stride_ri
        residual = tl.load(residual_rows + offs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        rounded = cast(x + residual, total_ptr.dtype.element_ty)
        tl.store(total_ptr + out, rounded, mask=mask)
        x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)[:, None] * weight
    if QUANT == "none":
        tl.store(y_ptr + out, cast(y, y_ptr.dtype.element_ty), mask=mask)
    elif QUANT == "static":
        tl.store(y_ptr + out, to_fp8(divide(y, tl.load(scale_ptr))), mask=mask)
    else:
        codes, scales = quantize_groups(y, mask, GROUP)
        tl.store(y_ptr + out, codes, mask=mask)
        store_scales(scale_ptr, rows, scales, 0, num_scales, mask_m)


def check(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, name: str = "x") -> None:
    _checks.check_float(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a scalar")
    if not 0 < x.shape[-1] <= _MAX_HIDDEN:
        raise ValueError(f"{name}: expected a last dimension of 1 to {_MAX_HIDDEN}, got {list(x.shape)}")
    _checks.rows_of(name, x)
    _checks.check_shape("weight", weight, (x.shape[-1],), f"like {name}'s last dimension")
    _checks.check_float("weight", weight)
    _checks.check_last_stride("weight", weight)
    _checks.check_device("weight", weight, x, name)


def check_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    check(x, weight, eps)
    _checks.check_shape("residual", residual, tuple(x.shape), "like x")
    _checks.check_dtype("residual", residual, x.dtype, "like x")
    _checks.check_device("residual", residual, x, "x")
    _checks.rows_of("residual", residual)


class Normed(NamedTuple):
    """What a launch makes."""

    y: torch.Tensor
    total: torch.Tensor | None  # the sum with the residual, or the gathered rows
    scales: torch.Tensor | None  # of a dynamic e4m3 y


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    *,
    residual: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    block: int | None = None,
) -> Normed:
    """ids: gather rows of the matrix x first. scale: y is e4m3 by this static scale. block: e4m3 by dynamic ones (0: per row)."""
    hidden = x.shape[-1]
    x_rows = _checks.rows_of("x", x)
    residual_rows = x_rows if residual is None else _checks.rows_of("residual", residual)
    shape, count = (x.shape, x_rows.count) if ids is None else ((*ids.shape, hidden), ids.numel())
    y = torch.empty(shape, dtype=x.dtype if scale is None and block is None else FP8, device=x.device)
    total = torch.empty(shape, dtype=x.dtype, device=x.device) if residual is not None or ids is not None else None
    scales = None if block is None else scales_like(y, hidden, block)
    if count:
        # Tile and warps follow from hidden alone: the order of the sum must not depend on how many rows are in the batch.
        block_n = next_power_of_2(hidden)
        block_m = max(1, 1024 // block_n)
        _dependent.launch(
            _rms_norm_kernel, (cdiv(count, block_m),), x.device,
            x, residual, ids, weight, y, total, scale if block is None else scales,
            x_rows.inner, x_rows.stride_outer, x_rows.stride_inner,
            residual_rows.inner, residual_rows.stride_outer, residual_rows.stride_inner, 0 if ids is None else ids.stride(-1),
            count, hidden, 0 if ids is None else x.shape[0], num_groups(hidden, block or 0), eps, weight_offset,
            HAS_RESIDUAL=residual is not None, GATHER=ids is not None,
            QUANT="dynamic" if block is not None else "none" if scale is None else "static", GROUP=tile_of(hidden, block or 0, block_n)[1],
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=min(32, max(2, block_n // 512)),
        )  # fmt: skip
    return Normed(y, total, scales)


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """The kernel of the op. Other ops' kernels call this rather than the op, and stay calls that only launch."""
    check(x, weight, eps)
    return launch(x, weight, eps, weight_offset).y


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    check_add(x, residual, weight, eps)
    y, total, _ = launch(x, weight, eps, weight_offset, residual=residual)
    assert total is not None
    return y, total


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> Tensor",
    kernel=normalise,
    reference=_checks.checked(check, rms_norm_ref),
    fake=lambda x, weight, eps, weight_offset=0.0: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_add_rms_norm_op = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_add_rms_norm,
    reference=_checks.checked(check_add, add_rms_norm_ref),
    fake=lambda x, residual, weight, eps, weight_offset=0.0: (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    ),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · (weight_offset + weight), over the last dimension.

    x: [..., hidden] fp16, bf16 or fp32, last stride 1; leading dimensions by strides (at most two that do not fold).
    weight: [hidden] fp16, bf16 or fp32. weight_offset: added to it in fp32, unitless; 1 for Gemma's weights, which lie around 0.
    eps: added to the mean square, unitless.
    Returns [..., hidden] like x, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    Source: arXiv 1910.07467; differs: the weight multiply is in fp32.
    """
    return _rms_norm_op(x, weight, eps, weight_offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """new_residual = x + residual, rounded to x.dtype; y = rms_norm(new_residual, weight, eps, weight_offset).

    x, residual: [..., hidden] fp16, bf16 or fp32, one dtype, last stride 1, each by its own strides. The inputs are not written.
    weight, eps, weight_offset: as in rms_norm. Returns (y, new_residual), both [..., hidden] like x, contiguous.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _add_rms_norm_op(x, residual, weight, eps, weight_offset)
