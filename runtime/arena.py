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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

_ALIGN = 256  # bytes; what the device allocator gives, and TMA and vector loads want at least 16
_MAX_VIEWS = 1024  # sets of views remembered; steps that run eager come in any combination of sizes
_NUMPY = {
    torch.bool: np.bool_, torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32,
    torch.int64: np.int64, torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64,
    torch.bfloat16: np.uint16,  # numpy has none: its bits
}  # fmt: skip


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
    """Where an input of one padded size may have a tail: along ``axis``, from ``size + extra`` on, up to ``stop``."""

    axis: int
    size: str
    extra: int
    stop: int


@dataclass
class _Input:
    """One input at one set of padded sizes: its device view, and its tails."""

    name: str
    view: torch.Tensor
    tails: list[_Tail]
    pad: Any
    rows_only: bool
    """Dynamic in its first dimension alone and padded with a number: then its tail can be tracked."""


@dataclass
class _Staging:
    """A host buffer and the event after which it may be written again."""

    block: torch.Tensor
    bytes: np.ndarray
    event: torch.cuda.Event | None
    arrays: dict[tuple[int, ...], dict[str, np.ndarray]] = field(default_factory=dict)


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
        with torch.inference_mode(False):
            self._block = torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
            self._staging = [self._make_staging(max(end, 1)) for _ in range(2)]
        self._turn = 0
        self._views: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        self._inputs: dict[tuple[int, ...], dict[str, _Input]] = {}
        # Rows from _dirty[name] on hold the padding value already.
        self._dirty = {name: self._rows(name) for name in self.specs}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def _make_staging(self, nbytes: int) -> _Staging:
        on_cuda = self.device.type == "cuda"
        block = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        return _Staging(block, block.numpy(), torch.cuda.Event() if on_cuda else None)

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self._size_names])

    def _rows(self, name: str) -> int:
        spec = self.specs[name]
        return spec.sized(self.largest)[0] if spec.shape else 0

    def _bytes_of(self, name: str, sizes: Mapping[str, int]) -> slice:
        spec, start = self.specs[name], self._offsets[name]
        return slice(start, start + _nbytes(spec, sizes))

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
                self._views[key] = {
                    name: self._block[self._bytes_of(name, sizes)].view(self.specs[name].dtype).view(self.specs[name].sized(sizes))
                    for name in self.names
                }
        return self._views[key]

    def _inputs_at(self, padded: Mapping[str, int]) -> dict[str, _Input]:
        key = self._key(padded)
        if key not in self._inputs:
            views = self.views(padded)
            made = {}
            for name, spec in self.specs.items():
                dims = [(axis, d) for axis, d in enumerate(spec.shape) if isinstance(d, Dim)]
                tails = [_Tail(axis, d.name, d.extra, views[name].shape[axis]) for axis, d in dims]
                rows_only = [t.axis for t in tails] == [0] and spec.pad != "last"
                made[name] = _Input(name, views[name], tails, spec.pad, rows_only)
            self._inputs[key] = made
        return self._inputs[key]

    # -- filling from the host ------------------------------------------------------------------------------------------------

    def host(self, padded: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Numpy views, at the padded sizes of the next step, to write its real values into; ``upload`` completes them.

        Waits until the copy that last used this staging buffer is done. bfloat16 inputs appear as their bits, uint16.
        """
        staging = self._staging[self._turn]
        if staging.event is not None:
            staging.event.synchronize()
        key = self._key(padded)
        if key not in staging.arrays:
            staging.arrays[key] = {
                name: staging.bytes[self._bytes_of(name, padded)].view(_NUMPY[spec.dtype]).reshape(spec.sized(padded))
                for name, spec in self.specs.items()
            }
        return staging.arrays[key]

    def upload(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Complete the tails of what was written into ``host(padded)`` and copy it to the device, in one copy.

        Returns the device views at the padded sizes. Does not wait for the copy.
        """
        staging = self._staging[self._turn]
        arrays = staging.arrays[self._key(padded)]
        end = 0
        for name, input_ in self._inputs_at(padded).items():
            array = arrays[name]
            for tail in input_.tails:
                used = real[tail.size] + tail.extra
                if used < tail.stop:
                    _fill_numpy(array, tail.axis, used, self.specs[name])
            self._dirty[name] = self._rows(name)  # past the padded size now lies what the staging buffer held there
            if array.nbytes:
                end = self._offsets[name] + array.nbytes
        self._block[:end].copy_(staging.block[:end], non_blocking=True)
        if staging.event is not None:
            staging.event.record()
        self._turn ^= 1
        return self.views(padded)

    # -- filling from tensors -------------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Copy a step's tensors (at the real sizes) in and complete the tails. Returns the device views at the padded sizes.

        Host tensors go to another device in one packed copy. A value that is the arena's own memory already is not copied.
        """
        if self.device.type == "cuda" and any(value.device.type == "cpu" for value in values.values()):
            values = self._load_from_host(values, real, padded)
        inputs = self._inputs_at(padded)
        for name, value in values.items():
            input_ = inputs[name]
            head = self.real_part(name, input_.view, real)
            if value.data_ptr() != head.data_ptr():
                head.copy_(value, non_blocking=True)
            elif value.stride() != head.stride():  # the same memory laid out for another size: read it all before writing
                head.copy_(value.clone())
            self._fill_tails(input_, real)
        return self.views(padded)

    def _load_from_host(
        self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """The packed copy. Returns the values that are on the device and still to be copied."""
        arrays = self.host(padded)
        for name, value in values.items():
            if value.device.type == "cpu":
                source = value.view(torch.uint16) if value.dtype is torch.bfloat16 else value
                arrays[name][tuple([slice(n) for n in value.shape])] = source.numpy()
        self.upload(real, padded)
        return {name: value for name, value in values.items() if value.device.type != "cpu"}

    def real_part(self, name: str, view: torch.Tensor, real: Mapping[str, int]) -> torch.Tensor:
        """The part of an input's padded view that holds real values."""
        for axis, dim in enumerate(self.specs[name].shape):
            if isinstance(dim, Dim):
                view = view.narrow(axis, 0, real[dim.name] + dim.extra)
        return view

    def _fill_tails(self, input_: _Input, real: Mapping[str, int]) -> None:
        name = input_.name
        if input_.rows_only:
            # A step of the same size as the one before has nothing to fill.
            used, dirty = real[input_.tails[0].size] + input_.tails[0].extra, self._dirty[name]
            if used < dirty:
                self.views(self.largest)[name][used:dirty].fill_(input_.pad)
            self._dirty[name] = used
            return
        for tail in input_.tails:
            used = real[tail.size] + tail.extra
            if used < tail.stop:
                _fill_torch(input_.view, tail.axis, used, self.specs[name])
        self._dirty[name] = self._rows(name)

    # -- checks ---------------------------------------------------------------------------------------------------------------

    def touched(self, names: Iterable[str]) -> None:
        """Somebody else wrote into these buffers: their tails must be filled again, whatever the next step's size."""
        for name in names:
            self._dirty[name] = self._rows(name)

    def poison_tails(self, real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Put NaN into the tails of the float inputs. Whatever real row changes by this had read padding."""
        for name, input_ in self._inputs_at(padded).items():
            if self.specs[name].dtype.is_floating_point:
                self._refill(input_, real, math.nan)

    def shake_tails(self, names: Iterable[str], real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Other padding than declared into the integer inputs of these names: the last real row, again and again."""
        for name in names:
            if not self.specs[name].dtype.is_floating_point:
                self._refill(self._inputs_at(padded)[name], real, "last")

    def _refill(self, input_: _Input, real: Mapping[str, int], pad: float | Literal["last"]) -> None:
        for tail in input_.tails:
            used = real[tail.size] + tail.extra
            if used < tail.stop:
                _fill_torch(input_.view, tail.axis, used, replace(self.specs[input_.name], pad=pad))
        self.touched([input_.name])


def _nbytes(spec: InputSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(spec.sized(sizes)) * spec.dtype.itemsize


def _fill_numpy(array: np.ndarray, axis: int, used: int, spec: InputSpec) -> None:
    before = (slice(None),) * axis
    if spec.pad == "last" and used:
        array[(*before, slice(used, None))] = array[(*before, slice(used - 1, used))]
    elif spec.dtype is torch.bfloat16:
        array[(*before, slice(used, None))] = torch.tensor(_number(spec), dtype=torch.bfloat16).view(torch.uint16).item()
    else:
        array[(*before, slice(used, None))] = _number(spec)


def _fill_torch(view: torch.Tensor, axis: int, used: int, spec: InputSpec) -> None:
    tail = view.narrow(axis, used, view.shape[axis] - used)
    if spec.pad == "last" and used:
        tail.copy_(view.narrow(axis, used - 1, 1).expand_as(tail))
    else:
        tail.fill_(_number(spec))


def _number(spec: InputSpec) -> float | int:
    """The padding value; with "last" and no row at all there is nothing to repeat."""
    return 0 if isinstance(spec.pad, str) else spec.pad
