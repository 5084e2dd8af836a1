"""Host time of one replay of a captured step by part, the device idle before it: what ``bench.graph_runtime`` reports.

A call passes tensors, a staged step has its arrays written in place, as the engine does. "Behind itself" is such a call right after
another, while the device is busy with that: the host has just done the same, so its caches are warm. All parts are timed within such a
step, which finds other things in the processor's caches than a loop over one part does. What a launch takes depends on what is on its
stream, so the step's launch is also timed alone, behind the inputs' copy, behind that copy when it is over, and behind a kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from runtime.captured_step import EagerCall
from runtime.outputs import RealRows
from runtime.ready import Known, Ready

Row = dict[str, Any]
Parts = dict[str, tuple[Any, str]]
"""What is timed: an object or a class, and its method."""


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(run: Callable[[], Any], repeats: int = 100) -> float:
    """Median host time of one call, the device idle before each."""
    return _in_turn_us({"": run}, repeats)[""]


def _in_turn_us(runs: dict[str, Callable[[], Any]], repeats: int = 100) -> dict[str, float]:
    """Median host time of each, one right after the other, the device idle before the first."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        sync()
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    sync()
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def host_row(steps: Any, inputs: dict[str, Any], arena: Any, captured: Any) -> Row:
    """steps: a graphed module whose graph ``captured``, over ``arena``, serves ``inputs``."""
    step = captured.step
    arrays = {name: t.numpy() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    sizes = {"tokens": len(arrays["input_ids"]), "seqs": len(arrays["seq_lens"])}

    class Staging:
        """A staged step, taken apart so that the writing can be timed within it."""

        def write(self, staged: Any) -> None:
            for name, array in arrays.items():
                staged.arrays[name][...] = array

        def step(self) -> None:
            staged = steps.stage(sizes, max_query_len=inputs["max_query_len"])
            self.write(staged)
            staged()

    staging = Staging()
    sweep, send, launch = (steps._steps.persistent, "moved"), (arena, "send"), (step, "replay")
    both: Parts = {"sweep": sweep, "send": send, "launch": launch, "lend": (RealRows, "lent")}
    within: Parts = {"match": (Known, "tensors"), "all of run": (Known, "run"), "all but fill": (Ready, "run")}
    called = _parts_us(lambda: steps(**inputs), {**within, **both})
    called["fill"] = called.pop("all of run") - called.pop("all but fill")
    written = _parts_us(staging.step, {"stage": (steps, "stage"), "write": (staging, "write"), **both})
    runs: dict[str, Callable[[], Any]] = {"call": lambda: steps(**inputs), "staged": staging.step, "replay": step.replay}
    call, staged, replay = map(host_us, runs.values())
    busy = {name: _in_turn_us({"first": run, "second": run})["second"] for name, run in runs.items()}
    calls = [segment.runner() for segment in step.segments if isinstance(segment, EagerCall)]
    splits = host_us(lambda: [run() for run in calls]) if calls else 0.0
    pieces = len(step.graphs)
    return {
        "call_us": call, "staged_us": staged, "replay_us": replay, "adds_us": call - replay, "staged_adds_us": staged - replay,
        "sweep_us": written["sweep"], "call_parts_us": _with_rest(called), "staged_parts_us": _with_rest(written),
        "behind_itself_us": busy, "by_hand_us": _by_hand(step, arena.layout(sizes, captured.padded)),
        "pieces": pieces, "splitting_ops_us": splits,
        "bytes": arena.layout(sizes, captured.padded).end,
        "per_piece_us": (replay - splits) / pieces, "bound": sum(s.bound is not None for s in step.segments if isinstance(s, EagerCall)),
    }  # fmt: skip


def _by_hand(step: Any, layout: Any) -> Row:
    """The copy and the launch with nothing around them, the first by torch, and the launch behind other things."""
    part = next(part for part in layout.parts if part is not None)
    copy = partial(part.target.copy_, part.source, non_blocking=True)
    one = torch.zeros(1, device=part.target.device)
    behind = {"the copy": copy, "the copy when it is over": lambda: (copy(), sync()), "a kernel": lambda: one.add_(1)}
    found = {name: _in_turn_us({"before": run, "launch": step.replay}) for name, run in behind.items()}
    return {"copy": found["the copy"]["before"], **{f"launch behind {name}": each["launch"] for name, each in found.items()}}


def _with_rest(parts: dict[str, float]) -> dict[str, float]:
    """The whole step, timers and all; its parts; and what is none of them."""
    whole = parts.pop("whole")
    return {"whole": whole, **parts, "rest": whole - sum(parts.values())}


def _parts_us(run: Callable[[], Any], parts: Parts) -> dict[str, float]:
    """Median host time of each part within the step, and of the whole."""
    spent: dict[str, list[float]] = {part: [] for part in parts}

    def timed(times: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            times.append(time.perf_counter() - start)
            return result

        return timing

    own = {part: vars(owner).get(name) for part, (owner, name) in parts.items()}
    for part, (owner, name) in parts.items():
        setattr(owner, name, timed(spent[part], getattr(owner, name)))
    try:
        whole = host_us(run)
    finally:
        for part, (owner, name) in parts.items():
            delattr(owner, name)
            if own[part] is not None:
                setattr(owner, name, own[part])
    return {"whole": whole, **{part: statistics.median(times) * 1e6 for part, times in spent.items()}}
