"""What the tests of both Gluon kernels need."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator

import pytest
import torch

from tkernels import _counters
from tkernels.attention import _sm90


@pytest.fixture
def gluon_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are taken or refused as on Hopper."""
    monkeypatch.setattr(_sm90, "gluon_problem", lambda: None)


@pytest.fixture
def in_time() -> Generator[None]:
    """A wrong handshake hangs a GPU: after two minutes the process ends. No counter is left at other than zero."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    words = _counters._words[torch.device("cuda", torch.cuda.current_device())]
    assert not words._ring.any() and not words._kept.any(), "a counter was not left at zero"
