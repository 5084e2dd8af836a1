"""``graphed``: a module's calls give the module's results, whatever mode serves them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import graph_toys as toys
import pytest
import torch
from graph_toys import level_costs, make
from torch import nn

from runtime import graphed, warmup
from runtime.contract import same_bits
from runtime.outputs import Loan, StaleOutputError

MODES = ("full", "piecewise", "eager", "auto")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_every_size_gives_the_modules_result(device: torch.device, mode: str) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode=mode)
    fast.warmup(*toys.step(8, device))
    for n in (1, 2, 3, 4, 5, 8, 9, 3, 1):
        ids, factor = toys.step(n, device)
        assert close(fast(ids, factor), module(ids, factor))
    steps = fast.stats()["steps"]
    if mode in ("full", "piecewise"):
        assert sum(steps[mode].values()) == 8 and steps["eager"] == {9: 1}
    if mode == "eager":
        assert fast.stats()["graph_bytes"] == 0


def test_first_call_without_warmup_warms_up_on_its_arguments(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    ids, factor = toys.step(3, device)
    assert fast.plan is None and close(fast(ids, factor), module(ids, factor))
    assert fast.plan is not None and sum(fast.stats()["steps"]["full"].values()) == 1


def test_state_dict_and_parameters_are_the_modules_own(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module)
    assert list(fast.state_dict()) == list(module.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in module.parameters()]
    assert fast.fresh is False and len(fast.linears) == 2


class Batch(NamedTuple):
    ids: torch.Tensor
    factor: torch.Tensor


class Nested(nn.Module):
    def forward(self, batch: Batch, extra: dict[str, Any], *, scale: float = 1.0, names: tuple[str, ...] = ()) -> dict[str, Any]:
        y = batch.ids[:, None] * batch.factor[:, None] * scale + extra["bias"]
        return {"y": y, "parts": (y.sum(1), extra["bias"] * 2), "tag": "ok", "none": None}


@pytest.mark.parametrize("mode", ["full", "auto"])
def test_nested_arguments_keywords_and_outputs(device: torch.device, mode: str) -> None:
    module = Nested()
    fast = make(module, {"batch.ids": 0, "batch.factor": {0: "tokens"}}, mode=mode)
    bias = torch.randn(3, device=device)
    for n in (5, 2, 8):
        args = (Batch(*toys.step(n, device)), {"bias": bias, "note": "x"})
        got, want = fast(*args, scale=2.0, names=("a",)), module(*args, scale=2.0, names=("a",))
        assert got["tag"] == "ok" and got["none"] is None
        assert close(got["y"], want["y"]) and close(got["parts"][0], want["parts"][0]) and close(got["parts"][1], want["parts"][1])
    assert close(fast(*args, scale=3.0, names=("a",))["y"], module(*args, scale=3.0)["y"])
    assert list(fast.stats()["unknown_keys"].values()) == [1]


class Kinds(nn.Module):
    def forward(self, a: torch.Tensor, /, b: torch.Tensor, *rest: torch.Tensor, c: float = 1.0, **more: torch.Tensor) -> torch.Tensor:
        total = a + b * c
        for t in (*rest, *more.values()):
            total = total + t
        return total


def test_every_kind_of_parameter(device: torch.device) -> None:
    fast = make(Kinds(), {"a": 0, "b": 0, "rest.0": 0, "more.d": 0}, mode="full")
    a, b, c, d = (torch.rand(3, device=device) for _ in range(4))
    assert close(fast(a, b, c, c=2.0, d=d), a + 2 * b + c + d)
    assert sum(fast.stats()["steps"]["full"].values()) == 1


def test_wrong_arguments_raise_what_the_module_raises(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    ids, factor = toys.step(4, device)
    fast.warmup(ids, factor)
    for args, kwargs in (((ids,), {}), ((ids, factor, ids), {}), ((ids, factor), {"ids": ids}), ((ids, factor), {"scale": 1})):
        with pytest.raises(TypeError):
            fast(*args, **kwargs)


def test_b013_sizes_that_disagree_raise_before_anything_runs(device: torch.device) -> None:
    fast = make(toys.Layers().to(device), mode="full")
    fast.warmup(*toys.step(4, device))
    ids, factor = toys.step(4, device)
    with pytest.raises(ValueError, match=r"factor: expected 4 in dimension 0 \(tokens, as ids has it\), got 3"):
        fast(ids, factor[:3])


class Sequences(nn.Module):
    """tokens and seqs: sums rows of each sequence through offsets [seqs + 1]. Padding sequences are empty."""

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
        return (sums[offsets[1:]] - sums[offsets[:-1]]) * weight


SEQS = {"x": {0: "tokens"}, "offsets": {0: "seqs+1"}, "weight": {0: "seqs"}}


def sequences(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return torch.rand(int(offsets[-1]), device=device), offsets, torch.rand(len(lengths), device=device)


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto"])
def test_two_named_sizes_and_offsets_padded_with_their_last(device: torch.device, mode: str) -> None:
    module = Sequences()
    fast = make(module, SEQS, pad={"offsets": "last"}, bounds={"seqs": 3}, mode=mode, compile={"splitting_ops": ["aten::cumsum"]},
                fresh_split_outputs="copy")  # fmt: skip
    fast.warmup(*sequences([2, 5, 1], device))
    for lengths in ([1], [3, 4], [1, 1, 1], [2, 0, 3], [8], [1, 1, 1, 1]):
        args = sequences(lengths, device)
        assert close(fast(*args), module(*args))
    if mode == "full":
        assert fast.stats()["eager_reasons"] == {"no captured size holds 4 tokens (largest: 8)": 1}  # 4 seqs, the bound is 3


def test_make_inputs_for_each_key_and_size(device: torch.device) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
            return x * scale

    asked = []

    def make_inputs(size: int, key: dict[str, Any]) -> Any:
        asked.append((size, key["scale"]))
        return None if key["scale"] == 3 and size > 4 else ((torch.rand(size, device=device),), key)

    fast = make(Scaled(), {"x": 0}, mode="full")
    plan = fast.warmup(make_inputs=make_inputs, keys=[{"scale": 2}, {"scale": 3}])
    assert {(row.key, row.size) for row in plan.rows} == {("scale=2", 2), ("scale=2", 4), ("scale=2", 8), ("scale=3", 2), ("scale=3", 4)}
    level_costs(fast)
    x = torch.rand(3, device=device)
    assert close(fast(x, 2), x * 2) and close(fast(x, scale=3), x * 3) and close(fast(x, 4), x * 4)
    assert fast.stats()["steps"] == {"full": {4: 2}, "piecewise": {}, "eager": {3: 1}}
    with pytest.raises(ValueError, match="asked for 8 tokens, got 3"):
        make(Scaled(), {"x": 0}).warmup(make_inputs=lambda size, key: ((torch.rand(3),), {"scale": 2}))


def test_empty_step_runs_without_a_graph(device: torch.device) -> None:
    fast = make(toys.Layers().to(device), mode="full")
    assert fast(*toys.step(0, device)).shape == (0, 4)
    fast.warmup(*toys.step(4, device))
    assert fast(*toys.step(0, device)).shape == (0, 4)
    assert fast.stats()["steps"]["eager"] == {0: 1}
    with pytest.raises(ValueError, match="at least one token"):
        fast.warmup(*toys.step(0, device))


def test_graphs_off_by_an_empty_list(device: torch.device) -> None:
    fast = make(toys.Layers().to(device), capture_sizes=[])
    plan = fast.warmup(*toys.step(4, device))
    assert any("graphs are off" in remark for remark in plan.remarks)
    assert close(fast(*(args := toys.step(3, device))), fast.eager(*args)) and fast.stats()["graph_bytes"] == 0


def test_full_and_piecewise_may_have_different_sizes(device: torch.device) -> None:
    fast = make(toys.Layers().to(device), full_sizes=[4], capture_sizes=[2, 6])
    fast.warmup(*toys.step(8, device))
    captured = {(mode, size) for key in fast._steps.keys.values() for mode, size in key.captured}  # type: ignore[union-attr]
    assert captured == {("full", 2), ("full", 4), ("full", 8), ("piecewise", 2), ("piecewise", 6), ("piecewise", 8)}  # 2 is max_num_seqs


def test_inputs_on_the_host_are_taken_to_the_device(device: torch.device) -> None:
    module = toys.Layers().to(device)
    for mode in ("full", "eager"):
        fast = make(module, mode=mode)
        fast.warmup(*toys.step(4))
        ids, factor = toys.step(3)
        assert close(fast(ids, factor), module(ids.to(device), factor.to(device)))


def test_another_dtype_or_shape_runs_eager_with_the_reason(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    fast.warmup(*toys.step(4, device))
    ids, factor = toys.step(3, device)
    assert close(fast(ids.int(), factor), module(ids, factor))
    reasons = list(fast.stats()["eager_reasons"])
    assert len(reasons) == 1 and "ids" in reasons[0] and "int32" in reasons[0]


def test_b048_a_wider_table_than_captured_runs_eager(device: torch.device) -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x[:, None] + table

    fast = make(Table(), {"x": 0, "table": 0}, mode="full")
    for width, mode in ((4, "full"), (5, "eager"), (4, "full"), (3, "eager")):
        x, table = torch.rand(3, device=device), torch.rand(3, width, device=device)
        if fast.plan is None:
            fast.warmup(x, table)
        assert fast.explain(x, table).mode == mode
        assert close(fast(x, table), x[:, None] + table)
    assert "table" in fast.explain(x, table).reason


def test_names_that_no_argument_has_are_refused(device: torch.device) -> None:
    ids, factor = toys.step(4, device)
    with pytest.raises(ValueError, match="pad: no tensor argument 'facter'; did you mean 'factor'"):
        make(toys.Layers().to(device), pad={"facter": 1}).warmup(ids, factor)
    with pytest.raises(ValueError, match="did you mean 'ids'"):
        make(toys.Layers().to(device), {"idz": 0}).warmup(ids, factor)
    with pytest.raises(ValueError, match="bounds: no dimension in dynamic is named 'seq'; there are tokens"):
        graphed(toys.Layers().to(device), {}, dynamic={"ids": 0, "factor": 0}, bounds={"seq": 3})
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module, got function"):
        graphed(lambda x: x, {})
    with pytest.raises(ValueError, match="expected at least one argument and its token dimension"):
        make(toys.Layers().to(device), {"ids": {}})


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


class HandsOn(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, a + b


def test_an_input_handed_through_is_not_lent(device: torch.device) -> None:
    """It lies in the input buffers, which the next call fills before it copies what it is given: then it would read itself."""
    fast = make(HandsOn(), {"a": 0, "b": 0}, mode="full", borrow=True, on_capture_error="raise")
    ones, fives = torch.ones(4, device=device), torch.full((4,), 5.0, device=device)
    fast.warmup(ones, ones)
    level_costs(fast)
    again, _ = fast(ones, fives)
    assert fast(fives, again)[1].tolist() == [6.0] * 4


def test_a_numbered_output_is_lent_and_costs_nothing_until_it_is_taken(device: torch.device) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x * 2

    fast = make(Two(), {"x": 0}, mode="full", borrow=(1,), on_capture_error="raise")
    x = torch.arange(6.0, device=device).view(3, 2)
    kept, lent = fast(x)
    assert isinstance(lent, Loan) and torch.equal(lent.take(), x * 2) and lent.take().data_ptr() == lent.take().data_ptr()
    fast(x[:1])
    assert torch.equal(kept, x + 1), "the other output is a copy"
    with pytest.raises(StaleOutputError, match="lent until the next step"):
        lent.take()


@pytest.mark.parametrize("next_size", [4, 2, 8])
def test_borrowed_output_raises_once_overwritten(device: torch.device, next_size: int) -> None:
    """Also by a step of another size: graphs share their memory."""
    module = toys.Layers().to(device)
    fast = make(module, borrow=True, mode="full")
    args = toys.step(4, device)
    fast.warmup(*args)
    level_costs(fast)
    first = fast(*args)
    view = first[:2]
    assert close(first + 0, module(*args)) and type(first + 0) is torch.Tensor
    fast.eager(*toys.step(3, device))
    assert close(first + 0, module(*args))
    fast(*toys.step(next_size, device))
    for stale in (first, view):
        with pytest.raises(StaleOutputError, match="clone it"):
            stale + 0
        with pytest.raises(StaleOutputError):
            print(stale)
    second = fast(*args)
    assert torch.isfinite(second).all()
    fast.reset()
    with pytest.raises(StaleOutputError):
        second.sum()


def test_a_graph_does_overwrite_the_outputs_of_another(device: torch.device) -> None:
    """Why a loan ends with the next step of any size: the memory behind it is shared."""
    fast = make(toys.Layers().to(device), borrow=True, mode="full")
    fast.warmup(*toys.step(8, device))
    key = next(iter(fast._steps.keys.values()))  # type: ignore[union-attr]
    outputs = {size: captured.step.output for (_, size), captured in key.captured.items()}
    kept = {size: output.clone() for size, output in outputs.items()}
    overwritten = set()
    for (_, size), captured in key.captured.items():
        key.arena.views({"tokens": 8})["factor"].fill_(0.25 * size)
        captured.step.replay()
        overwritten |= {other for other in outputs if other != size and not torch.equal(outputs[other], kept[other])}
        kept = {size: output.clone() for size, output in outputs.items()}
    assert overwritten


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


def test_addresses_of_the_largest_step_of_each_mode(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    assert fast.addresses() == {}
    fast.warmup(*toys.step(8, device))
    tables = fast.addresses()
    assert set(tables) == {"-, full at size 8", "-, piecewise at size 8"}
    assert all(row.verified and row.address for rows in tables.values() for row in rows)
    assert {row.owner for row in tables["-, piecewise at size 8"]} == {"caller", "persistent", "piece", "splitting op"}


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


def test_a_module_that_draws_random_numbers_is_not_captured(device: torch.device) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    with pytest.warns(UserWarning, match="draws random numbers"):
        plan = make(Noise(), {"x": 0}, mode="full").warmup(torch.rand(8, device=device))
    assert {row.pick for row in plan.rows} == {"eager"}


def test_module_that_keeps_a_count_of_its_own_is_captured(device: torch.device) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.count.add_(1)
            return x * 2

    module = Counts().to(device)
    fast = make(module, {"x": 0}, mode="full")
    fast.warmup(torch.rand(8, device=device))
    level_costs(fast)
    before, captured = module.count.item(), fast.stats()["graph_bytes"]
    for _ in range(3):
        fast(torch.rand(4, device=device))
    assert module.count.item() == before + 3
    assert fast.stats()["steps"]["full"] == {4: 3} and fast.stats()["graph_bytes"] == captured


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


def stage_and_run(fast: Any, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
    staged = fast.stage({"tokens": len(call[0])})
    for name, tensor in zip(("ids", "factor"), call, strict=True):
        staged.arrays[name][...] = tensor.cpu().numpy()
    return staged()


@pytest.mark.parametrize("check", ["contract", "poison"])
def test_staged_steps_give_the_results_of_calls(device: torch.device, check: str) -> None:
    fast = make(toys.Layers().to(device), check=check, mode="full")
    fast.warmup(*toys.step(8, device))
    level_costs(fast)
    for n in (3, 8, 1, 4, 3):
        call = toys.step(n, device)
        assert same_bits(stage_and_run(fast, call), fast(*call))
    stats = fast.stats()
    assert stats["steps"]["full"] == {2: 2, 4: 6, 8: 2}, "each is counted once"
    assert stats["padding_rows"] == 2 * (1 + 0 + 1 + 0 + 1)


def test_a_step_without_a_graph_is_not_staged(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    assert fast.stage({"tokens": 3}) is None, "before the warm-up"
    fast.warmup(*toys.step(8, device))
    level_costs(fast)
    assert fast.stage({"tokens": 9}) is None and fast.stage({"tokens": 3}, flag=True) is None
    assert sum(sum(counts.values()) for counts in fast.stats()["steps"].values()) == 0, "the call that follows counts"
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fast.stage({"tokens": 3}) is None


@pytest.mark.parametrize("sizes", [{}, {"token": 3}, {"tokens": 3, "seqs": 3}, {"tokens": -1}])
def test_wrong_sizes_of_a_staged_step_are_named(device: torch.device, sizes: dict[str, int]) -> None:
    fast = make(toys.Layers().to(device))
    with pytest.raises(ValueError, match=r"stage: expected a size of 0 or more for each of \['tokens'\], got"):
        fast.stage(sizes)


@pytest.mark.parametrize("borrow", [(1,), (0, 2), (-1,)])
def test_borrowed_outputs_that_are_none_are_named(device: torch.device, borrow: tuple[int, ...]) -> None:
    class WithText(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x + 1, "text"

    fast = make(WithText().to(device), {"x": 0}, borrow=borrow)
    with pytest.raises(ValueError, match=r"borrow: expected numbers of outputs that are tensors, which are \[0\], got"):
        fast.warmup(torch.rand(4, 2, device=device))


def test_a_staged_step_runs_once_and_with_nothing_in_between(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    fast.warmup(*toys.step(8, device))
    level_costs(fast)
    staged = fast.stage({"tokens": 2})
    staged()
    with pytest.raises(RuntimeError, match="has run already"):
        staged()
    first, second = fast.stage({"tokens": 2}), fast.stage({"tokens": 2})
    with pytest.raises(RuntimeError, match="another step of this module has been staged, run"):
        first()  # its arrays are those of the second
    second()
    gone = fast.stage({"tokens": 2})
    fast.recapture()
    with pytest.raises(RuntimeError, match="another step of this module has been staged, run"):
        gone()
    late = fast.stage({"tokens": 2})
    fast.reset()
    with pytest.raises(RuntimeError, match="another step of this module has been staged, run"):
        late()


def test_a_staged_step_follows_what_is_captured_now(device: torch.device) -> None:
    fast = make(toys.Layers().to(device), mode="full", capture_sizes=[4])
    fast.warmup(*toys.step(4, device))
    level_costs(fast)
    call = toys.step(3, device)
    stage_and_run(fast, call)
    steps, dispatcher = fast._steps, fast._dispatcher
    assert steps is not None and dispatcher is not None
    fast.recapture()
    assert same_bits(stage_and_run(fast, call), fast(*call)), "the new graph"
    dispatcher.mode = "eager"
    dispatcher.changed()
    assert fast.stage({"tokens": 3}) is None
    dispatcher.mode = "full"
    dispatcher.changed()
    assert fast.stage({"tokens": 3}) is not None
    steps.drop(next(iter(steps.keys.values())), "full", 4, "a test")
    assert fast.stage({"tokens": 3}) is None, "not the graph that was dropped"


def test_moved_weights_under_a_staged_step_are_captured_again_for_its_inputs(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    fast.warmup(*toys.step(8, device))
    level_costs(fast)
    call = toys.step(3, device)
    staged = fast.stage({"tokens": 3})
    for name, tensor in zip(("ids", "factor"), call, strict=True):
        staged.arrays[name][...] = tensor.cpu().numpy()
    module.linears[0].weight.data = torch.randn(4, 4, device=device)
    assert close(staged(), module(*call))
    assert fast.stats()["steps"]["full"] == {4: 1}


def test_host_values_and_defaults_find_the_key_of_a_staged_step(device: torch.device) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, factor: float = 1.0, *, twice: bool = False) -> torch.Tensor:
            return x * factor * (2 if twice else 1)

    fast = make(Scaled().to(device), {"x": 0})
    for options in ({}, {"factor": 3.0}, {"factor": 3.0, "twice": True}):
        fast.warmup(torch.rand(8, device=device), **options)
    table = fast._dispatcher.table  # type: ignore[union-attr]
    table.ms = {(key, mode, size): size + (mode != "full") for key, mode, size in table.ms}
    fast._dispatcher.changed()  # type: ignore[union-attr]
    for options, times in (({}, 1.0), ({"factor": 3.0}, 3.0), ({"factor": 3.0, "twice": True}, 6.0)):
        staged = fast.stage({"tokens": 4}, **options)
        staged.arrays["x"][...] = [1, 2, 3, 4]
        assert staged().tolist() == [times * v for v in (1, 2, 3, 4)]
    assert fast.stage({"tokens": 4}, factor=3) is None, "another kind of number"


def test_an_expanded_buffer_is_put_back(device: torch.device) -> None:
    """One element behind many, which torch writes in no copy."""

    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.arange(2.0)[:, None].expand(2, 3))
            self.register_buffer("calls", torch.zeros(1).expand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[:1].add_(1)
            return x + self.offset.sum() + self.calls.sum() * 0

    module = Expanded().to(device)
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, device=device))
    level_costs(fast)
    assert module.calls.tolist() == [0.0] * 4 and module.calls.stride() == (0,)
    x = torch.rand(3, device=device)
    assert torch.equal(fast(x), x + 3)
