"""tune where no tile can run. What it measures is left to GPU machines, whose tables tests/tkernels/test_linear.py reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tkernels import tune
from tkernels._linear_kernels import Tile


def _times(graphs: dict[Any, Any]) -> dict[Any, float]:
    return dict.fromkeys(graphs, 2.0)


@pytest.mark.parametrize("refusing", [False, True], ids=["none fits", "all refused"])
def test_a_shape_without_a_tile_stays_composed(monkeypatch: pytest.MonkeyPatch, device: torch.device, refusing: bool) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(tune, "_graph", lambda calls: calls)
    monkeypatch.setattr(tune, "_time_us", _times)
    monkeypatch.setattr(tune, "candidates", lambda *_: [Tile("matrix", 16, 32, 1, 4, 2)] if refusing else [])
    monkeypatch.setattr(tune, "launch", refuse)
    row = tune._measure(tune._Case("plain", 1, 16, 8, torch.bfloat16, device, 0))
    assert not row["us"] < row["composed_us"]  # so it enters no table
    assert tune._line(row).endswith(f"no tile runs, composed    2.00 us, {int(refusing)} refused")


def test_a_rotation_is_measured_with_its_caches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Right results only; where the composition wins, the table says so, and a program of one output is not tried."""
    monkeypatch.setattr(tune, "_graph", lambda calls: [call() for call in calls[:1]])
    monkeypatch.setattr(tune, "_time_us", _times)
    right, wrong = Tile("matrix", 16, 32, 1, 4, 2), Tile("matrix", 32, 32, 1, 4, 2)
    monkeypatch.setattr(tune, "candidates", lambda *_: [wrong, right])
    launch = tune.launch_qkv
    monkeypatch.setattr(tune, "launch_qkv", lambda *args: launch(*args) if args[-1] == right else None)  # the other one writes nothing
    row = tune._measure(tune._Case("norm+rope", 2, 256, 32, torch.bfloat16, device, 0))
    assert row["tile"] == vars(right) and [r["error"] for r in row["refused"]] == ["wrong result"]
    times = {right: 2.0, "composed": 3.0, "norm apart": 1.0}
    monkeypatch.setattr(tune, "_time_us", lambda graphs: {name: times[name] for name in graphs})
    row = tune._measure(tune._Case("norm+rope", 2, 256, 32, torch.bfloat16, device, 0, right))
    assert (row["us"], row["composed_us"]) == (2.0, 1.0), "the norm as a kernel of its own is a composition to beat"
    monkeypatch.undo()
    assert all(tile.block_n >= 2 for tile in tune.candidates("norm+rope", 1, 2048))
    assert any(tile.splits > 1 for tile in tune.candidates("rope", 1, 2048))


def test_no_tile_is_tried_on_fewer_inputs_than_it_reads_at_once() -> None:
    assert not list(tune.candidates("plain", 8, 8))
    assert all(tile.block_k * tile.slices <= 128 for tile in tune.candidates("plain", 8, 64))
