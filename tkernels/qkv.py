"""The projection to q, k and v of few rows, with the rotary embedding and the cache write in the same kernel.

    q | k | v = norm(x) · weightᵀ + bias,  then  rope_and_cache(q, k, v, …)

Between the two a decode step would write and read q, k and v for a launch that takes longer than its work. Each program of the
projection takes outputs together with their partners in the rotation, so it can store q rotated, and k and v to their pages, itself. The
tile is the one that ``linear`` takes for the same call, and then the bits are those of ``linear`` followed by ``rope_and_cache``; unless
the table has a tile of this op's own ("rope", "norm+rope") that can take the call.

Where ``linear`` has no tile, or one that cannot rotate what the call wants rotated, and with QK-norm (which needs whole heads) or scales,
this op is those two, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tkernels._checks import checked
from tkernels._op import define
from tkernels._qkv_kernels import launch, takes
from tkernels._rope_kernels import launch as launch_rope
from tkernels._target import target_of
from tkernels.linear import MAX_ROWS, check, choose_with_norm, linear, linear_ref, streamable, streamed
from tkernels.rmsnorm import normalise
from tkernels.rope import check_cache, check_scale, check_table, check_tokens, check_weight, rope_and_cache, rope_and_cache_ref


class _Heads(NamedTuple):
    """How the rows of the weight are shared out; the caches say it."""

    query: int
    kv: int
    dim: int

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens, (query + 2 kv) · dim] → q, k, v [tokens, heads, dim], views."""
        return y.view(y.shape[0], self.query + 2 * self.kv, self.dim).split([self.query, self.kv, self.kv], 1)


def _heads(weight: torch.Tensor, k_cache: torch.Tensor) -> _Heads:
    kv, dim = k_cache.shape[2:]
    return _Heads(weight.shape[0] // dim - 2 * kv, kv, dim)


def linear_rope_and_cache_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The oracle: ``linear_ref``, then ``rope_and_cache_ref``."""
    q, k, v = _heads(weight, k_cache).split(linear_ref(x, weight, bias, norm_weight, eps=eps))
    return rope_and_cache_ref(
        q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, q_weight=q_weight, k_weight=k_weight, eps=eps,
        k_scale=k_scale, v_scale=v_scale, interleaved=interleaved, weight_offset=weight_offset,
    )  # fmt: skip


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> None:  # fmt: skip
    check(x, weight, bias, norm_weight)
    if x.dim() != 2:
        raise ValueError(f"x: expected [tokens, {weight.shape[1]}], got {list(x.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[3] == 0:
            raise ValueError(f"{name}: expected [pages, page_size, kv_heads, head_dim] with head_dim > 0, got {list(cache.shape)}")
        check_cache(name, cache, k_cache, x, "x")
    kv_heads, dim = k_cache.shape[2:]
    if weight.shape[0] % dim or weight.shape[0] < 2 * kv_heads * dim:
        raise ValueError(
            f"weight: expected (heads + 2 · {kv_heads}) · {dim} rows (kv_heads and head_dim of k_cache), got {list(weight.shape)}"
        )
    check_tokens("positions", positions, x, "x")
    check_tokens("slot_mapping", slot_mapping, x, "x")
    check_table(cos_sin, dim, x, "x")
    check_weight("q_weight", q_weight, dim, x, "x")
    check_weight("k_weight", k_weight, dim, x, "x")
    check_scale("k_scale", k_scale, kv_heads, x, "x")
    check_scale("v_scale", v_scale, kv_heads, x, "x")


def _fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, eps: float,
    positions: torch.Tensor, cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, interleaved: bool,
) -> torch.Tensor | None:  # fmt: skip
    """In one kernel, or two with a norm of its own; None where no tile takes the call."""
    (rows, k), n = x.shape, weight.shape[0]
    if not 0 < rows <= MAX_ROWS or not n or not streamable(x, weight, bias):
        return None
    for variant in ("rope", "plain"):  # where the rotation's own tile does not take the call, that of the projection may
        tile, norm_apart = choose_with_norm(target_of(x.device), x.dtype, variant, norm_weight is not None, rows, n, k)
        if tile is None:
            return None
        if takes(tile, x, weight, k_cache, v_cache, cos_sin.shape[1], interleaved):
            break
    else:
        return None
    if norm_weight is not None and norm_apart:
        x, norm_weight = normalise(x, norm_weight, eps), None
    heads = _heads(weight, k_cache)
    q = torch.empty((rows, heads.query, heads.dim), dtype=x.dtype, device=x.device)
    launch(x, weight, bias, norm_weight, eps, positions, cos_sin, k_cache, v_cache, slots, interleaved, q, tile)
    return q


def _linear_rope_and_cache(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    _check(
        x, weight, bias, norm_weight, positions, cos_sin, k_cache, v_cache, slot_mapping,
        q_weight=q_weight, k_weight=k_weight, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if q_weight is None and k_weight is None and k_scale is None and v_scale is None:
        q = _fused(x, weight, bias, norm_weight, eps, positions, cos_sin, k_cache, v_cache, slot_mapping, interleaved)
        if q is not None:
            return q
    heads = _heads(weight, k_cache)
    y = streamed(x, weight, bias, norm_weight, eps=eps)
    if y is not None:  # the kernel rather than the op, so that this call only launches and is repeated as a whole
        q, k, v = heads.split(y)
        return launch_rope(
            q, k, v, positions, cos_sin, None, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps, weight_offset, k_scale, v_scale,
            interleaved,
        )  # fmt: skip
    q, k, v = heads.split(linear(x, weight, bias, norm_weight=norm_weight, eps=eps))
    return rope_and_cache(
        q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, q_weight=q_weight, k_weight=k_weight, eps=eps,
        k_scale=k_scale, v_scale=v_scale, interleaved=interleaved, weight_offset=weight_offset,
    )  # fmt: skip


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: object, norm_weight: object, positions: object, cos_sin: object,
          k_cache: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:  # fmt: skip
    heads = _heads(weight, k_cache)
    return torch.empty((x.shape[0], heads.query, heads.dim), dtype=x.dtype, device=x.device)


_op = define(
    "linear_rope_and_cache(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor positions, Tensor cos_sin, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6, "
    "Tensor? k_scale=None, Tensor? v_scale=None, bool interleaved=False, float weight_offset=0.0) -> Tensor",
    kernel=_linear_rope_and_cache,
    reference=checked(_check, linear_rope_and_cache_ref),
    fake=_fake,
)


def linear_rope_and_cache(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None, positions: torch.Tensor,
    cos_sin: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, *,
    q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 1e-6,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, interleaved: bool = False, weight_offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """``linear`` to q, k and v, then ``rope_and_cache``: one kernel for few rows. Returns the rotated q.

    x: [tokens, in_features] fp16, bf16 or fp32; no memory of the caches, which are written while it is read.
    weight: [(heads + 2 · kv_heads) · head_dim, in_features] like x, its rows those of q, k, v; kv_heads and head_dim are the caches'.
    bias: like weight's first dimension, or None. norm_weight: [in_features] or None; x is RMS-normalised first.
    positions: [tokens] int64; one outside the table gives NaN. cos_sin: [max_positions, rot_dim] fp32, cos then sin.
    k_cache, v_cache: [pages, page_size, kv_heads, head_dim] fp16, bf16, fp32 or e4m3, any strides with the last one 1. Mutated.
    slot_mapping: [tokens] int64, page * page_size + offset; a slot outside the cache (−1: padding) writes nothing.
    q_weight, k_weight, weight_offset, k_scale, v_scale, interleaved: as in ``rope_and_cache``. eps: of all norms, added to the mean square.
    Returns [tokens, heads, head_dim] like x, contiguous; rounded after the projection and after the rotation.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _op(
        x, weight, bias, norm_weight, positions, cos_sin, k_cache, v_cache, slot_mapping, q_weight=q_weight, k_weight=k_weight, eps=eps,
        k_scale=k_scale, v_scale=v_scale, interleaved=interleaved, weight_offset=weight_offset,
    )  # fmt: skip
