"""Cascade attention: a prefix that all sequences share is read once for the batch instead of once per sequence.

The queries of all sequences attend to the shared pages with no mask, since the prefix lies before every one of them; each sequence
attends to its own pages; the two are merged by their LSE. Three launches where a step decodes: the own part, the prefix with its keys
split over the device (prefix.py), the merge of all its states. Tokens that fill half of the device by themselves see the prefix as
one sequence of ``paged_attention`` instead. There is no window: it would cut the prefix. Every launch
depends on shapes only: capturable in a full graph. Unlike ``paged_attention``'s, the bits of a request depend on how many tokens the
batch has, since that says how the prefix is split.

In the own part ``seq_lens`` and ``block_table`` count from the end of the prefix.

Source: arXiv 2402.05099, arXiv 2501.01005.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._target import target_of
from tkernels.attention._inputs import Inputs, check_capacity, check_inputs
from tkernels.attention._tiles import prefill_tiles
from tkernels.attention.merge import merge
from tkernels.attention.paged import launch, scale_of_logits, split_scale
from tkernels.attention.prefix import prefix, splits_of
from tkernels.attention.ref import Scale, merge_attention_ref, output_dtype, paged_attention_ref

Optional = torch.Tensor | None


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, shared_block_table: torch.Tensor, shared_len: torch.Tensor,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, scale: float, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float,
) -> Inputs:  # fmt: skip
    """The checked arguments of the own part; of the shared one there are two more."""
    inputs = check_inputs(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, True, 0, softcap, sinks, k_scale, v_scale, v_factor
    )
    if shared_block_table.dim() != 2 or shared_block_table.shape[0] != 1:
        raise ValueError(f"shared_block_table: expected [max_pages] or [1, max_pages], got {list(shared_block_table.shape)}")
    if shared_len.shape != (1,):
        raise ValueError(f"shared_len: expected [1], a tensor on the device, got {list(shared_len.shape)}")
    check_capacity("shared_block_table", shared_block_table, inputs.page_size)
    for name, index in (("shared_block_table", shared_block_table), ("shared_len", shared_len)):
        _checks.check_dtype(name, index, torch.int32, "like block_table")
        _checks.check_last_stride(name, index)
        _checks.check_device(name, index, q, "q")
    return inputs


def _everyone(cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """One sequence that owns the query rows of all; rows past the last one stay outside of it, so they come out empty."""
    return torch.cat((cu_seqlens_q[:1], cu_seqlens_q[-1:]))


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, shared_block_table: torch.Tensor, shared_len: torch.Tensor,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    own = _check(
        q, k_cache, v_cache, shared_block_table, shared_len, block_table, seq_lens, cu_seqlens_q, scale, softcap, sinks,
        k_scale, v_scale, v_factor,
    )  # fmt: skip
    out, lse = _fake(q)
    launch(own, out, lse, max_query_len)
    tokens = q.shape[0]
    if tokens == 0 or own.num_seqs == 0:
        return out, lse
    capacity = shared_block_table.shape[1] * own.page_size
    table, stride = (shared_block_table, shared_block_table.stride(0)) if capacity else (shared_len, 0)
    target = target_of(q.device)
    tiles = prefill_tiles(target.arch, own.dim, k_cache.element_size())
    splits = splits_of(tiles, target.num_sms, tokens, own.heads, own.kv_heads, capacity)
    if splits:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lses = torch.empty((splits, *q.shape[:2]), dtype=torch.float32, device=q.device)
        prefix(own, tiles, table, shared_len, capacity, parts, lses)
    else:
        parts, lses = _fake(q)
        everyone = own._replace(
            seq_lens=shared_len, cu_seqlens_q=_everyone(cu_seqlens_q), causal=False, sinks=None, num_seqs=1, capacity=capacity,
            table=table, stride_table=stride,
        )  # fmt: skip
        launch(everyone, parts, lses, tokens)
    # a padding row (its own length 0) has no prefix either
    return merge(out, lse, parts, lses, a_decides=True)


def _attend_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, shared_block_table: torch.Tensor, shared_len: torch.Tensor,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(
        q, k_cache, v_cache, shared_block_table, shared_len, block_table, seq_lens, cu_seqlens_q, scale, softcap, sinks,
        k_scale, v_scale, v_factor,
    )  # fmt: skip
    v_all = v_factor if v_scale is None else v_scale * v_factor
    out, lse = paged_attention_ref(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=scale, max_query_len=max_query_len, softcap=softcap, sinks=sinks,
        k_scale=k_scale, v_scale=v_all,
    )  # fmt: skip
    part, part_lse = paged_attention_ref(
        q, k_cache, v_cache, shared_block_table, shared_len, _everyone(cu_seqlens_q), scale=scale, causal=False, softcap=softcap,
        k_scale=k_scale, v_scale=v_all,
    )  # fmt: skip
    return merge_attention_ref(out, lse, part, part_lse.masked_fill(torch.isneginf(lse), float("-inf")))


def _fake(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape, dtype=output_dtype(q.dtype), device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


_cascade_attention_op = define(
    "cascade_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor shared_block_table, Tensor shared_len, Tensor block_table, "
    "Tensor seq_lens, Tensor cu_seqlens_q, float scale, SymInt max_query_len, float softcap, Tensor? sinks, Tensor? k_scale, "
    "Tensor? v_scale, float v_factor) -> (Tensor, Tensor)",
    kernel=_attend,
    reference=_attend_ref,
    fake=_fake,
)


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

    shared_block_table: [max_shared_pages] or [1, max_shared_pages] int32; entries past the prefix are not read. shared_len: [1] int32,
        keys of the prefix, cut at ``max_shared_pages · page_size``; 0: none. A graph that was captured with a wide table is right, and
        as fast as a narrow one's but for merging states, for every length up to that.
    block_table: [seqs, max_pages] int32 and seq_lens: [seqs] int32, the pages and keys after the prefix, query tokens included;
        0 marks a padding row. The rest as in ``paged_attention``, whose equation this computes over prefix and own keys.
    Returns out [tokens, heads, dim] like q (bf16 for e4m3 queries), with return_lse also the LSE [tokens, heads] fp32. Takes up to
    2 · multiprocessors · 128 · dim floats of workspace. Raises ValueError or TypeError naming the argument that is wrong.
    """
    k_tensor, k_factor = split_scale("k_scale", k_scale)
    v_tensor, v_factor = split_scale("v_scale", v_scale)
    if shared_block_table.dim() == 1:
        shared_block_table = shared_block_table[None]
    out, lse = _cascade_attention_op(
        q, k_cache, v_cache, shared_block_table, shared_len, block_table, seq_lens, cu_seqlens_q, scale_of_logits(scale, k_factor),
        max_query_len, softcap, sinks, k_tensor, v_tensor, v_factor,
    )  # fmt: skip
    return (out, lse) if return_lse else out
