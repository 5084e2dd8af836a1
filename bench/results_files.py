"""Results files of pytest-benchmark, read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """One benchmark of one run."""

    suite: str  # "elementwise"
    name: str  # "add_rms_norm"
    case: str
    peer: str
    us: float
    info: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One results file of pytest-benchmark."""

    file: str
    machine: dict[str, Any]
    when: str
    rows: tuple[Row, ...]

    @property
    def gpu(self) -> str:
        return str(self.machine.get("gpu", "unknown"))


def load(path: Path) -> Run:
    data = json.loads(path.read_text())
    if "benchmarks" not in data:
        raise ValueError(f"{path}: expected a file of pytest-benchmark (--benchmark-json), got keys {', '.join(sorted(data))}")
    rows = []
    for entry in data["benchmarks"]:
        suite, function = entry["fullname"].split("::")
        info = entry["extra_info"]
        rows.append(
            Row(
                Path(suite).stem.removeprefix("test_"), function.split("[")[0].removeprefix("test_"), info["case"], info["peer"],
                entry["stats"]["median"] * 1e6, info,
            )
        )  # fmt: skip
    return Run(path.name, data["machine_info"] | data.get("run", {}), data["datetime"], tuple(rows))


def runs(folder: Path = RESULTS) -> list[Run]:
    """All runs, oldest first."""
    found = [load(path) for path in sorted(folder.glob("*.json")) if "benchmarks" in json.loads(path.read_text())]
    return sorted(found, key=lambda run: run.when)


def newest(found: Iterable[Run], name: str) -> dict[str, tuple[Run, list[Row]]]:
    """GPU → the newest run that has benchmark ``name``, and its rows."""
    chosen: dict[str, tuple[Run, list[Row]]] = {}
    for run in found:
        rows = [row for row in run.rows if row.name == name]
        if rows:
            chosen[run.gpu] = (run, rows)
    return chosen
