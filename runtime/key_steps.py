"""The captured steps of one key, a combination of host values: its inputs' arena, the callable that is captured, what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.arena import Arena
from runtime.binding import Call
from runtime.captured_step import CapturedStep
from runtime.contract import Expected, Inputs
from runtime.inputs import InputSpec
from runtime.outputs import OutputDims, StepOutput
from runtime.trace import BindError

NamedCall = Callable[[Mapping[str, torch.Tensor]], Any]
Representative = Callable[..., "Call | None"]
"""(size) -> a representative call; None: this size does not occur with this key. (size, context) -> one of another context."""


@dataclass(eq=False)
class Captured:
    """A step that has passed its proof. mutated: arena inputs that it writes, to be copied back to the caller."""

    step: CapturedStep
    output: StepOutput
    mutated: frozenset[str]
    idempotent: bool
    """Running it twice on the same inputs is running it once."""
    padded: dict[str, int]


@dataclass(eq=False)
class KeySteps:
    host: tuple[Any, ...]
    text: str
    specs: dict[str, InputSpec]
    arena: Arena
    call: NamedCall
    """The callable that is captured, on tensors by name."""
    module_call: NamedCall
    dims: OutputDims
    representative: Representative
    """What steps are timed on."""
    proving: Representative
    """What they are captured and proved on."""
    static: dict[str, torch.Tensor]
    example: Call
    alike: tuple[str, ...]
    """Named sizes that must be equal in a call for a graph to serve it: the outputs do not tell which of them they follow."""
    writes_arguments: bool = False
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters, buffers and static arguments that the step writes, as far as its ops declare."""
    checked: bool = False
    """Whether padding has been found harmless or not."""
    follows_size: str = ""
    """Why every graph may only serve its own size, as known before any is captured, or ""."""
    rows_checked: set[int] = field(default_factory=set)
    """Sizes that were compared with the module at the fewest rows that they serve."""
    compared: set[tuple[int, int]] = field(default_factory=set)
    """(real rows, size) of these comparisons, those of earlier starts included."""
    exact: bool = False
    why_exact: str = ""
    proof_name: str = ""
    """What proofs of this key are kept under: the key and all shapes around it."""
    facts_date: str = ""
    """When what is known of the key was found out, if an earlier start did."""
    sets: tuple[tuple[int, bool], list[Inputs]] = ((0, False), [])
    """The latest size's sets of inputs: all its modes are compared on the same values, whatever ``proving`` gives the next time."""
    expected: tuple[int, list[Expected]] = (0, [])
    """What the latest size captured gives uncaptured: all its modes are compared with the same runs."""
    ran: set[int] = field(default_factory=set)
    """Sizes that have run uncaptured on the capture stream."""

    modes: frozenset[str] = frozenset(("piecewise", "full"))
    """Those that are captured for this key, of the configured ones."""
    captured: dict[tuple[str, int], Captured] = field(default_factory=dict)
    dropped: dict[tuple[str, int], str] = field(default_factory=dict)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Uncaptured: the callable that is captured, or the module where compiled code is not made for these sizes."""
        try:
            return self.call(tensors)
        except BindError:
            return self.module_call(tensors)
