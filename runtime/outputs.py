"""What a step hands out: each output cut to its real rows, as a copy or borrowed.

A graph's outputs lie at fixed addresses and hold the padded size. Which dimension of an output follows which named size is found
by running the callable on fake tensors with one size changed at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from runtime.arena import Dim, InputSpec
from runtime.graph import CaptureError

OutputDims = list[dict[int, Dim] | None]
"""For each output leaf: its dynamic dimensions; None for a leaf that is not a tensor."""


class StaleOutputError(RuntimeError):
    """A borrowed output was used after a later replay had overwritten it."""


class Borrowed(torch.Tensor):
    """A graph's own output memory. Using it after a later replay of the step has overwritten it raises StaleOutputError."""

    _is_stale: Callable[[], bool]

    @classmethod
    def over(cls, tensor: torch.Tensor, is_stale: Callable[[], bool]) -> Borrowed:
        borrowed = tensor.as_subclass(cls)
        borrowed._is_stale = is_stale
        return borrowed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lent = list(_borrowed((args, kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            if any(t._is_stale() for t in lent):
                raise StaleOutputError(
                    f"{getattr(func, '__name__', func)}: this borrowed output was overwritten by a later step of the same graph; "
                    "clone it before the next call, or make the module with borrow=False"
                )
            result = func(*args, **(kwargs or {}))
            # a view is as short-lived as what it looks at
            bases = {t.untyped_storage()._cdata: t._is_stale for t in lent}

            def lend(t: torch.Tensor) -> torch.Tensor:
                is_stale = bases.get(t.untyped_storage()._cdata)
                return t if is_stale is None else Borrowed.over(t.as_subclass(torch.Tensor), is_stale)

            return pytree.tree_map_only(torch.Tensor, lend, result)


def _borrowed(tree: Any) -> Iterator[Borrowed]:
    if isinstance(tree, Borrowed):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _borrowed(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _borrowed(item)


def probe_outputs(
    call: Callable[[Mapping[str, torch.Tensor]], Any],
    specs: Mapping[str, InputSpec],
    device: torch.device,
    largest: Mapping[str, int],
    observe: Callable[[], tuple[Any, Mapping[str, int]]],
) -> OutputDims:
    """The dynamic dimensions of every output. call: runs the callable on tensors by name.

    observe: makes a real run and gives its outputs and sizes, for a callable with an op that has no fake implementation; then a
    dimension is taken for the size that it equals. Raises CaptureError for an output that padding would scramble.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Sizes that differ from each other and from most constants, so that a changed dimension names its size.
    base = dict(zip(largest, itertools.count(7, 4), strict=False))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():

            def shapes(sizes: Mapping[str, int]) -> list[tuple[int, ...] | None]:
                made = {n: torch.empty(s.sized(sizes), dtype=s.dtype, device=device) for n, s in specs.items()}
                return [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in pytree.tree_leaves(call(made))]

            first = shapes(base)
            grown = {name: shapes({**base, name: base[name] + 2}) for name in base}
    except Exception as error:
        return _by_value(*observe(), error)
    dims: OutputDims = []
    for i, shape in enumerate(first):
        if shape is None:
            dims.append(None)
            continue
        found: dict[int, Dim] = {}
        for name, others in grown.items():
            other = others[i]
            if other is None or len(other) != len(shape):
                raise CaptureError(f"output {i}: its rank changes with {name}, so it cannot be cut to the real rows")
            for axis, (small, big) in enumerate(zip(shape, other, strict=True)):
                if big == small:
                    continue
                if big - small != 2 or axis in found or small < base[name]:
                    raise CaptureError(
                        f"output {i}: dimension {axis} is {small} at {base[name]} {name} and {big} at {base[name] + 2}; only an output "
                        f"with one row for each of {name} can be cut to the real rows. Reshape it so, or return it from outside the module"
                    )
                found[axis] = Dim(name, small - base[name])
        dims.append(found)
    return dims


def _by_value(outputs: Any, sizes: Mapping[str, int], error: Exception) -> OutputDims:
    dims: OutputDims = []
    for i, leaf in enumerate(pytree.tree_leaves(outputs)):
        if not isinstance(leaf, torch.Tensor):
            dims.append(None)
            continue
        found: dict[int, Dim] = {}
        for axis, value in enumerate(leaf.shape):
            names = [name for name, size in sizes.items() if size == value and axis == 0]
            if len(names) > 1:
                raise CaptureError(
                    f"output {i}: dimension {axis} is {value}, which could be any of {names}, and the module does not run on fake tensors "
                    f"({type(error).__name__}: {error}); register a fake implementation of its ops, or warm up with sizes that differ"
                ) from error
            if names:
                found[axis] = Dim(names[0])
        dims.append(found)
    return dims


def cut_to_real(outputs: Any, dims: OutputDims, real: Mapping[str, int]) -> Any:
    """Views of the outputs' real rows, in the same structure."""
    leaves, spec = pytree.tree_flatten(outputs)
    for i, (leaf, found) in enumerate(zip(leaves, dims, strict=True)):
        if found:
            for axis, dim in found.items():
                leaf = leaf.narrow(axis, 0, real[dim.name] + dim.extra)
            leaves[i] = leaf
    return pytree.tree_unflatten(leaves, spec)
