"""What a step is made of: whether running requests decode in it, and how many prompt tokens join. Pure Python.

The scheduler asks once a step that has prompts to work on; a step without prompts is all decode. Policies keep no clock and look
at nothing but their arguments, so every rank of a tensor-parallel run composes the same steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from runtime.costs import INF, StepCosts

_MARGIN = 0.95  # a smaller chunk must be this much cheaper per token: measured costs are noisy, and every chunk costs a step
_SMOOTH = 1.05  # with a target for the time between tokens: what prompts that are in no hurry may cost more for shorter steps
# Of the target that a predicted round may take, without and in a hurry; the rest is for prediction errors. With 0.6 in a hurry the p99 was
# 29 ms of 50, and at four times the rate of the conversation trace 60% of the requests were good, not 73%.
_ITL_SHARES = (0.5, 0.68)
_TTFT_SHARE = 0.3  # of the target, from which on prompts are in a hurry


_SHARES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # a chunk is one of so many that make up all prompt tokens that may join


class Load(NamedTuple):
    """What there is to compose a step from.

    decodes: running requests that need one token; context: tokens of theirs in the cache. prompt_tokens: those that may join, at
    least 1; prompt_context: tokens of the first prompt that were run before. backlog: prompt tokens in all; oldest_ms: how long
    the first prompt has waited by the predicted clock. skipped: the last step left the decodes out.
    """

    decodes: int
    context: int
    prompt_tokens: int
    prompt_context: int = 0
    backlog: int = 0
    oldest_ms: float = 0.0
    skipped: bool = False


class Composition(NamedTuple):
    """A step: decode or not, and prompt tokens that join."""

    decode: bool
    prompt_tokens: int


def fill_budget(load: Load) -> Composition:
    """``policy = "static"``: decode, and as many prompt tokens as fit."""
    return Composition(True, load.prompt_tokens)


class _Chunk(NamedTuple):
    """A number of prompt tokens that a round may have, and what the table says of it, context left out: beside the decodes, alone, and of
    the step with the rest of all prompt tokens after so many such rounds."""

    tokens: int
    joined_ms: float
    alone_ms: float
    rounds: int
    rest: int
    rest_ms: float


class CheapestPerToken:
    """``policy = "cost"``: the step that costs least per token, within the targets.

    A candidate is a *round*: one token for every decoding request and some prompt tokens, as one step or as two, whichever takes
    less time. So decode stays in its full graph where a chunk beside it costs more than a chunk alone. Chunks end on captured
    sizes, where a step has no padding, unless all prompt tokens are cheaper per token together.

    Without itl_ms the cheapest round per token is taken. itl_ms bounds a round: of those within it, the shortest with which the
    prompts that may join take little longer than with the best. When prompts are in a hurry (ttft_ms: their queue and their age
    have used up a share of it), no longer. Every round has prompt tokens, also where decode alone misses the target, so prompts
    always go on; and no two steps in a row leave the decodes out.
    """

    def __init__(self, table: StepCosts, *, ttft_ms: float = 0.0, itl_ms: float = 0.0) -> None:
        self.table, self.ttft_ms, self.itl_ms = table, ttft_ms, itl_ms
        self._known: dict[tuple[int, int, int, int, bool], tuple[int, bool]] = {}
        self._chunks: dict[tuple[int, int], tuple[_Chunk, ...]] = {}

    def __call__(self, load: Load) -> Composition:
        key = (load.decodes, load.prompt_tokens, load.context >> 10, load.prompt_context >> 9, self._hurry(load))
        chosen = self._known.get(key)
        if chosen is None:
            if len(self._known) >= 1 << 14:
                self._known.clear()
            chosen = self._known[key] = self._choose(load, key[-1])
        tokens, together = chosen
        if together or not load.decodes:
            return Composition(True, tokens)
        return Composition(True, 0) if load.skipped else Composition(False, tokens)

    def _hurry(self, load: Load) -> bool:
        if not self.itl_ms or not load.decodes:
            return True
        if not self.ttft_ms:
            return load.backlog > 4 * load.prompt_tokens
        sizes = self.table.sizes or self.table.measured
        per_token = self.table.ms(sizes[-1], True) / sizes[-1] if sizes else 0.0
        return load.oldest_ms + load.backlog * per_token > _TTFT_SHARE * self.ttft_ms

    def _choose(self, load: Load, hurry: bool) -> tuple[int, bool]:
        """(prompt tokens of the round, whether decode joins them)"""
        table, decodes, most = self.table, load.decodes, load.prompt_tokens
        reading = table.kv_ms * load.context
        decode_ms = table.ms(decodes, False) + reading if decodes else 0.0
        bounded = decodes > 0 and self.itl_ms > 0
        limit = max(_ITL_SHARES[hurry] * self.itl_ms, decode_ms + self.itl_ms / 4) if bounded else INF  # prompts always go on
        rounds: list[tuple[float, float, int, bool]] = []  # cost, ms, prompt tokens, together
        shortest = (INF, 0, True)
        best = INF
        pair_ms, prompt_context = table.pair_ms, load.prompt_context
        for tokens, joined_ms, alone_ms, count, rest, rest_ms in self._candidates(decodes, most):
            attention = pair_ms * tokens * (prompt_context + tokens / 2)
            joined = joined_ms + reading + attention
            apart = alone_ms + attention + decode_ms if decodes else INF
            ms, together = (joined, True) if joined <= apart else (apart, False)
            if ms > limit:
                shortest = min(shortest, (ms, tokens, together))
                continue
            # Within a bound what counts is when all these prompts have run: a rest costs a whole step of its own.
            cost = ms * count + (rest_ms + reading if rest else 0.0) if bounded else ms / (decodes + tokens)
            rounds.append((cost, ms, tokens, together))
            if cost < best:
                best = cost
            if cost > 1.5 * best:
                break  # candidates become shorter, and shorter ones dearer
        if not rounds:  # of steps without a known cost none is within a target: all of them, as without one
            return shortest[1:] if shortest[0] < INF else (most, True)
        if bounded:
            enough = best if hurry else _SMOOTH * best
            chosen = min((each for each in rounds if each[0] <= enough), key=lambda each: each[1])
        else:
            longest = max(rounds, key=lambda each: each[2])
            chosen = min(rounds, key=lambda each: (each[0], -each[2]))
            if not chosen[0] < _MARGIN * longest[0]:
                chosen = longest
        return chosen[2], chosen[3]

    def _candidates(self, decodes: int, most: int) -> tuple[_Chunk, ...]:
        """The chunks worth a look, long ones first. They are the same at every context, and asked for at many."""
        known = self._chunks.get((decodes, most))
        if known is None:
            if len(self._chunks) >= 1 << 12:
                self._chunks.clear()
            ms, made = self.table.ms, []
            for tokens in dict.fromkeys(self._lengths(decodes, most)):
                count, rest = divmod(most, tokens)
                made.append(
                    _Chunk(tokens, ms(decodes + tokens, True), ms(tokens, True), count, rest, ms(decodes + rest, True) if rest else 0.0)
                )
            known = self._chunks[decodes, most] = tuple(made)
        return known

    def _lengths(self, decodes: int, most: int) -> Iterator[int]:
        """Chunk lengths worth a look, long ones first: all, and shares of all that end on a captured size, with decodes or without."""
        table = self.table
        sizes = table.sizes or table.measured
        yield most
        for share in _SHARES:
            length = -(-most // share)
            if table.sizes and share > 1 and length + decodes > table.sizes[-1]:
                yield length
            for beside in (0, decodes) if decodes else (0,):
                index = bisect_left(sizes, length + beside)
                if index < len(sizes) and 0 < sizes[index] - beside < most:
                    yield sizes[index] - beside
                elif index and 0 < sizes[index - 1] - beside < most:  # none is so large, or the next one is too large for all
                    yield sizes[index - 1] - beside
