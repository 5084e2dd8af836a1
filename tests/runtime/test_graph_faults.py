"""Public failures of graph runtimes, by their number: padding, dispatch, start-up.

Where it is short, a test also shows that the fault is real without the check.
"""

from __future__ import annotations

import gc
from typing import Any

import graph_toys as toys
import pytest
import torch
from graph_toys import BACKENDS, Cache, close, level_costs, make, served
from torch import nn

from runtime.contract import roundings_of
from runtime.graph import IMMORTAL

# -- PAD ----------------------------------------------------------------------------------------------------------------------


class AttentionLike(nn.Module):
    """The op leaves rows past ``count`` unwritten. mixes: a later op looks at all rows."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.scale_first_rows_out(x, count, out=out)
        return out / out.amax() if self.mixes else out + 1


@pytest.mark.parametrize("mixes", [False, True])
def test_b001_unwritten_tail_rows_never_reach_real_rows(device: torch.device, mixes: bool) -> None:
    module = AttentionLike(mixes)
    fast = make(module, {"x": 0}, mode="piecewise", compile={"splitting_ops": ["toy::scale_first_rows_out"]})

    def inputs(size: int, key: dict[str, Any]) -> Any:
        return (torch.rand(size, 3, device=device), torch.tensor(size, device=device)), {}

    plan = fast.warmup(make_inputs=inputs)
    level_costs(fast)
    for n in (3, 4, 7):
        (x, count), _ = inputs(n, {})
        assert torch.equal(fast(x, count), module(x, count))
    padded = [c for c in fast._dispatcher.padding.values() if c]  # type: ignore[union-attr]
    assert bool(padded) != mixes
    assert any("exactly their size" in remark for remark in plan.remarks) == mixes


class Mean(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids[:, None].float() * torch.ones(1, 2, device=ids.device)
        return x - x.mean(0)


def test_b001_integer_inputs_alone_show_mixed_rows_too(device: torch.device) -> None:
    fast = make(Mean(), {"ids": 0}, mode="full")
    fast.warmup(torch.arange(1, 9, device=device))
    level_costs(fast)
    ids = torch.tensor([5, 2, 3], device=device)
    assert torch.equal(fast(ids), Mean()(ids)) and served(fast, "eager") == 1
    ids = torch.tensor([5, 2, 3, 9], device=device)
    assert torch.equal(fast(ids), Mean()(ids)) and fast.stats()["steps"]["full"] == {4: 1}


class Branching(nn.Module):
    """Another formula for few rows, whose result is a little different: far more than a GEMM of another shape makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * (1 + 1e-4) if x.shape[0] < 3 else y


def test_b001_a_small_branch_on_the_number_of_rows_shows(device: torch.device) -> None:
    module = Branching().to(device)
    fast = make(module, {"x": 0}, mode="full")
    plan = fast.warmup(torch.rand(8, 3, device=device))
    assert any("exactly their size" in remark for remark in plan.remarks)
    x = torch.rand(1, 3, device=device)
    assert torch.equal(fast(x), module(x))


def test_deep_modules_may_round_more() -> None:
    assert roundings_of(Mean()) == 64 and roundings_of(Branching()) == 80
    stacked = nn.Module()
    stacked.experts, stacked.norm = nn.Parameter(torch.zeros(2, 5, 4, 4)), nn.Parameter(torch.zeros(4))
    assert roundings_of(stacked) == 64 + 16 * 10


class MeanLength(nn.Module):
    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return x + lens.float().mean()


def test_b001_rows_mixed_over_another_named_size_are_not_padded_in_it(device: torch.device) -> None:
    module = MeanLength()
    fast = make(module, {"x": {0: "tokens"}, "lens": {0: "seqs"}}, mode="full")
    fast.warmup(torch.rand(8, 3, device=device), torch.arange(1, 9, device=device))
    level_costs(fast)
    x = torch.rand(4, 3, device=device)
    for lens, mode in (([3, 5], "eager"), ([1, 2, 3, 5], "full")):
        given = torch.tensor(lens, device=device)
        before = served(fast, mode)
        assert torch.equal(fast(x, given), module(x, given)) and served(fast, mode) == before + 1


def test_b003_a_small_batch_after_a_large_one_writes_no_page_of_others(device: torch.device) -> None:
    module = Cache().to(device)
    fast = make(
        module, {"x": {0: "tokens"}, "slots": {0: "tokens"}, "table": {0: "seqs"}}, pad={"slots": -1}, bounds={"seqs": 8}, mode="full"
    )

    def step(slots: list[int]) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([[s // 2, 0] for s in slots], dtype=torch.int32, device=device)
        return torch.rand(len(slots), device=device) + 1, torch.tensor(slots, device=device), table

    fast.warmup(*step([2, 4, 6, 8]))
    level_costs(fast)
    fast(*step([2, 4, 6, 8]))
    before = module.pages.clone()
    fast(*step([10]))
    changed = (module.pages != before).nonzero().tolist()
    assert changed == [[5, 0]]
    # and without padding of the slots, rows left from the step before do write
    views = next(iter(fast._steps.keys.values())).arena.views({"tokens": 2, "seqs": 2})  # type: ignore[union-attr]
    assert views["slots"].tolist() == [10, -1]


def test_b005_request_buffers_hold_the_largest_bucket_not_the_request_limit(device: torch.device) -> None:
    class Requests(nn.Module):
        def forward(self, x: torch.Tensor, lens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return x + lens + offsets[1:]

    fast = make(Requests(), {"x": {0: "tokens"}, "lens": {0: "seqs"}, "offsets": {0: "seqs+1"}}, pad={"offsets": "last"},
                mode="full", max_num_seqs=5, capture_sizes=[1, 2, 4, 8])  # fmt: skip
    args = torch.rand(5, device=device), torch.rand(5, device=device), torch.arange(6, device=device)
    fast.warmup(*args)
    level_costs(fast)
    fast.plan.rows.clear()  # type: ignore[union-attr]
    key = next(iter(fast._steps.keys.values()))  # type: ignore[union-attr]
    key.captured.pop(("full", 5))  # the request limit is captured by itself; take it away so that 8 must serve
    fast._dispatcher.keys["-"].graphs.pop(("full", 5))  # type: ignore[union-attr]
    fast._dispatcher.changed()  # type: ignore[union-attr]
    assert close(fast(*args), Requests()(*args)) and fast.stats()["steps"]["full"] == {8: 1}
    views = key.arena.views({"tokens": 8, "seqs": 8})
    assert views["lens"].shape == (8,) and views["offsets"].shape == (9,)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_b006_all_inputs_are_padded_before_anything_is_derived_from_them(device: torch.device, mode: str) -> None:
    seen: list[tuple[int, ...]] = []

    class Metadata(nn.Module):
        def forward(
            self, ids: torch.Tensor, factor: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor, slots: torch.Tensor
        ) -> torch.Tensor:
            seen.append((ids.shape[0], offsets.shape[0], table.shape[0], slots.shape[0]))
            x, out = factor[:, None] * 2, torch.empty(ids.shape[0], 1, device=ids.device)
            torch.ops.toy.scale_rows_out(x, factor, out=out)
            lengths = offsets[1:] - offsets[:-1]
            return out[: table.shape[0], 0] * lengths + table[:, 0]

    dynamic = {"ids": {0: "tokens"}, "factor": {0: "tokens"}, "slots": {0: "tokens"}, "offsets": {0: "seqs+1"}, "table": {0: "seqs"}}
    fast = make(Metadata(), dynamic, pad={"slots": -1, "offsets": "last"}, bounds={"seqs": 4}, mode=mode)

    def decode(n: int) -> tuple[torch.Tensor, ...]:
        return (torch.arange(n, device=device), torch.rand(n, device=device), torch.arange(n + 1, device=device),
                torch.rand(n, 2, device=device), torch.arange(n, device=device))  # fmt: skip

    fast.warmup(*decode(4))
    level_costs(fast)
    args = decode(3)
    assert close(fast(*args), Metadata()(*args)) and fast.stats()["steps"][mode] == {4: 1}
    at_4 = {shapes for shapes in seen if shapes[0] == 4}
    assert at_4 == {(4, 5, 4, 4)}
    views = next(iter(fast._steps.keys.values())).arena.views({"tokens": 4, "seqs": 4})  # type: ignore[union-attr]
    assert views["offsets"].tolist() == [0, 1, 2, 3, 3] and views["slots"].tolist() == [0, 1, 2, -1]


def test_b010_b011_capture_and_padded_replay_leave_reserved_memory_as_it_is(device: torch.device) -> None:
    module = Cache().to(device)
    fast = make(module, {"x": {0: "tokens"}, "slots": {0: "tokens"}, "table": {0: "seqs"}}, pad={"slots": -1}, bounds={"seqs": 8},
                mode="full", check="poison")  # fmt: skip
    module.pages[0] = 7.0

    def inputs(size: int, key: dict[str, Any]) -> Any:  # representative steps write nowhere
        return (
            torch.rand(size, device=device),
            torch.full((size,), -1, device=device),
            torch.ones(size, 2, dtype=torch.int32, device=device),
        ), {}

    fast.warmup(make_inputs=inputs)
    assert (module.pages[0] == 7).all() and (module.pages[1:] == 0).all()
    fast(torch.rand(3, device=device), torch.tensor([4, 6, 8], device=device), torch.ones(3, 2, dtype=torch.int32, device=device))
    assert (module.pages[0] == 7).all() and module.pages.isfinite().all() and (module.pages[[2, 3, 4], 0] > 0).all()


class Optional_(nn.Module):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if bias is None else x * 2 + bias


def test_b013_a_missing_optional_input_does_not_keep_its_last_value(device: torch.device) -> None:
    fast = make(Optional_(), {"x": 0, "bias": 0}, mode="full")
    x, bias = torch.rand(4, device=device), torch.rand(4, device=device)
    fast.warmup(x, bias)
    assert close(fast(x, bias), x * 2 + bias)
    assert close(fast(x), x * 2) and served(fast, "eager") == 1  # None was never captured
    fast.warmup(x)
    assert close(fast(x), x * 2) and served(fast, "full") == 2
    assert close(fast(x, bias), x * 2 + bias)


# -- DISPATCH -----------------------------------------------------------------------------------------------------------------


def test_b041_sizes_that_cannot_occur_with_a_key_are_not_captured(device: torch.device) -> None:
    """Three tokens for each sequence: only multiples of three are decode steps."""

    class Decode(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, query_len: int) -> torch.Tensor:
            return (x.view(-1, query_len) * weight[:, None]).view(-1) if query_len > 1 else x

    def inputs(size: int, key: dict[str, Any]) -> Any:
        if size % 3:
            return None
        return (torch.rand(size, device=device), torch.rand(size // 3, device=device), 3), {}

    fast = make(Decode(), {"x": {0: "tokens"}, "weight": {0: "seqs"}}, mode="full", capture_sizes=[1, 2, 4, 6], max_tokens=9,
                max_num_seqs=3, bounds={"seqs": lambda tokens, host: tokens // host["query_len"]})  # fmt: skip
    plan = fast.warmup(make_inputs=inputs)
    assert [row.size for row in plan.rows] == [3, 6, 9] and not plan.remarks
    level_costs(fast)
    for tokens, size in ((6, 6), (3, 3), (9, 9)):
        (x, weight, query_len), _ = inputs(tokens, {})
        assert close(fast(x, weight, query_len), Decode()(x, weight, query_len))
        assert fast.stats()["steps"]["full"][size] == 1


@pytest.mark.parametrize(
    "name", ["toy.scale_rows_out", "toy::scale_rows_out", "toy::scale_rows_out.default", "torch.ops.toy.scale_rows_out"]
)
@pytest.mark.parametrize("compile", BACKENDS, ids=["module", "fx"])
def test_b043_every_spelling_of_a_splitting_op_cuts(device: torch.device, name: str, compile: dict[str, str]) -> None:
    fast = make(toys.Layers(2).to(device), mode="piecewise", compile={"splitting_ops": [name], **compile})
    fast.warmup(*toys.step(8, device))
    key = next(iter(fast._steps.keys.values()))  # type: ignore[union-attr]
    assert len(key.captured["piecewise", 8].step.segments) == 2 * 2 + 1


def test_b043_a_misspelt_op_raises_and_one_that_is_never_called_is_said(device: torch.device) -> None:
    with pytest.raises(ValueError, match="toy::scale_rows_ou"):
        make(toys.Layers().to(device), compile={"splitting_ops": ["toy::scale_rows_ou"]}).warmup(*toys.step(4, device))
    fast = make(toys.Layers().to(device), compile={"splitting_ops": ["toy::scale_rows"]})
    plan = fast.warmup(*toys.step(4, device))
    assert any("no splitting op is called (toy::scale_rows)" in remark for remark in plan.remarks)
    assert all(row.piecewise_ms is None and row.full_ms is not None for row in plan.rows)


# -- START --------------------------------------------------------------------------------------------------------------------


def test_b065_the_collector_runs_at_most_once_in_a_warmup(device: torch.device) -> None:
    runs: list[str] = []
    watch = lambda phase, info: runs.append(phase) if phase == "start" and info["generation"] == 2 else None
    gc.callbacks.append(watch)
    try:
        make(toys.Layers(4).to(device), capture_sizes=list(range(1, 9)), mode="piecewise").warmup(*toys.step(8, device))
    finally:
        gc.callbacks.remove(watch)
    assert len(runs) <= 2 and gc.isenabled() and gc.get_freeze_count() < IMMORTAL  # ours, and perhaps one of Python's own outside captures
