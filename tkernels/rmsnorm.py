"""RMSNorm, alone and after a residual add.

    y = x / sqrt(mean(x²) + eps) · weight

Source: arXiv 1910.07467. The statistics, the division and the weight multiply are in fp32 and rounded once, at the store.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, tl, triton

_MAX_HIDDEN = 131072  # one program holds a row: at 32 warps that is 128 fp32 values a thread


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The oracle: computed in fp32 (fp64 for fp64 inputs), rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return y.to(x.dtype).contiguous()


def add_rms_norm_ref(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: the sum is rounded to ``x.dtype`` before it is normalised, so the fused and the unfused path agree."""
    total = (x + residual).contiguous()
    return rms_norm_ref(total, weight, eps), total


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    x_inner, stride_xo, stride_xi, residual_inner, stride_ro, stride_ri, hidden, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 64-bit: rows * stride passes 2**31 on fused QKV views
    offs = tl.arange(0, BLOCK)
    mask = offs < hidden
    x = tl.load(x_ptr + (row // x_inner) * stride_xo + (row % x_inner) * stride_xi + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + (row // residual_inner) * stride_ro + (row % residual_inner) * stride_ri
        total = cast(x + tl.load(residual_row + offs, mask=mask, other=0.0).to(tl.float32), total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * hidden + offs, total, mask=mask)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps) * weight
    tl.store(y_ptr + row * hidden + offs, cast(y, y_ptr.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor, weight: torch.Tensor) -> int:
    _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    hidden = x.shape[-1]
    if not 0 < hidden <= _MAX_HIDDEN:
        raise ValueError(f"x: expected a last dimension of 1 to {_MAX_HIDDEN}, got {list(x.shape)}")
    _checks.check_shape("weight", weight, (hidden,), "like x's last dimension")
    _checks.check_float("weight", weight)
    _checks.check_last_stride("weight", weight)
    _checks.check_device("weight", weight, x, "x")
    return hidden


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = _check(x, weight)
    x_rows = _checks.rows_of("x", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        total, residual_rows = None, x_rows
    else:
        _checks.check_shape("residual", residual, tuple(x.shape), "like x")
        _checks.check_dtype("residual", residual, x.dtype, "like x")
        _checks.check_device("residual", residual, x, "x")
        total, residual_rows = torch.empty_like(y), _checks.rows_of("residual", residual)
    if x_rows.count:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(x_rows.count,)](
            x, residual, weight, y, total,
            x_rows.inner, x_rows.stride_outer, x_rows.stride_inner,
            residual_rows.inner, residual_rows.stride_outer, residual_rows.stride_inner, hidden, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(32, max(1, block // 512)),
        )  # fmt: skip
    return y, total


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, eps)[0]


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, total = _launch(x, residual, weight, eps)
    assert total is not None
    return y, total


_rms_norm_op = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    kernel=_rms_norm,
    reference=rms_norm_ref,
    fake=lambda x, weight, eps: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
_add_rms_norm_op = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    kernel=_add_rms_norm,
    reference=add_rms_norm_ref,
    fake=lambda x, residual, weight, eps: (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    ),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    x: [..., hidden] fp16, bf16 or fp32, last stride 1; leading dimensions by strides (at most two that do not fold).
    weight: [hidden] fp16, bf16 or fp32.
    eps: added to the mean square, unitless.
    Returns [..., hidden] like x, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    Source: arXiv 1910.07467; differs: the weight multiply is in fp32.
    """
    return _rms_norm_op(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """new_residual = x + residual, rounded to x.dtype; y = rms_norm(new_residual, weight, eps). Returns (y, new_residual).

    x, residual: [..., hidden], one dtype, last stride 1, each by its own strides. The inputs are not written.
    """
    return _add_rms_norm_op(x, residual, weight, eps)
