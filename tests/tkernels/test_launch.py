"""Bound calls: launches that are prepared once and repeated on the same memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from op_samples import SAMPLES
from recording_driver import run_recorded

import tkernels
from tkernels import _launch
from tkernels._op import reference_ops
from tkernels._triton import tl, triton

OUT = torch.ops.tkernels.paged_attention_out.default


class Memory:
    """Allocates like torch.empty, and remembers."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.given.append(torch.empty(*shape, dtype=dtype, device=device))
        return self.given[-1]


def _call(device: torch.device, max_query_len: int) -> tuple[Any, ...]:
    args, _ = SAMPLES["paged_attention_out"](device)[0]
    return (*args[:7], max_query_len, *args[8:])


@pytest.mark.parametrize("max_query_len", [1, 8, 64])
def test_bound_attention_gives_the_bits_of_the_op_on_new_data(device: torch.device, max_query_len: int) -> None:
    args, memory = _call(device, max_query_len), Memory()
    repeat = OUT.bind(memory, args, {})
    assert repeat is not None and memory.given, "the workspace comes from the allocator that was given"
    for _ in range(2):
        args[0].normal_()
        args[1].normal_()
        OUT(*args)
        want = args[-2].clone(), args[-1].clone()
        for t in (*memory.given, args[-2], args[-1]):
            t.fill_(-1 if t.dtype == torch.int32 else float("nan"))  # nothing may live there from one call to the next
        repeat()
        assert torch.equal(args[-2], want[0]) and torch.equal(args[-1], want[1])


def test_launches_of_other_threads_are_not_noted(device: torch.device) -> None:
    x, y, elsewhere = torch.arange(4.0, device=device), torch.zeros(4, device=device), torch.zeros(4, device=device)

    def launches(x: torch.Tensor, y: torch.Tensor) -> None:
        other = threading.Thread(target=lambda: _scale_kernel[(1,)](x, elsewhere, 3.0, 4))
        other.start()
        other.join()
        _scale_kernel[(1,)](x, y, 2.0, 4)

    repeat = _launch.bind(launches, Memory(), (x, y), {})
    assert elsewhere.tolist() == [0, 3, 6, 9]
    elsewhere.zero_()
    assert repeat is not None
    repeat()
    assert elsewhere.tolist() == [0, 0, 0, 0] and y.tolist() == [0, 2, 4, 6]


def test_binding_runs_the_op_once(device: torch.device) -> None:
    args = _call(device, 8)
    OUT(*args)
    want = args[-2].clone()
    args[-2].fill_(float("nan"))
    OUT.bind(Memory(), args, {})
    assert torch.equal(args[-2], want)


def test_the_reference_on_the_cpu_runs_and_is_not_bound() -> None:
    args = _call(torch.device("cpu"), 8)
    with reference_ops():
        args[-2].fill_(float("nan"))
        assert OUT.bind(Memory(), args, {}) is None
    assert not args[-2].isnan().any()


def test_bound_call_checks_nothing_and_refuses_wrong_arguments_when_made(device: torch.device) -> None:
    args = list(_call(device, 8))
    args[3] = args[3].long()
    with pytest.raises(TypeError, match="block_table: expected int32"):
        OUT.bind(Memory(), tuple(args), {})
    assert not _launch.is_binding(), "the next launch must not be noted"


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, width, BLOCK: tl.constexpr = 8):
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) * factor, mask=mask)


def test_an_op_that_also_calls_torch_is_not_bound(device: torch.device) -> None:
    x, y = torch.arange(4.0, device=device), torch.zeros(4, device=device)

    def launches_only(x: torch.Tensor, y: torch.Tensor) -> None:
        _scale_kernel[(1,)](x[:], y, 2.0, 4)
        assert _launch.is_binding()

    def adds_too(x: torch.Tensor, y: torch.Tensor) -> None:
        launches_only(x, y)
        y += 1

    repeat = _launch.bind(launches_only, Memory(), (x, y), {})
    x += 1
    assert repeat is not None and repeat() is None
    assert y.tolist() == [2, 4, 6, 8]
    assert _launch.bind(adds_too, Memory(), (x, y), {}) is None, "the addition would be lost"
    assert y.tolist() == [3, 5, 7, 9], "the op has run"


_COMPARE = """
from tkernels import _launch

@triton.jit
def kernel(x_ptr, y_ptr, none_ptr, factor, width, BLOCK: tl.constexpr = 8):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < width) * factor, mask=offs < width)

x, y = torch.zeros(8), torch.zeros(8)
notes = []
with _launch.noting(notes, binds=True):
    kernel[lambda given: (given["BLOCK"] - 5,)](x, y, None, 2.0, width=1, num_warps=2)
_launch._on_device(torch.device("cuda", 0))([_launch._bound_launch(*note) for note in notes], None)
theirs, ours = calls
theirs = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in theirs]
theirs[6:9] = [None] * 3  # launch metadata and hooks, for profilers
assert list(ours) == theirs, (theirs, ours)
assert ours[:5] == (3, 1, 1, 77, 1234) and ours[-4:] == (None, 2.0, 1, 8), ours
"""


def test_compiled_kernels_get_what_tritons_launcher_gives_them(tmp_path: Path) -> None:
    """Without a device: once from Triton's own path and once from ours."""
    run_recorded(_COMPARE, tmp_path)


@pytest.mark.gpu
def test_bound_attention_takes_a_third_of_the_host_time(device: torch.device) -> None:
    args = _call(device, 1)
    repeat = OUT.bind(Memory(), args, {})

    def host_us(run: Any) -> float:
        times = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return sorted(times)[25] * 1e6

    assert host_us(repeat) < host_us(lambda: OUT(*args)) / 3


def test_exported_for_every_op_that_says_so() -> None:
    assert callable(OUT.bind) and not hasattr(torch.ops.tkernels.paged_attention.default, "bind") and tkernels.paged_attention_out
