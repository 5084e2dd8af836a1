"""A step's inputs go to the device by one call of CUDA's driver; torch is asked where its allocator or its errors are needed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import level_costs, make
from test_addresses import HAS_COMPILER
from test_arena import arena, expect, values
from test_ready import NAMES, Wide, called, staged, without_kernels

from runtime import addresses, staging
from runtime.arena import Arena
from runtime.inputs import Dim, InputSpec
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
        self.widths: list[int] = []
        """Bytes of each row in copies of a part of each."""
        rows = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._rows = rows(self._copy_rows)
        patch.setattr(addresses, "_rows_to_device", lambda: self._rows)
        patch.setattr(addresses, "sender", self.sender)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        patch.setattr(torch.cuda, "current_stream", lambda device: self._stream())
        patch.setattr(staging, "sender", self.sender)

    def _copy(self, to: int, source: int, count: int, stream: int) -> int:
        if not self.error:
            ctypes.memmove(to, source, count)
            self.streams.append(stream)
        return self.error

    def _copy_rows(self, at: int, stream: int) -> int:
        """CUDA_MEMCPY2D, as its header lays it out on a machine of 64 bits."""
        asked = (ctypes.c_uint64 * 16).from_address(at)
        from_x, from_y, from_kind, from_host, _, _, from_pitch, to_x, to_y, to_kind, _, to_device, _, to_pitch, width, height = asked
        assert (from_x, from_y, to_x, to_y) == (0, 0, 0, 0) and (from_kind & 0xFFFFFFFF, to_kind & 0xFFFFFFFF) == (1, 2)
        if not self.error:
            for row in range(height):
                ctypes.memmove(to_device + row * to_pitch, from_host + row * from_pitch, width)
            self.widths.append(width)
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
    a.staging._on_cuda = True
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


def wide_arena(device: torch.device) -> Arena:
    specs = [InputSpec("ids", (Dim("tokens"),), torch.int64), InputSpec("table", (Dim("seqs"), 4096), torch.int32)]
    return Arena([*specs, InputSpec("lens", (Dim("seqs"),), torch.int32)], {"tokens": 64, "seqs": 64}, device)


def written(a: Arena, width: int | None, seqs: int = 60) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """One step, of whose table the first columns are to be sent, and what was written."""
    real, padded = {"tokens": seqs, "seqs": seqs}, {"tokens": 64, "seqs": 64}
    arrays = a.host(real, padded)
    for name in ("ids", "lens"):
        arrays[name][...] = np.random.default_rng(seqs).integers(1, 9, arrays[name].shape)
    table = np.random.default_rng(width).integers(1, 1 << 30, (seqs, 4096), np.int32)
    arrays["table"][...] = table
    if width is not None:
        a.staging.note.widths = {"table": width}
    return a.upload(real, padded), table


def test_columns_that_no_row_uses_are_not_sent(driver: Driver) -> None:
    """A table for 65,536 tokens of context: a megabyte, of which a step reads little. Rows past the real ones are padding there too."""
    a = wide_arena(torch.device("cpu"))
    a.staging._on_cuda = True
    written(a, None)
    for width, sent in ((100, [400]), (0, []), (1500, [6000]), (2100, []), (4096, []), (None, [])):
        driver.widths.clear()
        driver.streams.clear()
        a._block.view(torch.int32)[-4096 * 64 :] = -7
        views, table = written(a, width)
        assert driver.widths == sent and driver.streams == [5], "all before the table in one copy, or everything"
        got, columns = views["table"], width if sent or width == 0 else 4096
        assert torch.equal(got[:60, :columns], torch.from_numpy(table[:, :columns])) and not got[60:, :columns].any()
        assert (got[:, columns:] == -7).all()
        assert views["ids"][:60].all() and not views["ids"][60:].any() and views["lens"][:60].all()
    driver.error = 1  # torch sends everything, or says why not
    views, table = written(a, 100)
    assert torch.equal(views["table"][:60], torch.from_numpy(table))


def test_a_small_table_is_sent_with_the_rest(driver: Driver) -> None:
    a, sizes = arena(torch.device("cpu"), 2), {"tokens": 16, "seqs": 8}
    a.staging._on_cuda = True
    for _ in range(2):
        given = values(16, 8)
        for name, array in a.host(sizes, sizes).items():
            array[...] = given[name].view(torch.uint16).numpy() if name == "hidden" else given[name].numpy()
        a.staging.note.widths = {"table": 0}
        expect(a.upload(sizes, sizes), given, 16, 8)
    assert driver.widths == []


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
    key.arena.staging._on_cuda = True
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


@pytest.mark.gpu
def test_the_driver_copies_the_first_columns(device: torch.device) -> None:
    a = wide_arena(device)
    for step, width in enumerate((None, 100, 1500, 0, 77, 4096, 100)):
        torch.cuda.synchronize()
        a._block.view(torch.int32)[-4096 * 64 :] = -7
        found: list[Any] = []
        ops = torch_ops(lambda: found.extend(written(a, width)))  # noqa: B023
        got, table = found[0]["table"].cpu(), torch.from_numpy(found[1])
        columns = 4096 if width is None else width
        assert torch.equal(got[:60, :columns], table[:, :columns]) and not got[60:, :columns].any() and (got[:, columns:] == -7).all()
        assert (found[0]["ids"].cpu()[:60] > 0).all() and not found[0]["ids"].cpu()[60:].any()
        assert step == 0 or "aten::copy_" not in ops, ops
