"""Trace a module once with Dynamo, for every size, and keep what its guards would have checked.

``trace(module, args, kwargs, dynamic)`` gives the FX graph with an owner for each of its inputs: a leaf of the caller's
arguments, a tensor of the module by name, or one of the step's sizes. The graph is meant to be called without Dynamo, which saves
27 to 130 µs a step and loses its guards; so what they stood for is kept here and checked by ``Compiled.bind``: the structure of
the arguments, dtypes, devices, strides, host values, sizes that belong together, and any branch that the code took on a size.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from runtime.signature import Arguments, BindError, Dynamic, Leaf, TraceError
from runtime.sources import Owner, SizeOut, owner_of, rebuilder, size_place
from runtime.trace_errors import OwnLength, first_line, is_size_error, readable


@dataclass
class Trace:
    """A module as one FX graph.

    ``owners``: one per placeholder. ``result``: rebuilds the module's return value from (graph outputs, leaves).
    ``unbacked``: sizes are plain unknowns, one graph for 0, 1 and up; else sizes 0 and 1 are outside and ``notes`` says why.
    """

    gm: fx.GraphModule
    module: Any
    arguments: Arguments
    owners: list[Owner]
    result: Callable[[list[Any], list[Any]], Any]
    shape_env: Any
    unbacked: bool
    training: bool
    autocast: tuple[Any, ...]
    guards: list[tuple[Any, str]] = field(default_factory=list)
    symbols: dict[Any, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check_key(self, values: list[Any]) -> tuple[Any, ...]:
        """Equal for two calls that ``check`` cannot tell apart."""
        return (*self.arguments.check_key(values), getattr(self.module, "training", False), _autocast())

    def check(self, values: list[Any]) -> None:
        """Raises BindError when the traced code is not valid for these leaves."""
        self.arguments.check(values)
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


_serial = itertools.count()


def trace(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: Dynamic,
    *,
    own_lengths: bool = True,
    refused: str = "",
) -> Trace:
    """Trace ``module(*args, **kwargs)`` with the dimensions of ``dynamic`` as unknowns. Nothing is computed and nothing written.

    Sizes are marked unbacked; where the code looks at one (``if x.shape[0] > 4``), it is traced again with ordinary symbols and
    the branch taken is kept as a guard. Raises TraceError when the module does not trace into one graph, leaves side effects in
    Python behind, or returns something that cannot be rebuilt.
    own_lengths: whether the length of a slice may be a symbol of its own, as torch before 2.13 has it; Inductor does not compile a
    piece that returns such a slice, so without it they are traced with ordinary symbols too.
    refused: why a compiler did not take the trace with unbacked sizes; then it is made with ordinary symbols at once.
    """
    arguments, values = Arguments.read(module, args, kwargs, dynamic)
    reason = f"the compiler refuses code for any size at all ({refused})"
    if not refused:
        try:
            found = _trace_once(module, arguments, values, unbacked=True)
            _refuse_data_dependent(found, own_lengths)
            return found
        except Exception as error:
            if not is_size_error(error):
                raise readable(error) from error
            reason = f"the module's code looks at a size ({first_line(error)})"
    try:
        found = _trace_once(module, arguments, values, unbacked=False)
        _refuse_data_dependent(found, True)
    except Exception as error:
        raise readable(error) from error
    found.notes.append(f"sizes 0 and 1 are not covered, pad 1 to 2: {reason}")
    return found


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

    knows_min = "min" in inspect.signature(mark_unbacked).parameters
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
                    mark_unbacked(value, dim, shape_id=str(which), **({"min": which.plus} if knows_min else {}))
                else:
                    mark_dynamic(value, dim)
        elif id(value) in seen or isinstance(value, torch.nn.Parameter) or value.requires_grad:
            value = value.detach().view(value.shape)
        seen.add(id(value))
        made.append(value)
    return made


def _trace_once(module: Callable[..., Any], arguments: Arguments, values: list[Any], *, unbacked: bool) -> Trace:
    import torch._dynamo.config as dynamo_config
    import torch.fx.experimental._config as symbolic_config
    from torch._guards import TracingContext

    leaves = arguments.leaves
    inputs = _trace_inputs(leaves, values, unbacked)
    call_args, call_kwargs = arguments.call(inputs)
    seen: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        scope = {"L": {"args": call_args, "kwargs": call_kwargs, "module": module}, "G": step.__globals__}
        seen["gm"] = gm
        seen["shape_env"] = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
        seen["owners"] = [owner_of(node, example, module, leaves, inputs, scope) for node, example in _arguments(gm, example_inputs)]
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
    result = rebuilder(returned, seen["outputs"], inputs, leaves, module)
    training = bool(getattr(module, "training", False))
    found = Trace(seen["gm"], module, arguments, seen["owners"], result, seen["shape_env"], unbacked, training, _autocast())
    _keep_guards(found, inputs, {"L": {"args": call_args, "kwargs": call_kwargs}})
    return found


def _arguments(gm: fx.GraphModule, example_inputs: list[Any]) -> list[tuple[fx.Node, Any]]:
    return list(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))


def _stand_in(node: Any) -> Any:
    """Something to return in place of a graph output, so that a trace computes nothing."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
    if isinstance(value, torch.Tensor):
        hint = lambda size: size if isinstance(size, int) else (size.node.hint if size.node.has_hint() else 1)
        return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return SizeOut(0) if isinstance(value, (int, torch.SymInt)) else value


def _keep_guards(found: Trace, inputs: list[Any], scope: dict[str, Any]) -> None:
    """Relate every symbol to the argument and dimension that it came from, and keep the conditions on them."""
    for symbol, sources in getattr(found.shape_env, "var_to_sources", {}).items():
        for source in sources:
            if (place := size_place(source, inputs, scope)) is not None:
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


def _refuse_data_dependent(found: Trace, own_lengths: bool) -> None:
    """A size or a host value that comes from tensor data needs a read back, which no graph can hold."""
    given = set(found.symbols) | set(found.shape_env.unbacked_inputs)
    for node in found.gm.graph.nodes:
        value = node.meta.get("example_value")
        numbers: list[Any] = []
        for leaf in pytree.tree_leaves(value):
            numbers += (*leaf.shape, *leaf.stride(), leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else (leaf,)
        used = (number.node.expr.free_symbols for number in numbers if isinstance(number, torch.SymInt | torch.SymFloat))
        fresh = set().union(*used) - given
        if fresh and not _slices(node):
            raise TraceError(
                f"the module reads a tensor's values to get a size or a number, at: {_user_line(node)}; a captured step cannot do that"
            )
        if fresh and not own_lengths:
            raise OwnLength(f"the length of a slice is a symbol of its own, at: {_user_line(node)}")
        given |= fresh


def _slices(node: fx.Node) -> bool:
    """Whether the node cuts a tensor by sizes alone: torch before 2.13 names the length of ``cache[:tokens]`` by a symbol of its own."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    if not isinstance(node.args[0].meta.get("example_value"), torch.Tensor):
        return False
    values = [leaf.meta.get("example_value") if isinstance(leaf, fx.Node) else leaf for leaf in pytree.tree_leaves(node.args[1])]
    return not any(isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) for value in values)


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
            names = {symbol: f"{found.arguments.leaves[index].path}.shape[{dim}]" for symbol, (index, dim) in found.symbols.items()}
            text = str(expr)
            for symbol, name in names.items():
                text = text.replace(str(symbol), name)
            return f"traced under {text} ({where}), got {', '.join(f'{names[s]} = {sizes[s]}' for s in expr.free_symbols if s in sizes)}"
    return None
