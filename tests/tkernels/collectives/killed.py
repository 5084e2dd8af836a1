"""One rank is killed between two calls; the others must say who is missing, within the time-out."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tkernels.collectives as C
from tkernels.collectives.group import find


def main() -> int:
    rank, gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo")
    group = C.init_group(max_bytes=1 << 12, timeout_s=60.0)  # also the limit of the set-up, which a loaded machine may stretch
    find(group).timeout_s = 3.0
    x = torch.ones(100, device="cuda" if gpu else "cpu")
    assert C.all_reduce(x, group)[99] == dist.get_world_size()
    if gpu:
        torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        out = C.all_reduce(x, group)
        if gpu:
            torch.cuda.synchronize()
        C.check(group)
        print(f"no error, got {out}")
        return 1
    except C.CollectiveError as error:
        print(f"after {time.monotonic() - started:.2f} s: {error}", flush=True)
        return int(time.monotonic() - started > 15)


if __name__ == "__main__":
    os._exit(main())
