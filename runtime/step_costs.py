"""Whole steps timed on the device, mode × size × context, into the table that scheduler and simulator compose steps with.

    ms(step) = base(mode, size) + kv_ms · context tokens read by decodes + pair_ms · (prompt token, token before it) pairs

A step is timed as the engine makes it: inputs from the host, the graph or the callable, tokens back, issued back to back without
waiting in between, so that whichever of host and device is slower counts. The two slopes come from steps of few sizes at a short
and a long context, the bases from every size at one context, less what the slopes say of it. Eager is timed at a few sizes up to
``max_batch_tokens``, between which its costs lie on straight lines; steps above the largest captured size run eager.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain, zip_longest
from typing import Any

import torch

from runtime.costs import StepCosts
from runtime.outputs import taken
from runtime.plan import PlanRow
from runtime.runner import Runner

_CONTEXT, _SHORT, _LONG = 1024, 256, 4096  # tokens of context: of the bases, and of the slopes
_DECODES_BESIDE = 16  # decodes in a step with a chunk, at most half of it
_POINT_MS = 30.0  # a point is timed for about so long
_ALWAYS = 4  # sizes that are timed whatever the budget: the smallest and the largest, of decode and with prompts
_MODES = ("eager", "piecewise", "full")

Progress = Callable[[int, int, str], None]


def measure_steps(
    runner: Runner, progress: Progress | None = None, *, point_ms: float = _POINT_MS, budget_s: float = 0.0
) -> dict[str, Any]:
    """Time the steps of a runner that has been warmed up. Returns what ``costs.load_table`` reads.

    "check" in it: a few steps of other compositions, measured beside what the table says of them. "captured": what graphs there are, by
    kind and mode. budget_s: no further size is timed after so many seconds (0: all are), but the smallest and the largest always;
    which come first is chosen so that those left out lie evenly between those timed, and "not_timed" counts them.
    """
    if not budget_s >= 0:
        raise ValueError(f"budget_s: expected 0 or more seconds, got {budget_s}")
    started = time.perf_counter()
    timer = _Timer(runner, point_ms)
    limits, longest = runner.config.scheduler, runner.max_context
    short, base, long = (min(context, runner.max_context // part) for context, part in ((_SHORT, 8), (_CONTEXT, 2), (_LONG, 2)))
    jobs = [job for pair in zip_longest(*(_coarse_first(kind, sizes) for kind, sizes in timer.sizes.items())) for job in pair if job]
    done, total = 0, len(jobs) + 3
    say = progress or (lambda done, total, what: None)

    say(done, total, "timing steps: context")
    most = timer.sizes["decode"][-1]
    kv_ms = pair_ms = 0.0
    if long > short:
        kv_ms = max(0.0, timer.best("decode", most, 0, long) - timer.best("decode", most, 0, short)) / (most * (long - short))
        chunk = min(timer.sizes["mixed"][-1], longest - long)  # of one prompt
        grown = timer.best("mixed", 0, chunk, long) - timer.best("mixed", 0, chunk, short)
        pair_ms = max(0.0, grown) / (chunk * (long - short))
    rows: dict[str, list[PlanRow]] = {"decode": [], "mixed": []}
    for kind, size in jobs:
        if budget_s and done >= _ALWAYS and time.perf_counter() - started > budget_s:
            break
        done += 1
        say(done, total, f"timing steps: {kind} of {size} tokens")
        decodes, chunk = (size, 0) if kind == "decode" else composition(size, limits.max_num_seqs, longest)
        attention = attention_ms(kv_ms, pair_ms, decodes, chunk, base, longest)
        costs: dict[str, float | None] = {f"{mode}_ms": None for mode in _MODES}
        for mode in timer.modes(kind, size):
            ms = timer.ms(mode, size, decodes, chunk, base)
            costs[f"{mode}_ms"] = max(ms - attention, 0.05 * ms)
        rows[kind].append(PlanRow(kind, size, **costs, pick="", nbytes=0))
    for each in rows.values():
        each.sort(key=lambda row: row.size)
    table = StepCosts(rows["decode"], rows["mixed"], kv_ms=kv_ms, pair_ms=pair_ms)
    checks = []
    for decodes, chunk, context in _checks(limits.max_num_seqs, limits.max_batch_tokens, short, long):
        ms = timer.best("mixed" if chunk else "decode", decodes, chunk, context)
        said = table.ms(decodes + chunk, chunk > 0) + attention_ms(kv_ms, pair_ms, decodes, chunk, context, longest)
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
        "captured": timer.graphs,
        "not_timed": len(jobs) - done,
        **{kind: [_row(row) for row in each] for kind, each in rows.items()},
        "check": checks,
        "seconds": time.perf_counter() - started,
    }


def attention_ms(kv_ms: float, pair_ms: float, decodes: int, chunk: int, context: int, longest: int) -> float:
    """What the slopes say of a step whose decodes and prompts all stand at ``context``, as ``Runner.batch`` makes it: the chunk is one
    prompt's, or that of as few as hold it in ``longest`` tokens each."""
    each = chunk / max(1, -(-chunk // longest))
    return kv_ms * decodes * context + pair_ms * chunk * (min(context, longest - each) + each / 2)


def composition(size: int, max_num_seqs: int, longest: int) -> tuple[int, int]:
    """(decodes, prompt tokens) of a step with a chunk."""
    decodes = min(size // 2, _DECODES_BESIDE, max_num_seqs - -(-size // longest))
    return decodes, size - decodes


def _eager_sizes(least: int, most: int) -> list[int]:
    """Sizes of eager steps to time, above the largest captured one too: each a half more than the one before."""
    sizes, size = [], float(least)
    while size < most:
        sizes.append(int(size))
        size *= 1.5 if size >= 64 else 2
    return [*sizes, most]


def _coarse_first(kind: str, sizes: list[int]) -> list[tuple[str, int]]:
    """The ends first, then what halves the gaps, again and again."""
    order = sorted(range(len(sizes)), key=lambda i: (0 < i < len(sizes) - 1, -(i & -i) if i < len(sizes) - 1 else 0, i))
    return [(kind, sizes[i]) for i in order]


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
        largest = min(runner.max_batch_tokens, runner.max_context * runner.max_num_seqs)
        self.eager = {"decode": _eager_sizes(1, runner.max_num_seqs), "mixed": _eager_sizes(2, largest)}
        self.graphs: dict[str, dict[str, list[int]]] = {"decode": {}, "mixed": {}}
        for kind, bound in (("decode", runner.bound(1)), ("mixed", runner.bound(2))):
            for mode, size in sorted(runner.steps.captured(max_query_len=bound)):
                self.graphs[kind].setdefault(mode, []).append(size)
        self.sizes = {kind: sorted({*self.eager[kind], *chain(*self.graphs[kind].values())}) for kind in self.eager}

    def modes(self, kind: str, size: int) -> list[str]:
        return [*(["eager"] if size in self.eager[kind] else []), *(mode for mode, sizes in self.graphs[kind].items() if size in sizes)]

    def best(self, kind: str, decodes: int, chunk: int, context: int) -> float:
        """The cheapest mode that serves such a step."""
        size = decodes + chunk
        fitting = {mode: min(at for at in sizes if at >= size) for mode, sizes in self.graphs[kind].items() if sizes[-1] >= size}
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
            if once * 1e3 > self.point_ms and device.type != "cuda":
                return once * 1e3
            # On a GPU a few at least, so that the host's part of a step hides behind the device's as in serving.
            count = max(3 if device.type == "cuda" else 1, min(20, int(self.point_ms / 1e3 / 2 / max(once, 1e-6))))
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
