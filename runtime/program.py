"""Segments of a cut graph: built into graph modules of their own, and run one after another as one program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from runtime.fxnodes import is_check, is_host_node, storage_key, structure_key, value_of
from runtime.overlap import may_overlap

Writes = dict[fx.Node, set[fx.Node]]  # node → the arguments whose memory it writes
Kind = Literal["graph", "split", "host"]
Function = Callable[..., tuple[Any, ...]]


class SplitError(ValueError):
    """A graph that cannot be cut, or a splitting op that does not exist. The message names the node or the op and why."""


@dataclass
class Segment:
    """One piece: a graph module over flat inputs that returns a flat tuple.

    ``inputs`` and ``outputs`` name values of the whole graph; ``mutates`` is the part of ``inputs`` that the piece writes.
    ``fresh`` are outputs of a splitting op that it allocates itself. ``exposed`` are storages that a later piece writes, or that the
    caller gets: no other value may come to lie there. ``key`` is equal for segments that compute the same.
    ``keep_eager`` says why a compiler must not have it, "" when it may.
    """

    kind: Kind
    op: str
    nodes: list[fx.Node] = field(default_factory=list)
    module: fx.GraphModule = None  # type: ignore[assignment]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    key: tuple[Any, ...] = ()
    input_values: list[Any] = field(default_factory=list)
    output_values: list[Any] = field(default_factory=list)
    exposed: frozenset[int | None] = frozenset()
    keep_eager: str = ""


@dataclass
class Cut:
    """A graph as segments. ``placeholders`` are its inputs in order, ``outputs`` its output structure with value names as leaves.

    ``values`` maps each name that crosses a border to its fake value.
    """

    segments: list[Segment]
    placeholders: tuple[str, ...]
    outputs: Any
    values: dict[str, Any]


@dataclass(frozen=True)
class OutputRef:
    """A leaf of ``Cut.outputs`` that is the value of that name."""

    name: str


class _Builder:
    """Copies the nodes of one segment into a graph of its own and notes what it takes from outside."""

    def __init__(self, gm: fx.GraphModule, home: dict[fx.Node, Segment], sunk: set[fx.Node], segment: Segment) -> None:
        self.gm, self.home, self.sunk, self.segment = gm, home, sunk, segment
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.last_input: fx.Node | None = None
        self.env: dict[fx.Node, fx.Node] = {}
        self.root: dict[str, Any] = {}

    def get(self, node: fx.Node) -> fx.Node:
        if node in self.env:
            return self.env[node]
        again = node.op == "get_attr" or is_host_node(node) or node in self.sunk
        if again or self.home.get(node) is self.segment:
            return self.copy(node)
        if self._is_crossing(node):
            return self.take(node)
        raise SplitError(
            f"{node.name} ({node.target}): a {type(value_of(node)).__name__} would cross from one piece to the next, and only tensors can; "
            "move the splitting op out of the region that it opens (autocast) or do not read values back (.item()), "
            "or set compile.split = 'capture'"
        )

    @staticmethod
    def _is_crossing(node: fx.Node) -> bool:
        return node.op == "placeholder" or isinstance(value_of(node), torch.Tensor)

    def take(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_after(self.last_input):
            made = self.last_input = self.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        self.inputs[node] = self.env[node] = made
        return made

    def copy(self, node: fx.Node) -> fx.Node:
        for arg in node.all_input_nodes:  # before the node itself, so that the order is right
            self.get(arg)
        made = self.graph.node_copy(node, self.get)
        made.meta = dict(node.meta)
        if node.op == "get_attr":
            self.root[str(node.target)] = operator.attrgetter(str(node.target))(self.gm)
        self.env[node] = made
        return made


def build(gm: fx.GraphModule, graph: fx.Graph, segments: list[Segment], sunk: set[fx.Node], writes: Writes) -> Cut:
    """Fill in modules, inputs and outputs of the segments.

    sunk: views that each reader makes again. Two host segments may be added: checks of sizes at the start, and at the end what the
    caller gets without a piece having made it (sizes, views that are made again, constants).
    """
    output = next(iter(graph.find_nodes(op="output")))
    results = list(dict.fromkeys(leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)))
    checks = Segment("host", "", [node for node in graph.nodes if is_size_check(node)])
    tail = Segment("host", "", [node for node in results if node.op == "get_attr" or is_host_node(node) or node in sunk])
    segments = [segment for segment in (checks, *segments, tail) if segment.nodes]
    home = {node: segment for segment in segments if segment is not tail for node in segment.nodes}
    order = {node: index for index, node in enumerate(graph.nodes)}
    builders = [_Builder(gm, home, sunk, segment) for segment in segments]
    for segment, builder in zip(segments, builders, strict=True):
        for node in sorted(segment.nodes, key=order.__getitem__):
            if segment is tail or node not in sunk:
                builder.get(node)
    givers = _symbol_givers(graph)
    for segment, builder in zip(segments, builders, strict=True):
        if segment.kind == "graph":
            _bind_symbols(segment, builder, givers)
    wanted = {node for builder in builders for node in builder.inputs} | set(results)
    values = {node.name: value_of(node) for node in graph.find_nodes(op="placeholder")}
    modules: dict[Any, fx.GraphModule] = {}
    for segment, builder in zip(segments, builders, strict=True):
        leaving = [node for node in segment.nodes if segment is tail or (node in wanted and node not in sunk and node not in tail.nodes)]
        builder.graph.output(tuple(builder.env[node] for node in leaving))
        segment.inputs = tuple(node.name for node in builder.inputs)
        segment.outputs = tuple(node.name for node in leaving)
        values.update({node.name: value_of(node) for node in leaving})
        written = [value_of(arg) for node in segment.nodes for arg in writes.get(node, ())]
        segment.mutates = tuple(node.name for node in builder.inputs if _is_written(value_of(node), written))
        if segment.kind == "split":
            held = {storage_key(value_of(node)) for node in builder.inputs}
            segment.fresh = tuple(node.name for node in leaving if storage_key(value_of(node)) not in held)
        segment.key = (segment.kind, *structure_key(builder.graph, builder.root))
        if segment.key not in modules:
            modules[segment.key] = fx.GraphModule(builder.root, builder.graph)
        segment.module = modules[segment.key]
        segment.input_values = [value_of(node) for node in builder.inputs]
        segment.output_values = [value_of(node) for node in leaving]
    exposed = {storage_key(value_of(node)) for node in results}
    for segment in reversed(segments):
        segment.exposed = frozenset(exposed - {None})
        exposed |= {storage_key(value_of(arg)) for node in segment.nodes for arg in writes.get(node, ())}
    outputs = pytree.tree_map(lambda leaf: OutputRef(leaf.name) if isinstance(leaf, fx.Node) else leaf, output.args[0])
    return Cut(segments, tuple(node.name for node in graph.find_nodes(op="placeholder")), outputs, values)


def _symbols(value: Any) -> tuple[set[Any], set[Any]]:
    """The symbols in a value's sizes, and those among them that are plainly one of the sizes."""
    sizes = (*value.size(), *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
    exprs = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    return {symbol for expr in exprs for symbol in expr.free_symbols}, {expr for expr in exprs if expr.is_Symbol}


def _symbol_givers(graph: fx.Graph) -> dict[Any, fx.Node]:
    """For each symbol an input of the whole graph that tells it: the size itself, else a tensor that has it as a size."""
    givers: dict[Any, fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in sorted(placeholders, key=lambda node: isinstance(value_of(node), torch.Tensor)):
        for symbol in _symbols(value_of(node))[1]:
            givers.setdefault(symbol, node)
    return givers


def _bind_symbols(segment: Segment, builder: _Builder, givers: dict[Any, fx.Node]) -> None:
    """A compiler learns a symbol from a size that is plainly that symbol. A piece that only gets [2 * u0] needs u0 beside it."""
    seen, plain = set(), set()
    for node in builder.inputs:
        used, bare = _symbols(value_of(node))
        seen |= used
        plain |= bare
    for symbol in sorted(seen - plain, key=str):
        if symbol in givers:
            builder.take(givers[symbol])
        elif not segment.keep_eager:
            segment.keep_eager = f"its inputs have the size {symbol}, which comes from data"


def is_size_check(node: fx.Node) -> bool:
    """A check of the caller's sizes alone, which can be made before anything runs."""
    if not is_check(node):
        return False
    seen, stack = set(), [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg.op != "placeholder" and not is_host_node(arg):
                return False
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)
    return True


def _is_written(value: Any, written: list[Any]) -> bool:
    key = storage_key(value)
    return key is not None and any(storage_key(other) == key and may_overlap(value, other, key) for other in written)


# ------------------------------------------------------------------------------------------------------- the stitched call


class Program:
    """The segments of a ``Cut`` as one list of calls over numbered values. Values are dropped after their last reader."""

    def __init__(self, cut: Cut) -> None:
        slots: dict[str, int] = {name: index for index, name in enumerate(cut.placeholders)}
        steps: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        piece = 0
        for segment in cut.segments:
            reads = tuple(slots[name] for name in segment.inputs)
            for name in segment.outputs:
                slots.setdefault(name, len(slots))
            steps.append((-1 if segment.kind == "host" else piece, reads, tuple(slots[name] for name in segment.outputs)))
            piece += segment.kind != "host"
        self._outputs, self._spec = pytree.tree_flatten(cut.outputs)
        kept = {slots[leaf.name] for leaf in self._outputs if isinstance(leaf, OutputRef)}
        self._leaves = [(slots[leaf.name], None) if isinstance(leaf, OutputRef) else (-1, leaf) for leaf in self._outputs]
        last = {slot: number for number, (_, reads, made) in enumerate(steps) for slot in (*reads, *made)}
        dead: list[list[int]] = [[] for _ in steps]
        for slot, number in last.items():
            if slot not in kept:
                dead[number].append(slot)
        self._steps = [(*step, tuple(gone)) for step, gone in zip(steps, dead, strict=True)]
        self._width = len(slots)

    def run(
        self,
        functions: Sequence[Function],
        inputs: Sequence[Any],
        on_piece: Callable[[int, Function, tuple[Any, ...]], tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """The flat outputs. ``functions`` holds one callable per segment, ``inputs`` one value per placeholder."""
        values = [*inputs, *[None] * (self._width - len(inputs))]
        for function, (piece, reads, made, dead) in zip(functions, self._steps, strict=True):
            args = tuple([values[slot] for slot in reads])
            results = function(*args) if on_piece is None or piece < 0 else on_piece(piece, function, args)
            for slot, result in zip(made, results, strict=True):
                values[slot] = result
            del args, results
            for slot in dead:
                values[slot] = None
        return [leaf if slot < 0 else values[slot] for slot, leaf in self._leaves]

    def pack(self, flat: list[Any]) -> Any:
        """The flat outputs in the structure of the traced graph."""
        return pytree.tree_unflatten(flat, self._spec)
