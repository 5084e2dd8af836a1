"""Step inputs on the host: pinned copies of the arena's block, written in turn, each brought to the device in one copy.

While the device still copies from one buffer the host writes into the next. A ring of them needs to look at the device once in half
a round: an event is recorded when the last buffer of a half has been sent, and waited for when its first is to be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from runtime.addresses import copier, rows_sender, sender
from runtime.inputs import InputSpec, as_numpy, cut, fill_value, tails

_RING = 8
_RING_BYTES = 16 << 20  # of pinned memory for one ring; with large inputs two buffers have to do
_SPARED = 512 << 10  # bytes that are worth a second copy: 10 µs of the bus to the device


class Note:
    """What a buffer holds, in the words of who writes into it: so the next writer may leave what is right already.

    before: what was noted when the buffer was last handed out; None if nothing was, as by writers that take no notes. now: to be set once
    the buffer is written. widths: inputs of which the step reads the first columns only, and how many: the others need not be sent.
    """

    __slots__ = ("before", "now", "widths")

    def __init__(self, before: Any = None) -> None:
        self.before = before
        self.now: Any = None
        self.widths: dict[str, int] | None = None


@dataclass(frozen=True)
class Wide:
    """The last input of a layout, if it is large and has rows, and how to send some columns of it. begin: the copy of all before it."""

    name: str
    rows: int
    columns: int
    column_bytes: int
    begin: Callable[[int], int] | None
    finish: Callable[[int, int], int]

    def send(self, widths: dict[str, int], stream: int) -> int:
        """Not 0: it was not worth it, or could not be done."""
        width = widths.get(self.name, self.columns)
        if self.rows * (self.columns - width) * self.column_bytes < _SPARED:
            return -1
        failed = self.begin(stream) if self.begin is not None else 0
        return failed or (self.finish(width * self.column_bytes, stream) if width else 0)


@dataclass
class Part:
    """One layout in one buffer: what to write, what to fill with what, which bytes to copy.

    heads: the real rows by name; tensors: the same memory as tensors; targets: these in the order of the specs given; copy: from
    contiguous tensors into all targets. tails: to be filled with a number, which stays there; repeats: with the last real row, at
    each step.
    """

    heads: dict[str, np.ndarray]
    tensors: dict[str, torch.Tensor]
    targets: list[torch.Tensor]
    copy: Callable[[tuple[torch.Tensor, ...]], object]
    tails: list[tuple[np.ndarray, Any]]
    repeats: list[tuple[np.ndarray, np.ndarray]]
    source: torch.Tensor
    target: torch.Tensor
    send: Callable[[int], int] | None
    """Begins the copy on a stream that torch has used for one before; not 0: it has not. None: leave it to torch."""
    wide: Wide | None = None


@dataclass
class Layout:
    """Everything about one pair of real and padded sizes, so that a step in it computes nothing."""

    real: dict[str, int]
    padded: dict[str, int]
    views: dict[str, torch.Tensor]
    """Of the device's block, at the padded sizes."""
    heads: dict[str, torch.Tensor]
    """Their real rows."""
    used: dict[str, int]
    """The number of those, for inputs whose rows alone follow a size."""
    end: int
    """Bytes of the block that the padded sizes use."""
    counts: tuple[int, ...]
    """The real sizes, in the order of the arena's."""
    parts: list[Part | None] = field(default_factory=list)
    """By buffer; made when it first comes round."""


class Ring:
    """Which buffer is next, and whether the device may still be reading from it.

    size: even. events: one for each half, with ``record(stream)`` and ``synchronize()``; none where copies are done when they return.
    """

    def __init__(self, size: int, events: Sequence[Any]) -> None:
        self.size, self.turn = size, 0
        self._half, self._events = size // 2, events
        self.awaited: Any = None
        """The event to be waited for before this turn's buffer is written; mostly none."""

    def wait(self) -> None:
        """Before the buffer of this turn is written."""
        if self.awaited is not None:
            self.awaited.synchronize()
            self.awaited = None

    def sent(self, stream: Any) -> None:
        """The copy from this turn's buffer is under way on the stream, behind all copies before it: on to the next buffer."""
        done = self.turn = self.turn + 1
        if done % self._half == 0:
            self.turn = done % self.size
            if self._events:
                self._events[done // self._half - 1].record(stream)
                self.awaited = self._events[self.turn // self._half]


class Staging:
    """The buffers of one arena. specs, offsets: the inputs and where each begins in the block; names: of the inputs as they were given."""

    def __init__(
        self,
        specs: Mapping[str, InputSpec],
        names: Sequence[str],
        offsets: Mapping[str, int],
        largest: Mapping[str, int],
        block: torch.Tensor,
    ) -> None:
        self._specs, self._names, self._offsets, self._block = specs, names, offsets, block
        self._device, self._index = block.device, block.device.index
        on_cuda = self._on_cuda = self._device.type == "cuda"
        count = max(2, min(_RING, _RING_BYTES // block.nbytes) // 2 * 2)
        with torch.inference_mode(False):
            self._buffers = list(torch.zeros(count, block.nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_cuda))
        self.ring = Ring(count, [torch.cuda.Event() for _ in range(2)] if on_cuda else ())
        self.overwritten = False
        """A buffer's copy has put into the block what the buffer held, padding and all. Set here, and taken back by who repairs that."""
        self._stream: torch.cuda.Stream | None = None  # the newest copy's
        self._raw_stream = -1
        # Rows of an input that follow a size alone hold the padding from the buffer's count of that size on.
        sizes = list(largest)
        self._filled = [tuple(largest.values())] * count
        self._rows: list[list[list[tuple[np.ndarray, int, Any]]]] = []
        for buffer in self._buffers:
            by_size: list[list[tuple[np.ndarray, int, Any]]] = [[] for _ in sizes]
            for name, spec in specs.items():
                if (dim := spec.rows_of) is not None and not isinstance(spec.pad, str):
                    array = as_numpy(cut(buffer, offsets[name], spec, largest))
                    by_size[sizes.index(dim.name)].append((array, dim.extra, fill_value(spec.pad, spec.dtype)))
            self._rows.append(by_size)
        self._notes = [Note() for _ in self._buffers]
        self.note = Note()
        """Of the buffer that was handed out last. Each hand-out makes a new one: late words about the one before reach nobody, and what had
        been got with it is no longer the next step's."""
        self._complete: list[Part | None] = [None] * count  # the part that lies in each buffer with all its padding

    def hand_out(self, layout: Layout) -> Part:
        """The next buffer, at this layout: the part to write into. Waits until the device has read what it held."""
        ring = self.ring
        if ring.awaited is not None:  # asked here too: mostly there is nothing, and a call costs more than this question
            ring.wait()
        turn = ring.turn
        self.note = self._notes[turn] = Note(self._notes[turn].now)
        part = layout.parts[turn] or self._make_part(layout, turn)
        if self._complete[turn] is not part:  # what is written now may lie over padding
            self._filled[turn] = tuple(map(max, self._filled[turn], layout.counts))
            self._complete[turn] = None
        return part

    def send(self, layout: Layout) -> None:
        """Complete the padding of what was written and copy it to the device. Does not wait for the copy."""
        self.overwritten = True
        ring = self.ring
        turn = ring.turn
        part = layout.parts[turn] or self._make_part(layout, turn)
        if self._complete[turn] is not part:
            self._fill_rows(turn, layout.counts)
            for tail, value in part.tails:
                tail[...] = value
            self._complete[turn] = part
        for tail, last in part.repeats:
            tail[...] = last
        send, raw, index = part.send, self._raw_stream, self._index
        # send is for the stream of the copy before, while that is the current one of the current device
        if send is None or torch._C._cuda_getDevice() != index or torch._C._cuda_getCurrentRawStream(index) != raw:
            self._send_by_torch(part)
        elif (widths := self.note.widths) is not None and part.wide is not None and not part.wide.send(widths, raw):
            pass
        elif send(raw):
            self._send_by_torch(part)
        ring.sent(self._stream)

    def _send_by_torch(self, part: Part) -> None:
        """The first copy on each stream, which tells torch's allocator not to give the buffers to others while the stream reads them;
        and those that the driver refuses, for torch to say why."""
        part.target.copy_(part.source, non_blocking=True)
        if self._on_cuda and self._raw_stream != torch._C._cuda_getCurrentRawStream(self._index):
            self._change_stream()

    def _fill_rows(self, turn: int, counts: tuple[int, ...]) -> None:
        for rows, count, then in zip(self._rows[turn], counts, self._filled[turn], strict=True):
            if count < then:
                for array, extra, value in rows:
                    array[count + extra : then + extra] = value
        self._filled[turn] = counts

    def _change_stream(self) -> None:
        """Later copies come behind the earlier ones on another stream, so that an event after the newest is one after all."""
        stream = torch.cuda.current_stream(self._device)  # of the arena's device, as the current device may be another one
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._raw_stream = stream, stream.cuda_stream

    def _make_part(self, layout: Layout, turn: int) -> Part:
        buffer, real, padded = self._buffers[turn], layout.real, layout.padded
        source, target = buffer[: layout.end], self._block[: layout.end]
        part = Part({}, {}, [], _nothing, [], [], source, target, sender(target, source))
        with torch.inference_mode(False), torch.no_grad():
            for name, spec in self._specs.items():
                view = cut(buffer, self._offsets[name], spec, padded)
                part.tensors[name] = spec.real_part(view, real)
                for tail in tails(spec, view, real) if spec.rows_of is None else ():
                    if tail.last is not None:
                        part.repeats.append((as_numpy(tail.view), as_numpy(tail.last)))
                    else:
                        part.tails.append((as_numpy(tail.view), fill_value(tail.value, spec.dtype)))
            part.heads = {name: as_numpy(head) for name, head in part.tensors.items()}
        part.wide = self._wide(layout, buffer)
        part.targets = [part.tensors[name] for name in self._names]
        part.copy = copier(part.targets)
        layout.parts[turn] = part
        return part

    def _wide(self, layout: Layout, buffer: torch.Tensor) -> Wide | None:
        name = list(self._specs)[-1]
        view = layout.views[name]
        if view.ndim != 2 or view.nbytes < _SPARED:
            return None
        begin = self._offsets[name]
        source, target = (block[begin : begin + view.nbytes].view(len(view), -1) for block in (buffer, self._block))
        first, finish = sender(self._block[:begin], buffer[:begin]), rows_sender(target, source)
        if finish is None or (begin and first is None):
            return None
        rows, columns = view.shape
        return Wide(name, rows, columns, view.dtype.itemsize, first, finish)


def _nothing(tensors: tuple[torch.Tensor, ...]) -> None:
    """Until the targets are known."""
