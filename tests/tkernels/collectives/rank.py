"""A rank as the cases see it: its inputs, how a case is registered, and what cases compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tkernels.collectives as C
from tkernels import _repeats
from tkernels.collectives import plan as plans

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPU = torch.cuda.is_available()
MAX_BYTES = 4 << 20 if GPU else 24 << 10


@dataclass
class Rank:
    rank: int
    world: int
    device: torch.device
    group: str

    def inputs(self, shape: tuple[int, ...] | int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """Every rank's x, of mixed magnitude: sums in another order differ in the last bits."""
        made = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-3, 4, (1,), generator=generator).float())
            made.append((x * (1 + rank)).to(dtype))
        return made

    def everywhere(self, text: str) -> list[str]:
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, text)
        return answers


CASES: dict[str, Callable[[Rank], None]] = {}
GPU_ONLY: set[str] = set()
TWO_ON_CPU: set[str] = set()


def case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    CASES[function.__name__] = function
    return function


def gpu_case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    GPU_ONLY.add(function.__name__)
    return case(function)


def small_case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Of torch rather than of the protocol: on the CPU two ranks are enough."""
    TWO_ON_CPU.add(function.__name__)
    return case(function)


def expected_sum(xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


def norm_reference(xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y in fp64, new_residual in the dtype of x)"""
    total = (expected_sum(xs).float() + residual.float()).to(residual.dtype)
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double(), total


def same_bits(got: torch.Tensor, want: torch.Tensor, what: Any) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, got.shape, want.dtype, want.shape)
    got, want = got.cpu(), want.cpu()
    nan = got.float().isnan() & want.float().isnan()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    different = (got.view(view) != want.view(view)) & ~nan
    assert not different.any(), f"{what}: {int(different.sum())} of {got.numel()} differ, first {different.nonzero()[0].tolist()}"


@contextmanager
def forced(kind: str) -> Iterator[None]:
    """All-reduces by one algorithm, whatever the table says."""
    name, table = {"one_shot": ("_ONE_SHOT", 1 << 40), "two_shot": ("_ONE_SHOT", 0)}[kind]
    fused = plans._FUSED_ONE_SHOT
    before = getattr(plans, name)
    setattr(plans, name, dict.fromkeys(before, table))
    plans._FUSED_ONE_SHOT = dict.fromkeys(fused, table)
    _repeats.forget()  # launches by the other table
    try:
        yield
    finally:
        _repeats.forget()
        setattr(plans, name, before)
        plans._FUSED_ONE_SHOT = fused


@contextmanager
def raising(*parts: str, kind: type[Exception] = C.CollectiveError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for part in parts:
            assert part in str(error), f"expected {part!r} in: {error}"
        return
    raise AssertionError(f"expected {kind.__name__} with {parts}")


@contextmanager
def repeating() -> Iterator[None]:
    """In the interpreter too: from the third call that looks alike on, an op repeats its launches."""
    before, _repeats.ENABLED = _repeats.ENABLED, True
    try:
        yield
    finally:
        _repeats.ENABLED = before
        _repeats.forget()


def plans_made() -> int:
    return sum(isinstance(plan, _repeats._Plan) for table in _repeats._tables for plan in table.values())


def fresh(at: Rank, timeout_s: float) -> tuple[str, Any]:
    process_group = dist.new_group(list(range(at.world)))
    return C.init_group(process_group, max_bytes=1 << 12, timeout_s=timeout_s), process_group


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph, out
