"""The arguments of paged attention, checked once on the host. Nothing here reads device memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tkernels import _checks
from tkernels._triton import tl
from tkernels.attention._common import FP8

_MAX_DIM = 256
MAX_PAGE = 256
MAX_SEQS = 8192  # a program holds all lengths in registers: 64 a thread
_MAX_KEYS = 1 << 30  # of a sequence: positions, windows and blocks that are read ahead stay within int32
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Inputs(NamedTuple):
    """Checked arguments, and what the launchers derive from them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    scale: float
    causal: bool
    window: int  # 0: none; at most _MAX_KEYS, beyond which no key lies
    softcap: float  # 0: none
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    v_factor: float
    k_scale_stride: int  # 0: one for all heads
    v_scale_stride: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    num_seqs: int
    capacity: int  # keys that a row of the table addresses; longer lengths are cut there
    compute: Any  # dtype of the matrix products
    normalise_q: bool
    same_strides: bool  # of k_cache and v_cache
    table: torch.Tensor  # where page ids are read: block_table, or where it has no columns a tensor that can be read and is not used
    stride_table: int


def check_inputs(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    v_factor: float,
) -> Inputs:
    """Raises ValueError or TypeError naming the argument, what was expected and what came."""
    if q.dtype not in _COMPUTE and q.dtype != FP8:
        raise TypeError(f"q: expected float16, bfloat16, float32 or float8_e4m3fn, got {_checks.describe(q)}")
    if q.dim() != 3:
        raise ValueError(f"q: expected [tokens, heads, dim], got {list(q.shape)}")
    _, heads, dim = q.shape
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache: expected [pages, page_size, kv_heads, dim], got {list(k_cache.shape)}")
    _, page_size, kv_heads, k_dim = k_cache.shape
    if not 0 < dim <= _MAX_DIM:
        raise ValueError(f"q: expected a head dimension of 1 to {_MAX_DIM}, got {list(q.shape)}")
    if k_dim != dim:
        raise ValueError(f"k_cache: expected a last dimension of {dim} like q's, got {list(k_cache.shape)}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: expected {list(k_cache.shape)} like k_cache, got {list(v_cache.shape)}")
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"q: expected a number of heads that is a multiple of the cache's {kv_heads} KV heads, got {heads}")
    if not 0 < page_size <= MAX_PAGE:
        raise ValueError(f"k_cache: expected a page size of 1 to {MAX_PAGE}, got {list(k_cache.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype and cache.dtype != FP8:
            expected = f"{str(q.dtype).removeprefix('torch.')} like q" + ("" if q.dtype == FP8 else ", or float8_e4m3fn")
            raise TypeError(f"{name}: expected {expected}, got {_checks.describe(cache)}")
        _checks.check_last_stride(name, cache)
        if page_size * cache.stride(1) >= 1 << 31:
            raise ValueError(f"{name}: expected a page to span fewer than 2**31 elements, got strides {list(cache.stride())}")
    _checks.check_last_stride("q", q)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: expected {k_cache.dtype} like k_cache, got {v_cache.dtype}")
    num_seqs = seq_lens.shape[0] if seq_lens.dim() == 1 else -1
    if not 0 <= num_seqs <= MAX_SEQS:
        raise ValueError(f"seq_lens: expected [seqs] with at most {MAX_SEQS} sequences, got {list(seq_lens.shape)}")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] != num_seqs + 1:
        raise ValueError(f"cu_seqlens_q: expected [{num_seqs + 1}], one more than seq_lens, got {list(cu_seqlens_q.shape)}")
    if block_table.dim() != 2 or block_table.shape[0] != num_seqs:
        raise ValueError(f"block_table: expected [{num_seqs}, max_pages], a row per sequence, got {list(block_table.shape)}")
    check_capacity("block_table", block_table, page_size)
    for name, index in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if index.dtype != torch.int32:
            raise TypeError(f"{name}: expected int32, got {_checks.describe(index)}")
        _checks.check_last_stride(name, index)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap: expected 0 (none) or a positive number, got {softcap}")
    if window < 0:
        raise ValueError(f"window: expected None or a number of keys of at least 1, got {window}")
    if window and not causal:
        raise ValueError("window: expected causal=True with it, got causal=False; a window looks back from each query")
    if sinks is not None:
        _checks.check_shape("sinks", sinks, (heads,), "one logit per query head")
        _checks.check_float("sinks", sinks)
        _checks.check_last_stride("sinks", sinks)
    for name, tensor in (
        ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table), ("seq_lens", seq_lens),
        ("cu_seqlens_q", cu_seqlens_q), ("sinks", sinks), ("k_scale", k_scale), ("v_scale", v_scale),
    ):  # fmt: skip
        if tensor is not None and tensor.device != q.device:
            _checks.check_device(name, tensor, q, "q")
    fp8 = k_cache.dtype == FP8
    # fp8 is multiplied in fp16, which holds every e4m3 value exactly
    compute = _COMPUTE[torch.float16 if fp8 and q.dtype != torch.float32 else q.dtype]
    return Inputs(
        q, k_cache, v_cache, seq_lens, cu_seqlens_q, scale, causal, min(window, _MAX_KEYS), softcap, sinks,
        k_scale, v_scale, v_factor, _scale_stride("k_scale", k_scale, kv_heads), _scale_stride("v_scale", v_scale, kv_heads),
        heads, kv_heads, dim, page_size, num_seqs, block_table.shape[1] * page_size, compute, fp8 and q.dtype != torch.float32,
        k_cache.stride() == v_cache.stride(), *((block_table, block_table.stride(0)) if block_table.shape[1] else (seq_lens, 0)),
    )  # fmt: skip


def check_capacity(name: str, table: torch.Tensor, page_size: int) -> None:
    if table.shape[1] * page_size > _MAX_KEYS:
        raise ValueError(
            f"{name}: expected rows of at most {_MAX_KEYS} keys, got {table.shape[1]} pages of {page_size}; pass fewer columns"
        )


def _scale_stride(name: str, scale: torch.Tensor | None, kv_heads: int) -> int:
    if scale is None:
        return 0
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {_checks.describe(scale)}")
    if scale.numel() == 1:
        return 0
    if scale.dim() != 1 or scale.shape[0] != kv_heads:
        raise ValueError(f"{name}: expected a number, or a tensor [], [1] or [{kv_heads}] (one per KV head), got {list(scale.shape)}")
    return scale.stride(0)
