"""``graphed`` at its start and after: what is timed, captured, dropped, planned anew and reset."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import graph_toys as toys
import pytest
import torch
from graph_toys import close, level_costs, make
from torch import nn

from runtime import warmup


def test_plan_prints_as_a_table_plain_and_rich(device: torch.device) -> None:
    from rich.console import Console

    plan = make(toys.Layers().to(device)).warmup(*toys.step(8, device))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan)
    for text in (str(plan), console.export_text()):
        for word in ("size", "eager ms", "piecewise ms", "full ms", "pick"):
            assert word in text
    assert [line.split()[0] for line in str(plan).splitlines()[1:4]] == ["2", "4", "8"]


def test_progress_is_reported(device: torch.device) -> None:
    seen: list[tuple[int, int, str]] = []
    make(toys.Layers().to(device), mode="full").warmup(*toys.step(8, device), progress=lambda *step: seen.append(step))
    assert [text for _, _, text in seen][:2] == ["capturing full at size 8", "capturing full at size 2"]
    assert seen[-1][0] == seen[-1][1]


def test_costs_are_kept_for_the_next_start(device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    module = toys.Layers().to(device)
    make(module, cost_table=str(path)).warmup(*toys.step(8, device))
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row["ms"] = 100.0 if row["mode"] != "piecewise" else 1.0
    path.write_text(json.dumps(data))
    again = make(module, cost_table=str(path))
    assert {row.pick for row in again.warmup(*toys.step(8, device)).rows} == {"piecewise"}
    other = make(toys.Layers(3).to(device), cost_table=str(path))
    assert any("measuring anew" in remark for remark in other.warmup(*toys.step(8, device)).remarks)


def test_lazy_capture_after_a_size_was_hot(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, capture="lazy", mode="full")
    fast.warmup(*toys.step(8, device))
    assert fast.stats()["graph_bytes"] == 0
    for _ in range(12):
        args = toys.step(3, device)
        assert close(fast(*args), module(*args))
    assert fast.stats()["steps"] == {"full": {4: 4}, "piecewise": {}, "eager": {3: 8}}


def test_reset_frees_the_memory_and_the_module_goes_on(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    fast.warmup(*toys.step(8, device))
    pool = fast._steps.pool  # type: ignore[union-attr]
    assert pool.nbytes() > 0
    fast.reset()
    assert pool.nbytes() == 0 and fast.plan is None
    args = toys.step(3, device)
    assert close(fast(*args), module(*args))


def test_memory_budget_drops_and_says_so(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, memory_budget=1, mode="full")
    plan = fast.warmup(*toys.step(8, device))
    assert any("memory_budget" in remark for remark in plan.remarks)
    args = toys.step(3, device)
    assert close(fast(*args), module(*args)) and fast.stats()["steps"]["eager"] == {3: 1}
    assert "memory_budget" in str(fast.explain(*args))


def test_memory_budget_that_the_largest_size_breaks_keeps_the_smaller_ones(device: torch.device) -> None:
    # 32 MiB at 4096 rows, little at 4 and 8: a GPU's allocator takes 2 MiB at the least, and 20 for anything above one
    module = nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 4)).to(device)
    sizes = {"max_tokens": 4096, "capture_sizes": [4, 8, 4096]}
    taken = make(module, {"input": 0}, mode="full", **sizes)
    taken.warmup(torch.rand(8, 4, device=device))
    budget = taken.stats()["graph_bytes"] // 2
    fast = make(module, {"input": 0}, mode="full", memory_budget=budget, **sizes)
    plan = fast.warmup(torch.rand(8, 4, device=device))
    assert any("full at size 4096 was dropped: it alone takes" in remark for remark in plan.remarks)
    assert 0 < fast.stats()["graph_bytes"] <= budget
    level_costs(fast)
    fast(torch.rand(3, 4, device=device))
    assert fast.stats()["steps"]["full"] == {4: 1}


def test_sizes_are_planned_anew_on_the_traffic_so_far(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, max_tokens=16, capture_sizes=[4], mode="full")
    with pytest.raises(RuntimeError, match="no step yet"):
        fast.replan()
    fast.warmup(*toys.step(16, device))
    level_costs(fast)
    for n in (3, 3, 3, 3, 11, 11, 5):
        fast(*toys.step(n, device))
    plan = fast.replan(max_graphs=4)
    assert [row.size for row in plan.rows] == [2, 3, 11, 16]  # 2 is max_num_seqs, 16 max_tokens
    level_costs(fast)
    args = toys.step(3, device)
    assert close(fast(*args), module(*args)) and fast.stats()["steps"]["full"][3] == 1


def test_regret_of_every_size(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    fast.warmup(*toys.step(8, device))
    rows = fast.regret([1, 3, 8])["-"]
    assert [row["tokens"] for row in rows] == [1, 3, 8]
    assert all(row["regret"] >= 0 and row["best_ms"] <= row["pick_ms"] for row in rows)


def test_out_of_memory_while_capturing_drops_the_rest_and_serves_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.steps import Steps

    capture = Steps.capture

    def limited(self: Steps, key: Any, mode: str, size: int) -> Any:
        if size == 4:
            raise torch.OutOfMemoryError("no memory left")
        return capture(self, key, mode, size)

    monkeypatch.setattr(Steps, "capture", limited)
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    plan = fast.warmup(*toys.step(8, device))
    assert any("out of memory while capturing full at size 4" in remark for remark in plan.remarks)
    level_costs(fast)
    for n in (2, 3, 7):
        args = toys.step(n, device)
        assert close(fast(*args), module(*args))
    assert sum(fast.stats()["steps"]["full"].values()) == 3 and 4 not in fast.stats()["steps"]["full"]
    assert "out of memory" in str(fast.explain(*args))


class Branchy(nn.Module):
    """Cannot be captured at size 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() if x.shape[0] == 4 else x * 2


def test_b058_one_size_that_fails_runs_in_another_mode_with_one_warning(device: torch.device) -> None:
    fast = make(Branchy(), {"x": 0}, mode="full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast.warmup(torch.rand(8, device=device))
    level_costs(fast)
    assert len([w for w in caught if "full graph of size 4 was not captured" in str(w.message)]) == 1
    x = torch.rand(2, device=device)
    assert close(fast(x), x * 2) and fast.stats()["steps"]["full"] == {2: 1}
    x = torch.rand(3, device=device)
    assert close(fast(x), x * 2) and fast.stats()["steps"]["full"] == {2: 1, 8: 1}
    with pytest.raises(RuntimeError):
        make(Branchy(), {"x": 0}, mode="full", on_capture_error="raise").warmup(torch.rand(8, device=device))


def test_sizes_are_timed_at_each_context_and_calls_are_decided_by_theirs(device: torch.device, tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def make_inputs(size: int, key: dict[str, Any], *context: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        asked.append((size, *context))
        return toys.step(size, device), {}

    fast = make(toys.Layers().to(device), cost_table=str(tmp_path / "costs.json"))
    fast.warmup(make_inputs=make_inputs, contexts=[1024, 64])
    assert {(size, 64) for size in (2, 4, 8)} <= set(asked) and {(2,), (4,), (8,)} <= set(asked)
    table = fast._dispatcher.table  # type: ignore[union-attr]
    assert {(mode, size) for _, mode, size in table.other_contexts[64]} >= {(m, s) for m in ("full", "piecewise") for s in (2, 4, 8)}
    level_costs(fast)
    table.other_contexts[64] = {("-", "full", size): 9.0 for size in (2, 4, 8)} | {("-", "piecewise", size): 0.1 for size in (2, 4, 8)}
    table.ms |= {("-", "eager", size): 20.0 for size in (2, 4, 8)}
    fast._dispatcher.changed()  # type: ignore[union-attr]
    call = toys.step(4, device)
    assert close(fast(*call), fast.at(60)(*call))
    assert fast.explain(*call).mode == "full" and fast.at(60).explain(*call).mode == "piecewise"
    assert fast.stats()["steps"]["piecewise"] and fast.stats()["steps"]["full"]
    rows = fast.regret([4], context=64)["-"]
    assert rows[0]["pick"][0] == "piecewise"
    with pytest.raises(ValueError, match=r"context: expected one of \[1024, 64\].*got 5"):
        fast.regret([4], context=5)
    with pytest.raises(ValueError, match="contexts: expected positive numbers, and make_inputs"):
        fast.warmup(*call, contexts=[3])


def test_the_plan_says_where_another_context_picks_otherwise(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"full": 5.0, "piecewise": 1.0, "eager": 9.0}
    usual = {"full": 1.0, "piecewise": 2.0, "eager": 9.0}
    seen: list[int] = []

    def timed(runs: dict[str, Any], device: torch.device, **options: Any) -> dict[str, float]:
        return {mode: (long if seen[-1] else usual)[mode] for mode in runs}

    def make_inputs(size: int, key: dict[str, Any], *context: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        seen.append(len(context))
        return toys.step(size, device), {}

    monkeypatch.setattr(warmup, "interleaved_ms", timed)
    fast = make(toys.Layers().to(device))
    plan = fast.warmup(make_inputs=make_inputs, contexts=[16, 4096])
    assert "at a context of 4096 other picks at 2 (piecewise), 4 (piecewise), 8 (piecewise)" in plan.remarks
    table = fast._dispatcher.table  # type: ignore[union-attr]
    assert not any(mode == "eager" for _, mode, _ in table.other_contexts[4096]), "far from the cheapest: not timed again"
