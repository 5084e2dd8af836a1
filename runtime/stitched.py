"""A traced graph, cut at its splitting ops, with one function per piece: compiled once for all sizes, or for some alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from runtime.config import CompileConfig
from runtime.pieces import Guard, Launched, alias_reason, compile_piece, concrete
from runtime.program import Function, Program
from runtime.split import count_calls, cut, never_called, resolve_ops


class Input(NamedTuple):
    """An input of a piece. ``name``: argument path, dotted parameter name, or value of the graph; ``owner``: "caller",
    "persistent", "size", "piece N" or "splitting op N"."""

    name: str
    owner: str


@dataclass(frozen=True)
class Piece:
    """One piece of a compiled step, in order of execution.

    kind "graph": compiled code, may be captured. kind "split": one splitting op, runs between graphs.
    mutates: names of inputs that it writes. fresh: outputs that a splitting op allocates itself, so at a new address each step.
    same_as: index of the first piece with the same code. compiled: what made it. note: why it is not compiled, or "".
    """

    index: int
    kind: Literal["graph", "split"]
    op: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    mutates: tuple[str, ...]
    fresh: tuple[str, ...]
    same_as: int
    compiled: Literal["inductor", "eager"]
    note: str


class Stitched:
    """A cut graph with one function per segment."""

    def __init__(self, gm: fx.GraphModule, config: CompileConfig, owners: Sequence[Input] = ()) -> None:
        """owners: who gives each input of the graph, as far as known."""
        self.config = config
        ops = resolve_ops(config.splitting_ops)
        # split = "capture": one piece, which a capture cuts where the compiled code calls the splitting op
        self.cut = cut(gm, ops if config.split != "capture" else ())
        self.calls = count_calls(gm, ops)
        self.program = Program(self.cut)
        modes = [value.fake_mode for value in self.cut.values.values() if hasattr(value, "fake_mode")]
        self.shape_env = modes[0].shape_env if modes else None
        inductor = config.backend == "inductor"
        self.names = {name: owner.name for name, owner in zip(self.cut.placeholders, owners, strict=False)}
        self.reasons = [alias_reason(segment, self.names) if inductor and segment.kind == "graph" else "" for segment in self.cut.segments]
        self.guards: list[Guard] = []
        """Conditions on sizes that compiling the pieces has added."""
        self.functions = [self._function(index, segment.input_values, self.shape_env) for index, segment in enumerate(self.cut.segments)]

    def _function(self, index: int, values: list[Any], shape_env: Any) -> Function:
        segment = self.cut.segments[index]
        if not self._compiles(index):
            return segment.module.forward
        piece = compile_piece(segment, values, shape_env)
        self.guards += piece.guards if shape_env is not None else []
        number = sum(earlier.kind != "host" for earlier in self.cut.segments[:index])
        inputs = tuple(self.names.get(name, name) for name in segment.inputs)
        return Launched(piece, segment, f"piece {number}", inputs).function()

    def _compiles(self, index: int) -> bool:
        return self.config.backend == "inductor" and self.cut.segments[index].kind == "graph" and not self.reasons[index]

    def for_sizes(self, sizes: Mapping[Any, int]) -> list[Function]:
        """Functions compiled for these sizes alone (symbol → int)."""
        made: list[Function] = []
        for index, segment in enumerate(self.cut.segments):
            if self._compiles(index):
                with torch._subclasses.FakeTensorMode():
                    values = [concrete(value, sizes) for value in segment.input_values]
                made.append(self._function(index, values, None))
            else:
                made.append(self.functions[index])
        return made

    def pieces(self, owners: Sequence[Input]) -> tuple[Piece, ...]:
        """The public table. owners: one per input of the graph."""
        known = dict(zip(self.cut.placeholders, owners, strict=True))
        first: dict[Any, int] = {}
        table: list[Piece] = []
        for position, segment in enumerate(self.cut.segments):
            index = len(table)
            if segment.kind != "host":
                table.append(
                    Piece(
                        index, segment.kind, segment.op, tuple(known[name] for name in segment.inputs), segment.outputs,
                        tuple(known[name].name for name in segment.mutates), segment.fresh, first.setdefault(segment.key, index),
                        "inductor" if self._compiles(position) else "eager", self.reasons[position],
                    )
                )  # fmt: skip
            who = {"graph": f"piece {index}", "split": f"splitting op {index}", "host": "host"}[segment.kind]
            known.update({name: Input(name, who) for name in segment.outputs})
        return tuple(table)

    def notes(self) -> list[str]:
        return never_called(self.calls) + [f"a piece is not compiled: {reason}" for reason in dict.fromkeys(self.reasons) if reason]
