"""What every rank runs: under torchrun on GPUs, or started by test_collectives.py on the CPU with interpreted kernels.

    torchrun --nproc-per-node 4 tests/tkernels/collectives/cases.py            # all cases that this machine can run, in one process each

Every rank knows all ranks' inputs by seed, so each computes the expected sum itself, in plain torch. A case that fails on one rank
fails on all; the report (JSON, one file a rank) says where.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tkernels.collectives as C
from tests.tkernels.collectives import cases_of_answers, cases_of_graphs, cases_of_use  # noqa: F401, each registers its own
from tests.tkernels.collectives.rank import CASES, GPU, GPU_ONLY, MAX_BYTES, TWO_ON_CPU, Rank, sync


def runs(name: str, world: int) -> bool:
    return GPU or not (name in GPU_ONLY or (name in TWO_ON_CPU and world > 2))


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    group = C.init_group(max_bytes=MAX_BYTES, timeout_s=60.0)
    at = Rank(rank, world, device, group)
    wanted = sys.argv[2:] or list(CASES)
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        if not runs(name, world):
            continue
        started, spent = time.monotonic(), time.process_time()
        try:
            CASES[name](at)
            sync()
            trouble = ""
        except Exception:
            trouble = traceback.format_exc()
        troubles = at.everywhere(trouble)
        results[name] = {
            "seconds": round(time.monotonic() - started, 3),
            "cpu": round(time.process_time() - spent, 2),
            "troubles": {str(r): t for r, t in enumerate(troubles) if t},
        }
        if rank == 0:
            print(
                f"{'FAIL' if any(troubles) else 'ok  '} {results[name]['seconds']:7.2f} s (CPU {results[name]['cpu']:.1f})  {name}",
                flush=True,
            )
            for number, text in enumerate(troubles):
                if text:
                    print(f"  rank {number}: {text}", flush=True)
    if len(sys.argv) > 1 and sys.argv[1] != "-":
        Path(sys.argv[1].format(rank=rank)).write_text(json.dumps(results))
    dist.barrier()
    return int(any(result["troubles"] for result in results.values()))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
