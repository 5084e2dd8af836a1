"""The kernels against the oracle: shapes, features, and the values that have broken other kernels.

Every batch is ragged, so one call covers decode, several query tokens and prefill, page borders and tails; what must not be read is NaN.
"""

from __future__ import annotations

import pytest
import torch

import tkernels
from tests.tkernels.attention.cases import Case, check, make_case, oracle
from tkernels.attention.ref import output_dtype, paged_attention_ref


def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(case.q, float("nan"), dtype=output_dtype(case.q.dtype))  # poisoned: every element must be written
    lse = torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out, lse=lse)
    return out, lse


def verify(*args, **keywords) -> None:
    case = make_case(*args, **keywords)
    check(case, *attend(case))


@pytest.mark.parametrize("dim", [1, 16, 32, 36, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256])
def test_b096_head_dims(dim, device):
    verify([9, 20], [1, 12], heads=2, kv_heads=1, dim=dim, device=device)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (10, 2), (6, 1), (7, 1), (12, 1), (16, 1)])
def test_b093_group_ratios(heads, kv_heads, device):
    verify([9, 3, 20], [1, 2, 12], heads=heads, kv_heads=kv_heads, dim=16, device=device)


@pytest.mark.parametrize("page_size", [1, 5, 16, 32, 256])
def test_page_sizes(page_size, device):
    verify([33, 20, 16], [1, 12, 3], heads=2, kv_heads=1, dim=16, page_size=page_size, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, device):
    verify([33, 20], [1, 12], heads=4, kv_heads=2, dim=16, dtype=dtype, device=device)


def test_lengths_around_pages_and_blocks(device):
    """Page 8, blocks of 16: every border, one before and one after it; a length 1000 times another."""
    verify([1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000], [1] * 11, heads=2, kv_heads=1, dim=16, device=device)


def test_query_lengths_1_to_9_in_one_batch(device):
    """8 is decode's last, 9 is prefill's first; a sequence without a prefix and one that is only queries."""
    verify([30, 2, 33, 4, 40, 6, 7, 8, 9, 25], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], heads=2, kv_heads=1, dim=16, device=device)


@pytest.mark.parametrize(
    "keywords",
    [{"window": 5}, {"window": 1}, {"window": 17, "softcap": 1.5}, {"softcap": 3.0}, {"causal": False}],
    ids=str,
)  # fmt: skip
def test_features(keywords, device):
    verify([40, 33, 50, 8], [1, 4, 30, 8], heads=2, kv_heads=1, dim=16, device=device, extra_rows=2, **keywords)


def test_sinks_enter_the_denominator_and_the_lse(device):
    verify([40, 0, 50], [1, 1, 12], heads=4, kv_heads=2, dim=16, device=device, sinks=torch.randn(4, device=device) * 3)


def test_interleaved_cache_and_fused_query_by_strides(device):
    case = make_case([20, 33], [12, 1], heads=4, kv_heads=2, dim=16, interleaved=True, device=device)
    fused = torch.full((13, 8, 16), float("nan"), device=device)  # q is a view into q, k, v
    fused[:, :4] = case.q
    case.q = fused[:, :4]
    out = torch.full((13, 8, 16), float("nan"), device=device)[:, 2:6]
    tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out)
    check(case, out)


def test_caches_of_unequal_strides(device):
    case = make_case([20, 33], [12, 1], heads=4, kv_heads=2, dim=16, device=device)
    wide = torch.full((*case.v_cache.shape[:2], 3, 24), float("nan"), device=device)
    wide[:, :, :2, :16] = case.v_cache
    case.v_cache = wide[:, :, :2, :16]  # NaN after every head: nothing past the true size is read
    check(case, *attend(case))


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [(0.5, 4.0), (torch.tensor(0.5), torch.tensor([4.0])), (torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25])), (None, 3)],
    ids=["number", "tensor", "per head", "none"],
)  # fmt: skip
def test_b105_b106_fp8_scales_in_every_form_and_path(k_scale, v_scale, device):
    k_scale, v_scale = (s.to(device) if isinstance(s, torch.Tensor) else s for s in (k_scale, v_scale))
    verify([40, 33, 20], [1, 3, 12], dim=16, dtype=torch.float8_e4m3fn, device=device, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize(
    "keywords", [{}, {"window": 5, "softcap": 3.0}, {"causal": False}, {"sinks": True, "k_scale": 0.5, "v_scale": 4.0}], ids=str
)  # fmt: skip
def test_fp8_queries_give_bf16(keywords, device):
    """Decode, several query tokens and prefill; the functional op and the one into an output agree."""
    keywords = dict(keywords)
    if keywords.pop("sinks", False):
        keywords["sinks"] = torch.randn(4, device=device)
    fp8 = torch.float8_e4m3fn
    case = make_case([40, 33, 20], [1, 3, 12], dim=16, dtype=fp8, q_dtype=fp8, device=device, extra_rows=2, **keywords)
    out, lse = attend(case)
    check(case, out, lse)
    again, again_lse = tkernels.paged_attention(*case.tensors, **case.keywords, return_lse=True)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    reference, reference_lse = paged_attention_ref(*case.tensors, **case.keywords)
    assert reference.dtype == torch.bfloat16
    check(case, reference, reference_lse)


def test_fp8_under_queries_beyond_the_range_of_fp16(device):
    case = make_case([20, 33], [12, 1], dim=16, dtype=torch.float8_e4m3fn, device=device, scale=1e-5, k_scale=0.5)
    case.q = (case.q.float() * 1e5).to(torch.bfloat16)
    case.k_cache, case.v_cache = (c.float().to(torch.float8_e4m3fn) for c in (case.k_cache, case.v_cache))
    check(case, *attend(case))


@pytest.mark.parametrize("level", [90.0, 1e3, -1e4, -1e5])
def test_b085_b090_logits_of_any_size(level, device):
    """All logits near ``level``, in decode with 1 to 5 query tokens, over cut sequences, and in prefill; one row sees a single key."""
    case = make_case([1, 70, 33, 3, 34, 5, 20], [1, 1, 2, 3, 4, 5, 12], heads=2, kv_heads=1, dim=16, device=device, scale=1.0)
    case.q = torch.randn_like(case.q) * 0.1
    case.q[..., 0] = abs(level) ** 0.5
    live = ~torch.isnan(case.k_cache[..., :1])
    case.k_cache[..., :1] = torch.where(live, torch.full((), abs(level) ** 0.5 * (1 if level > 0 else -1), device=device), float("nan"))
    out, lse = attend(case)
    assert torch.isfinite(lse).all() and torch.isfinite(out).all()
    expected, _ = oracle(case)
    rounded, _ = paged_attention_ref(*case.tensors, **case.keywords)  # fp32 itself cannot tell logits of this size finely apart
    error, allowed = ((x.cpu().double() - expected).norm() / expected.norm() for x in (out, rounded))
    assert error <= 4 * allowed + 2e-5


def _keys_seen(out: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > 1e-6).flatten().tolist() for row in out[:, 0].cpu()]


def _one_hot(length: int, query_lens: list[int], device: torch.device, **keywords) -> Case:
    """Sequences of one cache content in which V names its position, and all keys are alike."""
    case = make_case([length] * len(query_lens), query_lens, heads=1, kv_heads=1, dim=64, page_size=4, device=device, **keywords)
    case.k_cache.zero_()
    case.v_cache.fill_(float("nan"))
    for s in range(len(query_lens)):
        for i in range(length):
            case.v_cache[case.block_table[s, i // 4], i % 4, 0] = torch.nn.functional.one_hot(torch.tensor(i), 64).to(device)
    return case


def test_b086_window_counts_its_own_key(device):
    """Prefill, chunked prefill, several tokens and decode name the same keys for a position: p - 3 .. p."""
    for query_len in (40, 12, 3, 1):
        case = _one_hot(40, [query_len], device, window=4)
        out, _ = attend(case)
        assert _keys_seen(out) == [list(range(max(p - 3, 0), p + 1)) for p in range(40 - query_len, 40)]


def test_b088_causal_is_lower_right(device):
    case = _one_hot(19, [3, 11], device)
    out, _ = attend(case)
    assert _keys_seen(out) == [list(range(p + 1)) for p in (*range(16, 19), *range(8, 19))]


def test_b083_window_that_starts_after_whole_blocks(device):
    """Rows of one tile whose windows begin in different blocks: some see nothing of the tile's first blocks."""
    verify([61, 61, 61], [40, 8, 1], heads=2, kv_heads=1, dim=16, device=device, window=2)


def test_b101_heads_of_queries_past_32_bits(device):
    """As in [heads, tokens, dim] of a very long prompt: head 2 begins 2**31 elements after head 0."""
    case = make_case([20, 33], [12, 1], heads=3, kv_heads=1, dim=16, dtype=torch.float16, device=device)
    wide = torch.empty(2**31 + 13 * 16, dtype=torch.float16, device=device).as_strided(case.q.shape, (16, 2**30, 1))  # mostly untouched
    case.q = wide.copy_(case.q)
    out = torch.full(wide.shape, float("nan"), dtype=wide.dtype, device=device)
    tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out)
    case.q = case.q.contiguous()
    check(case, out)


@pytest.mark.parametrize("window", [2**31 - 1, 2**63 - 1])
def test_a_window_that_means_none(window, device):
    """Before the first key by so much that 32 bits do not hold it: decode and prefill, with more queries than keys and without keys."""
    case = make_case([0, 3, 0, 5, 40, 33], [1, 8, 5, 12, 1, 9], heads=2, kv_heads=1, dim=16, device=device)
    expected = attend(case)
    case.keywords["window"] = window
    for got, want in zip(attend(case), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_b088_more_queries_than_keys_gives_empty_rows(device):
    """A sequence whose length is below its query length: the first queries stand before position 0 and see nothing."""
    case = make_case([3, 5], [5, 12], heads=2, kv_heads=1, dim=16, device=device)
    out, lse = attend(case)
    check(case, out, lse)
    assert torch.isneginf(lse[:2]).all() and (out[:2] == 0).all() and torch.isneginf(lse[5:12]).all()
