"""Collectives in CUDA graphs: ours with its copy-in, against NCCL and torch's symmetric-memory all-reduces without theirs.

    torchrun --nproc-per-node 4 -m bench.collectives --out bench/results/collectives_4x_h200.json

Correctness before timing: every size is compared with the sum in rank order first. A graph holds several calls over rotated inputs;
all ranks replay together after a barrier and a wait on the device, in which the hosts hand the graphs over; a figure is the median over
repeats of the slowest rank's time, and the variants take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import tkernels.collectives as C
from bench.harness import write_results
from tkernels import _repeats
from tkernels.collectives import library
from tkernels.collectives.group import find

KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    2 * KIB,
    8 * KIB,
    32 * KIB,
    128 * KIB,
    192 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
    4 * MIB,
    8 * MIB,
    16 * MIB,
    32 * MIB,
    64 * MIB,
    256 * MIB,
)
NORMS = ((1, 576), (64, 576), (455, 576), (1, 4096), (8, 4096), (64, 4096), (1, 8192), (32, 8192), (1, 16384), (4, 16384), (16, 16384))

_HEAD_START = 1_000_000  # clocks, half a millisecond: the graph is on the device before it begins, on every rank

Run = Callable[[], Any]


class Timer:
    """Replays graphs on all ranks together."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.word = torch.zeros(1, device="cuda")

    def graph(self, calls: list[Run]) -> tuple[torch.cuda.CUDAGraph, int, Any]:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [call() for call in calls]
        return graph, len(calls), outs

    def medians(self, graphs: dict[str, tuple[torch.cuda.CUDAGraph, int, Any]]) -> dict[str, float]:
        """Microseconds of a call by variant."""
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for repeat in range(self.repeats + 2):
            for name, (graph, count, _) in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                dist.all_reduce(self.word)  # all ranks are here
                torch.cuda._sleep(_HEAD_START)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if repeat >= 2:
                    samples[name].append(begin.elapsed_time(end) * 1e3 / count)
        names = list(samples)
        own = torch.tensor([samples[name] for name in names], device="cuda")
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return {name: statistics.median(row) for name, row in zip(names, own.tolist(), strict=True)}


def symmetric(nbytes: int) -> torch.Tensor:
    buffer = symmetric_memory.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name)
    return buffer.normal_()


def check_sum(x: torch.Tensor, group: str) -> None:
    parts = library._gathered(x, find(group), "check")
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    if not torch.equal(C.all_reduce(x, group), want.to(x.dtype)):
        raise SystemExit(f"{x.numel() * 2} bytes: the sum is wrong; not timing it")


def time_all_reduce(nbytes: int, group: str, timer: Timer, with_fences: bool) -> dict[str, Any]:
    calls = 200 if nbytes <= MIB else 60 if nbytes <= 4 * MIB else 20 if nbytes <= 16 * MIB else 5  # a start together costs once
    inputs = [torch.randn(nbytes // 2, device="cuda").bfloat16() for _ in range(min(calls, max(2, 200 * MIB // nbytes), 8))]
    check_sum(inputs[0], group)
    rotate = [inputs[i % len(inputs)] for i in range(calls)]
    variants: dict[str, list[Run]] = {"ours": [lambda x=x: C.all_reduce(x, group) for x in rotate]}
    in_place = [x.clone() for x in inputs]
    variants["NCCL"] = [lambda i=i: dist.all_reduce(in_place[i % len(in_place)]) for i in range(calls)]
    if nbytes <= 64 * MIB:
        buffers = [symmetric(nbytes) for _ in range(min(2, len(inputs)))]
        name = dist.group.WORLD.group_name
        ops = torch.ops.symm_mem
        if nbytes <= 16 * MIB:
            variants["torch one-shot"] = [lambda i=i: ops.one_shot_all_reduce(buffers[i % len(buffers)], "sum", name) for i in range(calls)]
        variants["torch two-shot"] = [lambda i=i: ops.two_shot_all_reduce_(buffers[i % len(buffers)], "sum", name) for i in range(calls)]
    if nbytes >= 16 * MIB:
        variants["copy, then NCCL"] = [lambda x=x: library.all_reduce(x, find(group)) for x in rotate]
    graphs = {name: timer.graph(calls) for name, calls in variants.items()}
    if with_fences:
        find(group).fences = True
        graphs["ours with fences"] = timer.graph(variants["ours"])
        find(group).fences = False
    times = timer.medians(graphs)
    return {"bytes": nbytes, **times}


def time_norm(tokens: int, hidden: int, group: str, timer: Timer) -> dict[str, Any]:
    xs = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(4)]
    residuals = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(4)]
    weight, scale = torch.rand(hidden, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    _, total = C.all_reduce_add_rms_norm(xs[0], residuals[0], weight, 1e-6, group)
    if not torch.equal(total, C.all_reduce(xs[0], group) + residuals[0]):
        raise SystemExit(f"{tokens} × {hidden}: the fused sum is wrong; not timing it")
    pairs = [(xs[i % 4], residuals[i % 4]) for i in range(200)]
    times = timer.medians(
        {
            "plain": timer.graph([lambda x=x: C.all_reduce(x, group) for x, _ in pairs]),
            "fused": timer.graph([lambda x=x, r=r: C.all_reduce_add_rms_norm(x, r, weight, 1e-6, group) for x, r in pairs]),
            "fused fp8": timer.graph(
                [lambda x=x, r=r: C.all_reduce_add_rms_norm(x, r, weight, 1e-6, group, scale=scale) for x, r in pairs]
            ),
        }
    )
    return {"tokens": tokens, "hidden": hidden, "bytes": tokens * hidden * 2, **times, "over": times["fused"] - times["plain"]}


def time_gather(rows: int, columns: int, group: str, timer: Timer) -> dict[str, Any]:
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    out = torch.empty(dist.get_world_size() * rows, columns, device="cuda", dtype=torch.bfloat16)
    times = timer.medians(
        {
            "ours": timer.graph([lambda: C.all_gather(x, group, -1) for _ in range(20)]),
            "NCCL (first dimension)": timer.graph([lambda: dist.all_gather_into_tensor(out, x) for _ in range(20)]),
        }
    )
    return {"rows": rows, "columns": columns, "bytes": x.numel() * 2, **times}


def host_times(group: str) -> list[dict[str, Any]]:
    """Host time of an eager call, without waiting for the device; of calls that look like an earlier one, and of one that is new."""
    x, residual, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((1, 4096), (1, 4096), (4096,)))
    runs: dict[str, Run] = {
        "all_reduce": lambda: C.all_reduce(x, group),
        "all_reduce_add_rms_norm": lambda: C.all_reduce_add_rms_norm(x, residual, weight, 1e-6, group),
        "all_gather": lambda: C.all_gather(x, group, -1),
        "reduce_scatter": lambda: C.reduce_scatter(x, group, -1),
    }

    def median(run: Run, calls: int) -> float:
        samples = []
        for _ in range(7):
            torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            samples.append((time.perf_counter() - started) * 1e6 / calls)
        torch.cuda.synchronize()
        return statistics.median(samples)

    times = {name: median(run, 50) for name, run in runs.items()}
    before, _repeats.ENABLED = _repeats.ENABLED, False
    times["all_reduce, a new look"] = median(runs["all_reduce"], 50)
    _repeats.ENABLED = before
    times["NCCL all_reduce"] = median(lambda: dist.all_reduce(x), 50)
    return [{"call": name, "host µs": us} for name, us in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--largest", type=int, default=256, help="MiB")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = C.init_group()
    timer = Timer(options.repeats)
    started = time.monotonic()

    def show(row: dict[str, Any]) -> dict[str, Any]:
        if rank == 0:
            print(
                " ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                f"[{time.monotonic() - started:.0f} s]",
                flush=True,
            )
        return row

    reduces, norms, gathers, hosts = [], [], [], []
    extra: dict[str, Any] = {"world": dist.get_world_size()}

    def save() -> None:
        if rank == 0 and options.out:
            rows = {"all_reduce": reduces, "all_reduce_add_rms_norm": norms, "all_gather": gathers, "eager calls": hosts}
            write_results(options.out, "torchrun -m bench.collectives", rows, **extra)

    for nbytes in SIZES:
        if nbytes <= options.largest * MIB:
            reduces.append(show(time_all_reduce(nbytes, group, timer, with_fences=nbytes in (8 * KIB, 128 * KIB, MIB, 16 * MIB))))
    save()
    for tokens, hidden in NORMS:
        norms.append(show(time_norm(tokens, hidden, group, timer)))
    for rows, columns in ((1, 32064), (8, 32064)):
        gathers.append(show(time_gather(rows, columns, group, timer)))
    hosts += [show(row) for row in host_times(group)]
    C.check()
    save()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold calls of the process group, whose destruction would wait for them


if __name__ == "__main__":
    main()
