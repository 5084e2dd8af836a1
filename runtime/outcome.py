"""What came of a run of traffic, simulated or on a device: counts, latencies, and the report of both. Pure Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GOOD_TTFT_MS, GOOD_ITL_MS = 500.0, 50.0


class Sample(NamedTuple):
    """The state at the end of a step, for pictures over time."""

    second: float
    running: int
    waiting: int
    pages: int
    step_ms: float
    tokens: int


@dataclass
class Outcome:
    """What happened. Times in ms; the lists have one entry a request (ttft, worst) or a token (itl)."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    good: int = 0
    finished: int = 0
    refused: int = 0
    seconds: float = 0.0
    steps: int = 0
    running_sum: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_by_mode: Counter[str] = field(default_factory=Counter)
    steps_by_mode: Counter[str] = field(default_factory=Counter)
    rows: int = 0  # of captured steps
    padding: int = 0
    step_sizes: Counter[int] = field(default_factory=Counter)
    preemptions: int = 0
    cached_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    idle: float | None = None
    """Share of the device's time between steps while there was work, measured by device events."""

    def report(self) -> dict[str, Any]:
        """Numbers to print and to keep."""
        requests, tokens = max(1, self.finished + self.refused), max(1, sum(self.tokens_by_mode.values()))
        seconds = self.seconds or 1.0
        return {
            "requests": self.finished,
            "refused": self.refused,
            "seconds": self.seconds,
            "steps": self.steps,
            "mean_running": self.running_sum / max(1, self.steps),
            "requests_per_s": self.finished / seconds,
            "generated_tokens_per_s": self.generated_tokens / seconds,
            "prompt_tokens_per_s": self.prompt_tokens / seconds,
            "ttft_ms": {f"p{p}": percentile(self.ttft, p) for p in (50, 90, 99)},
            "itl_ms": {f"p{p}": percentile(self.itl, p) for p in (50, 90, 99)},
            "goodput": self.good / requests,
            "tokens_by_mode": {mode: self.tokens_by_mode[mode] / tokens for mode in ("full", "piecewise", "eager")},
            "padding": self.padding / max(1, self.rows),
            "preemptions": self.preemptions,
            "cached_prompt_tokens": self.cached_tokens,
            **({} if self.idle is None else {"idle_between_steps": self.idle}),
            "step_sizes": dict(sorted(self.step_sizes.items())),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class Live:
    """A request on its way: when it came, how many tokens it will get, when the latest one came, and how long each took."""

    __slots__ = ("arrived", "gaps", "generated", "last", "ttft")

    def __init__(self, arrived: float, generated: int) -> None:
        self.arrived, self.generated = arrived, generated
        self.last = self.ttft = -1.0
        self.gaps: list[float] = []

    def token(self, now: float, outcome: Outcome) -> None:
        if self.ttft < 0:
            self.ttft = now - self.arrived
        else:
            self.gaps.append(now - self.last)
        self.last = now
        outcome.generated_tokens += 1

    def end(self, outcome: Outcome) -> None:
        outcome.finished += 1
        outcome.ttft.append(self.ttft)
        outcome.itl += self.gaps
        outcome.good += self.ttft <= GOOD_TTFT_MS and (not self.gaps or percentile(self.gaps, 99) <= GOOD_ITL_MS)


def describe(report: Mapping[str, Any]) -> dict[str, str]:
    """A report in words, line by line."""
    three = lambda values: " / ".join(f"{value:.1f}" for value in values.values())
    idle = report.get("idle_between_steps")
    return {
        "requests": f"{report['requests']} in {report['seconds']:.1f} s, {report['requests_per_s']:.2f}/s; refused: {report['refused']}",
        "throughput": f"{report['generated_tokens_per_s']:.0f} generated tokens/s, {report['prompt_tokens_per_s']:.0f} prompt tokens/s",
        "time to first token": f"{three(report['ttft_ms'])} ms (p50 / p90 / p99)",
        "time between tokens": f"{three(report['itl_ms'])} ms (p50 / p90 / p99)",
        "goodput": f"{report['goodput']:.1%} (first token within {GOOD_TTFT_MS:.0f} ms, p99 between tokens within {GOOD_ITL_MS:.0f} ms)",
        "steps": f"{report['steps']}, {report['mean_running']:.1f} requests running on average",
        "tokens by mode": ", ".join(f"{mode} {share:.1%}" for mode, share in report["tokens_by_mode"].items()),
        "padding": f"{report['padding']:.2%} of graph rows",
        "preemptions": str(report["preemptions"]),
        "prefix cache": f"{report['cached_prompt_tokens']} prompt tokens found",
        **({} if idle is None else {"device idle": f"{idle:.2%} between steps, by device events"}),
    }
