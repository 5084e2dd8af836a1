"""One case of ``tkernels.tune``, a variant of a projection at a row class: its fused launch, what that has to beat, and their time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tkernels._linear_kernels import Tile, launch
from tkernels._qkv_kernels import launch as launch_qkv
from tkernels.activation import silu_and_mul
from tkernels.linear import linear, linear_ref
from tkernels.qkv import linear_rope_and_cache_ref
from tkernels.rmsnorm import rms_norm
from tkernels.rope import rope_and_cache

HEAD_DIM = 64  # of a rotation that is measured: other widths take as long
MIN_CALLS, MAX_CALLS, ROTATED_BYTES = 12, 64, 256 << 20  # of a run: as many as have other weights than the L2 cache holds
REPEATS, _WARM_UP, _EPS = 11, 2, 1e-5
_WORKERS = 16

Run = Callable[[], None]
Job = tuple[str, int, int, int, Tile | None]  # variant, rows, n, k, the tile; None: what the tile has to beat


class Case:
    """Tensors, the fused launch and the compositions it has to beat."""

    def __init__(
        self, variant: str, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, rotated_bytes: int = ROTATED_BYTES,
        without_norm: Tile | None = None,
    ) -> None:  # fmt: skip
        """rotated_bytes: of weights that the calls of a run read in turn.

        without_norm: the tile with which the rest is fused where the norm is a kernel of its own.
        """
        self.variant, self.rows, self.n, self.k, self.without_norm = variant, rows, n, k, without_norm
        self.gated, self.rotated_heads = "gated" in variant, "rope" in variant
        copies = min(MAX_CALLS, max(1, -(-rotated_bytes // (n * k * dtype.itemsize))))
        self.weights = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for _ in range(copies)]
        self.calls = max(MIN_CALLS, copies)
        self.x = torch.randn(rows, k, device=device, dtype=dtype)
        self.norm = torch.rand(k, device=device, dtype=dtype) + 0.5 if "norm" in variant else None
        self.residual = torch.randn(rows, n, device=device, dtype=dtype) if variant == "residual" else None
        self.numbers = torch.arange(rows, device=device)  # positions and slots
        self.angles = torch.randn(rows, HEAD_DIM, device=device)
        kv_heads = max(1, n // HEAD_DIM // 6)
        self.heads = n // HEAD_DIM - 2 * kv_heads, kv_heads, kv_heads
        self.caches = self.empty()[1:]

    def empty(self) -> list[torch.Tensor]:
        """The output, or with a rotation q and caches of one slot a row."""
        shapes: list[tuple[int, ...]] = [(self.rows, self.n // 2 if self.gated else self.n)]
        if self.rotated_heads:
            q, k, v = self.heads
            shapes = [(self.rows, q, HEAD_DIM), (self.rows, 1, k, HEAD_DIM), (self.rows, 1, v, HEAD_DIM)]
        return [torch.full(shape, float("nan"), device=self.x.device, dtype=self.x.dtype) for shape in shapes]

    def fused(self, y: list[torch.Tensor], weight: torch.Tensor, tile: Tile) -> None:
        if self.rotated_heads:
            self._rotated(y, weight, self.x, self.norm, tile)
        else:
            launch(self.x, weight, None, self.norm, self.residual, self.gated, _EPS, y[0], tile)

    def _rotated(self, y: list[torch.Tensor], weight: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None, tile: Tile) -> None:
        q, k_cache, v_cache = y
        launch_qkv(x, weight, None, norm, _EPS, self.numbers, self.angles, k_cache, v_cache, self.numbers, False, q, tile)

    def norm_apart(self, y: list[torch.Tensor], weight: torch.Tensor, tile: Tile) -> None:
        """The norm, then what is fused without it in the tile that was the best for it."""
        assert self.norm is not None
        x = rms_norm(self.x, self.norm, _EPS)
        if self.rotated_heads:
            self._rotated(y, weight, x, None, tile)
        else:
            launch(x, weight, None, None, None, self.gated, _EPS, y[0], tile)

    def composed(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Two or three ops; with a rotation ``linear`` as it is, in the tile of its table."""
        if self.rotated_heads:
            y = linear(self.x, weight, norm_weight=self.norm, eps=_EPS).view(self.rows, -1, HEAD_DIM)
            (q, k, v), (k_cache, v_cache) = y.split(self.heads, 1), self.caches
            return [rope_and_cache(q, k, v, self.numbers, self.angles, k_cache, v_cache, self.numbers), k_cache, v_cache]
        return [self._projected(weight)]

    def _projected(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.x if self.norm is None else rms_norm(self.x, self.norm, _EPS)
        if self.residual is not None:
            return torch.addmm(self.residual, x, weight.t())
        y = F.linear(x, weight)
        return silu_and_mul(y) if self.gated else y

    def exact(self) -> list[torch.Tensor]:
        norm, residual = (None if t is None else t.double() for t in (self.norm, self.residual))
        x, weight = self.x.double(), self.weights[0].double()
        if self.rotated_heads:
            k_cache, v_cache = (cache.double() for cache in self.caches)
            q = linear_rope_and_cache_ref(x, weight, None, norm, self.numbers, self.angles, k_cache, v_cache, self.numbers, eps=_EPS)
            return [q, k_cache, v_cache]
        return [linear_ref(x, weight, None, norm, residual, self.gated, _EPS)]

    def run(self, call: Callable[[torch.Tensor], Any]) -> Run:
        """``call`` on each of the weights in turn, as one run that can be repeated: a graph, or on the CPU the calls."""

        def each() -> None:
            for i in range(self.calls):
                call(self.weights[i % len(self.weights)])

        if self.x.device.type != "cuda":
            return each
        # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time, which takes longer than the timing.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call(self.weights[0])
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                each()
            finally:
                graph.capture_end()
        return graph.replay


def error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of all outputs together, relative; NaN where one was not written."""
    distance, size = (
        torch.stack([x.norm() for x in xs]).norm() for xs in ([g.double() - e for g, e in zip(got, exact, strict=True)], exact)
    )
    return float(distance / size)


def time_us(runs: dict[Any, Run], calls: int) -> dict[Any, float]:
    """Microseconds of a call of each run, which makes ``calls`` of them; the runs take turns and the median counts."""
    once = _once_on_device if torch.cuda.is_available() else _once_on_host
    samples: dict[Any, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + _WARM_UP):
        for name, run in runs.items():
            took = once(run)
            if repeat >= _WARM_UP:
                samples[name].append(took / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def _once_on_device(run: Run) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()  # while the device is busy with it the host launches the one that is timed, or its launch would be timed too
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _once_on_host(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e6


def _kernel_of(job: Job) -> tuple[Any, ...]:
    """Jobs of which this is equal need the same kernel: sizes that it takes as they come do not count."""
    variant, rows, n, k, tile = job
    if tile is None:
        return job
    if tile.kind != "matrix":
        return variant, rows, n % 256, k, tile
    return variant, tile.block_m(rows), n % 256, k % 16, tile.even(tile.block_n, k), tile.steps(k), tile


def compile_ahead(jobs: Iterable[Job], dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Put what ``jobs`` launch into Triton's cache, by processes: a thread would wait for the others' Python more than for the compiler.

    Returns how many kernels that were, and how many of them did not run; ``tune`` says why when it comes to them.
    """
    ours = (job for job in jobs if job[4] is not None or "rope" in job[0])  # other compositions have a kernel or two, of any size
    wanted = [(*job[:4], job[4] and vars(job[4])) for job in {_kernel_of(job): job for job in ours}.values()]
    workers = min(_WORKERS, os.cpu_count() or 1, -(-len(wanted) // 4))
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-c", "from tkernels._tune_case import compile_share; compile_share()"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(workers)]
    try:
        for worker, process in enumerate(started):
            assert process.stdin is not None
            json.dump({"jobs": wanted[worker::workers], "dtype": str(dtype).removeprefix("torch."), "device": str(device)}, process.stdin)
            process.stdin.close()
        ran = 0
        for process in started:
            assert process.stdout is not None
            ran += sum(line == "ran\n" for line in process.stdout)
        return len(wanted), len(wanted) - ran
    finally:
        for process in started:
            process.kill()
            process.wait()


def compile_share() -> None:
    """What a worker of ``compile_ahead`` does with its standard input: a line of output for each job that ran."""
    share = json.load(sys.stdin)
    device, dtype = torch.device(share["device"]), getattr(torch, share["dtype"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for variant, rows, n, k, sizes in share["jobs"]:
        with suppress(Exception):  # counted by the line that is missing, and said when it is measured
            if sizes is None:
                case = Case(variant, rows, n, k, dtype, device, 0)
                case.composed(case.weights[0])
            else:
                case = Case(variant, rows, 512 + n % 256, k, dtype, device, 0)
                case.fused(case.empty(), case.weights[0], Tile(**sizes))
            print("ran", flush=True)
