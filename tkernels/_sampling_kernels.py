"""The kernels of ``tkernels.sample``; what they do, and why so, is said there."""

from __future__ import annotations

from tkernels._rng import log_exponential
from tkernels._triton import tl, triton


@triton.jit
def load_logits(ptrs, mask):
    """Logits in fp32: NaN is −∞, and −0 is +0 so that equals have equal bits."""
    x = tl.load(ptrs, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, tl.where(x == x, x, -float("inf")))


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """int32 that orders as the float x does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float of a key."""
    bits = key << SHIFT
    bits = tl.where(key < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """(low + high) // 2 without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def scaled(x, top, temperature):
    """(x − top) / temperature: log-probability up to a constant; 0 at the top also where that is infinite."""
    return tl.where(x == top, 0.0, (x - top) / temperature)


@triton.jit
def _load_temperature(temperature_ptr, row):
    """The temperature of a row, finite where it is positive: a logit that is infinitely far below the top stays there."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == float("inf"), 3.4028234663852886e38, temperature)


# Scalars, one a row: nothing is gained from knowing that a caller's slice of them starts at a multiple of 16 bytes.
PER_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "steps_ptr"]


@triton.jit
def _load_min_p(min_p_ptr, row):
    """min_p of a row, 0 (off) where there is none."""
    if min_p_ptr is None:
        return tl.zeros((), tl.float32)
    else:
        return tl.load(min_p_ptr + row)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def runs_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr,
    stride_row, vocab, num_runs, RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Per run of RUN columns: its maximum; the id of its candidate; and, for random rows, the candidate's score or, for filtered
    ones, the run's sum of probabilities, both relative to the run's maximum. values is [rows, 2, runs]: maxima, then the others."""
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    columns = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
    mask = columns < vocab
    temperature = _load_temperature(temperature_ptr, row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    x = load_logits(logits_ptr + row * stride_row + columns, mask)
    top = tl.max(x, 1)
    out = row * num_runs + runs
    values = values_ptr + row * 2 * num_runs + runs
    mask_runs = runs < num_runs
    tl.store(values, top, mask=mask_runs)
    if temperature > 0:
        z = scaled(x, top[:, None], temperature)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (_load_min_p(min_p_ptr, row) > 0):
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
    x = load_logits(logits_row + columns, mask)
    return x, key_of(x, SHIFT), columns, mask


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
        mass += tl.where(kept & (x > -float("inf")), tl.exp(scaled(x, top, temperature)), 0.0)
        tile += TILE_RUNS
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(mass, 1), 0)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr, tokens_ptr,
    stride_row, vocab, num_runs, slack,
    SHIFT: tl.constexpr, BLOCK_RUNS: tl.constexpr, TILE_RUNS: tl.constexpr, DRAW_RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program: one row. Combines the runs of greedy and unfiltered rows; filters and draws the others."""
    row = tl.program_id(0).to(tl.int64)
    temperature = _load_temperature(temperature_ptr, row)
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
    min_p = _load_min_p(min_p_ptr, row)
    if top == -float("inf"):
        tl.store(tokens_ptr + row, tl.zeros((), tl.int64))
    elif is_random & (use_k | use_p | (min_p > 0)):
        relative = scaled(tops, top, temperature)
        live = mask_runs & (tops > -float("inf"))
        keys = key_of(tops, SHIFT)
        highest = key_of(top, SHIFT)
        lowest = key_of(tl.full((), -float("inf"), tl.float32), SHIFT)
        # What min_p asks of a token, as the draw computes it.
        floor = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, tl.minimum(min_p, 1.0), 1.0)) - slack, -float("inf"))
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
        elif use_p:
            maxima_mass = tl.where(live, tl.exp(relative), 0.0)
            mass = tl.where(live, tl.load(values + num_runs, mask=mask_runs, other=0.0) * tl.exp(relative), 0.0)
            goal = top_p * (1.0 - slack) * tl.sum(mass, 0)
            while low + 1 < high:
                middle = _middle(low, high)
                # a little more than the goal: this sum and the one below are rounded differently
                enough = tl.sum(tl.where(keys >= middle, maxima_mass, 0.0), 0) >= goal * 1.00001
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        bound = low

        # 2. The runs that reach it, in order; the list takes the place of the ids, which filtered rows do not use. min_p may shorten
        # it only where no sum of top_k and top_p needs the other tokens.
        listed = mask_runs & (keys >= bound) & (use_k | use_p | (relative >= floor))
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
            each = tl.exp(scaled(value_of(low, SHIFT), top, temperature))
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
            each = tl.exp(scaled(value_of(low, SHIFT), top, temperature))
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
            z = scaled(x, top, temperature)
            score = tl.where(kept & (z >= floor), z - log_exponential(seed, step, columns), -float("inf"))
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
            score = tl.load(values + num_runs, mask=mask_runs, other=-float("inf")) + scaled(tops, top, temperature)
            score = tl.where(tops > -float("inf"), score, -float("inf"))
        else:
            score = tops
        token = tl.min(tl.where(score == tl.max(score, 0), ids, vocab), 0)
        tl.store(tokens_ptr + row, token.to(tl.int64))
