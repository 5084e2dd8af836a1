"""Which tokens of which requests run in the next step. Pure Python, deterministic, no torch.

First come, first served; with a target for the time to the first token, shorter prompts may overtake one that has used up less
than half of it. Running requests that need one token come first (decode), then prompts in chunks, within ``max_batch_tokens``; a
policy says how many prompt tokens, and may leave the decodes out of a step, never of two in a row. When pages run out, the latest
arrival is preempted: it gives its pages back, keeps its tokens and is computed again later. The earliest request can take pages
from all others and fits alone (``add`` makes sure), so it always goes on, and every request ends.

A step goes through ``schedule`` (pages are taken), is run by the caller, and comes back through ``complete`` (tokens are
appended, full pages offered to the prefix cache). Several steps may be between the two: what a step in flight reads or
writes is neither preempted nor freed before it has come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.blocks import BlockManager
from runtime.config import RuntimeConfig
from runtime.costs import INF, Rule, StepCosts
from runtime.policy import CheapestPerToken, Composition, Load, fill_budget
from runtime.queues import Queues
from runtime.request import Request

Policy = Callable[[Load], Composition]
_AHEAD = 32  # prompts that are admitted before their turn, so that the shortest can be chosen
_OVERTAKE_SHARE = 0.5  # of the target for the first token, until which a prompt may be overtaken


class Chunk(NamedTuple):
    """Tokens ``start`` to ``start + num_tokens`` of one request, in one step. ``samples``: the last of them yields a new token."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_generated: int  # tokens of the answer before this one: the step number of the random draw


Row = tuple[Request, int, int, bool, int]
"""A chunk's fields without their names: making hundreds of ``Chunk``s would be a good part of a decision."""


@dataclass(frozen=True, slots=True)
class Step:
    """rows: the fields of its chunks."""

    rows: tuple[Row, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(map(Chunk._make, self.rows))

    @property
    def num_tokens(self) -> int:
        return sum([row[2] for row in self.rows])

    @property
    def max_query_len(self) -> int:
        return max([row[2] for row in self.rows])


class Scheduler(Queues):
    """Composes steps. ``max_context``: tokens whose K/V one request may need, at most; the pool may bound it further.

    policy: asked once a step that has prompts to work on. table: what steps cost, for the predicted clock that prompts' ages are
    read from. reserve: admit a request only if all that run, and it, are expected to fit until they end, so that preemption is
    left to wrong expectations; False admits whatever fits now. overtake_ms: a prompt that has waited less may be overtaken by
    shorter ones, of those admitted; 0: strictly by arrival.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_context: int,
        policy: Policy = fill_budget,
        table: StepCosts | None = None,
        reserve: bool = False,
        overtake_ms: float = 0.0,
    ) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_batch_tokens": max_batch_tokens, "max_context": max_context}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")  # 0 would schedule nothing, for ever
        if max_num_seqs > max_batch_tokens:
            raise ValueError(
                f"max_num_seqs: {max_num_seqs} is above max_batch_tokens {max_batch_tokens}; each running request needs a token"
            )
        super().__init__(blocks, max_num_seqs, max_context, reserve)
        self.max_batch_tokens, self.policy, self.table = max_batch_tokens, policy, table
        self.overtake_ms = overtake_ms if table is not None else 0.0  # without costs there is no clock
        self._skipped = False  # the last step left the decodes out

    def schedule(self) -> Step | None:
        """The next step; None when nothing can run before a step in flight has come back, or when there is no work."""
        if self._stale:
            self._sort_out()
        admitting = bool(self.waiting and self._rows and not self._blocked)
        decode, allowance = self._compose(admitting) if admitting or self._prefilling else (True, 0)
        chunks: list[Row] = []
        preempted = self._give_decodes(chunks) if decode else False
        if preempted is None:
            return None
        num_tokens = len(chunks)
        if not chunks and not allowance and (admitting or self._prefilling):  # every decode sits out for want of a page
            allowance = self.max_batch_tokens
        if allowance > 0:
            num_tokens += self._give_prompts(chunks, allowance, admitting and not preempted)
            if not chunks and not decode:  # the waiting request that was to run alone is not admitted
                decode, preempted = True, self._give_decodes(chunks)
                if preempted is None:
                    return None
                num_tokens = len(chunks)
        if not chunks:
            assert self.steps_in_flight or not self.has_work, "requests wait, nothing runs, and nothing is in flight"
            return None
        self.steps_in_flight += 1
        self._skipped = not decode
        step = Step(tuple(chunks))
        if self.table is not None:
            ms = self.table.ms(num_tokens, num_tokens > len(chunks))
            if ms < INF:  # a lazily captured plan has no costs yet
                self.clock_ms += ms + self.table.kv_ms * self._context
        return step

    def complete(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Take back a step that has run, with one token per chunk. Returns the requests that got a token, in the step's order."""
        assert len(tokens) == len(step.rows), "one token per chunk is expected"
        self.steps_in_flight -= 1
        grown, page_size = [], self.blocks.page_size
        for (request, start, count, samples, _), token in zip(step.rows, tokens, strict=True):
            if samples:
                request.num_sampling -= 1
            else:
                request.unsampled_in_flight -= 1
            if request.finish_reason is not None:  # it ended while this step was in flight: the token is not part of the answer
                self._release_if_idle(request)
                continue
            computed = request.num_computed = start + count
            if count > 1 or not computed % page_size:  # else no page has become full
                if start < request.num_prompt and request.params.n > 1:
                    self._blocked = False  # its other answers may be waiting for these pages
                self._register_pages(request)
            if not samples:
                continue
            request.tokens.append(token)
            grown.append(request)
            if token in request.end_tokens:
                self.finish(request, "stop")
            elif request.exhausted and len(request.tokens) >= request.token_limit:
                self.finish(request, "length")
        return grown

    def abandon(self, step: Step) -> list[Request]:
        """Take back a step that failed: what it wrote is unknown, so its requests end with ``error``. Returns them."""
        self.steps_in_flight -= 1
        failed = []
        for request, _, _, samples, _ in step.rows:
            if samples:
                request.num_sampling -= 1
            else:
                request.unsampled_in_flight -= 1
            if request.finish_reason is None:
                self.finish(request, "error")
                failed.append(request)
            else:
                self._release_if_idle(request)
        return failed

    def _compose(self, admitting: bool) -> Composition:
        """What the policy makes of the decodes, of the prompts that run and, if one could be admitted, of those that wait."""
        num_decodes = len(self._decoding)
        pending = sum(request.num_to_run for request in self._prefilling) + (self.waiting_tokens if admitting else 0)
        joining = min(self.max_batch_tokens - num_decodes, pending)
        if joining <= 0:
            return Composition(True, 0)
        oldest, begun = (self._prefilling[0], self._by_turn()[0].num_scheduled) if self._prefilling else (self.waiting[0], 0)
        age = self.clock_ms - oldest.arrived_ms
        chosen = self.policy(Load(num_decodes, self._context, joining, begun, pending, age, self._skipped))
        assert 0 <= chosen.prompt_tokens <= joining, "a policy cannot take more prompt tokens than there are"
        assert chosen.prompt_tokens or (chosen.decode and num_decodes), "a policy must let something run"
        assert chosen.decode or not self._skipped, "a policy must not leave the decodes out twice in a row"
        if not chosen.decode and any(each.num_scheduled < each.num_prompt for each in self._decoding):
            return Composition(True, 0)  # the last token of a prompt runs as a decode: first tokens come in order of arrival
        return chosen

    def _give_decodes(self, chunks: list[Row]) -> bool | None:
        """One token of every running request that needs one. True: others were preempted. None: a step in flight must land first.

        With hundreds of requests this loop is the scheduler's time.
        """
        page_size, append = self.blocks.page_size, chunks.append
        preempted = exhausts = False
        for request in self._decoding:  # preemption takes requests from the end, behind the one that is given a token
            start = request.num_scheduled
            length = start + 1
            if request.lockstep and request.num_sampling:
                continue
            if not start % page_size and start == len(request.pages) * page_size:
                fits, victims = self._grow(request, length)
                if fits is None:
                    self._take_back(chunks)
                    return None
                preempted |= victims > 0
                if not fits:
                    continue
            request.num_scheduled = length
            request.num_sampling += 1
            if length + 1 >= request.token_limit:
                request.exhausted = exhausts = True
            append((request, start, 1, True, length - request.num_prompt))
        if exhausts:
            self._decoding = [request for request in self._decoding if not request.exhausted]
        return preempted

    def _give_prompts(self, chunks: list[Row], allowance: int, admitting: bool) -> int:
        """Prompt tokens: of running requests by turn, then of waiting ones. Their pages come with the admission. Returns how many."""
        left = allowance
        if self.overtake_ms:
            while admitting and self.waiting and self._rows and len(self._prefilling) < _AHEAD and self._join():
                pass
        for request in self._by_turn():
            if left > 0 and request.row >= 0:  # not preempted for a decode of this step
                count = min(request.num_to_run, left)
                chunks.append(self._give(request, count))
                left -= count
        while admitting and self.waiting and self._rows and left > 0 and self._join():
            request = self.running[-1]
            count = min(request.num_to_run, left)
            chunks.append(self._give(request, count))
            left -= count
        return allowance - left

    def _by_turn(self) -> list[Request]:
        """Admitted prompts in the order in which they are given tokens: by arrival, or the shortest rest first of those in time."""
        if not self.overtake_ms or len(self._prefilling) < 2:
            return self._prefilling
        late = self.clock_ms - self.overtake_ms
        return sorted(self._prefilling, key=lambda each: (each.arrived_ms > late, each.num_to_run if each.arrived_ms > late else 0))

    def _give(self, request: Request, count: int) -> Row:
        """Put the request's next ``count`` prompt tokens into a step."""
        start, length = request.num_scheduled, len(request.tokens) + request.num_sampling
        samples = start + count == length
        request.num_scheduled = start + count
        if samples:
            request.num_sampling += 1
            request.exhausted = length + 1 >= request.token_limit
        else:
            request.unsampled_in_flight += 1
        self._stale = True
        return request, start, count, samples, length - request.num_prompt

    def _take_back(self, chunks: Sequence[Row]) -> None:
        """Undo the decodes of a step that does not come about; the pages stay for the next one."""
        for request, start, _, _, _ in chunks:
            request.num_scheduled = start
            request.num_sampling -= 1
            request.exhausted = False


def table_rule(config: RuntimeConfig) -> Rule:
    """How a table of costs is read for an engine of this configuration: by the graph that is picked there."""
    return "fixed" if config.plain_graphs or config.graph.pick == "nearest" else "cheapest"


def make_scheduler(config: RuntimeConfig, table: StepCosts, *, num_pages: int, max_context: int) -> Scheduler:
    """The scheduler that an engine of this configuration has."""
    limits = config.scheduler
    cost = limits.policy == "cost"
    return Scheduler(
        BlockManager(num_pages, config.cache.page_size, config.cache.prefix_cache),
        max_num_seqs=limits.max_num_seqs,
        max_batch_tokens=limits.max_batch_tokens,
        max_context=limits.max_context or max_context,
        policy=CheapestPerToken(table, ttft_ms=limits.ttft_ms, itl_ms=limits.itl_ms) if cost else fill_budget,
        table=table,
        reserve=cost,
        overtake_ms=_OVERTAKE_SHARE * limits.ttft_ms if cost else 0.0,
    )
