"""``python -m runtime bench``: a trace through the real engine, and beside it what the simulator says of the same traffic."""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.config import ConfigError, RuntimeConfig
from runtime.costs import StepCosts, table_of
from runtime.engine import Engine
from runtime.outcome import describe
from runtime.scheduler import make_scheduler, table_rule
from runtime.serve_trace import HostClock, cut, serve
from runtime.simulate import Arrival, simulate
from runtime.simulate_command import add_trace_arguments, arrivals_of, check_outputs, measured_costs
from runtime.step_costs import Progress, measure_steps

Run = Callable[[Engine, Console, Progress], None]
_WARM_REQUESTS, _WARM_ANSWER = 48, 24  # of the trace, all at once before the clock starts: what is lazy comes then


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    add_trace_arguments(parser, several_rates=True)
    parser.add_argument("--seconds", metavar="S", type=float, default=0.0, help="only what arrives in so many seconds (default: all)")
    parser.add_argument("--scale", metavar="X", type=float, default=1.0, help="prompts and answers times this, to try it on a small model")
    parser.add_argument("--costs", metavar="FILE", help="step costs as `plan --json` writes them; default: time the steps first")
    parser.add_argument("--save-costs", metavar="FILE", help="where the costs timed here are kept, as `plan --json` keeps them")
    parser.add_argument("--budget-s", metavar="S", type=float, default=0.0, help="seconds for timing steps (default: as many as it takes)")
    parser.add_argument("--json", metavar="FILE", help="also write all reports here, after each rate")


def prepare(arguments: argparse.Namespace, config: RuntimeConfig) -> Run:
    """Read trace and costs; the rest needs the engine."""
    if config.parallel.tensor > 1:
        raise ConfigError("parallel.tensor: bench takes one GPU, since each rank would see requests arrive at other steps by its own clock")
    for name in ("seconds", "scale", "budget_s"):
        value = getattr(arguments, name)
        if not (math.isfinite(value) and (value > 0 or (name != "scale" and value == 0))):
            raise ConfigError(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
    if arguments.costs and arguments.save_costs:
        raise ConfigError("--save-costs: nothing is timed when --costs is given; leave one of them out")
    check_outputs(arguments, "save_costs", "json")
    arrivals = arrivals_of(arguments)
    parts = {rate: cut(arrivals, seconds=arguments.seconds, rate=rate, scale=arguments.scale) for rate in arguments.rate}
    given = measured_costs(config, arguments.costs) if arguments.costs else None

    def run(engine: Engine, out: Console, progress: Progress) -> None:
        table, checks = given, []
        if table is None:
            data = measure_steps(engine.runner, progress, budget_s=arguments.budget_s)
            table, checks = table_of(data, table_rule(config), "the steps just timed", data["captured"]), data["check"]
            if arguments.save_costs:
                Path(arguments.save_costs).write_text(json.dumps(data, indent=1) + "\n")
        # Which graph serves a step is for the engine's dispatcher to say, in the simulator too: so both pad alike.
        table = table.served_by(engine.runner.pick)
        plan = engine.plan
        report: dict[str, Any] = {
            "trace": Path(arguments.trace).name, "seconds": arguments.seconds, "scale": arguments.scale,
            "model": config.model.path, "costs": table.source, "pages": engine.runner.num_pages,
            "startup": {"seconds": engine.startup_seconds, "capture_s": plan.capture_seconds, "measure_s": plan.measure_seconds,
                        "graph_mib": plan.graph_bytes / 2**20, "remarks": plan.remarks},
            "graph": config.graph.model_dump(), "scheduler": config.scheduler.model_dump(), "check": checks, "runs": [],
        }  # fmt: skip
        _warm(engine, arrivals, arguments.scale)
        for rate, part in parts.items():
            engine.use_costs(table)  # and with it an empty prefix cache
            with _no_collection(), HostClock(engine) as host:
                measured = serve(engine, part, rate=rate, max_tokens=arguments.max_answer, progress=progress).report()
            predicted = _predict(engine, config, table, part, rate, arguments.max_answer)
            out.print(f"{report['trace']} at {rate:g}x, policy {config.scheduler.policy}; costs: {table.source}", markup=False)
            _print(measured, predicted, host.report(), out)
            report["runs"].append({"rate": rate, "report": measured, "simulated": predicted, "host": host.report()})
            if arguments.json:  # after each: what was measured stays, whatever comes next
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")

    return run


def _warm(engine: Engine, arrivals: Sequence[Arrival], scale: float) -> None:
    """Traffic of all kinds, so that nothing is compiled or set up while the clock runs."""
    serve(engine, cut(arrivals[:_WARM_REQUESTS], seconds=0, rate=1.0, scale=scale), rate=1e9, max_tokens=_WARM_ANSWER)


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector leaves what is there now alone: a full pass over it takes longer than many steps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _predict(
    engine: Engine, config: RuntimeConfig, table: StepCosts, arrivals: Sequence[Arrival], rate: float, max_tokens: int
) -> dict[str, Any]:
    """The same traffic, scheduler and pages, with the table in place of the device."""
    pages, context = engine.runner.num_pages, engine.scheduler.model_context
    scheduler = make_scheduler(config, table, num_pages=pages, max_context=context)
    depth = 2 if config.scheduler.overlap else 1
    return simulate(arrivals, scheduler, table, rate=rate, max_tokens=max_tokens, depth=depth).report()


def _print(measured: dict[str, Any], predicted: dict[str, Any], host: dict[str, Any], out: Console) -> None:
    table = Table("", "engine", "simulator", box=None)
    said, seen = describe(predicted), describe(measured)
    for name, text in seen.items():
        table.add_row(name, text, said.get(name, "-"))
    out.print(table)
    out.print(
        "host: a scheduling decision "
        + " / ".join(f"{value:.0f}" for value in host["decide_us"].values())
        + " us, a whole step without waiting "
        + " / ".join(f"{value / 1e3:.2f}" for value in host["step_us"].values())
        + " ms (p50 / p90 / p99)"
    )
    pairs = {
        "throughput": (measured["generated_tokens_per_s"], predicted["generated_tokens_per_s"]),
        "median time between tokens": (measured["itl_ms"]["p50"], predicted["itl_ms"]["p50"]),
        "median time to the first token": (measured["ttft_ms"]["p50"], predicted["ttft_ms"]["p50"]),
    }
    for name, (real, simulated) in pairs.items():
        if real and not math.isnan(real):
            out.print(f"{name}: the simulator says {simulated / real:.3f} of what was measured")
