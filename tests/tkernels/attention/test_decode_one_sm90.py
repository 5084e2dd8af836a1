"""The Gluon kernel for one query token and a few, over a cache of 16 bits or of e4m3. On the CPU: which calls it takes, how it
cuts the work, and that it compiles. On a GPU: against the oracle.

A wrong handshake hangs a GPU, so a test that takes longer than two minutes ends the process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases, sm90_checks
from tests.tkernels.attention.cases import Case, check, make_case
from tests.tkernels.attention.sm90_cases import call, check_workspace, compile_offline, launches_chosen, launches_of
from tests.tkernels.attention.test_batches import checked, part
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels import _dependent
from tkernels._triton import next_power_of_2
from tkernels.attention import decode_one_sm90, decode_sm90, paged

FP8 = torch.float8_e4m3fn
SHAPE: dict[str, Any] = sm90_cases.SHAPE
gpu = pytest.mark.gpu
caches = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])


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
        (lambda: call(dim=128, dtype=torch.float32), "float32 queries on a torch.float32 cache: expected float16 or bfloat16 for both"),
        (lambda: call(dim=32), "head dimension 32: expected 33 to 256"),
        (lambda: call(q=torch.zeros((32, 18, 256), dtype=torch.bfloat16), dim=256), "18 heads on 2 KV heads: expected at most 8"),
        (lambda: call(q=torch.zeros((32, 34, 128), dtype=torch.bfloat16), dim=128), "34 heads on 2 KV heads"),
        (lambda: fp8_call(heads=34), "34 heads on 2 KV heads: expected at most 16 for each"),
        (lambda: fp8_call(dim=72), r"k_cache: strides \[2304, 144, 72, 1\]"),
    ],
)
def test_refused_calls_say_why(inputs: Any, word: str) -> None:
    problem = decode_one_sm90.refusal(inputs(), "sm_90")
    assert problem is not None
    assert re.search(word, problem), problem


@pytest.mark.usefixtures("gluon_compiles")
def test_taken_calls() -> None:
    both = torch.zeros((4, 2, 16, 2, 128), dtype=FP8)
    for x in (
        fp8_call(), fp8_call(dtype=torch.float16), fp8_call(page_size=256), fp8_call(dim=80), fp8_call(heads=32), fp8_call(dim=64),
        fp8_call(k_cache=both[:, 0], v_cache=both[:, 1]), fp8_call(window=5, softcap=5.0), fp8_call(k_scale=torch.ones(1)),
        call(dim=128), call(dim=64, dtype=torch.float16), call(dim=72), call(dim=192),
        call(q=torch.zeros((32, 32, 64), dtype=torch.bfloat16)),
    ):  # fmt: skip
        assert decode_one_sm90.refusal(x, "sm_90") is None
        assert "sm_80" in str(decode_one_sm90.refusal(x, "sm_80"))
    decode_sm90.enable(False)
    try:
        assert "switched off by tkernels.attention.decode_sm90" in str(decode_one_sm90.refusal(fp8_call(), "sm_90"))
    finally:
        decode_sm90.enable(True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("queries", "bucket"), [([1, 1], 1), ([1, 1], 8), ([1, 8], 8), ([2, 1], 2), ([3, 1], 3), ([30, 1], 30)])
@pytest.mark.parametrize(
    ("cache", "heads", "dim", "most", "more", "prompts"),
    [
        (FP8, 8, 128, 8, None, "prefill"),
        (FP8, 10, 128, 4, "decode 5 to 8", "prefill"),
        (torch.bfloat16, 2, 128, 8, None, "prefill_sm90"),
        (torch.bfloat16, 8, 64, 8, None, "prefill_sm90"),
        (torch.bfloat16, 16, 128, 4, "decode_sm90 5 to 8", "prefill_sm90"),
        (torch.bfloat16, 6, 256, 2, "decode 3 to 8", "prefill_sm90"),
        (torch.bfloat16, 10, 256, 1, "decode 2 to 8", "prefill_sm90"),
        (torch.float16, 32, 128, 2, "decode 3 to 8", "prefill_sm90"),
    ],
)
def test_one_kernel_for_a_sequence_in_every_bucket(queries, bucket, cache, heads, dim, most, more, prompts, monkeypatch) -> None:
    """And one alone that zeroes the rows of no sequence. Beside prompts those of one token have their own launch."""
    one = "decode_one_sm90 1 to 1"
    if bucket == 1:
        names = [one]
    elif bucket <= 8 or most == 1:
        asked = {2: 2, 3: 4}.get(bucket, 8)
        names = [more if bucket > most else None, f"decode_one_sm90 1 to {min(most, asked)}"]
    else:
        names = [more, f"decode_one_sm90 2 to {most}", one]
    names = [name for name in names if name] + ([prompts] if bucket > 8 else [])
    places = [_dependent.FIRST if len(names) > 1 else _dependent.ALONE] + [_dependent.BESIDE] * (len(names) - 1)
    if names[-1] == "prefill":
        places[-1] = _dependent.ALONE
    case = make_case([40, 40], queries, **SHAPE | {"device": "cpu", "dtype": cache, "heads": heads, "dim": dim})
    assert launches_chosen(case, bucket, monkeypatch) == list(zip(names, places, strict=True))


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize("seqs", [1, 16, 8192])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "mib"),
    [(32, 8, 1, 4), (64, 8, 1, 8), (8, 1, 1, 33), (16, 1, 1, 66), (32, 8, 8, 32), (64, 8, 4, 32), (8, 8, 8, 8), (8, 1, 4, 132)],
)
@caches
def test_the_workspace_is_bounded_by_the_device(cache, heads: int, kv_heads: int, queries: int, mib: int, seqs: int) -> None:
    """Beside the states: whatever the number of sequences. In proportion to the programs of a KV head."""
    case = make_case([2], [1], **SHAPE | {"heads": heads, "kv_heads": kv_heads, "device": "cpu", "dtype": cache})
    assert queries in (1, decode_one_sm90.most_queries(checked(case)))
    two = cache == torch.float8_e4m3fn and seqs >= 32 and queries * heads <= 8 * kv_heads  # programs a multiprocessor
    check_workspace(decode_one_sm90, case, seqs, mib * (264 // kv_heads) / (132 // kv_heads) if two else mib, queries=queries)


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize("dim", [64, 128, 256])
@caches
def test_rows_of_every_token_lie_in_their_slot(cache, dim: int) -> None:
    for group in range(1, 17 if dim <= 128 else 9):
        case = make_case([2], [1], **SHAPE | {"heads": 2 * group, "kv_heads": 2, "dim": dim, "device": "cpu", "dtype": cache})
        for queries in (1, 2, 4, 8):
            if queries <= decode_one_sm90.most_queries(checked(case)) and not (dim > 128 and cache.itemsize == 1):
                constant = decode_one_sm90.constants(checked(case), False, 132, queries)
                assert (queries - 1) * (constant["COLUMNS"] // queries) + group <= constant["SLOT_ROWS"], (group, queries)


# ---- how the work is cut


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of shared.py on tensors: (blocks and blocks a leaf of each length, begins of the ranges)."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from tkernels.attention._decode_sm90 import shared

    def lifted(function: Any) -> Any:
        return lambda *arguments: function(*map(torch.as_tensor, arguments))

    names = {name: lifted(getattr(torch, name)) for name in ("maximum", "minimum", "where")}
    monkeypatch.setattr(shared, "gl", SimpleNamespace(int32=torch.int32, **names))

    def found(lens: list[int], constant: dict[str, Any], window: int = 0) -> tuple[list[int], list[int], list[int]]:
        n = torch.tensor(lens)
        _first, blocks, leaf = shared.plan.fn(
            n, 1, window, window > 0, constant["BLOCK_N"], constant["LEAVES"], constant["UNCUT"], constant["LEAST"]
        )
        ranges = shared.make_ranges.fn(blocks.sum(), constant["PROGRAMS"])
        begins = [int(shared.range_begin.fn(ranges, j)) for j in range(constant["PROGRAMS"] + 1)]
        return blocks.tolist(), leaf.tolist(), begins

    return found


def taken_blocks(blocks: list[int], leaf: list[int], begins: list[int]) -> list[int]:
    """Of each range, its ends moved up to the next end of a leaf as the scheduler does; no leaf is left out, cut, or taken twice."""
    taken, leaves = [0] * (len(begins) - 1), []
    for j, (x, stop) in enumerate(itertools.pairwise(begins)):
        base = 0
        for s, (share, size) in enumerate(zip(blocks, leaf, strict=True)):
            if x < base + share and stop > base:
                begin = min(-(-max(x - base, 0) // size) * size, share)
                end = min(-(-(stop - base) // size) * size, share)
                leaves += [(s, block) for block in range(begin, end, size)]
                taken[j] += max(end - begin, 0)
            base += share
    assert leaves == [(s, block) for s, (share, size) in enumerate(zip(blocks, leaf, strict=True)) for block in range(0, share, size)]
    return taken


@pytest.mark.usefixtures("gluon_compiles")
@caches
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (32, 32)])
def test_leaves_are_taken_once_and_evenly(cut, cache, dim, heads, kv_heads) -> None:
    case = make_case([2], [1], **SHAPE | {"heads": heads, "kv_heads": kv_heads, "dim": dim, "device": "cpu", "dtype": cache})
    constant = decode_one_sm90.constants(checked(case), False, 132)
    block, leaves = constant["BLOCK_N"], constant["LEAVES"]
    for length in (0, 1, block, block + 1, 4 * block, 4 * block + 1, 1000, 1024, 1025, 8191, 8192, 8193, 50000, 131072):
        blocks, leaf, begins = cut([length], constant)
        assert max(taken_blocks(blocks, leaf, begins)) <= max(leaf[0], begins[1] + leaf[0] - 1)
        assert -(-blocks[0] // leaf[0]) <= leaves, "the workspace has as many slots"
        assert blocks[0] > constant["UNCUT"] or leaf[0] == blocks[0] or constant["UNCUT"] == 1
    for lens in ([1024] * 128, [8192] * 3, [4096] * 32, [0, 5, 8193, 300, 0, 131072, 64], [n % 1500 for n in range(0, 150000, 777)]):
        blocks, leaf, begins = cut(lens, constant)
        assert max(taken_blocks(blocks, leaf, begins)) <= begins[1] + max(leaf)
    blocks, leaf, begins = cut([131072, 40], constant, 1024)
    assert blocks == [-(-1024 // block), 1]
    taken_blocks(blocks, leaf, begins)


# ---- that it compiles


def verify_compiled(cases: list[dict[str, Any]]) -> None:
    for case, facts in zip(cases, compile_offline([{"kernel": "decode_one"} | case for case in cases]), strict=True):
        dim, fp8, queries = next_power_of_2(case.get("dim", 128)), case.get("fp8", False), case.get("queries", 1)
        columns = max(8, queries * next_power_of_2(case.get("heads", 32) // case.get("kv_heads", 8)))
        layout = decode_one_sm90.Layout(*case["layout"]) if "layout" in case else None
        layout = layout or decode_one_sm90.layout_of(dim, 1 if fp8 else 2, columns=columns, queries=queries)
        # bytes; of several tokens some of the words that describe a segment, one of which is read a block
        spilling = dim > 128 or (dim == 128 and queries > 1 and (fp8 or "window" in case))
        assert facts["spills"] <= (128 if spilling else 0), (case, facts)
        assert facts["registers"] <= 65536 // (32 * (layout.num_warps + 4)) // layout.programs_per_sm, (case, facts)
        assert layout.programs_per_sm * (facts["shared"] + 1024) <= 228 << 10, (case, facts)
        if facts["give_backs"] is not None:  # two for each kind of block, and the assembler has not seen through what they depend on
            assert facts["give_backs"] == 4 and facts["leading_zeros"] >= 4, (case, facts)
        # of a block with and of one without masks; of each, both products
        assert facts["mma"] == 4 * (layout.block_n // layout.warps // 16) * (dim // 16) * (columns // 8 // layout.split), (case, facts)


def test_compiles_for_sm_90() -> None:
    many, many_fp8 = list(decode_one_sm90.layout_of(64, 2, 64)), list(decode_one_sm90.layout_of(128, 1, 64))
    verify_compiled([{"pdl": 2}, {"dim": 64, "pdl": 1}, {"dim": 64, "layout": many}, {"dim": 256}, {"pdl": 1, "fp8": True}])
    verify_compiled([{"fp8": True, "layout": many_fp8}])
    verify_compiled([{"queries": 8}, {"queries": 8, "fp8": True, "pdl": 2}, {"queries": 8, "heads": 16, "min_queries": 2}])
    verify_compiled([{"queries": 4}, {"queries": 2}, {"queries": 2, "heads": 8}])


def test_layouts_of_many_sequences_have_the_arithmetic_of_few() -> None:
    for (itemsize, dim), many in decode_one_sm90._LAYOUTS_OF_MANY.items():
        few = decode_one_sm90.layout_of(dim, itemsize)
        assert decode_one_sm90.layout_of(dim, itemsize, decode_one_sm90._MANY) == many != few
        free = dict.fromkeys(("k_stages", "v_stages", "programs_per_sm"), 0)
        assert few._replace(**free) == many._replace(**free)


def test_layouts_of_many_columns_have_the_arithmetic_of_few() -> None:
    for itemsize, dim in decode_one_sm90._LAYOUTS:
        few, many = decode_one_sm90.layout_of(dim, itemsize), decode_one_sm90.layout_of(dim, itemsize, 64, 32, 8)
        free = dict.fromkeys(("k_stages", "v_stages", "programs_per_sm", "split"), 0)
        assert few._replace(**free) == many._replace(**free)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_every_specialisation_compiles(fp8: bool) -> None:
    everything = {"window": 100, "softcap": 30.0, "sinks": True, "lse": True, "scales": True}
    cases: list[dict[str, Any]] = (
        [{"dim": dim, "page_size": page} for dim in (64, 128) for page in (16, 32, 64, 128, 256)]
        + [{"dim": dim, "dtype": "float16"} | everything for dim in (64, 128)]
        + [{"heads": 128, "dim": dim} | features for dim in (64, 128) for features in ({}, everything)]
        + [{"kv_heads": 32}, {"heads": 28, "kv_heads": 4}]
        + ([] if fp8 else [{"dim": 256, "heads": 64} | everything, {"dim": 192, "page_size": 64}])
        + ([] if fp8 else [{"dim": 64, "heads": 128, "layout": list(decode_one_sm90.layout_of(64, 2, 64))} | everything])
        + [
            {"queries": queries, "dim": dim, "heads": heads} | features
            for queries, heads in ((8, 32), (8, 16), (4, 64))
            for dim in (64, 128)
            for features in ({}, everything, {"causal": False, "dtype": "float16"})
        ]
        + [{"queries": 8, "heads": 8}, {"queries": 8, "window": 100}, {"queries": 8, "softcap": 30.0}, {"queries": 8, "scales": True}]
        + ([] if fp8 else [{"queries": 2, "dim": 256} | everything, {"queries": 8, "dim": 256, "heads": 8}])
    )
    verify_compiled([case | {"fp8": fp8} for case in cases])


# ---- against the oracle, on a GPU


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


@gpu
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193, 20000])
@caches
def test_lengths(taken, cache, length):
    verify([length], cache=cache, q_dtype=torch.bfloat16)
    verify([length] * 3, cache=cache)
    verify([length] * 3, [max(1, min(length, n)) for n in (2, 5, 8)], cache=cache)


@gpu
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


@gpu
@pytest.mark.parametrize(
    ("dim", "cache", "queries"),
    [(dim, *types) for dim in (64, 128) for types in ((FP8, torch.float16), (FP8, torch.bfloat16))]
    + [(dim, dtype, dtype) for dim in (64, 128, 256) for dtype in (torch.float16, torch.bfloat16)],
)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_pages_and_dims(taken, dim, page_size, cache, queries):
    for query_lens in (None, QUERIES):
        verify(RAGGED, query_lens, dim=dim, page_size=page_size, cache=cache, q_dtype=queries, extra_rows=3)


@gpu
@pytest.mark.parametrize(
    ("dim", "cache"), [(dim, cache) for dim in (48, 80, 96, 112) for cache in (torch.bfloat16, FP8)] + [(192, torch.bfloat16)]
)
def test_head_dimensions_between(taken, cache, dim):
    """Columns that fill a block up to a power of two are neither read nor written."""
    for query_lens in (None, QUERIES):
        case = verify(RAGGED, query_lens, dim=dim, cache=cache, extra_rows=3, sinks=torch.randn(8, device="cuda"))
        sm90_checks.check_inside_a_wider_out(case)


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (3, 3), (7, 1), (16, 2), (10, 1), (16, 1), (300, 300)])
@caches
def test_group_ratios(taken, cache, heads, kv_heads):
    """300 KV heads: more than there are programs."""
    lens = RAGGED if kv_heads < 300 else [300, 0, 33, 129]
    for query_lens in (None, QUERIES[: len(lens)]):
        verify(lens, query_lens, cache=cache, heads=heads, kv_heads=kv_heads)


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
@pytest.mark.parametrize(("dim", "cache"), [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (64, FP8), (128, FP8)])
def test_features(taken, cache, dim, keywords):
    lens = RAGGED * 3 if dim == 64 else RAGGED  # many sequences of 64 dimensions take another number of programs
    for query_lens in (None, QUERIES * (len(lens) // len(RAGGED))):
        verify(lens, query_lens, dim=dim, cache=cache, extra_rows=3, **sm90_checks.on_device(keywords))


@gpu
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


@gpu
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e30])
def test_queries_of_any_size(taken, size):
    """Products are in fp16, which such a q does not fit."""
    case = case_of(RAGGED, QUERIES, cache=FP8, q_dtype=torch.bfloat16)
    case.q = (case.q.float() * size).bfloat16()
    case.keywords["scale"] = 0.088 / max(size, 1e-6)
    check(case, *attend(case))


@gpu
@caches
def test_beside_queries_of_other_kinds(taken, cache):
    verify([1000, 300, 700, 2000, 64], [1, 300, 8, 1, 2], extra_rows=3, cache=cache)


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
@caches
def test_pages_before_the_window_belong_to_others(taken, cache, window, freed):
    for query_lens in (None, [2, 8, 3]):
        sm90_checks.check_pages_before_the_window(case_of([700, 1500, 129], query_lens, window=window, cache=cache), freed)


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
@caches
def test_shared_memory_that_another_kernel_left(taken, cache, value):
    cases = [case_of(lens, heads=heads, kv_heads=1, cache=cache) for lens, heads in (([128], 1), ([200, 300], 8), ([3000, 300, 0], 8))]
    batches = ([128], [2], 1), ([200, 300], [8, 1], 4), ([3000, 300, 0], [2, 3, 4], 8)
    cases += [case_of(lens, query_lens, heads=heads, kv_heads=1, cache=cache) for lens, query_lens, heads in batches]
    sm90_checks.check_after_filling_shared_memory(value, cases)


@gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dim", [64, 128])
@caches
def test_more_sequences_than_the_scheduler_searches_at_once(taken, cache, dim, kv_heads):
    lens = [int(2.0 ** (11 * x)) for x in torch.rand(400).tolist()]
    query_lens = [1 if i % 3 == 0 else min(n, 1 + i % 8) for i, n in enumerate(lens)]
    lens[7] = query_lens[7] = 0
    verify(lens, query_lens, kv_heads=kv_heads, dim=dim, extra_rows=5, cache=cache)


@gpu
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


@gpu
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


@gpu
@pytest.mark.parametrize("query_lens", [[1], range(1, 9)], ids=["one", "few"])
@caches
def test_a_thousand_runs_beside_other_work(taken, cache, query_lens):
    lens = [int(n) for n in torch.randint(8, 6000, (40,))]
    sm90_checks.check_a_thousand_runs_beside_other_work(case_of(lens, [*query_lens] * (40 // len(query_lens)), cache=cache))


@gpu
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


@gpu
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


@gpu
@pytest.mark.parametrize("dim", [64, 128])
@caches
def test_bits_in_batches_of_few_and_of_many(taken, cache, dim):
    """Many sequences take another number of programs: of 64 dimensions, and of 128 over e4m3."""
    lens = [1000, 300, 129, 4097, 0, 513, *[int(n) for n in torch.randint(0, 2000, (40,))]]
    many = case_of(lens, dim=dim, cache=cache)
    out, lse = attend(many)
    few, few_lse = attend(part(many, 0, 6, 1))
    assert torch.equal(few, out[:6]) and torch.equal(few_lse, lse[:6])


@gpu
@caches
def test_dependent_launch_has_the_same_bits(taken, cache):
    for query_lens in (None, [3, 8, 1, 7, 2]):
        sm90_checks.check_dependent_launches(case_of([1000, 33, 300, 12, 5000], query_lens, cache=cache))


@gpu
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
