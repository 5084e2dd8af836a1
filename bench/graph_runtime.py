"""The graph runtime by itself: start-up, memory, host time of a step, and whether the picks were right.

    python -m bench.graph_runtime --out bench/results/graph_runtime_h200.json
    python -m bench.graph_runtime --small            # a tiny model, on any machine; its figures mean nothing

Llama-1B shape with random weights unless --small. Host time is what a call takes with the device idle before it; "adds" is that
less the launch of the graph alone, and for piecewise less the splitting ops alone, divided by the pieces. Regret: every step size
timed again in every mode, pick against best, for each context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import runtime.runner as runner_module
from bench.harness import write_results
from bench.shapes import LLAMA_1B, TINY
from runtime.capture import EagerCall
from runtime.config import RuntimeConfig
from runtime.model import random_model
from runtime.runner import Runner


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(run: Callable[[], Any], repeats: int = 200) -> float:
    """Median host time of one call, the device idle before each."""
    times = []
    for _ in range(repeats):
        _sync()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    _sync()
    return statistics.median(times) * 1e6


def make_runner(model: Any, mode: str, arguments: argparse.Namespace, context: int) -> Runner:
    runner_module._WARMUP_CONTEXT = context
    pages = arguments.seqs * (-(-2 * context // 16)) + 1
    config = RuntimeConfig.load({
        "graph": {"mode": mode, "max_tokens": arguments.max_tokens, "max_graphs": arguments.graphs},
        "scheduler": {"max_num_seqs": arguments.seqs, "max_batch_tokens": arguments.max_tokens},
        "compile": {"backend": arguments.backend},
        "cache": {"num_pages": min(pages, arguments.max_pages)},
    })  # fmt: skip
    return Runner(model, config, 2 * context)


def startup_row(model: Any, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Captures of one mode, all sizes, one set of host values after the other."""
    runner = make_runner(model, mode, arguments, arguments.contexts[0])
    start = time.perf_counter()
    plan = runner.warmup()
    total = time.perf_counter() - start
    steps = runner.steps
    keys = list(steps._steps.keys.values()) if steps._steps is not None else []
    row: dict[str, Any] = {
        "what": "start-up", "mode": mode, "sizes": len({r.size for r in plan.rows}), "captured": sum(len(k.captured) for k in keys),
        "warmup_s": total, "prepare_and_capture_s": plan.capture_seconds, "graph_only_s": plan.graph_seconds,
        "measure_s": plan.measure_seconds, "graph_mib": plan.graph_bytes / 2**20, "remarks": plan.remarks,
    }  # fmt: skip
    key = next(k for k in keys if k.text == "max_query_len=1")
    for batch in sorted({n for n in (1, 8, 64, arguments.seqs) if n <= arguments.seqs}):
        inputs = runner.batch(batch, 0)
        decision = steps.explain(**inputs)
        if decision.mode != mode:
            continue
        captured = key.captured[decision.mode, decision.size]
        call, replay = host_us(lambda inputs=inputs: steps(**inputs)), host_us(captured.step.replay)
        eager_calls = [segment.runner() for segment in captured.step.segments if isinstance(segment, EagerCall)]
        pieces = len(captured.step.graphs)
        splits = host_us(lambda calls=eager_calls: [run() for run in calls]) if eager_calls else 0.0
        row[f"batch {batch}"] = {
            "call_us": call, "replay_us": replay, "adds_us": call - replay, "pieces": pieces, "splitting_ops_us": splits,
            "per_piece_us": (replay - splits) / pieces,
        }  # fmt: skip
    steps.reset()
    return row


def regret_rows(model: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for context in arguments.contexts:
        runner = make_runner(model, "auto", arguments, context)
        runner.warmup()
        sizes = range(1, arguments.max_tokens + 1, arguments.step)
        for key, found in runner.steps.regret(sizes).items():
            worst = max(found, key=lambda row: row["regret"])
            rows.append({
                "what": "regret", "context": context, "key": key, "sizes": len(found), "worst": worst,
                "share_within_2_percent": sum(row["regret"] <= 0.02 for row in found) / len(found),
                "picks": {f"{mode}": sum(row["pick"][0] == mode for row in found) for mode in ("full", "piecewise", "eager")},
                "table": [[row["tokens"], *row["pick"], round(row["pick_ms"], 4), *row["best"], round(row["best_ms"], 4)] for row in found],
            })  # fmt: skip
        runner.steps.reset()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--max-pages", type=int, default=1 << 17)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 128, 8192])
    parser.add_argument("--step", type=int, default=1, help="stride over the step sizes of the regret table")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.max_tokens, arguments.graphs, arguments.seqs, arguments.contexts, arguments.step = 8, 3, 4, [32], 3
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    model = random_model(TINY if arguments.small else LLAMA_1B, 0, dtype, device)
    rows = [startup_row(model, mode, arguments) for mode in ("full", "piecewise")] + regret_rows(model, arguments)
    for row in rows:
        print({name: value for name, value in row.items() if name != "table"}, flush=True)
    if arguments.out:
        write_results(arguments.out, "python -m bench.graph_runtime", rows)


if __name__ == "__main__":
    main()
