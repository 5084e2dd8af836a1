"""Splitting ops that are bound at capture: what runs between two graphs is a prepared call, not the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import graph_toys as toys
import pytest
import torch
from torch import nn

from runtime import warmup
from runtime.captured_step import EagerCall
from runtime.contract import same_bits
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


def _refused(bind: Bind, device: torch.device, offer: Callable[[Bind], None]) -> None:
    offer(bind)
    fast = toys.make(toys.Layers().to(device), mode="piecewise", on_capture_error="raise")
    with pytest.raises(CaptureError, match=NOT_THE_OP):
        fast.warmup(*toys.step(4, device))


def test_a_bound_call_that_reads_other_memory_fails_its_proof(device: torch.device, offer: Callable[[Bind], None]) -> None:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        x, factor = args[0], args[1].clone()  # of the day: later steps have other factors

        def repeat() -> None:
            kwargs["out"].copy_(x * factor[:, None])

        repeat()
        return repeat

    _refused(bind, device, offer)


def test_a_bound_call_that_keeps_state_in_its_workspace_fails_its_proof(device: torch.device, offer: Callable[[Bind], None]) -> None:
    def bind(allocate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
        x, factor = args
        doubled = allocate((1,), x.dtype, x.device).fill_(1.0)  # shared with every other call

        def repeat() -> None:
            kwargs["out"].copy_(x * factor[:, None] * doubled)

        repeat()
        return repeat

    _refused(bind, device, offer)


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


def test_a_device_is_the_same_however_it_is_named() -> None:
    """A tensor on "cuda" says "cuda:0", and one on "cpu:0" says "cpu": asked for by the other name, each call made a new block."""
    workspace = Workspace()
    addresses = {workspace.call()((64,), torch.float32, torch.device(name)).data_ptr() for name in ("cpu", "cpu:0", "cpu")}
    assert len(addresses) == 1 and workspace.nbytes() == 256


class Attention(nn.Module):
    """q [tokens, 2, 16] is scaled, attends to the cache, and is scaled again. One sequence a token."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(6, 4, 1, 16, device=device))

    def forward(self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
        q = q * 2
        out = torch.empty_like(q)
        torch.ops.tkernels.paged_attention_out(
            q, self.cache, self.cache, block_table, seq_lens, cu_seqlens_q, 0.25, 1, True, 0, 0.0, None, None, None, 1.0, out, None
        )
        return out + q


@pytest.mark.interpreted
def test_attention_between_two_graphs_is_bound(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves, as prepared launches, against the same callable not captured."""
    import tkernels  # noqa: F401

    monkeypatch.setattr(warmup, "interleaved_ms", lambda runs, device, **options: dict.fromkeys(runs, 1.0))  # it takes its time
    dims = {"q": {0: "tokens"}, "block_table": {0: "tokens"}, "seq_lens": {0: "tokens"}, "cu_seqlens_q": {0: "tokens+1"}}
    fast = toys.make(
        Attention(device), dims, pad={"cu_seqlens_q": "last"}, mode="piecewise", max_tokens=2, capture_sizes=[2], on_capture_error="raise",
        compile={"splitting_ops": ["tkernels::paged_attention_out"], "split": "fx"},
    )  # fmt: skip

    def call(n: int) -> tuple[torch.Tensor, ...]:
        table, lens = torch.randint(0, 6, (n, 2), dtype=torch.int32), torch.randint(1, 9, (n,), dtype=torch.int32)
        return tuple(t.to(device) for t in (torch.randn(n, 2, 16), table, lens, torch.arange(n + 1, dtype=torch.int32)))

    fast.warmup(*call(2))
    assert [s.bound is not None for s in _segments(fast)] == [True]
    for n in (2, 1):
        inputs = call(n)
        assert same_bits(fast(*inputs), fast.eager(*inputs))
    assert fast.stats()["steps"]["piecewise"] == {2: 2}
