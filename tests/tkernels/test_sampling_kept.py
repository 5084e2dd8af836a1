"""Which tokens ``sample`` keeps: top-k, top-p and min-p at their edges, in small and in wide rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import column_slice

import tkernels
from tests.tkernels.sampling_cases import INF, RULES, arguments_of, chi_square, draw, winners_of
from tkernels import sampling
from tkernels.sampling import sample_ref


def test_b143_top_k_of_equal_logits_is_uniform(device: torch.device) -> None:
    """No fall-back to the largest: 100 of 2000 equal tokens, the lowest ids, all equally often."""
    want = torch.zeros(2000, device=device)
    want[:100] = 0.01
    assert chi_square(draw(torch.full((2000,), 1 / 2000, device=device), 2000, top_k=100), want) < 4


@pytest.mark.parametrize(
    ("probabilities", "rules", "kept"),
    [
        ([0.5, 0.2, 0.2, 0.1], {"top_k": 2}, {0, 1}),
        ([0.5, 0.2, 0.2, 0.1], {"top_p": 0.6}, {0, 1}),
        ([0.25] * 4, {"top_k": 1}, {0}),
        ([0.25] * 4, {"top_p": 0.5}, {0, 1}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": 0.4}, {0}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": 0.75}, {0, 1}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": 0.7501}, {0, 1, 2}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": 1.0}, {0, 1, 2, 3}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": 0.0}, {0}),
        ([0.4, 0.35, 0.15, 0.1], {"top_p": float("nan")}, {0, 1, 2, 3}),
        # after top_k = 2 the first has 0.4 / 0.75 = 0.533: Hugging Face's order of the two filters
        ([0.4, 0.35, 0.15, 0.1], {"top_k": 2, "top_p": 0.5}, {0}),
        ([0.4, 0.35, 0.15, 0.1], {"top_k": 2, "top_p": 0.54}, {0, 1}),
        ([0.1, 0.15, 0.35, 0.4], {"top_k": 3, "top_p": 0.9}, {1, 2, 3}),
        ([0.5, 0.5, 0.0, 0.0], {"top_k": 3}, {0, 1}),
        ([0.5, 0.5, 0.0, 0.0], {"top_p": 0.999999}, {0, 1}),
    ],
    ids=str,
)
def test_b138_b140_kept_sets(probabilities: list[float], rules: dict[str, Any], kept: set[int], device: torch.device) -> None:
    p = torch.tensor(probabilities, device=device)
    tokens = draw(p, 2000, **rules)
    assert set(tokens.tolist()) == kept
    live = torch.zeros_like(p)
    live[list(kept)] = p[list(kept)]
    assert chi_square(tokens, live) < 4


@pytest.mark.parametrize(
    ("rules", "min_p", "kept"),
    [
        ({}, 0.5, {0, 1}),
        ({}, 0.500002, {0}),
        ({}, 0.24, {0, 1, 2}),
        ({}, 1.0, {0}),
        ({}, 7.0, {0}),
        ({}, 0.0, {0, 1, 2, 3}),
        ({}, -1.0, {0, 1, 2, 3}),
        ({}, float("nan"), {0, 1, 2, 3}),
        ({"temperature": 0.5}, 0.25, {0, 1}),  # with temperature the ratios are squared
        ({"top_k": 2}, 0.01, {0, 1}),
        ({"top_k": 3}, 0.3, {0, 1}),
        ({"top_p": 0.6}, 0.01, {0, 1}),
        ({"top_p": 0.95}, 0.24, {0, 1, 2}),
        # min_p takes nothing away from the sum that top_p is measured by: all four reach .95, not three
        ({"top_k": 4, "top_p": 0.95}, 0.11, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_b140_min_p_keeps_by_ratio(rules: dict[str, Any], min_p: float, kept: set[int], device: torch.device) -> None:
    p = torch.tensor([0.48, 0.24, 0.12, 0.06], device=device)
    arguments = arguments_of(p.log().expand(3000, -1), step=torch.arange(3000, device=device), **rules)
    tokens = sample_ref(*arguments, torch.full((3000,), min_p, device=device))
    assert set(tokens.tolist()) == kept
    few = [x[:6] for x in arguments]
    assert torch.equal(tkernels.sample(*few, min_p=torch.full((6,), min_p, device=device)), tokens[:6])


@pytest.mark.parametrize(("vocab", "dtype"), [(7, torch.float32), (1000, torch.bfloat16)])
def test_min_p_equals_the_oracle(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Beside every other rule, in one batch; a row without min_p draws what it draws without the argument."""
    rules = RULES[1:5]
    logits = column_slice((torch.randn(2 * len(rules), vocab, device=device) * 3).to(dtype))
    temperature, top_k, top_p = zip(*rules * 2, strict=True)
    arguments = arguments_of(
        logits, torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.arange(len(logits)), torch.arange(len(logits))
    )
    min_p = torch.tensor([0.05, 0.3, 0.1, 0.2, 0.0, 0.0, 0.0, 0.0], device=device)
    tokens = tkernels.sample(*arguments, min_p=min_p)
    assert torch.equal(tokens, sample_ref(*arguments, min_p))
    assert torch.equal(tokens[4:], tkernels.sample(*arguments)[4:])


def test_filters_equal_those_of_transformers(device: torch.device) -> None:
    """Kept sets against the logits processors of Hugging Face, applied in its order: temperature, top_k, top_p, min_p."""
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(1, 30) * 2
    for temperature, top_k, top_p, min_p in ((0.7, 10, 0.8, 0.0), (1.5, 25, 0.95, 0.1), (1.0, 3, 0.5, 0.2), (2.0, 30, 1.0, 0.15)):
        scores = process.TemperatureLogitsWarper(temperature)(None, logits)
        scores = process.TopPLogitsWarper(top_p)(None, process.TopKLogitsWarper(top_k)(None, scores))
        scores = process.MinPLogitsWarper(min_p)(None, scores)
        want = scores.softmax(-1)[0]
        ratio = torch.full((3000,), min_p)
        tokens = sample_ref(*arguments_of(logits.expand(3000, -1), temperature, top_k, top_p, step=torch.arange(3000)), ratio)
        assert chi_square(tokens, want) < 4
        few = arguments_of(logits.to(device).expand(3, -1), temperature, top_k, top_p, step=torch.arange(3))
        assert tkernels.sample(*few, min_p=ratio[:3].to(device)).tolist() == tokens[:3].tolist()


WIDE = 12_301  # 97 runs of 128, the last with 13 columns: more than one program races alone
WIDE_RULES = [
    {"top_p": 0.9}, {"top_p": 0.99999}, {"top_p": 1e-4}, {"top_p": 0.0}, {"top_k": 6000}, {"top_k": 12_200, "top_p": 0.999},
    {"top_k": 6000, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [*((rules, torch.bfloat16) for rules in WIDE_RULES), *((WIDE_RULES[i], torch.float32) for i in (0, 5))],
    ids=str,
)
def test_b141_wide_sets_equal_the_oracle(rules: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Equal, nearly equal and usual logits, of which thousands are kept; alone, where a team shares the row, as in a batch."""
    logits = column_slice((torch.randn(3, WIDE, device=device) * torch.tensor([[0.0], [0.05], [1.0]], device=device)).to(dtype))
    arguments = arguments_of(logits, 0.9, seed=torch.arange(3) + 5, step=torch.arange(3), **rules)
    tokens = tkernels.sample(*arguments)
    assert tokens.tolist() == sample_ref(*arguments).tolist()
    assert torch.equal(tkernels.sample(*[x[1:2] for x in arguments]), tokens[1:2])


@pytest.mark.parametrize(
    ("rules", "kept"),
    [({"top_p": 0.5}, 150), ({"top_k": 131}, 131), ({"top_k": 200, "top_p": 0.25}, 50), ({"top_k": 1}, 1), ({"top_p": 0.0}, 1)],
    ids=str,
)
def test_b141_equal_logits_keep_the_lowest_ids(rules: dict[str, Any], kept: int, device: torch.device) -> None:
    """Every logit at the edge, in several runs: steps at which the last kept or the first dropped token would win among all."""
    logits = torch.full((1, 300), -1.5, device=device)
    winners = winners_of(300, logits, 3000)
    for token in (kept - 1, kept):
        steps = (winners == token).nonzero().flatten()[:1].to(device)
        assert len(steps), "more steps are needed"
        arguments = arguments_of(logits, step=steps, **rules)
        drawn = tkernels.sample(*arguments).item()
        assert drawn == sample_ref(*arguments).item()
        assert (drawn == token) == (token < kept)


def test_a_shared_row_leaves_its_counters_at_zero(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Also a narrow row, a row of nothing and a greedy one, which the helpers of their teams leave again."""
    lent: list[torch.Tensor] = []
    monkeypatch.setattr(
        sampling, "counters", lambda count, device: lent.append(torch.zeros(count, dtype=torch.int32, device=device)) or lent[-1]
    )
    logits = torch.zeros(4, WIDE, dtype=torch.float16, device=device)  # a look of its own: calls like earlier ones do not ask again
    logits[1, 7] = 40.0
    logits[2] = -INF
    for row in range(4):
        arguments = arguments_of(logits[row : row + 1], 1.0 if row < 3 else 0.0, top_p=0.9)
        assert torch.equal(tkernels.sample(*arguments), sample_ref(*arguments))
        assert len(lent) == row + 1 and not lent[row].any()


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [0.9, 0.99])
def test_b141_nucleus_of_a_large_flat_vocabulary(top_p: float, device: torch.device) -> None:
    """131072 bf16 logits: the tokens drawn in 400,000 draws stay inside the set whose mass is p, and come close to filling it."""
    logits = (torch.randn(1, 131_072, device=device) * 0.1).bfloat16()
    p, order = logits[0].double().softmax(-1).sort(descending=True, stable=True)
    kept = int((p.cumsum(0) - p < top_p).sum())
    seen = torch.zeros(131_072, dtype=torch.bool, device=device)
    for start in range(0, 400_000, 4000):
        steps = torch.arange(start, start + 4000, device=device)
        seen[tkernels.sample(*arguments_of(logits.expand(4000, -1), top_p=top_p, step=steps))] = True
    assert not bool(seen[order[kept + 2 :]].any())
    assert seen[order[:kept]].float().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b130_wide_rows_do_not_depend_on_the_team(dtype: torch.dtype, device: torch.device) -> None:
    """Rows shared by many programs, by two, and each its own program's, again and again: the same tokens."""
    rules = [*WIDE_RULES, {"top_k": 300, "top_p": 1e-3}, {"top_p": 0.5}, {}] * 14
    logits = (torch.randn(140, 128_257, device=device) * torch.tensor([0.0, 0.1, 2.0, 8.0], device=device).repeat(35)[:, None]).to(dtype)
    top_k, top_p = [rule.get("top_k", 0) for rule in rules], [rule.get("top_p", 1.0) for rule in rules]
    arguments = arguments_of(logits, 0.8, torch.tensor(top_k), torch.tensor(top_p), torch.arange(140), torch.arange(140))
    tokens = tkernels.sample(*arguments)
    assert (tokens != sample_ref(*arguments)).sum() <= 2  # at the edge of a set, sums in fp32 may decide otherwise
    for _ in range(5):
        assert torch.equal(tkernels.sample(*arguments), tokens)
        for rows in (1, 2, 20, 60):
            several = [tkernels.sample(*[x[i : i + rows] for x in arguments]) for i in range(0, 140 - rows + 1, rows)]
            assert torch.equal(torch.cat(several), tokens[: len(several) * rows])
