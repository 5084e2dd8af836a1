"""Counters that no two launches share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tkernels import _counters, _launch
from tkernels._counters import counters


def test_on_a_cpu_they_are_fresh_zeros() -> None:
    first, second = counters(3, torch.device("cpu")), counters(3, torch.device("cpu"))
    assert first.shape == (8,) and not first.any() and first.data_ptr() != second.data_ptr()


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The bookkeeping of a GPU over memory of the CPU, with nothing taken so far."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(_counters, "_words", {})
    return torch.device("cuda", 0)


def test_the_first_call_may_be_a_bound_one(on_a_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its counters like later ones, and making them is no work of the op that would stop it from being bound."""
    recording = _launch.Recording(torch.empty)  # type: ignore[arg-type]
    monkeypatch.setattr(_counters, "is_binding", lambda: True)
    with recording:
        counters(8, on_a_device)
    words = _counters._words[on_a_device]
    assert recording.others == 0 and (words._taken, words._next) == (8, 0)


def test_a_launch_of_very_many_counters_gets_fresh_ones(on_a_device: torch.device) -> None:
    """Otherwise a few launches would come around the ring, to counters that a launch of another stream still uses."""
    many = [counters(_counters.EAGER_WORDS // 64, on_a_device) for _ in range(65)]
    assert len({words.data_ptr() for words in many}) == 65


def test_those_that_stood_are_told_from_those_that_a_launch_has_just_zeroed(on_a_device: torch.device, monkeypatch) -> None:
    turn = counters(8, on_a_device)
    monkeypatch.setattr(_counters, "is_binding", lambda: True)
    kept, words = counters(8, on_a_device), _counters._words[on_a_device]
    monkeypatch.setattr(_counters, "CAPTURED_WORDS", 8)
    assert [words.holds(x) for x in (turn, kept, counters(8, on_a_device))] == [True, True, False]


@pytest.mark.gpu
def test_captured_calls_keep_theirs_and_eager_calls_take_turns() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    eager = {counters(32, device).data_ptr() for _ in range(1000)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [counters(32, device) for _ in range(100)]
    kept = [words.data_ptr() for words in held]
    assert all(map(_counters.stood, held))
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
def test_when_none_are_left_a_captured_launch_zeroes_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counters(8, device)
    monkeypatch.setattr(_counters, "CAPTURED_WORDS", 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh = counters(8, device)
    assert not _counters.stood(fresh)
    fresh.fill_(1)
    graph.replay()
    assert not fresh.any()
