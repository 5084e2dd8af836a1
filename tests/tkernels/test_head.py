"""linear_argmax: the argmax of what linear gives, whatever kernel that is."""

from __future__ import annotations

import importlib

import pytest
import torch

import tkernels
from tkernels._linear_kernels import Tile

TILES = [
    Tile("vector", 4, 16, 1, 1, 1), Tile("matrix", 16, 32, 1, 4, 2), Tile("matrix", 16, 16, 2, 4, 2),
    Tile("matrix", 16, 16, 1, 4, 2, splits=2), Tile("matrix", 16, 32, 2, 2, 1, splits=2),
]  # fmt: skip


@pytest.mark.parametrize("tile", [*TILES, None], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_is_the_argmax_of_linear(tile: Tile | None, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same logits are compared: small integers, so that many outputs are equal after rounding."""
    choose = lambda target, dtype, variant, *shape: tile if variant == "plain" or (tile and tile.splits == 1) else None
    monkeypatch.setattr(importlib.import_module("tkernels.linear"), "choose", choose)
    weight = torch.randint(-2, 3, (37, 48), device=device).half()
    for norm_weight in (None, torch.ones(48, device=device).half()):
        x = torch.randint(-2, 3, (rows, 96), device=device).half()[:, ::2].contiguous()
        logits = tkernels.linear(x, weight, norm_weight=norm_weight)
        got = tkernels.linear_argmax(x, weight, norm_weight=norm_weight)
        assert got.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_equals_bad_logits_and_the_lowest_id(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals in different programs; a NaN output is never chosen; a row of NaN gives 0."""
    columns = torch.zeros(3, 40, 1, device=device).half()
    columns[0, [9, 30]] = 5.0
    columns[1, 3], columns[1, 20] = float("nan"), 4.0
    columns[2] = float("nan")
    one = torch.ones(1, 1, device=device).half()
    for tile in (TILES[0], TILES[1], None):
        monkeypatch.setattr(importlib.import_module("tkernels.linear"), "choose", lambda *args, tile=tile: tile)
        assert [tkernels.linear_argmax(one, weight).item() for weight in columns] == [9, 20, 0]


def test_errors_name_the_argument(device: torch.device) -> None:
    weight = torch.zeros(8, 4, device=device)
    with pytest.raises(ValueError, match=r"x: expected \[rows, 4\] like weight's last dimension, got \[2, 5\]"):
        tkernels.linear_argmax(torch.zeros(2, 5, device=device), weight)
    with pytest.raises(TypeError, match="weight: expected float16 like x"):
        tkernels.linear_argmax(torch.zeros(2, 4, device=device).half(), weight)
    with pytest.raises(ValueError, match="weight: expected \\[vocab, in_features\\] with a vocab of at least 1"):
        tkernels.linear_argmax(torch.zeros(2, 4, device=device), weight[:0])
