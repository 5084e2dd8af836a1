"""Sample calls of every op in ``torch.ops.tkernels``, for the contract tests. A new op adds one entry.

``SAMPLES[name](device)`` returns a list of ``(args, kwargs)``: contiguous, strided and empty inputs, small. The first call is also
compiled. Each call builds fresh tensors: ops may write into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import column_slice

import tkernels.attention.padded

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _rows(device: torch.device, width: int) -> list[torch.Tensor]:
    """Contiguous, a column slice, two dimensions that do not fold, one row, none."""
    x = torch.randn(3, 4, width, device=device)
    return [x[0], column_slice(x[0]), column_slice(x)[:, :3], x[:1, 0], x[0, :0]]


def rms_norm(device: torch.device) -> list[Call]:
    return [((x, torch.randn(24, device=device), 1e-6), {}) for x in _rows(device, 24)]


def add_rms_norm(device: torch.device) -> list[Call]:
    return [((x, y, torch.randn(24, device=device), 1e-6), {}) for x, y in zip(_rows(device, 24), _rows(device, 24), strict=True)]


def silu_and_mul(device: torch.device) -> list[Call]:
    return [((x,), {}) for x in _rows(device, 24)]


def gelu_and_mul(device: torch.device) -> list[Call]:
    return [((x, approximate), {}) for x in _rows(device, 24) for approximate in ("tanh", "none")]


def silu_mul(device: torch.device) -> list[Call]:
    return [((x, y), {}) for x, y in zip(_rows(device, 24), _rows(device, 24), strict=True)]


def layer_norm(device: torch.device) -> list[Call]:
    weight, bias = torch.randn(24, device=device), torch.randn(24, device=device)
    return [((x, weight, bias if i % 2 else None, 1e-5), {}) for i, x in enumerate(_rows(device, 24))]


def quantize_fp8(device: torch.device) -> list[Call]:
    return [((x, torch.tensor([0.5], device=device)), {}) for x in _rows(device, 24)]


def quantize_fp8_dynamic(device: torch.device) -> list[Call]:
    return [((x, block), {}) for x, block in zip(_rows(device, 24), (0, 16, 0, 16, 16), strict=True)]


def rms_norm_fp8(device: torch.device) -> list[Call]:
    return [((x, torch.randn(24, device=device), torch.tensor([0.5], device=device), 1e-6), {}) for x in _rows(device, 24)]


def rms_norm_fp8_dynamic(device: torch.device) -> list[Call]:
    return [((x, torch.randn(24, device=device), 1e-6, block), {}) for (x, block), _ in quantize_fp8_dynamic(device)]


def add_rms_norm_fp8(device: torch.device) -> list[Call]:
    return [((x, x.clone(), *rest), {}) for (x, *rest), _ in rms_norm_fp8(device)]


def add_rms_norm_fp8_dynamic(device: torch.device) -> list[Call]:
    return [((x, x.clone(), *rest), {}) for (x, *rest), _ in rms_norm_fp8_dynamic(device)]


def silu_and_mul_fp8(device: torch.device) -> list[Call]:
    return quantize_fp8(device)


def silu_and_mul_fp8_dynamic(device: torch.device) -> list[Call]:
    return quantize_fp8_dynamic(device)


def embedding(device: torch.device) -> list[Call]:
    table, previous = column_slice(torch.randn(9, 24, device=device)), torch.tensor([5, 1], device=device)
    ids, source = torch.tensor([3, 0, 8, 3], device=device), torch.tensor([-1, 1, -1, 0], device=device)
    held: list[Call] = [((ids, table, source, previous), {}), ((ids[::2], table, source[::2], previous[:0]), {})]
    return [*held, *(((x, table), {}) for x in (ids, ids[::2], ids[:0]))]


def embedding_rms_norm(device: torch.device) -> list[Call]:
    table, weight = column_slice(torch.randn(9, 24, device=device)), torch.randn(24, device=device)
    ids = torch.tensor([3, 0, 8, 3], device=device)
    return [((x, table, weight, 1e-6), {}) for x in (ids, ids[::2], ids[:0])]


def gelu_mul(device: torch.device) -> list[Call]:
    return [((x, y, "none"), {}) for x, y in zip(_rows(device, 24), _rows(device, 24), strict=True)]


def linear(device: torch.device) -> list[Call]:
    weight, bias = torch.randn(8, 24, device=device), torch.randn(8, device=device)
    calls: list[Call] = [
        ((x, weight, bias), {}) for x in (torch.randn(3, 24, device=device), column_slice(torch.randn(3, 24, device=device)))
    ]
    calls.append(
        ((torch.randn(2, 24, device=device), weight, None, torch.randn(24, device=device), torch.randn(2, 4, device=device), True), {})
    )
    return [*calls, ((torch.randn(0, 24, device=device), weight), {})]


def _attention_inputs(device: torch.device, query_lens: list[int]) -> tuple[torch.Tensor, ...]:
    """Two requests of 5 and 8 keys in pages of 4, q and the caches as slices of wider tensors."""
    tokens = sum(query_lens)
    q = torch.randn(tokens, 4, 40, device=device)[:, :, :16]
    caches = torch.randn(5, 4, 2, 2, 16, device=device)
    table = torch.tensor([[1, 3], [4, 2]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
    return q, caches[:, :, 0].clone(), caches[:, :, 1].clone(), table, torch.tensor([5, 8], dtype=torch.int32, device=device), starts


_QUERY_LENS = ([1, 1], [2, 3], [0, 0])


def paged_attention(device: torch.device) -> list[Call]:
    rules = (0.25, 4, True, 0, 0.0, None, None, None, 1.0)
    return [((*_attention_inputs(device, lens), *rules), {}) for lens in _QUERY_LENS]


def paged_attention_out(device: torch.device) -> list[Call]:
    rules = (0.25, 4, True, 0, 0.0, None, None, None, 1.0)
    calls: list[Call] = []
    for lens in _QUERY_LENS:
        inputs = _attention_inputs(device, lens)
        out = torch.full(inputs[0].shape, 9.0, device=device)
        calls.append(((*inputs, *rules, out, torch.full(inputs[0].shape[:2], 9.0, device=device)), {}))
    return calls


def merge_attention(device: torch.device) -> list[Call]:
    out, lse = torch.randn(2, 5, 4, 16, device=device), torch.randn(2, 5, 4, device=device)
    calls: list[Call] = [((out[0, :n].clone(), lse[0, :n].clone(), out[1, :n].clone(), lse[1, :n].clone()), {}) for n in (5, 1, 0)]
    calls.insert(1, ((out[0].clone(), lse[0].clone(), out.transpose(0, 1).clone().transpose(0, 1), lse.clone()), {}))
    return calls


def cascade_attention(device: torch.device) -> list[Call]:
    """Behind a prefix of 6 keys in 3 pages, of which it fills one and a half."""
    calls: list[Call] = []
    for lens in _QUERY_LENS:
        q, k_cache, v_cache, *own = _attention_inputs(device, lens)
        shared = torch.tensor([[0, 3, -1]], dtype=torch.int32, device=device), torch.tensor([6], dtype=torch.int32, device=device)
        calls.append(((q, k_cache, v_cache, *shared, *own, 0.25, 4, 0.0, None, None, None, 1.0), {}))
    return calls


def padded_attention(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for batch, queries, keys in ((2, 3, 5), (1, 1, 4), (2, 0, 5)):
        q, k, v = torch.randn(batch, queries, 4, 16, device=device), *torch.randn(2, batch, 2, keys, 16, device=device).unbind(0)
        layout = tkernels.attention.padded.padded_layout(k, queries)
        calls.append(((q, k.clone(), v.clone(), layout.block_table, layout.seq_lens, layout.cu_seqlens_q, 0.25, True, 0, 0.0, None), {}))
    return calls


def _qkv(device: torch.device, tokens: int, strided: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads, dim = 4, 2, 8
    if not strided:
        return tuple(torch.randn(tokens, n, dim, device=device) for n in (heads, kv_heads, kv_heads))  # type: ignore[return-value]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim)


def _rope_inputs(device: torch.device, tokens: int, strided: bool) -> tuple[torch.Tensor, ...]:
    positions = torch.arange(tokens, device=device)
    return (*_qkv(device, tokens, strided), positions, torch.randn(8, 6, device=device))


def rope(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for tokens, strided in ((5, False), (5, True), (1, True), (0, False)):
        q, k, _, positions, cos_sin = _rope_inputs(device, tokens, strided)
        calls.append(((q, k, positions, cos_sin, strided), {}))
    return calls


def rope_and_cache(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for tokens, strided in ((5, False), (5, True), (1, True), (0, False)):
        q, k, v, positions, cos_sin = _rope_inputs(device, tokens, strided)
        caches = (
            torch.zeros(2, 3, 4, 2, 8, device=device).unbind(0)
            if not strided
            else [torch.zeros(3, 4, 4, 8, device=device)[:, :, :2] for _ in "kv"]
        )
        slots = torch.tensor([3, -1, 7, 8, 11], device=device)[:tokens]
        kwargs: dict[str, Any] = {"interleaved": strided}
        if strided:
            kwargs |= {
                "q_weight": torch.randn(8, device=device),
                "k_weight": torch.randn(8, device=device),
                "v_scale": torch.ones(2, device=device),
            }
        calls.append(((q, k, v, positions, cos_sin, caches[0].clone(), caches[1].clone(), slots), kwargs))
    return calls


def sample(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for logits in (torch.randn(3, 40, device=device), column_slice(torch.randn(3, 40, device=device)), torch.randn(0, 40, device=device)):
        rows = logits.shape[0]
        temperature = torch.tensor([0.0, 1.0, 0.7], device=device)[:rows]
        top_k = torch.tensor([0, 0, 5], dtype=torch.int32, device=device)[:rows]
        numbers = torch.arange(rows, device=device)
        calls.append(((logits, temperature, top_k, torch.ones(rows, device=device), numbers, numbers), {"min_p": temperature / 4}))
    return calls


def adjust_logits(device: torch.device) -> list[Call]:
    counts = torch.randint(0, 3, (4, 40), dtype=torch.int32, device=device)
    ids = torch.tensor([[3, -1], [-1, 39], [0, 1], [-1, -1]], dtype=torch.int32, device=device)
    state = (ids, torch.full((4, 2), 0.5, device=device), torch.full((4, 2), 0x77777777, dtype=torch.int32, device=device))
    calls: list[Call] = []
    for logits in (torch.randn(3, 40, device=device), column_slice(torch.randn(3, 40, device=device)), torch.randn(0, 40, device=device)):
        rows = logits.shape[0]
        slots, ones = torch.tensor([2, -1, 0], device=device)[:rows], torch.ones(rows, device=device)
        calls.append(((logits, slots, counts, ones * 1.5, ones * 0.25, ones * 0.5, *state), {}))
    return [((torch.randn(3, 40, device=device),), {}), *calls]


def count_tokens(device: torch.device) -> list[Call]:
    slots, tokens = torch.tensor([2, 0, -1, 2], device=device), torch.tensor([5, 39, 5, 5], device=device)
    counts = torch.zeros(4, 40, dtype=torch.int32, device=device)
    calls: list[Call] = [((counts.clone(), slots[:n], tokens[:n]), {"prompt": prompt}) for n, prompt in ((4, False), (4, True), (0, False))]
    return calls


def top_logprobs(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for logits in (torch.randn(3, 40, device=device), column_slice(torch.randn(3, 40, device=device)), torch.randn(0, 40, device=device)):
        calls.append(((logits, torch.tensor([0, 39, -1], device=device)[: logits.shape[0]], 5), {}))
    return calls


def linear_argmax(device: torch.device) -> list[Call]:
    weight, norm_weight = torch.randn(8, 24, device=device), torch.randn(24, device=device)
    inputs = (torch.randn(3, 24, device=device), column_slice(torch.randn(3, 24, device=device)), torch.randn(0, 24, device=device))
    return [((x, weight, norm_weight if i else None), {}) for i, x in enumerate(inputs)]


def linear_rope_and_cache(device: torch.device) -> list[Call]:
    calls: list[Call] = []
    for (_, _, _, positions, cos_sin, k_cache, v_cache, slots), kwargs in rope_and_cache(device):
        x, weight = torch.randn(positions.shape[0], 24, device=device), torch.randn(64, 24, device=device)
        extra = (torch.randn(64, device=device), torch.randn(24, device=device)) if calls else (None, None)
        calls.append(((column_slice(x) if calls else x, weight, *extra, positions, cos_sin, k_cache, v_cache, slots), kwargs))
    return calls


SAMPLES: dict[str, Callable[[torch.device], list[Call]]] = {
    "adjust_logits": adjust_logits,
    "add_rms_norm": add_rms_norm,
    "add_rms_norm_fp8": add_rms_norm_fp8,
    "add_rms_norm_fp8_dynamic": add_rms_norm_fp8_dynamic,
    "cascade_attention": cascade_attention,
    "count_tokens": count_tokens,
    "embedding": embedding,
    "embedding_rms_norm": embedding_rms_norm,
    "gelu_and_mul": gelu_and_mul,
    "gelu_mul": gelu_mul,
    "layer_norm": layer_norm,
    "linear": linear,
    "linear_argmax": linear_argmax,
    "linear_rope_and_cache": linear_rope_and_cache,
    "merge_attention": merge_attention,
    "padded_attention": padded_attention,
    "paged_attention": paged_attention,
    "paged_attention_out": paged_attention_out,
    "quantize_fp8": quantize_fp8,
    "quantize_fp8_dynamic": quantize_fp8_dynamic,
    "rms_norm": rms_norm,
    "rms_norm_fp8": rms_norm_fp8,
    "rms_norm_fp8_dynamic": rms_norm_fp8_dynamic,
    "rope": rope,
    "rope_and_cache": rope_and_cache,
    "sample": sample,
    "silu_and_mul": silu_and_mul,
    "silu_and_mul_fp8": silu_and_mul_fp8,
    "silu_and_mul_fp8_dynamic": silu_and_mul_fp8_dynamic,
    "silu_mul": silu_mul,
    "top_logprobs": top_logprobs,
}
