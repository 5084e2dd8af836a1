"""The Gluon prefill kernel with e4m3 queries, keys and values: like test_prefill_sm90.py, with what 8 bits change.

Weights are rounded to three bits of mantissa, each by up to 1/16: of random values the error of a row is 2 to 3% of its norm, whatever its
length. LSE has none of that.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.tkernels.attention import sm90_cases, sm90_checks
from tests.tkernels.attention import test_prefill_sm90 as base
from tests.tkernels.attention.cases import Case, check, make_case
from tests.tkernels.attention.sm90_cases import call
from tests.tkernels.attention.test_prefill_sm90 import RAGGED, verify_compiled
from tests.tkernels.attention.test_values import attend
from tkernels.attention import prefill_sm90

FP8 = torch.float8_e4m3fn
SHAPE: dict[str, Any] = sm90_cases.SHAPE | {"dtype": FP8, "q_dtype": FP8}
TOLERANCE = 4e-2
gpu = pytest.mark.gpu
taken = base.taken  # the fixture


# ---- which calls it takes, and that it compiles


@pytest.mark.usefixtures("gluon_compiles")
@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (lambda: call(dim=48, dtype=FP8, window=5), "a window with float8_e4m3fn heads of dimension 48: expected more than 64"),
        (lambda: call(dim=32, dtype=FP8), "head dimension 32: expected 33 to 128"),
        (lambda: call(dim=192, dtype=FP8), "head dimension 192: expected 33 to 128"),
        (lambda: call(dim=72, dtype=FP8), r"q: strides \[288, 72, 1\]: expected multiples of 16 bytes"),
        (lambda: call(q=torch.zeros((32, 4, 64), dtype=torch.float16), dtype=FP8), "float16 queries on a torch.float8_e4m3fn cache"),
        (lambda: call(dtype=FP8, k_scale=torch.ones(1)), "scales on the device"),
    ],
)
def test_refused_calls_say_why(inputs: Any, word: str) -> None:
    x = inputs()
    problem = prefill_sm90.refusal(x, torch.zeros(x.q.shape, dtype=torch.bfloat16), "sm_90")
    assert problem is not None
    assert re.search(word, problem), problem


@pytest.mark.usefixtures("gluon_compiles")
def test_taken_calls() -> None:
    for x in (
        call(dtype=FP8),
        call(dtype=FP8, softcap=5.0),
        call(dtype=FP8, dim=128, window=5, softcap=5.0),
        call(dtype=FP8, dim=80, page_size=256),
    ):
        assert prefill_sm90.refusal(x, torch.zeros(x.q.shape, dtype=torch.bfloat16), "sm_90") is None


def test_compiles_for_sm_90_without_spills() -> None:
    verify_compiled([{"dtype": "float8_e4m3fn", "dim": 128, "page_size": 16}])


@pytest.mark.slow
def test_every_specialisation_compiles_without_spills() -> None:
    verify_compiled(
        [
            {"dtype": "float8_e4m3fn", **case}
            for case in (
                *({"dim": dim, "page_size": page} for dim in (64, 128) for page in (16, 32, 64, 128, 256)),
                *({"dim": dim, "causal": False, "sinks": True} for dim in (64, 128)),
                *({"dim": dim, "sinks": True, "lse": True} for dim in (48, 80, 96, 112)),
                *({"dim": dim, "softcap": 30.0, "sinks": True, "lse": True} for dim in (64, 128)),
                {"window": 100, "lse": True}, {"window": 100, "sinks": True, "lse": True}, {"softcap": 30.0, "causal": False},
                {"window": 100, "softcap": 30.0, "sinks": True, "lse": True}, {"kv_heads": 32}, {"heads": 28, "kv_heads": 4, "lse": True},
            )
        ]
    )  # fmt: skip


# ---- against the oracle, on a GPU


def verify(*arguments: Any, **keywords: Any) -> Case:
    case = make_case(*arguments, **{**SHAPE, **keywords})
    check(case, *attend(case), tolerance=TOLERANCE)
    return case


@gpu
@pytest.mark.parametrize("query_len", [9, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 600])
@pytest.mark.parametrize("dim", [64, 128])
def test_query_lengths(taken, dim, query_len):
    verify([query_len], [query_len], dim=dim)


@gpu
@pytest.mark.parametrize("prefix", [1, 15, 16, 17, 64, 100, 127, 128, 129, 1000, 4096])
def test_chunks_on_a_prefix(taken, prefix):
    verify([prefix + 200, prefix + 64, prefix + 9], [200, 64, 9])


@gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 112, 128])
def test_pages_and_dims(taken, dim, page_size):
    """Free slots hold NaN, which no bit may show; rows of no sequence come out zero."""
    verify(*RAGGED, dim=dim, page_size=page_size, extra_rows=3)


@gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (6, 2), (7, 1), (16, 1)])
def test_group_ratios(taken, heads, kv_heads):
    verify(*RAGGED, heads=heads, kv_heads=kv_heads)


@gpu
@pytest.mark.parametrize(
    "keywords",
    [
        {"causal": False}, {"sinks": True}, {"causal": False, "sinks": True}, {"k_scale": 0.5, "v_scale": 3.0}, {"dim": 64, "sinks": True},
        {"window": 1}, {"window": 100}, {"window": 129, "sinks": True}, {"window": 5000}, {"dim": 64, "softcap": 5.0},
        {"softcap": 5.0}, {"softcap": 5.0, "causal": False}, {"softcap": 5.0, "window": 100, "sinks": True},
    ],
    ids=str,
)  # fmt: skip
def test_features(taken, keywords):
    verify(*RAGGED, extra_rows=3, **sm90_checks.on_device(keywords))


@gpu
def test_each_weight_meets_its_own_key_and_column(taken):
    """Query i picks key i alone, whose values name it, and name their columns: a key or a column out of place is seen as such."""
    case = make_case([300], [128], **{**SHAPE, "heads": 1, "kv_heads": 1}, scale=0.5, causal=False)
    pages = case.block_table[0].long()
    eye = torch.eye(128, device="cuda") * 16

    def written(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        flat = cache.float()
        flat[pages[8:16]] = rows.view(8, 16, 1, 128)  # keys 128 to 255
        return flat.to(FP8)

    case.q = eye[:, None].to(FP8)
    case.k_cache = torch.where(case.k_cache.float().isnan(), case.k_cache.float(), 0.0).to(FP8)
    case.k_cache = written(case.k_cache, eye)
    number, one = torch.arange(128, device="cuda").float(), torch.ones(128, device="cuda")
    for name, of in (("keys", lambda x: x[:, None] * one), ("columns", lambda x: one[:, None] * x)):
        seen = torch.zeros(128, 128, device="cuda")
        for digit, weight in ((number % 16, 1), (number // 16, 16)):
            case.v_cache = written(case.v_cache, of(digit))
            seen += weight * attend(case)[0][:, 0].float()
        assert torch.equal(seen, of(number)), name


@gpu
def test_weights_far_below_the_largest_still_count(taken):
    """4000 keys of 2^-14 of the largest weight, less than e4m3 could hold beside 1."""
    case = make_case([4001], [128], **{**SHAPE, "heads": 1, "kv_heads": 1}, scale=14 * 0.6931471805599453 / 16, causal=False)
    case.q = torch.zeros_like(case.q.float()).index_fill(2, torch.tensor([0], device="cuda"), 4.0).to(FP8)
    live = ~case.k_cache.float().isnan()
    k, v = torch.zeros_like(case.k_cache.float()), torch.full_like(case.v_cache.float(), -1.0)
    k[case.block_table[0, 3], 5, 0, 0] = 4.0
    v[case.block_table[0, 3], 5] = 1.0
    case.k_cache, case.v_cache = (torch.where(live, x, float("nan")).to(FP8) for x in (k, v))
    out, lse = attend(case)
    check(case, out, lse)
    share = 4000 / 2**14
    assert (out.float() - (1 - share) / (1 + share)).abs().max() < 5e-3


@gpu
@pytest.mark.parametrize("freed", ["gone", "reused"])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_pages_before_the_window_belong_to_others(taken, window, freed):
    case = make_case([700, 1500, 129], [100, 257, 129], window=window, **SHAPE)
    sm90_checks.check_pages_before_the_window(case, freed, TOLERANCE)


@gpu
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_no_key(taken, sinks):
    keywords = {"sinks": torch.randn(8, device="cuda")} if sinks else {}
    verify([0, 200, 100, 5, 0], [40, 200, 300, 150, 1], **keywords)


@gpu
def test_strides(taken):
    """K and V in one allocation too."""
    sm90_checks.check_strides(verify(*RAGGED, interleaved=True))


@gpu
@pytest.mark.parametrize("value", [-(1 << 30), -1, 1 << 30], ids=hex)
def test_shared_memory_that_another_kernel_left(taken, value):
    batches = ([128], [128], 1), ([200, 300], [100, 300], 8), ([3000, 300, 0], [700, 257, 40], 32)
    cases = [make_case(lens, query_lens, **{**SHAPE, "heads": heads, "kv_heads": 1}) for lens, query_lens, heads in batches]
    sm90_checks.check_after_filling_shared_memory(value, cases, TOLERANCE)


@gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_alone_and_in_a_batch(taken, dim):
    case = make_case([1000, 300, 700, 129, 2000, 64, 40], [200, 300, 1, 129, 300, 64, 9], **{**SHAPE, "dim": dim})
    sm90_checks.check_bits_alone(case)


@gpu
def test_thousand_reruns_under_stress(taken):
    case = make_case([1000, 33, 700, 129, 3000, 300], [500, 33, 5, 129, 300, 257], **{**SHAPE, "heads": 32, "kv_heads": 8})
    sm90_checks.check_a_thousand_runs_under_stress(case, TOLERANCE)


@gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_no_spills(taken, dim):
    attend(make_case([200, 300], [100, 300], **{**SHAPE, "dim": dim}))
    assert taken[-1].n_spills == 0
