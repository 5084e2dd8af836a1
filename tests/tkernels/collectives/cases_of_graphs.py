"""Cases that need CUDA graphs or streams."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

import tkernels.collectives as C
from tests.tkernels.collectives.rank import (
    Rank,
    captured,
    expected_sum,
    fresh,
    gpu_case,
    raising,
    sync,
)


@gpu_case
def b115_replays_see_the_current_data(at: Rank) -> None:
    """Graphs of several sizes, first captured without a warm-up, replayed in any order with eager calls between, re-captured."""
    held = []
    weight = torch.ones(1024, device=at.device, dtype=torch.bfloat16)
    for n in (1024, 24 * 1024, 1024 * 1024):
        x = torch.zeros(n // 1024, 1024, device=at.device, dtype=torch.bfloat16)
        held.append((x, *captured(lambda x=x: (C.all_reduce(x, at.group), *C.all_reduce_add_rms_norm(x, x, weight, 1e-6, at.group)))))
    common = random.Random(15)
    late = random.Random(at.rank)
    for step in range(600):
        x, graph, outs = held[common.randrange(3)]
        xs = [torch.full_like(x, (step * 7 + rank * 3) % 61 - 30) for rank in range(at.world)]
        x.copy_(xs[at.rank])
        for out in outs:
            out.fill_(float("nan"))
        if late.random() < 0.05:
            time.sleep(late.random() * 0.003)
        graph.replay()
        total = sum(xs[1:], xs[0])
        assert torch.equal(outs[0], total), step
        assert torch.equal(outs[2], total + xs[at.rank]), step
        assert not outs[1].isnan().any(), step
        if step % 5 == 0:
            assert torch.equal(C.all_reduce(x, at.group), total), step
        if step % 100 == 50:
            held[0] = (x, *captured(lambda x=x: (C.all_reduce(x, at.group), *C.all_reduce_add_rms_norm(x, x, weight, 1e-6, at.group))))
    C.check(at.group)


@gpu_case
def b126_soak_of_a_hundred_thousand_replays(at: Rank) -> None:
    """A producer right before each call, sums checked on the device every time."""
    x = torch.zeros(64 * 1024, device=at.device, dtype=torch.bfloat16)
    counter = torch.zeros((), device=at.device)
    wrong = torch.zeros((), device=at.device, dtype=torch.int64)
    lane = torch.arange(x.numel(), device=at.device) % 13

    def run() -> None:
        for n in (4096, 1024, 65536, 8192):
            counter.add_(1)
            x.copy_((counter + lane) % 17 + at.rank)
            out = C.all_reduce(x[:n], at.group)
            want = ((counter + lane[:n]) % 17) * at.world + at.world * (at.world - 1) // 2
            wrong.add_((out != want).sum())

    graph, _ = captured(run)
    for _ in range(25_000):
        graph.replay()
    sync()
    assert int(wrong) == 0, int(wrong)
    C.check(at.group)


@gpu_case
def b120_ranks_with_other_allocator_states_capture_the_same(at: Rank) -> None:
    held = [torch.empty(1 << 20 << at.rank, device=at.device) for _ in range(1 + 3 * at.rank)]
    del held[::2]
    x = torch.full((4096,), at.rank + 1.0, device=at.device)
    graph, out = captured(lambda: C.all_reduce(x, at.group))
    for _ in range(3):
        graph.replay()
        assert (out == at.world * (at.world + 1) / 2).all()


@gpu_case
def two_streams_take_turns(at: Rank) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = at.inputs(50_000, torch.bfloat16, 16)
    x, want = xs[at.rank].to(at.device), expected_sum(xs).to(at.device)
    sync()
    outs = []
    for step in range(200):
        with torch.cuda.stream(streams[step % 2]):
            outs.append(C.all_reduce(x, at.group))
    sync()
    assert all(torch.equal(out, want) for out in outs)
    C.check(at.group)


@gpu_case
def two_graphs_at_once_are_right_or_reported(at: Rank) -> None:
    name, _ = fresh(at, 2.0)
    xs = at.inputs(2000, torch.bfloat16, 17)
    x, want = xs[at.rank].to(at.device), expected_sum(xs).to(at.device)
    C.all_reduce(x, name)
    sync()
    graphs = [captured(lambda: [C.all_reduce(x, name) for _ in range(10)]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    sync()
    try:
        C.check(name)
    except C.CollectiveError:
        return
    assert all(torch.equal(out, want) for _, outs in graphs for out in outs)


@gpu_case
def set_up_within_a_capture_is_refused(at: Rank) -> None:
    process_group = dist.new_group(list(range(at.world)))
    graph = torch.cuda.CUDAGraph()
    with raising("within a CUDA graph capture"), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(1, device=at.device)
        C.init_group(process_group)
    sync()
