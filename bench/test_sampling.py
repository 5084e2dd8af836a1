"""Sampling of one token per row from bf16 logits, vocabulary 128256.

Draws differ between libraries, so a peer's tokens are checked for lying in the set that the rule keeps; ours equal our oracle's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tkernels
from bench.peers import EAGER, FLASHINFER, INDUCTOR, OURS, inductor
from bench.suite import DEVICE, DTYPE, Problem, sets_for, sizes
from tkernels.sampling import sample_ref

(VOCAB,) = sizes([128256], [300])
ROWS = sizes([1, 64, 256], [1])
RULES = {
    "greedy": (0.0, 0, 1.0), "temperature": (0.8, 0, 1.0), "top-k 50": (0.8, 50, 1.0), "top-p 0.9": (0.8, 0, 0.9),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9), "top-p 0.9, peaked": (0.8, 0, 0.9),
}  # fmt: skip
# Standard deviation of the logits: 2 leaves top-p 0.9 some ten thousand tokens, 8 a handful, as a model that knows what to say does.
SPREAD = {"top-p 0.9, peaked": 8.0}
CASES = [(rule, rows) for rule in sizes(list(RULES), ["greedy", "top-k 50"]) for rows in ROWS]


def _torch_sampler(temperature: float, top_k: int, top_p: float) -> Any:
    """What one writes in torch: divide, filter by a sort, softmax, draw by an exponential race (multinomial syncs with the host)."""

    def call(logits: torch.Tensor) -> torch.Tensor:
        if not temperature:
            return logits.argmax(-1)
        scaled = logits.float() / temperature
        if top_k:
            scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[:, -1:], float("-inf"))
        if top_p < 1:
            values, order = scaled.sort(descending=True)
            probabilities = values.softmax(-1)
            dropped = probabilities.cumsum(-1) - probabilities >= top_p
            scaled = scaled.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), float("-inf"))
        race = torch.empty_like(scaled).exponential_()
        return (scaled.softmax(-1) / race).argmax(-1)

    return call


def _flashinfer_sampler(temperature: float, top_k: int, top_p: float) -> Any:
    def call(logits: torch.Tensor) -> torch.Tensor:
        from flashinfer import sampling

        probabilities = torch.softmax(logits.float() / temperature, -1)
        if top_k and top_p < 1:
            return sampling.top_k_top_p_sampling_from_probs(probabilities, top_k, top_p, filter_apply_order="top_k_first")
        if top_k:
            return sampling.top_k_sampling_from_probs(probabilities, top_k)
        if top_p < 1:
            return sampling.top_p_sampling_from_probs(probabilities, top_p)
        return sampling.sampling_from_probs(probabilities)

    return call


def _kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """[rows, vocab] bool: the tokens that the rule may draw, ties included."""
    wide = logits.double()
    if not temperature:
        return wide == wide.amax(-1, keepdim=True)
    kept = torch.ones_like(wide, dtype=torch.bool)
    if top_k:
        kept &= wide >= wide.topk(top_k).values[:, -1:]
    if top_p < 1:
        values, _ = (wide.masked_fill(~kept, -float("inf")) / temperature).sort(descending=True)
        probabilities = values.softmax(-1)
        # a little more than top_p: peers sum in fp32
        count = (probabilities.cumsum(-1) - probabilities < top_p * 1.001).sum(-1, keepdim=True)
        kept &= wide / temperature >= values.gather(1, count - 1)
    return kept


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER, INDUCTOR, FLASHINFER])
def test_sample(measure: Any, case: tuple[str, int], peer: str) -> None:
    rule, rows = case
    temperature, top_k, top_p = RULES[rule]

    def build() -> Problem:
        moved = rows * VOCAB * DTYPE.itemsize
        spread = SPREAD.get(rule, 2.0)
        logits = [(spread * torch.randn((rows, VOCAB), device=DEVICE)).to(DTYPE) for _ in range(sets_for(moved))]

        def rows_of(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=DEVICE)

        settings = (
            rows_of(temperature, torch.float32), rows_of(top_k, torch.int32), rows_of(top_p, torch.float32),
            torch.arange(rows, device=DEVICE), rows_of(7, torch.int64),
        )  # fmt: skip
        plain, theirs = _torch_sampler(temperature, top_k, top_p), _flashinfer_sampler(temperature, top_k, top_p)
        compiled = inductor(plain)
        kept, expected = _kept(logits[0], temperature, top_k, top_p), sample_ref(logits[0], *settings)

        def check(name: str, tokens: torch.Tensor) -> float:
            outside = float((~kept.gather(1, tokens.long()[:, None])).double().mean())
            if name == OURS:  # the oracle's draws; at the edge of what is kept, sums in fp32 may decide one in a hundred otherwise
                return outside + max(0.0, float((tokens != expected).double().mean()) - 0.01)
            return outside

        calls = {
            OURS: lambda i: tkernels.sample(logits[i], *settings),
            EAGER: lambda i: plain(logits[i]),
            INDUCTOR: lambda i: compiled(logits[i]),
        }
        if temperature:
            calls[FLASHINFER] = lambda i: theirs(logits[i])
        return Problem(peers=calls, check=check, tolerance=0.0, bytes=moved, sets=len(logits))

    measure(build)


def _inputs(rows: int) -> tuple[int, list[torch.Tensor]]:
    """Bytes of one set of logits, and the sets."""
    moved = rows * VOCAB * DTYPE.itemsize
    return moved, [(2 * torch.randn((rows, VOCAB), device=DEVICE)).to(DTYPE) for _ in range(sets_for(moved))]


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"min-p 0.1, {rows} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER, INDUCTOR])
def test_sample_min_p(measure: Any, rows: int, peer: str) -> None:
    """temperature 0.8 and min-p 0.1: no sort and no search, only a look at the largest logit first."""

    def build() -> Problem:
        moved, logits = _inputs(rows)
        ones, index = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
        settings, min_p = (0.8 * ones, index.int() * 0, ones, index, 0 * index + 7), 0.1 * ones

        def plain(x: torch.Tensor) -> torch.Tensor:
            scaled = x.float() / 0.8
            scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + math.log(0.1), float("-inf"))
            return (scaled.softmax(-1) / torch.empty_like(scaled).exponential_()).argmax(-1)

        compiled, expected = inductor(plain), sample_ref(logits[0], *settings, min_p)
        wide = logits[0].double() / 0.8
        kept = wide >= wide.amax(-1, keepdim=True) + math.log(0.1) - 1e-5

        def check(name: str, tokens: torch.Tensor) -> float:
            return float(((tokens != expected) if name == OURS else ~kept.gather(1, tokens[:, None])[:, 0]).double().mean())

        calls = {
            OURS: lambda i: tkernels.sample(logits[i], *settings, min_p=min_p),
            EAGER: lambda i: plain(logits[i]),
            INDUCTOR: lambda i: compiled(logits[i]),
        }
        return Problem(peers=calls, check=check, tolerance=0.0, bytes=moved, sets=len(logits))

    measure(build)


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER, INDUCTOR])
def test_adjust_logits(measure: Any, rows: int, peer: str) -> None:
    """Repetition, presence, frequency, a bias of 16 tokens and a mask: one pass, against the chain one writes in torch."""

    def build() -> Problem:
        moved, logits = _inputs(rows)
        counts = torch.zeros((rows, VOCAB), dtype=torch.int32, device=DEVICE)
        tkernels.count_tokens(counts, torch.arange(rows, device=DEVICE).repeat(50), torch.randint(VOCAB, (50 * rows,), device=DEVICE))
        factor = torch.full((rows,), 1.2, device=DEVICE)
        ids = torch.randint(VOCAB // 16, (rows, 16), device=DEVICE) + torch.arange(16, device=DEVICE) * (VOCAB // 16)
        bias = torch.randn((rows, 16), device=DEVICE)
        allowed = torch.rand((rows, VOCAB), device=DEVICE) < 0.9
        padded = torch.zeros((rows, -(-VOCAB // 32) * 32), dtype=torch.int64, device=DEVICE)
        padded[:, :VOCAB] = allowed
        words = (padded.view(rows, -1, 32) << torch.arange(32, device=DEVICE)).sum(-1)
        mask = torch.where(words >= 2**31, words - 2**32, words).int()

        def plain(x: torch.Tensor) -> torch.Tensor:
            x = x.float()
            seen = counts > 0
            x = torch.where(seen, torch.where(x > 0, x / 1.2, x * 1.2), x) - 0.5 * counts - 0.25 * seen
            return x.scatter_add(1, ids, bias).masked_fill(~allowed, float("-inf"))

        quarter, half, narrow = factor * 0 + 0.25, factor * 0 + 0.5, ids.int()
        compiled = inductor(plain)
        expected = plain(logits[0])

        def check(name: str, out: torch.Tensor) -> float:
            live = expected > -float("inf")
            return float("inf") if bool(((out > -float("inf")) != live).any()) else float((out[live] - expected[live]).abs().max())

        calls = {
            OURS: lambda i: tkernels.adjust_logits(
                logits[i], counts=counts, repetition=factor, presence=quarter, frequency=half, bias_ids=narrow, bias_values=bias, mask=mask
            ),
            EAGER: lambda i: plain(logits[i]),
            INDUCTOR: lambda i: compiled(logits[i]),
        }
        total = moved + rows * VOCAB * (4 + 4) + mask.nbytes  # logits, counts and the mask in, fp32 out
        return Problem(peers=calls, check=check, tolerance=1e-5, bytes=total, sets=len(logits))

    measure(build)


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER, INDUCTOR])
def test_top_logprobs(measure: Any, rows: int, peer: str) -> None:
    """The drawn token's and the 20 largest log-probabilities."""

    def build() -> Problem:
        moved, logits = _inputs(rows)
        tokens = torch.randint(VOCAB, (rows,), device=DEVICE)

        def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs = x.float().log_softmax(-1)
            top = logprobs.topk(20)
            return logprobs.gather(1, tokens[:, None])[:, 0], top.values

        compiled = inductor(plain)
        expected = logits[0].double().log_softmax(-1)
        calls = {
            OURS: lambda i: tkernels.top_logprobs(logits[i], tokens, 20)[::2],
            EAGER: lambda i: plain(logits[i]),
            INDUCTOR: lambda i: compiled(logits[i]),
        }
        want = (expected.gather(1, tokens[:, None])[:, 0], expected.topk(20).values)
        return Problem(peers=calls, expected=want, tolerance=1e-5, bytes=moved, sets=len(logits))

    measure(build)


@pytest.mark.parametrize("rows", sizes([1, 8, 16, 64], [1]), ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("peer", [OURS, "tkernels, two kernels", EAGER])
def test_linear_argmax(measure: Any, rows: int, peer: str) -> None:
    """The LM head of a Llama-1B and the greedy token, beside the same as linear and sample."""
    k = sizes([2048], [64])[0]

    def build() -> Problem:
        weights = [torch.randn((VOCAB, k), device=DEVICE).mul_(k**-0.5).to(DTYPE) for _ in range(sets_for(VOCAB * k * DTYPE.itemsize))]
        x = torch.randn((rows, k), device=DEVICE).to(DTYPE)
        zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        greedy = (zeros.float(), zeros.int(), zeros.float() + 1, zeros, zeros)
        logits = tkernels.linear(x, weights[0])

        def check(name: str, tokens: torch.Tensor) -> float:
            # cuBLAS rounds a few logits differently, so its token may be one that is as good within a rounding
            return float((logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]).float().max())

        calls = {
            OURS: lambda i: tkernels.linear_argmax(x, weights[i]),
            "tkernels, two kernels": lambda i: tkernels.sample(tkernels.linear(x, weights[i]), *greedy),
            EAGER: lambda i: torch.nn.functional.linear(x, weights[i]).argmax(-1),
        }
        moved = (VOCAB * k + rows * k) * DTYPE.itemsize
        return Problem(peers=calls, check=check, tolerance=2**-5, bytes=moved, flops=2 * rows * VOCAB * k, sets=len(weights))

    measure(build)
