"""The stages by which the second kernel of ``tkernels.sample`` races and filters a row; who does them is told in ``_sampling_finish``.

Each stage maps a list of runs, every run on its own, to a few numbers per run (``work``), and ends by one program folding these in the
order of the runs, which decides the next stage (``fold``). So neither the number of programs at work nor who does what can be seen in a
result.

    RACE    who wins in each run among the tokens before the limit; the fold takes the winner of all as the candidate
    MASS    how much probability, and how many tokens, are before the candidate: it is kept, and drawn, or it is the new limit
    SEARCH  how many tokens reach each of 16 keys; the fold goes on between two of them until it has the k-th largest
    GOAL    the probability of the k largest, of which top_p wants its part

"Before" is the order of the rules: the larger logit, then the lower id. The winner of a race among many is the winner among the kept
ones if it is kept itself, so no threshold is searched for top_k or top_p alone. A candidate fails with the probability of what is not kept,
and everything behind it goes with it: the number of races is 1 and some ln(probability of the raced / of the kept). A run whose winner is
before the new limit keeps it, so a second race is short.
"""

from __future__ import annotations

from tkernels._rng import log_exponential
from tkernels._sampling_kernels import key_of, load_logits, scaled, value_of
from tkernels._triton import tl, triton

_SEARCH, _GOAL, _RACE, _MASS = (tl.constexpr(i) for i in range(4))
# A row's note to whoever works on it, int32 (floats by their bits). KEY, ID: of the limit or the candidate; while searching, the width.
_KIND, _KEY, _ID, _LISTED, _GOAL_BITS, _BOUND, _HIGH = (tl.constexpr(i) for i in range(7))
NOTES = tl.constexpr(8)
# Planes of values: kernel 1's maxima; scores of the winners, where kernel 1 left sums; masses. Of ids: the list, where kernel 1 left
# candidates; winners; then four for counts, of which the second has the winners' keys once there is no more to search.
_SCORES, _MASSES = tl.constexpr(1), tl.constexpr(2)
_WINNERS, _COUNTS, _KEYS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_FOLD = tl.constexpr(1024)  # runs whose 16 counts are folded at once: 32 registers


@triton.jit
def _middle(low, high):
    """(low + high) // 2 without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _note(notes, kind, key, token, num_listed):
    tl.store(notes + _KIND, kind)
    tl.store(notes + _KEY, key)
    tl.store(notes + _ID, token)
    tl.store(notes + _LISTED, num_listed)


@triton.jit
def _read(notes, FIELD: tl.constexpr):
    return tl.load(notes + FIELD, cache_modifier=".cg")  # past L1, which another multiprocessor's stores do not reach


@triton.jit
def _list(list_row, wanted, runs):
    """Write the wanted runs in order; how many they are."""
    tl.store(list_row + tl.cumsum(wanted.to(tl.int32), 0) - 1, runs, mask=wanted)
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _holds_before(keys, runs, key, token, RUN: tl.constexpr):
    """Whether a run whose maximum has this key can hold a token before (key, token)."""
    return (keys > key) | ((keys == key) & (runs * RUN < token))


@triton.jit
def work(
    logits_row, values, ids, notes, unit, units, vocab, num_runs, top, temperature, floor, seed, step,
    SHIFT: tl.constexpr, TILE_RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One unit of a stage: every units-th tile of the list."""
    kind, key, token, num_listed = _read(notes, _KIND), _read(notes, _KEY), _read(notes, _ID), _read(notes, _LISTED)
    first = unit * TILE_RUNS
    while first < num_listed:
        entries = first + tl.arange(0, TILE_RUNS)
        exist = entries < num_listed
        runs = tl.load(ids + entries, mask=exist, other=0, cache_modifier=".cg")
        columns = runs[:, None] * RUN + tl.arange(0, RUN)[None, :]
        mask = exist[:, None] & (columns < vocab)
        x = load_logits(logits_row + columns, mask)
        keys = key_of(x, SHIFT)
        if kind == _SEARCH:  # token: the width. Four counts of at most 128 to a word.
            for word in tl.static_range(4):
                packed = tl.zeros_like(keys)
                for i in tl.static_range(4):
                    least = tl.minimum(key.to(tl.int64) + token.to(tl.int64) * (word * 4 + i + 1), 2147483647).to(tl.int32)
                    packed += tl.where(mask & (keys >= least), 1, 0) << (8 * i)
                tl.store(ids + (_COUNTS + word) * num_runs + runs, tl.sum(packed, 1), mask=exist)
        else:
            z = scaled(x, top, temperature)
            before = mask & (x > -float("inf")) & ((keys > key) | ((keys == key) & (columns < token)))
            if kind == _RACE:
                score = tl.where(before & (z >= floor), z - log_exponential(seed, step, runs * RUN, RUN), -float("inf"))
                best = tl.max(score, 1)
                winner = tl.min(tl.where(score == best[:, None], columns, vocab), 1)
                tl.store(values + _SCORES * num_runs + runs, best, mask=exist)
                tl.store(ids + _WINNERS * num_runs + runs, winner, mask=exist)
                tl.store(ids + _KEYS * num_runs + runs, tl.max(tl.where(columns == winner[:, None], keys, -2147483647), 1), mask=exist)
            else:
                above = before & (keys > key)
                count = tl.where(above, 1, tl.where(before, 1 << 16, 0))
                tl.store(values + _MASSES * num_runs + runs, tl.sum(tl.where(above, tl.exp(z), 0.0), 1), mask=exist)
                tl.store(ids + _COUNTS * num_runs + runs, tl.sum(count, 1), mask=exist)
        first += units * TILE_RUNS


@triton.jit
def _count_of_each(ids, tops, num_runs, bound, SHIFT: tl.constexpr, BLOCK_RUNS: tl.constexpr):
    """[16]: how many tokens reach each key of a search."""
    i = tl.arange(0, 16)
    counts = tl.zeros((16,), tl.int32)
    SIZE: tl.constexpr = BLOCK_RUNS if BLOCK_RUNS < _FOLD else _FOLD
    first = 0
    while first < num_runs:
        runs = first + tl.arange(0, SIZE)
        top = tl.load(tops + runs, mask=runs < num_runs, other=-float("inf"))
        live = (top > -float("inf")) & (key_of(top, SHIFT) >= bound)
        words = tl.load(ids + (_COUNTS + i[:, None] // 4) * num_runs + runs[None, :], mask=live[None, :], other=0, cache_modifier=".cg")
        counts += tl.sum((words >> (8 * (i % 4))[:, None]) & 255, 1)
        first += SIZE
    return counts


@triton.jit
def fold(
    logits_row, values, ids, notes, token_ptr, runs, live, keys, vocab, num_runs, top, temperature, use_k, use_p, top_k, top_p, slack,
    SHIFT: tl.constexpr, BLOCK_RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Ends a stage: notes the next one and returns 0, or stores the token and returns 1. live, keys: of the runs' maxima."""
    kind, key, token = _read(notes, _KIND), _read(notes, _KEY), _read(notes, _ID)
    bound, high, goal = _read(notes, _BOUND), _read(notes, _HIGH), _read(notes, _GOAL_BITS).to(tl.float32, bitcast=True)
    tl.debug_barrier()  # all threads have read what some now overwrite
    finished = 0
    if kind == _RACE:
        score = tl.load(values + _SCORES * num_runs + runs, mask=live, other=-float("inf"), cache_modifier=".cg")
        winners = tl.load(ids + _WINNERS * num_runs + runs, mask=live, other=vocab, cache_modifier=".cg")
        winner = tl.min(tl.where(score == tl.max(score, 0), winners, vocab), 0)
        if use_k | use_p:
            x = load_logits(logits_row + winner, winner < vocab)
            key = key_of(x, SHIFT)
            _note(notes, _MASS, key, winner, _list(ids, live & _holds_before(keys, runs, key, winner, RUN), runs))
        else:
            tl.store(token_ptr, winner.to(tl.int64))
            finished = 1
    elif kind == _SEARCH:
        reach = _count_of_each(ids, values, num_runs, bound, SHIFT, BLOCK_RUNS)
        reached = tl.sum((reach >= top_k).to(tl.int32), 0)
        is_whole = tl.sum((reach == top_k).to(tl.int32), 0) > 0  # then the last that is reached has exactly k: no ties to cut
        low = key + reached * token
        high = tl.minimum(low.to(tl.int64) + token, high.to(tl.int64)).to(tl.int32)
        if is_whole | (low.to(tl.int64) + 1 >= high):
            key = tl.where(is_whole, low - 1, low)
            tl.store(notes + _BOUND, low)
            _note(notes, _GOAL, key, 0, _list(ids, live & (keys > key), runs))
        else:
            tl.store(notes + _KEY, low)
            tl.store(notes + _ID, _width(low, high))
            tl.store(notes + _HIGH, high)
    else:
        inside = live & _holds_before(keys, runs, key, token, RUN)
        mass = tl.sum(tl.load(values + _MASSES * num_runs + runs, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        counts = tl.load(ids + _COUNTS * num_runs + runs, mask=inside, other=0, cache_modifier=".cg")
        above, ties = tl.sum(counts & 0xFFFF, 0), tl.sum(counts >> 16, 0)
        each = tl.exp(scaled(value_of(key, SHIFT), top, temperature))
        if kind == _GOAL:
            tl.store(notes + _GOAL_BITS, _bits(top_p * (1.0 - slack) * (mass + (top_k - above) * each)))
            _note(notes, _RACE, bound - 1, 0, _list(ids, live & (keys >= bound), runs))
        else:
            before = above + ties
            if (before == 0) | (((use_p == 0) | (mass + ties * each < goal)) & ((use_k == 0) | (before < top_k))):
                tl.store(token_ptr, token.to(tl.int64))
                finished = 1
            else:
                # Only where the winner is not before the new limit, and a token is.
                score = tl.load(values + _SCORES * num_runs + runs, mask=live, other=-float("inf"), cache_modifier=".cg")
                winners = tl.load(ids + _WINNERS * num_runs + runs, mask=inside, other=0, cache_modifier=".cg")
                won = tl.load(ids + _KEYS * num_runs + runs, mask=inside, other=0, cache_modifier=".cg")
                stays = (won > key) | ((won == key) & (winners < token))
                _note(notes, _RACE, key, token, _list(ids, inside & (score > -float("inf")) & (stays == 0), runs))
                tl.store(values + _SCORES * num_runs + runs, -float("inf"), mask=live & ((inside & stays) == 0))
    return finished


@triton.jit
def _width(low, high):
    """Between the 16 keys of a search in [low, high): at most 2**28."""
    return ((high.to(tl.int64) - low + 15) // 16).to(tl.int32)


@triton.jit
def begin(
    values, ids, notes, runs, live, tops, keys, num_runs, top, temperature, floor, use_k, use_p, top_k, top_p, slack,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The first stage, over the runs that can hold a kept token; how many they are. Known from the runs' maxima and sums alone."""
    relative = scaled(tops, top, temperature)
    lowest = key_of(tl.full((), -float("inf"), tl.float32), SHIFT)
    # A key that all tokens needed below reach: k maxima are that high or, without top_k, such maxima alone reach top_p.
    low, high = lowest, key_of(top, SHIFT) + 1
    needed = num_runs  # of the runs whose maximum has the key low: only the first can be needed
    goal = 0.0
    if use_k:
        count_low = tl.where(top_k > num_runs, top_k, num_runs * 2 + top_k * 2)  # more runs than there are: no search
        count_high = 0
        while (low + 1 < high) & (count_low > top_k + (top_k >> 1)):  # some runs too many cost less than the rest of the search
            middle = _middle(low, high)
            count = tl.sum((live & (keys >= middle)).to(tl.int32), 0)
            enough = count >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            count_low, count_high = tl.where(enough, count, count_low), tl.where(enough, count_high, count)
        # a search counts over all runs of that key
        needed = tl.where((low > lowest) & (low + 1 == high) & (use_p == 0), top_k - count_high, num_runs)
    elif use_p:
        maxima_mass = tl.where(live, tl.exp(relative), 0.0)
        mass = tl.where(live, tl.load(values + _SCORES * num_runs + runs, mask=live, other=0.0) * tl.exp(relative), 0.0)
        goal = top_p * (1.0 - slack) * tl.sum(mass, 0)
        while low + 1 < high:
            middle = _middle(low, high)
            # a little more than the goal: this sum and the one of the MASS stage are rounded differently
            enough = tl.sum(tl.where(keys >= middle, maxima_mass, 0.0), 0) >= goal * 1.00001
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    # min_p may shorten the list only where no sum of top_k and top_p needs the other tokens.
    listed = live & (keys >= low) & (use_k | use_p | (relative >= floor))
    tied = (listed & (keys == low)).to(tl.int32)
    listed &= (tied == 0) | (tl.cumsum(tied, 0) <= needed)
    tl.store(values + _SCORES * num_runs + runs, -float("inf"), mask=live)  # nobody has won yet
    num_listed = _list(ids, listed, runs)
    tl.store(notes + _GOAL_BITS, _bits(goal))
    tl.store(notes + _BOUND, low)
    if use_k & use_p:
        high = key_of(top, SHIFT) + 1
        tl.store(notes + _HIGH, high)
        _note(notes, _SEARCH, low, _width(low, high), num_listed)
    else:
        _note(notes, _RACE, low - 1, 0, num_listed)
    return num_listed
