"""Splitting ops that are bound at capture: what runs between two graphs is a prepared call, not the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import graph_toys as toys
import pytest
import torch
from torch import nn

from runtime.capture import EagerCall
from runtime.graph import CaptureError
from runtime.graphed import GraphedModule
from runtime.workspace import Workspace

NOT_THE_OP = r"piecewise at size 8: toy.scale_rows_out.default: its bound call is not the op: written argument 0"
Bind = Callable[[Any, tuple[Any, ...], dict[str, Any]], "Callable[[], object] | None"]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bind], None]]:
    """Give the toy's splitting op a ``bind``."""
    yield lambda bind: monkeypatch.setattr(toys.OUT, "bind", bind, raising=False)


def _good(calls: list[str]) -> Bind:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        x, factor = args
        product = allocate(x.shape, x.dtype, x.device)

        def repeat() -> None:
            calls.append("repeat")
            torch.mul(x, factor[:, None], out=product)
            kwargs["out"].copy_(product)

        repeat()
        return repeat

    return bind


def _segments(fast: GraphedModule) -> list[EagerCall]:
    steps = fast._steps
    assert steps is not None
    return [s for key in steps.keys.values() for c in key.captured.values() for s in c.step.segments if isinstance(s, EagerCall)]


def test_replay_runs_the_bound_call_and_equals_the_module(device: torch.device, offer: Callable[[Bind], None]) -> None:
    calls: list[str] = []
    offer(_good(calls))
    fast = toys.make(toys.Layers().to(device), mode="piecewise", on_capture_error="raise")
    fast.warmup(*toys.step(4, device))
    toys.level_costs(fast)
    assert _segments(fast) and all(s.bound is not None for s in _segments(fast))
    for n in (1, 3, 4):
        call = toys.step(n, device)
        calls.clear()
        out = fast(*call)
        assert calls == ["repeat"] * 2, "one for each layer"
        assert torch.allclose(out, fast.eager(*call))
    assert fast.stats()["steps"]["piecewise"] == {2: 1, 4: 2}


def test_a_bound_call_that_reads_other_memory_fails_its_proof(device: torch.device, offer: Callable[[Bind], None]) -> None:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        x, factor = args[0], args[1].clone()  # of the day: later steps have other factors

        def repeat() -> None:
            kwargs["out"].copy_(x * factor[:, None])

        repeat()
        return repeat

    offer(bind)
    fast = toys.make(toys.Layers().to(device), mode="piecewise", on_capture_error="raise")
    with pytest.raises(CaptureError, match=NOT_THE_OP):
        fast.warmup(*toys.step(4, device))


def test_a_bound_call_that_keeps_state_in_its_workspace_fails_its_proof(device: torch.device, offer: Callable[[Bind], None]) -> None:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        x, factor = args
        doubled = allocate((1,), x.dtype, x.device).fill_(1.0)  # shared with every other call

        def repeat() -> None:
            kwargs["out"].copy_(x * factor[:, None] * doubled)

        repeat()
        return repeat

    offer(bind)
    fast = toys.make(toys.Layers().to(device), mode="piecewise", on_capture_error="raise")
    with pytest.raises(CaptureError, match=NOT_THE_OP):
        fast.warmup(*toys.step(4, device))


def test_the_proof_leaves_weights_and_static_arguments_alone(device: torch.device, offer: Callable[[Bind], None]) -> None:
    offer(_good([]))

    class Persistent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.factor = nn.Parameter(torch.randn(8, 4)), torch.rand(8)

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(self.rows)
            torch.ops.toy.scale_rows_out(self.rows, cache, out=out)
            return x * out.sum()

    module, cache = Persistent().to(device), torch.rand(8, device=device)
    rows, factors = module.rows.detach().clone(), cache.clone()
    fast = toys.make(module, {"x": 0}, static=("cache",), mode="piecewise", on_capture_error="raise")
    fast.warmup(torch.rand(4, 1, device=device), cache)
    assert all(s.bound is not None for s in _segments(fast))
    assert torch.equal(module.rows, rows) and torch.equal(cache, factors)


def test_an_op_that_cannot_be_bound_runs_as_itself(device: torch.device, offer: Callable[[Bind], None]) -> None:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        toys.OUT(*args, **kwargs)

    offer(bind)
    fast = toys.make(toys.Layers().to(device), mode="piecewise", on_capture_error="raise")
    fast.warmup(*toys.step(4, device))
    assert _segments(fast) and all(s.bound is None for s in _segments(fast))
    call = toys.step(3, device)
    assert torch.allclose(fast(*call), fast.eager(*call))


def test_all_layers_and_sizes_share_one_workspace(device: torch.device, offer: Callable[[Bind], None]) -> None:
    offer(_good([]))
    fast = toys.make(toys.Layers(6).to(device), mode="piecewise", capture_sizes=[2, 4, 8])
    fast.warmup(*toys.step(8, device))
    steps = fast._steps
    assert steps is not None
    assert steps.pool.workspace.nbytes() == 8 * 4 * 4, "what the largest size needs, once"
    with_workspace = steps.graph_bytes
    fast.reset()
    assert steps.pool.workspace.nbytes() == 0 and steps.graph_bytes < with_workspace


def test_temporaries_of_one_call_do_not_overlap(device: torch.device) -> None:
    workspace = Workspace()
    take = workspace.call()
    tensors = [take(shape, dtype, device) for shape, dtype in (((3, 5), torch.float32), ((7,), torch.int64), ((0,), torch.int32))]
    tensors[0].fill_(1.0)
    tensors[1].fill_(2)
    assert tensors[0].eq(1).all() and tensors[0].shape == (3, 5) and tensors[1].dtype == torch.int64
    held = workspace.nbytes()
    again = workspace.call()
    assert [again(t.shape, t.dtype, device).data_ptr() for t in tensors[:2]] == [t.data_ptr() for t in tensors[:2]]
    assert workspace.nbytes() == held
    larger = workspace.call()((100, 100), torch.float32, device)
    assert larger.data_ptr() not in [t.data_ptr() for t in tensors]
    tensors[0].fill_(3.0)  # a bound call keeps what it took, however the workspace grows
    assert tensors[0].eq(3).all()
