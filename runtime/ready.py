"""Calls that were seen before, made ready: what is left for the next one of the kind is to check, copy, launch and count.

A ``Ready`` is a captured step at one set of real sizes. ``Known`` is a way of calling it: how the arguments are passed and what
tensors they are, which one guard of torch.compile compares in C++. Both are remembered by the dispatcher until candidates or costs
change, so nothing is decided anew for a step like the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from runtime.addresses import is_plain
from runtime.arena import Arena
from runtime.dispatch import Decision, Dispatcher
from runtime.key_steps import Captured, KeySteps
from runtime.outputs import Borrowed, RealRows
from runtime.persistent import same_value
from runtime.steps import Steps

Borrow = bool | Collection[int]


class Ready:
    """A captured step at one set of real sizes, with all that follows from them."""

    __slots__ = ("_at", "arena", "borrow", "captured", "count", "decision", "device_type", "key", "layout", "rows", "sizes")

    def __init__(
        self, key: KeySteps, decision: Decision, captured: Captured, sizes: Mapping[str, int], dispatcher: Dispatcher, borrow: Borrow
    ) -> None:
        self.key, self.decision, self.captured, self.sizes, self.borrow = key, decision, captured, dict(sizes), borrow
        self.arena, self.device_type = key.arena, key.arena.device.type
        self.layout = key.arena.layout(sizes, captured.padded)
        self.rows = captured.output.at(sizes)
        self.count = dispatcher.counter(key.text, sizes[dispatcher.token], decision)
        self._at = decision.mode, decision.size

    def is_current(self) -> bool:
        """Whether its step was not reset, dropped or captured again."""
        return self.key.captured.get(self._at) is self.captured

    def run(self, steps: Steps, is_sent: bool = False) -> Any:
        """Run it on what was written into the staging buffer, and hand out its real rows. is_sent: on inputs that lie in the arena."""
        if not is_sent:
            steps.pool.follow()
            self.arena.send(self.layout)
        self.captured.step.replay()
        steps.replays = now = steps.replays + 1
        borrow = self.borrow
        if borrow is False:
            return self.rows.copied()
        if borrow is True:
            return outputs(steps, self.arena, self.rows, borrow)
        return self.rows.lent(borrow, partial(_replayed_since, steps, now))


class Known:
    """A way to call a graphed module that a ready step serves. context: that of the call, as given.

    values: the arguments as passed, by position and then by keyword; names: those that are tensors, by place. Every check that the
    first such call has passed holds for another with the same keywords, host values and guarded tensors: types, dtypes, devices,
    shapes and strides.
    """

    __slots__ = (
        "_all_packed",
        "_guard",
        "_host",
        "_is_packed",
        "_is_raw",
        "_keywords",
        "_names",
        "_positional",
        "_take",
        "context",
        "ready",
    )

    def __init__(self, ready: Ready, context: int | None, positional: int, keywords: tuple[str, ...], values: tuple[Any, ...],
                 names: Mapping[int, str]) -> None:  # fmt: skip
        self.ready, self.context = ready, context
        self._positional, self._keywords = positional, keywords
        self._host = [(place, value) for place, value in enumerate(values) if place not in names]
        place_of = {name: place for place, name in names.items()}
        self._names = list(ready.arena.names)  # in the arena's order, in which its buffers are written
        places = [place_of[name] for name in self._names]
        first, end = places[0], places[0] + len(places)
        in_a_row = places == list(range(first, end))  # as arguments mostly are
        self._take: Callable[[Any], tuple[Any, ...]] = itemgetter(slice(first, end)) if in_a_row else itemgetter(*places)
        tensors = self._take(values)
        self._is_packed = [tensor.is_cpu for tensor in tensors]
        self._all_packed = all(self._is_packed)
        self._is_raw = self._all_packed and all(is_plain(tensor) and tensor.is_contiguous() for tensor in tensors)
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        self._guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
        """The tensors of a call of this kind, in the arena's order; None for another call."""
        if len(args) != self._positional or tuple(kwargs) != self._keywords:
            return None
        values = (*args, *kwargs.values())
        for place, value in self._host:
            given = values[place]
            if given is not value and not same_value(given, value):
                return None
        tensors = self._take(values)
        return tensors if self._guard.check(*tensors) else None

    def run(self, steps: Steps, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Host tensors go to the device in one copy, those that are there already one by one."""
        ready = self.ready
        arena, layout, packed = ready.arena, ready.layout, self._is_packed
        if self._all_packed:
            part = arena.hand_out(layout)
            if self._is_raw:
                part.copy(tensors)
            else:
                torch._foreach_copy_(part.targets, tensors)
            return ready.run(steps)
        steps.pool.follow()
        here = [(name, tensor) for name, tensor, is_packed in zip(self._names, tensors, packed, strict=True) if is_packed]
        if here:
            arena.pack([name for name, _ in here], [tensor for _, tensor in here], layout)
        rest = [(name, tensor) for name, tensor, is_packed in zip(self._names, tensors, packed, strict=True) if not is_packed]
        arena.copy([name for name, _ in rest], [tensor for _, tensor in rest], layout)
        return ready.run(steps, is_sent=True)


def known_call(ready: Ready, context: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: list[str]) -> Known | None:
    """The kind of this call, whose arguments have the names of the callable's, ``names``. None where a guard cannot tell it:
    arguments that are no plain tensors and numbers."""
    values = (*args, *kwargs.values())
    passed = [*names[: len(args)], *kwargs]
    tensors = {place: passed[place] for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
    if set(tensors.values()) != set(ready.arena.names) or any(values[place].layout is not torch.strided for place in tensors):
        return None
    return Known(ready, context, len(args), tuple(kwargs), values, tensors)


def ready_to_stage(
    steps: Steps, dispatcher: Dispatcher, sizes: Mapping[str, int], context: int | None, host: Mapping[str, Any], borrow: Borrow
) -> Ready | None:
    """The step for these sizes and host values, whose arrays can be written in place. None where it takes no graph, or where some of
    its arguments are static or written."""
    key = next((key for key in steps.keys.values() if steps.binding.host(host, key.specs) == key.host), None)
    if key is None or key.static or key.writes_arguments or (key.alike and len({sizes[name] for name in key.alike}) > 1):
        return None
    decision = dispatcher.pick(key.text, sizes, "", context)
    captured = key.captured.get((decision.mode, decision.size))
    return None if captured is None else Ready(key, decision, captured, sizes, dispatcher, borrow)


def outputs(steps: Steps, arena: Arena, rows: RealRows, borrow: Borrow) -> Any:
    """What a step that has just run hands out."""
    if borrow is False:
        return rows.copied()
    is_stale = partial(_replayed_since, steps, steps.replays)
    return rows.borrowed(partial(_lend, arena, is_stale)) if borrow is True else rows.lent(borrow, is_stale)


def _lend(arena: Arena, is_stale: Callable[[], bool], tensor: torch.Tensor) -> torch.Tensor:
    if arena.holds(tensor):  # an input handed through: the next call fills it before it reads what the caller passes
        return tensor.clone()
    return Borrowed.over(tensor, is_stale)


def _replayed_since(steps: Steps, now: int) -> bool:
    return steps.replays != now
