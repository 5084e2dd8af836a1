"""The second kernel of ``tkernels.sample``: finishes greedy and unfiltered rows, and takes the others through ``_sampling_stages``.

A row with a long list shares its stages between a team of programs: its leader and helpers. Nothing waits for a program that might not
be running: units of work go to whoever takes the next ticket; who holds a ticket of a later stage waits for those who hold tickets of
this one, and they run. A helper that nobody has called for a while leaves. The last to leave clears the counters for the next launch.
"""

from __future__ import annotations

from tkernels._dependent import wait
from tkernels._sampling_kernels import PER_ROW, PLANES_IDS, PLANES_VALUES, key_of, load_min_p, load_temperature, scaled
from tkernels._sampling_stages import NOTES, begin, fold, work
from tkernels._triton import tl, triton

# A row's counters: the stage that is published (from 1 on), tickets given out, units done, programs gone.
_STAGE, _TICKETS, _DONE, _GONE = (tl.constexpr(i) for i in range(4))
WORDS = tl.constexpr(8)
_FINISHED = tl.constexpr(1 << 30)
_PATIENCE = tl.constexpr(200)  # looks at the stage, half a microsecond each


@triton.jit(do_not_specialize=["rows", "team"], do_not_specialize_on_alignment=PER_ROW)
def finish_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, steps_ptr, values_ptr, ids_ptr, notes_ptr, words_ptr,
    tokens_ptr, stride_row, rows, vocab, num_runs, team, slack,
    SHIFT: tl.constexpr, BLOCK_RUNS: tl.constexpr, TILE_RUNS: tl.constexpr, ALONE_RUNS: tl.constexpr, RUN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """team programs a row, the first ``rows`` of them the leaders; words_ptr: [rows, WORDS] zeros, None where a team is one program."""
    row = (tl.program_id(0) % rows).to(tl.int64)
    is_leader = tl.program_id(0) < rows
    wait(PDL)
    temperature = load_temperature(temperature_ptr, row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = load_min_p(min_p_ptr, row)
    use_k = (top_k > 0) & (top_k < vocab)
    use_p = top_p < 1.0
    is_random = temperature > 0
    is_filtered = is_random & (use_k | use_p | (min_p > 0))
    if is_leader | is_filtered:
        runs = tl.arange(0, BLOCK_RUNS)
        mask_runs = runs < num_runs
        values = values_ptr + row * PLANES_VALUES * num_runs
        ids = ids_ptr + row * PLANES_IDS * num_runs
        tops = tl.load(values + runs, mask=mask_runs, other=-float("inf"))
        top = tl.max(tops, 0)
        if top == -float("inf"):
            if is_leader:
                tl.store(tokens_ptr + row, tl.zeros((), tl.int64))
        elif is_filtered:
            notes = notes_ptr + row * NOTES
            logits_row = logits_ptr + row * stride_row
            live = tops > -float("inf")
            keys = key_of(tops, SHIFT)
            # What min_p asks of a token.
            floor = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, tl.minimum(min_p, 1.0), 1.0)) - slack, -float("inf"))
            is_shared = 0
            works = 1
            if is_leader:
                num_listed = begin(
                    values, ids, notes, runs, live, tops, keys, num_runs, top, temperature, floor, use_k, use_p, top_k, top_p, slack,
                    SHIFT,
                )  # fmt: skip
                if words_ptr is not None:
                    is_shared = (num_listed > ALONE_RUNS).to(tl.int32)
                    tl.debug_barrier()  # all threads have stored before one of them releases
                    tl.atomic_xchg(words_ptr + row * WORDS + _STAGE, tl.where(is_shared > 0, 1, _FINISHED), sem="release", scope="gpu")
            elif words_ptr is not None:
                stage, looks = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
                while (stage == 0) & (looks < _PATIENCE):
                    stage = tl.atomic_add(words_ptr + row * WORDS + _STAGE, 0, sem="acquire", scope="gpu")
                    looks += 1
                works = ((stage > 0) & (stage < _FINISHED)).to(tl.int32)
                is_shared = works
            seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
            while works > 0:
                unit, units, stage = 0, 1, 0
                if words_ptr is not None:
                    if is_shared > 0:
                        words = words_ptr + row * WORDS
                        ticket = tl.atomic_add(words + _TICKETS, 1, sem="relaxed", scope="gpu")
                        unit, units, stage = ticket % team, team, ticket // team + 1
                        published = tl.atomic_add(words + _STAGE, 0, sem="acquire", scope="gpu")
                        while published < stage:
                            published = tl.atomic_add(words + _STAGE, 0, sem="acquire", scope="gpu")
                        works = (published < _FINISHED).to(tl.int32)
                if works > 0:
                    tl.debug_barrier()  # what this program noted and listed is read by other threads than wrote it
                    work(
                        logits_row, values, ids, notes, unit, units, vocab, num_runs, top, temperature, floor, seed, step,
                        SHIFT, TILE_RUNS, RUN,
                    )  # fmt: skip
                    tl.debug_barrier()  # all threads have stored before one of them releases
                    is_last = 1
                    if words_ptr is not None:
                        if is_shared > 0:
                            done = tl.atomic_add(words_ptr + row * WORDS + _DONE, 1, sem="acq_rel", scope="gpu")
                            is_last = (done == stage * team - 1).to(tl.int32)
                            tl.debug_barrier()  # no thread reads before the one that acquires
                    if is_last > 0:
                        finished = fold(
                            logits_row, values, ids, notes, tokens_ptr + row, runs, live, keys, vocab, num_runs, top, temperature,
                            use_k, use_p, top_k, top_p, slack, SHIFT, BLOCK_RUNS, RUN,
                        )  # fmt: skip
                        works = 1 - finished
                        if words_ptr is not None:
                            if is_shared > 0:
                                tl.debug_barrier()
                                next_stage = tl.where(finished > 0, _FINISHED, stage + 1)
                                tl.atomic_xchg(words_ptr + row * WORDS + _STAGE, next_stage, sem="release", scope="gpu")
            if words_ptr is not None:
                gone = tl.atomic_add(words_ptr + row * WORDS + _GONE, 1, sem="acq_rel", scope="gpu")
                if gone == team - 1:
                    tl.store(words_ptr + row * WORDS + tl.arange(0, 4), tl.zeros((4,), tl.int32))
        else:
            candidates = tl.load(ids + runs, mask=mask_runs, other=vocab)
            if is_random:
                score = tl.load(values + num_runs + runs, mask=mask_runs, other=-float("inf")) + scaled(tops, top, temperature)
                score = tl.where(tops > -float("inf"), score, -float("inf"))
            else:
                score = tops
            token = tl.min(tl.where(score == tl.max(score, 0), candidates, vocab), 0)
            tl.store(tokens_ptr + row, token.to(tl.int64))
