"""Rotary position embedding, alone and fused with QK-norm and the write of k and v into the paged cache.

    q, k ← x / sqrt(mean(x²) + eps) · (weight_offset + weight)        (QK-norm over head_dim, when weights are given)
    (x1, x2) ← (x1 · cos − x2 · sin, x2 · cos + x1 · sin)             cos, sin = cos_sin[position]

x1 and x2 are the two halves of the first ``rot_dim`` elements (NeoX, Llama) or, interleaved, the even and the odd ones
(GPT-J); elements past ``rot_dim`` are not rotated. All arithmetic is in fp32 and rounded once, at the store.

A token's slot is ``page * page_size + offset``. A negative slot writes nothing, and neither does one past the cache.
A position outside the table gives NaN, on every path; it never reads outside.

Source: arXiv 2104.09864; differs: cos and sin stay in fp32.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.quant import FP8, divide, to_fp8, to_fp8_ref

_CACHE_DTYPES = (*_checks.FLOATS, FP8)


def _rotate_ref(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, D] in fp32 or wider → the same, rotated."""
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    table = cos_sin.to(x.dtype)[torch.where(known, positions, 0)] if cos_sin.shape[0] else cos_sin.new_zeros(x.shape[0], cos_sin.shape[1])
    cos, sin = torch.where(known[:, None], table, float("nan"))[:, None, :].chunk(2, -1)
    rotated, rest = x[..., : cos_sin.shape[1]], x[..., cos_sin.shape[1] :]
    x1, x2 = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.cat([torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1), rest], -1)


def _norm_ref(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float) -> torch.Tensor:
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight_offset + weight.to(x.dtype))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope_ref(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle of ``rope``."""
    normed = (_norm_ref(_wide(x), weight, eps, weight_offset) for x, weight in ((q, q_weight), (k, k_weight)))
    q_out, k_out = (_rotate_ref(x, positions, cos_sin, interleaved).to(q.dtype).contiguous() for x in normed)
    return q_out, k_out


def rope_and_cache_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The oracle of ``rope_and_cache``."""
    q_out = _rotate_ref(_norm_ref(_wide(q), q_weight, eps, weight_offset), positions, cos_sin, interleaved).to(q.dtype).contiguous()
    k_out = _rotate_ref(_norm_ref(_wide(k), k_weight, eps, weight_offset), positions, cos_sin, interleaved)
    page_size = k_cache.shape[1]
    written = ((slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * page_size)).nonzero().flatten()
    slots = slot_mapping[written]
    for values, cache, scale in ((k_out, k_cache, k_scale), (_wide(v), v_cache, v_scale)):
        rows = values[written]
        if scale is not None:
            rows = rows * (1.0 / scale.to(rows.dtype)).reshape(1, -1, 1)
        cache[slots // page_size, slots % page_size] = to_fp8_ref(rows) if cache.dtype == FP8 else rows.to(cache.dtype)
    return q_out


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
def _store(ptrs, x, mask):
    """Store x (fp32), rounded to the dtype that ptrs point to."""
    if ptrs.dtype.element_ty == tl.float8e4nv:
        tl.store(ptrs, to_fp8(x), mask=mask)
    else:
        tl.store(ptrs, cast(x, ptrs.dtype.element_ty), mask=mask)


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
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if HAS_SCALE:
        y1, y2 = divide(y1, scale), divide(y2, scale)
    if INTERLEAVED:
        offs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        _store(dst + offs, tl.reshape(tl.join(y1, y2), (y1.shape[0], 2 * BLOCK_HALF)), mask_heads & (offs < 2 * HALF))
    else:
        offs = tl.arange(0, BLOCK_HALF)[None, :]
        _store(dst + offs, y1, mask_heads & (offs < HALF))
        _store(dst + HALF + offs, y2, mask_heads & (offs < HALF))
    if HAS_REST:
        if HAS_SCALE:
            rest = divide(rest, scale)
        _store(dst + offs_rest, rest, mask_heads & (offs_rest < HEAD_DIM))


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
    BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr, WRITE_CACHE: tl.constexpr,
    HAS_Q_WEIGHT: tl.constexpr, HAS_K_WEIGHT: tl.constexpr, HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One program: one token and BLOCK_H heads, first the query heads, then the KV heads."""
    token = tl.program_id(0).to(tl.int64)  # 64-bit: token * stride passes 2**31 on fused QKV views
    block = tl.program_id(1)
    q_blocks = tl.cdiv(num_heads, BLOCK_H)
    position = tl.load(positions_ptr + token * stride_positions)
    offs_half = tl.arange(0, BLOCK_HALF)[None, :]
    known = (position >= 0) & (position < max_positions)
    table = cos_sin_ptr + position * stride_table + offs_half
    cos = tl.load(table, mask=known & (offs_half < HALF), other=float("nan"))
    sin = tl.load(table + HALF, mask=known & (offs_half < HALF), other=float("nan"))
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
            _store(v_rows + offs_d, v, mask_v)
        else:
            k_out_rows = k_out_ptr + (token * num_kv_heads + heads) * HEAD_DIM
            _rotate_heads(
                src, k_out_rows, mask, k_weight_ptr, eps, weight_offset, 1.0, cos, sin,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, INTERLEAVED, HAS_K_WEIGHT, False,
            )  # fmt: skip


def _check_heads(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.dim() != 3 or x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
        raise ValueError(f"{name}: expected [{q.shape[0]}, heads, {q.shape[2]}] (tokens and head_dim of q), got {list(x.shape)}")
    _checks.check_dtype(name, x, q.dtype, "like q")
    _checks.check_device(name, x, q, "q")
    _checks.check_last_stride(name, x)


def _check_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0,
) -> None:  # fmt: skip
    _checks.check_float("q", q)
    if q.dim() != 3 or q.shape[2] == 0:
        raise ValueError(f"q: expected [tokens, heads, head_dim] with head_dim > 0, got {list(q.shape)}")
    _checks.check_last_stride("q", q)
    _check_heads("k", k, q)
    _check_tokens("positions", positions, q)
    _checks.check_dtype("cos_sin", cos_sin, torch.float32, "(cos, then sin)")
    _checks.check_device("cos_sin", cos_sin, q, "q")
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= q.shape[2]:
        raise ValueError(
            f"cos_sin: expected [max_positions, rot_dim] with rot_dim even and 2 to {q.shape[2]} (head_dim), got {list(cos_sin.shape)}"
        )
    _checks.check_last_stride("cos_sin", cos_sin)
    _check_weight("q_weight", q_weight, q)
    _check_weight("k_weight", k_weight, q)


def _check_tokens(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    _checks.check_shape(name, x, (q.shape[0],), "one per token of q")
    _checks.check_dtype(name, x, torch.int64, "indices")
    _checks.check_device(name, x, q, "q")


def _check_cache(name: str, cache: torch.Tensor, k: torch.Tensor, like: torch.Tensor) -> None:
    if cache.dtype not in _CACHE_DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float8_e4m3fn, got {_checks.describe(cache)}")
    if cache.dim() != 4 or tuple(cache.shape[2:]) != tuple(k.shape[1:]):
        raise ValueError(
            f"{name}: expected [pages, page_size, {k.shape[1]}, {k.shape[2]}] (heads and head_dim of k), got {list(cache.shape)}"
        )
    _checks.check_shape(name, cache, tuple(like.shape), "like k_cache")
    _checks.check_device(name, cache, k, "k")
    _checks.check_last_stride(name, cache)


def _check_scale(name: str, scale: torch.Tensor | None, k: torch.Tensor) -> None:
    if scale is None:
        return
    _checks.check_dtype(name, scale, torch.float32, "scales")
    _checks.check_device(name, scale, k, "k")
    if scale.numel() != 1 and tuple(scale.shape) != (k.shape[1],):
        raise ValueError(f"{name}: expected one element or [{k.shape[1]}] (one per KV head), got {list(scale.shape)}")
    if scale.numel() > 1:
        _checks.check_last_stride(name, scale)


def _check_weight(name: str, weight: torch.Tensor | None, q: torch.Tensor) -> None:
    if weight is None:
        return
    _checks.check_shape(name, weight, (q.shape[2],), "(head_dim)")
    _checks.check_float(name, weight)
    _checks.check_device(name, weight, q, "q")
    _checks.check_last_stride(name, weight)


def _check_rope_and_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> None:  # fmt: skip
    _check_rope(q, k, positions, cos_sin, q_weight=q_weight, k_weight=k_weight)
    _check_heads("v", v, q)
    _checks.check_shape("v", v, tuple(k.shape), "like k")
    _check_cache("k_cache", k_cache, k, k_cache)
    _check_cache("v_cache", v_cache, k, k_cache)
    _check_tokens("slot_mapping", slot_mapping, q)
    _check_scale("k_scale", k_scale, k)
    _check_scale("v_scale", v_scale, k)


def _launch(
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
    write = k_cache is not None
    if tokens and blocks:
        cache_strides = (*k_cache.stride()[:3], *v_cache.stride()[:3]) if write else (0,) * 6
        _rope_kernel[(tokens, blocks)](
            q, k, v, q_out, k_out, k_cache, v_cache, positions, cos_sin, slots, q_weight, k_weight, k_scale, v_scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), *(v.stride()[:2] if write else (0, 0)), *cache_strides,
            positions.stride(0), cos_sin.stride(0), slots.stride(0) if write else 0,
            num_heads, num_kv_heads, cos_sin.shape[0], k_cache.shape[0] * k_cache.shape[1] if write else 0, eps, weight_offset,
            PAGE_SIZE=max(k_cache.shape[1], 1) if write else 1, HEAD_DIM=head_dim, HALF=half, BLOCK_D=block_d,
            BLOCK_HALF=next_power_of_2(half), BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_H=block_h,
            INTERLEAVED=interleaved, WRITE_CACHE=write, HAS_Q_WEIGHT=q_weight is not None, HAS_K_WEIGHT=k_weight is not None,
            HAS_K_SCALE=k_scale is not None, HAS_V_SCALE=v_scale is not None,
            K_SCALE_PER_HEAD=int(k_scale is not None and k_scale.numel() > 1),
            V_SCALE_PER_HEAD=int(v_scale is not None and v_scale.numel() > 1),
            num_warps=2,
        )  # fmt: skip
    return q_out


def _rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_rope(q, k, positions, cos_sin, q_weight=q_weight, k_weight=k_weight)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_out = _launch(
        q, k, None, positions, cos_sin, k_out, None, None, None, q_weight, k_weight, eps, weight_offset, None, None, interleaved
    )  # fmt: skip
    return q_out, k_out


def _rope_and_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    _check_rope_and_cache(
        q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping,
        q_weight=q_weight, k_weight=k_weight, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return _launch(
        q, k, v, positions, cos_sin, None, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps, weight_offset, k_scale, v_scale,
        interleaved,
    )  # fmt: skip


def _fake_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rope_op = define(
    "rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, bool interleaved=False, Tensor? q_weight=None, "
    "Tensor? k_weight=None, float eps=1e-6, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_rope,
    reference=_checks.checked(_check_rope, rope_ref),
    fake=lambda q, k, *args, **kwargs: (_fake_like(q), _fake_like(k)),
)
_rope_and_cache_op = define(
    "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, *, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, Tensor? k_scale=None, "
    "Tensor? v_scale=None, bool interleaved=False, float weight_offset=0.0) -> Tensor",
    kernel=_rope_and_cache,
    reference=_checks.checked(_check_rope_and_cache, rope_and_cache_ref),
    fake=lambda q, *args, **kwargs: _fake_like(q),
)


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q and k rotated by their positions, after QK-norm if weights are given: ``(x1 · cos − x2 · sin, x2 · cos + x1 · sin)``.

    q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], fp16, bf16 or fp32, by strides, last stride 1.
    positions: [tokens] int64; one outside the table gives NaN. cos_sin: [max_positions, rot_dim] fp32, cos then sin.
    q_weight, k_weight: [head_dim], RMSNorm weights of QK-norm; weight_offset is added to them in fp32 (Gemma: 1), eps to the mean square.
    interleaved: partners are even and odd elements (GPT-J) rather than halves (NeoX).
    Returns fresh contiguous (q, k). Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _rope_op(q, k, positions, cos_sin, interleaved, q_weight, k_weight, eps, weight_offset)


def rope_and_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """QK-norm (optional), rotation of q and k, and the write of k and v to their pages, in one kernel. Returns the new q.

    q: [tokens, heads, head_dim], k, v: [tokens, kv_heads, head_dim], by strides (views of a fused QKV are normal), last stride 1;
        they are not written.
    positions: [tokens] int64. cos_sin: [max_positions, rot_dim] fp32, cos then sin; rot_dim < head_dim is a partial rotary.
    k_cache, v_cache: [pages, page_size, kv_heads, head_dim] fp16, bf16, fp32 or e4m3, any strides with the last one 1. Mutated.
    slot_mapping: [tokens] int64, page * page_size + offset; a slot outside the cache (−1: padding) writes nothing.
    q_weight, k_weight: [head_dim], RMSNorm weights of QK-norm; weight_offset is added to them in fp32 (Gemma: 1), eps to the mean square.
    k_scale, v_scale: fp32, one element or [kv_heads]; the cache holds value / scale, saturated to ±448 in e4m3.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _rope_and_cache_op(
        q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping,
        q_weight=q_weight, k_weight=k_weight, eps=eps, k_scale=k_scale, v_scale=v_scale, interleaved=interleaved,
        weight_offset=weight_offset,
    )  # fmt: skip
