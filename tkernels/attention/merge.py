"""Merge of attention over two disjoint sets of keys: with it a shared prefix is computed once (cascade.py), or a context in parts.

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

An LSE of -inf marks an empty set: nothing of its ``out`` is taken, whatever is there. Both empty: zero, -inf.

Source: arXiv 2501.01005.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.attention.ref import merge_attention_ref


@triton.jit
def _merge_kernel(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, rows, heads,
    stride_at, stride_ah, stride_lat, stride_lah, stride_bt, stride_bh, stride_lbt, stride_lbh,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    mask_r = offs_r < rows
    mask = mask_r[:, None] & (offs_d < DIM)[None, :]
    token, head = offs_r // heads, offs_r % heads
    lse_a = tl.load(lse_a_ptr + token * stride_lat + head * stride_lah, mask=mask_r, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + token * stride_lbt + head * stride_lbh, mask=mask_r, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    part_a, part_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = part_a + part_b
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), base + tl.log(divisor))
    weight_a, weight_b = (part_a / divisor)[:, None], (part_b / divisor)[:, None]
    # masked by the weight: an empty side may hold anything, and 0 · NaN is NaN
    a_ptrs = a_ptr + (token * stride_at + head * stride_ah)[:, None] + offs_d[None, :]
    b_ptrs = b_ptr + (token * stride_bt + head * stride_bh)[:, None] + offs_d[None, :]
    a = tl.load(a_ptrs, mask=mask & (weight_a > 0.0), other=0.0).to(tl.float32)
    b = tl.load(b_ptrs, mask=mask & (weight_b > 0.0), other=0.0).to(tl.float32)
    out = tl.fma(a, tl.broadcast_to(weight_a, a.shape), b * weight_b)
    tl.store(out_ptr + offs_r[:, None] * DIM + offs_d[None, :], cast(out, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + offs_r, lse, mask=mask_r)


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    _checks.check_float("out_a", out_a)
    if out_a.dim() != 3:
        raise ValueError(f"out_a: expected [tokens, heads, dim], got {list(out_a.shape)}")
    _checks.check_shape("out_b", out_b, tuple(out_a.shape), "like out_a")
    _checks.check_dtype("out_b", out_b, out_a.dtype, "like out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _checks.check_shape(name, lse, tuple(out_a.shape[:2]), "like out_a")
        _checks.check_dtype(name, lse, torch.float32, "natural log")
    for name, tensor in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        _checks.check_device(name, tensor, out_a, "out_a")
    _checks.check_last_stride("out_a", out_a)
    _checks.check_last_stride("out_b", out_b)


def _merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    out, lse = _fake(out_a)
    tokens, heads, dim = out_a.shape
    if out.numel():
        block_d = next_power_of_2(dim)
        block_r = max(1, min(16, 1024 // block_d))
        _merge_kernel[(cdiv(tokens * heads, block_r),)](
            out_a, lse_a, out_b, lse_b, out, lse, tokens * heads, heads,
            out_a.stride(0), out_a.stride(1), *lse_a.stride(), out_b.stride(0), out_b.stride(1), *lse_b.stride(),
            DIM=dim, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=1 if block_d * block_r <= 512 else 4,
        )  # fmt: skip
    return out, lse


def _reference(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    out, lse = merge_attention_ref(out_a, lse_a, out_b, lse_b)
    return out.contiguous(), lse.contiguous()


def _fake(out_a: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    return out, torch.empty(out_a.shape[:2], dtype=torch.float32, device=out_a.device)


_merge_attention_op = define(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    kernel=_merge,
    reference=_reference,
    fake=_fake,
)


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the attention over each.

    out_a, out_b: [tokens, heads, dim] fp16, bf16 or fp32, last stride 1. lse_a, lse_b: [tokens, heads] fp32, natural log.
    Returns (out like out_a, lse [tokens, heads] fp32), both contiguous. Raises ValueError or TypeError naming the wrong argument.
    A sink must be counted on one side only.
    """
    return _merge_attention_op(out_a, lse_a, out_b, lse_b)
