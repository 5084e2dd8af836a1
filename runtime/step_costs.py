"""Whole steps timed on the device, mode × size × context, into the table that scheduler and simulator compose steps with.

    ms(step) = base(mode, size) + kv_ms · context tokens read by decodes + pair_ms · (prompt token, token before it) pairs

A step is timed as the engine makes it: inputs from the host, the graph or the callable, tokens back, issued back to back without
waiting in between, so that whichever of host and device is slower counts. The two slopes come from steps of few sizes at a short
and a long context, the bases from every size at one context, less what the slopes say of it. Steps above the largest captured
size run eager and are timed at sizes up to ``max_batch_tokens``; between measured sizes eager costs lie on straight lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from runtime.config import ConfigError
from runtime.costs import StepCosts
from runtime.outputs import taken
from runtime.plan import PlanRow
from runtime.runner import Runner

_CONTEXT, _SHORT, _LONG = 1024, 256, 4096  # tokens of context: of the bases, and of the slopes
_DECODES_BESIDE = 16  # decodes in a step with a chunk, at most half of it
_POINT_MS = 30.0  # a point is timed for about so long
_MODES = ("eager", "piecewise", "full")

Progress = Callable[[int, int, str], None]


def measure_steps(runner: Runner, progress: Progress | None = None, *, point_ms: float = _POINT_MS) -> dict[str, Any]:
    """Time the steps of a runner that has been warmed up. Returns what ``costs.load_table`` reads.

    "check" in it: a few steps of other compositions, measured beside what the table says of them. Raises ConfigError when a step may hold
    more tokens than a context.
    """
    if runner.max_batch_tokens > runner.max_context:
        raise ConfigError(
            f"scheduler.max_batch_tokens: expected at most the longest context, {runner.max_context}, to time steps (a timed step holds "
            f"one prompt's chunk), got {runner.max_batch_tokens}; lower it or raise scheduler.max_context"
        )
    timer = _Timer(runner, point_ms)
    limits, largest = runner.config.scheduler, max(_eager_sizes(runner))
    short, base, long = (min(context, runner.max_context // part) for context, part in ((_SHORT, 8), (_CONTEXT, 2), (_LONG, 2)))
    decode_sizes = sorted({size for _, size in timer.captured("decode")} | {1, limits.max_num_seqs})
    mixed_sizes = sorted({size for _, size in timer.captured("mixed")} | set(_eager_sizes(runner)))
    jobs = [("decode", size) for size in decode_sizes] + [("mixed", size) for size in mixed_sizes]
    done, total = 0, len(jobs) + 3
    say = progress or (lambda done, total, what: None)

    say(done, total, "timing steps: context")
    most = decode_sizes[-1]
    kv_ms = pair_ms = 0.0
    if long > short:
        kv_ms = max(0.0, timer.best("decode", most, 0, long) - timer.best("decode", most, 0, short)) / (most * (long - short))
        grown = timer.best("mixed", 0, largest, long) - timer.best("mixed", 0, largest, short)
        pair_ms = max(0.0, grown) / (largest * (long - short))
    rows: dict[str, list[PlanRow]] = {"decode": [], "mixed": []}
    for kind, size in jobs:
        done += 1
        say(done, total, f"timing steps: {kind} of {size} tokens")
        decodes, chunk = (size, 0) if kind == "decode" else composition(size, limits.max_num_seqs)
        attention = attention_ms(kv_ms, pair_ms, decodes, chunk, base)
        costs: dict[str, float | None] = {f"{mode}_ms": None for mode in _MODES}
        for mode in timer.modes(kind, size):
            ms = timer.ms(mode, size, decodes, chunk, base)
            costs[f"{mode}_ms"] = max(ms - attention, 0.05 * ms)
        rows[kind].append(PlanRow(kind, size, **costs, pick="", nbytes=0))
    table = StepCosts(rows["decode"], rows["mixed"], kv_ms=kv_ms, pair_ms=pair_ms)
    checks = []
    for decodes, chunk, context in _checks(limits.max_num_seqs, limits.max_batch_tokens, short, long):
        ms = timer.best("mixed" if chunk else "decode", decodes, chunk, context)
        said = table.ms(decodes + chunk, chunk > 0) + attention_ms(kv_ms, pair_ms, decodes, chunk, context)
        checks.append({"decodes": decodes, "chunk": chunk, "context": context, "ms": ms, "table_ms": said})
    say(total, total, "timed")
    return {
        "device": _device_name(runner.device),
        "num_pages": runner.num_pages,
        "page_size": runner.page_size,
        "max_context": runner.max_context,
        "max_num_seqs": limits.max_num_seqs,
        "max_batch_tokens": limits.max_batch_tokens,
        "kv_ms": kv_ms,
        "pair_ms": pair_ms,
        **{kind: [_row(row) for row in each] for kind, each in rows.items()},
        "check": checks,
    }


def attention_ms(kv_ms: float, pair_ms: float, decodes: int, chunk: int, context: int) -> float:
    """What the slopes say of a step whose decodes and chunk all stand at ``context``."""
    return kv_ms * decodes * context + pair_ms * chunk * (context + chunk / 2)


def composition(size: int, max_num_seqs: int) -> tuple[int, int]:
    """(decodes, prompt tokens) of a step with a chunk."""
    decodes = min(size // 2, _DECODES_BESIDE, max_num_seqs - 1)
    return decodes, size - decodes


def _eager_sizes(runner: Runner) -> list[int]:
    """Sizes of eager steps to time, above the largest captured one too: each a half more than the one before."""
    most = min(runner.max_batch_tokens, runner.max_context * runner.max_num_seqs)
    sizes, size = [], 2.0
    while size < most:
        sizes.append(int(size))
        size *= 1.5 if size >= 64 else 2
    return [*sizes, most]


def _checks(max_num_seqs: int, max_batch_tokens: int, short: int, long: int) -> Iterable[tuple[int, int, int]]:
    middle = (short + long) // 4
    for decodes, chunk, context in ((1, 0, middle), (7, 0, long), (25, 0, middle), (100, 0, short), (10, 200, short), (0, 700, middle)):
        if decodes + (chunk > 0) <= max_num_seqs and decodes + chunk <= max_batch_tokens:
            yield decodes, chunk, context


def _row(row: PlanRow) -> dict[str, float | int]:
    costs = {"eager_ms": row.eager_ms, "piecewise_ms": row.piecewise_ms, "full_ms": row.full_ms}
    return {"size": row.size, **{name: ms for name, ms in costs.items() if ms is not None}}


class _Timer:
    def __init__(self, runner: Runner, point_ms: float) -> None:
        self.runner, self.point_ms = runner, point_ms
        self.bounds = {"decode": runner.bound(1), "mixed": runner.bound(2)}

    def captured(self, kind: str) -> list[tuple[str, int]]:
        return self.runner.steps.captured(max_query_len=self.bounds[kind])

    def modes(self, kind: str, size: int) -> list[str]:
        """Eager is timed at every size of a decode and, beside chunks, at as many as its straight lines need."""
        graphs = [mode for mode, captured in self.captured(kind) if captured == size]
        return ["eager", *graphs] if kind == "decode" or not graphs or size in _eager_sizes(self.runner) else graphs

    def best(self, kind: str, decodes: int, chunk: int, context: int) -> float:
        """The cheapest mode that serves such a step."""
        size = decodes + chunk
        fitting = {mode: at for mode, at in sorted(self.captured(kind), key=lambda each: -each[1]) if at >= size}
        return min(self.ms(mode, at, decodes, chunk, context) for mode, at in {**fitting, "eager": size}.items())

    def ms(self, mode: str, size: int, decodes: int, chunk: int, context: int) -> float:
        """Milliseconds a step, issued back to back."""
        runner = self.runner
        arguments = runner.batch(decodes, chunk, context)
        device = runner.device

        def step() -> None:
            tokens, _ = runner.steps.run_as(mode, size, **arguments)
            tokens = taken(tokens)
            runner.module.last_tokens[: len(tokens)].copy_(tokens)
            if device.type == "cuda":
                torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True).copy_(tokens, non_blocking=True)

        with torch.no_grad():
            step()
            once = self._seconds(step, 1)
            count = max(1, min(20, int(self.point_ms / 1e3 / 2 / max(once, 1e-6))))
            if once * 1e3 > self.point_ms and device.type != "cuda":
                return once * 1e3
            return 1e3 * min(self._seconds(step, count) for _ in range(2)) / count

    def _seconds(self, step: Callable[[], None], count: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
