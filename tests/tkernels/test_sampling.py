"""sample against its oracle (a sort, fp64 sums), the rules at their edges, and the statistics of the draws.

The interpreter is too slow for many thousand draws: on the CPU the statistics are those of the reference, and the kernel is held to
the reference draw by draw; on a GPU the kernel draws them all.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import column_slice

import tkernels
from tkernels import sampling
from tkernels._rng import log_exponential_ref, philox_ref
from tkernels.sampling import sample_ref

INF = float("inf")


def _numbers(value: Any, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=dtype, device=device).expand(rows).contiguous()


def _arguments(
    logits: torch.Tensor, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, seed: Any = 0, step: Any = 0
) -> tuple[Any, ...]:
    """The op's arguments but min_p, each scalar repeated for all rows."""
    rows, device = logits.shape[0], logits.device
    return (
        logits,
        _numbers(temperature, rows, torch.float32, device),
        _numbers(top_k, rows, torch.int32, device),
        _numbers(top_p, rows, torch.float32, device),
        _numbers(seed, rows, torch.int64, device),
        _numbers(step, rows, torch.int64, device),
    )


def _draws(probabilities: torch.Tensor, count: int, **rules: Any) -> torch.Tensor:
    """count draws at steps 0, 1, …: by the kernel on a GPU, else by the reference, and the first few by both."""
    logits = probabilities.log().expand(count, -1)
    arguments = _arguments(logits, step=torch.arange(count, device=logits.device), **rules)
    tokens = (tkernels.sample if logits.is_cuda else sample_ref)(*arguments)
    few = [x[:2] for x in arguments]
    assert torch.equal(tkernels.sample(*few), sample_ref(*few))
    return tokens


def _chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """In standard deviations above what chance gives."""
    expected = probabilities.double() / probabilities.double().sum() * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    live = expected > 0
    assert not bool(observed[~live].any()), "a token of probability zero was drawn"
    freedom = int(live.sum()) - 1
    statistic = ((observed[live] - expected[live]).square() / expected[live]).sum().item()
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


RULES = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.9), (1e-3, 0, 0.5), (50.0, 3, 0.99), (1.0, 1, 0.1)]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(v, torch.bfloat16) for v in (1, 7, 129, 1000, 4095)] + [(1000, torch.float32), (129, torch.float16)],
)
def test_equals_the_oracle(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """All rules side by side in one batch, strided rows, columns past the vocabulary NaN."""
    logits = column_slice((torch.randn(len(RULES), vocab, device=device) * 3).to(dtype))
    temperature, top_k, top_p = zip(*RULES, strict=True)
    arguments = _arguments(
        logits, temperature, top_k, top_p, seed=torch.randint(-(2**62), 2**62, (len(RULES),)), step=torch.arange(len(RULES))
    )
    assert tkernels.sample(*arguments).tolist() == sample_ref(*arguments).tolist()


def test_programs_of_several_tiles_equal_the_oracle(device: torch.device) -> None:
    """So many rows that a program of kernel 1 reads several tiles; the last ones lie past a vocabulary that is no multiple of anything."""
    rows, vocab = 26, 5003
    assert sampling.tiles_for(rows * 5, 4) > 1, "rows enough for the interpreter's four multiprocessors"
    logits = column_slice((torch.randn(rows, vocab, device=device) * 2).bfloat16())
    temperature = torch.tensor([0.0, 1.0] * 13)
    top_k = torch.where(torch.arange(rows) % 5 == 3, 3, 0)
    arguments = _arguments(logits, temperature, top_k, 1.0, seed=torch.arange(rows), step=3)
    tokens = tkernels.sample(*arguments)
    assert tokens.tolist() == sample_ref(*arguments).tolist()
    assert torch.equal(tkernels.sample(*[x[20:] for x in arguments]), tokens[20:])


def _race(vocab: int, logits: torch.Tensor, steps: int) -> torch.Tensor:
    """The winner among all tokens at each step, seed 0, temperature 1."""
    noise = log_exponential_ref(torch.zeros(1, 1, dtype=torch.int64), torch.arange(steps)[:, None], torch.arange(vocab)[None, :])
    return (logits.double().cpu() - noise).argmax(-1)


@pytest.mark.parametrize(
    ("rules", "kept", "dtype"),
    [
        ({"top_k": 50}, 50, torch.bfloat16),
        ({"top_p": 0.9}, None, torch.bfloat16),
        ({"top_k": 100, "top_p": 0.5}, None, torch.bfloat16),
        ({"top_k": 100, "top_p": 0.5}, None, torch.float32),
        ({"top_k": 299}, 299, torch.float32),
    ],
    ids=str,
)
def test_b141_last_kept_and_first_dropped(rules: dict[str, Any], kept: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """Steps at which exactly the last kept or the first dropped token wins the race: the set is right to the token.

    Nearly flat, so that every rank wins now and then; bf16 puts ties at the boundary.
    """
    vocab = 300
    logits = (torch.randn(1, vocab, device=device) * 0.3).to(dtype)
    order = torch.sort(logits[0].float(), descending=True, stable=True).indices.cpu()
    if kept is None:
        probabilities = logits[0].double().softmax(-1).cpu()[order]
        probabilities = probabilities[: rules.get("top_k", vocab)]
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < rules["top_p"] * probabilities.sum()).sum())
    winners = _race(vocab, logits, 3000)
    for rank in (kept - 1, kept):
        steps = (winners == order[rank]).nonzero().flatten()[:1].to(device)
        assert len(steps), "more steps are needed"
        arguments = _arguments(logits.expand(len(steps), -1), step=steps, **rules)
        tokens = tkernels.sample(*arguments).cpu()
        assert torch.equal(tokens, sample_ref(*arguments).cpu())
        assert bool((tokens == order[rank]).all()) == (rank < kept)


def test_b130_b131_draw_depends_on_seed_and_step_only(device: torch.device) -> None:
    """Alone, in another row, next to greedy, seeded and padding rows, as a slice of a wider buffer: the same token."""
    row = torch.randn(1, 600, device=device)
    for rules in ({}, {"top_k": 20, "top_p": 0.9}):
        alone = tkernels.sample(*_arguments(row, seed=11, step=5, **rules))
        logits = torch.randn(5, 600, device=device)
        logits[3] = row[0]
        arguments = list(_arguments(column_slice(logits), seed=[1, 0, 11, 11, 0], step=[5, 0, 5, 5, 0], **rules))
        arguments[1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], device=device)
        assert tkernels.sample(*arguments)[3] == alone[0]
        arguments[0] = logits.half().float()[:5]
        arguments[0][3] = row[0]
        assert tkernels.sample(*[x[3:] for x in arguments])[0] == alone[0]


def test_b128_steps_and_seeds_draw_anew(device: torch.device) -> None:
    flat = torch.zeros(40, 1000, device=device)
    by_step = tkernels.sample(*_arguments(flat, step=torch.arange(40)))
    by_seed = tkernels.sample(*_arguments(flat, seed=torch.arange(40) << 32))
    far_steps = _arguments(flat[:8], step=torch.arange(8) << 32)  # the step's high word counts too
    assert len(set(tkernels.sample(*far_steps).tolist())) > 4
    assert torch.equal(tkernels.sample(*far_steps), sample_ref(*far_steps))
    assert len(set(by_step.tolist())) > 30
    assert len(set(by_seed.tolist())) > 30
    assert by_step.tolist()[1:] != by_seed.tolist()[1:]


def test_philox_known_answers() -> None:
    """From the authors' kat_vectors file: counter and key all zeros, and all ones."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [hex(x.item()) for x in philox_ref(zero, zero, zero)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_probabilities(temperature: float, device: torch.device) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01, 0.0], device=device)
    tokens = _draws(probabilities, 20_000, temperature=temperature)
    assert _chi_square(tokens, probabilities ** (1 / temperature)) < 4


def test_b143_top_k_of_equal_logits_is_uniform(device: torch.device) -> None:
    """No fall-back to the largest: 100 of 2000 equal tokens, the lowest ids, all equally often."""
    want = torch.zeros(2000, device=device)
    want[:100] = 0.01
    assert _chi_square(_draws(torch.full((2000,), 1 / 2000, device=device), 2000, top_k=100), want) < 4


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
    tokens = _draws(p, 2000, **rules)
    assert set(tokens.tolist()) == kept
    live = torch.zeros_like(p)
    live[list(kept)] = p[list(kept)]
    assert _chi_square(tokens, live) < 4


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
    arguments = _arguments(p.log().expand(3000, -1), step=torch.arange(3000, device=device), **rules)
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
    arguments = _arguments(
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
        tokens = sample_ref(*_arguments(logits.expand(3000, -1), temperature, top_k, top_p, step=torch.arange(3000)), ratio)
        assert _chi_square(tokens, want) < 4
        few = _arguments(logits.to(device).expand(3, -1), temperature, top_k, top_p, step=torch.arange(3))
        assert tkernels.sample(*few, min_p=ratio[:3].to(device)).tolist() == tokens[:3].tolist()


def test_b136_greedy_is_argmax_in_any_company(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 2.0, -1.0], [2.0, 2.0, -1.0], [-1.0, 3.0, 3.0], [0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for top_p in (1.0, 0.9):
            arguments = list(_arguments(logits.to(dtype), [0.0, 1.0, 0.0, -1.0, float("nan")], top_k=2, top_p=top_p, seed=3))
            tokens = tkernels.sample(*arguments)
            assert tokens[[0, 2, 3, 4]].tolist() == [0, 1, 0, 0]
            assert torch.equal(tokens, sample_ref(*arguments))


def test_greedy_over_many_runs(device: torch.device) -> None:
    """The maximum in the first, last and middle columns of a vocabulary that is no multiple of anything; equals far apart."""
    logits = torch.randn(5, 5003, device=device).bfloat16()
    for row, columns in enumerate(([0], [5002], [2500], [127, 128], [4999, 5, 1000])):
        logits[row, columns] = 50.0
    assert tkernels.sample(*_arguments(logits, 0.0)).tolist() == [0, 5002, 2500, 127, 5]


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.5}, {"temperature": INF}, {"temperature": INF, "top_p": 0.4},
        {"temperature": INF, "top_k": 9, "top_p": 0.4},
    ],
    ids=str,
)  # fmt: skip
def test_b133_bad_rows_give_a_defined_id(rules: dict[str, Any], device: torch.device) -> None:
    """NaN counts as −∞, a row with nothing gives 0, infinite logits share all; good rows beside them are as they are alone."""
    logits = torch.randn(7, 200, device=device)
    logits[0] = float("nan")
    logits[1] = -INF
    logits[2, :150] = float("nan")
    logits[3, [7, 170]] = INF
    logits[4, :] = -INF
    logits[4, 130] = -3.0
    logits[5, 0] = float("nan")
    arguments = _arguments(logits, seed=torch.arange(7), **rules)
    tokens = tkernels.sample(*arguments)
    assert torch.equal(tokens, sample_ref(*arguments))
    assert tokens[:2].tolist() == [0, 0]
    assert tokens[2] >= 150
    assert tokens[3].item() in (7, 170)
    assert tokens[4] == 130
    assert tokens[5] != 0
    assert torch.equal(tokens[6:], tkernels.sample(*[x[6:] for x in arguments]))


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.999}, {"top_k": 1000}], ids=str)
def test_b135_two_live_tokens_in_a_large_vocabulary(rules: dict[str, Any], device: torch.device) -> None:
    """Whether the others are −∞ or merely have a probability that fp32 cannot hold."""
    for floor in (-INF, -200.0):
        logits = torch.full((2, 5_011), floor, device=device)
        logits[:, [3, 5_010]] = 1.0
        tokens = tkernels.sample(*_arguments(logits, step=torch.arange(2), **rules))
        assert set(tokens.tolist()) <= {3, 5_010}


def test_b135_smallest_and_largest_noise_are_finite() -> None:
    """The words 0 and 2**32 − 1 give no infinite score, so no token of probability zero can win and none is lost."""
    low = (0 + (0 + 0.5) * 2.0**-32) * 2.0**-32
    assert math.isfinite(math.log(-math.log1p(-low)))
    # the kernel's w is at most 1 − 2**-24
    assert math.isfinite(math.log(-math.log1p(-(1 - 2.0**-24))))


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
    arguments = _arguments(logits, 0.9, seed=torch.arange(3) + 5, step=torch.arange(3), **rules)
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
    winners = _race(300, logits, 3000)
    for token in (kept - 1, kept):
        steps = (winners == token).nonzero().flatten()[:1].to(device)
        assert len(steps), "more steps are needed"
        arguments = _arguments(logits, step=steps, **rules)
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
        arguments = _arguments(logits[row : row + 1], 1.0 if row < 3 else 0.0, top_p=0.9)
        assert torch.equal(tkernels.sample(*arguments), sample_ref(*arguments))
        assert len(lent) == row + 1 and not lent[row].any()


@pytest.mark.parametrize("top_k", [-1, 0, 1, 1000, 2000])
def test_b145_padded_vocabulary_is_never_sampled(top_k: int, device: torch.device) -> None:
    """1000 columns of a buffer of 1024 whose tail is huge; k ≤ 0 or ≥ vocabulary is off."""
    buffer = torch.full((3, 1024), 1e9, device=device)
    buffer[:, :1000] = torch.randn(3, 1000, device=device)
    arguments = _arguments(buffer[:, :1000], [1.0, 0.0, 1.0], top_k=top_k, step=torch.arange(3))
    tokens = tkernels.sample(*arguments)
    assert bool((tokens < 1000).all())
    assert torch.equal(tokens, sample_ref(*arguments))
    if top_k != 1:
        assert torch.equal(tokens, tkernels.sample(*_arguments(buffer[:, :1000], [1.0, 0.0, 1.0], step=torch.arange(3))))
    else:
        assert torch.equal(tokens, buffer[:, :1000].argmax(-1))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("logits", torch.zeros(2, 0), ValueError, r"logits: expected \[rows, vocab\] with a vocab of 1 to 1048576, got \[2, 0\]"),
        ("logits", torch.zeros(4), ValueError, r"logits: expected \[rows, vocab\]"),
        ("logits", torch.zeros(2, 4).long(), TypeError, "logits: expected float16, bfloat16 or float32"),
        ("temperature", torch.zeros(1), ValueError, r"temperature: expected \[2\] one per row of logits, got \[1\]"),
        ("top_k", torch.zeros(2).long(), TypeError, "top_k: expected int32 per row, got"),
        ("seeds", torch.zeros(2).int(), TypeError, "seeds: expected int64 per row, got"),
    ],
)
def test_errors_name_the_argument(name: str, value: torch.Tensor, error: type[Exception], message: str, device: torch.device) -> None:
    names = ["logits", "temperature", "top_k", "top_p", "seeds", "steps"]
    arguments = dict(zip(names, _arguments(torch.zeros(2, 4, device=device)), strict=True))
    arguments[name] = value.to(device)
    with pytest.raises(error, match=message):
        tkernels.sample(**arguments)


def test_b101_row_stride_past_32_bits(device: torch.device) -> None:
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    logits = base.as_strided((3, 32), (2**30, 1))
    logits.copy_(torch.randn(3, 32, device=device))
    for rules in ({"temperature": 0.0}, {}, {"top_k": 4}):
        far, near = (tkernels.sample(*_arguments(x, step=torch.arange(3), **rules)) for x in (logits, logits.contiguous()))
        assert torch.equal(far, near)


@pytest.mark.gpu
def test_b135_a_million_draws_of_two_tokens(device: torch.device) -> None:
    logits = torch.full((1, 150_000), -INF, device=device)
    logits[:, [3, 149_999]] = 0.0
    for start in range(0, 1_000_000, 50_000):
        steps = torch.arange(start, start + 50_000, device=device)
        tokens = tkernels.sample(*_arguments(logits.expand(50_000, -1), step=steps))
        assert set(tokens.unique().tolist()) == {3, 149_999}


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
        seen[tkernels.sample(*_arguments(logits.expand(4000, -1), top_p=top_p, step=steps))] = True
    assert not bool(seen[order[kept + 2 :]].any())
    assert seen[order[:kept]].float().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b130_wide_rows_do_not_depend_on_the_team(dtype: torch.dtype, device: torch.device) -> None:
    """Rows shared by many programs, by two, and each its own program's, again and again: the same tokens."""
    rules = [*WIDE_RULES, {"top_k": 300, "top_p": 1e-3}, {"top_p": 0.5}, {}] * 14
    logits = (torch.randn(140, 128_257, device=device) * torch.tensor([0.0, 0.1, 2.0, 8.0], device=device).repeat(35)[:, None]).to(dtype)
    top_k, top_p = [rule.get("top_k", 0) for rule in rules], [rule.get("top_p", 1.0) for rule in rules]
    arguments = _arguments(logits, 0.8, torch.tensor(top_k), torch.tensor(top_p), torch.arange(140), torch.arange(140))
    tokens = tkernels.sample(*arguments)
    assert (tokens != sample_ref(*arguments)).sum() <= 2  # at the edge of a set, sums in fp32 may decide otherwise
    for _ in range(5):
        assert torch.equal(tkernels.sample(*arguments), tokens)
        for rows in (1, 2, 20, 60):
            several = [tkernels.sample(*[x[i : i + rows] for x in arguments]) for i in range(0, 140 - rows + 1, rows)]
            assert torch.equal(torch.cat(several), tokens[: len(several) * rows])


@pytest.mark.gpu
def test_b128_fresh_draws_at_every_replay(device: torch.device) -> None:
    arguments = _arguments(torch.zeros(4, 1000, device=device), [1.0, 1.0, 0.0, 1.0], top_k=[0, 50, 0, 0], seed=torch.arange(4))
    tkernels.sample(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = tkernels.sample(*arguments)
    seen = []
    for step in range(100):
        arguments[5].fill_(step)
        graph.replay()
        seen.append(tokens.tolist())
        assert seen[-1] == tkernels.sample(*arguments).tolist()
    assert len({row[0] for row in seen}) > 80
    assert {row[2] for row in seen} == {0}


def test_the_cpu_path_is_the_oracle_without_its_cost_for_greedy_rows() -> None:
    logits = torch.randn(7, 300)
    logits[1, 5:9] = 99.0  # equals: the lowest id
    logits[2] = -INF
    logits[3, ::3] = math.nan
    for temperature in ([0.0] * 7, [0.0, 0.0, 1.0, 0.7, -1.0, math.nan, 2.0], [1.0] * 7):
        arguments = _arguments(logits, torch.tensor(temperature), top_k=20, top_p=0.9, seed=3, step=torch.arange(7))
        assert torch.equal(sampling._sample_on_cpu(*arguments), sample_ref(*arguments))
    empty = _arguments(logits[:0])
    assert sampling._sample_on_cpu(*empty).shape == (0,)


def test_b066_alignment_of_the_scratch_does_not_depend_on_the_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Triton compiles anew for a pointer that is, or is no longer, a multiple of 16 bytes."""
    pointers: list[int] = []

    class Spy:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: pointers.extend(a.data_ptr() for a in args if isinstance(a, torch.Tensor))

    monkeypatch.setattr(sampling, "runs_kernel", Spy())
    monkeypatch.setattr(sampling, "finish_kernel", Spy())
    for rows in (1, 2, 3):
        tkernels.sample(*_arguments(torch.zeros(rows, 300, device=device)))
    assert len(pointers) == 3 * (8 + 10)
    assert not [p for p in pointers if p % 16]
