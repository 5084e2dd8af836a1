"""The Gluon kernel for one query token and a few, on a GPU: against the oracle, and that bits depend on a sequence alone.

What it takes, how it cuts the work and that it compiles: test_decode_one_sm90.py. A wrong handshake hangs a GPU, so a test that takes
longer than two minutes ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases, sm90_checks
from tests.tkernels.attention.cases import Case, check, make_case
from tests.tkernels.attention.sm90_cases import launches_of
from tests.tkernels.attention.test_batches import checked, part
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels.attention import decode_one_sm90, paged

FP8 = torch.float8_e4m3fn
SHAPE: dict[str, Any] = sm90_cases.SHAPE
pytestmark = pytest.mark.gpu
caches = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, in_time: None) -> Iterator[list[Any]]:
    """Launches of the kernel, which the op must choose."""
    yield from launches_of(decode_one_sm90, monkeypatch)


def case_of(lens: list[int], query_lens: list[int] | None = None, cache: torch.dtype = torch.bfloat16, **keywords: Any) -> Case:
    return make_case(lens, query_lens or [1] * len(lens), **{**SHAPE, "dtype": cache, **keywords})


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = case_of(*arguments, **keywords)
    check(case, *attend(case))
    return case


RAGGED = [1000, 33, 0, 700, 129, 5000, 300, 12, 8, 2, 2049]
QUERIES = [1, 8, 2, 5, 3, 2, 4, 7, 8, 2, 6]  # query tokens, of as many sequences


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193, 20000])
@caches
def test_lengths(taken, cache, length):
    verify([length], cache=cache, q_dtype=torch.bfloat16)
    verify([length] * 3, cache=cache)
    verify([length] * 3, [max(1, min(length, n)) for n in (2, 5, 8)], cache=cache)


@pytest.mark.parametrize("keywords", [{}, {"window": 2}, {"causal": False}], ids=str)
@caches
def test_odd_sequences(taken, cache, keywords):
    """Empty ones, ones of no query token, lengths beyond the table, rows of no sequence, and no sequence that is the kernel's."""
    case = case_of([304, 304, 0, 3, 1, 0], [1, 1, 1, 0, 1, 0], extra_rows=2, sinks=torch.randn(8, device="cuda"), cache=cache, **keywords)
    expected = attend(case)
    check(case, *expected)
    case.seq_lens[:2] = 1 << 30  # the table has pages for 304
    assert all(map(torch.equal, attend(case), expected))
    verify([0, 0, 0], cache=cache, **keywords)
    verify([300, 40, 0], [3, 8, 2], extra_rows=3, max_query_len=8, cache=cache, **keywords)
    case = case_of([304, 304, 0, 3, 1, 0], [4, 8, 2, 8, 2, 0], extra_rows=2, sinks=torch.randn(8, device="cuda"), cache=cache, **keywords)
    expected = attend(case)
    check(case, *expected)
    case.seq_lens[:2] = 1 << 30
    assert all(map(torch.equal, attend(case), expected))


@pytest.mark.parametrize(
    ("dim", "cache", "queries"),
    [(dim, *types) for dim in (64, 128) for types in ((FP8, torch.float16), (FP8, torch.bfloat16))]
    + [(dim, dtype, dtype) for dim in (64, 128, 256) for dtype in (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_pages_and_dims(taken, dim, page_size, cache, queries):
    for query_lens in (None, QUERIES):
        verify(RAGGED, query_lens, dim=dim, page_size=page_size, cache=cache, q_dtype=queries, extra_rows=3)


@pytest.mark.parametrize(
    ("dim", "cache"), [(dim, cache) for dim in (48, 80, 96, 112) for cache in (torch.bfloat16, FP8)] + [(192, torch.bfloat16)]
)
def test_head_dimensions_between(taken, cache, dim):
    """Columns that fill a block up to a power of two are neither read nor written."""
    for query_lens in (None, QUERIES):
        case = verify(RAGGED, query_lens, dim=dim, cache=cache, extra_rows=3, sinks=torch.randn(8, device="cuda"))
        sm90_checks.check_inside_a_wider_out(case)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (3, 3), (7, 1), (16, 2), (10, 1), (16, 1), (300, 300)])
@caches
def test_group_ratios(taken, cache, heads, kv_heads):
    """300 KV heads: more than there are programs."""
    lens = RAGGED if kv_heads < 300 else [300, 0, 33, 129]
    for query_lens in (None, QUERIES[: len(lens)]):
        verify(lens, query_lens, cache=cache, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(
    "keywords",
    [
        {"causal": False}, {"sinks": True}, {"k_scale": 0.5, "v_scale": 3.0}, {"k_scale": "device", "v_scale": "device"},
        {"window": 1}, {"window": 100}, {"window": 129, "sinks": True}, {"window": 6000},
        {"softcap": 5.0}, {"softcap": 5.0, "window": 100, "sinks": True, "k_scale": "device"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dim", "cache"), [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (64, FP8), (128, FP8)])
def test_features(taken, cache, dim, keywords):
    lens = RAGGED * 3 if dim == 64 else RAGGED  # many sequences of 64 dimensions take another number of programs
    for query_lens in (None, QUERIES * (len(lens) // len(RAGGED))):
        verify(lens, query_lens, dim=dim, cache=cache, extra_rows=3, **sm90_checks.on_device(keywords))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("heads", [2, 4, 6, 8])
@caches
def test_queries_of_others_in_the_columns_of_a_sequence_change_no_bit(taken, cache, heads, value):
    """The box of a sequence of 3 tokens holds the next one's too, and with 3 heads a group one of another KV head."""
    case = case_of([1000, 300, 700, 64], [3, 2, 5, 1], heads=heads, cache=cache, q_dtype=torch.bfloat16)
    out, lse = attend(case)
    case.q[3:5] = case.q[10:] = value
    again, again_lse = attend(case)
    for rows in (slice(0, 3), slice(5, 10)):
        assert torch.equal(again[rows], out[rows]) and torch.equal(again_lse[rows], lse[rows])


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e30])
def test_queries_of_any_size(taken, size):
    """Products are in fp16, which such a q does not fit."""
    case = case_of(RAGGED, QUERIES, cache=FP8, q_dtype=torch.bfloat16)
    case.q = (case.q.float() * size).bfloat16()
    case.keywords["scale"] = 0.088 / max(size, 1e-6)
    check(case, *attend(case))


@caches
def test_beside_queries_of_other_kinds(taken, cache):
    verify([1000, 300, 700, 2000, 64], [1, 300, 8, 1, 2], extra_rows=3, cache=cache)


@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
@caches
def test_pages_before_the_window_belong_to_others(taken, cache, window, freed):
    for query_lens in (None, [2, 8, 3]):
        sm90_checks.check_pages_before_the_window(case_of([700, 1500, 129], query_lens, window=window, cache=cache), freed)


@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
@caches
def test_shared_memory_that_another_kernel_left(taken, cache, value):
    cases = [case_of(lens, heads=heads, kv_heads=1, cache=cache) for lens, heads in (([128], 1), ([200, 300], 8), ([3000, 300, 0], 8))]
    batches = ([128], [2], 1), ([200, 300], [8, 1], 4), ([3000, 300, 0], [2, 3, 4], 8)
    cases += [case_of(lens, query_lens, heads=heads, kv_heads=1, cache=cache) for lens, query_lens, heads in batches]
    sm90_checks.check_after_filling_shared_memory(value, cases)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dim", [64, 128])
@caches
def test_more_sequences_than_the_scheduler_searches_at_once(taken, cache, dim, kv_heads):
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(400).tolist()]
    query_lens = [1 if i % 3 == 0 else min(n, 1 + i % 8) for i, n in enumerate(lens)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, kv_heads=kv_heads, dim=dim, extra_rows=5, cache=cache)


@pytest.mark.parametrize(
    ("dim", "heads", "cache"),
    [
        *(
            (dim, heads, cache)
            for dim, heads in [(64, 8), (128, 2), (128, 4), (128, 8), (128, 16), (128, 32)]
            for cache in (torch.bfloat16, FP8)
        ),
        (256, 8, torch.bfloat16),
    ],
)
def test_bits_alone_in_a_batch_padded_and_in_every_bucket(taken, cache, dim, heads):
    """Of sequences of one token too, whose launch has fewer columns alone."""
    lens = [1000, 300, 9000, 129, 2000, 64, 200, 4097, 1500, 700]
    case = case_of(lens, [1, 8, 1, 1, 2, 1, 1, 4, 3, 6], dim=dim, heads=heads, cache=cache)
    out, lse = sm90_checks.check_bits_alone(case, 8, 200)
    padded = Case(
        torch.cat((case.q, torch.full_like(case.q, float("nan")))), case.k_cache, case.v_cache,
        torch.cat((case.block_table, torch.full_like(case.block_table, -1))), torch.cat((case.seq_lens, torch.zeros_like(case.seq_lens))),
        torch.cat((case.cu_seqlens_q, case.cu_seqlens_q[-1:].expand(len(lens)))), case.keywords,
    )  # fmt: skip
    padded_out, padded_lse = attend(padded)
    assert torch.equal(padded_out[: len(out)], out) and torch.equal(padded_lse[: len(out)], lse)
    assert (padded_out[len(out) :] == 0).all() and torch.isneginf(padded_lse[len(out) :]).all()


@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("heads", [2, 4, 8])
@caches
def test_columns_of_a_launch_change_no_bit(taken, cache, heads, queries):
    """Of sequences that launches of 8, 16 and 32 columns take."""
    case = case_of([1000, 300, 9000, 1290, 64, 4097], [1, queries, queries, queries, 2, 1], cache=cache, heads=heads)
    results = []
    for most in (queries, 2 * queries):
        out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"), device="cuda")
        decode_one_sm90.decode_one_sm90(checked(case), out, lse, most)
        results.append((out, lse))
    check(case, *results[0])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("query_lens", [[1], range(1, 9)], ids=["one", "few"])
@caches
def test_a_thousand_runs_beside_other_work(taken, cache, query_lens):
    lens = [int(n) for n in torch.randint(8, 6000, (40,))]
    sm90_checks.check_a_thousand_runs_beside_other_work(case_of(lens, [*query_lens] * (40 // len(query_lens)), cache=cache))


@caches
@pytest.mark.parametrize(("dim", "heads", "split"), [(128, 8, 2), (64, 8, 2), (128, 4, 1)])
@pytest.mark.parametrize(("most", "count", "kv_heads", "runs"), [(3000, 70, 2, 1000), (200, 600, 2, 500)], ids=["blocks", "segments"])
def test_stages_of_several_tokens_that_come_round_at_once(taken, monkeypatch, most, count, kv_heads, runs, cache, dim, heads, split):
    layout = decode_one_sm90.Layout(64, 4, 2, 2, 1, split=split)
    monkeypatch.setattr(decode_one_sm90, "layout_of", lambda *shape: layout)
    lens = [int(n) for n in torch.randint(8, most, (count,))]
    case = case_of(lens, [1 + i % 8 for i in range(count)], cache=cache, dim=dim, heads=heads, kv_heads=kv_heads)
    out, lse = attend(case)
    check(case, out, lse)
    for _ in range(runs):
        again = attend(case)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@caches
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("most", "count", "kv_heads", "runs"), [(3000, 70, 2, 2000), (200, 1500, 8, 500)], ids=["blocks", "segments"])
def test_stages_that_come_round_at_once_are_read_before_they_are_written(taken, monkeypatch, most, count, kv_heads, runs, cache, dim):
    """With two stages and two programs a multiprocessor a stage is filled again as soon as it is given back: a give-back that did not wait
    for loads on their way gave other bits in 7 of 1000 runs. With many short sequences the rings of queries and segments go round too."""
    layout = decode_one_sm90.Layout(64, 4, 2, 2, 2)
    monkeypatch.setattr(decode_one_sm90, "layout_of", lambda *shape: layout)
    case = case_of([int(n) for n in torch.randint(0, most, (count,))], cache=cache, dim=dim, kv_heads=kv_heads)
    out, lse = attend(case)
    for _ in range(runs):
        again = attend(case)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("dim", [64, 128])
@caches
def test_bits_in_batches_of_few_and_of_many(taken, cache, dim):
    """Many sequences take another number of programs: of 64 dimensions, and of 128 over e4m3."""
    lens = [1000, 300, 129, 4097, 0, 513, *[int(n) for n in torch.randint(0, 2000, (40,))]]
    many = case_of(lens, dim=dim, cache=cache)
    out, lse = attend(many)
    few, few_lse = attend(part(many, 0, 6, 1))
    assert torch.equal(few, out[:6]) and torch.equal(few_lse, lse[:6])


@caches
def test_dependent_launch_has_the_same_bits(taken, cache):
    for query_lens in (None, [3, 8, 1, 7, 2]):
        sm90_checks.check_dependent_launches(case_of([1000, 33, 300, 12, 5000], query_lens, cache=cache))


@caches
def test_one_graph_serves_every_length(taken, cache):
    """Lengths are read on the device: a graph captured at one serves 0 to the table's end."""
    case = case_of([8193, 8193, 8193], cache=cache)
    out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"), device="cuda")
    graph, _ = captured(lambda: paged.paged_attention_out(*case.tensors, **case.keywords, out=out, lse=lse))
    for lens in ([1, 0, 8193], [128, 129, 0], [8192, 17, 2048]):
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        check(case, out, lse)
