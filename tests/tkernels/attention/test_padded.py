"""Attention over contiguous caches, against softmax written out with a dense mask."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.library import opcheck

from tkernels._op import reference_ops
from tkernels.attention import padded_attention, padded_layout
from tkernels.attention.prefill import _prefill_kernel


def dense(q, k, v, starts, lengths, *, scale, causal=True, window=None, softcap=0.0, sinks=None):
    """fp64, [batch, query_len, heads, dim]; a query that sees nothing gives zero."""
    q, k, v = (x.double() for x in (q.transpose(1, 2), k, v))
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    first, end = starts.long()[:, None, None], (starts + lengths).long()[:, None, None]
    keys = torch.arange(k.shape[2], device=q.device)[None, None, :]
    position = end - q.shape[2] + torch.arange(q.shape[2], device=q.device)[None, :, None]
    seen = (keys >= first) & (keys < end)
    if causal:
        seen = seen & (keys <= position)
    if window:
        seen = seen & (keys > position - window)
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


CASES = {
    "decode of full rows": dict(query_len=1, keys=19),
    "decode past one page": dict(query_len=1, keys=150, batch=2),
    "decode of left-padded rows": dict(query_len=1, keys=19, starts=[0, 7, 18]),
    "decode in a static cache that is not full": dict(query_len=1, keys=140, starts=[0, 5, 3], lengths=[131, 126, 1]),
    "two to eight queries": dict(query_len=5, keys=23, starts=[0, 4, 20]),
    "prefill": dict(query_len=20, keys=20),
    "prefill of left-padded rows": dict(query_len=20, keys=20, starts=[0, 13, 19]),
    "prefill after a prefix": dict(query_len=12, keys=31, starts=[2, 0, 25]),
    "window shorter than the prompt": dict(query_len=20, keys=20, starts=[0, 6, 1], window=4),
    "window in decode": dict(query_len=1, keys=40, starts=[0, 6, 39], window=5),
    "softcap": dict(query_len=10, keys=12, softcap=3.0),
    "sinks": dict(query_len=3, keys=9, starts=[0, 2, 5], sinks=True),
    "bidirectional": dict(query_len=9, keys=9, causal=False),
    "a row without keys": dict(query_len=2, keys=6, starts=[0, 0, 0], lengths=[6, 0, 3]),
    "rows as transformers makes them without a cache": dict(query_len=10, keys=10, starts=[0, 3, 1], token_major=True),
}


@pytest.mark.parametrize("ops", ["kernels", "references"])
@pytest.mark.parametrize("name", CASES)
def test_padded_attention_equals_dense(device: torch.device, name: str, ops: str) -> None:
    case = dict(CASES[name])
    query_len, keys, batch = case.pop("query_len"), case.pop("keys"), case.pop("batch", 3)
    heads, kv_heads, dim = 4, 2, 16
    starts = torch.tensor(case.pop("starts", [0] * batch), dtype=torch.int32, device=device)
    lengths = case.pop("lengths", None)
    lengths = keys - starts if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(batch, query_len, heads, dim, device=device)
    if case.pop("token_major", False):
        k, v = (torch.randn(batch, keys, kv_heads, dim, device=device).transpose(1, 2) for _ in range(2))
    else:
        k, v = (torch.randn(batch, kv_heads, keys, dim, device=device) for _ in range(2))
    if case.pop("sinks", False):
        case["sinks"] = torch.randn(heads, device=device)
    expected = dense(q, k, v, starts, lengths, scale=0.3, **case)
    ends = starts + lengths
    for b in range(batch):  # what lies outside a row's keys is never read
        k[b, :, : starts[b]], v[b, :, : starts[b]] = float("nan"), float("nan")
        k[b, :, ends[b] :], v[b, :, ends[b] :] = float("nan"), float("nan")
    with reference_ops() if ops == "references" else nullcontext():
        out = padded_attention(q, k, v, padded_layout(k, query_len, starts, lengths), scale=0.3, **case)
    assert out.shape == q.shape and out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_last_row_reads_nothing_past_the_tensor(device: torch.device) -> None:
    """Keys end in the middle of the last page, which would lie beyond the allocation."""
    whole = torch.full((1 * 2 * 20 * 16 + 4096,), float("nan"), device=device)
    k = whole[: 2 * 20 * 16].view(1, 2, 20, 16).normal_()
    q = torch.randn(1, 1, 4, 16, device=device)
    out = padded_attention(q, k, k, scale=0.25)
    first, length = (torch.tensor([n], device=device) for n in (0, 20))
    torch.testing.assert_close(out, dense(q, k, k, first, length, scale=0.25).float(), rtol=1e-5, atol=1e-6)


def test_padded_attention_refuses(device: torch.device) -> None:
    q = torch.randn(2, 3, 4, 16, device=device)
    k = torch.randn(2, 2, 8, 16, device=device)
    with pytest.raises(ValueError, match=r"v: expected \[2, 2, 8, 16\] like k"):
        padded_attention(q, k, k[:, :, :4], scale=1.0)
    with pytest.raises(ValueError, match="v: expected its rows to lie like k's"):
        padded_attention(q, k, k.transpose(1, 2).contiguous().transpose(1, 2), scale=1.0)
    with pytest.raises(ValueError, match="k: expected 128 tokens to span fewer than"):
        padded_attention(q[:1], *[k.as_strided((1, 2, 1, 16), (0, 16, 2**24, 1))] * 2, scale=1.0)
    with pytest.raises(TypeError, match="k: expected float32 like q"):
        padded_attention(q, k.half(), k.half(), scale=1.0)
    with pytest.raises(ValueError, match="window: expected None or a number of keys of at least 1, got 0"):
        padded_attention(q, k, k, scale=1.0, window=0)
    with pytest.raises(NotImplementedError, match="padded_attention is inference-only"):
        padded_attention(q.requires_grad_(), k, k, scale=1.0).sum().backward()


def test_padded_attention_passes_opcheck(device: torch.device) -> None:
    q, k = torch.randn(2, 2, 4, 16, device=device), torch.randn(2, 2, 8, 16, device=device)
    layout = padded_layout(k, 2)
    opcheck(torch.ops.tkernels.padded_attention.default, (q, k, k, *layout, 0.25, True, 0, 0.0, None))


def test_strides_that_grow_with_the_keys_are_not_compiled_in() -> None:
    """Or a prompt of each length would compile a kernel."""
    constants = {name for name, kind in _prefill_kernel.fn.__annotations__.items() if kind == "tl.constexpr"}
    assert "stride_kn" in constants and not {"stride_kh", "stride_vh"} & constants


@pytest.mark.gpu
def test_other_lengths_of_keys_compile_nothing() -> None:
    import triton.knobs

    def attend(keys: int) -> None:
        k, v = (torch.randn(2, 2, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        q = torch.randn(2, 20, 4, 64, device="cuda", dtype=torch.bfloat16)
        starts = torch.zeros(2, dtype=torch.int32, device="cuda")
        padded_attention(q, k, v, padded_layout(k, 20, starts, starts + keys), scale=0.1)

    attend(300)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **k: compiled.append(str(k["repr"]))
    try:
        for keys in (301, 320, 999):
            attend(keys)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled
