"""Sampling on the device: greedy, temperature, top-k and top-p, each request with its own numbers, without a host sync.

    token = argmax over the kept tokens of  (logit − max) / temperature − log E(seed, step, token id),   E exponential

which draws a token with its probability (Gumbel-max), and depends on nothing but the request: not on its row, its neighbours, the
padding, or the shape of the launch.

The rules, in order:
1. temperature ≤ 0 (or NaN) is greedy: the largest logit, the lowest id among equals. top_k and top_p do not matter then.
2. top_k keeps exactly k tokens, the larger logit first, the lower id first among equals; k ≤ 0 or ≥ vocabulary is off.
3. top_p keeps the smallest leading set of what top_k left, in that order, whose probability (renormalised after top_k and with
   temperature, as Hugging Face does) is at least top_p; at least one token. top_p ≥ 1 (or NaN) is off. A set that misses top_p by
   less than 10⁻⁶ of it, the resolution of an fp32 sum, counts as reaching it: so p = 0.75 of [.4, .35, .15, .1] keeps two.
4. A NaN logit counts as −∞. Infinite logits share all the probability. A row without any logit above −∞ gives token 0.
   A token of probability zero is never drawn.

How: kernel 1 reads the logits once, spread over all multiprocessors, and leaves per 128 columns a maximum and a best candidate.
Kernel 2, one program a row, finishes greedy and unfiltered rows from that. A filtered row first bounds its kept set from the maxima
alone, lists the runs of 128 columns that can hold a kept token (k of them at most, barring equals), and then searches the threshold
by bisection on the logits' bits over that list only. Which path a row takes is decided on the device.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._rng import log_exponential, log_exponential_ref
from tkernels._triton import cdiv, next_power_of_2, tl, triton

_RUN = 128  # columns that share a maximum: 16 threads × 16 bytes of bf16
_RUNS = 8  # runs in a program of kernel 1: 8 elements a thread keep the random path at 56 registers
_TILE_RUNS = 64  # runs in a tile of kernel 2; the draw takes half of it, or its random numbers would not fit into registers
_MAX_VOCAB = 1 << 20  # kernel 2 holds vocab / 128 maxima in registers
_SLACK = 1e-6  # see rule 3
# Low bits that are always equal once a logit is fp32: the bisection skips them.
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def sample_ref(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """The oracle: a sort, and sums in fp64."""
    vocab = logits.shape[1]
    x = logits.double()
    x = torch.where(x.isnan(), -float("inf"), x)
    random = temperature > 0
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    top = order.values[:, :1]
    z = torch.where(order.values == top, 0.0, (order.values - top) / torch.where(random, temperature, 1.0).double()[:, None])
    rank = torch.arange(vocab, device=x.device)[None, :]
    keep = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None] > rank
    mass = torch.where(keep, z.exp(), 0.0)
    before = mass.cumsum(-1) - mass
    target = (top_p.double() * (1 - _SLACK))[:, None] * mass.sum(-1, keepdim=True)
    keep &= ~(top_p < 1)[:, None] | (before < target) | (rank == 0)
    noise = log_exponential_ref(seeds[:, None], steps[:, None], order.indices)
    score = torch.where(keep & (mass > 0), z - noise, -float("inf"))
    best = score == score.amax(-1, keepdim=True)  # equal scores: the lowest id
    drawn = torch.where(best, order.indices, vocab).amin(-1)
    tokens = torch.where(random, drawn, order.indices[:, 0])
    return torch.where(top[:, 0] == -float("inf"), 0, tokens)


@triton.jit
def _load_logits(ptrs, mask):
    """Logits in fp32: NaN is −∞, and −0 is +0 so that equals have equal bits."""
    x = tl.load(ptrs, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, tl.where(x == x, x, -float("inf")))


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int32 that orders as the float x does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float of a key."""
    bits = key << SHIFT
    bits = tl.where(key < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """(low + high) // 2 without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _scaled(x, top, temperature):
    """(x − top) / temperature: log-probability up to a constant; 0 at the top also where that is infinite."""
    return tl.where(x == top, 0.0, (x - top) / temperature)


# Scalars, one a row: nothing is gained from knowing that a caller's slice of them starts at a multiple of 16 bytes.
_PER_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "seeds_ptr", "steps_ptr"]


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _runs_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr,
    stride_row, vocab, num_runs, RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Per run of RUN columns: its maximum; the id of its candidate; and, for random rows, the candidate's score or, for filtered
    ones, the run's sum of probabilities, both relative to the run's maximum. values is [rows, 2, runs]: maxima, then the others."""
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    columns = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = columns < vocab
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    x = _load_logits(logits_ptr + row * stride_row + columns, mask)
    top = tl.max(x, 1)
    out = row * num_runs + runs
    values = values_ptr + row * 2 * num_runs + runs
    mask_runs = runs < num_runs
    tl.store(values, top, mask=mask_runs)
    if temperature > 0:
        z = _scaled(x, top[:, None], temperature)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0):
            mass = tl.where(mask & (x > -float("inf")), tl.exp(z), 0.0)
            tl.store(values + num_runs, tl.sum(mass, 1), mask=mask_runs)
        else:
            score = z - log_exponential(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), columns)
            score = tl.where(mask & (x > -float("inf")), score, -float("inf"))
            best = tl.max(score, 1)
            tl.store(values + num_runs, best, mask=mask_runs)
            tl.store(ids_ptr + out, tl.min(tl.where(score == best[:, None], columns, vocab), 1), mask=mask_runs)
    else:
        tl.store(ids_ptr + out, tl.min(tl.where(x == top[:, None], columns, vocab), 1), mask=mask_runs)


@triton.jit
def _load_tile(
    logits_row, list_row, tile, num_listed, vocab, SHIFT: tl.constexpr, TILE_RUNS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """One tile [TILE_RUNS, RUN] of the listed runs: logits, their keys, columns, and which exist."""
    entries = tile + tl.arange(0, TILE_RUNS)
    runs = tl.load(list_row + entries, mask=entries < num_listed, other=0)
    columns = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = (entries < num_listed)[:, None] & (columns < vocab)
    x = _load_logits(logits_row + columns, mask)
    return x, _key(x, SHIFT), columns, mask


@triton.jit
def _count_and_mass(
    logits_row, list_row, num_listed, vocab, key, top, temperature,
    SHIFT: tl.constexpr, TILE_RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """How many listed tokens have at least this key, and their probability times a constant. Each lane sums its own column of the
    tiles and the lanes are summed once, so the order is fixed and the sum falls monotonically as the key rises."""
    count = tl.zeros((TILE_RUNS, RUN), tl.int32)
    mass = tl.zeros((TILE_RUNS, RUN), tl.float32)
    tile = 0
    while tile < num_listed:
        x, keys, _, mask = _load_tile(logits_row, list_row, tile, num_listed, vocab, SHIFT, TILE_RUNS, RUN)
        kept = mask & (keys >= key)
        count += kept.to(tl.int32)
        mass += tl.where(kept & (x > -float("inf")), tl.exp(_scaled(x, top, temperature)), 0.0)
        tile += TILE_RUNS
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(mass, 1), 0)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr, tokens_ptr,
    stride_row, vocab, num_runs, slack,
    SHIFT: tl.constexpr, BLOCK_RUNS: tl.constexpr, TILE_RUNS: tl.constexpr, DRAW_RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program: one row. Combines the runs of greedy and unfiltered rows; filters and draws the others."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    runs = tl.arange(0, BLOCK_RUNS)
    mask_runs = runs < num_runs
    entries = row * num_runs + runs
    values = values_ptr + row * 2 * num_runs + runs
    tops = tl.load(values, mask=mask_runs, other=-float("inf"))
    top = tl.max(tops, 0)
    is_random = temperature > 0
    use_k = (top_k > 0) & (top_k < vocab)
    use_p = top_p < 1.0
    if top == -float("inf"):
        tl.store(tokens_ptr + row, tl.zeros((), tl.int64))
    elif is_random & (use_k | use_p):
        relative = _scaled(tops, top, temperature)
        live = mask_runs & (tops > -float("inf"))
        keys = _key(tops, SHIFT)
        highest = _key(top, SHIFT)
        lowest = _key(tl.full((), -float("inf"), tl.float32), SHIFT)
        # 1. A key that all tokens needed below reach: k maxima are that high or, without top_k, such maxima alone reach top_p.
        low, high = lowest, highest + 1
        goal = 0.0
        if use_k:
            count_low = tl.where(top_k > num_runs, top_k, num_runs * 2 + top_k * 2)  # more runs than there are: no search
            while (low + 1 < high) & (count_low > top_k + (top_k >> 1)):  # some runs too many cost less than the rest of the search
                middle = _middle(low, high)
                count = tl.sum((mask_runs & (keys >= middle)).to(tl.int32), 0)
                enough = count >= top_k
                low, high, count_low = tl.where(enough, middle, low), tl.where(enough, high, middle), tl.where(enough, count, count_low)
        else:
            maxima_mass = tl.where(live, tl.exp(relative), 0.0)
            mass = tl.where(live, tl.load(values + num_runs, mask=mask_runs, other=0.0) * tl.exp(relative), 0.0)
            goal = top_p * (1.0 - slack) * tl.sum(mass, 0)
            while low + 1 < high:
                middle = _middle(low, high)
                # a little more than the goal: this sum and the one below are rounded differently
                enough = tl.sum(tl.where(keys >= middle, maxima_mass, 0.0), 0) >= goal * 1.00001
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        bound = low

        # 2. The runs that reach it, in order; the list takes the place of the ids, which filtered rows do not use.
        listed = mask_runs & (keys >= bound)
        num_listed = tl.sum(listed.to(tl.int32), 0)
        tl.store(ids_ptr + row * num_runs + tl.cumsum(listed.to(tl.int32), 0) - 1, runs, mask=listed)
        tl.debug_barrier()  # the list is read by other threads than wrote it
        logits_row = logits_ptr + row * stride_row
        list_row = ids_ptr + row * num_runs

        # 3. Threshold and ties: kept are the keys above the threshold, and the first `ties` tokens at it. Count and mass are those
        # of the keys from low or high upwards; a search ends early when they leave no choice.
        threshold, ties, num_kept = bound, vocab, vocab + 1
        if use_k:
            low, count_low, mass_low = bound, vocab + 1, 0.0
            high, count_high, mass_high = highest + 1, 0, 0.0
            while (low + 1 < high) & (count_low != top_k):
                middle = _middle(low, high)
                count, mass = _count_and_mass(logits_row, list_row, num_listed, vocab, middle, top, temperature, SHIFT, TILE_RUNS, RUN)
                enough = count >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                count_low, count_high = tl.where(enough, count, count_low), tl.where(enough, count_high, count)
                mass_low, mass_high = tl.where(enough, mass, mass_low), tl.where(enough, mass_high, mass)
            each = tl.exp(_scaled(_value(low, SHIFT), top, temperature))
            is_whole = count_low == top_k
            threshold, ties, num_kept = low, tl.where(is_whole, vocab, top_k - count_high), top_k
            goal = top_p * (1.0 - slack) * tl.where(is_whole, mass_low, mass_high + (top_k - count_high) * each)
        if use_p:
            low, count_low = threshold, num_kept
            high, count_high, mass_high = highest + 1, 0, 0.0
            while (low + 1 < high) & (count_low - count_high > 1):
                middle = _middle(low, high)
                count, mass = _count_and_mass(logits_row, list_row, num_listed, vocab, middle, top, temperature, SHIFT, TILE_RUNS, RUN)
                enough = mass >= goal
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                count_low, count_high = tl.where(enough, count, count_low), tl.where(enough, count_high, count)
                mass_high = tl.where(enough, mass_high, mass)
            each = tl.exp(_scaled(_value(low, SHIFT), top, temperature))
            wanted = tl.minimum(tl.maximum(tl.ceil((goal - mass_high) / tl.where(each > 0, each, 1.0)), 1.0), vocab * 1.0).to(tl.int32)
            wanted = tl.where((each > 0) & (count_low - count_high > 1), wanted, vocab)
            ties = tl.where(low == threshold, tl.minimum(wanted, ties), wanted)
            threshold = low

        # 4. The draw, ranking the tokens at the threshold by id: the list is in order.
        seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        best_score = tl.full((DRAW_RUNS, RUN), -float("inf"), tl.float32)
        best_id = tl.full((DRAW_RUNS, RUN), vocab, tl.int32)
        seen = 0
        tile = 0
        while tile < num_listed:
            x, tile_keys, columns, mask = _load_tile(logits_row, list_row, tile, num_listed, vocab, SHIFT, DRAW_RUNS, RUN)
            tied = (mask & (tile_keys == threshold)).to(tl.int32)
            per_run = tl.sum(tied, 1)
            rank = seen + (tl.cumsum(per_run, 0) - per_run)[:, None] + tl.cumsum(tied, 1)
            kept = mask & (x > -float("inf")) & ((tile_keys > threshold) | ((tied > 0) & (rank <= ties)))
            score = tl.where(kept, _scaled(x, top, temperature) - log_exponential(seed, step, columns), -float("inf"))
            better = score > best_score  # a lane's columns rise, so equals keep the lower id
            best_id = tl.where(better, columns, best_id)
            best_score = tl.where(better, score, best_score)
            seen += tl.sum(per_run, 0)
            tile += DRAW_RUNS
        best = tl.max(tl.max(best_score, 1), 0)
        token = tl.min(tl.min(tl.where(best_score == best, best_id, vocab), 1), 0)
        tl.store(tokens_ptr + row, token.to(tl.int64))
    else:
        ids = tl.load(ids_ptr + entries, mask=mask_runs, other=vocab)
        if is_random:
            score = tl.load(values + num_runs, mask=mask_runs, other=-float("inf")) + _scaled(tops, top, temperature)
            score = tl.where(tops > -float("inf"), score, -float("inf"))
        else:
            score = tops
        token = tl.min(tl.where(score == tl.max(score, 0), ids, vocab), 0)
        tl.store(tokens_ptr + row, token.to(tl.int64))


def _check(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> None:
    _checks.check_float("logits", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits: expected [rows, vocab] with a vocab of 1 to {_MAX_VOCAB}, got {list(logits.shape)}")
    _checks.check_last_stride("logits", logits)
    for name, x, dtype in (
        ("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32), ("top_p", top_p, torch.float32),
        ("seeds", seeds, torch.int64), ("steps", steps, torch.int64),
    ):  # fmt: skip
        _checks.check_shape(name, x, (logits.shape[0],), "one per row of logits")
        _checks.check_dtype(name, x, dtype, "per row")
        _checks.check_device(name, x, logits, "logits")
        _checks.check_last_stride(name, x)


def _sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    _check(logits, temperature, top_k, top_p, seeds, steps)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        num_runs = cdiv(vocab, _RUN)
        block_runs = next_power_of_2(num_runs)
        values = torch.empty((rows, 2, num_runs), dtype=torch.float32, device=logits.device)
        ids = torch.empty((rows, num_runs), dtype=torch.int32, device=logits.device)
        _runs_kernel[(rows, cdiv(num_runs, min(_RUNS, block_runs)))](
            logits, temperature, top_k, top_p, seeds, steps, values, ids, logits.stride(0), vocab, num_runs,
            RUNS=min(_RUNS, block_runs), RUN=_RUN, num_warps=4,
        )  # fmt: skip
        _finish_kernel[(rows,)](
            logits, temperature, top_k, top_p, seeds, steps, values, ids, tokens, logits.stride(0), vocab, num_runs, _SLACK,
            SHIFT=_SHIFT[logits.dtype], BLOCK_RUNS=block_runs,
            TILE_RUNS=min(_TILE_RUNS, block_runs), DRAW_RUNS=min(_TILE_RUNS // 2, block_runs), RUN=_RUN, num_warps=16,
        )  # fmt: skip
    return tokens


def _sample_on_cpu(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """The oracle for the rows that draw; greedy rows need neither its sort nor its noise, which cost more than a small model's step."""
    tokens = torch.where(logits.isnan(), -float("inf"), logits).argmax(-1)  # the first of equals
    rows = (temperature > 0).nonzero()[:, 0]
    if len(rows):
        tokens[rows] = sample_ref(logits[rows], temperature[rows], top_k[rows], top_p[rows], seeds[rows], steps[rows])
    return tokens


_sample_op = define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seeds, Tensor steps) -> Tensor",
    kernel=_sample,
    reference=_checks.checked(_check, _sample_on_cpu),
    fake=lambda logits, *args: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """One token per row, drawn by that row's own rules and numbers; safe in a CUDA graph, which draws anew with every step.

    logits: [rows, vocab] fp16, bf16 or fp32, any row stride, last stride 1; a padded vocabulary is passed as ``logits[:, :vocab]``.
    temperature: [rows] fp32; ≤ 0 is greedy (lowest id among equals). top_k: [rows] int32; ≤ 0 or ≥ vocab is off.
    top_p: [rows] fp32; ≥ 1 is off; applied to what top_k left, renormalised. seeds, steps: [rows] int64; equal pairs draw equally.
    Returns [rows] int64. NaN logits count as −∞; a row with nothing above −∞ gives 0. The module's docstring has all rules.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _sample_op(logits, temperature, top_k, top_p, seeds, steps)
