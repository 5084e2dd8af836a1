"""CUDA graphs of what a test launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from tkernels import _dependent

Result = TypeVar("Result")


def captured(step: Callable[[], Result], dependent: bool | None = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of ``step``, and what it returned there. It runs once before, which loads what the capture needs.

    dependent: whether the launches are dependent ones; None: as it is set.
    """
    before = _dependent.enabled()
    _dependent.enable(before if dependent is None else dependent)
    try:
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
    finally:
        _dependent.enable(before)
    return graph, result
