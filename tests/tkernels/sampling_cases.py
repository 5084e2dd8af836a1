"""What tests of ``sample`` share: its arguments from scalars, draws, and how far draws are from their probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch

import tkernels
from tkernels._rng import log_exponential_ref
from tkernels.sampling import sample_ref

INF = float("inf")


def numbers(value: Any, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=dtype, device=device).expand(rows).contiguous()


def arguments_of(
    logits: torch.Tensor, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, seed: Any = 0, step: Any = 0
) -> tuple[Any, ...]:
    """The op's arguments but min_p, each scalar repeated for all rows."""
    rows, device = logits.shape[0], logits.device
    return (
        logits,
        numbers(temperature, rows, torch.float32, device),
        numbers(top_k, rows, torch.int32, device),
        numbers(top_p, rows, torch.float32, device),
        numbers(seed, rows, torch.int64, device),
        numbers(step, rows, torch.int64, device),
    )


def draw(probabilities: torch.Tensor, count: int, **rules: Any) -> torch.Tensor:
    """count draws at steps 0, 1, …: by the kernel on a GPU, else by the reference, and the first few by both."""
    logits = probabilities.log().expand(count, -1)
    arguments = arguments_of(logits, step=torch.arange(count, device=logits.device), **rules)
    tokens = (tkernels.sample if logits.is_cuda else sample_ref)(*arguments)
    few = [x[:2] for x in arguments]
    assert torch.equal(tkernels.sample(*few), sample_ref(*few))
    return tokens


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """In standard deviations above what chance gives."""
    expected = probabilities.double() / probabilities.double().sum() * len(tokens)
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    live = expected > 0
    assert not bool(observed[~live].any()), "a token of probability zero was drawn"
    freedom = int(live.sum()) - 1
    statistic = ((observed[live] - expected[live]).square() / expected[live]).sum().item()
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


RULES = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.9), (1e-3, 0, 0.5), (50.0, 3, 0.99), (1.0, 1, 0.1)]


def winners_of(vocab: int, logits: torch.Tensor, steps: int) -> torch.Tensor:
    """The winner among all tokens at each step, seed 0, temperature 1."""
    noise = log_exponential_ref(torch.zeros(1, 1, dtype=torch.int64), torch.arange(steps)[:, None], torch.arange(vocab)[None, :])
    return (logits.double().cpu() - noise).argmax(-1)
