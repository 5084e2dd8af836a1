"""paged_attention and paged_attention_out as ops: registration, compile, the CPU reference, and arguments that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tkernels
from tests.tkernels.attention.cases import check, make_case
from tkernels._op import reference_ops
from tkernels.attention.ref import paged_attention_ref

_DEFAULTS = (0.125, 8, True, 0, 0.0, None, None, None, 1.0)


def _small(device: torch.device):
    return make_case([5, 0, 3], [2, 1, 1], heads=2, kv_heads=1, dim=16, page_size=4, device=device, poison=False)


def test_opcheck_functional(device):
    case = _small(device)
    with reference_ops():  # opcheck calls the op many times; the kernel itself is tested elsewhere
        torch.library.opcheck(torch.ops.tkernels.paged_attention.default, (*case.tensors, *_DEFAULTS))


def test_opcheck_out(device):
    case = _small(device)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=device)
    with reference_ops():
        torch.library.opcheck(torch.ops.tkernels.paged_attention_out.default, (*case.tensors, *_DEFAULTS, out, lse))
        torch.library.opcheck(torch.ops.tkernels.paged_attention_out.default, (*case.tensors, *_DEFAULTS, out, None))


def test_fullgraph_matches_eager(device):
    case = _small(device)

    def step(q, *rest):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        tkernels.paged_attention_out(q, *rest, **case.keywords, out=out, lse=lse)
        again, again_lse = tkernels.paged_attention(q, *rest, **case.keywords, return_lse=True)
        return out, lse, again, again_lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, want in zip(compiled(*case.tensors), step(*case.tensors), strict=True):
        assert torch.equal(got, want)
    out, lse, *_ = step(*case.tensors)
    check(case, out, lse)


def test_gradients_are_refused(device):
    case = _small(device)
    case.q.requires_grad_()
    out = tkernels.paged_attention(*case.tensors, **case.keywords)
    with pytest.raises(NotImplementedError, match="inference-only"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="inference-only"):
        tkernels.paged_attention_out(*case.tensors, **case.keywords, out=torch.empty_like(case.q))


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (5, 3), (30, 4), (2, 4), (4, 0)])
def test_b095_heads_must_divide(heads, kv_heads, device):
    q = torch.zeros(1, heads, 16, device=device)
    cache = torch.zeros(2, 4, kv_heads, 16, device=device)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"q: expected a number of heads .* {kv_heads} KV heads, got {heads}"):
        tkernels.paged_attention(q, cache, cache, table, lens, starts, scale=1.0, max_query_len=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": lambda t: t[0]}, ValueError, r"q: expected \[tokens, heads, dim\]"),
        ({"q": lambda t: t.double()}, TypeError, "q: expected float16"),
        ({"q": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "q: expected last stride 1"),
        ({"k_cache": lambda t: t[..., :8]}, ValueError, "k_cache: expected a last dimension of 16"),
        ({"k_cache": lambda t: t.half()}, TypeError, "k_cache: expected float32 like q, or float8_e4m3fn"),
        ({"q": lambda t: t.to(torch.float8_e4m3fn)}, TypeError, "k_cache: expected float8_e4m3fn like q, got"),
        ({"v_cache": lambda t: t[:2]}, ValueError, "v_cache: expected .* like k_cache"),
        ({"seq_lens": lambda t: t.long()}, TypeError, "seq_lens: expected int32"),
        ({"block_table": lambda t: t[:1]}, ValueError, r"block_table: expected \[3, max_pages\]"),
        ({"block_table": lambda t: t[:, :1].expand(-1, 2**28 + 1)}, ValueError, "block_table: expected rows of at most 1073741824 keys"),
        ({"cu_seqlens_q": lambda t: t[:-1]}, ValueError, r"cu_seqlens_q: expected \[4\]"),
        ({"scale": lambda _: -1.0}, ValueError, "scale: expected a positive number, got -1.0"),
        ({"scale": lambda _: None}, TypeError, "scale: expected a positive number, .* got None"),
        ({"window": lambda _: 0}, ValueError, "window: expected None or a number of keys of at least 1, got 0"),
        ({"softcap": lambda _: -2.0}, ValueError, "softcap: expected 0"),
        ({"sinks": lambda _: torch.zeros(3)}, ValueError, r"sinks: expected \[2\]"),
        ({"k_scale": lambda _: torch.ones(3)}, ValueError, r"k_scale: expected a number, or a tensor"),
        ({"v_scale": lambda _: torch.ones(1, dtype=torch.float16)}, TypeError, "v_scale: expected float32"),
        ({"v_scale": lambda _: "1.0"}, TypeError, "v_scale: expected a number"),
        ({"k_scale": lambda _: 0.0}, ValueError, "k_scale: expected a positive number, got 0.0"),
        ({"v_scale": lambda _: float("nan")}, ValueError, "v_scale: expected a positive number, got nan"),
        ({"causal": lambda _: False, "window": lambda _: 4}, ValueError, "window: expected causal=True"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reference", [False, True])
def test_errors_name_the_argument(change, error, message, reference, device):
    case = _small(device)
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    arguments = dict(zip(names, case.tensors, strict=True)) | case.keywords
    for name, edit in change.items():
        new = edit(arguments.get(name))
        arguments[name] = new.to(device) if isinstance(new, torch.Tensor) else new
    with pytest.raises(error, match=message):
        if reference:
            with reference_ops():
                tkernels.paged_attention(**arguments)
        else:
            tkernels.paged_attention(**arguments)


def test_out_must_fit(device):
    case = _small(device)
    wide = torch.empty(1, device=device).as_strided((0, 2, 16), (1, 2**30, 1))
    with pytest.raises(ValueError, match="out: expected the heads of a token to span fewer than"):
        tkernels.paged_attention_out(case.q[:0], *case.tensors[1:], **case.keywords, out=wide)
    for out, lse, error, message in (
        (torch.empty(3, 2, 16), None, ValueError, "out: expected"),
        (torch.empty_like(case.q).half(), None, TypeError, "out: expected float32"),
        (torch.empty_like(case.q), torch.empty(4, 3), ValueError, "lse: expected"),
        (case.q[:1].expand_as(case.q), None, ValueError, r"out: expected memory of its own for every element, got strides \[0, 16, 1\]"),
        (torch.empty_like(case.q), case.q[:, :1, 0].expand(4, 2), ValueError, "lse: expected memory of its own"),
    ):
        with pytest.raises(error, match=message):
            tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out.to(device), lse=lse)


def test_numbers_of_numpy_are_numbers(device):
    case = _small(device)
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    want = tkernels.paged_attention(*case.tensors, **case.keywords, **scales)
    got = tkernels.paged_attention(*case.tensors, **case.keywords, **{name: np.float32(x) for name, x in scales.items()})
    assert torch.equal(got, want)


def test_out_of_fp8_queries_is_bf16(device):
    fp8 = torch.float8_e4m3fn
    case = make_case([5, 3], [2, 1], heads=2, kv_heads=1, dim=16, page_size=4, dtype=fp8, q_dtype=fp8, device=device)
    with pytest.raises(TypeError, match="out: expected bfloat16"):
        tkernels.paged_attention_out(*case.tensors, **case.keywords, out=torch.empty_like(case.q))
    with torch.device("meta"):
        out = torch.ops.tkernels.paged_attention(*(t.to("meta") for t in case.tensors), *_DEFAULTS)[0]
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("op", ["functional", "out"])
def test_fp8_queries_traced_look_like_those_computed(op, device):
    """opcheck, but for its test of the schema: it compares arguments by operators that torch lacks for e4m3 on the CPU."""
    fp8 = torch.float8_e4m3fn
    case = make_case([5, 3], [2, 1], heads=2, kv_heads=1, dim=16, page_size=4, dtype=fp8, q_dtype=fp8, device=device, poison=False)
    strided = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    more = (torch.empty(case.q.shape, dtype=torch.bfloat16, device=device), None) if op == "out" else ()
    target = torch.ops.tkernels.paged_attention_out.default if op == "out" else torch.ops.tkernels.paged_attention.default
    with reference_ops():
        torch.library.opcheck(
            target, (strided, *case.tensors[1:], *_DEFAULTS, *more),
            test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
        )  # fmt: skip


def test_max_query_len_too_small_is_refused_by_the_reference():
    case = make_case([9], [4])
    with pytest.raises(ValueError, match="max_query_len: expected at least 4, the query length of sequence 0, got 3"):
        paged_attention_ref(*case.tensors, scale=1.0, max_query_len=3)


@pytest.mark.parametrize("keywords", [{}, {"window": 4}, {"softcap": 2.0, "causal": False}])
def test_cpu_reference_equals_the_oracle(keywords):
    case = make_case([9, 0, 4, 30], [4, 1, 1, 12], extra_rows=2, **keywords)
    with reference_ops():
        out, lse = tkernels.paged_attention(*case.tensors, **case.keywords, return_lse=True)
    check(case, out, lse)


def test_reference_against_dense_softmax():
    """The oracle itself, against attention written in one line over contiguous keys, with torch's own lower-right causal mask."""
    case = make_case([11], [4], heads=4, kv_heads=2, dim=16, page_size=4)
    out, lse = paged_attention_ref(*case.tensors, scale=0.25)
    k, v = (c[case.block_table[0].long()].flatten(0, 1)[:11].transpose(0, 1).repeat_interleave(2, 0) for c in (case.k_cache, case.v_cache))
    visible = torch.ones(4, 11, dtype=torch.bool).tril(diagonal=11 - 4)
    want = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(0, 1), k, v, attn_mask=visible, scale=0.25)
    torch.testing.assert_close(out, want.transpose(0, 1), atol=1e-5, rtol=1e-5)
    logits = (case.q.transpose(0, 1) @ k.transpose(1, 2) * 0.25).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(-1).transpose(0, 1), atol=1e-5, rtol=1e-5)
