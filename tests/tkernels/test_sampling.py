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
from tests.tkernels.sampling_cases import INF, RULES, arguments_of, chi_square, draw, winners_of
from tkernels import sampling
from tkernels._rng import philox_ref
from tkernels.sampling import sample_ref


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(v, torch.bfloat16) for v in (1, 7, 129, 1000, 4095)] + [(1000, torch.float32), (129, torch.float16)],
)
def test_equals_the_oracle(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """All rules side by side in one batch, strided rows, columns past the vocabulary NaN."""
    logits = column_slice((torch.randn(len(RULES), vocab, device=device) * 3).to(dtype))
    temperature, top_k, top_p = zip(*RULES, strict=True)
    arguments = arguments_of(
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
    arguments = arguments_of(logits, temperature, top_k, 1.0, seed=torch.arange(rows), step=3)
    tokens = tkernels.sample(*arguments)
    assert tokens.tolist() == sample_ref(*arguments).tolist()
    assert torch.equal(tkernels.sample(*[x[20:] for x in arguments]), tokens[20:])


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
    winners = winners_of(vocab, logits, 3000)
    for rank in (kept - 1, kept):
        steps = (winners == order[rank]).nonzero().flatten()[:1].to(device)
        assert len(steps), "more steps are needed"
        arguments = arguments_of(logits.expand(len(steps), -1), step=steps, **rules)
        tokens = tkernels.sample(*arguments).cpu()
        assert torch.equal(tokens, sample_ref(*arguments).cpu())
        assert bool((tokens == order[rank]).all()) == (rank < kept)


def test_b130_b131_draw_depends_on_seed_and_step_only(device: torch.device) -> None:
    """Alone, in another row, next to greedy, seeded and padding rows, as a slice of a wider buffer: the same token."""
    row = torch.randn(1, 600, device=device)
    for rules in ({}, {"top_k": 20, "top_p": 0.9}):
        alone = tkernels.sample(*arguments_of(row, seed=11, step=5, **rules))
        logits = torch.randn(5, 600, device=device)
        logits[3] = row[0]
        arguments = list(arguments_of(column_slice(logits), seed=[1, 0, 11, 11, 0], step=[5, 0, 5, 5, 0], **rules))
        arguments[1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], device=device)
        assert tkernels.sample(*arguments)[3] == alone[0]
        arguments[0] = logits.half().float()[:5]
        arguments[0][3] = row[0]
        assert tkernels.sample(*[x[3:] for x in arguments])[0] == alone[0]


def test_b128_steps_and_seeds_draw_anew(device: torch.device) -> None:
    flat = torch.zeros(40, 1000, device=device)
    by_step = tkernels.sample(*arguments_of(flat, step=torch.arange(40)))
    by_seed = tkernels.sample(*arguments_of(flat, seed=torch.arange(40) << 32))
    far_steps = arguments_of(flat[:8], step=torch.arange(8) << 32)  # the step's high word counts too
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
    tokens = draw(probabilities, 20_000, temperature=temperature)
    assert chi_square(tokens, probabilities ** (1 / temperature)) < 4


def test_b136_greedy_is_argmax_in_any_company(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 2.0, -1.0], [2.0, 2.0, -1.0], [-1.0, 3.0, 3.0], [0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        for top_p in (1.0, 0.9):
            arguments = list(arguments_of(logits.to(dtype), [0.0, 1.0, 0.0, -1.0, float("nan")], top_k=2, top_p=top_p, seed=3))
            tokens = tkernels.sample(*arguments)
            assert tokens[[0, 2, 3, 4]].tolist() == [0, 1, 0, 0]
            assert torch.equal(tokens, sample_ref(*arguments))


def test_greedy_over_many_runs(device: torch.device) -> None:
    """The maximum in the first, last and middle columns of a vocabulary that is no multiple of anything; equals far apart."""
    logits = torch.randn(5, 5003, device=device).bfloat16()
    for row, columns in enumerate(([0], [5002], [2500], [127, 128], [4999, 5, 1000])):
        logits[row, columns] = 50.0
    assert tkernels.sample(*arguments_of(logits, 0.0)).tolist() == [0, 5002, 2500, 127, 5]


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
    arguments = arguments_of(logits, seed=torch.arange(7), **rules)
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
        tokens = tkernels.sample(*arguments_of(logits, step=torch.arange(2), **rules))
        assert set(tokens.tolist()) <= {3, 5_010}


def test_b135_smallest_and_largest_noise_are_finite() -> None:
    """The words 0 and 2**32 − 1 give no infinite score, so no token of probability zero can win and none is lost."""
    low = (0 + (0 + 0.5) * 2.0**-32) * 2.0**-32
    assert math.isfinite(math.log(-math.log1p(-low)))
    # the kernel's w is at most 1 − 2**-24
    assert math.isfinite(math.log(-math.log1p(-(1 - 2.0**-24))))


@pytest.mark.parametrize("top_k", [-1, 0, 1, 1000, 2000])
def test_b145_padded_vocabulary_is_never_sampled(top_k: int, device: torch.device) -> None:
    """1000 columns of a buffer of 1024 whose tail is huge; k ≤ 0 or ≥ vocabulary is off."""
    buffer = torch.full((3, 1024), 1e9, device=device)
    buffer[:, :1000] = torch.randn(3, 1000, device=device)
    arguments = arguments_of(buffer[:, :1000], [1.0, 0.0, 1.0], top_k=top_k, step=torch.arange(3))
    tokens = tkernels.sample(*arguments)
    assert bool((tokens < 1000).all())
    assert torch.equal(tokens, sample_ref(*arguments))
    if top_k != 1:
        assert torch.equal(tokens, tkernels.sample(*arguments_of(buffer[:, :1000], [1.0, 0.0, 1.0], step=torch.arange(3))))
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
    arguments = dict(zip(names, arguments_of(torch.zeros(2, 4, device=device)), strict=True))
    arguments[name] = value.to(device)
    with pytest.raises(error, match=message):
        tkernels.sample(**arguments)


def test_b101_row_stride_past_32_bits(device: torch.device) -> None:
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    logits = base.as_strided((3, 32), (2**30, 1))
    logits.copy_(torch.randn(3, 32, device=device))
    for rules in ({"temperature": 0.0}, {}, {"top_k": 4}):
        far, near = (tkernels.sample(*arguments_of(x, step=torch.arange(3), **rules)) for x in (logits, logits.contiguous()))
        assert torch.equal(far, near)


@pytest.mark.gpu
def test_b135_a_million_draws_of_two_tokens(device: torch.device) -> None:
    logits = torch.full((1, 150_000), -INF, device=device)
    logits[:, [3, 149_999]] = 0.0
    for start in range(0, 1_000_000, 50_000):
        steps = torch.arange(start, start + 50_000, device=device)
        tokens = tkernels.sample(*arguments_of(logits.expand(50_000, -1), step=steps))
        assert set(tokens.unique().tolist()) == {3, 149_999}


@pytest.mark.gpu
def test_b128_fresh_draws_at_every_replay(device: torch.device) -> None:
    arguments = arguments_of(torch.zeros(4, 1000, device=device), [1.0, 1.0, 0.0, 1.0], top_k=[0, 50, 0, 0], seed=torch.arange(4))
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
        arguments = arguments_of(logits, torch.tensor(temperature), top_k=20, top_p=0.9, seed=3, step=torch.arange(7))
        assert torch.equal(sampling._sample_on_cpu(*arguments), sample_ref(*arguments))
    empty = arguments_of(logits[:0])
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
        tkernels.sample(*arguments_of(torch.zeros(rows, 300, device=device)))
    assert len(pointers) == 3 * (8 + 10)
    assert not [p for p in pointers if p % 16]
