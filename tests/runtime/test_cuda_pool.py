"""``CudaPool`` against a model of what CUDA builds of torch do, for machines without one: the order of calls, and after failures.

The rules are those of ``CUDAGraph.cpp`` and the two caching allocators: a pool whose last graph has been reset refuses captures, a
capture that never ended leaves its pool recording and the generator captured, ``reset`` gives back only what was captured to its end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime import graph as graphs
from runtime.arena import Arena
from runtime.graph import CudaPool
from runtime.inputs import Dim, InputSpec
from runtime.measure import interleaved_ms


class Driver:
    """The state that the fake torch.cuda works on."""

    def __init__(self) -> None:
        self.uses: Counter[tuple[int, int]] = Counter()
        self.known: set[tuple[int, int]] = set()
        self.recording: list[tuple[int, int]] = []
        self.pinned_recording: list[tuple[int, int]] = []
        self.generator_captured = False
        self.invalidated = False
        self.fail: set[str] = set()
        self.handles = 0
        self.alive: list[Any] = []

    def handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles

    def end(self, _: int, handle: tuple[int, int]) -> None:
        if handle not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(handle)

    def release(self, _: int, handle: tuple[int, int]) -> None:
        self.uses[handle] -= 1
        assert self.uses[handle] >= 0, "a hold was given back twice"

    def draw(self) -> None:
        if self.generator_captured:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class FakeGraph:
    driver: Driver

    def __init__(self) -> None:
        self.handle: tuple[int, int] | None = None
        self.ended = self.capturing = False
        self.driver.alive.append(self)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        d = self.driver
        assert capture_error_mode == "thread_local" and not self.capturing
        if pool in d.known and d.uses[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if pool in d.recording or pool in d.pinned_recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        d.known.add(pool)
        d.uses[pool] += 1
        d.recording.append(pool)
        d.pinned_recording.append(pool)
        d.generator_captured = self.capturing = True
        self.handle = pool

    def capture_end(self) -> None:
        d = self.driver
        assert self.handle is not None
        if not self.capturing:
            raise RuntimeError("CUDA error: the operation cannot be performed in the present state")
        self.capturing = False
        if d.invalidated:
            d.invalidated = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        d.recording.remove(self.handle)
        d.pinned_recording.remove(self.handle)
        d.generator_captured = False
        self.ended = True
        if "instantiate" in d.fail:
            raise torch.OutOfMemoryError("CUDA error: out of memory")

    def replay(self) -> None:
        if "replay" in self.driver.fail:
            raise torch.OutOfMemoryError("CUDA error: out of memory")

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        assert self.handle is not None
        return self.handle

    def reset(self) -> None:
        if self.ended:
            assert self.handle is not None
            self.driver.release(0, self.handle)
            self.ended = False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    d = Driver()
    monkeypatch.setattr(FakeGraph, "driver", d, raising=False)
    stream = type("Stream", (), {"synchronize": lambda self: None, "wait_stream": lambda self, other: None})()
    for name, value in {
        "CUDAGraph": FakeGraph, "graph_pool_handle": d.handle, "memory_reserved": lambda *a: 0, "synchronize": lambda *a: None,
        "empty_cache": lambda: None, "current_stream": lambda *a: stream, "current_device": lambda: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", d.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", d.release, raising=False)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: stream)
    monkeypatch.setattr(graphs, "_dead", [])
    return d


def captured(pool: CudaPool, body: Callable[[], None] = lambda: None) -> graphs.CudaGraph:
    """What capture_step does with a graph."""
    graph = pool.graph()
    try:
        graph.capture_begin()
        body()
        graph.capture_end()
    except BaseException:
        graph.abort()
        raise
    return graph


def test_a_pool_can_be_captured_into_after_its_last_graph_was_reset(driver: Driver) -> None:
    """recapture() after a moved weight, or a first graph that did not pass its proof."""
    pool = CudaPool(torch.device("cuda", 0))
    for _ in range(3):
        captured(pool).reset()
    pool.reset()
    assert sum(driver.uses.values()) == 0
    captured(pool)


def test_an_invalidated_capture_leaves_pool_and_generator_usable(driver: Driver) -> None:
    def sync() -> None:
        driver.invalidated = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    pool = CudaPool(torch.device("cuda", 0))
    good = captured(pool)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            captured(pool, sync)
        driver.draw()
    again = captured(pool)
    good.replay(), again.replay()
    assert not driver.recording
    for handle in driver.pinned_recording:  # the allocator still points to these graphs
        assert any(g.handle == handle for g in graphs._dead)
    good.reset(), again.reset()
    pool.reset()
    assert sum(driver.uses.values()) == 0


@pytest.mark.parametrize("step", ["instantiate", "replay"])
def test_a_capture_that_dies_after_its_end_gives_its_hold_back_once(driver: Driver, step: str) -> None:
    pool = CudaPool(torch.device("cuda", 0))
    good = captured(pool)
    driver.fail = {step}
    with pytest.raises(torch.OutOfMemoryError):
        captured(pool)
    driver.fail = set()
    again = captured(pool)
    good.reset(), again.reset()
    pool.reset()
    assert sum(driver.uses.values()) == 0


def test_a_python_error_inside_a_capture_keeps_the_pool(driver: Driver) -> None:
    pool = CudaPool(torch.device("cuda", 0))
    handle = pool.handle
    with pytest.raises(ZeroDivisionError):
        captured(pool, lambda: print(1 / 0))
    captured(pool)
    assert pool.handle == handle and not driver.recording


def test_ranges_of_memory_are_forgotten_with_the_pool(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of a pool that was given back belong to whoever the allocator gives them next: they are not the pool's."""
    pool, tensor = CudaPool(torch.device("cuda", 0)), torch.zeros(4)
    segment = {"segment_pool_id": pool.handle, "address": tensor.data_ptr(), "total_size": tensor.nbytes}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    assert pool.owns(tensor)
    pool.reset()
    assert not pool.owns(tensor)


def test_a_device_is_not_waited_for_while_another_thread_captures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses it, and the capture is lost as well."""
    pool, open_, done = CudaPool(torch.device("cuda", 0)), threading.Event(), threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.set())

    def wait_for_the_device() -> None:
        open_.wait()
        pool.synchronize()

    thread = threading.Thread(target=wait_for_the_device)
    thread.start()
    with graphs.frozen_gc(collect=False):  # a session
        open_.set()
        assert not done.wait(0.1)
    assert done.wait(10)
    thread.join()


class StreamOf:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """Refuses to guess the stream: without one, torch takes the current device's, which need not be the tensors' device."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        assert isinstance(stream, StreamOf) and stream.device == torch.device("cuda", 1)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 1.0


def test_events_are_recorded_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", StreamOf)
    device = torch.device("cuda", 1)
    assert interleaved_ms({"": lambda: None}, device) == {"": 1.0}
    arena = Arena([InputSpec("x", (Dim("tokens"),), torch.float32)], {"tokens": 4}, torch.device("cpu"))
    arena.device, arena._copied = device, [FakeEvent(), FakeEvent()]
    sizes = {"tokens": 2}
    arena.host(sizes, sizes)["x"][...] = 3
    assert arena.upload(sizes, sizes)["x"].tolist() == [3, 3]


def test_a_step_on_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int]] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.cuda_stream, other.cuda_stream))

    current = [Stream(1)]
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0].cuda_stream, raising=False)
    monkeypatch.setattr(graphs, "_capture_stream", lambda device: None)
    pool = CudaPool(torch.device("cuda", 0))
    for number in (1, 1, 2, 2, 1):
        current[0] = Stream(number)
        pool.follow()
    assert waits == [(2, 1), (1, 2)]
