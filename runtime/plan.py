"""The plan that a warm-up makes: what each mode costs at each size, and which is picked. Prints as a table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOISE = 0.01  # share by which two medians of the same step may differ


def choose(costs: Sequence[tuple[float, str, int]]) -> tuple[float, str, int]:
    """Of (ms, mode, size) the cheapest; among those within ``NOISE`` of it the smallest size, which pads least, in its cheapest mode."""
    least = min(costs)[0]
    return min((cost for cost in costs if cost[0] * (1.0 - NOISE) <= least), key=lambda cost: (cost[2], cost[0], cost[1]))


def between(measured: Mapping[int, float], n: int) -> float | None:
    """Linear interpolation; the nearest value outside the measured range."""
    if not measured:
        return None
    xs = list(measured)
    i = bisect_left(xs, n)
    if i == 0 or i == len(xs):
        return measured[xs[min(i, len(xs) - 1)]]
    low, high = xs[i - 1], xs[i]
    return measured[low] + (measured[high] - measured[low]) * (n - low) / (high - low)


@dataclass(frozen=True)
class PlanRow:
    """One size for one key. ms: median per mode, None where it was not captured or not measured; pick: the mode served."""

    key: str
    size: int
    eager_ms: float | None
    piecewise_ms: float | None
    full_ms: float | None
    pick: str
    nbytes: int


@dataclass
class Plan:
    """rows by key and size. remarks: what the user should know. seconds: how long capture and measuring took."""

    device: str
    rows: list[PlanRow] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    capture_seconds: float = 0.0
    """Compilation, captures and proofs."""
    graph_seconds: float = 0.0
    """The captures alone: recording and instantiating graphs."""
    measure_seconds: float = 0.0
    graph_bytes: int = 0
    arena_bytes: int = 0

    HEADER = ("size", "eager ms", "piecewise ms", "full ms", "pick", "graph KiB")

    def cells(self) -> list[tuple[str, list[str]]]:
        return [
            (row.key, [str(row.size), _ms(row.eager_ms), _ms(row.piecewise_ms), _ms(row.full_ms), row.pick, f"{row.nbytes / 1024:.0f}"])
            for row in self.rows
        ]

    def footer(self) -> list[str]:
        lines = [
            f"{self.device}: {len(self.rows)} sizes, captured in {self.capture_seconds:.2f} s, measured in {self.measure_seconds:.2f} s, "
            f"graphs {self.graph_bytes / 2**20:.1f} MiB, inputs {self.arena_bytes / 2**20:.1f} MiB"
        ]
        return lines + self.remarks

    def __str__(self) -> str:
        keys = list(dict.fromkeys(key for key, _ in self.cells()))
        lines: list[str] = []
        for key in keys:
            rows = [cells for k, cells in self.cells() if k == key]
            lines += [*([] if key == "-" else [key]), *_aligned([list(self.HEADER), *rows])]
        return "\n".join(lines + self.footer())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        for key in dict.fromkeys(key for key, _ in self.cells()):
            table = Table(title=None if key == "-" else key, title_justify="left")
            for name in self.HEADER:
                table.add_column(name, justify="left" if name == "pick" else "right")
            for k, cells in self.cells():
                if k == key:
                    table.add_row(*cells)
            parts.append(table)
        return Group(*parts, *(Text(line) for line in self.footer()))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
