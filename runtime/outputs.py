"""What a step hands out: each output cut to its real rows, as a copy or borrowed.

A graph's outputs lie at fixed addresses and hold the padded size. Which dimension of an output follows which named size is found
by running the callable on fake tensors with one size changed at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from runtime.graph import CaptureError
from runtime.inputs import Dim, InputSpec

OutputDims = list[dict[int, Dim] | None]
"""For each output leaf: its dynamic dimensions; None for a leaf that is not a tensor."""


class StaleOutputError(RuntimeError):
    """A borrowed output was used after a later replay had overwritten it."""


class Borrowed(torch.Tensor):
    """A graph's own output memory. Using it after a later replay raises StaleOutputError: graphs share their memory, so a step of
    another size overwrites it as well."""

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
                    f"{getattr(func, '__name__', func)}: this borrowed output may have been overwritten by a later step; "
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
    names: Sequence[str],
    samples: Sequence[Mapping[str, int]],
    run: Callable[[int], Any],
) -> tuple[OutputDims, tuple[str, ...], str]:
    """The dynamic dimensions of every output; the names that could not be told apart: a call in which these differ may not use a
    graph; and why a graph may only serve its own size, or "": an output that is no tensor (``x.shape[0]``) follows a size.

    call: runs the callable on tensors by name. names: the named sizes. First each size is changed by itself; a module that wants
    sizes to belong together (a decode step has one token a sequence) refuses that, then the samples' sizes are used.
    samples: sizes of representative steps. run: runs one of them for real, for a callable with an op without a fake implementation.
    Raises CaptureError for an output that padding would scramble.
    """
    # Sizes that differ from each other and from most constants, so that a changed dimension names its size.
    apart = dict(zip(names, itertools.count(7, 4), strict=False))
    attempts: list[tuple[Sequence[Mapping[str, int]], Callable[[int], Any] | None]] = [
        ([apart, *({**apart, name: apart[name] + 2} for name in names)], None),
        (samples, None),
        (samples, run),
    ]
    for sizes, real in attempts:
        try:
            with torch.no_grad() if real else _fake_mode():
                runs = [pytree.tree_leaves(real(i) if real else call(_empty(specs, device, at))) for i, at in enumerate(sizes)]
        except Exception:
            if real:
                raise
            continue
        if len({len(run) for run in runs}) > 1:
            raise CaptureError("outputs: their number changes with the sizes of the step, so they cannot be cut to the real rows")
        return *_dims([_shapes(run) for run in runs], sizes, names), _frozen_leaf(runs)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _fake_mode() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def _empty(specs: Mapping[str, InputSpec], device: torch.device, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return {n: torch.empty(s.sized(sizes), dtype=s.dtype, device=device) for n, s in specs.items()}


def _shapes(leaves: Sequence[Any]) -> list[tuple[int, ...] | None]:
    return [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in leaves]


def _frozen_leaf(runs: Sequence[Sequence[Any]]) -> str:
    for i, leaves in enumerate(zip(*runs, strict=True)):
        values = {(type(leaf), repr(leaf)) for leaf in leaves if leaf is None or isinstance(leaf, (bool, int, float, str))}
        if len(values) > 1:
            return f"output {i} is no tensor and changes with the sizes of the step ({', '.join(sorted(r for _, r in values))})"
    return ""


def _dims(
    runs: Sequence[Sequence[tuple[int, ...] | None]], sizes: Sequence[Mapping[str, int]], names: Sequence[str]
) -> tuple[OutputDims, tuple[str, ...]]:
    """Which size each dimension follows: the first one that it exceeds by the same amount in every run."""
    dims: OutputDims = []
    alike: tuple[str, ...] = ()
    for i, first in enumerate(runs[0]):
        shapes = [run[i] for run in runs]
        if first is None:
            dims.append(None)
            continue
        if any(shape is None or len(shape) != len(first) for shape in shapes):
            raise CaptureError(f"output {i}: its rank changes with the sizes of the step, so it cannot be cut to the real rows")
        found: dict[int, Dim] = {}
        for axis in range(len(first)):
            values = [shape[axis] for shape in shapes if shape is not None]
            if len(set(values)) == 1:
                continue
            extra = {name: [value - at[name] for value, at in zip(values, sizes, strict=True)] for name in names}
            follows = [name for name, differences in extra.items() if len(set(differences)) == 1 and differences[0] >= 0]
            if not follows:
                shown = ", ".join(f"{value} at {dict(at)}" for value, at in zip(values, sizes, strict=True))
                raise CaptureError(
                    f"output {i}: dimension {axis} is {shown}; only an output with one row for each of a named size can be cut to the "
                    "real rows. Reshape it so, or return it from outside the module"
                )
            alike = alike if len(follows) == 1 else tuple(follows)
            found[axis] = Dim(follows[0], values[0] - sizes[0][follows[0]])
        dims.append(found)
    return dims, alike


class StepOutput:
    """The output of a captured step, taken apart once so that handing it out is quick."""

    def __init__(self, output: Any, dims: OutputDims) -> None:
        self._dims = dims
        self._leaves, self._spec = pytree.tree_flatten(output)
        self._is_leaf = self._spec.is_leaf()
        self._is_tuple = type(output) is tuple and len(output) == len(self._leaves)
        self.tensors = [i for i, found in enumerate(dims) if found is not None]
        self.is_one_tensor = self._is_leaf and bool(self.tensors)
        self._cuts = [[(axis, dim.name, dim.extra) for axis, dim in (found or {}).items()] for found in dims]

    def of(self, output: Any, real: Mapping[str, int]) -> Any:
        """The real rows of another output of the same structure."""
        return cut_to_real(output, self._dims, real)

    def leaf(self, index: int, real: Mapping[str, int]) -> torch.Tensor:
        """One output's real rows, in the graph's own memory."""
        tensor = self._leaves[index]
        for axis, name, extra in self._cuts[index]:
            tensor = tensor.narrow(axis, 0, real[name] + extra)
        return tensor

    def at(self, real: Mapping[str, int]) -> RealRows:
        """All outputs at these real sizes."""
        with torch.inference_mode(False), torch.no_grad():
            return RealRows(self, [(i, self.leaf(i, real)) for i in self.tensors])

    def is_tuple_of(self, count: int) -> bool:
        """Whether it is a plain tuple of so many tensors and nothing else."""
        return self._is_tuple and len(self._leaves) == len(self.tensors) == count

    def packed(self, tensors: Iterable[tuple[int, Any]]) -> Any:
        """The outputs in their structure, with these in the place of the graph's tensors."""
        leaves = self._leaves.copy()
        for i, tensor in tensors:
            leaves[i] = tensor
        if self._is_leaf:
            return leaves[0]
        return tuple(leaves) if self._is_tuple else pytree.tree_unflatten(leaves, self._spec)


class RealRows:
    """The outputs of a captured step at one set of real sizes, cut once for all steps of these sizes."""

    def __init__(self, output: StepOutput, rows: list[tuple[int, torch.Tensor]]) -> None:
        self._output, self._rows = output, rows
        self._only = rows[0][1] if output.is_one_tensor else None
        self._is_all = output.is_tuple_of(len(rows))

    def copied(self) -> Any:
        if self._only is not None:
            return self._only.clone()
        return self._output.packed([(i, rows.clone()) for i, rows in self._rows])

    def borrowed(self, each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """As the graph's own memory; each tensor is passed through ``each``, which makes a loan of it."""
        return self._output.packed([(i, each(rows)) for i, rows in self._rows])

    def lent(self, numbers: Collection[int], is_stale: Callable[[], bool]) -> Any:
        """The outputs of these numbers as a ``Loan``, the others as copies."""
        # a Loan, past the function of Python that NamedTuple makes for it: twice as fast
        handed = [_new_tuple(Loan, (rows, is_stale)) if i in numbers else rows.clone() for i, rows in self._rows]
        return tuple(handed) if self._is_all else self._output.packed(zip(self._output.tensors, handed, strict=True))


class Loan(NamedTuple):
    """An output that is looked at seldom: it costs nothing until ``take``, which is good until the next captured step."""

    rows: torch.Tensor
    is_stale: Callable[[], bool]

    def take(self) -> torch.Tensor:
        """The graph's own memory. Raises StaleOutputError after a later replay."""
        if self.is_stale():
            raise StaleOutputError("this output was lent until the next step, which may have overwritten it; take and copy it before")
        return self.rows


_new_tuple: Any = tuple.__new__


def taken(output: torch.Tensor | Loan) -> torch.Tensor:
    """The output, whether a graph has lent it or an eager step has made it."""
    return output.take() if isinstance(output, Loan) else output


def cut_to_real(outputs: Any, dims: OutputDims, real: Mapping[str, int]) -> Any:
    """Views of the outputs' real rows, in the same structure."""
    leaves, spec = pytree.tree_flatten(outputs)
    for i, (leaf, found) in enumerate(zip(leaves, dims, strict=True)):
        if found:
            for axis, dim in found.items():
                leaf = leaf.narrow(axis, 0, real[dim.name] + dim.extra)
            leaves[i] = leaf
    return pytree.tree_unflatten(leaves, spec)
