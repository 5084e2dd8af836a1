"""Step inputs at fixed addresses: one buffer for each input at its largest size, sliced; tails hold the padding value.

All inputs lie in one block of device memory, so one host-to-device copy fills them: the caller writes into numpy views of a
staging buffer (``host``), then ``upload`` completes the tails and copies the used prefix (runtime/staging.py). Inputs that are
already on the device are copied one by one (``load``).

At every replay the tail of an input, its rows past the real count up to the captured size, holds exactly the declared value:
a number, or with ``"last"`` the last real row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from runtime.inputs import Dim, InputSpec, as_tensor, cut, tails
from runtime.staging import Layout, Part, Staging

_ALIGN = 256  # bytes; what the device allocator gives, and TMA and vector loads want at least 16
_MAX_VIEWS = 4096  # combinations of sizes remembered; mixed batches come in many
_UNKNOWN = 1 << 60  # rows that may not hold the padding: all of them


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
        self.specs = {s.name: s for s in sorted(specs, key=lambda s: s.nbytes(largest))}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, spec in self.specs.items():
            self._offsets[name] = end
            end += -(-spec.nbytes(largest) // _ALIGN) * _ALIGN
        self._size_names = list(self.largest)
        with torch.inference_mode(False):
            self._block = torch.zeros(max(end, _ALIGN), dtype=torch.uint8, device=device)
        self.device = self._block.device  # with its index
        self.staging = Staging(self.specs, self.names, self._offsets, self.largest, self._block)
        self.hand_out, self.send = self.staging.hand_out, self.staging.send
        """``host`` for a layout, as tensors too; and ``upload`` of what was then written, for the same layout."""
        self._views: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        # Rows from _dirty[name] on hold the padding value already; unless a packed copy has put there what a staging buffer held.
        self._dirty = {name: self._rows(name) for name in self.specs}

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def _key(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self._size_names])

    def _rows(self, name: str) -> int:
        spec = self.specs[name]
        return spec.sized(self.largest)[0] if spec.shape else 0

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
                self._views[key] = {name: cut(self._block, self._offsets[name], self.specs[name], sizes) for name in self.names}
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
        ends = [self._offsets[name] + view.nbytes for name, view in views.items() if view.numel()]
        heads = {name: spec.real_part(views[name], real) for name, spec in self.specs.items()}
        used = {name: heads[name].shape[0] for name, spec in self.specs.items() if spec.rows_of is not None}
        parts: list[Part | None] = [None] * self.staging.ring.size
        return Layout(dict(real), dict(padded), views, heads, used, max(ends, default=0), self._key(real), parts)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is that of the inputs."""
        return tensor.untyped_storage().data_ptr() == self._block.data_ptr()

    def real_part(self, name: str, view: torch.Tensor, real: Mapping[str, int]) -> torch.Tensor:
        """The part of an input's padded view that holds real values."""
        return self.specs[name].real_part(view, real)

    # -- filling from the host ------------------------------------------------------------------------------------------------

    def host(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Numpy arrays of the real sizes to write the next step's inputs into; then call ``upload`` with the same sizes.

        Waits until the copy that last used this staging buffer is done. bfloat16 and float8 appear as their bits, uint16 and uint8.
        """
        return self.hand_out(self.layout(real, padded)).heads

    def as_tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copies of what was written into ``host(…)``, as tensors on the host."""
        return {name: as_tensor(array.copy(), self.specs[name].dtype) for name, array in arrays.items()}

    def upload(self, real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Complete the tails of what was written into ``host(…)`` and copy it to the device, in one copy.

        Returns the device views at the padded sizes. Does not wait for the copy.
        """
        layout = self.layout(real, padded)
        self.send(layout)
        return layout.views

    # -- filling from tensors -------------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, torch.Tensor], real: Mapping[str, int], padded: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Copy a step's tensors (at the real sizes) in and complete the tails. Returns the device views at the padded sizes.

        Host tensors go to another device in one packed copy. A value that is the arena's own memory already is not copied.
        """
        layout = self.layout(real, padded)
        names = list(values)
        if self.device.type == "cuda":
            packed = [name for name, value in values.items() if value.is_cpu]
            if packed:
                self.pack(packed, [values[name] for name in packed], layout)
            names = [name for name, value in values.items() if not value.is_cpu]
        self.copy(names, [values[name] for name in names], layout)
        return layout.views

    def pack(self, names: Sequence[str], values: Sequence[torch.Tensor], layout: Layout) -> None:
        """One copy for these inputs, which are on the host. The other inputs are overwritten: ``copy`` them after it."""
        heads = self.hand_out(layout).tensors
        torch._foreach_copy_([heads[name] for name in names], list(values))
        self.send(layout)

    def copy(self, names: Sequence[str], values: Sequence[torch.Tensor], layout: Layout) -> None:
        """Each input by itself, and its tails."""
        if self.staging.overwritten:
            self._dirty.update(dict.fromkeys(layout.used, _UNKNOWN))
            self.staging.overwritten = False
        for name, value in zip(names, values, strict=True):
            head = layout.heads[name]
            if value.data_ptr() != head.data_ptr():
                head.copy_(value, non_blocking=True)
            elif value.stride() != head.stride():  # the same memory laid out for another size: read it all before writing
                head.copy_(value.clone())
            self._fill_tails(name, layout)

    def _fill_tails(self, name: str, layout: Layout) -> None:
        used = layout.used.get(name)
        if used is None:
            for tail in tails(self.specs[name], layout.views[name], layout.real):
                tail.fill()
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
            for tail in tails(replace(self.specs[name], pad=pad), self.views(padded)[name], real):
                tail.fill()
        self.touched(names)
