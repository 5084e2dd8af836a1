"""The stack of linears as a script: what it checks, and the table that a document shows of its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import linear_stack, report
from bench.shapes import TINY


def test_a_run_gives_a_line_for_each_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_stack.torch.cuda, "is_available", lambda: False)
    out = tmp_path / "stack.json"
    linear_stack.main(["--small", "--rows", "1", "3", "--repeats", "1", "--out", str(out)])
    data = json.loads(out.read_text())
    assert [row["rows"] for row in data["rows"]] == [1, 3] and set(data["errors"]["3"]) == {"qkv", "o", "gate_up", "down", "head"}
    lines = report.script_table("stack", tmp_path).splitlines()
    assert lines[0].startswith(
        "| rows | ours, dependent, µs | ours, µs | cuBLAS, the matrices only, µs | bar, µs | ours, dependent, TB/s |"
    )
    assert lines[2].startswith("| 1 |") and "| 660.0 |" in lines[2] and "| – |" in lines[3]
    assert any(line.startswith("Units stand in the header. none, torch") for line in lines)


@pytest.mark.parametrize("wrong", ["qkv", "o", "gate_up", "down", "head"])
def test_a_wrong_projection_is_not_timed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = linear_stack.Stack(TINY, 2, "cpu", torch.float32)
    name = "linear_rope_and_cache" if wrong == "qkv" else "linear"
    right, bad = getattr(linear_stack.tkernels, name), getattr(stack.layers[-1], wrong, stack.head)

    def op(x: torch.Tensor, weight: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        return right(x, weight, *args, **more) * (1.01 if weight is bad else 1.0)

    monkeypatch.setattr(linear_stack.tkernels, name, op)
    with pytest.raises(SystemExit, match=f"{wrong} of 2 rows: relative error"):
        stack.check()


def test_graphs_that_differ_are_not_timed() -> None:
    y = torch.zeros(2, 3)
    runs = [(lambda: None, y), (lambda: None, y + 1)]
    linear_stack.check_bits(runs[:1] * 2)
    with pytest.raises(SystemExit, match="differ"):
        linear_stack.check_bits(runs)
