"""``python -m runtime simulate``: options, cost table, report."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.config import ConfigError, RuntimeConfig
from runtime.costs import Rule, StepCosts, load_table
from runtime.outcome import Outcome, describe
from runtime.roofline import GPUS, SHAPES, pages_that_fit, roofline
from runtime.simulate import Arrival, draw, make_scheduler, read_trace, simulate
from runtime.sizes import capture_sizes, load_histogram

_SAMPLES = 20_000  # points of a picture, about


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """What traffic there is."""
    parser.add_argument("--trace", metavar="FILE", required=True, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--rate", metavar="X", type=float, default=1.0, help="arrivals come so many times as fast (default 1)")
    parser.add_argument("--requests", metavar="N", type=int, default=0, help="only the first N of the trace (default: all)")
    parser.add_argument("--max-answer", metavar="N", type=int, default=4096, help="tokens that requests ask for at most (default 4096)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    add_trace_arguments(parser)
    parser.add_argument("--costs", metavar="FILE", help="measured cost table, as `plan --json` writes; default: a roofline")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="of the roofline (default h200)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b", help="of the roofline (default llama-8b)")
    parser.add_argument("--json", metavar="FILE", help="also write the report here")
    parser.add_argument("--picture", metavar="FILE", help="also draw the run over time (PNG; needs matplotlib)")


def run(arguments: argparse.Namespace, config: RuntimeConfig, out: Console) -> None:
    """Simulate and print."""
    arrivals = arrivals_of(arguments)
    table, num_pages = costs_of(config, arguments.costs, arguments.gpu, arguments.shape)
    longest = max(arrival.prompt + min(arrival.generated, arguments.max_answer) for arrival in arrivals)
    scheduler = make_scheduler(config, table, num_pages=num_pages, max_context=longest)
    every = max(1, sum(arrival.generated for arrival in arrivals) // _SAMPLES) if arguments.picture else 0
    depth = 2 if config.scheduler.overlap else 1
    outcome = simulate(arrivals, scheduler, table, rate=arguments.rate, max_tokens=arguments.max_answer, every=every, depth=depth)
    title = f"{Path(arguments.trace).name} at {arguments.rate:g}x, policy {config.scheduler.policy}; costs: {table.source}"
    out.print(title, markup=False)
    _print(outcome, out)
    if arguments.json:
        report: dict[str, Any] = {
            "trace": Path(arguments.trace).name, "rate": arguments.rate, "costs": table.source, "pages": num_pages,
            "scheduler": config.scheduler.model_dump(), "report": outcome.report(),
        }  # fmt: skip
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.picture:
        draw(outcome, title, arguments.picture)


def arrivals_of(arguments: argparse.Namespace) -> list[Arrival]:
    """The trace that the options name, after a look at the numbers beside it."""
    for name, least in (("requests", 0), ("max_answer", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least {least}, got {getattr(arguments, name)}")
    if not (math.isfinite(arguments.rate) and arguments.rate > 0):
        raise ConfigError(f"--rate: expected a number above 0, got {arguments.rate}")
    try:
        return read_trace(arguments.trace)[: arguments.requests or None]
    except ValueError as error:
        if isinstance(error.__cause__, OSError):  # the option is wrong, not what the file holds
            raise ConfigError(str(error)) from error
        raise


def costs_of(config: RuntimeConfig, file: str | None, gpu: str, shape: str) -> tuple[StepCosts, int]:
    """The cost table and the number of pages.

    policy = "static" is the plain scheme: sizes in steps of 8 unless a list is given, full graphs for decode only, the nearest size.
    Sizes that are given and were not measured lie on straight lines between those that were.
    """
    static, pages = config.scheduler.policy == "static", config.cache.num_pages
    rule: Rule = "fixed" if static else "cheapest"
    graph, limits = config.graph, config.scheduler
    sizes = graph.capture_sizes
    if static and sizes == "auto":
        sizes = [size for size in (1, 2, 4, *range(8, graph.max_tokens + 1, 8)) if size <= graph.max_tokens]
    if file is not None:
        modes = {"decode": ["full"], "mixed": ["piecewise"]} if static else None
        table = load_table(file, rule, None if sizes == "auto" else sizes, modes)
        pages = table.num_pages if pages == "auto" and table.num_pages else pages
        if pages == "auto":
            raise ConfigError(f'cache.num_pages: {file} does not say how many pages the engine had; give a number, not "auto"')
        return table, pages
    captured, _ = capture_sizes(
        sizes,
        max_tokens=graph.max_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_graphs=graph.max_graphs,
        histogram=load_histogram(graph.histogram) if graph.histogram else None,
    )
    table = roofline(
        GPUS[gpu], SHAPES[shape], captured,
        max_num_seqs=limits.max_num_seqs, max_batch_tokens=limits.max_batch_tokens, full_mixed=not static, rule=rule,
    )  # fmt: skip
    return table, pages_that_fit(GPUS[gpu], SHAPES[shape], config.cache.page_size) if pages == "auto" else pages


def _print(outcome: Outcome, out: Console) -> None:
    table = Table(show_header=False, box=None)
    for name, text in describe(outcome.report()).items():
        table.add_row(name, text)
    out.print(table)
