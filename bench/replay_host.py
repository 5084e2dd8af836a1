"""Host time of one replay of a captured step by part, the device idle before it: what ``bench.graph_runtime`` reports.

A call passes tensors, the same ones each time. A staged step has its arrays written in place as the engine does it: all but the block
table, which gets the pages that are new. "Behind itself" is such a call right after another, while the device is busy with that: the
host has just done the same, so its caches are warm. All parts are timed within such a step, which finds other things in the processor's
caches than a loop over one part does. What a launch takes depends on what is on its stream, so the step's launch is also timed alone,
behind the inputs' copy, behind that copy when it is over, and behind a kernel.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from runtime.addresses import copier
from runtime.block_table import BlockTable
from runtime.captured_step import EagerCall
from runtime.outputs import RealRows, taken
from runtime.ready import Known, Ready
from runtime.step_arrays import write_changed

_NEW = frozenset(("positions", "slot_mapping", "seq_lens", "draws"))
"""Inputs that are other ones in each decode step."""
Row = dict[str, Any]
Parts = dict[str, tuple[Any, str]]
"""What is timed: an object or a class, and its method."""


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(run: Callable[[], Any], repeats: int = 100, before: Callable[[], object] = sync) -> float:
    """Median host time of one call, ``before`` called before each: the device is idle then."""
    return _in_turn_us({"": run}, repeats, before)[""]


def _spread_us(run: Callable[[], Any], repeats: int, before: Callable[[], object] = sync) -> tuple[float, float]:
    """Median host time of one call, and that of the fastest tenth: what it takes where no other process wants the processor."""
    times = sorted(_times({"": run}, repeats, before)[""])
    return statistics.median(times) * 1e6, times[len(times) // 10] * 1e6


def _in_turn_us(runs: dict[str, Callable[[], Any]], repeats: int, before: Callable[[], object] = sync) -> dict[str, float]:
    """Median host time of each, one right after the other, ``before`` called before the first."""
    return {name: statistics.median(each) * 1e6 for name, each in _times(runs, repeats, before).items()}


def _times(runs: dict[str, Callable[[], Any]], repeats: int, before: Callable[[], object]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        before()
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    sync()
    return times


class StagedSteps:
    """Staged decode steps as the engine makes them: a row of the block table in ``page_size`` gets a page before each, the others lie in
    the buffer, and so do the inputs that follow from the requests alone. All are those given."""

    def __init__(self, steps: Any, inputs: dict[str, Any], page_size: int = 16) -> None:
        self._steps, self._page_size = steps, page_size
        self._host = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        self._arrays = {name: t.numpy() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
        for name in self._arrays.keys() - _NEW:
            self._arrays[name].flags.writeable = False
        self._pages, self._lens = self._arrays.pop("block_table"), self._arrays["seq_lens"]
        self.sizes = {"tokens": len(self._arrays["input_ids"]), "seqs": len(self._lens)}
        self._rows, self._turn = np.arange(len(self._pages)), 0
        self._table = BlockTable(*self._pages.shape)
        for row in self._rows.tolist():
            self._admit(row)

    def _admit(self, row: int) -> None:
        self._table.take(row)
        self._table.fill(row, self._pages[row, : -(-int(self._lens[row]) // self._page_size)].tolist())

    def wait(self) -> None:
        """Until the device is idle; meanwhile the requests get their pages, which is the scheduler's time."""
        sync()
        self._turn += 1
        for row in range(self._turn % self._page_size, len(self._rows), self._page_size):
            filled = int(self._table.filled[row])
            if filled == self._pages.shape[1]:
                self._admit(row)
            else:
                self._table.fill(row, self._pages[row, : filled + 1].tolist())

    def write(self, staged: Any) -> None:
        held, written = staged.note.before or (None, {})
        staged.note.now = self._table.put(self._rows, staged.arrays["block_table"], held), self._arrays
        staged.note.widths = {"block_table": self._table.widest}
        write_changed(self._arrays, staged.arrays, written)

    def step(self) -> Any:
        staged = self._steps.stage(self.sizes, **self._host)
        self.write(staged)
        return staged()

    @property
    def pages_written(self) -> int:
        """By the newest step."""
        return self._table.written


def added_row(steps: Any, inputs: dict[str, Any], arena: Any, captured: Any, repeats: int = 100) -> Row:
    """What a call and a staged step take on the host, and what both add to the launch of the graph. steps: a graphed module whose graph
    ``captured``, over ``arena``, serves ``inputs``."""
    staged = StagedSteps(steps, inputs)
    bits = [[taken(each).clone() for each in run()] for run in (staged.step, lambda: steps(**inputs))]
    if not all(torch.equal(a, b) for a, b in zip(*bits, strict=True)):
        raise SystemExit(f"{staged.sizes}: a staged step gives other bits than a call: not timing a wrong answer")
    for _ in range(2 * arena.staging.ring.size):  # buffers, guards and notes that are made when they first come round
        staged.wait()
        staged.step()
    pages_written = staged.pages_written
    call, replay = _spread_us(lambda: steps(**inputs), repeats), _spread_us(captured.step.replay, repeats)
    for _ in range(arena.staging.ring.size):  # the calls have written into all buffers
        staged.step()
    stage = _spread_us(staged.step, repeats, staged.wait)
    row: Row = {}
    for place, name in enumerate(("", "fastest_")):  # half of the calls and a tenth of them were as fast or faster
        row |= {f"{name}call_us": call[place], f"{name}staged_us": stage[place], f"{name}replay_us": replay[place]}
        row |= {f"{name}adds_us": call[place] - replay[place], f"{name}staged_adds_us": stage[place] - replay[place]}
    return {**row, "bytes": arena.layout(staged.sizes, captured.padded).end, "pages_written": pages_written}


def host_row(steps: Any, inputs: dict[str, Any], arena: Any, captured: Any, repeats: int = 100) -> Row:
    """The same, and by part."""
    row = added_row(steps, inputs, arena, captured, repeats)
    step, staging = captured.step, StagedSteps(steps, inputs)
    sweep, send, launch = (steps._steps.persistent, "moved"), (arena, "send"), (step, "replay")
    both: Parts = {"sweep": sweep, "send": send, "launch": launch, "lend": (RealRows, "lent")}
    within: Parts = {"match": (Known, "tensors"), "all of run": (Known, "run"), "all but fill": (Ready, "run")}
    called = _parts_us(lambda: steps(**inputs), {**within, **both}, repeats)
    called["fill"] = called.pop("all of run") - called.pop("all but fill")
    for _ in range(arena.staging.ring.size):
        staging.step()
    written = _parts_us(staging.step, {"stage": (steps, "stage"), "write": (staging, "write"), **both}, repeats, staging.wait)
    runs: dict[str, Callable[[], Any]] = {"call": lambda: steps(**inputs), "staged": staging.step, "replay": step.replay}
    busy = {name: _in_turn_us({"first": run, "second": run}, repeats)["second"] for name, run in runs.items()}
    calls = [segment.runner() for segment in step.segments if isinstance(segment, EagerCall)]
    splits = host_us(lambda: [run() for run in calls], repeats) if calls else 0.0
    pieces = len(step.graphs)
    return {
        **row,
        "sweep_us": written["sweep"], "call_parts_us": _with_rest(called), "staged_parts_us": _with_rest(written),
        "behind_itself_us": busy, "by_hand_us": _by_hand(step, arena.layout(staging.sizes, captured.padded), repeats),
        "pieces": pieces, "splitting_ops_us": splits, "per_piece_us": (row["replay_us"] - splits) / pieces,
        "bound": sum(s.bound is not None for s in step.segments if isinstance(s, EagerCall)),
    }  # fmt: skip


def _by_hand(step: Any, layout: Any, repeats: int) -> Row:
    """The copy and the launch with nothing around them, the first by torch, and the launch behind other things."""
    part = next(part for part in layout.parts if part is not None)
    copy = partial(part.target.copy_, part.source, non_blocking=True)
    one = torch.zeros(1, device=part.target.device)
    behind = {"the copy": copy, "the copy when it is over": lambda: (copy(), sync()), "a kernel": lambda: one.add_(1)}
    found = {name: _in_turn_us({"before": run, "launch": step.replay}, repeats) for name, run in behind.items()}
    launches = {f"launch behind {name}": each["launch"] for name, each in found.items()}
    return {"copy": found["the copy"]["before"], **launches, **_fills_by_hand(layout, repeats)}


def _fills_by_hand(layout: Any, repeats: int) -> Row:
    """The largest input written into one staging buffer after the other, which the device then reads: by copying, and as a call does it."""
    parts = [part for part in layout.parts if part is not None]
    name = max(layout.views, key=lambda name: layout.views[name].nbytes)
    source = parts[0].tensors[name].clone()
    turn = 0

    def send() -> None:
        nonlocal turn
        part = parts[turn % len(parts)]
        part.target.copy_(part.source, non_blocking=True)
        turn += 1

    def copied() -> None:
        ctypes.memmove(addresses[turn % len(parts)], source.data_ptr(), source.nbytes)

    def renewed() -> None:
        copiers[turn % len(parts)]((source,))

    addresses = [part.tensors[name].data_ptr() for part in parts]
    copiers = [copier([part.tensors[name]]) for part in parts]
    return {f"{name} {fill.__name__}": _in_turn_us({"fill": fill, "send": send}, repeats)["fill"] for fill in (copied, renewed)}


def _with_rest(parts: dict[str, float]) -> dict[str, float]:
    """The whole step, timers and all; its parts; and what is none of them."""
    whole = parts.pop("whole")
    return {"whole": whole, **parts, "rest": whole - sum(parts.values())}


def _parts_us(run: Callable[[], Any], parts: Parts, repeats: int, before: Callable[[], object] = sync) -> dict[str, float]:
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
        whole = host_us(run, repeats, before)
    finally:
        for part, (owner, name) in parts.items():
            delattr(owner, name)
            if own[part] is not None:
                setattr(owner, name, own[part])
    return {"whole": whole, **{part: statistics.median(times) * 1e6 for part, times in spent.items()}}
