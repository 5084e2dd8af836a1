"""LayerNorm.

    y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · weight + bias

Source: arXiv 1607.06450. Mean and variance are taken in two passes over registers, in fp32, so a large common offset does not cancel;
everything is rounded once, at the store.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton

_MAX_HIDDEN = 131072  # one program holds a row in registers: up to 32768 without spills, beyond that right but slower


def layer_norm_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    """The oracle: computed in fp32 (fp64 for fp64 inputs), rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype).contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, x_inner, stride_xo, stride_xi, num_rows, hidden, eps,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M whole rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs = tl.arange(0, BLOCK_N)[None, :]
    mask_n = offs < hidden
    mask = (rows < num_rows) & mask_n
    weight = tl.load(weight_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)  # asked for before the sums that it waits on
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    # 64-bit: rows * stride passes 2**31 on fused views
    x_rows = x_ptr + (rows // x_inner).to(tl.int64) * stride_xo + (rows % x_inner).to(tl.int64) * stride_xi
    x = tl.load(x_rows + offs, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - (tl.sum(x, 1) / hidden)[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1) / hidden + eps)[:, None] * weight
    if HAS_BIAS:
        y += bias
    tl.store(y_ptr + rows.to(tl.int64) * hidden + offs, cast(y, y_ptr.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5) -> None:
    _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    if not 0 < x.shape[-1] <= _MAX_HIDDEN:
        raise ValueError(f"x: expected a last dimension of 1 to {_MAX_HIDDEN}, got {list(x.shape)}")
    _checks.rows_of("x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            _checks.check_shape(name, tensor, (x.shape[-1],), "like x's last dimension")
            _checks.check_float(name, tensor)
            _checks.check_last_stride(name, tensor)
            _checks.check_device(name, tensor, x, "x")


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    _check(x, weight, bias, eps)
    hidden = x.shape[-1]
    rows = _checks.rows_of("x", x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.count:
        # Tile and warps follow from hidden alone: the order of the sums must not depend on how many rows are in the batch.
        block_n = next_power_of_2(hidden)
        block_m = max(1, 1024 // block_n)
        _layer_norm_kernel[(cdiv(rows.count, block_m),)](
            x, weight, bias, y, rows.inner, rows.stride_outer, rows.stride_inner, rows.count, hidden, eps,
            HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=min(32, max(2, block_n // 512)),
        )  # fmt: skip
    return y


_layer_norm_op = define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-05) -> Tensor",
    kernel=_layer_norm,
    reference=_checks.checked(_check, layer_norm_ref),
    fake=lambda x, weight, bias=None, eps=1e-5: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5) -> torch.Tensor:
    """y = (x − mean) / sqrt(variance + eps) · weight + bias, over the last dimension.

    x: [..., hidden] fp16, bf16 or fp32, last stride 1; leading dimensions by strides (at most two that do not fold).
    weight, bias: [hidden] fp16, bf16 or fp32; no bias is None. eps: added to the variance, unitless.
    Returns [..., hidden] like x, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    Source: arXiv 1607.06450.
    """
    return _layer_norm_op(x, weight, bias, eps)
