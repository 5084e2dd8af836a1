"""How much of the KV cache running requests will need at most, judged by how long answers have been so far. Pure Python."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

_REMEMBERED = 256


class AnswerLengths:
    """The latest answers' lengths. What they say about a running request: how many tokens it will still generate."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._longer_sums: list[int] | None = None  # [i]: sum of _sorted[i:]

    def add(self, length: int) -> None:
        """Note a finished answer."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > _REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._longer_sums = None

    def most(self, limit: int) -> int:
        """The longest that ``remaining`` may answer."""
        return min(limit, self._sorted[-1]) if self._sorted else limit

    def remaining(self, generated: int, limit: int) -> int:
        """Tokens that an answer of ``generated`` tokens still gets: the mean of the recent ones that were longer; ``limit`` if none."""
        if not self._sorted:
            return limit
        if self._longer_sums is None:
            total, sums = 0, []
            for length in reversed(self._sorted):
                total += length
                sums.append(total)
            self._longer_sums = sums[::-1]
        index = bisect_right(self._sorted, generated)
        count = len(self._sorted) - index
        return limit if count == 0 else min(limit, -(-self._longer_sums[index] // count) - generated)


def peak_tokens(requests: Iterable[tuple[int, int]]) -> int:
    """The most tokens that requests hold at any one time. requests: (tokens now, tokens still to come) each; all grow alike.

    The most is reached just before one of them ends: those that are still there have grown as far as it has.
    """
    peak = held = 0
    for count, (now, coming) in enumerate(sorted(requests, key=lambda each: -each[1]), 1):
        held += now
        peak = max(peak, held + count * coming)
    return peak
