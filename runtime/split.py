"""Cut an FX graph at the splitting ops into pieces that take and give flat tensors.

``cut(gm, ops)`` walks a graph as Dynamo traced it, in order. Every splitting op is a piece of its own, what lies between two of
them is a graph piece. Program order is kept, so a write is seen by exactly the readers that see it in eager.

What never crosses a border as itself:
- host values (sizes and arithmetic on them) are computed again in each piece that needs them, from the sizes of the step;
- tuples and lists are taken apart where they are made (a split at an op with several outputs passes its tensors one by one);
- views of a buffer that somebody writes later are made again by the reader, so that one storage stays one storage when the piece
  that made it is compiled. Compilers keep values, not aliases.

Pieces that only make views are merged into the splitting op beside them: there is nothing to capture in them.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from runtime.fxnodes import GRAD_SWITCHES, is_check, is_host_node, is_tuple, storage_key, value_of, written_args
from runtime.program import Cut, Segment, SplitError, Writes, build, is_size_check

DEFAULT_OPS = ("tkernels::paged_attention_out",)


# ---------------------------------------------------------------------------------------------------------------- op names


@dataclass(frozen=True)
class SplitOp:
    """A splitting op: ``name`` is "ns::op", ``overload`` "" for any of its overloads, else "default", "out", …"""

    name: str
    overload: str = ""

    def matches(self, node: fx.Node) -> bool:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return target._schema.name == self.name and self.overload in ("", target._overloadname)
        if isinstance(target, torch._ops.OpOverloadPacket):  # Dynamo's nodes hold the packet when the module called the packet
            return target._qualified_op_name == self.name and self.overload in ("", "default")
        if self.name.startswith("aten::") and not self.overload:
            # Dynamo traces torch functions and tensor methods, not the aten ops that they become.
            short = self.name.removeprefix("aten::")
            if node.op == "call_method":
                return target == short
            module = getattr(target, "__module__", None) or ""
            return getattr(target, "__name__", None) == short and (module.startswith("torch") or module in ("_operator", "builtins"))
        return False


def resolve_ops(names: Iterable[str]) -> tuple[SplitOp, ...]:
    """Splitting ops by name: ``ns.op``, ``ns::op``, either with an overload (``ns::op.default``), with or without ``torch.ops.``.

    Raises SplitError for a name that no registered op has, with the nearest one that exists. The default op passes unregistered:
    a module cannot call it before its package is imported.
    """
    return tuple(dict.fromkeys(_resolve_op(name) for name in names))


def _resolve_op(text: str) -> SplitOp:
    bare = text.strip().removeprefix("torch.ops.")
    parts = bare.replace("::", ".").split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise SplitError(f"splitting_ops: expected a name such as 'ns::op', 'ns.op' or 'ns::op.default', got {text!r}")
    name, overload = f"{parts[0]}::{parts[1]}", parts[2] if len(parts) == 3 else ""
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    if packet is None:
        if name in DEFAULT_OPS:
            return SplitOp(name, overload)
        known = torch._C._dispatch_get_all_op_names()
        near = difflib.get_close_matches(name, {known_name.split(".")[0] for known_name in known}, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else "import the package that registers it first"
        raise SplitError(f"splitting_ops: no op {text!r} is registered; {hint}")
    if overload and overload not in packet.overloads():
        raise SplitError(f"splitting_ops: {text!r}: {name} has no overload {overload!r}; it has {', '.join(packet.overloads())}")
    return SplitOp(name, overload)


# --------------------------------------------------------------------------------------------------------------- cutting


def count_calls(gm: fx.GraphModule, ops: Sequence[SplitOp]) -> dict[str, int]:
    """How often the graph calls each splitting op."""
    return {op.name: sum(op.matches(node) for node in gm.graph.nodes) for op in ops}


def never_called(calls: Mapping[str, int]) -> list[str]:
    """What a user should hear about ``count_calls``."""
    return [f"splitting op {op} is never called by this module, nothing is cut there" for op, count in calls.items() if not count]


def cut(gm: fx.GraphModule, ops: Sequence[SplitOp]) -> Cut:
    """Cut ``gm`` at ``ops``. The module itself is left as it is. Raises SplitError naming the node that cannot be cut around."""
    graph = _private_copy(gm)
    _name_sizes(graph)
    segments = _assign(graph, ops)
    memo: dict[Any, set[int]] = {}
    writes = {node: written_args(node, memo) for segment in segments for node in segment.nodes}
    segments = _merge_views(segments, writes)
    home = {node: segment for segment in segments for node in segment.nodes}
    _take_tuples_apart(graph, home)
    sunk = _sink_views(graph, segments, home, writes)
    return build(gm, graph, segments, sunk, writes)


def _private_copy(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph(owning_module=gm)
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in ("example_value", "val", "stack_trace") if key in node.meta}
    return graph


def _name_sizes(graph: fx.Graph) -> None:
    """Host nodes that are plainly one of the step's sizes become that size's placeholder; full sizes become tuples of them."""
    sizes: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, node)

    # A check compares the sizes of two inputs that the tracer took for equal: it must go on reading both.
    checking: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_check(node) or (is_host_node(node) and node.users and checking.issuperset(node.users)):
            checking.add(node)

    def known(item: Any) -> Any:
        if isinstance(item, torch.SymInt):
            return sizes.get(item.node.expr)
        return item if isinstance(item, int) else None

    for node in list(graph.nodes):
        if not is_host_node(node):
            continue
        value = value_of(node)
        if isinstance(value, (tuple, list)):
            parts = [known(item) for item in value]
            if all(part is not None for part in parts) and all(user.target is operator.getitem for user in node.users):
                for user in list(node.users):
                    picked = parts[user.args[1]]  # type: ignore[index]
                    if isinstance(picked, (fx.Node, int)):
                        _replace(user, picked, checking)
        elif (part := known(value)) is not None and part is not node:
            _replace(node, part, checking)


def _replace(node: fx.Node, value: Any, keep: set[fx.Node]) -> None:
    for user in [user for user in node.users if user not in keep]:
        swap = lambda arg: value if arg is node else arg
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), swap)


def _assign(graph: fx.Graph, ops: Sequence[SplitOp]) -> list[Segment]:
    segments: list[Segment] = []
    home: dict[fx.Node, Segment] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_host_node(node) or is_size_check(node) or node.target in GRAD_SWITCHES:
            continue
        op = next((op for op in ops if op.matches(node)), None)
        if op is not None:
            segments.append(Segment("split", op.name))
        elif node.target is operator.getitem and is_tuple(node.args[0]):  # type: ignore[arg-type]
            # Stay with the producer: only flat tensors leave a piece.
            owner = home.get(node.args[0])  # type: ignore[arg-type]
            if owner is not None:
                owner.nodes.append(node)
                home[node] = owner
                continue
        if op is None and (not segments or segments[-1].kind == "split"):
            segments.append(Segment("graph", ""))
        segments[-1].nodes.append(node)
        home[node] = segments[-1]
        if _looks_dead(node):
            segments[-1].keep_eager = f"{node.target} returns nothing and declares no mutation, so a compiler would drop it"
    return segments


def _looks_dead(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns and not target._schema.is_mutable and not is_check(node)


def _is_view(node: fx.Node, writes: Writes) -> bool:
    """Only metadata changes: the result lies in the storage of its first argument and nothing is written."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    base = storage_key(value_of(node.args[0]))
    if node.target is operator.getitem and is_tuple(node.args[0]):
        return _is_view(node.args[0], writes)
    leaves = pytree.tree_leaves(value_of(node))
    return base is not None and bool(leaves) and all(storage_key(leaf) == base for leaf in leaves) and not writes.get(node)


def _merge_views(segments: list[Segment], writes: Writes) -> list[Segment]:
    merged: list[Segment] = []
    carried: list[fx.Node] = []  # views before the first splitting op
    for position, segment in enumerate(segments):
        if segment.kind == "graph" and len(segments) > 1 and all(_is_view(node, writes) for node in segment.nodes):
            if merged and merged[-1].kind == "split":
                merged[-1].nodes.extend(segment.nodes)
                continue
            if position + 1 < len(segments):
                carried = segment.nodes
                continue
        segment.nodes = carried + segment.nodes
        carried = []
        merged.append(segment)
    return merged


def _take_tuples_apart(graph: fx.Graph, home: dict[fx.Node, Segment]) -> None:
    """A tuple used as a whole in another piece (``torch.cat(chunks)``) is rebuilt there from its elements."""

    def elements(node: fx.Node) -> Any:
        value, made = value_of(node), []
        for position, item in enumerate(value):
            found = next((u for u in node.users if u.target is operator.getitem and u.args == (node, position)), None)
            if found is None:
                with graph.inserting_after(node):
                    found = graph.call_function(operator.getitem, (node, position))
                found.meta["example_value"] = item
                home[node].nodes.append(found)
                home[found] = home[node]
            made.append(elements(found) if is_tuple(found) else found)
        return type(value)(made) if type(value) in (tuple, list) else tuple(made)

    for node in [node for node in graph.nodes if node in home and is_tuple(node)]:
        outside = [user for user in node.users if user.op == "output" or home.get(user, home[node]) is not home[node]]
        if outside:
            parts = elements(node)
            for user in outside:
                user.args, user.kwargs = _swap_node(user.args, node, parts), _swap_node(user.kwargs, node, parts)


def _swap_node(structure: Any, node: fx.Node, value: Any) -> Any:
    if structure is node:
        return value
    if isinstance(structure, (tuple, list)):
        return type(structure)(_swap_node(item, node, value) for item in structure)
    if isinstance(structure, dict):
        return {key: _swap_node(item, node, value) for key, item in structure.items()}
    return structure


def _sink_views(graph: fx.Graph, segments: list[Segment], home: dict[fx.Node, Segment], writes: Writes) -> set[fx.Node]:
    """Views to be made again by their readers, so that a storage which is written after the piece that made it stays one storage.

    A compiler may give ``y`` and a view of ``y`` two buffers when both leave a piece. Harmless while nobody writes; so only
    storages that a later piece writes (or that the caller gets twice, and may write) are looked at. Where a view cannot be made
    again, the piece is kept from the compiler and says why.
    """
    position = {id(segment): index for index, segment in enumerate(segments)}
    last_write: dict[int, int] = {}
    for node, args in writes.items():
        for arg in args:
            key = storage_key(value_of(arg))
            if key is not None:
                last_write[key] = max(last_write.get(key, -1), position[id(home[node])])
    output = next(iter(graph.find_nodes(op="output")))
    sunk: set[fx.Node] = set()
    for segment in segments:
        if segment.kind != "graph":
            continue
        first: dict[int, fx.Node] = {}
        leaving: dict[int, list[fx.Node]] = {}
        for node in segment.nodes:
            key = storage_key(value_of(node))
            if key is None:
                continue
            first.setdefault(key, node)
            if any(user is output or home.get(user) not in (None, segment) for user in _users_through_host(node, home)):
                leaving.setdefault(key, []).append(node)
        for key, nodes in leaving.items():
            shared_by_caller = sum(output in node.users for node in nodes) > 1
            if len(nodes) < 2 or not (shared_by_caller or last_write.get(key, -1) > position[id(segment)]):
                continue
            for node in nodes:
                walk = node
                chain = []
                while walk is not first[key] and walk in home and home[walk] is segment and _is_view(walk, writes):
                    chain.append(walk)
                    walk = walk.args[0]  # type: ignore[assignment]
                if walk is first[key] or (walk.op == "placeholder"):
                    sunk.update(chain)
                elif not segment.keep_eager:
                    segment.keep_eager = f"{node.name} shares memory that a later piece writes, and is not a plain view"
    return sunk


def _users_through_host(node: fx.Node, home: dict[fx.Node, Segment]) -> Iterable[fx.Node]:
    for user in node.users:
        if user in home or user.op == "output":
            yield user
        else:
            yield from _users_through_host(user, home)
