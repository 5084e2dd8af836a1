"""Requests that run and that wait, and their pages: admission, growth, preemption, the end. No torch.

What of them runs in a step is the scheduler's to say (runtime/scheduler.py), which is built on this.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from runtime.admission import AnswerLengths, peak_tokens
from runtime.blocks import BlockManager, page_digests, root_digest
from runtime.request import FinishReason, Request, RequestError

_number = attrgetter("number")


class Queues:
    """Who runs, who waits and who holds what. Arguments as for ``Scheduler``."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_context: int, reserve: bool) -> None:
        self.blocks, self.max_num_seqs, self.reserve = blocks, max_num_seqs, reserve
        self.clock_ms = 0.0
        """The time, as the costs of the steps predict it."""
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

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.steps_in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError with the numbers when it can never run."""
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

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, running or waiting. Its pages are kept until no step in flight uses them."""
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
            # Never the page of the last token: at least one token must be run to yield the next.
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
