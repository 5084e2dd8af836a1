"""The attention of transformers models, through its two public interfaces: one makes the mask of a step, one attends in each layer.

A causal mask with padding, whatever the window, is two numbers a row: where its keys begin, and how many there are. So
``key_rows`` returns them instead of a [batch, 1, queries, keys] matrix: int32 [1, 1, 2, batch], ``starts`` and ``lengths``, in terms
of the key tensor that the layer will see. It is four-dimensional because transformers hands 4-D masks through unread.

Any other mask (a hole between tokens, packed sequences, a 4-D mask of the caller's, a bidirectional prefix) stays a matrix, and
attention with it runs as transformers does it, through SDPA or, with a soft-cap or sinks, the equation. That is never silent: it
warns once per reason, and ``PatchReport.dense_attention_calls`` counts it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tkernels.attention import PaddedLayout, padded_attention, padded_layout

ATTENTION = "tkernels"  # the name in model.config._attn_implementation


class DenseAttentionWarning(UserWarning):
    """A mask that the kernels do not take: attention runs as transformers does it."""


def _warn(reason: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"attention with {reason} runs through transformers' SDPA, not through a kernel of this package; it is right, but not faster",
            DenseAttentionWarning,
            stacklevel=3,
        )


def _may_sync(device: torch.device | str) -> bool:
    """Whether the host may look at device values now: not while tracing or capturing."""
    if torch.compiler.is_compiling():
        return False
    return torch.device(device).type != "cuda" or not torch.cuda.is_current_stream_capturing()


def key_rows(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """The mask function of ``AttentionMaskInterface``. attention_mask: [batch, positions] bool, true for tokens.

    Returns [1, 1, 2, batch] int32 (starts, lengths), or transformers' boolean [batch, 1, q_length, kv_length] for other masks.
    Without padding it costs two launches and no look at the device beyond the one that transformers' own mask takes.
    """
    config = kwargs.get("config")
    # transformers forbids the skip when it changed the causal function (packed sequences, token types), and for compiled decode,
    # where one query has nothing to overlay. A local size that is not the model's window is chunked attention.
    plain = (
        not use_vmap
        and (allow_is_causal_skip or q_length == 1)
        and not kwargs.get("allow_is_bidirectional_skip", False)
        and (local_size is None or local_size == getattr(config, "sliding_window", None))
        and getattr(config, "attention_chunk_size", None) is None
    )
    rows: torch.Tensor | None = None
    reason = "a mask that is not causal with padding (packed sequences, bidirectional or token-type overlays)"
    if plain:
        rows = _rows(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
        reason = "an attention_mask that has padding between tokens of one row"
    if rows is not None:
        return rows
    _warn(reason)
    mask = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, use_vmap=use_vmap,  # type: ignore[arg-type]
        allow_is_causal_skip=False, device=device, **{**kwargs, "allow_is_bidirectional_skip": False},
    )  # fmt: skip
    assert mask is not None
    return mask


def _rows(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
) -> torch.Tensor | None:
    """(starts, lengths), or None where a row has a hole."""
    end = q_offset + q_length - kv_offset  # of the keys, in the layer's key tensor
    rows = torch.zeros((1, 1, 2, batch), dtype=torch.int32, device=device)
    rows[:, :, 1] = end
    if attention_mask is None:
        return _whole(rows, end, kv_length)
    live = attention_mask[:, kv_offset : kv_offset + kv_length]
    if isinstance(end, int) and live.shape[1] < end:
        raise ValueError(
            f"attention_mask: expected {end + kv_offset} columns (cached tokens and new ones), got {list(attention_mask.shape)}"
        )
    if _may_sync(device) and bool(live.all()):
        return _whole(rows, end, kv_length)
    columns = torch.arange(live.shape[1], dtype=torch.int32, device=device)
    live = live & (columns < end)
    # A row of padding alone begins at the end: no keys. Padding after the last token hides from its queries by causality.
    starts = torch.where(live, columns, end).amin(1)
    lasts = torch.where(live, columns, -1).amax(1)
    holes = (lasts >= 0) & (lasts - starts + 1 != live.sum(1))
    if not _may_sync(device):
        # A captured or compiled step cannot change its path; wrong numbers must not come out of it either.
        torch._assert_async(~holes.any(), "tkernels.hf: attention_mask has padding between tokens, which a captured step cannot take")
    elif bool(holes.any()):
        return None
    rows[0, 0, 0] = starts
    rows[0, 0, 1] = end - starts
    return rows


def _whole(rows: torch.Tensor, end: int | torch.Tensor, kv_length: int) -> torch.Tensor:
    """rows, marked if the host knows that every row holds every key."""
    if not torch.compiler.is_compiling() and isinstance(end, int) and end == kv_length:
        rows.__dict__["_tkernels_whole"] = True
    return rows


def _layout(key: torch.Tensor, query_len: int, rows: torch.Tensor | None) -> PaddedLayout:
    """The layout of this step, made once for all layers whose keys lie alike; it lives as long as the mask of the step."""
    if rows is None:
        return padded_layout(key, query_len)
    starts, lengths = rows[0, 0, 0], rows[0, 0, 1]
    if torch.compiler.is_compiling():  # equal expressions of the layers are merged by the compiler
        return padded_layout(key, query_len, starts, lengths)
    known: dict[Any, PaddedLayout] = rows.__dict__.setdefault("_tkernels_layouts", {})
    lie = (key.shape[2], key.stride(0), key.stride(2), query_len)
    if lie not in known:
        known[lie] = padded_layout(key, query_len, starts, lengths)
    return known[lie]


def _lie_alike(key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        key.stride(3) == 1
        and value.stride(3) == 1
        and key.stride(0) % key.stride(2) == 0
        and value.stride(0) % value.stride(2) == 0
        and key.stride(0) // key.stride(2) == value.stride(0) // value.stride(2)
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of ``AttentionInterface``.

    query [batch, heads, queries, dim], key and value [batch, kv_heads, keys, dim] → [batch, queries, heads, dim].
    """
    if dropout:
        raise NotImplementedError(f"dropout: expected 0, the kernels are for inference, got {dropout}; call model.eval() or report.undo()")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window if causal else None
    dense = attention_mask is not None and attention_mask.dtype != torch.int32
    if dense or position_bias is not None or value.shape[-1] != key.shape[-1]:
        if attention_mask is None and causal:
            attention_mask = _rows(len(query), query.shape[2], key.shape[2], key.shape[2] - query.shape[2], 0, None, query.device)
        return _dense(module, query, key, value, attention_mask, scale, window, softcap, is_causal, s_aux, position_bias, kwargs), None
    if (
        query.shape[2] == 1
        and softcap is None
        and s_aux is None
        and (window is None or window >= key.shape[2])
        and attention_mask is not None
        and not torch.compiler.is_compiling()
        and "_tkernels_whole" in attention_mask.__dict__
    ):
        # One query that sees every key needs no mask, and torch's kernel for that is at the memory's pace as ours is, for a fifth of
        # the host's time, which sets the pace of eager decoding.
        out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2), None
    if not _lie_alike(key, value):
        key, value = key.contiguous(), value.contiguous()
    q = query.transpose(1, 2)
    out = padded_attention(
        q, key, value, _layout(key, q.shape[1], attention_mask), scale=scale, causal=causal, window=window,
        softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out, None


def _dense(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
    window: int | None, softcap: float | None, is_causal: bool | None, sinks: torch.Tensor | None, position_bias: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Attention with a mask matrix: [batch, queries, heads, dim]."""
    if not torch.compiler.is_compiling():
        report = getattr(module, "_tkernels_report", None)
        if report is not None:
            report.dense_attention_calls += 1
    if mask is not None and mask.dtype == torch.int32:  # (starts, lengths) beside a position bias: written out
        mask = _matrix(mask, query.shape[2], key.shape[2], window)
    if softcap is None and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scale, is_causal=is_causal, position_bias=position_bias, **kwargs
        )[0]  # fmt: skip
    group = query.shape[1] // key.shape[1]
    wide = query.float() @ key.float().repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if position_bias is not None:
        wide = wide + position_bias
    if mask is not None:
        wide = wide.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else wide + mask
    if sinks is not None:
        wide = torch.cat([wide, sinks.float().view(1, -1, 1, 1).expand(*wide.shape[:3], 1)], -1)
    weights = torch.softmax(wide, -1).nan_to_num(0.0)[..., : key.shape[2]]
    return (weights @ value.float().repeat_interleave(group, 1)).to(query.dtype).transpose(1, 2).contiguous()


def _matrix(rows: torch.Tensor, queries: int, keys: int, window: int | None) -> torch.Tensor:
    starts, ends = rows[0, 0, 0][:, None, None], (rows[0, 0, 0] + rows[0, 0, 1])[:, None, None]
    column = torch.arange(keys, device=rows.device)
    position = ends - queries + torch.arange(queries, device=rows.device)[:, None]
    seen = (column >= starts) & (column <= position)
    return (seen if window is None else seen & (column > position - window))[:, None]


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, key_rows)
