"""Cascade attention: a prefix that all sequences share is read once for the batch instead of once per sequence.

The queries of all sequences attend to the shared pages as if they were one sequence of ``tokens`` queries, with no mask, since the
prefix lies before every one of them; then each sequence attends to its own pages; the two are merged by their LSE. The window, if
there is one, must not reach into the prefix, so it is refused. Every launch depends on shapes only: capturable in a full graph. Unlike
``paged_attention``'s, the bits of a request depend on how many tokens the batch has, since these are the queries of one sequence here.

In the own part ``seq_lens`` and ``block_table`` count from the end of the prefix.

Source: arXiv 2402.05099, arXiv 2501.01005.
"""

from __future__ import annotations

import torch

from tkernels.attention.merge import merge_attention
from tkernels.attention.paged import paged_attention
from tkernels.attention.ref import Scale


def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shared_block_table: torch.Tensor,
    shared_len: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of sequences whose first ``shared_len`` keys are the same pages.

    shared_block_table: [max_shared_pages] or [1, max_shared_pages] int32. shared_len: [1] int32, keys of the prefix; 0: none.
    block_table: [seqs, max_pages] int32 and seq_lens: [seqs] int32, the pages and keys after the prefix, query tokens included;
        0 marks a padding row. The rest as in ``paged_attention``, whose equation this computes over prefix and own keys.
    Returns out [tokens, heads, dim] like q. Raises ValueError or TypeError naming the argument that is wrong.
    """
    if shared_block_table.dim() == 1:
        shared_block_table = shared_block_table[None]
    if shared_block_table.shape[0] != 1:
        raise ValueError(f"shared_block_table: expected [max_pages] or [1, max_pages], got {list(shared_block_table.shape)}")
    if shared_len.shape != (1,):
        raise ValueError(f"shared_len: expected [1], a tensor on the device, got {list(shared_len.shape)}")
    own_out, own_lse = paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=scale, max_query_len=max_query_len, softcap=softcap,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale, return_lse=True,
    )  # fmt: skip
    # one sequence that owns the query rows of all sequences; rows past the last one stay outside of it, so they come out empty
    everyone = torch.cat((cu_seqlens_q[:1], cu_seqlens_q[-1:]))
    shared_out, shared_lse = paged_attention(
        q, k_cache, v_cache, shared_block_table, shared_len, everyone, scale=scale, max_query_len=q.shape[0], causal=False,
        softcap=softcap, k_scale=k_scale, v_scale=v_scale, return_lse=True,
    )  # fmt: skip
    # a padding row (its own length 0) has no prefix either
    padding = torch.isneginf(own_lse)
    out, lse = merge_attention(own_out, own_lse, shared_out, shared_lse.masked_fill(padding, float("-inf")))
    return (out, lse) if return_lse else out
