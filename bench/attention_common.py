"""What the attention benches share: paged batches on the GPU, interleaved timing of CUDA graphs.

Every figure is the median over interleaved rounds of one graph that holds at least ten calls, each on its own part of a KV cache
larger than L2, with permuted pages. Inputs are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

READ_BANDWIDTH = 4.46e12  # bytes/s that pure reads reach on an H200
_by_head = False
_ROTATE = 300 << 20  # bytes that the calls of a graph walk through: five times the L2 of an H200


@dataclass
class Batch:
    """Inputs of paged attention; ``tables`` holds one block table per copy, all into one cache."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: list[torch.Tensor]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_bytes: int

    def arguments(self, copy: int) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.tables[copy % len(self.tables)], self.seq_lens, self.cu_seqlens_q


def lay_out_by_head(on: bool) -> None:
    """Whether batches made from now on keep the keys of a page head by head: [pages, kv_heads, page_size, dim] in memory."""
    global _by_head
    _by_head = on


def make_batch(
    lens: list[int], query_lens: list[int], *, heads: int = 32, kv_heads: int = 8, dim: int = 128, page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None, rotate: int = _ROTATE,
) -> Batch:  # fmt: skip
    cache_dtype = cache_dtype or dtype
    counts = [-(-n // page_size) for n in lens]
    kv_bytes = 2 * sum(lens) * kv_heads * dim * cache_dtype.itemsize
    copies = max(2, min(64, -(-rotate // max(kv_bytes, 1)))) if rotate else 1
    pages = copies * sum(counts) + 1
    shape = (pages, kv_heads, page_size, dim) if _by_head else (pages, page_size, kv_heads, dim)
    caches = [torch.empty(shape, dtype=cache_dtype, device="cuda") for _ in range(2)]
    k_cache, v_cache = (cache.transpose(1, 2) if _by_head else cache for cache in caches)
    for cache in caches:
        for part in cache.split(max(1, (1 << 28) // (page_size * kv_heads * dim))):
            part.copy_(torch.randn(part.shape, device="cuda"))
    order = (torch.randperm(pages - 1, device="cuda") + 1).to(torch.int32).cpu()
    tables, at = [], 0
    for _ in range(copies):
        table = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)
        for s, count in enumerate(counts):
            table[s, :count] = order[at : at + count]
            at += count
        tables.append(table.cuda())
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn((int(starts[-1]), heads, dim), device="cuda").to(dtype)
    return Batch(q, k_cache, v_cache, tables, torch.tensor(lens, dtype=torch.int32).cuda(), starts.cuda(), kv_bytes)


def capture(call: Callable[[int], Any], calls: int, warm: int = 2, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls; call gets its number, from which it picks its inputs. warm: calls ahead, which compile.

    pool: memory that graphs share which are replayed one after another. Not ``torch.cuda.graph``: it empties torch's cache each time.
    """
    for i in range(warm):
        call(i)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        for i in range(calls):
            call(i)
        graph.capture_end()
    return graph


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int = 9) -> dict[str, float]:
    """Median microseconds a call of each graph, the graphs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())
