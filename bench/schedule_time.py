"""CPU time of one scheduling decision with many running requests, with and without prompts that wait. No device.

    python bench/schedule_time.py [--running 256] [--json FILE]

A decision is ``Scheduler.schedule``; taking the step back (``complete``) is listed beside it. Requests decode at a context of 1000
tokens on pages of 16, so every step some of them need a page. "waiting" keeps 50 prompts of the conversation trace's mean length in
the queue and two running ones in the middle of theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.config import RuntimeConfig
from runtime.request import Request, SamplingParams
from runtime.roofline import GPUS, SHAPES, roofline
from runtime.scheduler import Scheduler, make_scheduler

SIZES = [*range(1, 65), *range(72, 257, 8), *range(288, 2049, 32)]


def loaded(policy: str, running: int, pages: int = 400_000) -> Scheduler:
    """A scheduler with so many requests in the middle of their answers."""
    limits = {"max_num_seqs": running + 8, "max_batch_tokens": 2048, "policy": policy, "itl_ms": 50, "ttft_ms": 500}
    config = RuntimeConfig.load({"scheduler": limits, "graph": {"max_tokens": 2048}})
    table = roofline(GPUS["h200"], SHAPES["llama-8b"], SIZES, max_num_seqs=running + 8, max_batch_tokens=2048)
    scheduler = make_scheduler(config, table, num_pages=pages, max_context=16384)
    for number in range(running):
        start = (number + 1) << 32
        scheduler.add(Request(number, tuple(range(start, start + 1000 + number % 16)), SamplingParams(max_tokens=8000)))
    while scheduler.waiting or scheduler._prefilling:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step, [0] * len(step.rows))
    return scheduler


def measure(policy: str, running: int, waiting: bool, steps: int = 200) -> dict[str, Any]:
    """Percentiles in microseconds over so many steps, one step in flight while the next is decided. p10 is that of a quiet machine."""
    scheduler = loaded(policy, running)
    number = running
    decisions, returns = [], []
    previous = None
    for _ in range(steps):
        while waiting and len(scheduler.waiting) < 50:
            start = (number + 1) << 32
            scheduler.add(Request(number, tuple(range(start, start + 1155)), SamplingParams(max_tokens=8000)))
            number += 1
        begun = time.thread_time()
        step = scheduler.schedule()
        decided = time.thread_time()
        decisions.append(1e6 * (decided - begun))
        if previous is not None:
            begun = time.thread_time()
            scheduler.complete(previous, [0] * len(previous.rows))
            returns.append(1e6 * (time.thread_time() - begun))
        previous = step
        for request in [each for each in scheduler.running if each.number >= running and each.num_generated > 1]:
            scheduler.finish(request, "stop")  # room for the next prompt
    cuts = statistics.quantiles(decisions, n=10)
    return {
        "policy": policy, "running": running, "waiting": waiting,
        "decide_us": {"p10": cuts[0], "p50": statistics.median(decisions), "p90": cuts[8]},
        "complete_us": {"p50": statistics.median(returns)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    rows = [measure(policy, arguments.running, waiting) for policy in ("static", "cost") for waiting in (False, True)]
    for row in rows:
        queue = "prompts waiting" if row["waiting"] else "decode only"
        cuts = "  ".join(f"{name} {value:6.1f}" for name, value in row["decide_us"].items())
        print(f"{row['policy']:<7} {queue:<16} decide {cuts}  complete p50 {row['complete_us']['p50']:6.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
