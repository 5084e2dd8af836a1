"""From a call's arguments to named tensors, named sizes and host values, and back.

Every tensor in the arguments gets a name: ``input_ids``, or with nested arguments ``batch.ids``, ``caches.0.1``. Everything that
is not a tensor is a host value: a graph freezes it, so host values are part of the key under which a step is captured.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from runtime.inputs import Dim

Dynamic = Mapping[str, int | Mapping[int, str]]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """One call, taken apart. tensors: by name; host: ((name, type, value), …), hashable; sizes: the named sizes."""

    tensors: dict[str, torch.Tensor]
    host: tuple[Any, ...]
    sizes: dict[str, int]


class Binding:
    """How a callable's arguments are read. dynamic: argument -> dimension or {dimension: size name}."""

    def __init__(self, forward: Callable[..., Any], dynamic: Dynamic) -> None:
        if not isinstance(dynamic, Mapping):
            raise TypeError(f'dynamic: expected arguments and their token dimensions, {{"input_ids": 0}} for example, got {dynamic!r}')
        self._signature = inspect.signature(forward)
        parameters = list(self._signature.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = self._positional + self._keyword_only
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.dims: dict[str, dict[int, Dim]] = {}
        for name, where in dynamic.items():
            dims = {where: "tokens"} if isinstance(where, int) else dict(where)
            self.dims[name] = {int(axis): Dim.parse(size) for axis, size in dims.items()}
        if not any(self.dims.values()):
            raise ValueError('dynamic: expected at least one argument and its token dimension, e.g. {"input_ids": 0}')
        order = [d.name for dims in self.dims.values() for d in dims.values()]
        self.size_names = list(dict.fromkeys(order))
        self._structures: dict[Any, Any] = {}

    @property
    def token(self) -> str:
        """The named size that is the size of a step: the first one given."""
        return self.size_names[0]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Argument name -> value, with defaults filled in. Raises the TypeError that the callable itself would raise."""
        if self._variadic:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return dict(bound.arguments)
        values = {**self._defaults, **dict(zip(self._positional, args, strict=False)), **kwargs}
        if len(args) > len(self._positional) or len(values) != len(self.names) or any(n in kwargs for n in self._positional[: len(args)]):
            self._signature.bind(*args, **kwargs)
        return values

    def signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], tuple[Any, ...]] | None:
        """The values of the arguments in order, and what a call can be recognised by: shapes, dtypes and host values.

        None where it takes ``read`` to tell: nested arguments, unusual host values, wrong arguments.
        """
        if self._variadic or len(args) > len(self._positional):
            return None
        values = list(args)
        taken = len(kwargs)
        for name in self.names[len(args) :]:
            value = kwargs.get(name, _MISSING)
            if value is _MISSING:
                value = self._defaults.get(name, _MISSING)
                if value is _MISSING:
                    return None
            else:
                taken -= 1
            values.append(value)
        if taken:
            return None
        key: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                key.append(value.shape)
                key.append(value.dtype)
            elif value.__class__ in PLAIN:
                key.append(value.__class__)  # True, 1 and 1.0 are equal to Python and not to a graph
                key.append(repr(value) if value.__class__ is float else value)  # and so are 0.0 and -0.0
            else:
                return None
        return values, tuple(key)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Take a call apart. Raises ValueError where two tensors disagree on a named size."""
        tensors: dict[str, torch.Tensor] = {}
        host: list[Any] = []
        values = self.arguments(args, kwargs)
        for name in self.names if not self._variadic else list(values):
            value = values[name]
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, (list, tuple, dict)):
                self._read_tree(name, value, tensors, host)
            else:
                host.append((name, _kind(value), _hashable(value)))
        return Call(tensors, tuple(host), self.sizes(tensors))

    def host(self, values: Mapping[str, Any], tensors: Container[str]) -> tuple[Any, ...]:
        """What ``read`` gives as ``Call.host`` for these host values, none of them a container, and tensors for these names."""
        given = {**self._defaults, **values}
        return tuple([(name, _kind(given[name]), _hashable(given[name])) for name in self.names if name in given and name not in tensors])

    def _read_tree(self, name: str, value: Any, tensors: dict[str, torch.Tensor], host: list[Any]) -> None:
        leaves, spec = pytree.tree_flatten_with_path(value)
        for path, leaf in leaves:
            label = ".".join([name, *(_key_text(key) for key in path)])
            if isinstance(leaf, torch.Tensor):
                tensors[label] = leaf
            else:
                host.append((label, _kind(leaf), _hashable(leaf)))
        host.append((name, "structure", str(spec)))
        self._structures[name, str(spec)] = spec, [".".join([name, *(_key_text(key) for key in path)]) for path, _ in leaves]

    def sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, dims in self.dims.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue  # an optional argument that is not given; the key tells
            shape = tensor.shape
            for axis, dim in dims.items():
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(f"{name}: expected a dimension {axis} ({dim}), got shape {list(shape)}")
                value = shape[axis] - dim.extra
                if found.setdefault(dim.name, value) != value:
                    first = next(n for n, d in self.dims.items() if any(x.name == dim.name for x in d.values()) and n in tensors)
                    raise ValueError(
                        f"{name}: expected {found[dim.name] + dim.extra} in dimension {axis} ({dim}, as {first} has it), got {shape[axis]}"
                    )
        if len(found) != len(self.size_names):
            unknown = [n for n in self.dims if not self._variadic and n.partition(".")[0] not in self.names]
            if unknown:
                near = _near(self.dims, tensors)
                raise ValueError(f"dynamic: `{unknown[0]}` is not an argument of forward; it has {self.names}{near}")
            missing = [n for n in self.size_names if n not in found]
            raise ValueError(f"dynamic: no argument gives {missing[0]}; got tensors {sorted(tensors)}{_near(self.dims, tensors)}")
        return found

    def build(self, tensors: Mapping[str, torch.Tensor], host: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the callable, from named tensors and the host values of a call."""
        values: dict[str, Any] = dict(tensors)
        structures = []
        for name, kind, value in host:
            if kind == "structure":
                structures.append((name, value))
            else:
                values[name] = value.value if isinstance(value, _ById) else value
        for name, text in structures:
            spec, labels = self._structures[name, text]
            values[name] = pytree.tree_unflatten([values[label] for label in labels], spec)
        args: list[Any] = [values[name] for name in self._positional]
        kwargs = {name: values[name] for name in self._keyword_only}
        for parameter in self._variadic:
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += values.get(parameter.name, ())
            else:
                kwargs |= values.get(parameter.name, {})
        return tuple(args), kwargs

    def check_names(self, tensors: Mapping[str, torch.Tensor], pad: Mapping[str, Any], static: Collection[str] = ()) -> None:
        """Names in ``dynamic``, ``pad`` and ``static`` must be tensors of the call, or arguments that may be left out."""
        for what, names in (("dynamic", self.dims), ("pad", pad), ("static", static)):
            for name in names:
                top = name.split(".")[0] if what == "static" else name  # caches that are left out have no parts
                if name not in tensors and top not in self._defaults:
                    near = difflib.get_close_matches(name, tensors, n=1, cutoff=0.5)
                    raise ValueError(
                        f"{what}: no tensor argument {name!r}; {f'did you mean {near[0]!r}?' if near else f'known here: {sorted(tensors)}'}"
                    )


_MISSING = object()
PLAIN = frozenset((int, bool, float, str, type(None)))  # types whose values cannot change and have texts that tell them apart


class _ById:
    """A host value that cannot be hashed, or hashes by content while being mutable: told apart by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


class _ByContent(_ById):
    """An array of numpy, as it was: the caller may write into it and pass it again."""

    def __init__(self, value: np.ndarray) -> None:
        super().__init__(value.copy())
        self._content = value.dtype, value.shape, value.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        return repr(self.value)


def _kind(value: Any) -> Any:
    """What tells apart values that Python takes as equal: True, 1 and 1.0; 0.0 and -0.0."""
    return (value.__class__, repr(value)) if isinstance(value, (float, complex)) else value.__class__


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _ByContent(value)
    try:
        hash(value)
    except TypeError:
        return _ById(value)
    return value


def key_text(host: tuple[Any, ...]) -> str:
    """The key as people read it: ``max_query_len=1``."""
    return ", ".join(f"{name}={value!r}" for name, kind, value in host if kind != "structure") or "-"


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _near(dims: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    for name in dims:
        near = difflib.get_close_matches(name, tensors, n=1, cutoff=0.5)
        if name not in tensors and near:
            return f"; {name!r}: did you mean {near[0]!r}?"
    return ""
