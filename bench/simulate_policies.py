"""policy = "cost" against policy = "static" in the simulator, on the conversation trace. No device: the costs are a roofline, or a file.

    python bench/simulate_policies.py [--requests N] [--rates 1 2 4] [--costs FILE [--static-costs FILE]] [--json FILE]

Besides the rates given, the highest rate (in steps of 1/8) at which static keeps a goodput of 90% is searched and compared. Static
captures sizes in steps of 8 to 512, full graphs for decode only; cost captures ``COST_SIZES`` and has the targets 500 and 50 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.config import RuntimeConfig
from runtime.simulate import Arrival, make_scheduler, read_trace, simulate
from runtime.simulate_command import costs_of

TRACE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"
COST_SIZES = [*range(1, 65), *range(72, 129, 8), *range(144, 2049, 16)]
CONFIGS: dict[str, dict[str, Any]] = {
    "static": {"scheduler": {"policy": "static"}},
    "cost": {"graph": {"capture_sizes": COST_SIZES, "max_tokens": 2048}, "scheduler": {"policy": "cost", "ttft_ms": 500, "itl_ms": 50}},
}


def run(policy: str, arrivals: list[Arrival], rate: float, costs: str | None = None) -> dict[str, Any]:
    """One policy at one rate: the report, and the CPU time a step."""
    config = RuntimeConfig.load(CONFIGS[policy])
    table, pages = costs_of(config, costs, "h200", "llama-8b")
    scheduler = make_scheduler(config, table, num_pages=pages, max_context=16384)
    started = time.process_time()
    report = simulate(arrivals, scheduler, table, rate=rate, depth=2 if config.scheduler.overlap else 1).report()
    seconds = time.process_time() - started
    del report["step_sizes"]
    row = {
        "policy": policy,
        "rate": rate,
        "costs": table.source,
        "pages": pages,
        **report,
        "cpu_us_a_step": 1e6 * seconds / report["steps"],
    }
    print(
        f"{rate:>6}x {policy:<7} goodput {row['goodput']:6.1%}  TTFT p50 {row['ttft_ms']['p50']:6.1f}  ITL p99 {row['itl_ms']['p99']:5.1f}"
        f"  padding {row['padding']:6.2%}  eager {row['tokens_by_mode']['eager']:6.2%}  running {row['mean_running']:5.1f}"
        f"  {row['steps']} steps at {row['cpu_us_a_step']:.0f} us CPU",
        flush=True,
    )
    return row


def highest_rate(arrivals: list[Arrival], low: float, high: float, costs: str | None) -> tuple[float, list[dict[str, Any]]]:
    """The highest rate at which static keeps 90%, by bisection in steps of 1/8, and the runs made on the way."""
    tried = []
    while high - low > 1 / 8:
        middle = round((low + high) / 2 * 8) / 8
        tried.append(run("static", arrivals, middle, costs))
        low, high = (middle, high) if tried[-1]["goodput"] >= 0.9 else (low, middle)
    return low, tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=0, help="only the first N; 0: all")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--costs", help="a cost table measured by `python -m runtime plan --json`; default: a roofline")
    parser.add_argument("--static-costs", help="measured in an engine with static's graphs, for static; default: --costs for both")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    arrivals = read_trace(TRACE)[: arguments.requests or None]
    static_costs = arguments.static_costs or arguments.costs
    files = {"cost": arguments.costs, "static": static_costs}
    rows = [run(policy, arrivals, rate, files[policy]) for rate in arguments.rates for policy in CONFIGS]
    below = max((row["rate"] for row in rows if row["policy"] == "static" and row["goodput"] >= 0.9), default=0.125)
    above = min((row["rate"] for row in rows if row["policy"] == "static" and row["goodput"] < 0.9), default=16.0)
    limit, tried = highest_rate(arrivals, below, above, static_costs)
    rows += tried
    if limit not in arguments.rates:
        rows.append(run("cost", arrivals, limit, arguments.costs))
    print(f"static keeps 90% up to {limit}x")
    if arguments.json:
        costs = json.loads(Path(arguments.costs).read_text()) if arguments.costs else {}
        machine = costs.get("machine", {"gpu": rows[0]["costs"]})
        command = f"python bench/simulate_policies.py --requests {len(arrivals)}" + (f" --costs {arguments.costs}" if costs else "")
        command += f" --static-costs {arguments.static_costs}" if arguments.static_costs else ""
        data = {
            "machine": {name: f"{value} (costs)" if name == "commit" else value for name, value in machine.items()},
            "command": command,
            "unit": "Simulated",
            "trace": TRACE.name,
            "requests": len(arrivals),
            "configs": CONFIGS,
            "static_limit": limit,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
