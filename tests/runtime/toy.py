"""A toy language model over a page-accurate toy cache, for tests of the scheduler and the engine without torch.

Each request owns a range of token ids and counts inside it: the token after x is x + 1, wrapping within the range. What is
read for the next token is *the cache*, not the request: every position of the request must hold what was written there. So
a page that is shared wrongly, freed too early or found under a stale digest shows as a token from a foreign range, or as a
position that does not hold what it should.
"""

from __future__ import annotations

from runtime.scheduler import Step

RANGE = 1000  # token ids of one request


def next_token(token: int) -> int:
    """Counts within the range; the answer is a function of the whole history only through its last token."""
    base = token // RANGE * RANGE
    return base + (token - base + 1) % RANGE


def answer(prompt: list[int], count: int) -> list[int]:
    """What a request must be told, from the prompt alone."""
    tokens = [next_token(prompt[-1])]
    while len(tokens) < count:
        tokens.append(next_token(tokens[-1]))
    return tokens[:count]


class ToyRunner:
    """Runs steps as the real runner does: writes every token of every chunk to its slot, then reads each context back."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.steps: list[Step] = []

    def slot(self, pages: list[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def launch(self, step: Step, pending: dict[int, int] | None = None) -> list[int]:
        """``pending``: tokens sampled by a step in flight, by request number, which the host does not know yet."""
        self.steps.append(step)
        for request, start, count, _, _ in step.chunks:
            for position in range(start, start + count):
                known = position < len(request.tokens)
                assert known or not request.lockstep, "a token was asked for before the one before it is known"
                token = request.tokens[position] if known else (pending or {})[request.number]
                self.slots[self.slot(request.pages, position)] = token
        return [self._next(chunk) for chunk in step.chunks]

    def _next(self, chunk) -> int:
        request, end = chunk.request, chunk.start + chunk.num_tokens
        context = [self.slots[self.slot(request.pages, position)] for position in range(end)]
        known = min(end, len(request.tokens))
        assert context[:known] == request.tokens[:known], f"request {request.number} reads {context}, its tokens are {request.tokens}"
        assert context[-1] is not None
        return next_token(context[-1])
