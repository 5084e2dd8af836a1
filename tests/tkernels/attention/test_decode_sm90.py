"""The Gluon kernel for up to 8 query tokens, of as many heads that decode_one_sm90.py takes fewer. On the CPU: which calls it takes, and
that it compiles. On a GPU: against the oracle.

A wrong handshake hangs a GPU, so a test that takes longer than two minutes ends the process.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases, sm90_checks
from tests.tkernels.attention.cases import Case, check, check_far_pages, make_case
from tests.tkernels.attention.sm90_cases import call, check_workspace, compile_offline, launches_chosen, launches_of
from tests.tkernels.attention.test_batches import checked
from tests.tkernels.attention.test_values import attend
from tkernels import _dependent, _repeats
from tkernels.attention import _sm90, decode_sm90, paged

SHAPE: dict[str, Any] = sm90_cases.SHAPE | {"heads": 16}  # 8 a group: those of up to 4 tokens are not this kernel's
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


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("queries", "kernels"),
    [
        ([1, 1], [("decode_one_sm90 1 to 1", _dependent.ALONE)]),
        ([1, 8], [("decode_sm90 5 to 8", _dependent.FIRST), ("decode_one_sm90 1 to 4", _dependent.BESIDE)]),
        (
            [30, 3],
            [
                ("decode_sm90 5 to 8", _dependent.FIRST),
                ("decode_one_sm90 2 to 4", _dependent.BESIDE),
                ("decode_one_sm90 1 to 1", _dependent.BESIDE),
                ("prefill_sm90", _dependent.BESIDE),
            ],
        ),
    ],
)
def test_a_sequence_takes_the_same_kernel_in_every_bucket(queries, kernels, monkeypatch) -> None:
    case = make_case([40, 40], queries, **SHAPE | {"device": "cpu"})
    assert launches_chosen(case, max(queries), monkeypatch) == kernels


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize("seqs", [1, 16, 8192])
@pytest.mark.parametrize(("heads", "kv_heads", "mib"), [(64, 8, 64), (8, 1, 264)])
def test_the_workspace_is_bounded_by_the_device(heads: int, kv_heads: int, mib: int, seqs: int) -> None:
    """Beside the states: whatever the number of sequences."""
    check_workspace(
        decode_sm90, make_case([2], [2], **SHAPE | {"heads": heads, "kv_heads": kv_heads, "device": "cpu"}), seqs, mib, min_queries=5
    )


@pytest.mark.usefixtures("on_hopper")
def test_temporaries_of_launches_beside_each_other_live_until_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a later launch would be given the memory that an earlier one still uses."""
    made: list[weakref.ref[torch.Tensor]] = []

    def launched(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        assert all(ref() is not None for ref in made)
        temporary = torch.empty(4)
        made.append(weakref.ref(temporary))
        return [temporary]

    monkeypatch.setattr(paged, "decode", launched)
    monkeypatch.setattr(paged, "prefill", launched)
    for module in ("decode_sm90", "decode_one_sm90", "prefill_sm90"):
        monkeypatch.setattr(getattr(paged, module), module, launched)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        case = make_case([40, 40], [30, 3], **SHAPE | {"device": "cpu", "dtype": dtype, "q_dtype": torch.bfloat16})
        paged.launch(checked(case), torch.empty_like(case.q), None, 30)
        assert len(made) == 4 and not any(ref() is not None for ref in made)
        made.clear()


# ---- that it compiles


def verify_compiled(cases: list[dict[str, Any]]) -> None:
    shape = {"kernel": "decode", "heads": 64, "min_queries": 5}
    for case, facts in zip(cases, compile_offline([shape | case for case in cases]), strict=True):
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
        + [{"heads": 28, "kv_heads": 4}, {"heads": 8, "kv_heads": 1}]
    )
    everything = {"window": 100, "softcap": 30.0, "sinks": True, "lse": True, "scales": True}
    verify_compiled([everything | {"dim": dim} for dim in (64, 128)])


# ---- against the oracle, on a GPU


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, in_time: None) -> Iterator[list[Any]]:
    """Launches of the kernel, which the op must choose."""
    yield from launches_of(decode_sm90, monkeypatch)


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = make_case(*arguments, **{**SHAPE, **keywords})
    check(case, *attend(case))
    return case


RAGGED = ([1000, 33, 0, 700, 129, 5000, 300, 12, 8, 2], [1, 8, 0, 5, 3, 2, 4, 7, 8, 2])


@gpu
@pytest.mark.parametrize("length", [5, 15, 16, 17, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 20000])
def test_lengths(taken, length):
    verify([length], [5])
    verify([length] * 3, [min(length, 8)] * 3)


@gpu
@pytest.mark.parametrize("keywords", [{}, {"window": 2}, {"causal": False}], ids=str)
def test_odd_sequences(taken, keywords):
    """Empty ones, more query tokens than keys, lengths beyond the table, and no sequence that is the kernel's."""
    lens, query_lens = [304, 304, 0, 3, 1, 0], [6, 8, 5, 8, 7, 0]
    case = make_case(lens, query_lens, extra_rows=2, sinks=torch.randn(16, device="cuda"), **{**SHAPE, **keywords})
    expected = attend(case)
    check(case, *expected)
    case.seq_lens[:2] = 1 << 30  # the table has pages for 304
    assert all(map(torch.equal, attend(case), expected))
    verify([0, 0, 0], [5, 8, 6], **keywords)
    verify([300, 40, 0], [1, 3, 1], max_query_len=8, **keywords)


@gpu
def test_b098_cache_beyond_2_to_31_elements(taken):
    check_far_pages(6, heads=64)


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
    sm90_checks.check_inside_a_wider_out(verify(*RAGGED, dim=dim, extra_rows=3, sinks=torch.randn(16, device="cuda")))


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 1), (6, 1), (7, 1), (16, 2), (10, 2), (800, 160)])
def test_group_ratios(taken, heads, kv_heads):
    """160 KV heads: more than there are programs."""
    lens, query_lens = RAGGED if kv_heads < 160 else ([300, 33, 129], [5, 8, 2])
    verify(lens, query_lens, heads=heads, kv_heads=kv_heads)


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
    verify(*RAGGED, dim=dim, extra_rows=3, **sm90_checks.on_device(keywords, heads=16))


@gpu
def test_queries_of_either_kind_beside_prompts(taken):
    verify([1000, 300, 700, 2000, 64], [1, 300, 8, 100, 2])


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_pages_before_the_window_belong_to_others(taken, window, freed):
    sm90_checks.check_pages_before_the_window(make_case([700, 1500, 129], [5, 8, 6], window=window, **SHAPE), freed)


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
def test_shared_memory_that_another_kernel_left(taken, value):
    batches = ([128], [5], 5), ([200, 300], [8, 1], 8), ([3000, 300, 0], [2, 7, 5], 8)
    cases = [make_case(lens, query_lens, **{**SHAPE, "heads": heads, "kv_heads": 1}) for lens, query_lens, heads in batches]
    sm90_checks.check_after_filling_shared_memory(value, cases)


@gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_more_sequences_than_the_scheduler_searches_at_once(taken, kv_heads):
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(400).tolist()]
    query_lens = [1 if i % 3 == 0 else min(n, 1 + i % 8) for i, n in enumerate(lens)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, kv_heads=kv_heads, heads=8 * kv_heads, extra_rows=5)


@gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_alone_in_a_batch_and_in_every_bucket(taken, dim):
    case = make_case([1000, 300, 9000, 129, 2000, 64, 40, 4097], [1, 8, 6, 3, 2, 1, 5, 4], **{**SHAPE, "dim": dim})
    sm90_checks.check_bits_alone(case, 8, 200)


@gpu
def test_a_thousand_runs_beside_other_work(taken):
    lens = [int(n) for n in torch.randint(8, 6000, (40,))]
    sm90_checks.check_a_thousand_runs_beside_other_work(make_case(lens, [1 + i % 8 for i in range(40)], **SHAPE))


@gpu
def test_dependent_launch_has_the_same_bits(taken):
    sm90_checks.check_dependent_launches(make_case([1000, 33, 300, 12, 5000], [3, 8, 1, 7, 2], **SHAPE))
