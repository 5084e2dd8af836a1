"""Where the time of one captured decode step goes, by kernel.

    python -m bench.profile_step --batch 1

Replays the full graph of the decode-step benchmark under torch's profiler and adds up device time by kernel name.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch

from bench.decode_step import our_runs
from bench.shapes import LLAMA_1B
from runtime.model import random_model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_step needs a GPU: it adds up device time")
    model = random_model(LLAMA_1B, seed=0, dtype=torch.bfloat16, device="cuda")
    for batch in options.batch:
        run = our_runs(model, batch, options.context, "cuda", "eager", False)["ours full (eager)"]
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(options.steps):
                run()
            torch.cuda.synchronize()
        total, count = Counter[str](), Counter[str]()
        for event in profiler.events():
            total[event.name] += event.device_time / options.steps
            count[event.name] += 1
        print(f"batch {batch}: {sum(total.values()):.1f} us of kernels a step")
        for name, us in total.most_common(16):
            print(f"  {us:8.1f} us {count[name] // options.steps:5} x {us / max(1, count[name] // options.steps):7.2f}  {name[:90]}")


if __name__ == "__main__":
    main()
