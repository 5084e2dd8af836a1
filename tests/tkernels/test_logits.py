"""adjust_logits and count_tokens: against their oracles, against formulas by hand, and at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import column_slice

import tkernels
from tkernels.logits import adjust_logits_ref, count_tokens_ref

INF = float("inf")


def _pack(allowed: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool → the packed mask, bit by bit."""
    rows, vocab = allowed.shape
    words = torch.zeros(rows, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token].cpu().long() << (token % 32)
    return torch.where(words >= 2**31, words - 2**32, words).int().to(allowed.device)


def _state(vocab: int, slots: int, device: torch.device) -> dict[str, torch.Tensor]:
    counts = torch.randint(-1, 4, (slots, vocab), dtype=torch.int32, device=device).clamp(min=0)
    counts |= torch.where(torch.rand(slots, vocab, device=device) < 0.2, -(1 << 31), 0).int()
    ids = torch.stack([torch.randperm(vocab)[: min(5, vocab)] for _ in range(slots)]).int().to(device)
    ids[:, 0] = -1
    return {
        "counts": counts,
        "bias_ids": ids,
        "bias_values": torch.randn(ids.shape, device=device) * 3,
        "mask": _pack(torch.rand(slots, vocab, device=device) < 0.7),
    }


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (31, torch.bfloat16), (33, torch.float16), (2100, torch.bfloat16)])
def test_equals_the_oracle(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """All modifiers at once, rows of the state in any order, strided logits; and each modifier alone."""
    logits = column_slice((torch.randn(5, vocab, device=device) * 4).to(dtype))
    slots = torch.tensor([3, -1, 0, 1, 9], device=device)
    state = _state(vocab, 4, device)
    penalties = {
        "repetition": torch.tensor([1.3, 2.0, 1.0, 0.7, 2.0], device=device),
        "presence": torch.tensor([0.5, 1.0, 0.0, -0.25, 1.0], device=device),
        "frequency": torch.tensor([0.25, 1.0, 0.0, 0.5, 1.0], device=device),
    }
    bias = {name: state[name] for name in ("bias_ids", "bias_values")}
    for given in ({**state, **penalties}, {"counts": state["counts"], **penalties}, bias, {"mask": state["mask"]}, {}):
        got = tkernels.adjust_logits(logits, slots=slots, **given)
        want = adjust_logits_ref(logits, slots, **given)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the GPU fuses multiply and add
        assert got.dtype == torch.float32 and got.is_contiguous()
        for row in (1, 4):  # no state of theirs: as they came
            assert torch.equal(got[row], logits[row].float())


def test_by_hand(device: torch.device) -> None:
    """The formulas of CTRL and of OpenAI's API on one row: prompt [0, 1], answer [1, 2, 2]."""
    counts = torch.zeros(1, 6, dtype=torch.int32, device=device)
    slots = lambda n: torch.zeros(n, dtype=torch.int64, device=device)
    tkernels.count_tokens(counts, slots(2), torch.tensor([0, 1], device=device), prompt=True)
    tkernels.count_tokens(counts, slots(3), torch.tensor([1, 2, 2], device=device))
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, 1.0, 1.0]], device=device)
    one = lambda value: torch.tensor([value], device=device)
    got = tkernels.adjust_logits(
        logits, counts=counts, repetition=one(2.0), presence=one(0.5), frequency=one(0.25),
        bias_ids=torch.tensor([[3, -1]], dtype=torch.int32, device=device), bias_values=torch.tensor([[10.0, 99.0]], device=device),
        mask=torch.tensor([[0b101111]], dtype=torch.int32, device=device),
    )  # fmt: skip
    assert got.tolist() == [[1.0, -4.0 - 0.5 - 0.25, 2.0 - 0.5 - 0.5, 11.0, -INF, 1.0]]


def test_penalties_equal_those_of_transformers(device: torch.device) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, prompt = torch.randn(2, 50), torch.randint(50, (2, 12))
    want = process.RepetitionPenaltyLogitsProcessor(1.4)(prompt, logits.clone())
    counts = torch.zeros(2, 50, dtype=torch.int32, device=device)
    slots = torch.arange(2, device=device).repeat_interleave(12)
    tkernels.count_tokens(counts, slots, prompt.flatten().to(device), prompt=True)
    zero, factor = torch.zeros(2, device=device), torch.full((2,), 1.4, device=device)
    got = tkernels.adjust_logits(logits.to(device), counts=counts, repetition=factor, presence=zero, frequency=zero)
    torch.testing.assert_close(got.cpu(), want)


def test_b133_bad_logits_and_masks_of_nothing(device: torch.device) -> None:
    """NaN is −∞ whatever is added to it; infinities stay; a row with nothing allowed is all −∞ and sampled as token 0."""
    logits = torch.randn(4, 70, device=device)
    logits[0, 3], logits[1, 3], logits[2, 3] = float("nan"), INF, 3e38
    ids = torch.tensor([[3]] * 4, dtype=torch.int32, device=device)
    mask = torch.full((4, 3), -1, dtype=torch.int32, device=device)
    mask[3] = 0
    got = tkernels.adjust_logits(logits, bias_ids=ids, bias_values=torch.tensor([[5.0], [-INF], [3e38], [5.0]], device=device), mask=mask)
    assert got[0, 3] == -INF and got[1, 3] == -INF and got[2, 3] == INF
    assert bool((got[3] == -INF).all())
    ones = torch.ones(4, device=device)
    number = torch.zeros(4, dtype=torch.int64, device=device)
    for temperature in (0.0, 1.0):
        tokens = tkernels.sample(got, ones * temperature, number.int(), ones, number, number, min_p=ones * 0.1)
        assert tokens[2:].tolist() == [3, 0]


def test_a_row_depends_on_its_own_state_only(device: torch.device) -> None:
    """Bit for bit: alone, in another row, beside other requests and padding rows."""
    state = _state(300, 6, device)
    row = torch.randn(1, 300, device=device).bfloat16()
    alone, together = (
        tkernels.adjust_logits(
            logits, slots=torch.tensor(slots, device=device), **state,
            **{name: torch.full((len(slots),), 1.1, device=device) for name in ("repetition", "presence", "frequency")},
        )
        for logits, slots in ((row, [4]), (torch.cat([row * 2, row * 3, row, row]), [0, 5, 4, -1]))
    )  # fmt: skip
    assert torch.equal(alone[0], together[2])


def test_counts_equal_the_oracle(device: torch.device) -> None:
    """Many tokens, many of them several times, slots and tokens out of range among them; prompt marks keep the counts and are kept."""
    slots, tokens = torch.randint(-2, 6, (700,), device=device), torch.randint(-3, 45, (700,), device=device)
    got = torch.zeros(6, 60, dtype=torch.int32, device=device)[:4, :40]
    want = torch.zeros(4, 40, dtype=torch.int32, device=device)
    for prompt in (False, True, False):
        tkernels.count_tokens(got, slots, tokens, prompt=prompt)
        count_tokens_ref(want, slots, tokens, prompt)
    assert torch.equal(got, want)
    assert bool((got < 0).any()) and int((got & 0x7FFFFFFF).sum()) == 2 * int(
        ((slots >= 0) & (slots < 4) & (tokens >= 0) & (tokens < 40)).sum()
    )


def test_no_slots_at_all(device: torch.device) -> None:
    mask = torch.zeros(0, 2, dtype=torch.int32, device=device)
    logits, slots = torch.randn(2, 40, device=device), torch.tensor([0, -1], device=device)
    assert torch.equal(tkernels.adjust_logits(logits, slots=slots, mask=mask), logits)
    assert torch.equal(adjust_logits_ref(logits, slots, mask=mask), logits)


_ONE = torch.ones(2)
_COUNTS = torch.zeros(2, 40, dtype=torch.int32)
_PENALTIES = {"repetition": _ONE, "presence": _ONE, "frequency": _ONE}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"counts": _COUNTS},
            ValueError,
            "counts: expected it together with repetition, presence and frequency, got counts with any of them",
        ),
        ({"presence": _ONE}, ValueError, "got counts without presence"),
        ({"bias_ids": _COUNTS}, ValueError, "bias_values: expected bias_ids and bias_values together"),
        ({"mask": _COUNTS}, ValueError, r"mask: expected \[2, 2\] by slot and vocabulary, got \[2, 40\]"),
        ({"mask": torch.zeros(2, 2)}, TypeError, "mask: expected int32 per slot"),
        ({"mask": torch.zeros(3, 2).int()}, ValueError, "slots: expected them, since logits have 2 rows and the state 3 slots"),
        ({"mask": torch.zeros(3, 2).int(), "counts": _COUNTS, **_PENALTIES}, ValueError, "mask: expected as many slots in all state"),
        ({"bias_ids": torch.zeros(2, 1025).int(), "bias_values": torch.zeros(2, 1025)}, ValueError, "bias_ids: expected at most 1024"),
        ({"slots": torch.zeros(2).int(), "mask": torch.zeros(3, 2).int()}, TypeError, "slots: expected int64 per row"),
    ],
)
def test_errors_name_the_argument(given: dict[str, Any], error: type[Exception], message: str, device: torch.device) -> None:
    with pytest.raises(error, match=message):
        tkernels.adjust_logits(torch.zeros(2, 40, device=device), **{name: x.to(device) for name, x in given.items()})


def test_errors_of_counting_name_the_argument(device: torch.device) -> None:
    counts, index = _COUNTS.to(device), torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"slots: expected \[3\] one per token, got \[2\]"):
        tkernels.count_tokens(counts, index[:2], index)
    with pytest.raises(TypeError, match="counts: expected int32"):
        tkernels.count_tokens(counts.long(), index, index)


@pytest.mark.gpu
def test_a_graph_counts_at_every_replay(device: torch.device) -> None:
    """Adjust, draw, count: captured once, each replay sees the tokens of those before it."""
    logits = torch.zeros(3, 1000, device=device)
    slots, ones, number = (
        torch.tensor([2, -1, 0], device=device),
        torch.ones(3, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    counts = torch.zeros(3, 1000, dtype=torch.int32, device=device)

    def step() -> torch.Tensor:
        x = tkernels.adjust_logits(logits, slots=slots, counts=counts, repetition=ones, presence=ones, frequency=ones)
        tokens = tkernels.sample(x, ones * 0, number.int(), ones, number, number)
        tkernels.count_tokens(counts, slots, tokens)
        return tokens

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()
    counts.zero_()
    for replay in range(5):
        graph.replay()
        assert tokens.tolist() == [replay, 0, replay]
