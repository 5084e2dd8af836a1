"""Timing on the device and results files, shared by every benchmark.

Device time is taken from CUDA graphs that hold several calls over rotated inputs (so that L2 does not serve them), with events
around a replay; the variants of one table are interleaved, and the median of the repeats counts. On a machine without a GPU the
same code runs with a host clock, which makes the benchmarks smoke tests there.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """GPU, driver, versions and commit: what a results file must name."""
    import triton

    facts: dict[str, Any] = {
        "gpu": "none",
        "driver": "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpus"] = torch.cuda.device_count()
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader", "-i", "0"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            facts["driver"], facts["sm_clock"], facts["memory_clock"] = (part.strip() for part in answer.stdout.strip().split(","))
    return facts


def _commit() -> str:
    """TKERNELS_COMMIT, for a tree that came without its history; else the commit of the tree, with a mark when files differ from it."""
    if os.environ.get("TKERNELS_COMMIT"):
        return os.environ["TKERNELS_COMMIT"]
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if answer.returncode:
        return "unknown"
    dirty = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False).stdout
    return answer.stdout.strip() + ("+changes" if dirty.strip() else "")


def graph_of(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One replay of all ``calls``, captured after a warm-up of each; on a CPU just the calls."""
    if not torch.cuda.is_available():

        def run() -> None:
            for call in calls:
                call()

        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph.replay


def _once_us(run: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def interleaved_us(runs: Mapping[str, Callable[[], Any]], *, calls: int = 1, repeats: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median microseconds of a call, for each run that makes ``calls`` of them; the runs take turns, so clocks drift for all alike."""
    samples = interleaved_samples_us(runs, repeats=repeats, warmup=warmup)
    return {name: statistics.median(values) / calls for name, values in samples.items()}


def interleaved_samples_us(
    runs: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 20,
    warmup: int = 3,
    once_us: Callable[[Callable[[], Any]], float] = _once_us,
    budget_us: float = float("inf"),
) -> dict[str, list[float]]:
    """Microseconds of every run, ``repeats`` times, the runs taking turns. once_us: how one is timed; the default is device time.

    budget_us: a run that would take longer than this in all gets fewer turns, at least two.
    """
    turns: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(warmup):
            took = once_us(run)
        turns[name] = max(2, min(repeats, int(budget_us / took))) if warmup and budget_us < float("inf") else repeats
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < turns[name]:
                samples[name].append(once_us(run))
    return samples


def back_to_back_us(run: Callable[[], Any], *, steps: int = 30, repeats: int = 9, warmup: int = 3) -> float:
    """Median over ``repeats`` of the wall-clock microseconds of a step when ``steps`` are issued without waiting in between."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(warmup):
        run()
    samples = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        sync()
        samples.append((time.perf_counter() - start) * 1e6 / steps)
    return statistics.median(samples)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in fp64."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm().clamp_min(1e-30))


def write_results(path: str | Path, command: str, rows: Any, **extra: Any) -> None:
    """A results file: machine, the command that made it (``command`` with the arguments that it was given), the rows."""
    given = sys.argv[1:]
    if "--out" in given:  # where the file lay says nothing
        at = given.index("--out")
        del given[at : at + 2]
    command = shlex.join([*command.split(), *given])
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine(), "command": command, **extra, "rows": rows}, indent=1) + "\n")
