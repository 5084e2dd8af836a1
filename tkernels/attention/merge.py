"""Merge of attention over disjoint sets of keys: with it a shared prefix is computed once (cascade.py), or a context in parts.

    lse = log(exp(lse_a) + Σ_s exp(lse_b[s])),   out = exp(lse_a - lse) · out_a + Σ_s exp(lse_b[s] - lse) · out_b[s]

An LSE of -inf marks an empty set: nothing of its ``out`` is taken, whatever is there. All empty: zero, -inf.

Source: arXiv 2501.01005.
"""

from __future__ import annotations

import torch

from tkernels import _checks, _dependent
from tkernels._dependent import wait
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.attention.ref import merge_attention_ref

_MAX_STATES = 1024  # a program holds the LSEs of all of them, and a part of their values


@triton.jit(do_not_specialize=["rows", "states"])
def _merge_kernel(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, rows, heads, states,
    stride_at, stride_ah, stride_lat, stride_lah, stride_bs, stride_bt, stride_bh, stride_lbs, stride_lbt, stride_lbh,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STATES: tl.constexpr, A_DECIDES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A_DECIDES: where the set of a is empty the result is empty too, whatever b says there, if anything."""
    wait(PDL)
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_s = tl.arange(0, STATES)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_r = offs_r < rows
    mask_d = offs_d < DIM
    token, head = offs_r // heads, offs_r % heads
    lse_a = tl.load(lse_a_ptr + token * stride_lat + head * stride_lah, mask=mask_r, other=float("-inf"))
    lse_b_ptrs = lse_b_ptr + (token * stride_lbt + head * stride_lbh)[:, None] + offs_s.to(tl.int64)[None, :] * stride_lbs
    lse_b = tl.load(lse_b_ptrs, mask=mask_r[:, None] & (offs_s < states)[None, :], other=float("-inf"))
    if A_DECIDES:
        lse_b = tl.where((lse_a == float("-inf"))[:, None], float("-inf"), lse_b)
    top = tl.maximum(lse_a, tl.max(lse_b, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    part_a, part_b = tl.exp(lse_a - base), tl.exp(lse_b - base[:, None])
    total = part_a + tl.sum(part_b, 1)
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    weight_a, weight_b = (part_a / divisor)[:, None], (part_b / divisor[:, None])[:, :, None]
    # masked by the weight: an empty set may hold anything, and 0 · NaN is NaN
    a_ptrs = a_ptr + (token * stride_at + head * stride_ah)[:, None] + offs_d[None, :]
    a = tl.load(a_ptrs, mask=mask_d[None, :] & (weight_a > 0.0), other=0.0).to(tl.float32)
    # all states at once, so that one wait fetches them
    b_ptrs = (b_ptr + (token * stride_bt + head * stride_bh)[:, None] + offs_s.to(tl.int64)[None, :] * stride_bs)[:, :, None]
    b = tl.load(b_ptrs + offs_d[None, None, :], mask=mask_d[None, None, :] & (weight_b > 0.0), other=0.0).to(tl.float32)
    out = tl.fma(a, tl.broadcast_to(weight_a, a.shape), tl.sum(b * weight_b, 1))
    out_ptrs = out_ptr + offs_r[:, None] * DIM + offs_d[None, :]
    tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_d[None, :])
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + offs_r, tl.where(empty, float("-inf"), base + tl.log(divisor)), mask=mask_r)


def _tile(dim: int, states: int) -> tuple[int, int, int, int]:
    """(columns, rows, states rounded up, warps) of a program.

    Of many states one warp takes 2048 values, 16 loads of 16 bytes in flight a thread: nothing that warps would have to tell each other.
    """
    states = next_power_of_2(states)
    if states == 1:
        block_d = next_power_of_2(dim)
        block_r = max(1, min(16, 1024 // block_d))
        return block_d, block_r, states, 1 if block_d * block_r <= 512 else 4
    block_d = min(64, next_power_of_2(dim))
    while block_d > 16 and block_d * states > 2048:
        block_d //= 2
    block_r = max(1, min(16, 2048 // (block_d * states)))
    return block_d, block_r, states, max(1, block_d * block_r * states // 2048)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, a_decides: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``merge_attention`` of checked arguments in one launch. a_decides: an empty set in a makes the result empty."""
    out, lse = _fake(out_a)
    tokens, heads, dim = out_a.shape
    if out_b.dim() == 3:
        out_b, lse_b = out_b[None], lse_b[None]
    if out.numel():
        block_d, block_r, states, num_warps = _tile(dim, out_b.shape[0])
        _dependent.launch(
            _merge_kernel, (cdiv(tokens * heads, block_r), cdiv(dim, block_d)), out_a.device,
            out_a, lse_a, out_b, lse_b, out, lse, tokens * heads, heads, out_b.shape[0],
            out_a.stride(0), out_a.stride(1), *lse_a.stride(), *out_b.stride()[:3], *lse_b.stride(),
            DIM=dim, BLOCK_D=block_d, BLOCK_R=block_r, STATES=states, A_DECIDES=a_decides, num_warps=num_warps,
        )  # fmt: skip
    return out, lse


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    _checks.check_float("out_a", out_a)
    if out_a.dim() != 3:
        raise ValueError(f"out_a: expected [tokens, heads, dim], got {list(out_a.shape)}")
    states = out_b.shape[:1] if out_b.dim() == 4 else ()
    if out_b.dim() == 4 and not 1 <= out_b.shape[0] <= _MAX_STATES:
        raise ValueError(f"out_b: expected 1 to {_MAX_STATES} states, got {list(out_b.shape)}")
    _checks.check_shape("out_b", out_b, (*states, *out_a.shape), "like out_a, or with a dimension of states before")
    if out_b.dtype != torch.float32:
        _checks.check_dtype("out_b", out_b, out_a.dtype, "like out_a, or float32")
    for name, lse, shape in (("lse_a", lse_a, out_a.shape[:2]), ("lse_b", lse_b, (*states, *out_a.shape[:2]))):
        _checks.check_shape(name, lse, tuple(shape), f"like out_{name[-1]}")
        _checks.check_dtype(name, lse, torch.float32, "natural log")
    for name, tensor in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        _checks.check_device(name, tensor, out_a, "out_a")
    _checks.check_last_stride("out_a", out_a)
    _checks.check_last_stride("out_b", out_b)


def _merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    return merge(out_a, lse_a, out_b, lse_b)


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
    """Attention over the union of disjoint key sets, from the attention over each.

    out_a: [tokens, heads, dim] fp16, bf16 or fp32. lse_a: [tokens, heads] fp32, natural log.
    out_b: [tokens, heads, dim], or [states, tokens, heads, dim] for up to 1024 sets more, like out_a or fp32; last strides are 1.
    lse_b: [tokens, heads] or [states, tokens, heads] fp32. The order of the sum over states is fixed: the same bits at each call.
    Returns (out like out_a, lse [tokens, heads] fp32), both contiguous. Raises ValueError or TypeError naming the wrong argument.
    A sink must be counted in one set only.
    """
    return _merge_attention_op(out_a, lse_a, out_b, lse_b)
