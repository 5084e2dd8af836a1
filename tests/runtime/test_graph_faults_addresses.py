"""Public failures of graph runtimes, by their number: addresses, mutations, and values that a capture would freeze."""

from __future__ import annotations

from typing import Any

import graph_toys as toys
import pytest
import torch
from graph_toys import BACKENDS, Cache, close, level_costs, make, served
from torch import nn

from runtime.graph import CaptureError

MODES = ("full", "piecewise", "eager")


# -- ADDR ---------------------------------------------------------------------------------------------------------------------


def test_b016_fresh_result_between_pieces_is_refused_or_copied(device: torch.device) -> None:
    ops = {"splitting_ops": ["toy::scale_rows"]}
    module = toys.Layers(fresh=True).to(device)
    with pytest.warns(UserWarning, match="toy.scale_rows"):
        fast = make(module, mode="piecewise", compile=ops)
        plan = fast.warmup(*toys.step(8, device))
    assert any("returns new tensors" in remark for remark in plan.remarks) and {row.pick for row in plan.rows} == {"eager"}
    fast = make(module, mode="piecewise", compile=ops, fresh_split_outputs="copy")
    fast.warmup(*toys.step(8, device))
    held = []
    for n in (8, 4, 3):
        held.append(torch.full((n, 4), float("nan"), device=device))
        args = toys.step(n, device)
        assert close(fast(*args), module(*args))
    assert served(fast, "piecewise") == 3


def test_b016_the_proof_sees_an_address_that_nobody_refills(device: torch.device) -> None:
    """A piece whose input is made by something that runs neither in a graph nor as a splitting op."""
    from runtime.captured_step import EagerCall
    from runtime.contract import Inputs, prove

    module = toys.Layers(fresh=True).to(device)
    fast = make(module, mode="piecewise", compile={"splitting_ops": ["toy::scale_rows"]}, fresh_split_outputs="copy")
    fast.warmup(*toys.step(4, device))
    steps = fast._steps
    assert steps is not None
    key = next(iter(steps.keys.values()))
    step = key.captured["piecewise", 4].step
    for segment in step.segments:
        if isinstance(segment, EagerCall):
            segment.copies.clear()  # the runtime without the check: the next piece reads the address of today
    step.__post_init__()
    ids, factor = toys.step(4, device)
    given = Inputs({"ids": ids, "factor": factor}, {"tokens": 4}, {"tokens": 4})
    with pytest.raises(CaptureError, match="piecewise at size 4: output 0 of the replay differs"):
        prove(step, key.call, [given], key.arena, key.dims, steps.pool, "piecewise at size 4")


def test_b060_the_outputs_of_all_sizes_share_memory(device: torch.device) -> None:
    """Logits are the largest tensor of many models: one buffer for each size would cost more than the graphs."""

    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, None] * torch.ones(1, 1 << 18, device=x.device)

    taken = {}
    for sizes in ([8], [1, 2, 3, 4, 5, 6, 7, 8]):
        fast = make(Head(), {"x": 0}, mode="full", capture_sizes=sizes, max_num_seqs=8, on_capture_error="raise")
        fast.warmup(torch.rand(8, device=device))
        taken[len(sizes)] = fast.stats()["graph_bytes"]
    assert taken[8] <= 1.25 * taken[1]
    level_costs(fast)
    kept = []
    for n in (8, 1, 5, 8, 3):
        x = torch.rand(n, device=device)
        kept.append((fast(x), x[:, None].expand(n, 1 << 18)))
    assert all(torch.equal(got, want) for got, want in kept) and sum(fast.stats()["steps"]["full"].values()) == 5


def test_b021_an_output_keeps_its_values_over_the_next_replay(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    first_args, second_args = toys.step(4, device), toys.step(4, device)
    first = fast(*first_args)
    fast(*second_args)
    assert close(first, module(*first_args))


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "Parameter", "data", "_parameters", "assign", "submodule", "buffer", "to"])
def test_b023_changed_weights_are_honoured_however_they_change(device: torch.device, mode: str, how: str) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode=mode)
    args = toys.step(4, device)
    fast.warmup(*args)
    level_costs(fast)
    old = fast(*args)
    linear, new = module.linears[0], torch.randn(4, 4, device=device)
    if how == "copy_":
        linear.weight.data.copy_(new)
    elif how == "load_state_dict":
        module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    elif how == "Parameter":
        linear.weight = nn.Parameter(new)
    elif how == "data":
        linear.weight.data = new
    elif how == "_parameters":
        linear._parameters["weight"] = nn.Parameter(new)
    elif how == "assign":
        module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)
    elif how == "submodule":
        module.linears[0] = nn.Linear(4, 4).to(device)
    elif how == "buffer":
        module.table = torch.randn(7, 4, device=device)
    else:
        module.double()
    new_result = fast(*args)
    assert not close(new_result.float(), old.float()) or how == "to"
    assert new_result.dtype == module(*args).dtype and close(new_result, module(*args))
    assert served(fast, mode) == (1 if how == "to" else 2) or how == "to"


def test_b023_without_the_watch_the_graph_stays_on_the_old_weights(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full")
    args = toys.step(4, device)
    old = fast(*args)
    module.linears[0].weight.data = torch.randn(4, 4, device=device)
    fast._steps.persistent.refresh()  # type: ignore[union-attr]  # as if nobody had looked
    assert close(fast(*args), old) and not close(old, module(*args))


def test_b023_a_moved_weight_raises_when_configured(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full", on_moved_weight="raise")
    args = toys.step(4, device)
    fast(*args)
    module.linears[1].weight.data = torch.randn(4, 4, device=device)
    with pytest.raises(CaptureError, match=r"linears\.1\.weight: .*recapture\(\)"):
        fast(*args)
    fast.recapture()
    assert close(fast(*args), module(*args)) and served(fast, "full") == 3


# -- MUT ----------------------------------------------------------------------------------------------------------------------


class Mutates(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        out = torch.empty_like(x)
        torch.ops.toy.scale_rows_out(x, y[:, 0], out=out)
        x.mul_(2)
        return out + y


@pytest.mark.parametrize("compile", BACKENDS, ids=["module", "fx"])
@pytest.mark.parametrize("mode", MODES)
def test_b025_a_mutation_of_an_argument_is_seen_by_the_caller(device: torch.device, mode: str, compile: dict[str, str]) -> None:
    fast = make(Mutates(), {"x": 0, "y": 0}, mode=mode, compile=compile)
    fast.warmup(torch.rand(8, 3, device=device), torch.rand(8, 3, device=device))
    for n in (4, 3, 3, 8):
        x, y = torch.rand(n, 3, device=device), torch.rand(n, 3, device=device)
        x_eager = x.clone()
        want = Mutates()(x_eager, y)
        assert close(fast(x, y), want) and close(x, x_eager)
    assert served(fast, mode) == 4


def test_b026_arguments_that_overlap_give_the_eager_result(device: torch.device) -> None:
    fast = make(Mutates(), {"x": 0, "y": 0}, mode="full")
    fast.warmup(torch.rand(4, 3, device=device), torch.rand(4, 3, device=device))
    base = torch.rand(6, 3, device=device)
    base_eager = base.clone()
    want = Mutates()(base_eager[0:4], base_eager[2:6])
    assert close(fast(base[0:4], base[2:6]), want) and close(base, base_eager)
    assert any("share memory" in reason for reason in fast.stats()["eager_reasons"])
    x, y = torch.rand(4, 3, device=device), torch.rand(4, 3, device=device)
    fast(x, y)
    assert served(fast, "full") == 1


def test_b026_the_same_tensor_twice_is_fine_where_nothing_is_written(device: torch.device) -> None:
    class Product(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return q * k

    fast = make(Product(), {"q": 0, "k": 0}, mode="full")
    x, y = torch.rand(4, device=device), torch.rand(4, device=device)
    fast.warmup(x, y)
    assert close(fast(x, x), x * x) and close(fast(x, y), x * y) and served(fast, "full") == 2


@pytest.mark.parametrize("compile", BACKENDS, ids=["module", "fx"])
@pytest.mark.parametrize("mode", MODES)
def test_b030_a_cache_write_that_no_output_needs_happens_in_every_mode(device: torch.device, mode: str, compile: dict[str, str]) -> None:
    class WriteOnly(Cache):
        def forward(self, x: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            super().forward(x, slots, table)
            return x * 2

    module = WriteOnly().to(device)
    fast = make(module, {"x": {0: "tokens"}, "slots": {0: "tokens"}, "table": {0: "seqs"}}, pad={"slots": -1}, bounds={"seqs": 8},
                mode=mode, compile=compile)  # fmt: skip
    table = torch.zeros(3, 2, dtype=torch.int32, device=device)
    fast.warmup(torch.rand(3, device=device), torch.tensor([-1, -1, -1], device=device), table)
    assert (module.pages == 0).all()
    x = torch.rand(3, device=device)
    fast(x, torch.tensor([3, -1, 8], device=device), table)
    want = torch.zeros(12, device=device)
    want[3], want[8] = x[0], x[2]
    assert torch.equal(module.pages.view(-1), want)


def test_static_arguments_are_used_in_place_and_checked(device: torch.device) -> None:
    """A cache that is passed as an argument is not copied; another one runs eager."""

    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache[: x.shape[0]].add_(x)
            return cache[:2] + 0

    cache, other = torch.zeros(16, device=device), torch.zeros(16, device=device)
    fast = make(Writes(), {"x": 0}, mode="full", static=("cache",), capture_sizes=[4])
    fast.warmup(torch.zeros(4, device=device), cache)
    level_costs(fast)
    fast(torch.ones(4, device=device), cache)
    assert cache.sum().item() == 4 and served(fast, "full") == 1
    fast(torch.ones(4, device=device), other)
    assert other.sum().item() == 4 and cache.sum().item() == 4 and served(fast, "eager") == 1


# -- BAKE ---------------------------------------------------------------------------------------------------------------------


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor, lens: torch.Tensor, window: int = 4) -> torch.Tensor:
        return x * self.scale * lens.clamp(max=window)


def test_b033_values_that_vary_live_on_the_device_and_frozen_ones_are_in_the_key(device: torch.device) -> None:
    module = Windowed()
    fast = make(module, {"x": 0, "lens": 0}, mode="full")
    x = torch.rand(4, device=device)
    fast.warmup(x, torch.ones(4, dtype=torch.int64, device=device), window=4)
    for context in (1, 17, 1000):
        lens = torch.full((4,), context, device=device)
        assert close(fast(x, lens, window=4), module(x, lens, window=4))
    assert served(fast, "full") == 3
    assert close(fast(x, lens, window=8), module(x, lens, window=8)) and served(fast, "eager") == 1
    assert list(fast.stats()["unknown_keys"]) == ["window=8"]


@pytest.mark.parametrize("on_moved", ["recapture", "raise"])
def test_b033_a_changed_attribute_is_noticed(device: torch.device, on_moved: str) -> None:
    module = Windowed()
    fast = make(module, {"x": 0, "lens": 0}, mode="full", on_moved_weight=on_moved)
    x, lens = torch.rand(4, device=device), torch.arange(4, device=device)
    fast(x, lens)
    module.scale = 0.5
    if on_moved == "raise":
        with pytest.raises(CaptureError, match="scale"):
            fast(x, lens)
    else:
        assert close(fast(x, lens), module(x, lens)) and served(fast, "full") == 2


def test_b033_bool_and_int_host_values_are_different_keys(device: torch.device) -> None:
    class Typed(nn.Module):
        def forward(self, x: torch.Tensor, flag: Any) -> torch.Tensor:
            return x * (10 if flag is True else 1)

    fast = make(Typed(), {"x": 0}, mode="full")
    x = torch.rand(4, device=device)
    fast.warmup(x, True)
    assert close(fast(x, True), x * 10) and close(fast(x, 1), x) and close(fast(x, 1.0), x)
    assert served(fast, "full") == 1
