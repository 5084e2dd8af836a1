"""Shared set-up. On a machine without a GPU the kernels run in Triton's interpreter, which must be chosen before they are imported.

Tests under tests/runtime run whole models, so there the CPU runs each op's PyTorch reference instead; a test marked
``interpreted`` runs the kernels there too. On a GPU machine everything runs the kernels.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator, Iterator
from pathlib import Path

# One thread a process, subprocesses too: the suite runs a worker for each core, and small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Subprocesses import this tree, and what this process was given to import, from any working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(
    os.path.abspath(path)
    for path in dict.fromkeys([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    if path
)

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tkernels import _repeats
from tkernels._op import reference_ops

_RUNTIME_TESTS = Path(__file__).parent / "runtime"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: a test of the runtime that runs the Triton kernels in the interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around the whole item, so that fixtures of a module or a session run the same ops as the test."""
    if _RUNTIME_TESTS in item.path.parents and not item.get_closest_marker("interpreted"):
        with reference_ops():
            return (yield)
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; runs on the GPU machine"))


@pytest.fixture
def device() -> torch.device:
    """The device that tests run on: the GPU where there is one, else the CPU with interpreted kernels."""
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def _every_call_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of kernels swap tiles and tables between calls that look alike; tests of the runtime and of _repeats are as users are."""
    if _RUNTIME_TESTS not in request.path.parents:
        monkeypatch.setattr(_repeats, "ENABLED", False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def in_time() -> Iterator[None]:
    """A wrong handshake hangs a GPU: after two minutes the process ends."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
