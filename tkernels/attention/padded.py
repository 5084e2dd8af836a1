"""Attention over one contiguous [batch, kv_heads, keys, dim] tensor per layer: the caches of transformers, without a copy.

The paged kernels read such a tensor as it lies. A page is _PAGE tokens of one row, pages may begin at any token, so the "page id" is
the number of the token it begins with, counted in token strides from the start of the tensor, and the page stride is one token:

    block_table[b, i] = b · (stride_b / stride_token) + starts[b] + i · _PAGE

so row b holds the keys ``starts[b] .. starts[b] + lengths[b]`` (left padding, or a static cache that is not full yet), and a block of
keys never spans two pages. The table depends on the strides of k alone: one per step serves every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention.decode import QUERY_LEN, decode
from tkernels.attention.prefill import prefill
from tkernels.attention.ref import paged_attention_ref

_PAGE = 128  # a multiple of every tile's BLOCK_N


class PaddedLayout(NamedTuple):
    """Where each row's keys lie: what ``padded_layout`` makes, once per step."""

    block_table: torch.Tensor  # [batch, pages] int32
    seq_lens: torch.Tensor  # [batch] int32
    cu_seqlens_q: torch.Tensor  # [batch + 1] int32


def _row_stride(name: str, x: torch.Tensor) -> int:
    """Distance of two rows of [batch, kv_heads, keys, dim], in tokens."""
    if x.shape[0] <= 1:
        return 0
    rows, rest = divmod(x.stride(0), x.stride(2))
    if rest:
        raise ValueError(
            f"{name}: expected a batch stride that is a multiple of the token stride, got {list(x.stride())}; call .contiguous()"
        )
    return rows


def padded_layout(k: torch.Tensor, query_len: int, starts: torch.Tensor | None = None, lengths: torch.Tensor | None = None) -> PaddedLayout:
    """The layout for ``padded_attention``. Plain tensor arithmetic without a sync, so it can be captured and compiled.

    k: [batch, kv_heads, keys, dim]; only its shape and strides matter. query_len: query tokens of every row.
    starts: [batch] int32, the first key of each row; None: 0. lengths: [batch] int32, how many; None: all from the start on.
    """
    batch, _, keys, _ = k.shape
    where = k.device
    rows = torch.arange(batch, dtype=torch.int32, device=where) * _row_stride("k", k)
    if starts is not None:
        rows = rows + starts
    pages = torch.arange(0, max(keys, 1), _PAGE, dtype=torch.int32, device=where)
    if lengths is None:
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=where)
        lengths = lengths if starts is None else lengths - starts
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=where) * query_len
    return PaddedLayout(rows[:, None] + pages[None, :], lengths, cu_seqlens_q)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dim() != 4:
        raise ValueError(f"q: expected [batch, query_len, heads, dim], got {list(q.shape)}")
    _checks.check_float("q", q)
    if k.dim() != 4 or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected [{q.shape[0]}, kv_heads, keys, {q.shape[3]}] (batch and dim of q), got {list(k.shape)}")
    _checks.check_shape("v", v, tuple(k.shape), "like k")
    for name, x in (("k", k), ("v", v)):
        _checks.check_dtype(name, x, q.dtype, "like q")
        _checks.check_device(name, x, q, "q")
        _checks.check_last_stride(name, x)
    if _row_stride("k", k) != _row_stride("v", v):
        raise ValueError(
            f"v: expected its rows to lie like k's {list(k.stride())}, got strides {list(v.stride())}; call .contiguous() on both"
        )
    if k.shape[0] * _row_stride("k", k) + k.shape[2] >= 2**31:
        raise ValueError(f"k: expected fewer than 2**31 tokens between its first and last row, got {list(k.shape)}")
    for name, x in (("k", k), ("v", v)):
        if _PAGE * x.stride(2) >= 2**31:
            raise ValueError(f"{name}: expected {_PAGE} tokens to span fewer than 2**31 elements, got strides {list(x.stride())}")


def _inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor,
    scale: float, causal: bool, window: int, softcap: float, sinks: torch.Tensor | None,
) -> Inputs:  # fmt: skip
    # one token seen as a page of one: the strides say the rest
    k_tokens, v_tokens = (x.as_strided((1, 1, x.shape[1], x.shape[3]), (x.stride(2), x.stride(2), x.stride(1), 1)) for x in (k, v))
    inputs = check_inputs(
        q.flatten(0, 1), k_tokens, v_tokens, block_table, seq_lens, cu_seqlens_q, scale, causal, window, softcap, sinks, None, None, 1.0
    )  # fmt: skip
    return inputs._replace(page_size=_PAGE, capacity=block_table.shape[1] * _PAGE)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor,
    scale: float, causal: bool, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    inputs = _inputs(q, k, v, block_table, seq_lens, cu_seqlens_q, scale, causal, window, softcap, sinks)
    if q.shape[1] > QUERY_LEN:
        prefill(inputs, out.flatten(0, 1), None, QUERY_LEN + 1)
    else:
        decode(inputs, out.flatten(0, 1), None, 1 if q.shape[1] == 1 else QUERY_LEN)
    return out


def padded_attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor,
    scale: float, causal: bool, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The oracle: each row's keys gathered into pages of one token, then the oracle of paged attention."""
    _check(q, k, v)
    batch, _, keys, _ = k.shape
    if q.numel() == 0 or keys == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _inputs(q, k, v, block_table, seq_lens, cu_seqlens_q, scale, causal, window, softcap, sinks)
    row = torch.arange(batch, device=q.device)[:, None]
    starts = block_table[:, :1] - row * _row_stride("k", k)
    tokens = row * keys + (starts + torch.arange(keys, device=q.device)[None, :]).clamp(0, keys - 1)  # past a row's end: not read
    k_pages, v_pages = (x.transpose(1, 2).flatten(0, 1)[:, None] for x in (k, v))  # [batch · keys, 1, kv_heads, dim]
    out, _ = paged_attention_ref(
        q.flatten(0, 1), k_pages, v_pages, tokens.to(torch.int32), seq_lens, cu_seqlens_q, scale=scale, causal=causal,
        window=window or None, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return out.view(q.shape)


_padded_attention_op = define(
    "padded_attention(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, float scale, bool causal, "
    "int window, float softcap, Tensor? sinks) -> Tensor",
    kernel=_attend,
    reference=padded_attention_ref,
    fake=lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    tags=(torch.Tag.needs_exact_strides,),  # the block table was computed from k's
)


def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PaddedLayout | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a padded batch over contiguous keys and values, by the plain Triton kernels (and conventions) of ``paged_attention``.

    q: [batch, query_len, heads, dim] fp16, bf16 or fp32, last stride 1; the last query_len tokens of each row.
    k, v: [batch, kv_heads, keys, dim] like q, by strides, both alike in how rows follow each other; heads a multiple of kv_heads.
    layout: of ``padded_layout(k, query_len, starts, lengths)``; None: every row holds all keys.
    scale, causal, window, softcap, sinks: as in ``paged_attention``. A query before its row's first key gives zero.
    Returns [batch, query_len, heads, dim] like q, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    """
    if layout is None:
        _check(q, k, v)
        layout = padded_layout(k, q.shape[1])
    if window is not None and window < 1:
        raise ValueError(f"window: expected None or a number of keys of at least 1, got {window}")
    return _padded_attention_op(q, k, v, *layout, scale, causal, window or 0, softcap, sinks)
