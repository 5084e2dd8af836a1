"""Trace a module once with Dynamo, for every size, and keep what its guards would have checked.

``trace(module, args, kwargs, dynamic)`` gives the FX graph with an owner for each of its inputs: a leaf of the caller's
arguments, a tensor of the module by name, or one of the step's sizes. The graph is meant to be called without Dynamo, which saves
27 to 130 µs a step and loses its guards; so what they stood for is kept here and checked by ``Signature.bind``: the structure of
the arguments, dtypes, devices, strides, host values, sizes that belong together, and any branch that the code took on a size.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

Dynamic = Mapping[str, "int | Mapping[int, str]"]
_HOST = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


class TraceError(ValueError):
    """A module that cannot be traced into one graph, or whose graph would not be right for other calls."""


class BindError(ValueError):
    """Arguments that the traced graph is not valid for. The message names the argument, what was traced and what came."""


# ------------------------------------------------------------------------------------------------------- named dimensions


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


# ------------------------------------------------------------------------------------------------------------------ trace


@dataclass(frozen=True)
class Owner:
    """Who gives a graph input: kind "caller" (``index``: leaf), "persistent" (``get``: reads it now), "size" (``index``, ``dim``)."""

    kind: str
    name: str
    index: int = -1
    dim: int = -1
    get: Callable[[], torch.Tensor] | None = None


@dataclass
class Trace:
    """A module as one FX graph.

    ``owners``: one per placeholder. ``result``: rebuilds the module's return value from (graph outputs, leaves).
    ``unbacked``: sizes are plain unknowns, one graph for 0, 1 and up; else sizes 0 and 1 are outside and ``notes`` says why.
    """

    gm: fx.GraphModule
    module: Any
    leaves: list[Leaf]
    signature: inspect.Signature
    spec: pytree.TreeSpec
    owners: list[Owner]
    result: Callable[[list[Any], list[Any]], Any]
    shape_env: Any
    unbacked: bool
    training: bool
    autocast: tuple[Any, ...]
    guards: list[tuple[Any, str]] = field(default_factory=list)
    symbols: dict[Any, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
        return (*layouts, getattr(self.module, "training", False), _autocast())

    def check(self, values: list[Any]) -> None:
        """Raises BindError when the traced code is not valid for these leaves."""
        for leaf, value in zip(self.leaves, values, strict=True):
            _check_leaf(leaf, value)
        self.sizes(values)
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.tensor:
                _check_strides(leaf, value)
        if (reason := failed_guard(self, values)) is not None:
            raise BindError(reason)
        if bool(getattr(self.module, "training", False)) != self.training:
            raise BindError(f"module.training: traced with {self.training}, it is now {not self.training}")
        if _autocast() != self.autocast:
            raise BindError(f"autocast: traced with {self.autocast or 'none'}, it is now {_autocast() or 'none'}")


def _autocast() -> tuple[Any, ...]:
    """The autocast state around the call, which a trace bakes in."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


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


_serial = itertools.count()


def trace(module: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Dynamic) -> Trace:
    """Trace ``module(*args, **kwargs)`` with the dimensions of ``dynamic`` as unknowns. Nothing is computed and nothing written.

    Sizes are marked unbacked; where the code looks at one (``if x.shape[0] > 4``), it is traced again with ordinary symbols and
    the branch taken is kept as a guard. Raises TraceError when the module does not trace into one graph, leaves side effects in
    Python behind, or returns something that cannot be rebuilt.
    """
    signature = inspect.signature(module.forward if isinstance(module, torch.nn.Module) else module)
    values, spec = _flatten(signature, args, kwargs)
    paths = _paths(signature, args, kwargs)
    dims = named_dims(dynamic, paths, values)
    leaves = [_leaf(path, value, dims.get(path, ())) for path, value in zip(paths, values, strict=True)]
    sizes_of(leaves, values)
    try:
        return _trace_once(module, signature, spec, leaves, values, unbacked=True)
    except Exception as error:
        if not _is_size_error(error):
            raise _readable(error) from error
        reason = _first_line(error)
    try:
        found = _trace_once(module, signature, spec, leaves, values, unbacked=False)
    except Exception as error:
        raise _readable(error) from error
    found.notes.append(f"sizes 0 and 1 are not covered, pad 1 to 2: the module's code looks at a size ({reason})")
    return found


def _leaf(path: str, value: Any, dims: tuple[tuple[int, Dim], ...]) -> Leaf:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TraceError(f"{path}: expected a plain tensor, got the subclass {type(value).__name__}")
        return Leaf(path, True, None, value.dtype, value.device, tuple(value.shape), value.stride(), dims)
    if not isinstance(value, _HOST):
        raise TraceError(f"{path}: expected tensors, numbers, strings or containers of them, got {type(value).__name__}")
    return Leaf(path, False, value)


def _is_size_error(error: BaseException) -> bool:
    while error is not None:
        if type(error).__name__ in ("GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound", "ConstraintViolationError"):
            return True
        if "data-dependent" in str(error) or "unbacked" in str(error).lower():
            return True
        error = error.__cause__  # type: ignore[assignment]
    return False


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _readable(error: BaseException) -> Exception:
    """The error that the user should see, from inside what Dynamo wraps around it."""
    chain: list[BaseException] = []
    walk: BaseException | None = error
    while walk is not None and walk not in chain:
        chain.append(walk)
        walk = walk.__cause__ or walk.__context__
    ours = next((link for link in chain if isinstance(link, TraceError | BindError)), None)
    if ours is not None:
        return ours
    text = str(error)
    where = [line.strip() for line in text.splitlines() if line.strip().strip("^~ ")]
    if fixed := re.search(r"specialized it to be a constant \((\d+)\)", text):
        return TraceError(
            f"dynamic: the module's code fixes a size named there to {fixed[1]}, at: {where[-1]}. Take that dimension out of dynamic, "
            "or do not use its value (a loop over it, int(), a shape written as a number)"
        )
    if "side effects" in text:
        return TraceError(
            "the module has side effects in Python: forward changes an attribute, a list or a global, which a captured step would not do "
            'again. Return the value instead, or set compile.split = "capture" and compile.backend = "eager"'
        )
    return TraceError(
        "the module does not trace into one graph: " + "\n".join(where)[:2000] + "\nChange the code that the message points at, or set "
        'compile.split = "capture" and compile.backend = "eager", which need no trace'
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A failed attempt is an answer here, not something for the log."""
    loggers = [logging.getLogger(name) for name in ("torch._guards", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _resized(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """An uninitialised tensor of another shape in the same layout (nothing reads it: tracing looks at metadata only)."""
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), -dim))
    if list(value.shape) == shape or value.is_contiguous():
        strides = list(value.stride()) if list(value.shape) == shape else None
    else:  # keep the strides; only the outermost dimension may grow without changing the others
        strides = list(value.stride())
        if any(shape[dim] != value.shape[dim] for dim in order[:-1]):
            strides = None
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device) if strides else None
    return torch.empty(shape, dtype=value.dtype, device=value.device) if made is None else made


def _trace_inputs(leaves: list[Leaf], values: list[Any], unbacked: bool) -> list[Any]:
    """The caller's leaves as Dynamo may see them: no tensor twice, none of the caller's own marked, no size 0 or 1 when backed."""
    from torch._dynamo import mark_dynamic
    from torch._dynamo.decorators import mark_unbacked

    made: list[Any] = []
    seen: set[int] = set()
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.tensor:
            made.append(value)
            continue
        if leaf.dims:
            shape = list(value.shape)
            for dim, which in leaf.dims:
                shape[dim] = max(shape[dim] - which.plus, 0 if unbacked else 2) + which.plus
            value = _resized(value, shape)
            for dim, which in leaf.dims:
                if unbacked:
                    mark_unbacked(value, dim, shape_id=str(which))
                else:
                    mark_dynamic(value, dim)
        elif id(value) in seen or isinstance(value, torch.nn.Parameter) or value.requires_grad:
            value = value.detach().view(value.shape)
        seen.add(id(value))
        made.append(value)
    return made


class _SizeOut(int):
    """A size that the graph returns, recognised in the module's result by identity."""


def _trace_once(
    module: Callable[..., Any],
    signature: inspect.Signature,
    spec: pytree.TreeSpec,
    leaves: list[Leaf],
    values: list[Any],
    *,
    unbacked: bool,
) -> Trace:
    import torch._dynamo.config as dynamo_config
    import torch.fx.experimental._config as symbolic_config
    from torch._guards import TracingContext

    inputs = _trace_inputs(leaves, values, unbacked)
    bound = inspect.BoundArguments(signature, pytree.tree_unflatten(inputs, spec))  # type: ignore[arg-type]
    call_args, call_kwargs = bound.args, bound.kwargs
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        scope = {"L": {"args": call_args, "kwargs": call_kwargs, "module": module}, "G": step.__globals__}
        seen["gm"] = gm
        seen["shape_env"] = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
        seen["owners"] = [_owner(node, example, module, leaves, inputs, scope) for node, example in _arguments(gm, example_inputs)]
        outputs = pytree.tree_leaves(next(iter(gm.graph.find_nodes(op="output"))).args[0])
        seen["outputs"] = [_stand_in(node) for node in outputs]
        return lambda *_: tuple(seen["outputs"])

    def template(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    # A code object of its own: Dynamo's cache, its recompile limit and its memory of past sizes belong to code objects and names.
    code = template.__code__.replace(co_name=f"step_{next(_serial)}")
    step = types.FunctionType(code, template.__globals__, closure=template.__closure__)
    settings = {
        "automatic_dynamic_shapes": False,
        "side_effect_replay_policy": "error",
        "specialize_int": True,
        "specialize_float": True,
    }
    with (
        _quiet(),
        torch.inference_mode(False),
        torch.no_grad(),
        dynamo_config.patch({key: value for key, value in settings.items() if hasattr(dynamo_config, key)}),
        symbolic_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # else two names that happen to be equal now become one symbol
    ):
        returned = torch.compile(step, backend=backend, fullgraph=True)(*call_args, **call_kwargs)
    if "gm" not in seen:
        raise TraceError(
            "the module computes nothing with tensors (or torch.compile is switched off): there is no graph to cut or to compile"
        )
    result = _rebuilder(returned, seen["outputs"], inputs, leaves, module)
    training = bool(getattr(module, "training", False))
    found = Trace(seen["gm"], module, leaves, signature, spec, seen["owners"], result, seen["shape_env"], unbacked, training, _autocast())
    _keep_guards(found, inputs, {"L": {"args": call_args, "kwargs": call_kwargs}})
    _refuse_data_dependent(found)
    return found


def _arguments(gm: fx.GraphModule, example_inputs: list[Any]) -> list[tuple[fx.Node, Any]]:
    return list(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))


def _stand_in(node: Any) -> Any:
    """Something to return in place of a graph output, so that a trace computes nothing."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
    if isinstance(value, torch.Tensor):
        hint = lambda size: size if isinstance(size, int) else (size.node.hint if size.node.has_hint() else 1)
        return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return _SizeOut(0) if isinstance(value, (int, torch.SymInt)) else value


# ------------------------------------------------------------------------------------------------------------------ owners


def _source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name


def _evaluate(text: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, {"__builtins__": {}}, scope)  # Dynamo's own spelling of a source, over its two scopes
    except Exception:
        return None


def _size_place(source: Any, inputs: list[Any], scope: dict[str, Any]) -> tuple[int, int] | None:
    """The leaf and the dimension that a size comes from, None for another source."""
    base, dim = getattr(source, "base", None), getattr(source, "idx", None)
    if base is None or not isinstance(dim, int) or (tensor := _evaluate(_source_name(base), scope)) is None:
        return None
    return next(((index, dim) for index, value in enumerate(inputs) if value is tensor), None)


def _owner(node: fx.Node, example: Any, module: Any, leaves: list[Leaf], inputs: list[Any], scope: dict[str, Any]) -> Owner:
    grapharg = node.meta.get("grapharg")
    name = _source_name(grapharg.source) if grapharg is not None else node.name
    if not isinstance(example, torch.Tensor):
        place = _size_place(grapharg.source if grapharg is not None else None, inputs, scope)
        if place is None:
            raise TraceError(f"{name}: the graph takes a host value that is no size of an argument; pass it as a tensor or a constant")
        index, dim = place
        return Owner("size", f"{leaves[index].path}.shape[{dim}]", index, dim)
    if getattr(grapharg, "pass_arg_as_tensor", False):
        raise TraceError(f"{name}: the graph takes a Python number as a tensor; pass a tensor instead")
    for index, value in enumerate(inputs):
        if value is example:
            return Owner("caller", leaves[index].path, index)
    found = find_tensor(module, example) if isinstance(module, torch.nn.Module) else None
    if found is not None:
        return Owner("persistent", found, get=_reader(module, found))
    if _evaluate(name, scope) is example:
        lasting = {"L": {"module": module}, "G": scope["G"]}  # not the arguments of this trace
        return Owner("persistent", name, get=lambda: _evaluate(name, lasting))
    raise TraceError(
        f"{name}: a tensor that is neither an argument nor held by the module or a global variable cannot be found again at a later call"
    )


def find_tensor(module: torch.nn.Module, tensor: torch.Tensor) -> str | None:
    """The dotted name of a parameter, a buffer, or a plain tensor attribute of a submodule."""
    for prefix, child in module.named_modules():
        for held in (child._parameters, child._buffers, vars(child)):
            for name, value in held.items():
                if value is tensor:
                    return f"{prefix}.{name}" if prefix else name
    return None


def _reader(module: torch.nn.Module, name: str) -> Callable[[], torch.Tensor]:
    parents, _, leaf = name.rpartition(".")
    steps = parents.split(".") if parents else []

    def read() -> torch.Tensor:
        held = module
        for step in steps:
            held = held._modules[step]  # type: ignore[assignment]
        return getattr(held, leaf)

    return read


# ------------------------------------------------------------------------------------------------------------------ result


def _rebuilder(
    returned: Any, outputs: list[Any], inputs: list[Any], leaves: list[Leaf], module: Any
) -> Callable[[list[Any], list[Any]], Any]:
    """How to make the module's return value from the graph's outputs and the caller's leaves of a later call."""
    flat, spec = pytree.tree_flatten(returned)
    plan: list[tuple[str, Any]] = []
    for leaf in flat:
        place = next((i for i, output in enumerate(outputs) if output is leaf and isinstance(leaf, (torch.Tensor, _SizeOut))), None)
        given = next((i for i, value in enumerate(inputs) if value is leaf and isinstance(leaf, torch.Tensor)), None)
        if place is not None:
            plan.append(("graph", place))
        elif given is not None:
            plan.append(("caller", given))
        elif isinstance(leaf, torch.Tensor):
            name = find_tensor(module, leaf) if isinstance(module, torch.nn.Module) else None
            if name is None:
                raise TraceError("the module returns a tensor that is no output of its graph, no argument and none of its own tensors")
            plan.append(("persistent", _reader(module, name)))
        elif isinstance(leaf, _HOST):
            plan.append(("constant", leaf))
        else:
            raise TraceError(
                f"the module returns a {type(leaf).__name__}, which cannot be rebuilt: return tensors in tuples, lists, dicts, pytrees"
            )

    def rebuild(graph_outputs: list[Any], call_leaves: list[Any]) -> Any:
        made = []
        for kind, what in plan:
            if kind == "graph":
                made.append(graph_outputs[what])
            elif kind == "caller":
                made.append(call_leaves[what])
            else:
                made.append(what() if kind == "persistent" else what)
        return pytree.tree_unflatten(made, spec)

    return rebuild


# ------------------------------------------------------------------------------------------------------------------ guards


def _keep_guards(found: Trace, inputs: list[Any], scope: dict[str, Any]) -> None:
    """Relate every symbol to the argument and dimension that it came from, and keep the conditions on them."""
    for symbol, sources in getattr(found.shape_env, "var_to_sources", {}).items():
        for source in sources:
            if (place := _size_place(source, inputs, scope)) is not None:
                found.symbols[symbol] = place
    for node, owner in zip(found.gm.graph.find_nodes(op="placeholder"), found.owners, strict=True):
        value = node.meta.get("example_value")
        if owner.kind == "caller":
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    _keep_symbols(found, size, (owner.index, dim))
        elif owner.kind == "size":
            _keep_symbols(found, value, (owner.index, owner.dim))
    add_guards(found)


def _keep_symbols(found: Trace, size: torch.SymInt, place: tuple[int, int]) -> None:
    """The symbol that the dimension was given, and the one that it was found to be equal to."""
    for expr in (size.node._expr, size.node.expr):
        if expr.is_Symbol:
            found.symbols.setdefault(expr, place)


def _refuse_data_dependent(found: Trace) -> None:
    """A size or a host value that comes from tensor data needs a read back, which no graph can hold."""
    given = found.symbols.keys() | found.shape_env.unbacked_inputs
    for node in found.gm.graph.nodes:
        value = node.meta.get("example_value")
        for leaf in pytree.tree_leaves(value):
            sizes = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
            symbols = {
                symbol for size in sizes if isinstance(size, torch.SymInt | torch.SymFloat) for symbol in size.node.expr.free_symbols
            }
            if symbols - given:
                raise TraceError(
                    f"the module reads a tensor's values to get a size or a number, at: {_user_line(node)}; a captured step cannot do that"
                )


def _user_line(node: fx.Node) -> str:
    """The line of the user's code that a node came from."""
    lines = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    return next((line for line in reversed(lines) if line.strip("^~ ")), node.name)


def add_guards(found: Trace, guards: Iterable[Any] = ()) -> None:
    """Keep conditions on sizes: those of the trace, and ``guards`` that compiling a piece has added."""
    known = {str(expr) for expr, _ in found.guards}
    for guard in (*found.shape_env.guards, *guards):
        if str(guard.expr) not in known:
            known.add(str(guard.expr))
            found.guards.append((guard.expr, str(guard.sloc)))
    for symbol, bounds in found.shape_env.var_to_range.items():
        if symbol in found.symbols and not found.unbacked and str(low := symbol >= int(bounds.lower)) not in known:
            found.guards.append((low, "sizes 0 and 1 are traced apart"))


def failed_guard(found: Trace, values: list[Any]) -> str | None:
    """The first condition on sizes that these leaves break, in words; None when all hold."""
    sizes = {symbol: values[index].shape[dim] for symbol, (index, dim) in found.symbols.items()}
    for expr, where in found.guards:
        held = expr.subs(sizes)
        if held == False:  # noqa: E712  sympy's false is not Python's
            names = {symbol: f"{found.leaves[index].path}.shape[{dim}]" for symbol, (index, dim) in found.symbols.items()}
            text = str(expr)
            for symbol, name in names.items():
                text = text.replace(str(symbol), name)
            return f"traced under {text} ({where}), got {', '.join(f'{names[s]} = {sizes[s]}' for s in expr.free_symbols if s in sizes)}"
    return None
