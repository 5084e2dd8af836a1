"""The Gluon kernel for one query token over an e4m3 cache. On the CPU: which calls it takes, and that it compiles. On a GPU: against the
oracle.

A wrong handshake hangs a GPU, so a test that takes longer than two minutes ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases, sm90_checks
from tests.tkernels.attention.cases import Case, check, make_case
from tests.tkernels.attention.sm90_cases import call, check_workspace, compile_offline, launches_chosen, launches_of
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels import _dependent
from tkernels.attention import decode_fp8_sm90, decode_sm90, paged

FP8 = torch.float8_e4m3fn
SHAPE: dict[str, Any] = sm90_cases.SHAPE | {"dtype": FP8}
gpu = pytest.mark.gpu


# ---- which calls it takes


def fp8_call(dim: int = 128, page_size: int = 16, heads: int = 4, dtype: torch.dtype = torch.bfloat16, **keywords: Any) -> Any:
    cache = torch.zeros((4, page_size, 2, dim), dtype=FP8)
    q = torch.zeros((32, heads, dim), dtype=dtype)
    return call(**{"q": q, "k_cache": cache, "v_cache": cache.clone(), "dim": dim, "page_size": page_size, "dtype": dtype, **keywords})


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (lambda: fp8_call(dim=32), "head dimension 32: expected 33 to 128"),
        (lambda: fp8_call(dim=256), "head dimension 256"),
        (lambda: fp8_call(page_size=8), "page size 8"),
        (lambda: fp8_call(dtype=torch.float32), "float32 queries on a torch.float8_e4m3fn cache: expected float16 or bfloat16 on"),
        (lambda: call(dim=128), "bfloat16 queries on a torch.bfloat16 cache"),
        (lambda: fp8_call(heads=34), "34 heads on 2 KV heads: expected at most 16 for each"),
        (lambda: fp8_call(dim=72), r"k_cache: strides \[2304, 144, 72, 1\]"),
    ],
)
def test_refused_calls_say_why(inputs: Any, word: str) -> None:
    problem = decode_fp8_sm90.refusal(inputs(), "sm_90")
    assert problem is not None
    assert re.search(word, problem), problem


@pytest.mark.usefixtures("gluon_compiles")
def test_taken_calls() -> None:
    both = torch.zeros((4, 2, 16, 2, 128), dtype=FP8)
    for x in (
        fp8_call(), fp8_call(dtype=torch.float16), fp8_call(page_size=256), fp8_call(dim=80), fp8_call(heads=32), fp8_call(dim=64),
        fp8_call(k_cache=both[:, 0], v_cache=both[:, 1]), fp8_call(window=5, softcap=5.0), fp8_call(k_scale=torch.ones(1)),
    ):  # fmt: skip
        assert decode_fp8_sm90.refusal(x, "sm_90") is None
        assert "sm_80" in str(decode_fp8_sm90.refusal(x, "sm_80"))
        assert decode_sm90.refusal(x, "sm_90") is not None
    decode_sm90.enable(False)
    try:
        assert "switched off by tkernels.attention.decode_sm90" in str(decode_fp8_sm90.refusal(fp8_call(), "sm_90"))
    finally:
        decode_sm90.enable(True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("queries", "bucket", "kernels"),
    [
        ([1, 1], 1, [("decode_fp8_sm90", _dependent.ALONE)]),
        ([1, 1], 8, [("decode 2 to 8", _dependent.FIRST), ("decode_fp8_sm90", _dependent.BESIDE)]),
        ([1, 8], 8, [("decode 2 to 8", _dependent.FIRST), ("decode_fp8_sm90", _dependent.BESIDE)]),
        ([30, 1], 30, [("decode 2 to 8", _dependent.FIRST), ("decode_fp8_sm90", _dependent.BESIDE), ("prefill", _dependent.ALONE)]),
    ],
)  # fmt: skip
def test_one_kernel_for_a_sequence_of_one_token_in_every_bucket(queries, bucket, kernels, monkeypatch) -> None:
    """And one alone that zeroes the rows of no sequence: decode.py does where it takes one token."""
    assert launches_chosen(make_case([40, 40], queries, **SHAPE | {"device": "cpu"}), bucket, monkeypatch) == kernels


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize("seqs", [1, 16, 8192])
@pytest.mark.parametrize(("heads", "kv_heads", "mib"), [(32, 8, 4), (64, 8, 8), (8, 1, 33), (16, 1, 66)])
def test_the_workspace_is_bounded_by_the_device(heads: int, kv_heads: int, mib: int, seqs: int) -> None:
    """Beside the states: whatever the number of sequences."""
    check_workspace(decode_fp8_sm90, make_case([2], [1], **SHAPE | {"heads": heads, "kv_heads": kv_heads, "device": "cpu"}), seqs, mib)


# ---- that it compiles


def verify_compiled(cases: list[dict[str, Any]]) -> None:
    for case, facts in zip(cases, compile_offline([{"kernel": "decode_fp8"} | case for case in cases]), strict=True):
        assert facts["spills"] <= (256 if case.get("heads") == 128 else 0), (case, facts)  # bytes; of 16 columns addresses, once a block
        programs = decode_fp8_sm90.layout_of(case.get("dim", 128)).programs_per_sm
        assert facts["registers"] <= 65536 // 256 // programs, (case, facts)  # of the 256 threads of each
        assert programs * (facts["shared"] + 1024) <= 228 << 10, (case, facts)
        dim, columns = case.get("dim", 128), 16 if case.get("heads") == 128 else 8
        assert facts["mma"] == 64 * dim // 128 * columns // 8, (case, facts)  # of a block with and of one without masks


def test_compiles_for_sm_90() -> None:
    verify_compiled([{"pdl": 2}, {"dim": 64, "pdl": 1}])


@pytest.mark.slow
def test_every_specialisation_compiles() -> None:
    everything = {"window": 100, "softcap": 30.0, "sinks": True, "lse": True, "scales": True}
    verify_compiled(
        [{"dim": dim, "page_size": page} for dim in (64, 128) for page in (16, 32, 64, 128, 256)]
        + [{"dim": dim, "dtype": "float16"} | everything for dim in (64, 128)]
        + [{"heads": 128, "dim": dim} | features for dim in (64, 128) for features in ({}, everything)]
        + [{"kv_heads": 32}, {"heads": 28, "kv_heads": 4}]
    )


# ---- against the oracle, on a GPU


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, in_time: None) -> Iterator[list[Any]]:
    """Launches of the kernel, which the op must choose."""
    yield from launches_of(decode_fp8_sm90, monkeypatch)


def case_of(lens: list[int], query_lens: list[int] | None = None, bf16: bool = False, **keywords: Any) -> Case:
    case = make_case(lens, query_lens or [1] * len(lens), **{**SHAPE, **keywords})
    if bf16:
        case.q = case.q.bfloat16()
    return case


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = case_of(*arguments, **keywords)
    check(case, *attend(case))
    return case


RAGGED = [1000, 33, 0, 700, 129, 5000, 300, 12, 8, 2, 2049]


@gpu
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193, 20000])
def test_lengths(taken, length):
    verify([length])
    verify([length] * 3, bf16=True)


@gpu
@pytest.mark.parametrize("keywords", [{}, {"window": 2}, {"causal": False}], ids=str)
def test_odd_sequences(taken, keywords):
    """Empty ones, ones of no query token, lengths beyond the table, rows of no sequence, and no sequence that is the kernel's."""
    case = case_of([304, 304, 0, 3, 1, 0], [1, 1, 1, 0, 1, 0], extra_rows=2, sinks=torch.randn(8, device="cuda"), **keywords)
    expected = attend(case)
    check(case, *expected)
    case.seq_lens[:2] = 1 << 30  # the table has pages for 304
    assert all(map(torch.equal, attend(case), expected))
    verify([0, 0, 0], **keywords)
    verify([300, 40, 0], [3, 8, 2], extra_rows=3, max_query_len=8, **keywords)


@gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_and_dims(taken, dim, page_size, bf16):
    verify(RAGGED, dim=dim, page_size=page_size, bf16=bf16, extra_rows=3)


@gpu
@pytest.mark.parametrize("dim", [48, 80, 96, 112])
def test_head_dimensions_between(taken, dim):
    """Columns that fill a block up to a power of two are neither read nor written."""
    sm90_checks.check_inside_a_wider_out(verify(RAGGED, dim=dim, extra_rows=3, sinks=torch.randn(8, device="cuda")))


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (3, 3), (7, 1), (16, 2), (10, 1), (16, 1), (300, 300)])
def test_group_ratios(taken, heads, kv_heads):
    """300 KV heads: more than there are programs."""
    verify(RAGGED if kv_heads < 300 else [300, 0, 33, 129], heads=heads, kv_heads=kv_heads)


@gpu
@pytest.mark.parametrize(
    "keywords",
    [
        {"causal": False}, {"sinks": True}, {"k_scale": 0.5, "v_scale": 3.0}, {"k_scale": "device", "v_scale": "device"},
        {"window": 1}, {"window": 100}, {"window": 129, "sinks": True}, {"window": 6000},
        {"softcap": 5.0}, {"softcap": 5.0, "window": 100, "sinks": True, "k_scale": "device"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128])
def test_features(taken, dim, keywords):
    verify(RAGGED, dim=dim, extra_rows=3, **sm90_checks.on_device(keywords))


@gpu
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e30])
def test_queries_of_any_size(taken, size):
    """Products are in fp16, which such a q does not fit."""
    case = case_of(RAGGED, bf16=True)
    case.q = (case.q.float() * size).bfloat16()
    case.keywords["scale"] = 0.088 / max(size, 1e-6)
    check(case, *attend(case))


@gpu
def test_beside_queries_of_other_kinds(taken):
    verify([1000, 300, 700, 2000, 64], [1, 300, 8, 1, 2], extra_rows=3)


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_pages_before_the_window_belong_to_others(taken, window, freed):
    sm90_checks.check_pages_before_the_window(case_of([700, 1500, 129], window=window), freed)


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
def test_shared_memory_that_another_kernel_left(taken, value):
    cases = [case_of(lens, heads=heads, kv_heads=1) for lens, heads in (([128], 1), ([200, 300], 8), ([3000, 300, 0], 8))]
    sm90_checks.check_after_filling_shared_memory(value, cases)


@gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_more_sequences_than_the_scheduler_searches_at_once(taken, kv_heads):
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(400).tolist()]
    query_lens = [1 + (i % 3 == 0) for i in range(400)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, kv_heads=kv_heads, extra_rows=5)


@gpu
@pytest.mark.parametrize(("dim", "heads"), [(64, 8), (128, 8), (128, 32)])
def test_bits_alone_in_a_batch_padded_and_in_every_bucket(taken, dim, heads):
    lens = [1000, 300, 9000, 129, 2000, 64, 40, 4097]
    case = case_of(lens, [1, 8, 1, 1, 2, 1, 1, 1], dim=dim, heads=heads)
    out, lse = sm90_checks.check_bits_alone(case, 8, 200)
    padded = Case(
        torch.cat((case.q, torch.full_like(case.q, float("nan")))), case.k_cache, case.v_cache,
        torch.cat((case.block_table, torch.full_like(case.block_table, -1))), torch.cat((case.seq_lens, torch.zeros_like(case.seq_lens))),
        torch.cat((case.cu_seqlens_q, case.cu_seqlens_q[-1:].expand(len(lens)))), case.keywords,
    )  # fmt: skip
    padded_out, padded_lse = attend(padded)
    assert torch.equal(padded_out[: len(out)], out) and torch.equal(padded_lse[: len(out)], lse)
    assert (padded_out[len(out) :] == 0).all() and torch.isneginf(padded_lse[len(out) :]).all()


@gpu
def test_a_thousand_runs_beside_other_work(taken):
    sm90_checks.check_a_thousand_runs_beside_other_work(case_of([int(n) for n in torch.randint(8, 6000, (40,))]))


@gpu
def test_dependent_launch_has_the_same_bits(taken):
    sm90_checks.check_dependent_launches(case_of([1000, 33, 300, 12, 5000]))


@gpu
def test_one_graph_serves_every_length(taken):
    """Lengths are read on the device: a graph captured at one serves 0 to the table's end."""
    case = case_of([8193, 8193, 8193])
    out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"), device="cuda")
    graph, _ = captured(lambda: paged.paged_attention_out(*case.tensors, **case.keywords, out=out, lse=lse))
    for lens in ([1, 0, 8193], [128, 129, 0], [8192, 17, 2048]):
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        check(case, out, lse)
