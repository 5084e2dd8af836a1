"""A captured step: its segments, ``[graph | eager call]``, their replay, and the table of who owns what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from runtime.graph import CaptureError, Graph
from runtime.op_arguments import tensors_in

Owner = Literal["caller", "piece", "splitting op", "persistent", "held"]


@dataclass(frozen=True)
class Address:
    """One input of one segment: a row of the contract.

    owner: caller (arena), piece (an earlier piece of this step), splitting op (written by it into memory of the piece before),
    persistent (a parameter or buffer), held (any other tensor that existed before; the step keeps it alive).
    """

    segment: int
    kind: str
    input: str
    owner: Owner
    producer: str
    address: int
    verified: bool = False
    proved_on: str = ""
    """When, if the proof is that of an earlier start (runtime/proofs.py)."""


@dataclass
class EagerCall:
    """A splitting op that runs between two graphs, with its arguments at fixed addresses."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (output index, the buffer the next piece reads)
    bound: Callable[[], object] | None = None
    """Repeats the op's launches on these arguments, without the op's checks and the kernel launcher around them."""

    @property
    def kind(self) -> str:
        return f"{self.op}{'' if self.bound is None else ', bound'}"

    def runner(self) -> Callable[[], object]:
        if self.bound is not None:
            return self.bound
        op, args, kwargs, copies = self.op, self.args, self.kwargs, self.copies
        if copies:

            def run() -> None:
                outputs = tensors_in(op(*args, **kwargs))
                for index, target in copies:
                    target.copy_(outputs[index])

            return run
        if kwargs:
            return lambda: op(*args, **kwargs)
        return lambda: op(*args)


@dataclass
class CapturedStep:
    """A captured step. ``replay()`` runs it; ``output`` then holds the results, at addresses that never change.

    Memory of the pool in ``output`` is lent: it is good while the step is, and until another graph of the pool runs.
    """

    segments: list[Graph | EagerCall]
    output: Any
    addresses: list[Address]
    nbytes: int
    mutated: frozenset[str]
    """Inputs of the arena that the step writes into, as far as its ops declare."""
    persistent: dict[str, torch.Tensor]
    """Every tensor of the step that existed before, by name; kept alive so that no graph reads freed memory."""
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """The persistent ones that the step writes into, as far as its ops declare."""
    proved_on: str = ""
    """When an earlier start proved it; "" if this one did."""
    replay: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        runs = [s.runner() if isinstance(s, EagerCall) else s.replayer() for s in self.segments if isinstance(s, EagerCall) or not s.empty]
        self.replay = runs[0] if len(runs) == 1 else partial(_run_all, tuple(runs))

    @property
    def graphs(self) -> list[Graph]:
        return [s for s in self.segments if not isinstance(s, EagerCall)]

    def reset(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.output, self.replay = None, _gone

    def verified(self, proved_on: str = "") -> None:
        """proved_on: when, if by an earlier start."""
        self.proved_on = proved_on
        self.addresses = [replace(a, verified=True, proved_on=proved_on) for a in self.addresses]

    @property
    def kinds(self) -> list[str]:
        """What each segment is."""
        return [s.kind if isinstance(s, EagerCall) else "empty graph" if s.empty else "graph" for s in self.segments]


def _run_all(runs: tuple[Callable[[], object], ...]) -> None:
    for run in runs:
        run()


def _gone() -> None:
    raise CaptureError("replay of a step whose graphs were reset")
