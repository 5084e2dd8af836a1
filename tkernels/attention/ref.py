"""The one oracle of paged attention, in plain PyTorch.

    out[t, h] = Σ_k softmax_k(cap(scale · k_scale · q[t, h] · K[k, h])) · V[k, h] · v_scale,   cap(x) = softcap · tanh(x / softcap)
    lse[t, h] = log Σ_k exp(cap(…)),   natural logarithm

A sequence s has the queries ``cu_seqlens_q[s] : cu_seqlens_q[s + 1]``, which are the *last* tokens of its ``seq_lens[s]`` keys
(lower-right alignment): query j stands at position ``p = seq_lens[s] - query_len + j``. Causal: it sees the keys ``0 .. p``.
With a window it sees ``p - window + 1 .. p``: ``window`` keys, its own included. Not causal: all ``seq_lens[s]`` keys.
A sink adds ``exp(sinks[h])`` to the denominator, so it is part of the LSE, and nothing to the numerator.

A query that sees no key gives zero and an LSE of -inf (log of the sink alone, if there is one and the sequence is not empty).
Rows at and past ``cu_seqlens_q[-1]`` are zero, with an LSE of -inf.

Source: arXiv 1706.03762; the paged cache: arXiv 2309.06180; the window: arXiv 2004.05150; soft-cap: arXiv 2408.00118; sinks as learned
logits: arXiv 2508.10925.

It is also what the CPU runs without the interpreter, hence a loop over sequences with matrix products inside, not over keys.
"""

from __future__ import annotations

import torch

Scale = torch.Tensor | float | None


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the output for queries of ``dtype``: theirs, but bf16 for e4m3, whose three bits of mantissa are for products, not for results."""
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def paged_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    max_query_len: int | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out like q, bf16 if q is e4m3; lse [tokens, heads]). Computed in fp32, or in fp64 when q is fp64; rounded once.

    q: [tokens, heads, dim]. k_cache, v_cache: [pages, page_size, kv_heads, dim], any strides.
    block_table: [seqs, max_pages] int32. seq_lens: [seqs] int32. cu_seqlens_q: [seqs + 1] int32.
    scale, softcap: unitless (softcap 0: none). window: keys. sinks: [heads], logits. k_scale, v_scale: number, [] or [1] or [kv_heads].
    max_query_len: checked against cu_seqlens_q when given. A length beyond the table is cut at ``max_pages · page_size``.
    """
    tokens, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    wide = _wide(q.dtype)
    out = q.new_zeros(tokens, heads, dim, dtype=output_dtype(q.dtype))
    lse = torch.full((tokens, heads), float("-inf"), dtype=wide, device=q.device)
    lens = seq_lens.clamp(0, block_table.shape[1] * page_size).tolist()
    starts = cu_seqlens_q.tolist()
    for s, length in enumerate(lens):
        first, last = starts[s], starts[s + 1]
        query_len = last - first
        if max_query_len is not None and query_len > max(max_query_len, 1):
            raise ValueError(f"max_query_len: expected at least {query_len}, the query length of sequence {s}, got {max_query_len}")
        if query_len <= 0 or length == 0:
            continue
        offset = length - query_len  # position of the first query
        low = max(offset - window + 1, 0) if window else 0  # the first key that any query of this sequence sees
        low_page = low // page_size
        pages = block_table[s, low_page : -(-length // page_size)].long()
        # [kv_heads, keys, dim]
        k = k_cache[pages].flatten(0, 1)[low - low_page * page_size : length - low_page * page_size].to(wide).transpose(0, 1)
        v = v_cache[pages].flatten(0, 1)[low - low_page * page_size : length - low_page * page_size].to(wide).transpose(0, 1)
        queries = q[first:last].to(wide).view(query_len, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, query_len * group, dim)
        logits = (queries @ k.transpose(1, 2)) * _per_head(k_scale, scale, wide)  # [kv_heads, query_len * group, keys]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal and (query_len > 1 or window or offset < 0):
            keys = torch.arange(low, length, device=q.device)
            position = torch.arange(offset, length, device=q.device)[:, None]
            hidden = keys > position
            if window:
                hidden |= keys <= position - window
            logits.view(kv_heads, query_len, group, -1).masked_fill_(hidden[:, None, :], float("-inf"))
        row_lse = torch.logsumexp(logits, -1)  # [kv_heads, query_len * group]
        if sinks is not None:
            row_lse = torch.logaddexp(row_lse, sinks.to(wide).view(kv_heads, 1, group).expand(-1, query_len, -1).reshape(kv_heads, -1))
        weights = torch.exp(logits - row_lse.masked_fill(row_lse == float("-inf"), 0.0)[..., None])
        result = (weights @ v) * _per_head(v_scale, 1.0, wide)
        out[first:last] = result.view(kv_heads, query_len, group, dim).transpose(0, 1).reshape(query_len, heads, dim).to(out.dtype)
        lse[first:last] = row_lse.view(kv_heads, query_len, group).transpose(0, 1).reshape(query_len, heads)
    return out, lse


def merge_attention_ref(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets from the attention over each; -inf marks an empty set.

    out_a: [tokens, heads, dim]; lse_a: [tokens, heads] natural log; out_b and lse_b like them, or with a dimension of states before.
    Returns (out like out_a, lse like lse_a).
    """
    wide = _wide(out_a.dtype)
    if out_b.dim() == out_a.dim():
        out_b, lse_b = out_b[None], lse_b[None]
    outs = torch.cat((out_a[None].to(wide), out_b.to(wide)))
    lses = torch.cat((lse_a[None].to(wide), lse_b.to(wide)))
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))[..., None]
    # a weight of zero takes nothing, not 0 · NaN, from an empty set's unwritten rows
    out = torch.where(weights == 0, 0.0, outs * weights).sum(0)
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _per_head(scale: Scale, factor: float, dtype: torch.dtype) -> torch.Tensor | float:
    """``scale · factor``, shaped to multiply [kv_heads, rows, columns]."""
    if scale is None:
        return factor
    if isinstance(scale, torch.Tensor):
        return scale.to(dtype).reshape(-1, 1, 1) * factor
    return scale * factor
