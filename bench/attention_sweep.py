"""Decode point by point, against the number of sequences and against the length: is there a cliff?

All points share one cache. Each is checked on two sequences and two KV heads, captured once, and timed in a few rounds over all points,
so that clocks drift for all alike and what a point has read leaves L2 before its next turn. Its calls read different, permuted pages.

A cliff is a point above the straight line between its neighbours. Time is a + b · x where either latency or bandwidth rules, and where one
takes over from the other it lies *under* the chord, so the line is the right measure on a linear axis (a power law between powers of two
would see a cliff wherever latency ends). Of lengths there are two such lines: between the measured lengths on either side, which shows
steps inside a cluster 2**p - 1, 2**p, 2**p + 1, and for powers of two between the powers on either side, which shows bumps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.attention_common import Batch, capture, relative_error
from bench.harness import interleaved_us
from tkernels._triton import cdiv, next_power_of_2
from tkernels.attention._inputs import check_inputs
from tkernels.attention.paged import launch
from tkernels.attention.ref import paged_attention_ref

Point = tuple[int, int]  # sequences of one query token, keys of each
Calls = dict[Point, list[tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]]]  # with the arguments of each

LENGTHS = sorted({max(1, 2**power + more) for power in range(18) for more in (-1, 0, 1)} - {2**17 + 1})
TITLE = "The point furthest above the line between its neighbours"
_ROUNDS = 5
_CALLS = (2, 20)  # in a graph
_BYTES = 1 << 30  # that the calls of a graph read, if that needs no more calls


def ratios(times: dict[int, float]) -> dict[int, float]:
    """Time of every x but the first and the last over the straight line between the times beside it."""
    xs = sorted(times)
    line = {x: times[low] + (times[high] - times[low]) * (x - low) / (high - low) for low, x, high in zip(xs, xs[1:], xs[2:], strict=False)}
    return {x: times[x] / value for x, value in line.items()}


def summary(name: str, neighbours: str, times: dict[int, float]) -> dict[str, Any]:
    """The row of the worst cliff."""
    found = ratios(times)
    at = max(found, key=lambda x: found[x])
    row = {"sweep": name, "neighbours": neighbours, "points": len(times), "worst ratio": found[at], "at": at, "µs there": times[at]}
    print(f"{name}, against {neighbours}: worst {found[at]:.3f} of the line, at {at} ({times[at]:.1f} µs)", flush=True)
    return row


def _calls(cache: Batch, points: Iterable[Point]) -> Calls:
    """Of each point: its calls, on pages that follow those of the call before."""
    pages, page_size = cache.tables[0].flatten(), cache.k_cache.shape[1]
    out, token_bytes = torch.empty_like(cache.q), 2 * cache.k_cache[0, 0].nbytes
    at = 0
    calls: Calls = {}
    for seqs, length in points:
        each = cdiv(length, page_size)
        lens = torch.full((seqs,), length, dtype=torch.int32, device=pages.device)
        calls[seqs, length] = []
        for _ in range(min(max(cdiv(_BYTES, seqs * length * token_bytes), _CALLS[0]), _CALLS[1])):
            at = 0 if at + seqs * each > len(pages) else at
            table = pages[at : at + seqs * each].view(seqs, each)
            at += -(-seqs * each // 4) * 4  # tables lie on 16 bytes, or Triton compiles once more
            given = (cache.q[:seqs], cache.k_cache, cache.v_cache, table, lens, cache.cu_seqlens_q[: seqs + 1])
            calls[seqs, length].append((_call(given, out[:seqs]), given))
    return calls


def _call(given: tuple[torch.Tensor, ...], out: torch.Tensor) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        inputs = check_inputs(*given, out.shape[-1] ** -0.5, True, 0, 0.0, None, None, None, 1.0)  # type: ignore[arg-type]
        launch(inputs, out, None, 1)
        return out

    return call


def check(call: Callable[[], torch.Tensor], given: tuple[torch.Tensor, ...]) -> float:
    """The first and the last sequence at the first and the last KV head against the oracle; the rest is written and finite."""
    q, k_cache, v_cache, table, lens, starts = given
    seqs, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    rows, every = [0, seqs - 1][: min(seqs, 2)], max(kv_heads - 1, 1)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.view(seqs, kv_heads, heads // kv_heads, dim)[rows][:, ::every].flatten(1, 2).float()

    expected, _ = paged_attention_ref(
        part(q), k_cache[:, :, ::every], v_cache[:, :, ::every], table[rows], lens[rows], starts[: len(rows) + 1], scale=dim**-0.5
    )
    out = call().fill_(float("nan"))
    call()
    error = relative_error(part(out), expected)
    assert error < 6e-3 and bool(torch.isfinite(out).all()), f"wrong at {seqs} x {int(lens[0])}: relative error {error:.2e}"
    return error


def _warm_up(calls: Calls) -> None:
    """Compile at once what the kernel is for a power of two of sequences; then what it is for others of that size, if anything else."""
    sizes: dict[int, list[Callable[[], torch.Tensor]]] = {}
    for (seqs, _), each in sorted(calls.items(), key=lambda item: item[0]):
        sizes.setdefault(next_power_of_2(seqs), []).append(each[0][0])
    with ThreadPoolExecutor(8) as threads:
        for first_or_last in (0, -1):
            list(threads.map(lambda call: call(), [size[first_or_last] for size in sizes.values()]))
    torch.cuda.synchronize()


def measure(cache: Batch, points: Iterable[Point], rounds: int = _ROUNDS) -> dict[Point, float]:
    """Microseconds a call at each point: the median of ``rounds`` rounds over all of them, after one that does not count.

    cache: ``tables[0]`` names all pages, ``q`` and ``cu_seqlens_q`` have a row for each sequence of the largest point.
    """
    calls = _calls(cache, points)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _warm_up(calls)
    for each in calls.values():
        check(*each[0])
    gc.collect()
    gc.disable()  # it takes longer than a capture, and must not fall into one
    try:
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        runs: dict[str, Callable[[], Any]] = {}
        for point, each in calls.items():
            steps = [call for call, _ in each]
            runs[str(point)] = _capture(steps, pool) if on_gpu else lambda steps=steps: [step() for step in steps]
        times = interleaved_us(runs, repeats=rounds, warmup=1)
    finally:
        gc.enable()
    return {point: times[str(point)] / len(each) for point, each in calls.items()}


def _capture(steps: list[Callable[[], torch.Tensor]], pool: Any) -> Callable[[], None]:
    return capture(lambda i: steps[i](), len(steps), warm=0, pool=pool).replay


def _print(times: dict[Point, float]) -> None:
    for (seqs, length), us in times.items():
        print(f"{seqs:>4} x {length:<6} {us:8.2f}", flush=True)


def by_length(cache: Batch, seqs: int, lengths: Iterable[int] = LENGTHS) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """(length → microseconds, summary rows) of ``seqs`` sequences."""
    measured = measure(cache, [(seqs, n) for n in lengths])
    _print(measured)
    times = {n: us for (_, n), us in measured.items()}
    name = f"length, {seqs} x n"
    powers = {n: us for n, us in times.items() if math.log2(n).is_integer()}
    return times, [
        summary(name, "the measured lengths on either side", times),
        summary(name, "the powers of two on either side (powers only)", powers),
    ]


def by_batch(cache: Batch, length: int, batches: Iterable[int]) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """(sequences → microseconds, summary rows) at one length."""
    measured = measure(cache, [(b, length) for b in batches])
    _print(measured)
    times = {b: us for (b, _), us in measured.items()}
    return times, [summary(f"batch, b x {length}", "b - 1 and b + 1", times)]
