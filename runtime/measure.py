"""Step times and the table of costs that dispatch decides by.

``median_ms`` times a callable on its device: events around it on CUDA, so that gaps in which the device waits for the host count,
``perf_counter`` on the CPU. ``CostTable`` holds medians by (key, mode, size), and is saved per GPU, model shape and versions; a
file made for anything else is ignored, with the reason.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime import ranks

FORMAT = 1


def interleaved_ms(
    runs: Mapping[Any, Callable[[], object]], device: torch.device, *, repeats: int = 7, budget_ms: float = 200.0
) -> dict[Any, float]:
    """Median time of one call of each, in ms. Repeats are interleaved, so that a drift of clocks meets all alike.

    budget_ms: no new round is begun after this much time, once there have been three. The first call of anything is slower, so it
    is no round, unless the calls are so slow that it does not matter: when one of each uses up the budget.
    """
    timer = _event_ms if device.type == "cuda" else _clock_ms
    start = time.perf_counter()
    first = {name: [timer(run, device)] for name, run in runs.items()}
    slow = ranks.largest((time.perf_counter() - start) * 1e3) > budget_ms
    times: dict[Any, list[float]] = first if slow else {name: [] for name in runs}
    start = start if slow else time.perf_counter()
    for done in range(slow, repeats):
        if done >= 3 and ranks.largest((time.perf_counter() - start) * 1e3) > budget_ms:
            break
        for name, run in runs.items():
            times[name].append(timer(run, device))
    return {name: ranks.largest(sorted(values)[len(values) // 2]) for name, values in times.items()}


def median_ms(run: Callable[[], object], device: torch.device, *, repeats: int = 7, budget_ms: float = 200.0) -> float:
    return interleaved_ms({"": run}, device, repeats=repeats, budget_ms=budget_ms)[""]


def _clock_ms(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _event_ms(run: Callable[[], object], device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    stream.synchronize()  # not the device: another thread may be capturing
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)


def fingerprint(device: torch.device, shape: str) -> dict[str, str]:
    """What a cost table is valid for. shape: a text that changes with the model's shape and configuration."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {"device": gpu, "model": shape, "torch": torch.__version__, "triton": triton_version, "format": str(FORMAT)}


@dataclass
class CostTable:
    """Median ms and graph bytes by (key, mode, size). key: the host values of the step, as text."""

    valid_for: dict[str, str]
    ms: dict[tuple[str, str, int], float] = field(default_factory=dict)
    nbytes: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        path = Path(path).expanduser()
        rows = [
            {"key": key, "mode": mode, "size": size, "ms": ms, "nbytes": self.nbytes.get((key, mode, size), 0)}
            for (key, mode, size), ms in sorted(self.ms.items())
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"valid_for": self.valid_for, "rows": rows}, indent=1))
        part.replace(path)

    @staticmethod
    def obstacle(path: str | Path) -> str:
        """Why ``save`` could not write there, "" when it could. Makes nothing."""
        path = Path(path).expanduser()
        if path.is_dir():
            return "is a folder, expected a file"
        folder = next(parent for parent in path.parents if parent.exists())
        if not folder.is_dir():
            return f"{folder} is not a folder"
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"

    @classmethod
    def load(cls, path: str | Path, valid_for: Mapping[str, str]) -> tuple[CostTable | None, str]:
        """The table in the file, or None and the reason why it cannot be used."""
        try:
            data = json.loads(Path(path).expanduser().read_text())
            rows, made_for = data["rows"], data["valid_for"]
            for name, value in valid_for.items():
                if made_for.get(name) != value:
                    return None, f"{path}: measured for {name} = {made_for.get(name)!r}, this is {value!r}; measuring anew"
            table = cls(dict(valid_for))
            for row in rows:
                at = str(row["key"]), str(row["mode"]), int(row["size"])
                table.ms[at], table.nbytes[at] = float(row["ms"]), int(row["nbytes"])
        except FileNotFoundError:
            return None, f"{path}: no such file; measuring"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{path}: not a cost table ({type(error).__name__}: {error}); measuring anew"
        return table, ""

    def at(self, key: str, mode: str) -> dict[int, float]:
        """size -> ms, ascending."""
        return {size: ms for (k, m, size), ms in sorted(self.ms.items()) if k == key and m == mode}
