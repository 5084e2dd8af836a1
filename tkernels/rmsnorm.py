"""RMSNorm, alone and after a residual add.

    y = x / sqrt(mean(x²) + eps) · (weight_offset + weight)

Source: arXiv 1910.07467. The statistics, the division and the weight multiply are in fp32 and rounded once, at the store.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, tl, triton

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


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    x_inner, stride_xo, stride_xi, residual_inner, stride_ro, stride_ri, num_rows, hidden, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK_N)[None, :]
    mask_n = offs < hidden
    mask = (rows < num_rows) & mask_n
    weight = tl.load(weight_ptr + offs, mask=mask_n, other=0.0).to(tl.float32) + weight_offset  # asked for before the sum that it waits on
    # 64-bit: rows * stride passes 2**31 on fused QKV views
    x_rows = x_ptr + (rows // x_inner).to(tl.int64) * stride_xo + (rows % x_inner).to(tl.int64) * stride_xi
    x = tl.load(x_rows + offs, mask=mask, other=0.0).to(tl.float32)
    out = rows.to(tl.int64) * hidden + offs
    if HAS_RESIDUAL:
        residual_rows = residual_ptr + (rows // residual_inner).to(tl.int64) * stride_ro + (rows % residual_inner).to(tl.int64) * stride_ri
        total = cast(x + tl.load(residual_rows + offs, mask=mask, other=0.0).to(tl.float32), total_ptr.dtype.element_ty)
        tl.store(total_ptr + out, total, mask=mask)
        x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)[:, None] * weight
    tl.store(y_ptr + out, cast(y, y_ptr.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    if not 0 < x.shape[-1] <= _MAX_HIDDEN:
        raise ValueError(f"x: expected a last dimension of 1 to {_MAX_HIDDEN}, got {list(x.shape)}")
    _checks.check_shape("weight", weight, (x.shape[-1],), "like x's last dimension")
    _checks.check_float("weight", weight)
    _checks.check_last_stride("weight", weight)
    _checks.check_device("weight", weight, x, "x")


def _check_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    _check(x, weight, eps)
    _checks.check_shape("residual", residual, tuple(x.shape), "like x")
    _checks.check_dtype("residual", residual, x.dtype, "like x")
    _checks.check_device("residual", residual, x, "x")


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = x.shape[-1]
    x_rows = _checks.rows_of("x", x)
    residual_rows = x_rows if residual is None else _checks.rows_of("residual", residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x_rows.count:
        # Tile and warps follow from hidden alone: the order of the sum must not depend on how many rows are in the batch.
        block_n = triton.next_power_of_2(hidden)
        block_m = max(1, 1024 // block_n)
        _rms_norm_kernel[(triton.cdiv(x_rows.count, block_m),)](
            x, residual, weight, y, total,
            x_rows.inner, x_rows.stride_outer, x_rows.stride_inner,
            residual_rows.inner, residual_rows.stride_outer, residual_rows.stride_inner, x_rows.count, hidden, eps, weight_offset,
            HAS_RESIDUAL=residual is not None, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=min(32, max(2, block_n // 512)),
        )  # fmt: skip
    return y, total


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    _check(x, weight, eps)
    return _launch(x, None, weight, eps, weight_offset)[0]


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_add(x, residual, weight, eps)
    y, total = _launch(x, residual, weight, eps, weight_offset)
    assert total is not None
    return y, total


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0) -> Tensor",
    kernel=_rms_norm,
    reference=_checks.checked(_check, rms_norm_ref),
    fake=lambda x, weight, eps, weight_offset=0.0: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_add_rms_norm_op = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_add_rms_norm,
    reference=_checks.checked(_check_add, add_rms_norm_ref),
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

    x, residual: [..., hidden], one dtype, last stride 1, each by its own strides. The inputs are not written.
    Returns (y, new_residual).
    """
    return _add_rms_norm_op(x, residual, weight, eps, weight_offset)
