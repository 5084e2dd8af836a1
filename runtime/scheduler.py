"""Which tokens of which requests run in the next step. Pure Python, deterministic, no torch.

First come, first served. Running requests that need one token come first (decode), then prompts in chunks, within
``max_batch_tokens``. When pages run out, the latest arrival is preempted: it gives its pages back, keeps its tokens and is
computed again later. The earliest request can take pages from all others and fits alone (``add`` makes sure), so it always
goes on, and every request ends.

A step goes through ``schedule`` (pages are taken), is run by the caller, and comes back through ``complete`` (tokens are
appended, full pages offered to the prefix cache). Several steps may be between the two: what a step in flight reads or
writes is neither preempted nor freed before it has come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.blocks import BlockManager, page_digest, root_digest
from runtime.policy import fill_budget
from runtime.request import FinishReason, Request, RequestError

# (tokens that decode in this step, prompt tokens that may join) -> prompt tokens that shall join
ChunkPolicy = Callable[[int, int], int]


class Chunk(NamedTuple):
    """Tokens ``start`` to ``start + num_tokens`` of one request, in one step. ``samples``: the last of them yields a new token."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_generated: int  # tokens of the answer before this one: the step number of the random draw


@dataclass(frozen=True, slots=True)
class Step:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def max_query_len(self) -> int:
        return max(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Composes steps. ``max_context``: tokens whose K/V one request may need, at most; the pool may bound it further."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_batch_tokens: int, max_context: int, chunk_policy: ChunkPolicy = fill_budget
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
        self.max_num_seqs, self.max_batch_tokens, self.chunk_policy = max_num_seqs, max_batch_tokens, chunk_policy
        self.model_context = max_context
        self.max_context = min(max_context, blocks.usable_pages * blocks.page_size)
        # Every running request arrived before every waiting one, and both lists are in order of arrival.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.steps_in_flight = 0
        self._rows = list(range(max_num_seqs - 1, -1, -1))  # free rows of the runner's block table, a stack
        self.preemptions = self.cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.steps_in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError with the numbers when it can never run (B153)."""
        length, pages = len(request.prompt_tokens), self.blocks
        if length == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        if length > self.model_context:
            raise RequestError(f"the prompt has {length} tokens, the context holds {self.model_context}")
        if length > self.max_context:
            raise RequestError(
                f"the prompt has {length} tokens and needs {pages.pages_needed(length, 0)} pages of {pages.page_size}; the cache has "
                f"{pages.usable_pages} (cache.num_pages = {pages.num_pages}, less the reserved one)"
            )
        assert not self.waiting or self.waiting[-1].number < request.number, "requests must be added in the order of their numbers"
        # The last sampled token is never run, so it needs no page: an answer may end one token past the context.
        request.token_limit = min(length + request.params.max_tokens, self.max_context + 1)
        self.waiting.append(request)

    def schedule(self) -> Step | None:
        """The next step; None when nothing can run before a step in flight has come back, or when there is no work."""
        running, page_size = self.running, self.blocks.page_size
        todos = []  # tokens that each running request has not been given a step for
        num_decodes = 0
        for request in running:
            length = len(request.tokens) + request.num_sampling
            todo = length - request.num_scheduled if length < request.token_limit else 0
            todos.append(todo)
            num_decodes += todo == 1
        allowance = self._prompt_allowance(num_decodes, sum(todos) - num_decodes)
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        preempted = False
        for position, request in enumerate(running):  # preemption takes requests from the end, behind this position
            todo = todos[position]
            # A prompt's last token is run like a decode: nothing in a step asks which of the two it is (B038).
            count = todo if todo <= 1 else min(todo, allowance)
            if count <= 0:
                continue
            if request.num_scheduled + count > len(request.pages) * page_size:
                fits, victims = self._grow(request, request.num_scheduled + count)
                if fits is None:
                    self._take_back(decodes + prompts)
                    return None
                preempted |= victims > 0
                if not fits:
                    continue
            if todo == 1:
                decodes.append(self._give(request, 1))
            else:
                prompts.append(self._give(request, count))
                allowance -= count
        while self.waiting and self._rows and allowance > 0 and not preempted:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            running.append(request)
            count = min(request.num_to_run, allowance)
            prompts.append(self._give(request, count))
            allowance -= count
        if not decodes and not prompts:
            assert self.steps_in_flight or not self.has_work, "requests wait, nothing runs, and nothing is in flight"
            return None
        self.steps_in_flight += 1
        return Step((*decodes, *prompts))

    def complete(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Take back a step that has run, with one token per chunk. Returns the requests that got a token, in the step's order."""
        assert len(tokens) == len(step.chunks), "one token per chunk is expected"
        self.steps_in_flight -= 1
        grown = []
        for chunk, token in zip(step.chunks, tokens, strict=True):
            request = chunk.request
            request.steps_in_flight -= 1
            request.num_sampling -= chunk.samples
            if request.finish_reason is not None:  # it ended while this step was in flight: the token is not part of the answer
                self._release_if_idle(request)
                continue
            request.num_computed = chunk.start + chunk.num_tokens
            self._register_pages(request)
            if not chunk.samples:
                continue
            request.tokens.append(token)
            grown.append(request)
            if token in request.eos_tokens and not request.params.ignore_eos:
                self.finish(request, "stop")
            elif len(request.tokens) >= request.token_limit:
                self.finish(request, "length")
        return grown

    def abandon(self, step: Step) -> list[Request]:
        """Take back a step that failed: what it wrote is unknown, so its requests end with ``error``. Returns them."""
        self.steps_in_flight -= 1
        failed = []
        for chunk in step.chunks:
            chunk.request.steps_in_flight -= 1
            chunk.request.num_sampling -= chunk.samples
            if chunk.request.finish_reason is None:
                self.finish(chunk.request, "error")
                failed.append(chunk.request)
            else:
                self._release_if_idle(chunk.request)
        return failed

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, running or waiting. Its pages are kept until no step in flight uses them (B158)."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        queue = self.running if request.row >= 0 else self.waiting
        index = bisect_left(queue, request.number, key=lambda other: other.number)
        assert queue[index] is request
        del queue[index]
        self._release_if_idle(request)

    def _prompt_allowance(self, num_decodes: int, pending: int) -> int:
        """Prompt tokens that join this step. pending: those of running requests; waiting prompts come on top."""
        budget = self.max_batch_tokens - num_decodes
        for request in self.waiting:
            if pending >= budget:
                break
            pending += len(request.tokens)
        joining = min(budget, pending)
        if joining <= 0:
            return 0
        chosen = self.chunk_policy(num_decodes, joining)
        assert 0 < chosen <= joining or (chosen == 0 and num_decodes), "a chunk policy must let something run"
        return chosen

    def _give(self, request: Request, count: int) -> Chunk:
        """Put the request's next ``count`` tokens into a step."""
        start, length = request.num_scheduled, len(request.tokens) + request.num_sampling
        samples = start + count == length
        request.num_scheduled = start + count
        request.num_sampling += samples
        request.steps_in_flight += 1
        return Chunk(request, start, count, samples, length - len(request.prompt_tokens))

    def _take_back(self, chunks: Sequence[Chunk]) -> None:
        """Undo ``_give`` for a step that does not come about; the pages stay for the next one."""
        for request, start, _, samples, _ in chunks:
            request.num_scheduled = start
            request.num_sampling -= samples
            request.steps_in_flight -= 1

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
        """Give a waiting request pages for all its tokens, cached ones first; False when they are not there."""
        blocks, length = self.blocks, len(request.tokens)
        pages: list[int] = []
        if blocks.prefix_cache:
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
        return True

    def _preempt(self, request: Request) -> None:
        assert request.steps_in_flight == 0
        self.running.pop()
        self._give_back(request)
        request.num_computed = request.num_scheduled = request.num_registered = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.steps_in_flight == 0 and request.row >= 0:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.blocks.release(request.pages)
        self._rows.append(request.row)
        request.row = -1

    def _extend_digests(self, request: Request, count: int) -> None:
        digests, size = request.digests, self.blocks.page_size
        parent = digests[-1] if digests else root_digest(request.salt)
        for page in range(len(digests), count):
            parent = page_digest(parent, request.tokens[page * size : (page + 1) * size])
            digests.append(parent)

    def _register_pages(self, request: Request) -> None:
        full = request.num_computed // self.blocks.page_size
        if not self.blocks.prefix_cache or full <= request.num_registered:
            return
        self._extend_digests(request, full)
        for page in range(request.num_registered, full):
            self.blocks.register(request.pages[page], request.digests[page])
        request.num_registered = full
