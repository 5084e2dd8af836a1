"""What a step costs, by mode, size and context: the table that the scheduler composes steps with. Pure Python.

A table is made of a plan's rows (measured on the device, ``python -m runtime plan --json FILE``) or of a roofline
(``runtime.roofline``). The time of a step is that of its size in the cheapest mode, and what attention adds:
``kv_ms`` for each token of context that is read, ``pair_ms`` for each pair of a prompt token and a token before it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.plan import NOISE, PlanRow

Rule = Literal["cheapest", "fixed"]
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
        self._eager = [(size, ms) for size in self.sizes if (ms := by_size[size].eager_ms) is not None]
        self._captured: list[StepCost] = []
        best = StepCost(INF, "eager", 0)
        for size in reversed(self.sizes):
            row = by_size[size]
            here = [StepCost(ms, mode, size) for ms, mode in ((row.full_ms, "full"), (row.piecewise_ms, "piecewise")) if ms is not None]
            if rule == "cheapest":
                own = min(here, key=lambda cost: cost.ms, default=best)
                best = best if best.ms < own.ms * (1.0 - NOISE) else own
            elif here:
                best = here[0]  # the nearest size, full where there is a full graph, whatever it costs
            self._captured.append(best)
        self._captured.reverse()
        self.captured = [size for size, cost in zip(self.sizes, self._captured, strict=True) if cost.rows == size]
        self._rule = rule
        self._known: dict[int, StepCost] = {}

    def cost(self, tokens: int) -> StepCost:
        known = self._known.get(tokens)
        if known is None:
            index = bisect_left(self.sizes, tokens)
            known = self._captured[index] if index < len(self.sizes) else StepCost(INF, "eager", 0)
            if self._rule == "cheapest" or known.ms == INF:
                eager = StepCost(self._eager_ms(tokens), "eager", tokens)
                known = eager if eager.ms < known.ms else known
            self._known[tokens] = known
        return known

    def _eager_ms(self, tokens: int) -> float:
        """On the line through the measured neighbours; past the largest, on the last line."""
        points = self._eager
        if len(points) < 2:
            return points[0][1] if points else INF
        index = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        return y1 + slope * (tokens - x1) if tokens > x1 else max(y0, y1 - slope * (x1 - tokens))


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
        self._known_ms: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def step(self, tokens: int, prompts: bool) -> StepCost:
        """A step of so many tokens, with chunks of prompts in it or without."""
        return (self._mixed if prompts else self._decode).cost(tokens)

    def ms(self, tokens: int, prompts: bool) -> float:
        known = self._known_ms[prompts]
        ms = known.get(tokens)
        if ms is None:  # the scheduler asks for the same few thousand sizes again and again
            ms = known[tokens] = self.step(tokens, prompts).ms
        return ms

    @property
    def sizes(self) -> list[int]:
        """Captured sizes for steps with prompts: where a step has no padding."""
        return self._mixed.captured

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
        points = sorted((row.size, ms) for row in rows if (ms := getattr(row, f"{mode}_ms")) is not None)
        for size in [at for at, _ in points] if sizes == "auto" else sizes:
            if points and size <= points[-1][0]:
                index = bisect_left(points, (size, 0.0))
                (x0, y0), (x1, y1) = points[max(index - 1, 0)], points[index]
                ms = y1 if x1 == x0 else max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), min(y0, y1))
                found[size] = replace(found.get(size, PlanRow(kind, size, None, None, None, "", 0)), **{f"{mode}_ms": ms})
    return sorted(found.values(), key=lambda row: row.size)


def _row(kind: str, row: Mapping[str, Any]) -> PlanRow:
    size = row["size"]
    costs = {mode: row.get(mode) for mode in ("eager_ms", "piecewise_ms", "full_ms")}
    if not isinstance(size, int) or size < 1 or all(ms is None for ms in costs.values()):
        raise ValueError(f"{kind} row {dict(row)}")
    if any(ms is not None and not ms > 0 for ms in costs.values()):
        raise ValueError(f"{kind} row of size {size}: costs must be above 0")
    return PlanRow(kind, size, **costs, pick="", nbytes=0)
