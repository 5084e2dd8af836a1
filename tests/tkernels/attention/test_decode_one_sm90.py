"""The Gluon kernel for one query token and a few, over a cache of 16 bits or of e4m3: which calls it takes, how it cuts the work, and that
it compiles. Against the oracle, on a GPU: test_decode_one_sm90_gpu.py.
"""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases
from tests.tkernels.attention.cases import make_case
from tests.tkernels.attention.sm90_cases import call, check_workspace, compile_offline, launches_chosen
from tests.tkernels.attention.test_batches import checked
from tkernels import _dependent
from tkernels._triton import next_power_of_2
from tkernels.attention import decode_one_sm90, decode_sm90

FP8 = torch.float8_e4m3fn
SHAPE: dict[str, Any] = sm90_cases.SHAPE
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
    monkeypatch.setattr(shared, "gl", SimpleNamespace(int32=torch.int32, uint32=torch.int64, **names))
    monkeypatch.setattr(shared, "divide", shared.divide.fn)

    def found(lens: list[int], constant: dict[str, Any], window: int = 0) -> tuple[list[int], list[int], list[int]]:
        n = torch.tensor(lens)
        first = shared.first_block.fn(n, 1, window, window > 0, constant["BLOCK_N"])
        blocks = shared.blocks_from.fn(first, n, constant["BLOCK_N"])
        leaf = shared.leaf_of.fn(blocks, constant["LEAVES"], constant["UNCUT"], constant["LEAST"])
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
        # a masked block has a mask for each key of a thread: it selects no elements of 16-bit V, and pieces no bytes of masks together
        assert facts["selects"] <= 16, (case, facts)
        if fp8:  # of both kinds of block, V alone: two for eight elements
            assert facts["permutes"] <= 2 * 2 * layout.block_n * dim // (32 * layout.warps) // 8, (case, facts)
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
