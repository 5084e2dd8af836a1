"""Whether two strided tensors may share an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Extent(NamedTuple):
    """Where a tensor lies: the storage, and shape, strides and offset in elements of ``itemsize`` bytes."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int, number: Callable[[Any], int] = int) -> Extent:
        """number: turns a size, perhaps symbolic, into an int."""
        shape, stride = tuple(map(number, tensor.shape)), tuple(map(number, tensor.stride()))
        return cls(storage, shape, stride, number(tensor.storage_offset()), tensor.element_size())


def overlaps(a: Extent, b: Extent) -> bool:
    """Exact for equal strides that nest, as views of one buffer have (k and v in one cache); other pairs whose ranges of addresses
    meet count as overlapping."""
    if a.storage != b.storage or 0 in a.shape or 0 in b.shape:
        return False
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    if high_a <= low_b or high_b <= low_a:
        return False
    if a.itemsize != b.itemsize or len(a.shape) != len(b.shape):
        return True
    dims = [(s, r, n, m) for s, r, n, m in zip(a.stride, b.stride, a.shape, b.shape, strict=True) if max(n, m) > 1]
    if any(s != r for s, r, _, _ in dims):
        return True
    return _reaches(b.offset - a.offset, sorted(((s, n, m) for s, _, n, m in dims), reverse=True))


def may_overlap(a: torch.Tensor, b: torch.Tensor, storage: int) -> bool:
    """The same for two tensors of one storage whose sizes may be symbols. Tried at a few sizes: views of one buffer that a program
    slices by its sizes lie apart at all of them or at none."""
    for size in (1, 2, 7, 64):
        number = lambda s, size=size: s if isinstance(s, int) else int(s.node.expr.subs(dict.fromkeys(s.node.expr.free_symbols, size)))
        if overlaps(Extent.of(a, storage, number), Extent.of(b, storage, number)):
            return True
    return False


def _range(a: Extent) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(a.shape, a.stride, strict=True))
    return a.offset * a.itemsize, (a.offset + last + 1) * a.itemsize


def _reaches(delta: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether index differences d, one per (stride, size of a, size of b), give sum(d · stride) == delta."""
    if not dims:
        return delta == 0
    (stride, n, m), rest = dims[0], dims[1:]
    if stride <= sum((max(k, j) - 1) * s for s, k, j in rest):
        return True  # strides do not nest: call it an overlap rather than search
    # Nested strides leave two candidates for each difference.
    return any(1 - m <= d <= n - 1 and _reaches(delta - d * stride, rest) for d in (delta // stride, delta // stride + 1))
