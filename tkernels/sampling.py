"""Sampling on the device: greedy, temperature, top-k, top-p and min-p, each request with its own numbers, without a host sync.

    token = argmax over the kept tokens of  (logit − max) / temperature − log E(seed, step, token id),   E exponential

which draws a token with its probability (Gumbel-max), and depends on nothing but the request: not on its row, its neighbours, the
padding, or the shape of the launch.

The rules, in order:
1. temperature ≤ 0 (or NaN) is greedy: the largest logit, the lowest id among equals. The filters do not matter then.
2. top_k keeps exactly k tokens, the larger logit first, the lower id first among equals; k ≤ 0 or ≥ vocabulary is off.
3. top_p keeps the smallest leading set of what top_k left, in that order, whose probability (renormalised after top_k and with
   temperature, as Hugging Face does) is at least top_p; at least one token. top_p ≥ 1 (or NaN) is off. A set that misses top_p by
   less than 10⁻⁶ of it, the resolution of an fp32 sum, counts as reaching it: so p = 0.75 of [.4, .35, .15, .1] keeps two.
4. min_p keeps, of what these left, the tokens at least min_p times as likely as the likeliest one (with temperature). min_p ≤ 0 (or
   NaN) is off, ≥ 1 keeps the likeliest only. Here too, a ratio that misses min_p by less than 10⁻⁶ of it counts as reaching it.
5. A NaN logit counts as −∞. Infinite logits share all the probability. A row without any logit above −∞ gives token 0.
   A token of probability zero is never drawn.

Source: arXiv 1805.04833 (top-k), arXiv 1904.09751 (top-p), arXiv 2407.01082 (min-p).

How: kernel 1 reads the logits once, spread over all multiprocessors, and leaves per 128 columns a maximum and a best candidate, or for
filtered rows a sum. Kernel 2, one program a row, finishes greedy and unfiltered rows from that. A filtered row first bounds its kept set
from the maxima alone, lists the runs of 128 columns that can hold a kept token (k of them at most, barring equals), and races over these:
the winner is drawn if it is kept, which one sum over the tokens before it tells; if not, those before it race again. No threshold is
searched, but for top_k and top_p together, where top_p's sum is over the k largest. Where the list is long and rows are few, helpers
share it, so that a set of a hundred thousand tokens costs a row a few passes over it, each spread like kernel 1. Sums are per run, and
runs are added in order, so who did what cannot be seen (``_sampling_stages``, ``_sampling_finish``). Which path a row takes is decided on
the device.
"""

from __future__ import annotations

import torch

from tkernels import _checks, _dependent
from tkernels._counters import counters
from tkernels._op import define
from tkernels._rng import log_exponential_ref
from tkernels._sampling_finish import WORDS, finish_kernel
from tkernels._sampling_kernels import PLANES_IDS, PLANES_VALUES, runs_kernel, tiles_for
from tkernels._sampling_stages import NOTES
from tkernels._target import target_of
from tkernels._triton import cdiv, next_power_of_2

_RUN = 128  # columns that share a maximum: 16 threads × 16 bytes of bf16
_RUNS = 8  # runs in a tile of kernel 1: 8 elements a thread keep the random path at 56 registers
_TILE_RUNS = 16  # runs in a tile of kernel 2: one for each of its warps
_ALONE_RUNS = 96  # a longer list is shared: below, meeting costs more than it brings
_MAX_VOCAB = 1 << 20  # kernel 2 holds vocab / 128 maxima in registers
_SLACK = 1e-6  # see rule 3
# Low bits that are always equal once a logit is fp32: the bisection skips them.
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle: a sort, and sums in fp64."""
    vocab = logits.shape[1]
    x = logits.double()
    x = torch.where(x.isnan(), -float("inf"), x)
    random = temperature > 0
    temperature = temperature.clamp(max=torch.finfo(torch.float32).max)
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    top = order.values[:, :1]
    z = torch.where(order.values == top, 0.0, (order.values - top) / torch.where(random, temperature, 1.0).double()[:, None])
    rank = torch.arange(vocab, device=x.device)[None, :]
    keep = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None] > rank
    mass = torch.where(keep, z.exp(), 0.0)
    before = mass.cumsum(-1) - mass
    target = (top_p.double() * (1 - _SLACK))[:, None] * mass.sum(-1, keepdim=True)
    keep &= ~(top_p < 1)[:, None] | (before < target) | (rank == 0)
    if min_p is not None:
        floor = torch.where(min_p > 0, min_p.clamp(max=1.0).double().log() - _SLACK, -float("inf"))
        keep &= z >= floor[:, None]
    noise = log_exponential_ref(seeds[:, None], steps[:, None], order.indices)
    score = torch.where(keep & (mass > 0), z - noise, -float("inf"))
    best = score == score.amax(-1, keepdim=True)  # equal scores: the lowest id
    drawn = torch.where(best, order.indices, vocab).amin(-1)
    tokens = torch.where(random, drawn, order.indices[:, 0])
    return torch.where(top[:, 0] == -float("inf"), 0, tokens)


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> None:
    _checks.check_float("logits", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits: expected [rows, vocab] with a vocab of 1 to {_MAX_VOCAB}, got {list(logits.shape)}")
    _checks.check_last_stride("logits", logits)
    for name, x, dtype in (
        ("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32), ("top_p", top_p, torch.float32),
        ("seeds", seeds, torch.int64), ("steps", steps, torch.int64), ("min_p", min_p, torch.float32),
    ):  # fmt: skip
        if x is None:
            continue
        _checks.check_shape(name, x, (logits.shape[0],), "one per row of logits")
        _checks.check_dtype(name, x, dtype, "per row")
        _checks.check_device(name, x, logits, "logits")
        _checks.check_last_stride(name, x)


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(logits, temperature, top_k, top_p, seeds, steps, min_p)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        num_runs = cdiv(vocab, _RUN)
        block_runs = next_power_of_2(num_runs)
        values = torch.empty((rows, PLANES_VALUES.value, num_runs), dtype=torch.float32, device=logits.device)
        ids = torch.empty((rows, PLANES_IDS.value, num_runs), dtype=torch.int32, device=logits.device)
        num_sms = target_of(logits.device).num_sms
        # As many programs as there are multiprocessors: 16 warps fill one.
        team = max(1, min(num_sms // rows, cdiv(num_runs, _TILE_RUNS)))
        notes = torch.empty((rows, NOTES.value), dtype=torch.int32, device=logits.device)
        words = counters(rows * WORDS.value, logits.device) if team > 1 else None
        tile_runs = min(_RUNS, block_runs)
        tiles = tiles_for(rows * cdiv(num_runs, tile_runs), num_sms)
        _dependent.launch(
            runs_kernel, (rows, cdiv(num_runs, tile_runs * tiles)), logits.device,
            logits, temperature, top_k, top_p, min_p, seeds, steps, values, ids, logits.stride(0), vocab, num_runs,
            TILES=tiles, RUNS=tile_runs, RUN=_RUN, num_warps=4,
        )  # fmt: skip
        _dependent.launch(
            finish_kernel, (rows * team,), logits.device,
            logits, temperature, top_k, top_p, min_p, seeds, steps, values, ids, notes, words, tokens,
            logits.stride(0), rows, vocab, num_runs, team, _SLACK,
            SHIFT=_SHIFT[logits.dtype], BLOCK_RUNS=block_runs,
            TILE_RUNS=min(_TILE_RUNS, block_runs), ALONE_RUNS=_ALONE_RUNS, RUN=_RUN, num_warps=16,
        )  # fmt: skip
    return tokens


def _sample_on_cpu(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle for the rows that draw; greedy rows need neither its sort nor its noise, which cost more than a small model's step."""
    tokens = torch.where(logits.isnan(), -float("inf"), logits).argmax(-1)  # the first of equals
    rows = (temperature > 0).nonzero()[:, 0]
    if len(rows):
        arguments = (None if x is None else x[rows] for x in (logits, temperature, top_k, top_p, seeds, steps, min_p))
        tokens[rows] = sample_ref(*arguments)  # type: ignore[arg-type]
    return tokens


_sample_op = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seeds, Tensor steps, Tensor? min_p=None) -> Tensor",
    kernel=_sample,
    reference=_checks.checked(_check, _sample_on_cpu),
    fake=lambda logits, *args: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row, drawn by that row's own rules and numbers; safe in a CUDA graph, which draws anew with every step.

    logits: [rows, vocab] fp16, bf16 or fp32, any row stride, last stride 1; a padded vocabulary is passed as ``logits[:, :vocab]``.
    temperature: [rows] fp32; ≤ 0 is greedy (lowest id among equals). top_k: [rows] int32; ≤ 0 or ≥ vocab is off.
    top_p: [rows] fp32; ≥ 1 is off; applied to what top_k left, renormalised.
    min_p: [rows] fp32 or None; ≤ 0 is off; the least ratio to the likeliest token's probability.
    seeds, steps: [rows] int64; equal pairs draw equally.
    Returns [rows] int64. NaN logits count as −∞; a row with nothing above −∞ gives 0. The module's docstring has all rules.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _sample_op(logits, temperature, top_k, top_p, seeds, steps, min_p)
