"""What a step's inputs look like: named sizes, shapes that follow them, and what lies past the real rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch


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

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        return math.prod(self.sized(sizes)) * self.dtype.itemsize

    @property
    def rows_of(self) -> Dim | None:
        """The size that its rows follow, if no other dimension follows one and padding is a number: rows past the real ones then hold
        the same at every size, so what was filled once stays filled. Else None."""
        dynamic = [axis for axis, dim in enumerate(self.shape) if isinstance(dim, Dim)]
        first = self.shape[0] if dynamic == [0] and self.pad != "last" else None
        return first if isinstance(first, Dim) else None

    def real_part(self, view: torch.Tensor, real: Mapping[str, int]) -> torch.Tensor:
        """The part of a padded view that holds real values."""
        for axis, dim in enumerate(self.shape):
            if isinstance(dim, Dim):
                view = view.narrow(axis, 0, real[dim.name] + dim.extra)
        return view


@dataclass
class Tail:
    """The rows of an input past the real ones, at one pair of real and padded sizes. last: the row to repeat, or None."""

    view: torch.Tensor
    value: float | int
    last: torch.Tensor | None

    def fill(self) -> None:
        self.view.copy_(self.last.expand_as(self.view)) if self.last is not None else self.view.fill_(self.value)


def cut(block: torch.Tensor, start: int, spec: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    """The input at these sizes, over the block's bytes from ``start`` on."""
    return block[start : start + spec.nbytes(sizes)].view(spec.dtype).view(spec.sized(sizes))


def tails(spec: InputSpec, view: torch.Tensor, real: Mapping[str, int]) -> list[Tail]:
    """What lies past the real rows, along each dynamic dimension. With "last" and no row at all there is nothing to repeat: 0."""
    found = []
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, Dim) and (used := real[dim.name] + dim.extra) < view.shape[axis]:
            last = view.narrow(axis, used - 1, 1) if spec.pad == "last" and used else None
            value = 0 if isinstance(spec.pad, str) else spec.pad
            found.append(Tail(view.narrow(axis, used, view.shape[axis] - used), value, last))
    return found


# dtypes that numpy lacks, and what holds their bits
_BITS = {torch.bfloat16: torch.uint16} | {
    dtype: torch.uint8 for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory; bfloat16 and the float8 dtypes as their bits."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The same memory, from the array of ``as_numpy`` of a tensor of this dtype."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in _BITS else tensor


def fill_value(value: float | int, dtype: torch.dtype) -> float | int:
    """What to write into the array of ``as_numpy`` for this value."""
    if dtype not in _BITS:
        return value
    return int(as_numpy(torch.tensor([value], dtype=dtype, device="cpu"))[0])
