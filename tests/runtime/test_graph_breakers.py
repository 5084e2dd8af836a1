"""Changes and modules that once made a graphed module give wrong answers without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runtime.graphed import GraphedModule, graphed


def made(module: nn.Module, dynamic: Any = None, **more: Any) -> GraphedModule:
    config = {
        "graph": {"max_tokens": 8, "capture_sizes": [2, 4, 8], "mode": "full"},
        "compile": {"backend": "eager"},
        "scheduler": {"max_num_seqs": 2},
    }
    return graphed(module, config, dynamic=dynamic or {"x": 0}, **more)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.scale: Any = 2.0
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) @ self.weight * self.scale


def same_as_module(fast: GraphedModule, x: torch.Tensor) -> None:
    torch.testing.assert_close(fast(x), fast.eager(x), rtol=0, atol=1e-5)


def set_in(layer: str, name: str, value: object) -> Callable[[Net], None]:
    return lambda net: setattr(net.get_submodule(layer), name, value)


def weight_transposed(net: Net) -> None:
    net.weight.data = net.weight.data.t()


def weight_registered_transposed(net: Net) -> None:
    net.weight = nn.Parameter(net.weight.data.t())


def layer_without_weights_replaced(net: Net) -> None:
    net.layers[1] = nn.Tanh()


def hook_added(net: Net) -> None:
    net.layers[1].register_forward_hook(lambda module, args, output: output + 1)


def forward_replaced(net: Net) -> None:
    net.layers[1].forward = torch.tanh  # type: ignore[method-assign]


def value_and_registration(net: Net) -> None:
    net.scale = 5.0
    net.weight = net.weight


CHANGES = {
    "eval": lambda net: net.layers[0].eval(),
    "eps": set_in("layers.0", "eps", 0.5),
    "slope": set_in("layers.1", "negative_slope", 0.5),
    "softmax-dim": set_in("layers.2", "dim", 1),
    "transposed": weight_transposed,
    "registered-transposed": weight_registered_transposed,
    "layer": layer_without_weights_replaced,
    "hook": hook_added,
    "forward": forward_replaced,
    "value-and-registration": value_and_registration,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_module_reaches_its_graphs(change: Callable[[Net], None]) -> None:
    net = Net(nn.BatchNorm1d(4, momentum=0.5).eval(), nn.LeakyReLU(0.1), nn.Softmax(-1 if change is not CHANGES["softmax-dim"] else 2))
    x = torch.randn(4, 4) if change is not CHANGES["softmax-dim"] else torch.randn(4, 4, 4)
    if change is CHANGES["softmax-dim"]:
        net.layers[0] = nn.LayerNorm(4)
    if change is CHANGES["eval"]:
        net.layers[0] = nn.Dropout(0.5)
        net.layers.train()
        net.layers[0].p = 1.0  # everything is dropped: not random
    fast = made(net)
    before = fast(x)
    change(net)
    same_as_module(fast, x)
    assert not torch.equal(fast(x), before), "the change changes nothing, so this tests nothing"


def test_eval_and_attributes_of_the_wrapper_reach_the_module() -> None:
    net = Net(nn.Dropout(1.0))
    fast = made(net)
    x = torch.randn(4, 4)
    assert fast(x).eq(0).all()
    assert fast.eval() is fast
    assert not net.training
    assert not net.layers[0].training
    assert not fast.training
    same_as_module(fast, x)
    assert fast(x).ne(0).any()
    fast.scale = 7
    assert net.scale == 7
    torch.testing.assert_close(fast(x), x @ net.weight * 7)


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1, 1.0)])
def test_numbers_that_python_takes_as_equal(first: Any, second: Any) -> None:
    class Divide(nn.Module):
        scale: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, 3.0) / self.scale if isinstance(self.scale, float) else x.to(torch.int64) * self.scale

    net = Divide()
    net.scale = first
    fast = made(net)
    x = torch.ones(3, 4)
    fast(x)
    net.scale = second
    assert torch.equal(fast(x), net(x))
    assert fast(x).dtype == net(x).dtype


def test_signed_zero_is_another_host_value() -> None:
    class Divide(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return 1.0 / torch.full_like(x, by)

    fast = made(Divide())
    x = torch.ones(4, 4)
    assert fast(x, 0.0).gt(0).all()
    assert fast(x, -0.0).lt(0).all()


def test_static_memory_of_another_dtype() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return x + cache

    fast = made(Add(), static=("cache",))
    x, cache = torch.ones(4, 4), torch.ones(4)
    fast(x, cache)
    other = cache.view(torch.int32)
    assert torch.equal(fast(x, other), x + other)


def test_forward_and_deepcopy_and_unknown_argument() -> None:
    fast = made(Net(nn.Tanh()))
    x = torch.randn(3, 4)
    assert torch.equal(fast.forward(x), fast(x))
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.module.weight.zero_()
    assert twin(x).eq(0).all()
    same_as_module(fast, x)
    with pytest.raises(ValueError, match="dynamic: `x` is not an argument of forward; it has \\['input'\\]"):
        made(nn.Linear(4, 4)).warmup(torch.ones(4, 4))


# -- the proof of padding -----------------------------------------------------------------------------------------------------


class RowsOut(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 1, x.shape[0]


class BranchOnRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x * 3


class BranchOnOneRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 1 else x * 3


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += x.shape[0]
        self.total += (x + 1).sum(0)
        return x + 1


@pytest.mark.parametrize("module", [RowsOut, BranchOnRows, BranchOnOneRow])
def test_what_follows_the_number_of_rows_is_not_served_padded(module: type[nn.Module]) -> None:
    fast = made(module())
    x = torch.randn(8, 4)
    fast.warmup(x)
    for n in (3, 1, 4, 2, 5, 8):
        got, want = fast(x[:n]), fast.eager(x[:n])
        if isinstance(want, tuple):
            assert got[1] == want[1]
            got, want = got[0], want[0]
        assert torch.equal(got, want), n
    assert any("at exactly their size only" in text for text in fast.plan.remarks)  # type: ignore[union-attr]
    assert fast.explain(x).mode == "full"


def test_padding_rows_do_not_reach_state_and_warmup_leaves_it() -> None:
    fast, plain = made(Count()), Count()
    x = torch.randn(8, 4)
    fast.warmup(x)
    assert fast.n == 0
    assert fast.total.eq(0).all()
    for n in (3, 8, 1, 4, 2, 3):
        fast(x[:n])
        plain(x[:n])
        assert fast.n == plain.n, n
        torch.testing.assert_close(fast.total, plain.total)


@pytest.mark.parametrize("which", ["amax", "amin"])
def test_extremes_over_rows_of_an_integer_input(which: str) -> None:
    class Extreme(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return x * getattr(torch, which)(ids)

    fast = made(Extreme(), {"x": 0, "ids": 0})
    x = torch.randn(8, 4)
    fast.warmup(x, torch.tensor([7, 1, 2, 5, 3, 5, 2, 7]))
    for n in (3, 5, 7):
        ids = torch.arange(1, n + 1) if which == "amin" else -torch.arange(1, n + 1)
        assert torch.equal(fast(x[:n], ids), fast.eager(x[:n], ids))
