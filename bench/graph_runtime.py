"""The graph runtime by itself: step time in every mode beside torch's best, start-up, memory, host time, random steps, picks.

    python -m bench.graph_runtime --out bench/results/graph_runtime_h200.json
    python -m bench.graph_runtime --parts modes random --budget-s 120      # some parts; the file is written after each row
    python -m bench.graph_runtime --small                                  # a tiny model, on any machine; its figures mean nothing

Llama-1B shape with random weights unless --small. Parts:

- modes: one decode step, back to back: ours full, piecewise and eager, ``torch.compile(mode="reduce-overhead")``, Inductor in one graph;
- startup: captures of each mode alone, and what a call adds on the host, with tensors or staged (as the engine does). Host time is what a
  call takes with the device idle before it; "adds" is that less the launch of the graphs alone; of a piece: the launch of all less the
  splitting ops alone, divided by the pieces. Its parts, and what a launch takes behind other things: bench/replay_host.py;
- host: that alone, of full graphs of a few batches, all of them first and then by part;
- random: random serving steps, each compared bit for bit with the callable not captured, on a small model (bench/random_steps.py);
- regret: every step size timed again in every mode, pick against best, for each context;
- split: start-up and piecewise step time of both ways to cut, the FX graph and the capture.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bench.decode_step import check_modes, our_step, peer_runs
from bench.harness import back_to_back_us, write_results
from bench.random_steps import run_random_steps
from bench.replay_host import added_row, host_row
from bench.shapes import LLAMA_1B, TINY
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.graphed import graphed
from runtime.model import random_model
from runtime.runner import Runner
from runtime.step_module import DYNAMIC, PAD

Row = dict[str, Any]
PARTS = ("modes", "startup", "host", "random", "regret", "split")


class Budget:
    """Seconds for the whole script: parts end early, and say so, rather than be cut off."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def left(self) -> float:
        return self.end - time.perf_counter()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- one decode step ------------------------------------------------------------------------------------------------------------


def mode_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Ours in every mode from one set of captures, and the peers, interleaved."""
    device = str(model.embed_tokens.device)
    context = arguments.contexts[0]
    for batch in arguments.batches:
        if budget.left() < 0:
            yield {"what": "decode step", "batch": batch, "skipped": "no time left"}
            continue
        # first: torch.compile(mode="reduce-overhead") clears cuBLAS workspaces while it records (docs/static-addresses.md)
        runs = peer_runs(model, batch, context, device, arguments.peers)
        fast, step_arguments = _graphed_step(model, batch, context, device, arguments.backend, "auto")
        ours = {f"ours {mode}": _in_mode(fast, mode, step_arguments) for mode in ("full", "piecewise", "eager")}
        check_modes(ours)
        runs |= ours
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(5):
            for name, run in runs.items():
                steps = 4 if "eager" in name else 30
                samples[name].append(back_to_back_us(run, steps=steps, repeats=1, warmup=1))
        for name, values in samples.items():
            yield {"what": "decode step", "batch": batch, "context": context, "backend": arguments.backend, "name": name,
                   "us": statistics.median(values), "samples_us": [round(v, 1) for v in values]}  # fmt: skip
        fast.reset()
        del runs, ours, fast
        torch._dynamo.reset()
        _free()


def _graphed_step(model: Any, batch: int, context: int, device: str, backend: str, mode: str, **compile: Any) -> tuple[Any, dict[str, Any]]:
    step, step_arguments = our_step(model, batch, context, device)
    config = {
        "graph": {"mode": mode, "capture_sizes": [batch], "max_tokens": batch, "on_capture_error": "raise"},
        "scheduler": {"max_num_seqs": batch, "max_batch_tokens": max(batch, 8)},
        "compile": {"backend": backend, **compile},
    }
    fast = graphed(step, config, dynamic=DYNAMIC, pad=PAD, bounds={"seqs": batch})
    fast.warmup(**step_arguments)
    return fast, step_arguments


def _in_mode(fast: Any, mode: str, step_arguments: dict[str, Any]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        if fast._dispatcher.mode != mode:
            fast._dispatcher.mode = mode
            fast._dispatcher.changed()
        return fast(**step_arguments)

    return run


# -- start-up and host time -----------------------------------------------------------------------------------------------------


def make_runner(model: Any, mode: str, arguments: argparse.Namespace, contexts: list[int], **graph: Any) -> Runner:
    longest = 2 * max(contexts)
    pages = arguments.seqs * -(-longest // 16) + 1
    config = RuntimeConfig.load({
        "graph": {"mode": mode, "max_tokens": arguments.max_tokens, "max_graphs": arguments.graphs, "contexts": contexts, **graph},
        "scheduler": {"max_num_seqs": arguments.seqs, "max_batch_tokens": arguments.max_tokens},
        "compile": {"backend": arguments.backend},
        "cache": {"num_pages": min(pages, arguments.max_pages)},
    })  # fmt: skip
    return Runner(model, config, longest)


def startup_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Captures of one mode, all sizes, one set of host values after the other."""
    for mode in ("full", "piecewise"):
        runner = make_runner(model, mode, arguments, arguments.contexts[:1])
        start = time.perf_counter()
        plan = runner.warmup()
        total = time.perf_counter() - start
        steps = runner.steps
        keys = list(steps._steps.keys.values()) if steps._steps is not None else []
        row: Row = {
            "what": "start-up", "mode": mode, "sizes": len({r.size for r in plan.rows}), "captured": sum(len(k.captured) for k in keys),
            "warmup_s": total, "prepare_and_capture_s": plan.capture_seconds, "graph_only_s": plan.graph_seconds,
            "measure_s": plan.measure_seconds, "graph_mib": plan.graph_bytes / 2**20, "remarks": plan.remarks,
        }  # fmt: skip
        for batch, host in _by_batch(runner, mode, sorted({min(n, arguments.seqs) for n in (1, 8, 64, arguments.seqs)})):
            row[f"batch {batch}"] = host
        steps.reset()
        yield row
        del runner, steps, keys
        _free()


def host_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Full graphs of decode steps alone: what each batch adds first, then what of it is which part."""
    batches = sorted({min(n, arguments.seqs) for n in (1, 8, 64, 256, arguments.seqs)})
    runner = make_runner(model, "full", arguments, arguments.contexts[:1], capture_sizes=batches)
    start = time.perf_counter()
    runner.steps.warmup(make_inputs=runner._representative, keys=[{"max_query_len": 1}], contexts=runner.contexts)
    print(f"host: warm-up {time.perf_counter() - start:.1f} s", flush=True)
    few = 10 if arguments.small else 1
    for what, row_of, repeats in (("host time in all", added_row, 200 // few), ("host time", host_row, 40 // few)):
        for batch, row in _by_batch(runner, "full", batches, lambda *given, row_of=row_of, repeats=repeats: row_of(*given, repeats)):
            yield {"what": what, "mode": "full", "batch": batch, **row}
            if budget.left() < 0:
                yield {"what": what, "skipped": f"what comes after batch {batch}: the time is over"}
                return
    runner.steps.reset()


def _by_batch(runner: Runner, mode: str, batches: Iterable[int], row_of: Callable[..., Row] = host_row) -> Iterator[tuple[int, Row]]:
    """Host time of the decode steps of these sizes that the mode serves."""
    steps = runner.steps
    assert steps._steps is not None
    key = next(key for key in steps._steps.keys.values() if key.text == "max_query_len=1")
    for batch in batches:
        inputs = runner.batch(batch, 0)
        decision = steps.explain(**inputs)
        if decision.mode == mode:
            yield batch, row_of(steps, inputs, key.arena, key.captured[decision.mode, decision.size])


# -- random steps ---------------------------------------------------------------------------------------------------------------


def random_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    device = model.embed_tokens.device
    small = random_model(TINY, 0, model.spec.dtype, device)
    for check in arguments.checks:
        config = {
            "graph": {"max_tokens": 64, "capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64], "check": check, "on_capture_error": "raise"},
            "compile": {"backend": "eager"},
            "cache": {"num_pages": 80},
            "scheduler": {"max_num_seqs": 12, "max_batch_tokens": 96, "max_context": 256},
        }
        engine = Engine(small, config)
        start = time.perf_counter()
        found = run_random_steps(engine, arguments.random_steps, arguments.seed)
        yield {"what": "random steps", "check": check, "seed": arguments.seed, "seconds": time.perf_counter() - start, **found}


# -- picks ----------------------------------------------------------------------------------------------------------------------


def regret_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """One set of captures, timed at every context; then every size again, a stride at a time, until the budget is over."""
    runner = make_runner(model, "auto", arguments, arguments.contexts)
    start = time.perf_counter()
    plan = runner.warmup()
    yield {
        "what": "warm-up with contexts", "contexts": runner.contexts, "seconds": time.perf_counter() - start,
        "measure_s": plan.measure_seconds,
        "graph_mib": plan.graph_bytes / 2**20, "other_picks": [remark for remark in plan.remarks if "at a context of" in remark],
    }  # fmt: skip
    sizes = range(1, arguments.max_tokens + 1, arguments.step)
    rounds = [sizes[first::8] for first in range(8)]  # the whole range first coarsely, so that an early end leaves a fair sample
    found: dict[tuple[int, str], list[Row]] = {}
    for given in rounds:
        for context in runner.contexts:
            if budget.left() > 0:
                for key, rows in runner.steps.regret(given, context).items():
                    found.setdefault((context, key), []).extend(rows)
    for (context, key), rows in found.items():
        rows.sort(key=lambda row: row["tokens"])
        yield {
            "what": "regret", "context": context, "key": key, "sizes": len(rows), "worst": max(rows, key=lambda row: row["regret"]),
            "share_within_2_percent": sum(row["regret"] <= 0.02 for row in rows) / len(rows),
            "picks": {mode: sum(row["pick"][0] == mode for row in rows) for mode in ("full", "piecewise", "eager")},
            "table": [[row["tokens"], *row["pick"], round(row["pick_ms"], 4), *row["best"], round(row["best_ms"], 4)] for row in rows],
        }  # fmt: skip
    runner.steps.reset()


# -- the two ways to cut --------------------------------------------------------------------------------------------------------


def split_rows(model: Any, arguments: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Each way to cut, from a cold Dynamo, in the same process; compiled code comes from Inductor's cache where it can."""
    device = str(model.embed_tokens.device)
    batch = arguments.batches[0]
    for split in ("fx", "capture"):
        torch._dynamo.reset()
        start = time.perf_counter()
        fast, step_arguments = _graphed_step(model, batch, arguments.contexts[0], device, arguments.backend, "piecewise", split=split)
        seconds = time.perf_counter() - start
        key = next(iter(fast._steps.keys.values()))
        step = next(iter(key.captured.values())).step
        yield {
            "what": "split", "split": split, "backend": arguments.backend, "batch": batch, "start_s": seconds, "pieces": len(step.graphs),
            "step_us": back_to_back_us(lambda fast=fast, given=step_arguments: fast(**given), repeats=5),
        }  # fmt: skip
        fast.reset()
        del fast, key, step
        _free()


ROWS = {"modes": mode_rows, "startup": startup_rows, "host": host_rows, "random": random_rows, "regret": regret_rows, "split": split_rows}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget-s", type=float, default=360.0, help="no part and no batch is begun after so many seconds")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--peers", nargs="*", default=["reduce-overhead", "Inductor in one graph"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64], help="of the part modes; the first one of the part split")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--max-pages", type=int, default=1 << 17)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 128, 8192])
    parser.add_argument("--step", type=int, default=1, help="stride over the step sizes of the regret table")
    parser.add_argument("--checks", nargs="+", choices=["contract", "poison"], default=["contract", "poison"], help="of the part random")
    parser.add_argument("--seed", type=int, default=0, help="of the part random")
    parser.add_argument("--random-steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.max_tokens, arguments.graphs, arguments.seqs, arguments.contexts, arguments.step = 8, 3, 4, [32], 3
        arguments.batches, arguments.random_steps = [2], 40
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    budget = Budget(arguments.budget_s)
    model = random_model(TINY if arguments.small else LLAMA_1B, 0, dtype, device)
    rows: list[Row] = []
    for part in arguments.parts:
        start = time.perf_counter()
        over = [{"what": part, "skipped": f"the {arguments.budget_s:.0f} s of --budget-s are over"}]
        for row in ROWS[part](model, arguments, budget) if budget.left() > 0 else over:
            rows.append(row)
            print({name: value for name, value in row.items() if name not in ("table", "samples_us")}, flush=True)
            if arguments.out:
                write_results(arguments.out, "python -m bench.graph_runtime", rows)
        print(f"part {part}: {time.perf_counter() - start:.1f} s, {budget.left():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
