"""Facts about the nodes of an FX graph: what a node holds, whether it is host arithmetic, what it writes, and when two graphs
compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_META_METHODS = {"size", "stride", "dim", "ndimension", "numel", "nelement", "storage_offset", "element_size", "is_contiguous"}
_CHECKS = {torch._check, torch._check_is_size, torch._assert, torch.sym_constrain_range, torch.sym_constrain_range_for_size}
_CHECK_OPS = {"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}
# All pieces run without gradients, so switching them on or off is no work. Autocast is: it changes dtypes.
GRAD_SWITCHES = {torch._C._set_grad_enabled, torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode}


def value_of(node: fx.Node) -> Any:
    """What the node holds: a fake tensor, a symbolic size, a tuple of them, as the tracer saw it."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_host(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_host(item) for item in value)
    return isinstance(value, (int, float, bool, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device))


def is_host_node(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or value_of(node) is None or not is_host(value_of(node)):
        return False
    return node.target in _META_METHODS if node.op == "call_method" else True


def is_check(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    named = target._schema.name in _CHECK_OPS if isinstance(target, torch._ops.OpOverload) else target in _CHECKS
    return named and not any(isinstance(value_of(arg), torch.Tensor) for arg in node.all_input_nodes)


def is_tuple(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, (tuple, list)) and not is_host(value)


def storage_key(value: Any) -> int | None:
    """One number per storage; tensors that share it may be views of each other."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other layouts without a storage
        return None


class _Spy(TorchDispatchMode):
    """Records the storages that ops write, by their schemas: it sees through functions, methods and decompositions."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                held = args[position] if position < len(args) else kwargs.get(argument.name)
                self.written.update(storage_key(leaf) for leaf in pytree.tree_leaves(held))
        return func(*args, **kwargs)


def written_args(node: fx.Node, memo: dict[Any, set[int]] | None = None) -> set[fx.Node]:
    """The argument nodes whose memory the node writes. Found by running it once on fake tensors; when that fails, or for a
    higher-order op (whose body is out of sight), every tensor argument counts as written.

    memo: carries results from node to node; layers repeat the same calls.
    """
    tensors = [arg for arg in node.all_input_nodes if storage_key(value_of(arg)) is not None]
    if not tensors or node.op not in ("call_function", "call_method"):
        return set()
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
        return set()
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return set(tensors)
    order = {arg: index for index, arg in enumerate(tensors)}
    identity = lambda arg: (order.get(arg, -1), meta_key(value_of(arg)))  # f(x, x) is not f(x, y)
    key = (node.target, constant_key((node.args, node.kwargs), identity)) if memo is not None else None
    if memo is None or key not in memo:
        written = _run_spied(node, tensors)
        if memo is None:
            return {tensors[index] for index in written}
        memo[key] = written
    return {tensors[index] for index in memo[key]}


def _run_spied(node: fx.Node, tensors: list[fx.Node]) -> set[int]:
    """Positions in ``tensors`` of what the node writes."""
    everything = set(range(len(tensors)))
    mode = getattr(value_of(tensors[0]), "fake_mode", None)
    if mode is None:
        return everything
    spy = _Spy()
    quiet = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else contextlib.nullcontext()
    try:
        with mode, torch.no_grad(), quiet:
            copies = {arg: _fresh(value_of(arg)) for arg in tensors}
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: copies.get(arg, value_of(arg)))
            with spy:
                if node.op == "call_method":
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return everything
    return {index for index, arg in enumerate(tensors) if storage_key(copies[arg]) in spy.written}


def _fresh(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def structure_key(graph: fx.Graph, attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for two graphs that compute the same from inputs of the same metadata: targets, arguments, constants, dtypes, shapes,
    strides, and which inputs share memory. Names of nodes do not count. attributes: what ``get_attr`` nodes name."""
    index: dict[fx.Node, int] = {}
    storages: dict[int, int] = {}
    rows: list[Any] = []
    for position, node in enumerate(graph.nodes):
        index[node] = position
        if node.op == "placeholder":
            value = value_of(node)
            key = storage_key(value)
            alias = None if key is None else storages.setdefault(key, len(storages))
            rows.append(("in", meta_key(value), alias))
        elif node.op == "get_attr":
            rows.append(("attr", _Same(attributes[str(node.target)])))
        else:
            target = node.target if isinstance(node.target, str) else _Same(node.target)
            rows.append((node.op, target, constant_key((node.args, node.kwargs), index.__getitem__)))
    return tuple(rows)


def constant_key(value: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """The arguments of a node as something hashable."""
    again = lambda item: constant_key(item, of_node)
    if isinstance(value, fx.Node):
        return ("node", of_node(value))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(again, value))
    if isinstance(value, dict):
        return ("dict", *((key, again(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", again(value.start), again(value.stop), again(value.step))
    if isinstance(value, (int, float, bool, str, complex, type(None))):
        return (type(value).__name__, repr(value))  # repr: 1 is not True and 0.0 is not -0.0
    return (type(value).__name__, str(value)) if isinstance(value, _PLAIN) else ("object", _Same(value))


_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool)


class _Same:
    """Equal only to itself; keeps its object alive so that an id is never met twice."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def meta_key(value: Any) -> tuple[Any, ...]:
    """Dtype, device, shape, strides and offset of a fake tensor as text, or the expression of a size."""
    if isinstance(value, torch.Tensor):
        expr = lambda sizes: tuple(str(size) for size in sizes)
        return ("tensor", str(value.dtype), str(value.device), expr(value.size()), expr(value.stride()), str(value.storage_offset()))
    return (type(value).__name__, str(value))
