"""``graphed``: a module's calls give the module's results, whatever mode serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import graph_toys as toys
import pytest
import torch
from graph_toys import close, level_costs, make
from torch import nn

from runtime import graphed
from runtime.contract import same_bits

MODES = ("full", "piecewise", "eager", "auto")


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


def test_saved_and_loaded_it_warms_up_anew(device: torch.device, tmp_path: Path) -> None:
    """Like a deep copy: module and settings go along, graphs do not."""
    fast = make(toys.Layers().to(device), pad={"factor": 1}, mode="full")
    ids, factor = toys.step(3, device)
    expected = fast(ids, factor)
    torch.save(fast, tmp_path / "module.pt")
    again = torch.load(tmp_path / "module.pt", weights_only=False)
    assert again.plan is None and same_bits(again(ids, factor), expected)
    assert again.plan.rows and again.config == fast.config


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
    with pytest.raises(ValueError, match="static: no tensor argument 'facter'; did you mean 'factor'"):
        make(toys.Layers().to(device), static=["facter"]).warmup(ids, factor)
    with pytest.raises(TypeError, match=r"static: expected names of arguments, got the text 'factor'; write \['factor'\]"):
        make(toys.Layers().to(device), static="factor")
    with pytest.raises(TypeError, match=r"dynamic: expected arguments and their token dimensions, .* got 'ids'"):
        make(toys.Layers().to(device), "ids")
    with pytest.raises(TypeError, match=r"pad: expected arguments and what their padding holds, .* got \['factor'\]"):
        make(toys.Layers().to(device), pad=["factor"])
    with pytest.raises(ValueError, match="pad: factor: expected a number or \"last\", got 'first'"):
        make(toys.Layers().to(device), pad={"factor": "first"})
    with pytest.raises(ValueError, match="bounds: no dimension in dynamic is named 'seq'; there are tokens"):
        graphed(toys.Layers().to(device), {}, dynamic={"ids": 0, "factor": 0}, bounds={"seq": 3})
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module, got function"):
        graphed(lambda x: x, {})
    with pytest.raises(ValueError, match="expected at least one argument and its token dimension"):
        make(toys.Layers().to(device), {"ids": {}})


def test_addresses_of_the_largest_step_of_each_mode(device: torch.device) -> None:
    fast = make(toys.Layers().to(device))
    assert fast.addresses() == {}
    fast.warmup(*toys.step(8, device))
    tables = fast.addresses()
    assert set(tables) == {"-, full at size 8", "-, piecewise at size 8"}
    assert all(row.verified and row.address for rows in tables.values() for row in rows)
    assert {row.owner for row in tables["-, piecewise at size 8"]} == {"caller", "persistent", "piece", "splitting op"}


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
