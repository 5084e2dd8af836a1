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
from tkernels._rope_kernels import launch
from tkernels.quant import FP8, to_fp8_ref

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
    check_tokens("positions", positions, q, "q")
    check_table(cos_sin, q.shape[2], q, "q")
    check_weight("q_weight", q_weight, q.shape[2], q, "q")
    check_weight("k_weight", k_weight, q.shape[2], q, "q")


def check_tokens(name: str, index: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    """positions and slot_mapping; like: [tokens, ...]."""
    _checks.check_shape(name, index, (like.shape[0],), f"one per token of {like_name}")
    _checks.check_dtype(name, index, torch.int64, "indices")
    _checks.check_device(name, index, like, like_name)


def check_table(cos_sin: torch.Tensor, head_dim: int, like: torch.Tensor, like_name: str) -> None:
    _checks.check_dtype("cos_sin", cos_sin, torch.float32, "(cos, then sin)")
    _checks.check_device("cos_sin", cos_sin, like, like_name)
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim:
        raise ValueError(
            f"cos_sin: expected [max_positions, rot_dim] with rot_dim even and 2 to {head_dim} (head_dim), got {list(cos_sin.shape)}"
        )
    _checks.check_last_stride("cos_sin", cos_sin)


def check_weight(name: str, weight: torch.Tensor | None, head_dim: int, like: torch.Tensor, like_name: str) -> None:
    if weight is None:
        return
    _checks.check_shape(name, weight, (head_dim,), "(head_dim)")
    _checks.check_float(name, weight)
    _checks.check_device(name, weight, like, like_name)
    _checks.check_last_stride(name, weight)


def check_cache(name: str, cache: torch.Tensor, k_cache: torch.Tensor, like: torch.Tensor, like_name: str) -> None:
    """What does not depend on the heads, which the callers know from other arguments."""
    if cache.dtype not in _CACHE_DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float8_e4m3fn, got {_checks.describe(cache)}")
    _checks.check_shape(name, cache, tuple(k_cache.shape), "like k_cache")
    _checks.check_device(name, cache, like, like_name)
    _checks.check_last_stride(name, cache)


def check_scale(name: str, scale: torch.Tensor | None, kv_heads: int, like: torch.Tensor, like_name: str) -> None:
    if scale is None:
        return
    _checks.check_dtype(name, scale, torch.float32, "scales")
    _checks.check_device(name, scale, like, like_name)
    if scale.numel() != 1 and tuple(scale.shape) != (kv_heads,):
        raise ValueError(f"{name}: expected one element or [{kv_heads}] (one per KV head), got {list(scale.shape)}")
    if scale.numel() > 1:
        _checks.check_last_stride(name, scale)


def _check_rope_and_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> None:  # fmt: skip
    _check_rope(q, k, positions, cos_sin, q_weight=q_weight, k_weight=k_weight)
    _check_heads("v", v, q)
    _checks.check_shape("v", v, tuple(k.shape), "like k")
    heads, dim = k.shape[1:]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or tuple(cache.shape[2:]) != (heads, dim):
            raise ValueError(f"{name}: expected [pages, page_size, {heads}, {dim}] (heads and head_dim of k), got {list(cache.shape)}")
        check_cache(name, cache, k_cache, k, "k")
    check_tokens("slot_mapping", slot_mapping, q, "q")
    check_scale("k_scale", k_scale, heads, k, "k")
    check_scale("v_scale", v_scale, heads, k, "k")


def _rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check_rope(q, k, positions, cos_sin, q_weight=q_weight, k_weight=k_weight)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_out = launch(
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
    return launch(
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
