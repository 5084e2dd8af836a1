"""Where the inputs and outputs of a traced graph come from: arguments, tensors of the module, sizes; found again at each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from runtime.signature import HOST, Leaf, TraceError


@dataclass(frozen=True)
class Owner:
    """Who gives a graph input: kind "caller" (``index``: leaf), "persistent" (``get``: reads it now), "size" (``index``, ``dim``)."""

    kind: str
    name: str
    index: int = -1
    dim: int = -1
    get: Callable[[], torch.Tensor] | None = None


class SizeOut(int):
    """A size that the graph returns, recognised in the module's result by identity."""


def _source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name


def _evaluate(text: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, {"__builtins__": {}}, scope)  # Dynamo's own spelling of a source, over its two scopes
    except Exception:
        return None


def size_place(source: Any, inputs: list[Any], scope: dict[str, Any]) -> tuple[int, int] | None:
    """The leaf and the dimension that a size comes from, None for another source."""
    base, dim = getattr(source, "base", None), getattr(source, "idx", None)
    if base is None or not isinstance(dim, int) or (tensor := _evaluate(_source_name(base), scope)) is None:
        return None
    return next(((index, dim) for index, value in enumerate(inputs) if value is tensor), None)


def owner_of(node: fx.Node, example: Any, module: Any, leaves: list[Leaf], inputs: list[Any], scope: dict[str, Any]) -> Owner:
    grapharg = node.meta.get("grapharg")
    name = _source_name(grapharg.source) if grapharg is not None else node.name
    if not isinstance(example, torch.Tensor):
        place = size_place(grapharg.source if grapharg is not None else None, inputs, scope)
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
        held: Any = module
        for step in steps:  # each time from the root: a submodule may have been replaced
            held = held._modules[step]
        value = held._parameters.get(leaf)  # getattr goes through three dicts and an exception to find a parameter
        return value if value is not None else getattr(held, leaf)

    return read


def rebuilder(
    returned: Any, outputs: list[Any], inputs: list[Any], leaves: list[Leaf], module: Any
) -> Callable[[list[Any], list[Any]], Any]:
    """How to make the module's return value from the graph's outputs and the caller's leaves of a later call."""
    flat, spec = pytree.tree_flatten(returned)
    plan: list[tuple[str, Any]] = []
    for leaf in flat:
        place = next((i for i, output in enumerate(outputs) if output is leaf and isinstance(leaf, (torch.Tensor, SizeOut))), None)
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
        elif isinstance(leaf, HOST):
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
