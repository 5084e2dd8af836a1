"""``python -m runtime bench``: a trace through the real engine, and beside it what the simulator says of the same traffic."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.config import ConfigError, RuntimeConfig
from runtime.costs import StepCosts, load_table, table_of
from runtime.engine import Engine
from runtime.outcome import describe
from runtime.scheduler import make_scheduler
from runtime.serve_trace import cut, serve
from runtime.simulate import simulate
from runtime.simulate_command import add_trace_arguments, arrivals_of
from runtime.step_costs import Progress, measure_steps

Run = Callable[[Engine, Console, Progress], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    add_trace_arguments(parser)
    parser.add_argument("--seconds", metavar="S", type=float, default=0.0, help="only what arrives in so many seconds (default: all)")
    parser.add_argument("--scale", metavar="X", type=float, default=1.0, help="prompts and answers times this, to try it on a small model")
    parser.add_argument("--costs", metavar="FILE", help="step costs as `plan --json` writes them; default: time the steps first")
    parser.add_argument("--json", metavar="FILE", help="also write both reports here")


def prepare(arguments: argparse.Namespace, config: RuntimeConfig) -> Run:
    """Read trace and costs; the rest needs the engine."""
    if config.parallel.tensor > 1:
        raise ConfigError("parallel.tensor: bench takes one GPU, since each rank would see requests arrive at other steps by its own clock")
    for name in ("seconds", "scale"):
        value = getattr(arguments, name)
        if not (math.isfinite(value) and (value > 0 or (name == "seconds" and value == 0))):
            raise ConfigError(f"--{name}: expected a number above 0, got {value}")
    rate = arguments.rate
    arrivals = cut(arrivals_of(arguments), seconds=arguments.seconds, rate=rate, scale=arguments.scale)
    given = load_table(arguments.costs) if arguments.costs else None

    def run(engine: Engine, out: Console, progress: Progress) -> None:
        table = given or table_of(measure_steps(engine.runner, progress), where="the steps just timed")
        serve(engine, arrivals[:3], rate=1e9, max_tokens=4)  # what is lazy comes now
        engine.use_costs(table)  # and with it an empty prefix cache
        measured = serve(engine, arrivals, rate=rate, max_tokens=arguments.max_answer, progress=progress).report()
        predicted = _predict(engine, config, table, arrivals, rate, arguments.max_answer)
        title = f"{Path(arguments.trace).name} at {rate:g}x, policy {config.scheduler.policy}; costs: {table.source}"
        out.print(title, markup=False)
        _print(measured, predicted, out)
        if arguments.json:
            report: dict[str, Any] = {
                "trace": Path(arguments.trace).name, "rate": rate, "seconds": arguments.seconds, "scale": arguments.scale,
                "model": config.model.path, "costs": table.source, "pages": engine.runner.num_pages,
                "graph": config.graph.model_dump(), "scheduler": config.scheduler.model_dump(),
                "report": measured, "simulated": predicted,
            }  # fmt: skip
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")

    return run


def _predict(engine: Engine, config: RuntimeConfig, table: StepCosts, arrivals: Any, rate: float, max_tokens: int) -> dict[str, Any]:
    """The same traffic, scheduler and pages, with the table in place of the device."""
    pages, context = engine.runner.num_pages, engine.scheduler.model_context
    scheduler = make_scheduler(config, table, num_pages=pages, max_context=context)
    depth = 2 if config.scheduler.overlap else 1
    return simulate(arrivals, scheduler, table, rate=rate, max_tokens=max_tokens, depth=depth).report()


def _print(measured: dict[str, Any], predicted: dict[str, Any], out: Console) -> None:
    table = Table("", "engine", "simulator", box=None)
    said, seen = describe(predicted), describe(measured)
    for name, text in seen.items():
        table.add_row(name, text, said.get(name, "-"))
    out.print(table)
    pairs = {
        "throughput": (measured["generated_tokens_per_s"], predicted["generated_tokens_per_s"]),
        "median time between tokens": (measured["itl_ms"]["p50"], predicted["itl_ms"]["p50"]),
        "median time to the first token": (measured["ttft_ms"]["p50"], predicted["ttft_ms"]["p50"]),
    }
    for name, (real, simulated) in pairs.items():
        if real and not math.isnan(real):
            out.print(f"{name}: the simulator says {simulated / real:.3f} of what was measured")
