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

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from runtime.admission import AnswerLengths, peak_tokens
from runtime.blocks import BlockManager, page_digests, root_digest
from runtime.config import RuntimeConfig
from runtime.costs import INF, Rule, StepCosts
from runtime.policy import CheapestPerToken, Composition, Load, fill_budget
from runtime.request import FinishReason, Request, RequestError

Policy = Callable[[Load], Composition]
_number = attrgetter("number")
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


class Scheduler:
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
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")  # 0 would schedule nothing, for ever (B160)
        if max_num_seqs > max_batch_tokens:
            raise ValueError(
                f"max_num_seqs: {max_num_seqs} is above max_batch_tokens {max_batch_tokens}; each running request needs a token"
            )
        self.blocks = blocks
        self.max_num_seqs, self.max_batch_tokens, self.policy = max_num_seqs, max_batch_tokens, policy
        self.table, self.reserve, self.clock_ms = table, reserve, 0.0
        self.overtake_ms = overtake_ms if table is not None else 0.0  # without costs there is no clock
        self.model_context = max_context
        self.max_context = min(max_context, blocks.usable_pages * blocks.page_size)
        # Every running request arrived before every waiting one, and both lists are in order of arrival.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.waiting_tokens = 0
        self.steps_in_flight = 0
        self._rows = list(range(max_num_seqs - 1, -1, -1))  # free rows of the runner's block table, a stack
        self.preemptions = self.cached_tokens = 0
        self._lengths = AnswerLengths()
        self._prefilling: list[Request] = []  # running requests with more than one token to run, and when stale some that were
        self._stale = False
        self._decoding: list[Request] = []  # the other running requests that have something left to run, by arrival
        self._blocked = False  # the first waiting request was not admitted, and no pages have come back since
        self._skipped = False  # the last step left the decodes out

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.steps_in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError with the numbers when it can never run (B153)."""
        length, pages = len(request.prompt_tokens), self.blocks
        if length == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        if length > self.model_context:
            raise RequestError(
                f"the prompt has {length} tokens, the context holds {self.model_context} (scheduler.max_context, or what the model takes)"
            )
        if length > self.max_context:
            raise RequestError(
                f"the prompt has {length} tokens and needs {pages.pages_needed(length, 0)} pages of {pages.page_size}; the cache has "
                f"{pages.usable_pages} (cache.num_pages = {pages.num_pages}, less the reserved one)"
            )
        assert not self.waiting or self.waiting[-1].number < request.number, "requests must be added in the order of their numbers"
        # The last sampled token is never run, so it needs no page: an answer may end one token past the context.
        request.token_limit = min(length + request.params.max_tokens, self.max_context + 1)
        request.arrived_ms = self.clock_ms
        if pages.prefix_cache:  # now, so that no step waits for it
            if request.first is not None:  # the same tokens
                request.digests = request.first.digests[: (length - 1) // pages.page_size]
            self._extend_digests(request, (length - 1) // pages.page_size)
        self.waiting.append(request)
        self.waiting_tokens += length

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

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, running or waiting. Its pages are kept until no step in flight uses them (B158)."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if reason in ("stop", "length"):
            self._lengths.add(request.num_generated)
        self._stale, self._blocked = True, False
        self._leave_decoding(request)
        queue: list[Request] | deque[Request] = self.running
        if request.row < 0:
            queue = self.waiting
            self.waiting_tokens -= len(request.tokens)
        index = bisect_left(queue, request.number, key=_number)
        assert queue[index] is request
        del queue[index]
        self._release_if_idle(request)

    def _sort_out(self) -> None:
        """What of the prompts is still one, and what decodes from now on."""
        prompts, self._prefilling, self._stale = self._prefilling, [], False
        for each in prompts:
            if each.row < 0 or each.finish_reason is not None:
                continue
            if each.num_to_run > 1:
                self._prefilling.append(each)
            elif not each.exhausted:
                insort(self._decoding, each, key=_number)

    def _leave_decoding(self, request: Request) -> None:
        index = bisect_left(self._decoding, request.number, key=_number)
        if index < len(self._decoding) and self._decoding[index] is request:
            del self._decoding[index]

    @property
    def _context(self) -> int:
        """Tokens in the cache, about: all that the held pages have room for."""
        return (self.blocks.usable_pages - self.blocks.num_available) * self.blocks.page_size

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

    def _join(self) -> bool:
        """Admit the first waiting request; False when it cannot be."""
        if not self._admit(self.waiting[0]):
            self._blocked = True
            return False
        request = self.waiting.popleft()
        self.running.append(request)
        self._prefilling.append(request)
        self._stale = True  # with one token left to run it is a decode from the next step on
        return True

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

    def _grow(self, request: Request, num_tokens: int) -> tuple[bool | None, int]:
        """Pages for ``num_tokens``, if need be from later arrivals: (did they suffice, how many were preempted).

        False: the request is the latest itself; it keeps what it has and sits out, and an earlier one may still take its pages.
        None: a step in flight must come back first, since what the device is writing cannot be taken away.
        """
        victims = 0
        while not self.blocks.grow(request.pages, num_tokens):
            victim = self.running[-1]
            if victim is request:
                return False, victims
            if self.steps_in_flight:
                return None, victims
            self._preempt(victim)
            victims += 1
        return True, victims

    def _admit(self, request: Request) -> bool:
        """Give a waiting request pages for all its tokens, cached ones first; False when they are not there, or soon will not be."""
        blocks, length = self.blocks, len(request.tokens)
        if self.reserve and self.running and not self._fits_to_the_end(request):
            return False
        pages: list[int] = []
        shared = self._shared_pages(request)
        if shared is None:
            return False
        if shared:
            pages = list(shared)
            blocks.take(pages)
        elif blocks.prefix_cache:
            # Never the page of the last token: at least one token must be run to yield the next (B146).
            self._extend_digests(request, (length - 1) // blocks.page_size)
            pages = blocks.lookup(request.digests[: (length - 1) // blocks.page_size])
            blocks.take(pages)
        hits = len(pages)
        if not blocks.grow(pages, length):
            blocks.release(pages)
            return False
        request.pages, request.row, request.num_registered = pages, self._rows.pop(), hits
        request.num_computed = request.num_scheduled = hits * blocks.page_size
        if request.preemptions == 0:
            request.num_cached = request.num_computed
        self.cached_tokens += request.num_computed
        self.waiting_tokens -= length
        return True

    def _shared_pages(self, request: Request) -> Sequence[int] | None:
        """Pages of the prompt that another answer to it holds; None while these are still being computed.

        Full pages only, and never that of the last token: each answer writes its own last page, so nothing is ever copied.
        """
        first = request.first
        if first is None or first.row < 0 or first.finish_reason is not None or request.num_generated:
            return ()
        count = (request.num_prompt - 1) // self.blocks.page_size
        return None if first.num_computed < count * self.blocks.page_size else first.pages[:count]

    def _fits_to_the_end(self, request: Request) -> bool:
        """Whether the cache is expected to hold all running requests and this one until each has ended."""
        blocks, lengths = self.blocks, self._lengths
        spare = (blocks.num_available - blocks.pages_needed(len(request.tokens), 0)) * blocks.page_size
        if spare >= (len(self.running) + 1) * lengths.most(self.max_context):
            return True
        coming = []
        for each in (*self.running, request):
            tokens = len(each.tokens)
            # The last page of each is half empty on average.
            coming.append((tokens + blocks.page_size // 2, lengths.remaining(each.num_generated, each.token_limit - tokens)))
        return peak_tokens(coming) <= blocks.usable_pages * blocks.page_size

    def _preempt(self, request: Request) -> None:
        assert not request.in_flight
        self.running.pop()
        self._leave_decoding(request)
        self._give_back(request)
        request.num_computed = request.num_scheduled = request.num_registered = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        self.waiting_tokens += len(request.tokens)

    def _release_if_idle(self, request: Request) -> None:
        if not request.in_flight and request.row >= 0:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.blocks.release(request.pages)
        self._stale, self._blocked = True, False
        self._rows.append(request.row)
        request.row = -1

    def _extend_digests(self, request: Request, count: int) -> None:
        digests, size = request.digests, self.blocks.page_size
        if len(digests) < count:
            parent = digests[-1] if digests else root_digest(request.salt)
            digests += page_digests(parent, request.tokens[len(digests) * size : count * size], size)

    def _register_pages(self, request: Request) -> None:
        full = request.num_computed // self.blocks.page_size
        if not self.blocks.prefix_cache or full <= request.num_registered:
            return
        self._extend_digests(request, full)
        for page in range(request.num_registered, full):
            self.blocks.register(request.pages[page], request.digests[page])
        request.num_registered = full


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
