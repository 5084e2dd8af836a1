"""Counters by which the programs of a launch find out who arrives last: zero before each launch, and left at zero by its last program.

Two launches that may run at once need counters of their own. Eager calls take turns on a ring, so large that two streams, each with
as many launches queued as a device takes, do not meet on it. A captured call keeps its own for good, since its graph may be replayed at
any time beside others, and so does a bound one (``_launch.bind``). None of these lies in a graph's pool. When those to keep run out, or
a launch needs very many, fresh ones are zeroed by a launch of torch's, which a captured call repeats as a node of its graph.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tkernels._launch import is_binding
from tkernels._repeats import lend

EAGER_WORDS, CAPTURED_WORDS = 1 << 20, 1 << 22  # int32; a captured step of 64 rows of a 1B model takes some 10,000
_MOST_EAGER = EAGER_WORDS // 1024  # of one launch: a device's queue holds about a thousand launches


class _Words:
    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(EAGER_WORDS, dtype=torch.int32, device=device)
        self._kept = torch.zeros(CAPTURED_WORDS, dtype=torch.int32, device=device)
        self._next = 0
        self._taken = 0

    def turn(self, count: int) -> Place | None:
        if count > _MOST_EAGER:
            return None
        if self._next + count > EAGER_WORDS:
            self._next = 0
        self._next += count
        return self._ring, self._next - count

    def holds(self, words: torch.Tensor) -> bool:
        return words.untyped_storage().data_ptr() in (self._ring.data_ptr(), self._kept.data_ptr())

    def keep(self, count: int) -> Place | None:
        if self._taken + count > CAPTURED_WORDS:
            return None
        self._taken += count
        return self._kept, self._taken - count


Place = tuple[torch.Tensor, int]
_words: dict[torch.device, _Words] = {}
_lock = threading.Lock()


def counters(count: int, device: torch.device) -> torch.Tensor:
    """[count] int32 zeros that no other launch uses; the kernel must leave them at zero. Starts on 32 bytes. Any thread may call."""
    count = (count + 7) & -8
    again = partial(_address, count, device)
    if device.type != "cuda":  # the interpreter runs a launch to its end: nothing else uses them meanwhile
        with _disable_current_modes():
            return lend(torch.zeros(count, dtype=torch.int32, device=device), again)
    place = _place(count, device)
    if place is None:
        return torch.zeros(count, dtype=torch.int32, device=device)
    words, start = place
    return lend(words[start : start + count], again)


def stood(words: torch.Tensor) -> bool:
    """Whether these ``counters`` were there before they were asked for. Else something has just been launched that zeroes them, and what
    counts with them must not begin before that has ended."""
    return words.device.type != "cuda" or any(held.holds(words) for held in tuple(_words.values()))


def _address(count: int, device: torch.device) -> int | torch.Tensor:
    """Where the counters of another launch are, without making a tensor of them where that can be."""
    place = _place(count, device) if device.type == "cuda" else None
    return place[0].data_ptr() + 4 * place[1] if place is not None else torch.zeros(count, dtype=torch.int32, device=device)


def _place(count: int, device: torch.device) -> Place | None:
    """Words in one of the two tensors that are kept, from where on; None: fresh ones are needed."""
    capturing = torch.cuda.is_current_stream_capturing()
    with _lock:
        words = _words.get(device)
        if words is None:
            if capturing:
                return None
            with _disable_current_modes():  # made once: no work of an op that is being bound
                words = _words[device] = _Words(device)
            torch.cuda.current_stream(device).synchronize()  # another stream may use them first
        return words.keep(count) if capturing or is_binding() else words.turn(count)
