"""The Gluon kernel for 2 to 8 query tokens. On the CPU: which calls it takes, and that it compiles. On a GPU: against the oracle.

A wrong handshake hangs a GPU, so a test that takes longer than two minutes ends the process.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests.tkernels.attention.cases import Case, check, check_far_pages, make_case
from tests.tkernels.attention.test_batches import part
from tests.tkernels.attention.test_prefill_sm90 import call, compile_offline
from tests.tkernels.attention.test_values import attend
from tkernels import _dependent, _repeats
from tkernels.attention import _sm90, decode_sm90, paged

SHAPE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 128, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
gpu = pytest.mark.gpu


# ---- which calls it takes


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (lambda: call(dim=32), "head dimension 32: expected 33 to 128"),
        (lambda: call(dim=136), "head dimension 136"),
        (lambda: call(dim=128, page_size=8), "page size 8"),
        (lambda: call(dim=128, dtype=torch.float32), "float32 queries"),
        (lambda: call(q=torch.zeros((32, 18, 128), dtype=torch.bfloat16), dim=128), "18 heads on 2 KV heads: expected at most 8 for each"),
        (lambda: call(q=torch.zeros((32, 4, 130), dtype=torch.bfloat16)[..., :128], dim=128), r"q: strides \[520, 130, 1\]"),
    ],
)
def test_refused_calls_say_why(inputs: Any, word: str) -> None:
    problem = decode_sm90.refusal(inputs(), "sm_90")
    assert problem is not None
    assert re.search(word, problem), problem


@pytest.mark.usefixtures("gluon_compiles")
def test_taken_calls() -> None:
    qkv = torch.zeros((32, 8 * 128), dtype=torch.bfloat16)
    both = torch.zeros((4, 2, 16, 2, 128), dtype=torch.bfloat16)
    for x in (
        call(dim=128), call(dim=128, dtype=torch.float16), call(dim=128, page_size=256), call(dim=128, q=qkv[:, :512].view(32, 4, 128)),
        call(dim=128, k_cache=both[:, 0], v_cache=both[:, 1]), call(dim=128, window=5, softcap=5.0), call(dim=80),
        call(dim=128, k_scale=torch.ones(1)),
    ):  # fmt: skip
        assert decode_sm90.refusal(x, "sm_90") is None
        assert "sm_80" in str(decode_sm90.refusal(x, "sm_80"))


@pytest.mark.usefixtures("gluon_compiles")
def test_each_kernel_has_its_own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(_repeats, "forget", lambda: forgotten.append(True))
    decode_sm90.enable(False)
    try:
        assert "switched off by tkernels.attention.decode_sm90" in str(decode_sm90.absence("sm_90"))
        assert _sm90.absence("prefill", "sm_90") is None
    finally:
        decode_sm90.enable(True)
    assert decode_sm90.absence("sm_90") is None
    assert len(forgotten) == 2, "launches of the other kernel would be repeated"


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize(
    ("queries", "kernels"),
    [
        ([1, 1], [("decode 1", _dependent.ALONE)]),
        ([1, 8], [("sm90", _dependent.FIRST), ("decode 1", _dependent.BESIDE)]),
        ([30, 3], [("sm90", _dependent.FIRST), ("decode 1", _dependent.BESIDE), ("prefill", _dependent.BESIDE)]),
    ],
)
def test_a_sequence_of_one_token_takes_the_same_kernel_in_every_bucket(queries, kernels, monkeypatch) -> None:
    launched: list[tuple[str, int]] = []

    def noted(name: str, place: int) -> list[torch.Tensor]:
        launched.append((name, place))
        return []

    monkeypatch.setattr(paged, "target_of", lambda device: type("Target", (), {"arch": "sm_90"}))
    monkeypatch.setattr(paged.decode_sm90, "decode_sm90", lambda inputs, out, lse, place: noted("sm90", place))
    monkeypatch.setattr(paged, "decode", lambda inputs, out, lse, queries, beside=False, place=0: noted(f"decode {queries}", place))
    monkeypatch.setattr(paged.prefill_sm90, "prefill_sm90", lambda inputs, out, lse, min_query, place: noted("prefill", place))
    case = make_case([40, 40], queries, **SHAPE | {"device": "cpu"})
    inputs = paged.check_inputs(*case.tensors, 0.1, True, 0, 0.0, None, None, None, 1.0)
    paged.launch(inputs, torch.empty_like(case.q), None, max(queries))
    assert launched == kernels


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize("seqs", [1, 16, 8192])
@pytest.mark.parametrize(("heads", "kv_heads", "mib"), [(32, 8, 32), (64, 8, 64), (8, 1, 264)])
def test_the_workspace_is_bounded_by_the_device(heads: int, kv_heads: int, mib: int, seqs: int) -> None:
    """Heads of 128 on 132 multiprocessors, beside the states: whatever the number of sequences."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    case = make_case([2], [2], heads=heads, kv_heads=kv_heads, dim=128, page_size=16, dtype=torch.bfloat16)
    x = paged.check_inputs(*case.tensors, 0.1, True, 0, 0.0, None, None, None, 1.0)._replace(num_seqs=seqs)
    constant = decode_sm90.constants(x, False, 132)
    taken = min(seqs, constant["PROGRAMS"]) * kv_heads * constant["LEAVES"] * constant["SLOT_ROWS"] * 128 * 4
    assert taken <= mib << 20 and (seqs < 8192 or taken == mib << 20)
    assert constant["BY_RANGE"] == (seqs > constant["PROGRAMS"])


@pytest.mark.usefixtures("gluon_compiles")
def test_temporaries_of_launches_beside_each_other_live_until_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a later launch would be given the memory that an earlier one still uses."""
    made: list[weakref.ref[torch.Tensor]] = []

    def launched(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        assert all(ref() is not None for ref in made)
        temporary = torch.empty(4)
        made.append(weakref.ref(temporary))
        return [temporary]

    monkeypatch.setattr(paged, "target_of", lambda device: type("Target", (), {"arch": "sm_90"}))
    monkeypatch.setattr(paged, "decode", launched)
    monkeypatch.setattr(paged, "prefill", launched)
    for module in ("decode_sm90", "decode_fp8_sm90", "prefill_sm90"):
        monkeypatch.setattr(getattr(paged, module), module, launched)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        case = make_case([40, 40], [30, 3], **SHAPE | {"device": "cpu", "dtype": dtype, "q_dtype": torch.bfloat16})
        paged.launch(paged.check_inputs(*case.tensors, 0.1, True, 0, 0.0, None, None, None, 1.0), torch.empty_like(case.q), None, 30)
        assert len(made) == 3 and not any(ref() is not None for ref in made)
        made.clear()


# ---- that it compiles


def verify_compiled(cases: list[dict[str, Any]]) -> None:
    for case, facts in zip(cases, compile_offline([{"kernel": "decode"} | case for case in cases]), strict=True):
        assert facts["spills"] <= 64, (case, facts)  # bytes stored and loaded, outside the loops over keys
        assert facts["shared"] <= 227 << 10, (case, facts)
        assert facts["wgmma"] > 0


def test_compiles_for_sm_90() -> None:
    verify_compiled([{"pdl": 2}, {"dim": 64, "pdl": 1}])


@pytest.mark.slow
def test_every_specialisation_compiles() -> None:
    verify_compiled(
        [{"dim": dim, "page_size": page} for dim in (64, 128) for page in (16, 32, 64, 128, 256)]
        + [{"dim": dim, "pdl": 1, "dtype": "float16"} for dim in (64, 80, 128)]
        + [{"dim": dim, "causal": False, "sinks": True, "lse": True} for dim in (64, 128)]
        + [{"dim": dim, "window": 100} for dim in (64, 128)]
        + [{"dim": dim, "softcap": 30.0} for dim in (64, 128)]
        + [{"kv_heads": 32}, {"heads": 28, "kv_heads": 4}, {"heads": 64, "kv_heads": 8}]
    )
    everything = {"window": 100, "softcap": 30.0, "sinks": True, "lse": True, "scales": True}
    verify_compiled([everything | {"dim": dim} for dim in (64, 128)])


# ---- against the oracle, on a GPU


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, in_time: None) -> Generator[list[bool]]:
    """Launches of the kernel, which the op must choose."""
    launches: list[bool] = []
    launch = decode_sm90.decode_sm90

    def listed(*arguments: Any) -> list[torch.Tensor]:
        launches.append(True)
        return launch(*arguments)

    monkeypatch.setattr(paged.decode_sm90, "decode_sm90", listed)
    _repeats.forget()  # a repeated call launches past the list
    yield launches
    assert launches, "the call went to the plain Triton kernel"


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = make_case(*arguments, **{**SHAPE, **keywords})
    check(case, *attend(case))
    return case


RAGGED = ([1000, 33, 0, 700, 129, 5000, 300, 12, 8, 2], [1, 8, 0, 5, 3, 2, 4, 7, 8, 2])


@gpu
@pytest.mark.parametrize("length", [2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 20000])
def test_lengths(taken, length):
    verify([length], [2])
    verify([length] * 3, [min(length, 8)] * 3)


@gpu
@pytest.mark.parametrize("keywords", [{}, {"window": 2}, {"causal": False}], ids=str)
def test_odd_sequences(taken, keywords):
    """Empty ones, more query tokens than keys, lengths beyond the table, and no sequence that is the kernel's."""
    lens, query_lens = [304, 304, 0, 3, 1, 0], [4, 8, 2, 8, 2, 0]
    case = make_case(lens, query_lens, extra_rows=2, sinks=torch.randn(8, device="cuda"), **{**SHAPE, **keywords})
    expected = attend(case)
    check(case, *expected)
    case.seq_lens[:2] = 1 << 30  # the table has pages for 304
    assert all(map(torch.equal, attend(case), expected))
    verify([0, 0, 0], [2, 8, 3], **keywords)
    verify([300, 40, 0], [1, 1, 1], max_query_len=8, **keywords)


@gpu
def test_b098_cache_beyond_2_to_31_elements(taken):
    check_far_pages(4)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_and_dims(taken, dim, page_size, dtype):
    verify(*RAGGED, dim=dim, page_size=page_size, dtype=dtype, extra_rows=3)


@gpu
@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112])
def test_head_dimensions_between(taken, dim):
    """Columns that fill a block up to a power of two are neither read nor written."""
    case = verify(*RAGGED, dim=dim, extra_rows=3, sinks=torch.randn(8, device="cuda"))
    wide = torch.full((case.q.shape[0], 8, dim + 8), float("nan"), dtype=case.q.dtype, device="cuda")
    paged.paged_attention_out(*case.tensors, **case.keywords, out=wide[..., :dim])
    assert torch.equal(wide[..., :dim], attend(case)[0]) and torch.isnan(wide[..., dim:]).all()


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (3, 3), (7, 1), (16, 2), (10, 2), (160, 160)])
def test_group_ratios(taken, heads, kv_heads):
    """160 KV heads: more than there are programs."""
    verify(*RAGGED, heads=heads, kv_heads=kv_heads)


@gpu
@pytest.mark.parametrize(
    "keywords",
    [
        {"causal": False}, {"sinks": True}, {"k_scale": 0.5, "v_scale": 3.0}, {"k_scale": "device", "v_scale": "device"},
        {"window": 1}, {"window": 100}, {"window": 129, "sinks": True}, {"window": 6000},
        {"softcap": 5.0}, {"softcap": 5.0, "causal": False}, {"softcap": 5.0, "window": 100, "sinks": True, "k_scale": "device"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128])
def test_features(taken, dim, keywords):
    keywords = {name: torch.tensor([0.5, 2.0], device="cuda") if value == "device" else value for name, value in keywords.items()}
    if keywords.pop("sinks", False):
        keywords["sinks"] = torch.randn(8, device="cuda")
    verify(*RAGGED, dim=dim, extra_rows=3, **keywords)


@gpu
def test_queries_of_either_kind_beside_prompts(taken):
    verify([1000, 300, 700, 2000, 64], [1, 300, 8, 100, 2])


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_pages_before_the_window_belong_to_others(taken, window, freed):
    """What they hold, NaN too, changes no bit."""
    lens, query_lens = [700, 1500, 129], [2, 8, 3]
    case = make_case(lens, query_lens, window=window, **SHAPE)
    expected, expected_lse = attend(case)
    check(case, expected, expected_lse)
    for s, (length, query_len) in enumerate(zip(lens, query_lens, strict=True)):
        start = max(length - query_len - window + 1, 0)  # the first key that a query sees
        case.block_table[s, : start // 16] = -1 if freed == "gone" else 0  # page 0 is NaN
        page = int(case.block_table[s, start // 16])
        case.k_cache[page, : start % 16] = case.v_cache[page, : start % 16] = float("nan")
    out, lse = attend(case)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
def test_shared_memory_that_another_kernel_left(taken, value):
    from tests.tkernels.attention.shared_memory import fill_shared_memory

    for lens, query_lens, heads in (([128], [2], 1), ([200, 300], [8, 1], 8), ([3000, 300, 0], [2, 7, 4], 8)):
        case = make_case(lens, query_lens, **{**SHAPE, "heads": heads, "kv_heads": 1})
        fill_shared_memory(value)
        check(case, *attend(case))


@gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_more_sequences_than_the_scheduler_searches_at_once(taken, kv_heads):
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(400).tolist()]
    query_lens = [1 if i % 3 == 0 else min(n, 1 + i % 8) for i, n in enumerate(lens)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, kv_heads=kv_heads, heads=8, extra_rows=5)


@gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_alone_in_a_batch_and_in_every_bucket(taken, dim):
    lens = [1000, 300, 9000, 129, 2000, 64, 40, 4097]
    query_lens = [1, 8, 6, 3, 2, 1, 5, 4]
    case = make_case(lens, query_lens, **{**SHAPE, "dim": dim})
    out, lse = attend(case)
    starts = case.cu_seqlens_q.tolist()
    for s, query_len in enumerate(query_lens):
        rows = slice(starts[s], starts[s + 1])
        for bucket in (8, query_len, 200):
            alone, alone_lse = attend(part(case, s, s + 1, bucket))
            assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows]), f"sequence {s} in bucket {bucket}"


@gpu
def test_a_thousand_runs_beside_other_work(taken):
    """Programs of other kernels come between those of a launch: no bit depends on it."""
    case = make_case([int(n) for n in torch.randint(8, 6000, (40,))], [1 + i % 8 for i in range(40)], **SHAPE)
    expected, _ = attend(case)
    noise, other = torch.randn((2048, 2048), device="cuda"), torch.cuda.Stream()
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        assert torch.equal(attend(case)[0], expected), i


@gpu
def test_dependent_launch_has_the_same_bits(taken):
    case = make_case([1000, 33, 300, 12, 5000], [3, 8, 1, 7, 2], **SHAPE)
    expected, expected_lse = attend(case)
    _dependent.enable(True)
    try:
        attend(case)
        torch.cuda.synchronize()
        out, lse = torch.full_like(expected, float("nan")), torch.full_like(expected_lse, float("nan"))
        q = torch.zeros_like(case.q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                q.copy_(case.q)  # the launch before writes the queries
                paged.paged_attention_out(q, *case.tensors[1:], **case.keywords, out=out, lse=lse)
                q.zero_()
        for _ in range(50):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    finally:
        _dependent.enable(False)
