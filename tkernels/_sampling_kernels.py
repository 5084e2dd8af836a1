"""Keys of logits, and the first kernel of ``tkernels.sample``; what it does, and why so, is said there."""

from __future__ import annotations

from tkernels._dependent import wait
from tkernels._rng import log_exponential
from tkernels._triton import tl, triton


def tiles_for(tiles: int, num_sms: int) -> int:
    """How many tiles a program reads, the next one while it works on one: a few where there are enough programs besides."""
    return 4 if tiles >= 32 * num_sms else 1


@triton.jit
def logits_of(x):
    """Logits in fp32: NaN is −∞, and −0 is +0 so that equals have equal bits."""
    x = x.to(tl.float32)
    return tl.where(x == 0.0, 0.0, tl.where(x == x, x, -float("inf")))


@triton.jit
def load_raw(logits_row, columns, vocab):
    return tl.load(logits_row + columns, mask=columns < vocab, other=-float("inf"))


@triton.jit
def load_logits(ptrs, mask):
    return logits_of(tl.load(ptrs, mask=mask, other=-float("inf")))


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
def scaled(x, top, temperature):
    """(x − top) / temperature: log-probability up to a constant; 0 at the top also where that is infinite."""
    return tl.where(x == top, 0.0, (x - top) / temperature)


@triton.jit
def load_temperature(temperature_ptr, row):
    """The temperature of a row, finite where it is positive: a logit that is infinitely far below the top stays there."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == float("inf"), 3.4028234663852886e38, temperature)


# What is kept of each run, in planes of [runs], for each row: values (fp32) and ids (int32).
PLANES_VALUES, PLANES_IDS = tl.constexpr(3), tl.constexpr(6)

# Scalars, one a row: nothing is gained from knowing that a caller's slice of them starts at a multiple of 16 bytes.
PER_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "steps_ptr"]


@triton.jit
def load_min_p(min_p_ptr, row):
    """min_p of a row, 0 (off) where there is none."""
    if min_p_ptr is None:
        return tl.zeros((), tl.float32)
    else:
        return tl.load(min_p_ptr + row)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def runs_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr,
    stride_row, vocab, num_runs, TILES: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per run of RUN columns: its maximum; the id of its candidate; and, for random rows, the candidate's score or, for filtered
    ones, the run's sum of probabilities, both relative to the run's maximum. Planes of values: maxima, then the others."""
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * TILES * RUNS + tl.arange(0, RUNS)
    offs = tl.arange(0, RUN)
    logits_row = logits_ptr + row * stride_row
    wait(PDL)
    raw = load_raw(logits_row, runs[:, None] * RUN + offs[None, :], vocab)
    temperature = load_temperature(temperature_ptr, row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (load_min_p(min_p_ptr, row) > 0)
    for i in range(TILES):
        columns = runs[:, None] * RUN + offs[None, :]
        mask_runs = runs < num_runs
        values = values_ptr + row * PLANES_VALUES * num_runs + runs
        ids = ids_ptr + row * PLANES_IDS * num_runs + runs
        x = logits_of(raw)
        runs += RUNS
        # on its way while this tile is worked on
        raw = load_raw(logits_row, runs[:, None] * RUN + offs[None, :], tl.where(i + 1 < TILES, vocab, 0))
        top = tl.max(x, 1)
        tl.store(values, top, mask=mask_runs)
        if temperature > 0:
            z = scaled(x, top[:, None], temperature)
            if is_filtered:
                tl.store(values + num_runs, tl.sum(tl.where(x > -float("inf"), tl.exp(z), 0.0), 1), mask=mask_runs)
            else:
                score = z - log_exponential(tl.load(seeds_ptr + row), tl.load(steps_ptr + row), (runs - RUNS) * RUN, RUN)
                score = tl.where(x > -float("inf"), score, -float("inf"))  # columns past the vocabulary, too
                best = tl.max(score, 1)
                tl.store(values + num_runs, best, mask=mask_runs)
                tl.store(ids, tl.min(tl.where(score == best[:, None], columns, vocab), 1), mask=mask_runs)
        else:
            tl.store(ids, tl.min(tl.where(x == top[:, None], columns, vocab), 1), mask=mask_runs)
