"""Traffic without a device: the scheduler and the block manager over a trace of requests, with a cost table in place of a model.

    python -m runtime simulate --trace FILE --rate 2 --scheduler.policy cost --scheduler.itl_ms 50

Arrivals are open loop: a request arrives when the trace says, however long the queue is. A step takes what the table says; the
tokens come when it ends. The scheduler does not know how long an answer will be, as in real traffic: it ends with a stop token.
"""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from runtime.costs import StepCosts
from runtime.outcome import Live, Outcome, Sample
from runtime.request import Request, RequestError, SamplingParams
from runtime.scheduler import Scheduler, Step, make_scheduler

__all__ = ["Arrival", "draw", "make_scheduler", "read_trace", "simulate"]

_STOP, _GO_ON = 0, 1  # tokens that answers are made of
_STOPS = frozenset({_STOP})
_MOST_TOKENS = 1 << 24  # of a prompt or an answer in a trace; the simulator makes them all


class Arrival(NamedTuple):
    """One request of a trace: when, how long. Requests of one ``group`` share their first ``shared`` prompt tokens."""

    second: float
    prompt: int
    generated: int
    group: str = ""
    shared: int = 0


def read_trace(path: str | Path) -> list[Arrival]:
    """A CSV file with the columns TIMESTAMP (ISO 8601, or seconds), ContextTokens, GeneratedTokens; optional Group, SharedTokens.

    Requests of no tokens count as one token. Raises ValueError naming file and line.
    """
    arrivals = []
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
            if missing:
                raise ValueError(f"--trace {path}: no column {', '.join(sorted(missing))}; found {', '.join(reader.fieldnames or ())}")
            for row in reader:
                try:
                    arrivals.append(_arrival(row))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"--trace {path}: line {reader.line_num}: {error}") from error
    except OSError as error:
        raise ValueError(f"--trace {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--trace {path}: not text: {error}") from error
    if not arrivals:
        raise ValueError(f"--trace {path}: no requests")
    arrivals.sort(key=lambda arrival: arrival.second)
    start = arrivals[0].second
    return [arrival._replace(second=arrival.second - start) for arrival in arrivals]


def _arrival(row: dict[str, str]) -> Arrival:
    prompt, generated = (max(_tokens(row, name), 1) for name in ("ContextTokens", "GeneratedTokens"))
    shared = int(row.get("SharedTokens") or 0)
    if shared < 0:
        raise ValueError(f"SharedTokens: expected at least 0, got {shared}")
    return Arrival(_second(row["TIMESTAMP"]), prompt, generated, row.get("Group") or "", shared)


def _tokens(row: dict[str, str], name: str) -> int:
    count = int(row[name])
    if not 0 <= count <= _MOST_TOKENS:
        raise ValueError(f"{name}: expected 0 to {_MOST_TOKENS}, got {count}")
    return count


def _second(text: str) -> float:
    try:
        second = float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()
    if not math.isfinite(second):
        raise ValueError(f"TIMESTAMP: expected a time, got {text!r}")
    return second


def simulate(
    arrivals: Iterable[Arrival],
    scheduler: Scheduler,
    table: StepCosts,
    *,
    rate: float = 1.0,
    max_tokens: int = 4096,
    every: int = 0,
    depth: int = 1,
) -> Outcome:
    """Run a trace to its end. rate: arrivals come so many times as fast. max_tokens: what requests ask for at most.

    every: keep a ``Sample`` of each so many-th step; 0 keeps none. depth: steps in flight; with two, as the engine has with
    ``scheduler.overlap``, a step is composed before the one before it has begun, so an arrival waits for one more.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"--rate: expected a number above 0, got {rate}")
    outcome = Outcome()
    pending = iter(arrivals)
    upcoming = next(pending, None)
    live: dict[int, Live] = {}
    flying: deque[tuple[Step, float, float]] = deque()  # with the time that each takes and the moment when it ends
    params = SamplingParams(max_tokens=max_tokens)
    number, now, free = 0, 0.0, 0.0  # ms; free: when the device has run all that it was given
    to_ms = 1e3 / rate
    while True:
        while upcoming is not None and upcoming.second * to_ms <= now:
            request = Request(number, _prompt(number, upcoming), params, _STOPS, upcoming.group.encode())
            try:
                scheduler.add(request)
                live[number] = Live(upcoming.second * to_ms, min(upcoming.generated, max_tokens))
            except RequestError:
                outcome.refused += 1
            number += 1
            upcoming = next(pending, None)
        while len(flying) < depth and (step := scheduler.schedule()) is not None:
            ms = _count(outcome, step, table)
            free = max(free, now) + ms
            flying.append((step, ms, free))
        if not flying:
            if upcoming is None:
                break
            now = max(now, upcoming.second * to_ms)
            continue
        step, ms, now = flying.popleft()
        tokens = [
            _STOP if request.number not in live or num_generated + 1 >= live[request.number].generated else _GO_ON
            for request, _, _, _, num_generated in step.rows
        ]
        for request in scheduler.complete(step, tokens):
            live[request.number].token(now, outcome)
            if request.finish_reason is not None:
                live.pop(request.number).end(outcome)
        outcome.running_sum += len(scheduler.running)
        if every and outcome.steps % every == 0:
            blocks = scheduler.blocks
            held = blocks.usable_pages - blocks.num_available
            outcome.samples.append(Sample(now / 1e3, len(scheduler.running), len(scheduler.waiting), held, ms, step.num_tokens))
    outcome.seconds = now / 1e3
    outcome.preemptions, outcome.cached_tokens = scheduler.preemptions, scheduler.cached_tokens
    return outcome


def _prompt(number: int, arrival: Arrival) -> tuple[int, ...]:
    """Tokens that no other request has, after those that its group shares."""
    shared = min(arrival.shared, arrival.prompt)
    start = (number + 1) << 32
    return (*range(2, 2 + shared), *range(start, start + arrival.prompt - shared))


def _count(outcome: Outcome, step: Step, table: StepCosts) -> float:
    """Add a step to the totals; its time in ms."""
    tokens = context = pairs = 0
    prompts = False
    for _, start, count, _, num_generated in step.rows:
        tokens += count
        if count > 1 or num_generated == 0:
            outcome.prompt_tokens += count
        context += start + count
        if count > 1:
            prompts = True
            pairs += count * (2 * start + count) // 2
            context -= start + count  # a chunk's reads are part of its pairs
    base, mode, rows = table.step(tokens, prompts)
    outcome.steps += 1
    outcome.steps_by_mode[mode] += 1
    outcome.tokens_by_mode[mode] += tokens
    outcome.step_sizes[tokens] += 1
    if mode != "eager":
        outcome.rows += rows
        outcome.padding += rows - tokens
    return base + table.kv_ms * context + table.pair_ms * pairs


def draw(outcome: Outcome, title: str, path: str | Path) -> None:
    """A picture over time: requests, tokens a step, time a step, pages held. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("--picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds = [sample.second for sample in outcome.samples]
    figure, axes = pyplot.subplots(4, 1, figsize=(11, 10), sharex=True)
    axes[0].plot(seconds, [sample.running for sample in outcome.samples], label="running")
    axes[0].plot(seconds, [sample.waiting for sample in outcome.samples], label="waiting")
    axes[0].legend(loc="upper right")
    axes[0].set_ylabel("requests")
    for axis, name, values in (
        (axes[1], "tokens in the step", [sample.tokens for sample in outcome.samples]),
        (axes[2], "ms of the step", [sample.step_ms for sample in outcome.samples]),
        (axes[3], "pages held", [sample.pages for sample in outcome.samples]),
    ):
        axis.plot(seconds, values, ".", markersize=1.5)
        axis.set_ylabel(name)
    axes[0].set_title(title)
    axes[-1].set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
