"""The last projection and the greedy choice in one: the logits are never written.

    token = argmax over n of (norm(x) · weightᵀ)[n]

The projection is the kernel, and the tile, that ``linear`` takes for the same call, and the choice compares what ``linear`` would
have stored, rounded to x's dtype. So the token is the argmax of ``linear``'s result, bit for bit, the lowest id among equals. Each
program keeps the largest of its outputs per row, value and id packed into one integer; a second kernel, one program a row, takes
the largest of these. Where ``linear`` itself goes to cuBLAS, the logits are written after all.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._linear_kernels import launch
from tkernels._op import define
from tkernels._target import target_of
from tkernels._triton import cdiv, tl, triton
from tkernels.linear import MAX_ROWS, check, choose_with_norm, linear, linear_ref, streamable
from tkernels.rmsnorm import normalise

_BLOCK = 1024


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits.isnan(), -float("inf"), logits).argmax(-1)  # the first of equals


def linear_argmax_ref(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """The oracle: the logits, then their first maximum."""
    return _greedy(linear_ref(x, weight, norm_weight=norm_weight, eps=eps))


@triton.jit(do_not_specialize=["rows"])
def _best_kernel(keys_ptr, tokens_ptr, rows, num_keys, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    start = 0
    while start < num_keys:
        at = start + offs
        best = tl.maximum(best, tl.load(keys_ptr + at.to(tl.int64) * rows + row, mask=at < num_keys, other=-0x7FFFFFFFFFFFFFFF))
        start += BLOCK
    tl.store(tokens_ptr + row, 0xFFFFFFFF - (tl.max(best, 0) & 0xFFFFFFFF))


def _check(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6) -> None:
    if weight.dim() != 2 or not weight.shape[0]:
        raise ValueError(f"weight: expected [vocab, in_features] with a vocab of at least 1, got {list(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x: expected [rows, {weight.shape[1]}] like weight's last dimension, got {list(x.shape)}")
    check(x, weight, norm_weight=norm_weight)


def _linear_argmax(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    _check(x, weight, norm_weight, eps)
    (rows, k), n = x.shape, weight.shape[0]
    tile = None
    if 0 < rows <= MAX_ROWS and streamable(x, weight):
        tile, norm_apart = choose_with_norm(target_of(x.device), x.dtype, "plain", norm_weight is not None, rows, n, k)
        tile = None if tile is not None and tile.kind == "tma" else tile  # it keeps no largest output
        if norm_weight is not None and tile is not None and norm_apart:
            x, norm_weight = normalise(x, norm_weight, eps), None
    if tile is None:
        return _greedy(linear(x, weight, norm_weight=norm_weight, eps=eps))
    num_keys = cdiv(n, tile.block_n)
    keys = torch.empty((num_keys, rows), dtype=torch.int64, device=x.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=x.device)
    launch(x, weight, None, norm_weight, None, False, eps, keys, tile)
    _best_kernel[(rows,)](keys, tokens, rows, num_keys, BLOCK=_BLOCK, num_warps=4)
    return tokens


_op = define(
    "linear_argmax(Tensor x, Tensor weight, Tensor? norm_weight=None, float eps=1e-6) -> Tensor",
    kernel=_linear_argmax,
    reference=_checks.checked(_check, linear_argmax_ref),
    fake=lambda x, *args, **kwargs: torch.empty(x.shape[0], dtype=torch.int64, device=x.device),
)


def linear_argmax(x: torch.Tensor, weight: torch.Tensor, *, norm_weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """The greedy token of each row, ``linear(x, weight, norm_weight=…)`` without its logits in memory; safe in a CUDA graph.

    x: [rows, in_features] fp16, bf16 or fp32. weight: [vocab, in_features], like x. norm_weight: [in_features]; x is RMS-normalised
    first, ``eps`` added to its mean square.
    Returns [rows] int64, the lowest id among equals after rounding to x's dtype. A NaN logit counts as −∞; a row of nothing else gives 0.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _op(x, weight, norm_weight, eps)
