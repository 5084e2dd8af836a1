"""What the tests of both Gluon kernels need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tkernels import _counters
from tkernels.attention import _sm90, paged


@pytest.fixture
def gluon_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are taken or refused as on Hopper."""
    monkeypatch.setattr(_sm90, "gluon_problem", lambda: None)


@pytest.fixture
def on_hopper(gluon_compiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are chosen as on Hopper."""
    monkeypatch.setattr(paged, "target_of", lambda device: type("Target", (), {"arch": "sm_90"}))


@pytest.fixture
def in_time(in_time: None) -> Iterator[None]:
    """As everywhere, and no counter is left at other than zero."""
    yield
    torch.cuda.synchronize()
    words = _counters._words[torch.device("cuda", torch.cuda.current_device())]
    assert not words._ring.any() and not words._kept.any(), "a counter was not left at zero"
