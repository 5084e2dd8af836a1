"""Shared set-up. On a machine without a GPU the kernels run in Triton's interpreter, which must be chosen before they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
def _seed() -> None:
    torch.manual_seed(0)
