"""Step inputs at fixed addresses: one buffer for each input at its largest size, sliced; tails hold the padding value.

All inputs lie in one block of device memory, so one host-to-device copy fills them: the caller writes into numpy views of a
staging buffer (``host``), then ``upload`` completes the tails and copies the used prefix. There are two staging buffers, each
with an event, so the next step may be written while the copy of this one is still under way. Inputs that are already on the
device are copied one by one (``load``).

At every replay the tail of an input, its rows past the real count up to the captured size, holds exactly the declared value:
a number, or with ``"last"`` the last real row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

_ALIGN = 256  # bytes; what the device allocator gives, and TMA and vector loads want at least 16
_MAX_VIEWS = 4096  # combinations of sizes remembered; mixed batches come in many
_UNKNOWN = 1 << 60  # rows that may not hold the padding: all of them


class Dim(NamedTuple):
    """A named size, or one more than it: ``Dim("seqs", 1)`` is ``seqs + 1``."""

    name: str
    extra: int = 0

    @classmethod
    def parse(cls, text: str) -> Dim:
        name, plus, extra = text.partition("+")
        if not name.strip().isidentifier() or (plus and not extra.strip().isdigit()):
            raise ValueError(f'dynamic: expected a size name such as "tokens" or "seqs+1", got {text!r}')
        return cls(name.strip(), int(extra) if plus else 0)

    def __str__(self) -> str:
        return f"{self.name}+{self.extra}" if self.extra else self.name


@dataclass(frozen=True)
class InputSpec:
    """One tensor input. shape: ints, and ``Dim`` where it follows a named size."""

    name: str
    shape: tuple[int | Dim, ...]
    dtype: torch.dtype
    pad: float | int | Literal["last"] = 0

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[d.name] + d.extra if isinstance(d, Dim) else d for d in self.shape)


@dataclass
class _Tail:
    """The rows of an input past the real ones, at one pair of real and padded sizes. last: the row to repeat, or None."""

    name: str
    view: torch.Tensor
    value: float | int
    last: torch.Tensor | None


@dataclass
class _Staged:
    """The same in a staging buffer, as numpy arrays: what to write, what to fill with what, which bytes to copy.

    tails: with a number, which stays there; repeats: with the last real row, at each step.
    """

    heads: dict[str, np.ndarray]
    tails: list[tuple[np.ndarray, Any]]
    repeats: list[tuple[np.ndarray, np.ndarray]]
    source: torch.Tensor
    target: torch.Tensor


@dataclass
class Layout:
    """Everything about one pair of real and padded sizes, so that a step in it computes nothing."""

    views: dict[str, torch.Tensor]
    heads: dict[str, torch.Tensor]
    tails: dict[str, list[_Tail]]
    used: dict[str, int]
    """Real rows of the inputs whose tail is tracked: dynamic in the first dimension alone, and padded with a number."""
    unfilled: dict[str, int]
    """The same inputs: none of their rows may be taken as padding."""
    staged: list[_Staged]


class Arena:
    """specs: the inputs. largest: the largest value of every named size. device: where the buffers live."""

    def __init__(self, specs: Iterable[InputSpec], largest: Mapping[str, int], device: torch.device) -> None:
        self.largest = dict(largest)
        self.device = device
        specs = list(specs)
        missing = sorted({d.name for s in specs for d in s.shape if isinstance(d, Dim)} - set(largest))
        if missing:
            raise ValueError(f"largest: expected the largest value of {missing}, got only {sorted(largest)}")
        self.names = [s.name for s in specs]
        # Small inputs first: a step copies the prefix that it uses, and the last input alone may be cut short.
        self.specs = {s.name: s for s in sorted(specs, key=lambda s: _nbytes(s, largest))}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, spec in self.specs.items():
            self._offsets[name] = end
            end += -(-_nbytes(spec, largest) // _ALIGN) * _ALIGN
        self._size_names = list(self.largest)
        on_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._block = torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
            self._staging = [torch.zeros(max(end, 1), dtype=torch.uint8, device="cpu", pin_memory=on_cuda) for _ in range(2)]
        self.device = self._block.device  # with its index
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in range(2)]
        self._stream: torch.cuda.Stream | None = None  # the newest copy's
        self._turn = 0
        self._tails_in: list[_Staged | None] = [None, None]  # whose tails lie in each staging buffer
        self.handed_out = 0
        """How often a staging buffer was handed out: what had been got before is no longer the next step's."""
        self._views: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        # Rows from _dirty[name] on hold the padding value already.
        self._dirty = {name: self._rows(name) for name in self.specs}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self._size_names])

    def _rows(self, name: str) -> int:
        spec = self.specs[name]
        return spec.sized(self.largest)[0] if spec.shape else 0

    def _bytes_of(self, name: str, sizes: Mapping[str, int]) -> slice:
        start = self._offsets[name]
        return slice(start, start + _nbytes(self.specs[name], sizes))

    def views(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The inputs at these sizes, contiguous, in the order of the specs given. The addresses never change."""
        key = self._key(sizes)
        if key not in self._views:
            for name, value in zip(self._size_names, key, strict=True):
                if value > self.largest[name]:
                    raise ValueError(f"{name}: {value} is above the arena's largest, {self.largest[name]}")
            if len(self._views) > _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                self._views[key] = {name: _cut(self._block, self._bytes_of(name, sizes), self.specs[name], sizes) for name in self.names}
        return self._views[key]

    def layout(self, real: Mapping[str, int], padded: Mapping[str, int]) -> Layout:
        """What ``hand_out`` and ``send`` take, for a caller that keeps it from step to step."""
        key = self._key(real) + self._key(padded)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) > _MAX_VIEWS:
                self._layouts.clear()
            with torch.inference_mode(False):
                layout = self._layouts[key] = self._make_layout(real, padded)
        return layout

    def _make_layout(self, real: Mapping[str, int], padded: Mapping[str, int]) -> Layout:
        views = self.views(padded)
        end = max((self._bytes_of(name, padded).stop for name in self.specs if views[name].numel()), default=0)
        heads, tails, used = {}, {}, {}
        staged = [_Staged({}, [], [], block[:end], self._block[:end]) for block in self._staging]
        for name, spec in self.specs.items():
            heads[name], tails[name] = self.real_part(name, views[name], real), _tails(spec, views[name], real)
            if spec.pad != "last" and [axis for axis, d in enumerate(spec.shape) if isinstance(d, Dim)] == [0]:
                used[name] = heads[name].shape[0]
            for block, part in zip(self._staging, staged, strict=True):
                view = _cut(block, self._bytes_of(name, padded), spec, padded)
                part.heads[name] = _numpy(self.real_part(name, view, real))
                for tail in _tails(spec, view, real):
                    if tail.last is not None:
                        part.repeats.append((_numpy(tail.view), _numpy(tail.last)))
                    elif spec.dtype is torch.bfloat16:
                        bits = _numpy(torch.tensor(tail.value, dtype=spec.dtype, device="cpu"))
                        part.tails.append((_numpy(tail.view), bits.item()))
                    else:
                        part.tails.append((_numpy(tail.view), tail.value))
        return Layout(views, heads, tails, used, dict.fromkeys(used, _UNKNOWN), staged)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is that of the inputs."""
        return tensor.untyped_storage().data_ptr() == self._block.data_ptr()

    def real_part(self, name: str, view: torch.Tensor, real: Mapping[str, int]) -> torch.Tensor:
        """The part of an input's padded view that holds real values."""
        for axis, dim in enumerate(self.specs[name].shape):
            if isinstance(dim, Dim):
                view = view.narrow(axis, 0, real[dim.name] + dim.extra)
        return view

    # -- filling from the host ------------------------------------------------------------------------------------------------

    def host(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Numpy arrays of the real sizes to write the next step's inputs into; then call ``upload`` with the same sizes.

        Waits until the copy that last used this staging buffer is done. bfloat16 inputs appear as their bits, uint16.
        """
        return self.hand_out(self.layout(real, padded))

    def hand_out(self, layout: Layout) -> dict[str, np.ndarray]:
        """``host`` for a layout; then call ``send`` with it."""
        turn = self._turn
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        self.handed_out += 1
        staged = layout.staged[turn]
        if self._tails_in[turn] is not staged:  # what is written now may lie over them
            self._tails_in[turn] = None
        return staged.heads

    def as_tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copies of what was written into ``host(…)``, as tensors on the host."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {name: t.view(torch.bfloat16) if self.specs[name].dtype is torch.bfloat16 else t for name, t in tensors.items()}

    def upload(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Complete the tails of what was written into ``host(…)`` and copy it to the device, in one copy.

        Returns the device views at the padded sizes. Does not wait for the copy.
        """
        return self.send(self.layout(real, padded))

    def send(self, layout: Layout) -> dict[str, torch.Tensor]:
        """``upload`` of what was written into ``hand_out`` of the same layout."""
        turn = self._turn
        staged = layout.staged[turn]
        if self._tails_in[turn] is not staged:
            for tail, fill in staged.tails:
                tail[...] = fill
            self._tails_in[turn] = staged
        for tail, last in staged.repeats:
            tail[...] = last
        staged.target.copy_(staged.source, non_blocking=True)
        event = self._copied[turn]
        if event is not None:
            event.record(self._current_stream())
        self._turn = turn ^ 1
        self._dirty.update(layout.unfilled)  # past the padded rows now lies what the staging buffer held there
        return layout.views

    def _current_stream(self) -> torch.cuda.Stream:
        """Of the arena's device, as the current device may be another one. The object of the step before while that is it: making one
        takes longer than recording an event."""
        stream = self._stream
        if stream is None or stream.cuda_stream != torch._C._cuda_getCurrentRawStream(self.device.index):
            stream = self._stream = torch.cuda.current_stream(self.device)
        return stream

    # -- filling from tensors -------------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Copy a step's tensors (at the real sizes) in and complete the tails. Returns the device views at the padded sizes.

        Host tensors go to another device in one packed copy. A value that is the arena's own memory already is not copied.
        """
        layout = self.layout(real, padded)
        if self.device.type == "cuda" and any([value.is_cpu for value in values.values()]):
            values = self._load_from_host(values, layout)
        for name, value in values.items():
            head = layout.heads[name]
            if value.data_ptr() != head.data_ptr():
                head.copy_(value, non_blocking=True)
            elif value.stride() != head.stride():  # the same memory laid out for another size: read it all before writing
                head.copy_(value.clone())
            self._fill_tails(name, layout)
        return layout.views

    def _load_from_host(self, values: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
        """The packed copy. Returns the values that are on the device and still to be copied."""
        arrays = self.hand_out(layout)
        rest = {}
        for name, value in values.items():
            if value.is_cpu:
                arrays[name][...] = _numpy(value)
            else:
                rest[name] = value
        self.send(layout)
        return rest

    def _fill_tails(self, name: str, layout: Layout) -> None:
        used = layout.used.get(name)
        if used is None:
            for tail in layout.tails[name]:
                tail.view.copy_(tail.last.expand_as(tail.view)) if tail.last is not None else tail.view.fill_(tail.value)
        elif used != self._dirty[name]:
            # A step of the same size as the one before has nothing to fill.
            if used < self._dirty[name]:
                value = self.specs[name].pad
                assert not isinstance(value, str)
                self.views(self.largest)[name][used : self._dirty[name]].fill_(value)
            self._dirty[name] = used

    # -- checks ---------------------------------------------------------------------------------------------------------------

    def touched(self, names: Iterable[str]) -> None:
        """Somebody else wrote into these buffers: their tails must be filled again, whatever the next step's size."""
        for name in names:
            self._dirty[name] = _UNKNOWN

    def poison_tails(self, real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Put NaN into the tails of the float inputs. Whatever real row changes by this had read padding."""
        self._refill([n for n, s in self.specs.items() if s.dtype.is_floating_point], math.nan, real, padded)

    def shake_tails(self, names: Iterable[str], real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Other padding than declared into the integer inputs of these names: the last real row, again and again."""
        self._refill([n for n in names if not self.specs[n].dtype.is_floating_point], "last", real, padded)

    def _refill(self, names: Iterable[str], pad: float | Literal["last"], real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        for name in names:
            for tail in _tails(replace(self.specs[name], pad=pad), self.views(padded)[name], real):
                tail.view.copy_(tail.last.expand_as(tail.view)) if tail.last is not None else tail.view.fill_(tail.value)
        self.touched(names)


def _nbytes(spec: InputSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(spec.sized(sizes)) * spec.dtype.itemsize


def _cut(block: torch.Tensor, where: slice, spec: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    return block[where].view(spec.dtype).view(spec.sized(sizes))


def _tails(spec: InputSpec, view: torch.Tensor, real: Mapping[str, int]) -> list[_Tail]:
    """What lies past the real rows, along each dynamic dimension. With "last" and no row at all there is nothing to repeat: 0."""
    tails = []
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, Dim) and (used := real[dim.name] + dim.extra) < view.shape[axis]:
            last = view.narrow(axis, used - 1, 1) if spec.pad == "last" and used else None
            value = 0 if isinstance(spec.pad, str) else spec.pad
            tails.append(_Tail(spec.name, view.narrow(axis, used, view.shape[axis] - used), value, last))
    return tails


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
