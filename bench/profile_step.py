"""Where every microsecond of one captured decode step goes, by kernel.

    python -m bench.profile_step --batch 1 8 64 --pdl on --out bench/results/profile_step_h200.json

Replays the full graph of the decode-step benchmark under torch's profiler. With dependent launch kernels overlap, so a kernel's *share*
is what it adds to the step: from the end of all kernels before it, or its own start where that is later, to its own end. Shares and gaps
add up to the span of the step. A kernel of one name stands once for each grid: the projections share theirs. Every capture is
proved bit for bit against the callable not captured; bench/decode_step.py compares the logits of the same captures with torch's.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.decode_step import our_runs
from bench.harness import write_results
from bench.shapes import BY_NAME
from runtime.model import random_model


class Kernel(NamedTuple):
    name: str
    grid: tuple[int, ...]
    start: float  # µs
    end: float


def shares(steps: Iterable[list[Kernel]]) -> list[dict[str, Any]]:
    """A row for each name and grid, largest share first, then the gaps: means over the steps, each the kernels of one replay."""
    total: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    count = gaps = 0
    gap_us = 0.0
    for kernels in steps:
        count += 1
        ordered = sorted(kernels, key=lambda kernel: kernel.start)
        over = ordered[0].start
        for kernel in ordered:
            gaps += kernel.start > over
            gap_us += max(0.0, kernel.start - over)
            launches, own, share = total[kernel.name, kernel.grid]
            added = max(0.0, kernel.end - max(over, kernel.start))
            total[kernel.name, kernel.grid] = [launches + 1, own + kernel.end - kernel.start, share + added]
            over = max(over, kernel.end)
    rows: list[dict[str, Any]] = [
        {"kernel": name, "grid": list(grid), "launches": launches / count, "kernel_us": own / launches, "share_us": share / count}
        for (name, grid), (launches, own, share) in total.items()
    ]
    rows.sort(key=lambda row: -row["share_us"])
    return [*rows, {"kernel": "gaps", "grid": [], "launches": gaps / count, "kernel_us": 0.0, "share_us": gap_us / count}]


def _short(name: str) -> str:
    """Without the types that a template was made for, and the result's, which may be one too."""
    name, found = name.replace("(anonymous namespace)::", ""), 1
    while found:
        name, found = re.subn("<[^<>]*>", "", name)  # the inner ones first
    return name.partition("(")[0].strip().removeprefix("void ").removeprefix("std::enable_if::type ").strip()


def profiled(run: Callable[[], Any], steps: int) -> list[list[Kernel]]:
    """The kernels of each of ``steps`` replays, the device idle between them."""
    found = []
    for _ in range(steps):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        found.append([
            Kernel(_short(event["name"]), tuple(event["args"].get("grid", ())), event["ts"], event["ts"] + event["dur"])
            for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")
        ])  # fmt: skip
        if not found[-1]:
            raise SystemExit("the profiler gave no kernels of a replay; run it again with no other profiler on the GPU")
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--shape", choices=list(BY_NAME), default="llama-1b")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pdl", choices=["off", "on"], default="off", help="programmatic dependent launch between our kernels")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_step needs a GPU: it adds up device time")
    model = random_model(BY_NAME[options.shape], seed=0, dtype=torch.bfloat16, device="cuda")
    rows = []
    for batch in options.batch:
        runs = our_runs(model, batch, options.context, "cuda", "eager", False, options.pdl == "on")
        run = next(run for name, run in runs.items() if "full" in name)
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        found = shares(profiled(run, options.steps))
        print(f"batch {batch}: {sum(row['share_us'] for row in found):.1f} us a step")
        for row in found[:16] if len(found) <= 16 else [*found[:15], found[-1]]:
            print(f"  {row['share_us']:8.1f} us {row['launches']:5.0f} x {row['kernel_us']:7.2f}  {row['kernel'][:70]} {row['grid']}")
        rows += [{"batch": batch, "context": options.context, "pdl": options.pdl, **row} for row in found]
        if options.out:
            write_results(options.out, "python -m bench.profile_step", rows, shape=options.shape)
        del runs, run


if __name__ == "__main__":
    main()
