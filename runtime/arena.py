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

    @property
    def dynamic(self) -> list[int]:
        return [i for i, d in enumerate(self.shape) if isinstance(d, Dim)]


@dataclass
class _Staging:
    """A host buffer and the event after which it may be written again."""

    block: torch.Tensor
    bytes: np.ndarray
    event: torch.cuda.Event | None
    views: dict[tuple[int, ...], dict[str, np.ndarray]] = field(default_factory=dict)


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
        self._dirty: dict[str, int] = {name: spec.sized(largest)[0] if spec.shape else 0 for name, spec in self.specs.items()}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def _make_staging(self, nbytes: int) -> _Staging:
        on_cuda = self.device.type == "cuda"
        block = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        return _Staging(block, block.numpy(), torch.cuda.Event() if on_cuda else None)

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self._size_names])

    def views(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The inputs at these sizes, contiguous, in the order of the specs given. The addresses never change."""
        key = self._key(sizes)
        if key not in self._views:
            if len(self._views) > _MAX_VIEWS:
                self._views.clear()
            for name, value in zip(self._size_names, key, strict=True):
                if value > self.largest[name]:
                    raise ValueError(f"{name}: {value} is above the arena's largest, {self.largest[name]}")
            with torch.inference_mode(False):
                made = {name: self._view(self.specs[name], sizes) for name in self.names}
            self._views[key] = made
        return self._views[key]

    def _view(self, spec: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
        shape, start = spec.sized(sizes), self._offsets[spec.name]
        nbytes = math.prod(shape) * spec.dtype.itemsize
        return self._block[start : start + nbytes].view(spec.dtype).view(shape)

    # -- filling from the host ------------------------------------------------------------------------------------------------

    def host(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Numpy views to write a step's inputs into, at the *padded* sizes of the step; write the real prefix, ``upload`` does
        the rest. Waits until the copy that last used this staging buffer is done.
        """
        staging = self._staging[self._turn]
        if staging.event is not None:
            staging.event.synchronize()
        key = self._key(sizes)
        if key not in staging.views:
            made = {}
            for name in self.names:
                spec = self.specs[name]
                shape, start = spec.sized(sizes), self._offsets[name]
                nbytes = math.prod(shape) * spec.dtype.itemsize
                made[name] = staging.bytes[start : start + nbytes].view(_NUMPY[spec.dtype]).reshape(shape)
            staging.views[key] = made
        return staging.views[key]

    def upload(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Complete the tails of what was written into ``host(padded)`` and copy it to the device in one copy.

        Returns the device views at the padded sizes. Does not wait for the copy.
        """
        staging = self._staging[self._turn]
        arrays = staging.views[self._key(padded)]
        end = 0
        for name, spec in self.specs.items():
            array = arrays[name]
            for axis in spec.dynamic:
                dim = spec.shape[axis]
                used = real[dim.name] + dim.extra  # type: ignore[union-attr]
                if used < array.shape[axis]:
                    _fill_numpy(array, axis, used, spec)
            if array.nbytes:
                end = self._offsets[name] + array.nbytes
            if spec.dynamic == [0]:
                used = real[spec.shape[0].name] + spec.shape[0].extra  # type: ignore[union-attr]
                self._dirty[name] = used if self._dirty[name] <= array.shape[0] else self._dirty[name]
        self._block[:end].copy_(staging.block[:end], non_blocking=True)
        if staging.event is not None:
            staging.event.record()
        self._turn ^= 1
        return self.views(padded)

    # -- filling from device tensors ------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Copy tensors (on any device, at the real sizes) in and complete the tails. A value that is the arena's own memory
        already is not copied. Returns the device views at the padded sizes.
        """
        if self.device.type == "cuda" and any(value.device.type == "cpu" for value in values.values()):
            values = self._upload_tensors(values, real, padded)
        views = self.views(padded)
        for name, value in values.items():
            head = self._head(name, views[name], real)
            if value.data_ptr() == head.data_ptr():
                if value.stride() == head.stride():
                    value = None
                else:  # the same memory laid out for another size: the copy would read what it has just written
                    value = value.clone()
            if value is not None:
                head.copy_(value, non_blocking=True)
            if self.specs[name].dynamic:
                self._fill_tail(name, self.specs[name], views[name], real)
        return views

    def _upload_tensors(
        self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Host tensors go through the staging buffer, in one copy. Returns the values that are on the device."""
        arrays = self.host(padded)
        for name, value in values.items():
            if value.device.type == "cpu":
                source = value.detach().view(torch.uint16) if value.dtype is torch.bfloat16 else value.detach()
                arrays[name][tuple(slice(n) for n in value.shape)] = source.numpy()
        self.upload(real, padded)
        return {name: value for name, value in values.items() if value.device.type != "cpu"}

    def _head(self, name: str, view: torch.Tensor, real: Mapping[str, int]) -> torch.Tensor:
        for axis in self.specs[name].dynamic:
            dim = self.specs[name].shape[axis]
            view = view.narrow(axis, 0, real[dim.name] + dim.extra)  # type: ignore[union-attr]
        return view

    def _fill_tail(self, name: str, spec: InputSpec, view: torch.Tensor, real: Mapping[str, int]) -> None:
        if spec.dynamic == [0] and spec.pad != "last":
            # Rows from `dirty` on hold the padding already: a step of the same size as the one before fills nothing.
            dim = spec.shape[0]
            used, dirty = real[dim.name] + dim.extra, self._dirty[name]  # type: ignore[union-attr]
            if used < dirty:
                self._rows(name, used, dirty).fill_(spec.pad)
            self._dirty[name] = used
            return
        for axis in spec.dynamic:
            dim = spec.shape[axis]
            used = real[dim.name] + dim.extra  # type: ignore[union-attr]
            if used < view.shape[axis]:
                _fill_torch(view, axis, used, spec)
        self._dirty[name] = self.largest_rows(name)

    def largest_rows(self, name: str) -> int:
        return self.specs[name].sized(self.largest)[0]

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.views(self.largest)[name][start:stop]

    def touched(self, names: Iterable[str]) -> None:
        """Somebody else wrote into these buffers: their tails must be filled again, whatever the next step's size."""
        for name in names:
            self._dirty[name] = self.largest_rows(name) if self.specs[name].shape else 0

    def poison_tails(self, real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Put NaN into the tails of the float inputs. Whatever real row changes by this had read padding."""
        for name, spec in self.specs.items():
            if spec.dtype.is_floating_point:
                view = self.views(padded)[name]
                for axis in spec.dynamic:
                    dim = spec.shape[axis]
                    view.narrow(axis, real[dim.name] + dim.extra, padded[dim.name] - real[dim.name]).fill_(math.nan)  # type: ignore[union-attr]
                self.touched([name])

    def shake_tails(self, names: Iterable[str], real: Mapping[str, int], padded: Mapping[str, int]) -> None:
        """Other padding than declared into the integer inputs of these names: the last real row, again and again."""
        for name in names:
            spec = self.specs[name]
            if not spec.dtype.is_floating_point:
                for axis in spec.dynamic:
                    dim = spec.shape[axis]
                    used = real[dim.name] + dim.extra  # type: ignore[union-attr]
                    if used < self.views(padded)[name].shape[axis]:
                        _fill_torch(self.views(padded)[name], axis, used, replace(spec, pad="last"))
                self.touched([name])

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """The input whose buffer the tensor starts in, if any."""
        offset = tensor.data_ptr() - self._block.data_ptr()
        if not 0 <= offset < self._block.nbytes:
            return None
        return max((name for name in self.specs if self._offsets[name] <= offset), key=lambda name: self._offsets[name])


def _nbytes(spec: InputSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(spec.sized(sizes)) * spec.dtype.itemsize


def _fill_numpy(array: np.ndarray, axis: int, used: int, spec: InputSpec) -> None:
    tail = (slice(None),) * axis + (slice(used, None),)
    if spec.pad == "last" and used:
        array[tail] = array[(slice(None),) * axis + (slice(used - 1, used),)]
    else:
        array[tail] = _numpy_value(spec)


def _numpy_value(spec: InputSpec) -> Any:
    if spec.dtype is torch.bfloat16:
        return torch.tensor(spec.pad, dtype=torch.bfloat16).view(torch.uint16).item()
    return 0 if spec.pad == "last" else spec.pad


def _fill_torch(view: torch.Tensor, axis: int, used: int, spec: InputSpec) -> None:
    tail = view.narrow(axis, used, view.shape[axis] - used)
    if spec.pad == "last" and used:
        tail.copy_(view.narrow(axis, used - 1, 1).expand_as(tail))
    else:
        tail.fill_(0 if spec.pad == "last" else spec.pad)
