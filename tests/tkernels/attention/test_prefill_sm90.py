"""The Gluon prefill kernel. On the CPU: which calls it takes, and that it compiles without spills. On a GPU: against the oracle.

A wrong handshake hangs a GPU, so a test that takes longer than two minutes ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_checks
from tests.tkernels.attention.cases import Case, check, check_far_pages, make_case
from tests.tkernels.attention.sm90_cases import SHAPE, call, compile_offline, launches_of
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels import _repeats
from tkernels.attention import paged, prefill_sm90

gpu = pytest.mark.gpu


# ---- which calls it takes


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (lambda: call(dim=32), "head dimension 32: expected 33 to 256"),
        (lambda: call(page_size=8), "page size 8"),
        (lambda: call(page_size=48), "page size 48"),
        (lambda: call(dtype=torch.float32), "float32 queries"),
        (lambda: call(k_scale=torch.ones(1)), "scales"),
        (lambda: call(block_table=torch.zeros(2, dtype=torch.int32).as_strided((1, 2), (1 << 18, 1))), "block_table: a row stride"),
        (lambda: call(q=torch.zeros((32, 4, 66), dtype=torch.bfloat16)[..., :64]), r"q: strides \[264, 66, 1\]"),
        (lambda: call(q=torch.zeros(32 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(32, 4, 64)), "q: its address"),
        (lambda: call(k_cache=torch.zeros((1, 16, 2, 64), dtype=torch.bfloat16).expand(4, -1, -1, -1)), "k_cache: strides"),
        (lambda: call(v_cache=torch.zeros((4, 16, 2, 68), dtype=torch.bfloat16)[..., :64]), "v_cache: strides"),
    ],
)
def test_refused_calls_say_why(inputs: Any, word: str) -> None:
    x = inputs()
    problem = prefill_sm90.refusal(x, torch.zeros(x.q.shape, dtype=x.q.dtype), "sm_90")
    assert problem is not None
    assert re.search(word, problem), problem


@pytest.mark.usefixtures("gluon_compiles")
def test_taken_calls() -> None:
    """Both layouts of a page, one allocation for K and V, a q that is part of a fused projection, one KV head of any stride."""
    qkv = torch.zeros((32, 8 * 64), dtype=torch.bfloat16)
    both = torch.zeros((4, 2, 16, 2, 64), dtype=torch.bfloat16)
    by_head = torch.zeros((4, 2, 16, 64), dtype=torch.bfloat16).transpose(1, 2)
    single = torch.zeros((4, 16, 64), dtype=torch.bfloat16).as_strided((4, 16, 1, 64), (1024, 64, 3, 1))
    for x in (
        call(), call(dtype=torch.float16), call(dim=128, page_size=256), call(q=qkv[:, :256].view(32, 4, 64)),
        call(k_cache=both[:, 0], v_cache=both[:, 1]), call(window=5, softcap=5.0),
        call(dim=128, window=5), call(dim=128, softcap=5.0), call(dim=256, window=5, softcap=5.0),
        call(dim=40), call(dim=80), call(dim=192), call(k_cache=by_head, v_cache=by_head), call(k_cache=single, v_cache=single),
    ):  # fmt: skip
        out = torch.zeros(x.q.shape, dtype=x.q.dtype)
        assert prefill_sm90.refusal(x, out, "sm_90") is None
        assert "sm_80" in str(prefill_sm90.refusal(x, out, "sm_80"))
        assert "out: strides" in str(prefill_sm90.refusal(x, torch.zeros((*x.q.shape[:2], x.dim + 2)).bfloat16()[..., : x.dim], "sm_90"))


@pytest.fixture
def switch() -> Iterator[Callable[[bool], None]]:
    yield prefill_sm90.enable
    prefill_sm90.enable(True)


@pytest.mark.usefixtures("gluon_compiles")
def test_absence_says_why(switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(_repeats, "forget", lambda: forgotten.append(True))
    for enabled in (True, False):
        switch(enabled)
        assert "sm_80" in str(prefill_sm90.absence("sm_80"))
        assert (prefill_sm90.absence("sm_90") is None) == enabled
        problem = prefill_sm90.refusal(call(), torch.zeros((32, 4, 64), dtype=torch.bfloat16), "sm_90")
        assert (problem is None) if enabled else ("switched off" in str(problem))
    assert len(forgotten) == 2, "launches of the other kernel would be repeated"


def test_refused_without_gluon() -> None:
    problem = prefill_sm90.refusal(call(), torch.zeros((32, 4, 64), dtype=torch.bfloat16), "sm_90")
    assert torch.cuda.is_available() or "Gluon" in str(problem) or "triton" in str(problem)


# ---- that it compiles


def verify_compiled(cases: list[dict[str, Any]]) -> None:
    for case, facts in zip(cases, compile_offline(cases), strict=True):
        assert facts["spills"] == 0, (case, facts)
        assert facts["registers"] == (128 if "float8" in case.get("dtype", "") else 168)  # of 512 or 384 threads that share 64 Ki
        assert facts["shared"] <= 227 << 10
        assert facts["wgmma"] > 0


def test_products_of_the_plain_kernel_for_many_keys_run_beside_the_softmax():
    """The assembler makes each product wait for the one before it where it sees anything that it takes for a hazard, and only says so."""
    shapes: list[dict[str, Any]] = [
        {}, {"softcap": 30.0}, {"page_size": 128}, {"page_size": 12, "dtype": "float16"}, {"dim": 96, "causal": False},
        {"heads": 28, "kv_heads": 4},
    ]  # fmt: skip
    cases = [{"kernel": "long_prefill", "pdl": 1} | shape for shape in shapes]
    for case, facts in zip(cases, compile_offline(cases), strict=True):
        assert not facts["serialised"] and facts["wgmma"] and not facts["mma"], (case, facts)


def test_compiles_for_sm_90_without_spills() -> None:
    verify_compiled(
        [{"dim": 128, "page_size": 16, "pdl": 2}, {"dim": 256, "page_size": 16, "pdl": 1}, {"dim": 256, "window": 100, "lse": True}]
    )


@pytest.mark.slow
def test_every_specialisation_compiles_without_spills() -> None:
    verify_compiled(
        [{"dim": dim, "page_size": page} for dim in (64, 128, 256) for page in (16, 32, 64, 128, 256)]
        + [{"dim": dim, "causal": False, "sinks": True} for dim in (64, 128, 256)]
        + [{"dim": dim, "dtype": "float16", "sinks": True, "lse": True} for dim in (64, 80, 128, 192, 256)]
        + [{"dim": dim, "window": 100, "lse": True} for dim in (64, 128, 256)]
        + [{"dim": dim, "window": 100, "sinks": True, "lse": True} for dim in (96, 256)]
        + [{"dim": dim, "softcap": 30.0, "sinks": True, "lse": True} for dim in (64, 128, 256)]
        + [{"dim": dim, "window": 100, "softcap": 30.0, "sinks": True, "lse": True} for dim in (64, 128, 256)]
        + [{"dim": dim, "softcap": 30.0, "causal": False} for dim in (128, 256)]
        + [{"kv_heads": 32}, {"heads": 28, "kv_heads": 4, "lse": True}]
    )


# ---- against the oracle, on a GPU


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, in_time: None) -> Iterator[list[Any]]:
    """Launches of the kernel, which the op must choose."""
    yield from launches_of(prefill_sm90, monkeypatch)


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = make_case(*arguments, **{**SHAPE, **keywords})
    check(case, *attend(case))
    return case


RAGGED = ([1000, 33, 0, 700, 129, 2000, 300, 12, 9], [1, 33, 0, 5, 129, 300, 257, 12, 9])


@gpu
def test_one_tile(taken):
    verify([128], [128])


@gpu
@pytest.mark.parametrize("query_len", [9, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 600])
@pytest.mark.parametrize("dim", [128, 256])
def test_query_lengths(taken, dim, query_len):
    verify([query_len], [query_len], dim=dim)


@gpu
@pytest.mark.parametrize("prefix", [1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("dim", [128, 256])
def test_chunks_on_a_prefix(taken, dim, prefix):
    verify([prefix + 200, prefix + 64, prefix + 9], [200, 64, 9], dim=dim)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_and_dims(taken, dim, page_size, dtype):
    verify(*RAGGED, dim=dim, page_size=page_size, dtype=dtype, extra_rows=3)


@gpu
@pytest.mark.parametrize("dim", [40, 80, 96, 112, 136, 192, 200])
def test_head_dimensions_between(taken, dim):
    """Columns that fill a block up to a power of two are neither read nor written."""
    sm90_checks.check_inside_a_wider_out(verify(*RAGGED, dim=dim, extra_rows=3, sinks=torch.randn(8, device="cuda")))


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (3, 3), (7, 1), (16, 2), (16, 1), (10, 2)])
def test_group_ratios(taken, heads, kv_heads):
    verify(*RAGGED, heads=heads, kv_heads=kv_heads)


@gpu
@pytest.mark.parametrize(
    "keywords",
    [
        {"causal": False}, {"sinks": True}, {"causal": False, "sinks": True}, {"k_scale": 0.5, "v_scale": 3.0},
        {"window": 1}, {"window": 100}, {"window": 129, "sinks": True}, {"window": 5000},
        {"softcap": 5.0}, {"softcap": 5.0, "causal": False}, {"softcap": 5.0, "window": 100, "sinks": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_features(taken, dim, keywords):
    verify(*RAGGED, dim=dim, extra_rows=3, **sm90_checks.on_device(keywords))


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize("dim", [128, 256])
def test_pages_before_the_window_belong_to_others(taken, dim, window, freed):
    sm90_checks.check_pages_before_the_window(make_case([700, 1500, 129], [100, 257, 129], window=window, **{**SHAPE, "dim": dim}), freed)


@gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dim", [128, 256])
def test_rows_that_see_no_key(taken, dim, sinks):
    """Sequences of length 0 with queries, with a table of -1, and with more queries than keys: zero rows, LSE -inf or the sink's."""
    keywords = {"sinks": torch.randn(8, device="cuda")} if sinks else {}
    verify([0, 200, 100, 5, 0], [40, 200, 300, 150, 1], dim=dim, **keywords)


@gpu
def test_lengths_beyond_the_table_are_cut(taken):
    case = make_case([304, 200], [60, 200], max_pages=19, **SHAPE)
    case.seq_lens[0] = 5000
    out, lse = attend(case)
    case.seq_lens[0] = 19 * 16
    check(case, *attend(case))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@gpu
def test_strides(taken):
    """K and V in one allocation too."""
    sm90_checks.check_strides(verify(*RAGGED, interleaved=True))


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_shared_memory_that_another_kernel_left(taken, dim, value):
    """Programs that end before their ring of tile descriptions was filled once must use nothing that lay there before."""
    batches = ([128], [128], 1), ([200, 300], [100, 300], 8), ([3000, 300, 0], [700, 257, 40], 32)
    cases = [make_case(lens, query_lens, **{**SHAPE, "dim": dim, "heads": heads, "kv_heads": 1}) for lens, query_lens, heads in batches]
    sm90_checks.check_after_filling_shared_memory(value, cases)


@gpu
def test_many_sequences_of_many_lengths(taken):
    """More sequences than the scheduler reads at once, over eleven levels of length, decode rows and empty ones between them."""
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(150).tolist()]
    query_lens = [1 if i % 3 == 0 else min(n, 9 + 37 * i % 300) for i, n in enumerate(lens)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, heads=4, extra_rows=5)


@gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bits_alone_and_in_a_batch(taken, dim):
    case = make_case([1000, 300, 700, 129, 2000, 64, 40], [200, 300, 1, 129, 300, 64, 9], **{**SHAPE, "dim": dim})
    sm90_checks.check_bits_alone(case)


@gpu
def test_one_graph_serves_every_length(taken):
    case = make_case([2048] * 4, [256] * 4, poison=False, **SHAPE)
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device="cuda")

    def step() -> None:
        paged.paged_attention_out(*case.tensors, **case.keywords, out=out, lse=lse)

    graph, _ = captured(lambda: (step(), step()))
    for lens, starts in (
        ([2048] * 4, [0, 256, 512, 768, 1024]), ([0, 9, 1000, 2047], [0, 0, 9, 500, 1024]), ([256, 300, 1, 2048], [0, 256, 512, 513, 768]),
        ([5, 5, 5, 1024], [0, 1, 2, 3, 1024]), ([1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ):  # fmt: skip
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        case.cu_seqlens_q.copy_(torch.tensor(starts, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        replayed, replayed_lse = out.clone(), lse.clone()
        check(Case(*case.tensors, case.keywords | {"max_query_len": 1024}), replayed, replayed_lse)
        step()
        assert torch.equal(replayed, out) and torch.equal(replayed_lse, lse)


@gpu
def test_two_streams_at_once(taken):
    cases = [make_case([1500, 700], [900, 300], **SHAPE), make_case([300, 2500], [300, 600], **SHAPE)]
    expected = [attend(case)[0] for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, case, result in zip(streams, cases, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(attend(case)[0])
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        assert all(torch.equal(out, right) for out in result)


@gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_thousand_reruns_under_stress(taken, dim):
    case = make_case([1000, 33, 700, 129, 3000, 300], [500, 33, 5, 129, 300, 257], **{**SHAPE, "dim": dim, "heads": 32, "kv_heads": 8})
    sm90_checks.check_a_thousand_runs_under_stress(case)


@gpu
def test_b098_cache_beyond_2_to_31_elements(taken):
    check_far_pages(40)


@gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_spills_and_no_compilation_for_other_batches(taken, dim):
    import triton.knobs

    attend(make_case([200, 300], [100, 300], **{**SHAPE, "dim": dim}))
    assert taken[-1].n_spills == 0
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **k: compiled.append(str(k["repr"]))
    try:
        attend(make_case([200, 300], [101, 299], max_pages=37, **{**SHAPE, "dim": dim}))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled
