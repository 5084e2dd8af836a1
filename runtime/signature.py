"""The arguments of a traced module: which of their sizes have names, and what a later call must have in common with the trace."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Dynamic = Mapping[str, "int | Mapping[int, str]"]
HOST = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


class TraceError(ValueError):
    """A module that cannot be traced into one graph, or whose graph would not be right for other calls."""


class BindError(ValueError):
    """Arguments that the traced graph is not valid for. The message names the argument, what was traced and what came."""


@dataclass(frozen=True)
class Dim:
    """A dimension whose size is ``name + plus``: "tokens", or "seqs+1" for cumulative lengths."""

    name: str
    plus: int = 0

    @classmethod
    def parse(cls, text: str, argument: str) -> Dim:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\+\s*(\d+))?\s*", text)
        if not match:
            raise TraceError(f'dynamic: {argument}: expected a name such as "tokens" or "seqs+1", got {text!r}')
        return cls(match[1], int(match[2] or 0))

    def __str__(self) -> str:
        return f"{self.name}+{self.plus}" if self.plus else self.name


@dataclass(frozen=True)
class Leaf:
    """One leaf of the caller's arguments as traced. ``dims``: named dimensions of a tensor; ``value``: a host value."""

    path: str
    tensor: bool
    value: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dims: tuple[tuple[int, Dim], ...] = ()


def _flatten(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BindError(f"arguments do not fit the module's forward{signature}: {error}") from None
    bound.apply_defaults()
    return pytree.tree_flatten(dict(bound.arguments))


def _paths(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    paths, _ = pytree.tree_flatten_with_path(dict(bound.arguments))
    part = lambda key: str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
    return [".".join(part(key) for key in path) for path, _ in paths]


def named_dims(dynamic: Dynamic, paths: list[str], leaves: list[Any]) -> dict[str, tuple[tuple[int, Dim], ...]]:
    """For each tensor leaf its named dimensions. A name in ``dynamic`` is an argument (all tensors under it) or a path such as
    ``batch.ids`` or ``caches.0.1``; an int stands for ``{dim: "tokens"}``. Raises TraceError for a name that no argument has."""
    result: dict[str, tuple[tuple[int, Dim], ...]] = {}
    for name, spec in dynamic.items():
        wanted = {spec: "tokens"} if isinstance(spec, int) else dict(spec)
        dims = tuple((int(dim), Dim.parse(text, name)) for dim, text in wanted.items())
        under = [(p, v) for p, v in zip(paths, leaves, strict=True) if p == name or p.startswith(f"{name}.")]
        if not under:
            raise TraceError(f"dynamic: {name!r} is not an argument of this call; it has {', '.join(paths)}")
        for path, value in under:
            if not isinstance(value, torch.Tensor):
                continue
            for dim, _ in dims:
                if not -value.dim() <= dim < value.dim():
                    raise TraceError(f"dynamic: {path} has {value.dim()} dimensions, got dimension {dim}")
            result[path] = tuple((dim % value.dim(), which) for dim, which in dims)
    return result


def sizes_of(leaves: list[Leaf], values: list[Any]) -> dict[str, int]:
    """The size of every name in this call. Raises BindError when two tensors disagree."""
    sizes: dict[str, tuple[int, str]] = {}
    for leaf, value in zip(leaves, values, strict=True):
        for dim, which in leaf.dims:
            size = value.shape[dim] - which.plus
            held, where = sizes.setdefault(which.name, (size, leaf.path))
            if held != size:
                raise BindError(
                    f"{leaf.path}: dimension {dim} is {which}, expected {held + which.plus} like {where}, got {value.shape[dim]}"
                )
    return {name: size for name, (size, _) in sizes.items()}


def _leaf(path: str, value: Any, dims: tuple[tuple[int, Dim], ...]) -> Leaf:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TraceError(f"{path}: expected a plain tensor, got the subclass {type(value).__name__}")
        return Leaf(path, True, None, value.dtype, value.device, tuple(value.shape), value.stride(), dims)
    if not isinstance(value, HOST):
        raise TraceError(f"{path}: expected tensors, numbers, strings or containers of them, got {type(value).__name__}")
    return Leaf(path, False, value)


@dataclass
class Arguments:
    """How a module is called, as traced. spec: the structure of ``{argument: value}``; leaves: what lies in it, in order."""

    signature: inspect.Signature
    spec: pytree.TreeSpec
    leaves: list[Leaf]

    @classmethod
    def read(
        cls, module: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Dynamic
    ) -> tuple[Arguments, list[Any]]:
        """The arguments of this call and their leaves. Raises TraceError for what cannot be traced or is not there."""
        signature = inspect.signature(module.forward if isinstance(module, torch.nn.Module) else module)
        values, spec = _flatten(signature, args, kwargs)
        paths = _paths(signature, args, kwargs)
        dims = named_dims(dynamic, paths, values)
        leaves = [_leaf(path, value, dims.get(path, ())) for path, value in zip(paths, values, strict=True)]
        sizes_of(leaves, values)
        return cls(signature, spec, leaves), values

    def call(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leaves as positional and keyword arguments."""
        bound = inspect.BoundArguments(self.signature, pytree.tree_unflatten(values, self.spec))  # type: ignore[arg-type]
        return bound.args, bound.kwargs

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call, in the order of ``leaves``. Raises BindError when the structure is another one."""
        values, spec = _flatten(self.signature, args, kwargs)
        if spec != self.spec:
            raise BindError(f"arguments: traced with the structure {self.spec}, got {spec}; leave optional arguments as they were traced")
        return values

    def sizes(self, values: list[Any]) -> dict[str, int]:
        return sizes_of(self.leaves, values)

    @property
    def token(self) -> str | None:
        """The name that counts as the size of a step: "tokens", or the only one there is."""
        names = list(dict.fromkeys(which.name for leaf in self.leaves for _, which in leaf.dims))
        return "tokens" if "tokens" in names else next(iter(names), None)

    def check_key(self, values: list[Any]) -> tuple[Any, ...]:
        """Equal for two calls that ``check`` cannot tell apart."""
        layouts = [(v.dtype, v.device, v.shape, v.stride()) if isinstance(v, torch.Tensor) else (type(v), v) for v in values]
        return tuple(layouts)

    def check(self, values: list[Any]) -> None:
        """Raises BindError when the traced code is not valid for these leaves."""
        for leaf, value in zip(self.leaves, values, strict=True):
            _check_leaf(leaf, value)
        self.sizes(values)
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.tensor:
                _check_strides(leaf, value)


def _check_leaf(leaf: Leaf, value: Any) -> None:
    if not leaf.tensor:
        if type(value) is not type(leaf.value) or value != leaf.value:
            raise BindError(f"{leaf.path}: a host value is part of the code, traced with {leaf.value!r}, got {value!r}")
        return
    if not isinstance(value, torch.Tensor):
        raise BindError(f"{leaf.path}: traced with a tensor, got {type(value).__name__}")
    if value.dtype != leaf.dtype:
        raise BindError(f"{leaf.path}: traced with {leaf.dtype}, got {value.dtype}")
    if value.device != leaf.device:
        raise BindError(f"{leaf.path}: traced on {leaf.device}, got {value.device}")
    free = {dim for dim, _ in leaf.dims}
    shape = ["any" if dim in free else size for dim, size in enumerate(leaf.shape)]
    if value.dim() != len(shape) or any(want not in ("any", got) for want, got in zip(shape, value.shape, strict=True)):
        raise BindError(f"{leaf.path}: traced with shape {shape}, got {list(value.shape)}")


def _check_strides(leaf: Leaf, value: torch.Tensor) -> None:
    """The same layout: dense where it was dense, the same strides where it was not."""
    if 0 in value.shape or (_dense(leaf.shape, leaf.stride) and value.is_contiguous()):
        return
    expected = None if _dense(leaf.shape, leaf.stride) else leaf.stride
    real = [(got, want) for n, got, want in zip(value.shape, value.stride(), expected or (), strict=False) if n > 1]
    if expected is None or any(got != want for got, want in real):
        kind = "contiguous" if expected is None else f"strides {list(leaf.stride)}"
        raise BindError(f"{leaf.path}: traced {kind}, got strides {list(value.stride())} for shape {list(value.shape)}")


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True
