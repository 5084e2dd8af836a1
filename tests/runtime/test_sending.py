"""A step's inputs go to the device by one call of CUDA's driver; torch is asked where its allocator or its errors are needed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_toys import level_costs, make
from test_addresses import HAS_COMPILER
from test_arena import arena, expect, values
from test_ready import NAMES, Wide, called, staged, without_kernels

from runtime import addresses, staging
from runtime.native import native

needs_c = pytest.mark.skipif(not HAS_COMPILER, reason="needs gcc and Python.h, as Triton does")


class Driver:
    """What staging asks CUDA for: the current device and stream, and a copy, which is made at once. On the CPU, whose device has no
    number."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device: int | None = None
        self.stream, self.error = 5, 0
        self.streams: list[int] = []
        """Of the copies that did not go through torch."""
        self.waits: list[tuple[int, int]] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)
        self._function = kind(self._copy)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        patch.setattr(torch.cuda, "current_stream", lambda device: self._stream())
        patch.setattr(staging, "sender", self.sender)

    def _copy(self, to: int, source: int, count: int, stream: int) -> int:
        if not self.error:
            ctypes.memmove(to, source, count)
            self.streams.append(stream)
        return self.error

    def _stream(self) -> SimpleNamespace:
        number = self.stream
        return SimpleNamespace(cuda_stream=number, wait_stream=lambda other: self.waits.append((number, other.cuda_stream)))

    def sender(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[int], int]:
        function = ctypes.cast(self._function, ctypes.c_void_p).value
        return partial(native().send, function, target.data_ptr(), source.data_ptr(), source.nbytes)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    if native() is None:
        pytest.skip("nothing was compiled: test_addresses.py says whether it should be")
    return Driver(monkeypatch)


def torch_ops(run: Callable[[], object]) -> list[str]:
    """Ops that the dispatcher runs meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


def test_torch_copies_first_on_each_stream_and_where_the_driver_does_not(driver: Driver) -> None:
    """The allocator of pinned memory must know each stream that reads a buffer (RACE), another current device has a default stream of
    its own, and an error is torch's to tell."""
    a = arena(torch.device("cpu"), 4)
    a._staging._on_cuda = True
    sizes = {"tokens": 16, "seqs": 8}

    def send() -> list[int]:
        driver.streams.clear()
        given = values(16, 8)
        for name, array in a.host(sizes, sizes).items():
            array[...] = given[name].view(torch.uint16).numpy() if name == "hidden" else given[name].numpy()
        expect(a.upload(sizes, sizes), given, 16, 8)
        return list(driver.streams)

    assert [send() for _ in range(6)] == [[], [5], [5], [5], [5], [5]]
    driver.stream = 0
    assert [send() for _ in range(3)] == [[], [0], [0]] and driver.waits == [(0, 5)]
    driver.stream = 5
    assert [send(), send()] == [[], [5]] and driver.waits == [(0, 5), (5, 0)]
    driver.device = 1
    assert [send(), send()] == [[], []]
    driver.device, driver.error = None, 201  # a thread that has no context yet
    assert [send(), send()] == [[], []]
    driver.error = 0
    assert send() == [5] and len(driver.waits) == 2


@needs_c
def test_only_pinned_memory_of_the_host_goes_past_torch() -> None:
    block = torch.zeros(64, dtype=torch.uint8)
    assert addresses.sender(block, block.clone()) is None


@pytest.mark.parametrize("run", [called, staged])
def test_a_step_like_the_one_before_runs_no_op_of_torch_and_leaves_nothing(run: Callable[..., Any], driver: Driver) -> None:
    """Inputs are compared and copied, parameters looked at, the copy and the launch begun, outputs lent: the dispatcher has no part in
    it, no object is left, and none for the collector of cycles."""
    fast = make(Wide(20), {name: 0 for name in NAMES}, mode="full", max_tokens=64, borrow=(0,))
    inputs = {name: torch.arange(60) for name in NAMES}
    fast.warmup(**inputs)
    without_kernels(level_costs(fast))
    key = next(iter(fast._steps.keys.values()))  # type: ignore[union-attr]
    key.arena._staging._on_cuda = True
    for _ in range(20):  # buffers and guards that are made when they first come round
        run(fast, inputs)
    driver.streams.clear()
    assert torch_ops(lambda: run(fast, inputs)) == []
    assert driver.streams == [5], "one copy for all inputs"
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(200):
            run(fast, inputs)
        left = sys.getallocatedblocks() - before
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert left < 200 + 50, "a number for each of the fake driver's copies, and no more"


@pytest.mark.gpu
def test_the_driver_copies_what_torch_would(device: torch.device) -> None:
    a, sizes = arena(device), {"tokens": 16, "seqs": 8}
    layout = a.layout(sizes, sizes)
    other = torch.cuda.Stream(device)
    for step in range(12):
        given = values(16, 8)
        with torch.cuda.stream(other if step % 6 > 3 else torch.cuda.current_stream(device)):
            for name, array in a.host(sizes, sizes).items():
                array[...] = given[name].view(torch.uint16).numpy() if name == "hidden" else given[name].numpy()
            ops = torch_ops(lambda: a.upload(sizes, sizes))
            expect(a.views(sizes), given, 16, 8)
        assert bool(ops) == (step % 6 in (0, 4)), (step, ops)
    assert all(part is not None and part.send is not None for part in layout.parts)
