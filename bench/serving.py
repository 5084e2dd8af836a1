"""The conversation trace through the real engine with policy = "cost" and "static", and the simulator's word beside each.

    python -m bench.serving --work serving --out bench/results/serving_8b_h200.json       # both policies at 1x and 2x, 90 s each
    python -m bench.serving --work serving --policies cost                                # one of them, in a call of its own
    python -m bench.serving --work serving --gather --out …                               # only the table, from what lies in --work
    python -m bench.serving --config configs/tiny.toml --scale 0.02 --seconds 5 --work x  # on any machine; its figures mean nothing

Each policy is a process of its own, ``python -m runtime bench``, so that the whole memory of a GPU is its; with two GPUs both run at
the same time, with one they take turns. Each times the steps of its own graphs first (``costs_POLICY.json``, what `simulate --costs` and
``bench/simulate_policies.py --costs`` read). Everything is written after each rate.

The start captures, proves and times some 150 steps of 32 layers, which takes a minute or two; then each rate takes --seconds and a little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import ROOT, machine, write_results

# The plain scheme captures sizes in steps of 8 to 512, full for decode and piecewise beside prompts.
PLAIN = {"scheduler.policy": "static", "graph.capture_sizes": "auto", "graph.full_sizes": "auto", "graph.max_tokens": "512"}
POLICIES: dict[str, dict[str, str]] = {"cost": {}, "static": PLAIN}
AGREE = 0.10  # between simulator and engine, throughput and median time between tokens


def command(policy: str, arguments: argparse.Namespace) -> list[str]:
    """What measures one policy."""
    rates = [f"{rate:g}" for rate in arguments.rates]
    words = ["bench", "--config", arguments.config, "--trace", arguments.trace, "--seconds", f"{arguments.seconds:g}", "--rate", *rates]
    words += ["--scale", f"{arguments.scale:g}", "--budget-s", f"{arguments.budget_s:g}"]
    words += ["--save-costs", f"{arguments.work}/costs_{policy}.json", "--json", f"{arguments.work}/serving_{policy}.json"]
    return [sys.executable, "-m", "runtime", *words, *(word for key, value in POLICIES[policy].items() for word in (f"--{key}", value))]


def measure(arguments: argparse.Namespace) -> list[str]:
    """Run the policies; returns those that failed."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "machine.json").write_text(json.dumps(machine()) + "\n")
    gpus = max(1, torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    failed = []
    for start in range(0, len(arguments.policies), gpus):
        running = []
        for policy, name in zip(arguments.policies[start : start + gpus], names, strict=False):
            print(f"{policy} on GPU {name}: {' '.join(command(policy, arguments)[1:])}", flush=True)
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # what was said stays, should the process be ended
            environment |= {"CUDA_VISIBLE_DEVICES": name} if torch.cuda.is_available() else {}
            with (arguments.work / f"log_{policy}.txt").open("w") as log:
                process = subprocess.Popen(command(policy, arguments), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            running.append((policy, process))
        for policy, process in running:
            code = process.wait()
            text = (arguments.work / f"log_{policy}.txt").read_text()
            report = text.find(Path(arguments.trace).name + " at ")  # the plan's tables stay in the file
            print(text[report:] if report >= 0 and not code else "\n".join(text.splitlines()[-25:]), flush=True)
            if code:
                failed.append(f"{policy} ended with {code}: {arguments.work}/log_{policy}.txt")
    return failed


def rows(work: Path) -> list[dict[str, Any]]:
    """A row for each policy and rate, engine and simulator."""
    found = []
    for policy in POLICIES:
        path = work / f"serving_{policy}.json"
        for run in json.loads(path.read_text())["runs"] if path.exists() else []:
            for by, report in (("engine", run["report"]), ("simulator", run["simulated"])):
                row = {"rate": f"{run['rate']:g}x", "policy": policy, "by": by, **_figures(report)}
                if by == "engine":
                    idle = report.get("idle_between_steps")
                    row["device idle"] = None if idle is None else f"{idle:.2%}"
                    row["decision µs p50"] = f"{run['host']['decide_us']['p50']:.0f}"
                found.append(row)
    return sorted(found, key=lambda row: (float(row["rate"][:-1]), list(POLICIES).index(row["policy"])))


def _figures(report: dict[str, Any]) -> dict[str, str]:
    return {
        "goodput": f"{report['goodput']:.1%}",
        "tokens/s": f"{report['generated_tokens_per_s']:.0f}",
        "TTFT p50 ms": f"{report['ttft_ms']['p50']:.1f}",
        "TTFT p99 ms": f"{report['ttft_ms']['p99']:.1f}",
        "ITL p50 ms": f"{report['itl_ms']['p50']:.2f}",
        "ITL p99 ms": f"{report['itl_ms']['p99']:.1f}",
        "padding": f"{report['padding']:.2%}",
        "eager tokens": f"{report['tokens_by_mode']['eager']:.2%}",
    }


def agreement(work: Path) -> Iterable[str]:
    """How far the simulator is from the engine, and the policies from each other, against the bars."""
    runs = {}
    for policy in POLICIES:
        path = work / f"serving_{policy}.json"
        data = json.loads(path.read_text()) if path.exists() else {"runs": [], "check": []}
        for check in data["check"]:
            beside = f"{check['decodes']} decodes + {check['chunk']} prompt tokens at {check['context']}"
            yield f"{policy} step: {beside}: {check['ms']:.3f} ms, the table says {check['table_ms'] / check['ms']:.3f} of it"
        for run in data["runs"]:
            runs[policy, run["rate"]] = run["report"]
            real, said = run["report"], run["simulated"]
            pairs = {
                "throughput": (real["generated_tokens_per_s"], said["generated_tokens_per_s"]),
                "median ITL": (real["itl_ms"]["p50"], said["itl_ms"]["p50"]),
                "median TTFT": (real["ttft_ms"]["p50"], said["ttft_ms"]["p50"]),
            }
            for name, (measured, predicted) in pairs.items():
                verdict = "" if name == "median TTFT" else ": agrees" if abs(predicted / measured - 1) <= AGREE else ": MISSED"
                yield f"{policy} at {run['rate']:g}x, {name}: simulator / engine {predicted / measured:.3f}{verdict}"
            if (idle := real.get("idle_between_steps")) is not None:
                yield f"{policy} at {run['rate']:g}x, device idle between steps {idle:.2%}{': MISSED (2%)' if idle > 0.02 else ''}"
    for rate in sorted({rate for _, rate in runs}):
        if {("cost", rate), ("static", rate)} <= set(runs):
            cost, static = runs["cost", rate], runs["static", rate]
            itl, ttft = cost["itl_ms"]["p99"] / static["itl_ms"]["p99"], cost["ttft_ms"]["p50"] / static["ttft_ms"]["p50"]
            goodput = f"{cost['goodput']:.1%} / {static['goodput']:.1%}"
            yield f"cost / static at {rate:g}x: goodput {goodput}, ITL p99 {itl:.2f}, TTFT p50 {ttft:.2f}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for what each policy's process writes")
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of the trace, for each rate")
    parser.add_argument("--scale", type=float, default=1.0, help="prompts and answers times this")
    parser.add_argument("--budget-s", type=float, default=40.0, help="seconds for timing steps")
    parser.add_argument("--config", default="configs/llama-8b.toml")
    parser.add_argument("--trace", default="bench/traces/azure_llm_2023_conv.csv")
    parser.add_argument("--gather", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, help="the results file")
    arguments = parser.parse_args(given)
    arguments.work = arguments.work.resolve()
    failed = [] if arguments.gather else measure(arguments)
    for line in agreement(arguments.work):
        print(line)
    if arguments.out:
        facts = arguments.work / "machine.json"
        extra = {"machine": json.loads(facts.read_text())} if facts.exists() else {}
        write_results(arguments.out, "python -m bench.serving", rows(arguments.work), unit="Units stand in the header", **extra)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
