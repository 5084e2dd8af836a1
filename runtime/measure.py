"""Step times and the table of costs that dispatch decides by.

``interleaved_ms`` times callables on their device: events around it on CUDA, so that gaps in which the device waits for the host count,
``perf_counter`` on the CPU. ``CostTable`` holds medians by (key, mode, size), and where attention matters by context too; it is saved
per GPU, model shape and versions; a file made for anything else is ignored, with the reason.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime import ranks
from runtime.plan import between

FORMAT = 2

At = tuple[str, str, int]
"""(key, mode, size)."""


def interleaved_ms(
    runs: Mapping[Any, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 7,
    budget_ms: float = 200.0,
    far: float = float("inf"),
    prepare: Callable[[Any], object] = lambda name: None,
) -> dict[Any, float]:
    """Median time of one call of each, in ms. Repeats are interleaved, so that a drift of clocks meets all alike.

    budget_ms: no new round is begun after this much time, once there have been three. The first call of anything is slower, so it
    is no round, unless the calls are so slow that it does not matter: when one of each uses up the budget. far: what took more than so
    many times the fastest in the first round stays with that one time. prepare: called with the name before each call, untimed.
    """
    timed = _event_ms if device.type == "cuda" else _clock_ms

    def time_one(name: Any) -> float:
        prepare(name)
        return timed(runs[name], device)

    start = time.perf_counter()
    first = {name: [time_one(name)] for name in runs}
    slow = ranks.largest((time.perf_counter() - start) * 1e3) > budget_ms
    times: dict[Any, list[float]] = first if slow else {name: [] for name in runs}
    start, left = start if slow else time.perf_counter(), list(runs)
    for done in range(slow, repeats):
        if done >= 3 and ranks.largest((time.perf_counter() - start) * 1e3) > budget_ms:
            break
        for name in left:
            times[name].append(time_one(name))
        if done == slow and far < float("inf"):
            newest = {name: ranks.largest(times[name][-1]) for name in left}
            left = [name for name in left if newest[name] <= far * min(newest.values())]
    return {name: ranks.largest(sorted(values)[len(values) // 2]) for name, values in times.items()}


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


def fingerprint(device: torch.device, shape: str, within: str = "") -> dict[str, str]:
    """What a cost table is valid for. shape: a text that changes with the model's shape and configuration. within: the name of what
    captures run within."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    facts = {"device": gpu, "model": shape, "torch": torch.__version__, "triton": triton_version, "format": str(FORMAT)}
    # the variable is of all captures that a context says nothing else of
    return {**facts, "captured within": within, "TKERNELS_PDL": os.environ.get("TKERNELS_PDL", "0")}


@dataclass
class CostTable:
    """Median ms and graph bytes by (key, mode, size). key: the host values of the step, as text.

    ms: at the usual context. context: what that is, in tokens a sequence; 0 where nothing depends on it. other_contexts: the same at
    other contexts. What was not timed there is taken from ``ms``; ``at`` adds what that context adds to graphs of about the size.
    """

    valid_for: dict[str, str]
    ms: dict[At, float] = field(default_factory=dict)
    nbytes: dict[At, int] = field(default_factory=dict)
    context: int = 0
    other_contexts: dict[int, dict[At, float]] = field(default_factory=dict)

    def bucket(self, context: int | None) -> int:
        """The measured context that is nearest by ratio; the usual one for None."""
        if context is None or not self.other_contexts:
            return self.context
        context = max(context, 1)
        return min((self.context, *self.other_contexts), key=lambda c: (max(c, context) / min(c, context), c))

    def padded(self, key: str, mode: str, size: int, rows: int, bucket: int) -> float | None:
        """What a graph of ``size`` costs with ``rows`` of its rows live: what the context adds, it adds for those alone."""
        at = key, mode, size
        ms = self._ms(at, bucket)
        if ms is None or rows == size or not self.other_contexts:
            return ms
        at_shortest = self._ms(at, min(self.context, *self.other_contexts))
        least = ms if at_shortest is None else min(ms, at_shortest)
        return least + (ms - least) * rows / size

    def _ms(self, at: At, bucket: int) -> float | None:
        """At a measured context; at the usual one where it was timed at that alone."""
        return self.other_contexts.get(bucket, self.ms).get(at, self.ms.get(at))

    def set_contexts(self, contexts: Iterable[int]) -> None:
        """What is to be measured, the usual context first. What was measured at these is kept, the rest forgotten."""
        usual, *others = contexts
        if usual != self.context:
            self.ms.clear()
            self.other_contexts.clear()
        self.context = usual
        self.other_contexts = {c: self.other_contexts.get(c, {}) for c in sorted(set(others) - {usual})}

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        path = Path(path).expanduser()
        rows = [
            {"key": key, "mode": mode, "size": size, "context": context, "ms": ms, "nbytes": self.nbytes.get((key, mode, size), 0)}
            for context, costs in {self.context: self.ms, **self.other_contexts}.items()
            for (key, mode, size), ms in sorted(costs.items())
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"valid_for": self.valid_for, "context": self.context, "rows": rows}, indent=1))
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
            table = cls(dict(valid_for), context=int(data["context"]))
            for row in rows:
                at, context = (str(row["key"]), str(row["mode"]), int(row["size"])), int(row["context"])
                costs = table.ms if context == table.context else table.other_contexts.setdefault(context, {})
                costs[at], table.nbytes[at] = float(row["ms"]), int(row["nbytes"])
        except FileNotFoundError:
            return None, f"{path}: no such file; measuring"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{path}: not a cost table ({type(error).__name__}: {error}); measuring anew"
        return table, ""

    def at(self, key: str, mode: str, bucket: int | None = None) -> dict[int, float]:
        """size -> ms, ascending; at the usual context, or at another measured one."""
        usual = {size: ms for (k, m, size), ms in sorted(self.ms.items()) if k == key and m == mode}
        there = self.other_contexts.get(self.context if bucket is None else bucket)
        if there is None:
            return usual
        added: dict[int, float] = {}  # to the graph of each size, the lesser where there are two
        for (k, m, size), ms in sorted(there.items(), key=lambda item: item[0][2]):
            if k == key and m != "eager" and (k, m, size) in self.ms:
                added[size] = min(added.get(size, float("inf")), ms - self.ms[k, m, size])
        found = {size: ms + (between(added, size) or 0.0) for size, ms in usual.items()}
        found |= {size: ms for (k, m, size), ms in there.items() if k == key and m == mode}
        return dict(sorted(found.items()))
