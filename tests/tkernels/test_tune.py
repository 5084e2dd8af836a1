"""tune: what it tries, checks, writes and says. What it measures is left to its own runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import _repeats, _tune_case, tune
from tkernels._candidates import candidates
from tkernels._linear_kernels import ROW_CLASSES, Tile
from tkernels._target import Target
from tkernels._tune_case import Case
from tkernels.linear import choose_with_norm, table_of

SHIPPED = json.loads((Path(tune.__file__).parent / "tables" / "linear_sm_90.json").read_text())["entries"]
RIGHT, WRONG = Tile("matrix", 16, 32, 1, 4, 2), Tile("matrix", 32, 32, 1, 4, 2)


def _case(variant: str, rows: int, n: int, k: int, device: torch.device, without_norm: Tile | None = None) -> Case:
    return Case(variant, rows, n, k, torch.bfloat16, device, 0, without_norm)


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_CALLS", 1), ("REPEATS", 1), ("_WARM_UP", 0)):
        monkeypatch.setattr(_tune_case, name, value)
    monkeypatch.setattr(Case, "run", lambda self, call: lambda: call(self.weights[0]))


def _times(monkeypatch: pytest.MonkeyPatch, times: dict[Any, float]) -> None:
    """Instead of a clock."""
    monkeypatch.setattr(tune, "time_us", lambda runs, calls: {name: times[name] for name in runs})


@pytest.mark.parametrize("refusing", [False, True], ids=["none fits", "all refused"])
def test_a_shape_without_a_tile_stays_composed(monkeypatch: pytest.MonkeyPatch, device: torch.device, refusing: bool) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(_tune_case, "launch", refuse)
    _times(monkeypatch, {"composed": 2.0})
    row = tune._measure(_case("plain", 1, 16, 8, device), [RIGHT] if refusing else [])
    assert not row["us"] < row["composed_us"]  # so it enters no table
    assert tune._line(row).endswith(f"no tile runs, composed    2.00 us, {int(refusing)} refused")


def test_a_rotation_is_measured_with_its_caches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Right results only."""
    launch = _tune_case.launch_qkv
    monkeypatch.setattr(_tune_case, "launch_qkv", lambda *args: launch(*args) if args[-1] == RIGHT else None)  # WRONG writes nothing
    _times(monkeypatch, {RIGHT: 2.0, "composed": 3.0, "norm apart": 1.0})
    row = tune._measure(_case("norm+rope", 2, 256, 32, device), [WRONG, RIGHT])
    assert row["tile"] == vars(RIGHT) and [r["error"] for r in row["refused"]] == ["wrong result"]
    assert (row["us"], row["composed_us"]) == (2.0, 3.0)
    row = tune._measure(_case("norm+rope", 2, 256, 32, device, RIGHT), [RIGHT])
    assert (row["us"], row["composed_us"]) == (2.0, 1.0), "the norm as a kernel of its own is a composition to beat"


def test_the_table_is_written_after_every_entry_and_used_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, tmp_path: Path
) -> None:
    """With a fused rotation that wins, one that loses, so that the table says "apart", and a run that is broken off."""
    target, path = Target("sm_test", 4, True), tmp_path / "table.json"
    monkeypatch.setattr(tune, "_table_path", lambda _: tmp_path / "none shipped")
    said: list[str] = []
    jobs = [("plain", 8, 192, 32, RIGHT), ("rope", 8, 192, 32, RIGHT), ("rope", 16, 192, 32, RIGHT), ("norm+rope", 8, 192, 32, RIGHT)]
    seen: list[set[Any]] = []

    def time_us(runs: dict[Any, Any], calls: int) -> dict[Any, float]:
        for run in runs.values():
            run()
        seen.append(set(runs))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return dict.fromkeys(runs, 2.0) | {RIGHT: 1.0 if len(seen) < 3 else 1.99}

    monkeypatch.setattr(tune, "time_us", time_us)
    try:
        with pytest.raises(KeyboardInterrupt):
            tune._fill(jobs, torch.bfloat16, device, target, path, {"gpu": "none"}, said.append)
        assert seen[3] == {RIGHT, "composed", "norm apart"}, "the tile that rope has just been given"
        assert table_of("sm_test") == {("plain", 8, 192, 32): RIGHT, ("rope", 8, 192, 32): RIGHT, ("rope", 16, 192, 32): None}
        table_of("sm_test").clear()
        tune._fill([], torch.bfloat16, device, target, path, {"gpu": "none"}, said.append)
        assert len(table_of("sm_test")) == 3, "a table that is there is added to"
    finally:
        table_of("sm_test").clear()
        _repeats.forget()
    written = json.loads(path.read_text())
    assert written["gpu"] == "none" and len(said) == 3
    assert [(e["variant"], e["rows"], e["us"], e["tile"] and Tile(**e["tile"])) for e in written["entries"]] == [
        ("plain", 8, 1.0, RIGHT), ("rope", 8, 1.0, RIGHT), ("rope", 16, None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("apart", [1.0, 2.5])
def test_a_norm_joins_a_gate_only_where_that_beats_the_norm_before_it(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, tmp_path: Path, apart: float
) -> None:
    """Else the table has the tile without a norm alone, and a call launches the norm and then that one."""
    target, shape = Target("no device", 1, True), (8, 256, 64)
    _times(monkeypatch, {RIGHT: 2.0, "composed": 3.0, "norm apart": apart})
    monkeypatch.setitem(table_of(target.arch), ("norm+gated", *shape), RIGHT)  # of an earlier run
    jobs: list[_tune_case.Job] = [(variant, *shape, RIGHT) for variant in ("gated", "norm+gated")]
    tune._fill(jobs, torch.bfloat16, device, target, tmp_path / "table.json", {}, lambda line: None)
    written = {entry["variant"] for entry in json.loads((tmp_path / "table.json").read_text())["entries"]}
    assert written == ({"gated"} if apart < 2 else {"gated", "norm+gated"})
    assert choose_with_norm(target, torch.bfloat16, "gated", True, *shape) == (RIGHT, apart < 2)
    table_of(target.arch).clear()


def test_a_rotation_with_every_tile_of_a_tiny_shape(device: torch.device, tmp_path: Path) -> None:
    """As on a GPU but for the graphs and for the compilation: all that it tries runs and is right."""
    said: list[str] = []
    jobs = tune._jobs([(192, 64, "rope")], [1, 16], Target("sm_test", 4, True))
    tune._fill(jobs, torch.bfloat16, device, Target("sm_test", 4, True), tmp_path / "table.json", {}, said.append)
    table_of("sm_test").clear()
    assert len(said) == 4 and all(line.endswith(", 0 refused") for line in said), said
    entries = json.loads((tmp_path / "table.json").read_text())["entries"]
    assert sorted((e["variant"], e["rows"]) for e in entries) == [("norm+rope", 1), ("norm+rope", 16), ("rope", 1), ("rope", 16)]


def test_tiles_are_compiled_ahead_by_other_processes(device: torch.device) -> None:
    """Each kernel once: of the row classes up to 16 a matrix tile has one. A tile that cannot run is counted."""
    jobs = [("rope", rows, 192, 64, tile) for rows in (1, 2, 16) for tile in (RIGHT, WRONG, None)]
    jobs.append(("plain", 1, 192, 64, Tile("matrix", 24, 32, 1, 4, 2)))  # no power of two
    assert _tune_case.compile_ahead(jobs, torch.bfloat16, device) == (6, 1)


def test_what_was_measured_best_is_among_what_is_tried() -> None:
    """On the device of the shipped table, although most tiles are not tried there."""
    for entry in SHIPPED:
        tried = list(candidates(entry["variant"], entry["rows"], entry["n"], entry["k"], 132, tma=True))
        assert entry["tile"] is None or Tile(**entry["tile"]) in tried, entry


@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (6144, 4096)])
def test_a_tile_that_is_tried_keeps_the_device_busy(n: int, k: int) -> None:
    for rows in ROW_CLASSES:
        for variant in ("plain", "norm", "rope", "norm+rope"):
            tiles = list(candidates(variant, rows, n, k, 132))
            assert 3 < len(tiles) < 50 and len(set(tiles)) == len(tiles)
            assert all(-(-n // tile.block_n) * tile.splits > 0.7 * 132 for tile in tiles)
            assert all(tile.splits == 1 for tile in tiles) == ("norm" in variant)
            assert "rope" not in variant or all(tile.block_n >= 2 for tile in tiles), "a program of one output holds no partners"


def test_no_tile_is_tried_on_fewer_inputs_than_it_reads_at_once() -> None:
    assert not list(candidates("plain", 8, 8, 8, 132))
    assert all(tile.block_k * tile.slices <= 128 for tile in candidates("plain", 8, 64, 64, 132))
