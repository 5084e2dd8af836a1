"""One benchmark case, checked and then timed against its peers: what every suite under ``bench/`` is made of.

A suite is a test function with two parameters: ``case`` (a row of a table) and ``peer`` (a column). It describes the case as a
``Problem`` and hands it to the ``measure`` fixture, which

1. checks the peer's result against the problem's oracle, and fails without timing if it is wrong;
2. at the case's first peer, times all selected peers of that case in turns, so that clocks drift for all alike: device time of CUDA
   graphs that hold at least ten calls over inputs which together exceed L2;
3. reports the samples to pytest-benchmark through a virtual clock, and GB/s, TFLOP/s, percent of the measured roof and the error in
   ``extra_info``.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import harness
from bench.peers import why_absent

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
REPEATS = 20 if ON_GPU else 2
MIN_CALLS = 10 if ON_GPU else 1
BUDGET_US = 5e6  # for the repeats of one peer of one case: a slow one gets fewer


def sizes(gpu: Sequence[Any], smoke: Sequence[Any]) -> list[Any]:
    """The cases of this machine: those of a GPU, or a few tiny ones."""
    return list(gpu if ON_GPU else smoke)


@dataclass(kw_only=True)
class Problem:
    """peers: name → call(i), which computes on the i-th set of inputs and returns its result.

    expected: the oracle's result for set 0, in fp32 or fp64, compared by ‖out − expected‖ / ‖expected‖ with ``tolerance``; or
    check(peer, out) → error, for results that may differ (random draws). pick selects the part of a result that is compared.
    bytes, flops: what one call must move and compute at the least. sets: how many sets of inputs there are.
    wall: time calls back to back on the host clock instead of graphs on the device. units: of work in a call (tokens, say), by which
    its time is divided. apart: peers do not take turns but are timed one after the other, and what torch compiled is dropped in between
    (two peers that replay CUDA graphs of torch's own cannot take turns).
    """

    peers: dict[str, Callable[[int], Any]]
    expected: Any = None
    check: Callable[[str, Any], float] | None = None
    pick: Callable[[Any], Any] = field(default=lambda out: out)
    tolerance: float = 2**-8 if ON_GPU else 1e-5  # of bf16, of fp32
    bytes: int = 0
    flops: int = 0
    sets: int = 1
    wall: bool = False
    units: int = 1
    apart: bool = False
    repeats: int = REPEATS
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What was measured of one peer: seconds of one call, several times, or why there is nothing."""

    seconds: tuple[float, ...] = ()
    error: float = 0.0
    failure: BaseException | None = None


def sets_for(bytes_per_set: int) -> int:
    """How many sets of inputs defeat L2: four times its size, 2 to 64 sets; one on a CPU."""
    if not ON_GPU:
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(64, max(2, -(-4 * cache // max(bytes_per_set, 1))))


@functools.cache
def roof() -> dict[str, float]:
    """Measured ceilings of this GPU: GB/s of a copy (read and written) and TFLOP/s of a bf16 8192³ product. Empty on a CPU."""
    if not ON_GPU:
        return {}
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    runs = {
        # by a kernel: copy_ becomes a node of the copy engine in a graph, which reaches 60% of what kernels do
        "copy": harness.graph_of([lambda: torch.mul(source, 1.0, out=target)] * 10),
        "matmul": harness.graph_of([lambda: a @ b] * 10),
    }  # fmt: skip
    times = harness.interleaved_us(runs, calls=10)
    return {"gb_per_s": 2 * source.nbytes / times["copy"] / 1e3, "tflop_per_s": 2 * 8192**3 / times["matmul"] / 1e6}


def error_of(out: Any, expected: Any) -> float:
    """The largest relative error over a result's tensors; infinite for NaN or a wrong shape."""
    pairs = zip(out, expected, strict=True) if isinstance(expected, (tuple, list)) else [(out, expected)]
    worst = 0.0
    for mine, reference in pairs:
        if mine.shape != reference.shape:
            return float("inf")
        error = harness.relative_error(mine, reference)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _back_to_back_us(run: Callable[[], Any]) -> float:
    """Microseconds of the run on the host clock, the device drained before and after."""
    sync = torch.cuda.synchronize if ON_GPU else (lambda: None)
    sync()
    start = time.perf_counter()
    run()
    sync()
    return (time.perf_counter() - start) * 1e6


def _check(problem: Problem, peer: str) -> float:
    out = problem.pick(problem.peers[peer](0))
    error = problem.check(peer, out) if problem.check is not None else error_of(out, problem.expected)
    if not error <= problem.tolerance:
        raise AssertionError(f"{peer}: error {error:.3g} is above {problem.tolerance:.3g}, so it was not timed")
    return error


def measure(problem: Problem, selected: Sequence[str]) -> dict[str, Outcome]:
    """Check and time ``selected``. A peer that fails has its failure as outcome and does not stop the others."""
    if problem.apart and len(selected) > 1:
        return {peer: _alone(problem, peer) for peer in selected}
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, float] = {}
    runs: dict[str, Callable[[], Any]] = {}
    calls = 1 if problem.units > 1 else -(-MIN_CALLS // problem.sets) * problem.sets
    with torch.no_grad():
        for peer in selected:
            try:
                errors[peer] = _check(problem, peer)
                call = problem.peers[peer]
                numbered = [functools.partial(call, i % problem.sets) for i in range(calls)]
                runs[peer] = functools.partial(_each, numbered) if problem.wall else harness.graph_of(numbered)
            except Exception as failure:
                outcomes[peer] = Outcome(failure=failure)
        # the check was a whole call, so one warm-up is enough where a call is a whole model's answer
        options: dict[str, Any] = {"once_us": _back_to_back_us, "warmup": int(ON_GPU)} if problem.wall else {"warmup": 3 * ON_GPU}
        samples = harness.interleaved_samples_us(runs, repeats=problem.repeats, budget_us=BUDGET_US, **options)
    for peer, values in samples.items():
        outcomes[peer] = Outcome(tuple(value / calls / problem.units * 1e-6 for value in values), errors[peer])
    runs.clear()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return outcomes


def _alone(problem: Problem, peer: str) -> Outcome:
    """Also a failure while it is timed is the peer's own: no other one is in the run."""
    try:
        return measure(problem, [peer])[peer]
    except Exception as failure:
        return Outcome(failure=failure)
    finally:
        torch.compiler.reset()


def _each(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def extra_info(problem: Problem, outcome: Outcome) -> dict[str, Any]:
    """The figures of one benchmark beside its time."""
    seconds = statistics.median(outcome.seconds)
    info: dict[str, Any] = {"us": seconds * 1e6, "error": outcome.error, "tolerance": problem.tolerance, **problem.info}
    ceiling = roof() if problem.bytes or problem.flops else {}
    if problem.bytes:
        info |= {"bytes": problem.bytes, "gb_per_s": problem.bytes / seconds / 1e9}
    if problem.flops:
        info |= {"flops": problem.flops, "tflop_per_s": problem.flops / seconds / 1e12}
    if ceiling:
        floor = max(problem.bytes / ceiling["gb_per_s"] / 1e9, problem.flops / ceiling["tflop_per_s"] / 1e12)
        bound = "bandwidth" if problem.bytes / ceiling["gb_per_s"] / 1e9 == floor else "compute"
        info |= {"percent_of_roof": 100 * floor / seconds, "bound": bound, "roof": ceiling}
    return info


def summary(outcomes: dict[str, Outcome]) -> str:
    """One line of a case: microseconds of each peer, and ours against the best of the others."""
    us = {name: 1e6 * statistics.median(outcome.seconds) for name, outcome in outcomes.items() if outcome.failure is None}
    parts = [f"{name} {value:.4g}" for name, value in us.items()]
    parts += [f"{name} failed: {_first_line(outcome.failure)}" for name, outcome in outcomes.items() if outcome.failure is not None]
    ours = [value for name, value in us.items() if name.startswith("tkernels")]
    others = [value for name, value in us.items() if not name.startswith("tkernels")]
    ratio = f" | ours / best other {min(ours) / min(others):.3f}" if ours and others else ""
    if not ON_GPU:
        ratio = " | a smoke test: our kernel is interpreted"
    return " | ".join(parts) + f" µs{ratio}"


def _first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"[:120]


class VirtualClock:
    """pytest-benchmark's timer: it stands still until a benchmark moves it on by a time measured elsewhere."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


__all__ = [
    "DEVICE",
    "DTYPE",
    "ON_GPU",
    "Outcome",
    "Problem",
    "VirtualClock",
    "measure",
    "roof",
    "sets_for",
    "sizes",
    "summary",
    "why_absent",
]
