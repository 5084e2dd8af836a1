"""Counters by which the programs of a launch find out who arrives last: zero before each launch, and left at zero by its last program.

Two launches that may run at once need counters of their own. Eager calls take turns on a ring, far more of them than launches fit a
device's queues. A captured call keeps its own for good, since its graph may be replayed at any time beside others, and so does a bound
one (``_launch.bind``); when those run out, a captured memset zeroes fresh ones, which costs a node of the graph. Nothing here is
allocated inside a graph's pool.
"""

from __future__ import annotations

import torch

from tkernels._launch import is_binding

EAGER_WORDS, CAPTURED_WORDS = 1 << 17, 1 << 18  # int32


class _Words:
    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(EAGER_WORDS, dtype=torch.int32, device=device)
        self._kept = torch.zeros(CAPTURED_WORDS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # once: another stream may use them first
        self._next = 0
        self._taken = 0

    def turn(self, count: int) -> torch.Tensor:
        if self._next + count > EAGER_WORDS:
            self._next = 0
        self._next += count
        return self._ring[self._next - count : self._next]

    def keep(self, count: int) -> torch.Tensor | None:
        if self._taken + count > CAPTURED_WORDS:
            return None
        self._taken += count
        return self._kept[self._taken - count : self._taken]


_words: dict[torch.device, _Words] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """[count] int32 zeros that no other launch uses; the kernel must leave them at zero. Starts on 32 bytes."""
    words = _words.get(device)
    count = (count + 7) & -8
    if device.type != "cuda" or count > EAGER_WORDS // 64:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing() or (is_binding() and words is not None):
        kept = words.keep(count) if words is not None else None
        return kept if kept is not None else torch.zeros(count, dtype=torch.int32, device=device)
    if words is None:
        words = _words[device] = _Words(device)
    return words.turn(count)
