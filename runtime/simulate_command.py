"""``python -m runtime simulate``: options, cost table, report."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.config import ConfigError, RuntimeConfig, Sizes
from runtime.costs import StepCosts, load_table
from runtime.outcome import Outcome, describe
from runtime.roofline import GPUS, SHAPES, pages_that_fit, roofline
from runtime.scheduler import table_rule
from runtime.simulate import Arrival, draw, make_scheduler, read_trace, simulate
from runtime.sizes import capture_sizes, load_histogram, plain_sizes

_SAMPLES = 20_000  # points of a picture, about


def add_trace_arguments(parser: argparse.ArgumentParser, *, several_rates: bool = False) -> None:
    """What traffic there is."""
    parser.add_argument("--trace", metavar="FILE", required=True, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    once, text = "arrivals come so many times as fast (default 1)", "; several: one after the other"
    rates: dict[str, Any] = {"default": [1.0], "nargs": "+", "help": once + text} if several_rates else {"default": 1.0, "help": once}
    parser.add_argument("--rate", metavar="X", type=float, **rates)
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
    check_outputs(arguments, "json", "picture")
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


def check_outputs(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError for an option whose file could not be written, before the work whose result it shall hold."""
    for name in names:
        value = getattr(arguments, name)
        if not value:
            continue
        path, option = Path(value), f"--{name.replace('_', '-')} {value}"
        if path.is_dir():
            raise ConfigError(f"{option}: expected a file to write, got a folder")
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: cannot be written: there is no folder {path.parent}; make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{option}: cannot be written: permission denied")


def arrivals_of(arguments: argparse.Namespace) -> list[Arrival]:
    """The trace that the options name, after a look at the numbers beside it."""
    for name, least in (("requests", 0), ("max_answer", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least {least}, got {getattr(arguments, name)}")
    for rate in arguments.rate if isinstance(arguments.rate, list) else [arguments.rate]:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"--rate: expected a number above 0, got {rate}")
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
    plain, pages = config.plain_graphs, config.cache.num_pages
    graph, limits = config.graph, config.scheduler
    if file is not None:
        table = measured_costs(config, file)
        pages = table.num_pages if pages == "auto" and table.num_pages else pages
        if pages == "auto":
            raise ConfigError(f'cache.num_pages: {file} does not say how many pages the engine had; give a number, not "auto"')
        return table, pages
    chosen, _ = capture_sizes(
        _sizes(config)[1],
        max_tokens=graph.max_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_graphs=graph.max_graphs,
        histogram=load_histogram(graph.histogram) if graph.histogram else None,
    )
    table = roofline(
        GPUS[gpu], SHAPES[shape], chosen,
        max_num_seqs=limits.max_num_seqs, max_batch_tokens=limits.max_batch_tokens, full_mixed=not plain, rule=table_rule(config),
    )  # fmt: skip
    return table, pages_that_fit(GPUS[gpu], SHAPES[shape], config.cache.page_size) if pages == "auto" else pages


def measured_costs(config: RuntimeConfig, file: str) -> StepCosts:
    """The costs in a file, as if the graphs of this configuration had been captured where they were measured.

    Where sizes are planned ("auto") it is the graphs of that engine, as far as the configuration has their modes.
    """
    lists = dict(zip(("piecewise", "full"), _sizes(config), strict=True))
    modes = {"decode": ["full"], "mixed": ["piecewise"]} if config.plain_graphs else {kind: [*lists] for kind in ("decode", "mixed")}
    if config.graph.mode != "auto":
        modes = {kind: [mode for mode in each if mode == config.graph.mode] for kind, each in modes.items()}
    captured = {kind: {mode: lists[mode] for mode in each} for kind, each in modes.items()}
    return load_table(file, table_rule(config), captured)


def _sizes(config: RuntimeConfig) -> tuple[Sizes, Sizes]:
    """Those of piecewise and of full graphs."""
    graph = config.graph
    sizes: Sizes = plain_sizes(graph.max_tokens) if config.plain_graphs and graph.capture_sizes == "auto" else graph.capture_sizes
    return sizes, sizes if graph.full_sizes == "auto" else graph.full_sizes


def _print(outcome: Outcome, out: Console) -> None:
    table = Table(show_header=False, box=None)
    for name, text in describe(outcome.report()).items():
        table.add_row(name, text)
    out.print(table)
