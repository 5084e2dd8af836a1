"""The kernel of ``tkernels.rope`` and its launch: QK-norm, rotation, and the write of k and v into the paged cache."""

from __future__ import annotations

import torch

from tkernels import _dependent
from tkernels._dependent import wait
from tkernels._target import target_of
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.quant import divide, to_fp8

_PROGRAMS = 128  # of a multiprocessor, most of which wait for their turn


@triton.jit
def _load_pair(rows, mask_rows, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two partners x1, x2 [rows, BLOCK_HALF] in fp32 of a rotation; rows [rows, 1] are pointers to the first element."""
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        x = tl.load(rows + offs, mask=mask_rows & (offs < 2 * HALF), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], BLOCK_HALF, 2)))  # the load stays one contiguous run
    else:
        offs = tl.arange(0, BLOCK_HALF)[None, :]
        mask = mask_rows & (offs < HALF)
        x1 = tl.load(rows + offs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(rows + HALF + offs, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def store_as(ptrs, x, mask):
    """Store x (fp32), rounded to the dtype that ptrs point to."""
    if ptrs.dtype.element_ty == tl.float8e4nv:
        tl.store(ptrs, to_fp8(x), mask=mask)
    else:
        tl.store(ptrs, cast(x, ptrs.dtype.element_ty), mask=mask)


@triton.jit
def rotate(x1, x2, cos, sin):
    """The pairs turned. Which of two products a compiler contracts with their sum depends on what stands around, so it is told."""
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@triton.jit
def _rotate_heads(
    src, dst, mask_heads, weight_ptr, eps, weight_offset, scale, cos, sin,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, scale and store one tile of heads: src and dst [heads, 1] point to the heads' first elements."""
    x1, x2 = _load_pair(src, mask_heads, HALF, BLOCK_HALF, INTERLEAVED)
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    if HAS_REST:
        rest = tl.load(src + offs_rest, mask=mask_heads & (offs_rest < HEAD_DIM), other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        square = tl.sum(x1 * x1 + x2 * x2, 1)
        if HAS_REST:
            square += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        zero = tl.zeros((1, 1), tl.int32)
        w1, w2 = _load_pair(weight_ptr + zero, zero == 0, HALF, BLOCK_HALF, INTERLEAVED)
        x1, x2 = x1 * factor * (weight_offset + w1), x2 * factor * (weight_offset + w2)
        if HAS_REST:
            w_rest = tl.load(weight_ptr + offs_rest, mask=offs_rest < HEAD_DIM, other=0.0).to(tl.float32)
            rest = rest * factor * (weight_offset + w_rest)
    y1, y2 = rotate(x1, x2, cos, sin)
    if HAS_SCALE:
        y1, y2 = divide(y1, scale), divide(y2, scale)
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        store_as(dst + offs, tl.reshape(tl.join(y1, y2), (y1.shape[0], 2 * BLOCK_HALF)), mask_heads & (offs < 2 * HALF))
    else:
        offs = tl.arange(0, BLOCK_HALF)[None, :]
        store_as(dst + offs, y1, mask_heads & (offs < HALF))
        store_as(dst + HALF + offs, y2, mask_heads & (offs < HALF))
    if HAS_REST:
        if HAS_SCALE:
            rest = divide(rest, scale)
        store_as(dst + offs_rest, rest, mask_heads & (offs_rest < HEAD_DIM))


@triton.jit
def _load_scale(scale_ptr, heads, mask_heads, HAS_SCALE: tl.constexpr, PER_HEAD: tl.constexpr):
    if HAS_SCALE:
        scale = tl.load(scale_ptr + heads * PER_HEAD, mask=mask_heads, other=1.0)
    else:
        scale = tl.full(heads.shape, 1.0, tl.float32)
    return scale


# One number a token is read from these, so a slice that starts or steps otherwise must not mean another compilation.
@triton.jit(do_not_specialize=["stride_positions", "stride_slots"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr,
    positions_ptr, cos_sin_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, k_scale_ptr, v_scale_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kcp, stride_kcs, stride_kch, stride_vcp, stride_vcs, stride_vch, stride_positions, stride_table, stride_slots,
    num_heads, num_kv_heads, max_positions, num_slots, eps, weight_offset,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr, PER: tl.constexpr, INTERLEAVED: tl.constexpr, WRITE_CACHE: tl.constexpr,
    HAS_Q_WEIGHT: tl.constexpr, HAS_K_WEIGHT: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one token and PER times BLOCK_H heads, first the query heads, then the KV heads."""
    token = tl.program_id(0).to(tl.int64)  # 64-bit: token * stride passes 2**31 on fused QKV views
    q_blocks = tl.cdiv(num_heads, BLOCK_H)
    wait(PDL)
    position = tl.load(positions_ptr + token * stride_positions)
    offs_half = tl.arange(0, BLOCK_HALF)[None, :]
    known = (position >= 0) & (position < max_positions)
    table = cos_sin_ptr + position * stride_table + offs_half
    cos = tl.load(table, mask=known & (offs_half < HALF), other=float("nan"))
    sin = tl.load(table + HALF, mask=known & (offs_half < HALF), other=float("nan"))
    for block in tl.range(tl.program_id(1) * PER, tl.minimum((tl.program_id(1) + 1) * PER, q_blocks + tl.cdiv(num_kv_heads, BLOCK_H))):
        if block < q_blocks:
            heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            mask = heads < num_heads
            src = q_ptr + token * stride_qt + heads.to(tl.int64) * stride_qh
            q_rows = q_out_ptr + (token * num_heads + heads) * HEAD_DIM
            _rotate_heads(
                src, q_rows, mask, q_weight_ptr, eps, weight_offset, 1.0, cos, sin,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_Q_WEIGHT, False,
            )  # fmt: skip
        else:
            heads = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            mask = heads < num_kv_heads
            wide_heads = heads.to(tl.int64)
            src = k_ptr + token * stride_kt + wide_heads * stride_kh
            if WRITE_CACHE:
                slot = tl.load(slots_ptr + token * stride_slots)
                written = mask & (slot >= 0) & (slot < num_slots)
                slot = tl.maximum(slot, 0)
                page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE  # int64, as slot_mapping is
                k_rows = k_cache_ptr + page * stride_kcp + offset * stride_kcs + wide_heads * stride_kch
                v_rows = v_cache_ptr + page * stride_vcp + offset * stride_vcs + wide_heads * stride_vch
                scale = _load_scale(k_scale_ptr, heads, mask, HAS_K_SCALE, K_SCALE_PER_HEAD)
                _rotate_heads(
                    src, k_rows, written, k_weight_ptr, eps, weight_offset, scale, cos, sin,
                    HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_K_WEIGHT, HAS_K_SCALE,
                )  # fmt: skip
                offs_d = tl.arange(0, BLOCK_D)[None, :]
                mask_v = written & (offs_d < HEAD_DIM)
                v = tl.load(v_ptr + token * stride_vt + wide_heads * stride_vh + offs_d, mask=mask_v, other=0.0).to(tl.float32)
                if HAS_V_SCALE:
                    v = divide(v, _load_scale(v_scale_ptr, heads, mask, True, V_SCALE_PER_HEAD))
                store_as(v_rows + offs_d, v, mask_v)
            else:
                k_out_rows = k_out_ptr + (token * num_kv_heads + heads) * HEAD_DIM
                _rotate_heads(
                    src, k_out_rows, mask, k_weight_ptr, eps, weight_offset, 1.0, cos, sin,
                    HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_K_WEIGHT, False,
                )  # fmt: skip


def launch(
    q, k, v, positions, cos_sin, k_out, k_cache, v_cache, slots, q_weight, k_weight, eps, weight_offset, k_scale, v_scale, interleaved
):
    """Launch over all tokens; exactly one of k_out and (v, k_cache, v_cache, slots) is given. Returns a fresh q."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    half = cos_sin.shape[1] // 2
    block_d = next_power_of_2(head_dim)
    # A function of the head_dim alone: the order of the norm's sum must not depend on how many tokens are in the batch.
    block_h = max(1, 1024 // block_d)
    blocks = cdiv(num_heads, block_h) + cdiv(num_kv_heads, block_h)
    # many tokens: a program takes all heads of its token and reads its cosines once
    per = blocks if tokens * blocks > _PROGRAMS * target_of(q.device).num_sms else 1
    write = k_cache is not None
    if tokens and blocks:
        cache_strides = (*k_cache.stride()[:3], *v_cache.stride()[:3]) if write else (0,) * 6
        _dependent.launch(
            _rope_kernel, (tokens, cdiv(blocks, per)), q.device,
            q, k, v, q_out, k_out, k_cache, v_cache, positions, cos_sin, slots, q_weight, k_weight, k_scale, v_scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), *(v.stride()[:2] if write else (0, 0)), *cache_strides,
            positions.stride(0), cos_sin.stride(0), slots.stride(0) if write else 0,
            num_heads, num_kv_heads, cos_sin.shape[0], k_cache.shape[0] * k_cache.shape[1] if write else 0, eps, weight_offset,
            PAGE_SIZE=max(k_cache.shape[1], 1) if write else 1, HEAD_DIM=head_dim, HALF=half, BLOCK_D=block_d,
            BLOCK_HALF=next_power_of_2(half), BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_H=block_h, PER=per,
            INTERLEAVED=interleaved, WRITE_CACHE=write, HAS_Q_WEIGHT=q_weight is not None, HAS_K_WEIGHT=k_weight is not None,
            HAS_K_SCALE=k_scale is not None, HAS_V_SCALE=v_scale is not None,
            K_SCALE_PER_HEAD=int(k_scale is not None and k_scale.numel() > 1),
            V_SCALE_PER_HEAD=int(v_scale is not None and v_scale.numel() > 1),
            num_warps=2,
        )  # fmt: skip
    return q_out
