"""What a step costs, by mode, size and context: the table that the scheduler composes steps with. Pure Python.

A table is made of a plan's rows (measured on the device, ``python -m runtime plan --json FILE``) or of a roofline
(``runtime.roofline``). The time of a step is that of its size in the cheapest mode, and what attention adds:
``kv_ms`` for each token of context that is read, ``pair_ms`` for each pair of a prompt token and a token before it.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.plan import PlanRow, between, choose

Rule = Literal["cheapest", "fixed"]
Pick = Callable[[int, bool], tuple[str, int]]
"""(tokens of a step, whether chunks of prompts are in it) -> the mode and the size that serve it."""
INF = float("inf")


class StepCost(NamedTuple):
    """ms: without attention's share that depends on the context. rows: what the step is padded to."""

    ms: float
    mode: str
    rows: int


class _Costs:
    """One kind of step: single tokens only, or with chunks of prompts."""

    def __init__(self, rows: Sequence[PlanRow], rule: Rule) -> None:
        by_size = {row.size: row for row in rows}
        self.sizes = sorted(by_size)
        self._eager = {size: ms for size in self.sizes if (ms := by_size[size].eager_ms) is not None}
        self._graphs = {
            (mode, size): ms for size, row in by_size.items() for mode, ms in (("full", row.full_ms), ("piecewise", row.piecewise_ms))
            if ms is not None
        }  # fmt: skip
        self._captured: list[StepCost] = []
        self._least: list[float] = []  # that any graph of this size or above costs, which eager must not exceed
        fitting: list[tuple[float, str, int]] = []
        best = StepCost(INF, "eager", 0)
        for size in reversed(self.sizes):
            here = [(self._graphs[mode, size], mode, size) for mode in ("full", "piecewise") if (mode, size) in self._graphs]
            if here:  # "fixed" takes the nearest size, full where there is a full graph, whatever it costs
                fitting += here
                best = StepCost(*(choose(fitting) if rule == "cheapest" else here[0]))
            self._captured.append(best)
            self._least.append(min(fitting, default=(INF,))[0])
        self._captured.reverse()
        self._least.reverse()
        self.captured = [size for size, cost in zip(self.sizes, self._captured, strict=True) if cost.rows == size]
        self._rule = rule

    def cost(self, tokens: int) -> StepCost:
        index = bisect_left(self.sizes, tokens)
        eager = StepCost(self._eager_ms(tokens), "eager", tokens)
        if index == len(self.sizes) or self._captured[index].ms == INF:
            return eager
        return self._captured[index] if self._rule == "fixed" or eager.ms > self._least[index] else eager

    def cost_of(self, mode: str, size: int) -> StepCost:
        """Of a graph that the table does not have: what the rule takes for such a step."""
        ms = self._eager_ms(size) if mode == "eager" else self._graphs.get((mode, size))
        return StepCost(self.cost(size).ms if ms is None else ms, mode, size)

    def _eager_ms(self, tokens: int) -> float:
        """Between the measured neighbours; past the largest, on the last line, if that rises."""
        *_, low, high = [0, 0, *self._eager]
        if low and tokens > high:
            slope = (self._eager[high] - self._eager[low]) / (high - low)
            return self._eager[high] + max(0.0, slope) * (tokens - high)
        ms = between(self._eager, tokens)
        return INF if ms is None else ms


class StepCosts:
    """decode: rows for steps of single tokens; mixed: for steps with chunks of prompts in them.

    rule: "cheapest" serves a step by the cheapest captured size that holds it, or eager; "fixed" by the nearest captured size,
    as a full graph where there is one, eager only where none holds it.
    """

    def __init__(
        self,
        decode: Sequence[PlanRow],
        mixed: Sequence[PlanRow],
        *,
        kv_ms: float = 0.0,
        pair_ms: float = 0.0,
        rule: Rule = "cheapest",
        source: str = "measured",
    ) -> None:
        self._decode, self._mixed = _Costs(decode, rule), _Costs(mixed, rule)
        self.kv_ms, self.pair_ms, self.source = kv_ms, pair_ms, source
        self.num_pages: int | None = None  # of the engine that the costs were measured in
        self._pick: Pick | None = None
        self._known: tuple[dict[int, StepCost], dict[int, StepCost]] = ({}, {})
        self.sizes = self._mixed.captured
        """Captured sizes for steps with prompts: where a step has no padding."""

    def served_by(self, pick: Pick) -> StepCosts:
        """The same costs of steps whose mode and size ``pick`` says, as an engine's dispatcher does, and not the rule. A graph that the
        table has no cost of costs what the rule takes for a step of its size."""
        other = copy.copy(self)
        other._pick, other._known = pick, ({}, {})
        steps = [(size, other.step(size, True)) for size in self._mixed.sizes]
        other.sizes = [size for size, cost in steps if cost.mode != "eager" and cost.rows == size]
        return other

    def step(self, tokens: int, prompts: bool) -> StepCost:
        """A step of so many tokens, with chunks of prompts in it or without."""
        known = self._known[prompts]
        cost = known.get(tokens)
        if cost is None:  # the scheduler asks for the same few thousand sizes again and again
            costs = self._mixed if prompts else self._decode
            cost = known[tokens] = costs.cost(tokens) if self._pick is None else costs.cost_of(*self._pick(tokens, prompts))
        return cost

    def ms(self, tokens: int, prompts: bool) -> float:
        return self.step(tokens, prompts).ms

    @property
    def measured(self) -> list[int]:
        """All sizes with a cost of their own, for steps with prompts."""
        return self._mixed.sizes


Captured = Mapping[str, Mapping[str, Sequence[int] | Literal["auto"]]]
"""Kind of step -> mode -> sizes that have a graph; "auto": those that were measured."""


def load_table(path: str | Path, rule: Rule = "cheapest", captured: Captured | None = None) -> StepCosts:
    """A table from a JSON file, see ``table_of``. Raises ValueError naming the fault."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--costs {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--costs {path}: not JSON: {error}") from error
    return table_of(data, rule, f"--costs {path}", captured)


def table_of(data: Any, rule: Rule = "cheapest", where: str = "costs", captured: Captured | None = None) -> StepCosts:
    """A table from ``{"device", "decode": [rows], "mixed": [rows], "kv_ms"?, "pair_ms"?, "num_pages"?}``, as ``plan --json`` writes.

    A row has "size" and at least one of "eager_ms", "piecewise_ms", "full_ms". Without kv_ms and pair_ms a step costs the same
    at every context. captured: as if there were these graphs, their costs on straight lines between the measured ones.
    """
    try:
        rows = {kind: [_row(kind, row) for row in data[kind]] for kind in ("decode", "mixed")}
        slopes = {name: float(data.get(name, 0.0)) for name in ("kv_ms", "pair_ms")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f'{where}: expected "decode" and "mixed" with rows of "size" and "…_ms": {error!r}') from error
    if min(slopes.values()) < 0 or not all(rows.values()):
        raise ValueError(f"{where}: expected at least one row for decode and for mixed, and no negative cost")
    if captured is not None:
        rows = {kind: resampled(each, captured[kind]) for kind, each in rows.items()}
    table = StepCosts(rows["decode"], rows["mixed"], **slopes, rule=rule, source=f"measured: {data.get('device', where)}")
    table.num_pages = int(data["num_pages"]) if "num_pages" in data else None
    return table


def resampled(rows: Sequence[PlanRow], captured: Mapping[str, Sequence[int] | Literal["auto"]]) -> list[PlanRow]:
    """Rows for graphs of these modes and sizes, up to the largest one measured, and the eager costs as they were measured."""
    kind = rows[0].key
    found = {row.size: PlanRow(kind, row.size, row.eager_ms, None, None, "", 0) for row in rows if row.eager_ms is not None}
    for mode, sizes in captured.items():
        points = dict(sorted((row.size, ms) for row in rows if (ms := getattr(row, f"{mode}_ms")) is not None))
        for size in points if sizes == "auto" else sizes:
            if size <= max(points, default=0):
                cost: dict[str, Any] = {f"{mode}_ms": between(points, size)}
                found[size] = replace(found.get(size, PlanRow(kind, size, None, None, None, "", 0)), **cost)
    return sorted(found.values(), key=lambda row: row.size)


def _row(kind: str, row: Mapping[str, Any]) -> PlanRow:
    size = row["size"]
    costs = {mode: row.get(mode) for mode in ("eager_ms", "piecewise_ms", "full_ms")}
    if not isinstance(size, int) or size < 1 or all(ms is None for ms in costs.values()):
        raise ValueError(f"{kind} row {dict(row)}")
    if any(ms is not None and not ms > 0 for ms in costs.values()):
        raise ValueError(f"{kind} row of size {size}: costs must be above 0")
    return PlanRow(kind, size, **costs, pick="", nbytes=0)
