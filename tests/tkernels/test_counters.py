"""Counters that no two launches share."""

from __future__ import annotations

import pytest
import torch

from tkernels import _counters, _launch
from tkernels._counters import counters


def test_on_a_cpu_they_are_fresh_zeros() -> None:
    first, second = counters(3, torch.device("cpu")), counters(3, torch.device("cpu"))
    assert first.shape == (8,) and not first.any() and first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
def test_captured_calls_keep_theirs_and_eager_calls_take_turns() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    eager = {counters(32, device).data_ptr() for _ in range(1000)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [counters(32, device).data_ptr() for _ in range(100)]
    assert len(eager) == 1000 and len(set(kept)) == 100 and not eager & set(kept)


@pytest.mark.gpu
def test_bound_calls_keep_theirs() -> None:
    """They run again and again, beside eager calls of other streams."""
    device = torch.device("cuda", torch.cuda.current_device())
    eager = {counters(8, device).data_ptr() for _ in range(_counters.EAGER_WORDS // 8)}  # once around the ring
    kept: list[int] = []
    for _ in range(2):
        _launch.bind(lambda x: kept.append(counters(8, device).data_ptr()), torch.empty, (torch.zeros(1, device=device),), {})  # type: ignore[arg-type]
    assert len(set(kept)) == 2 and not eager & set(kept)


@pytest.mark.gpu
def test_when_none_are_left_a_captured_memset_zeroes_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counters(8, device)
    monkeypatch.setattr(_counters, "CAPTURED_WORDS", 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh = counters(8, device)
    fresh.fill_(1)
    graph.replay()
    assert not fresh.any()
