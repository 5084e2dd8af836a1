"""A step as segments: where it is cut, who owns each address, what a failure leaves behind."""

from __future__ import annotations

import graph_toys as toys
import pytest
import torch
from torch import nn

from runtime.arena import Arena
from runtime.capture import capture_step, make_pool
from runtime.captured_step import Address, CapturedStep, EagerCall
from runtime.graph import CaptureError, Pool
from runtime.inputs import Dim, InputSpec

T = Dim("tokens")


def arena_of(tokens: int, device: torch.device) -> Arena:
    return Arena([InputSpec("ids", (T,), torch.int64), InputSpec("factor", (T,), torch.float32)], {"tokens": tokens}, device)


def load(arena: Arena, tokens: int) -> dict[str, torch.Tensor]:
    ids, factor = toys.step(tokens)
    sizes = {"tokens": tokens}
    return arena.load({"ids": ids, "factor": factor}, sizes, sizes)


def capture(pool: Pool, module: nn.Module, views: dict[str, torch.Tensor], splitting: frozenset[object], **options: object) -> CapturedStep:
    persistent = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad(), pool.session():
        module(**views)
        return capture_step(pool, module, (), views, splitting=splitting, callers=views, persistent=persistent, **options)  # type: ignore[arg-type]


PIECEWISE, FULL = frozenset([toys.OUT, toys.FRESH]), frozenset()


@pytest.mark.parametrize(("splitting", "segments"), [(FULL, 1), (PIECEWISE, 5)], ids=["full", "piecewise"])
def test_replay_equals_the_module_on_new_inputs(device: torch.device, splitting: frozenset[object], segments: int) -> None:
    module, arena, pool = toys.Layers().to(device), arena_of(6, device), make_pool(device)
    step = capture(pool, module, load(arena, 6), splitting)
    assert len(step.segments) == segments
    for _ in range(3):
        views = load(arena, 6)
        step.replay()
        with torch.no_grad():
            assert torch.equal(step.output, module(**views))


def test_owners_of_every_input(device: torch.device) -> None:
    module, arena = toys.Layers().to(device), arena_of(6, device)
    views = load(arena, 6)
    step = capture(make_pool(device), module, views, PIECEWISE)

    def owner(segment: int, of: str) -> Address:
        return next(a for a in step.addresses if a.segment == segment and of in a.input)

    owners = {a.producer: a for a in step.addresses if a.owner == "caller"}
    assert owners["ids"].address == views["ids"].data_ptr() and owners["factor"].address == views["factor"].data_ptr()
    names = {a.producer for a in step.addresses if a.owner == "persistent"}
    assert names == {"table", "linears.0.weight", "linears.0.bias", "linears.1.weight", "linears.1.bias"}
    assert owner(1, "out").owner == "piece" and owner(1, "out").producer.startswith("piece 0")
    assert owner(1, "factor").owner == "caller" and owner(1, "x").owner == "piece"
    written = [a for a in step.addresses if a.segment == 2 and a.owner == "splitting op"]
    assert len(written) == 1 and "scale_rows_out" in written[0].producer and "piece 0" in written[0].producer
    residual = [a for a in step.addresses if a.segment == 4 and a.owner == "piece"]
    assert [a.producer.split(",")[0] for a in residual] == ["piece 2"]


def test_memory_of_a_layer_is_used_again_by_the_next(device: torch.device) -> None:
    """Arguments of splitting ops are not kept allocated, or every layer of a model would have memory of its own."""
    small, large = toys.Layers(2).to(device), toys.Layers(12).to(device)
    pools = make_pool(device), make_pool(device)
    kept = [capture(p, m, load(arena_of(64, device), 64), PIECEWISE) for p, m in zip(pools, (small, large), strict=True)]
    assert pools[1].nbytes() <= pools[0].nbytes() and kept


def test_b016_fresh_output_of_a_splitting_op_is_refused_by_name(device: torch.device) -> None:
    module = toys.Layers(fresh=True).to(device)
    with pytest.raises(CaptureError, match=r"toy\.scale_rows.*new tensors.*fresh_split_outputs"):
        capture(make_pool(device), module, load(arena_of(4, device), 4), PIECEWISE)


def test_b016_fresh_output_is_copied_when_configured(device: torch.device) -> None:
    module, arena, pool = toys.Layers(fresh=True).to(device), arena_of(4, device), make_pool(device)
    step = capture(pool, module, load(arena, 4), PIECEWISE, fresh="copy")
    held = pool.perturb(), [torch.full((4, 4), 7.0, device=device) for _ in range(8)]
    views = load(arena, 4)
    step.replay()
    with torch.no_grad():
        assert torch.equal(step.output, module(**views)) and held
    assert any(a.owner == "splitting op" and "copied" in a.producer for a in step.addresses)


class Untracked(nn.Module):
    """Reads a tensor that is neither an argument nor registered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.holder = [torch.full((4,), 3.0, device=device)]

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return factor[:, None] * self.holder[0]


def test_b018_a_workspace_that_is_replaced_stays_alive_for_the_graph(device: torch.device) -> None:
    module, arena = Untracked(device), arena_of(4, device)
    step = capture(make_pool(device), module, load(arena, 4), FULL)
    assert any(a.owner == "held" for a in step.addresses)
    module.holder[0] = torch.full((4,), 5.0, device=device)  # grown by a larger call: the old one is freed
    junk = [torch.full((4,), float("nan"), device=device) for _ in range(64)]
    views = load(arena, 4)
    step.replay()
    assert torch.equal(step.output, views["factor"][:, None].expand(4, 4) * 3.0) and junk


class Breaks(nn.Module):
    """Fails in the way asked for, after some good work."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        y = factor * 2
        capturing = torch.cuda.is_current_stream_capturing() if y.is_cuda else self.how == "sync" or self.armed
        if self.how == "python" and capturing:
            raise ZeroDivisionError("from the module")
        if self.how == "sync" and y.sum().item() < 0:
            return y
        return y + 1

    armed = False


@pytest.mark.parametrize("how", ["python", "sync"])
def test_b058_a_failed_capture_leaves_pool_and_stream_usable(device: torch.device, how: str) -> None:
    pool, arena = make_pool(device), arena_of(4, device)
    good, bad = toys.Layers().to(device), Breaks(how)
    before = capture(pool, good, load(arena, 4), PIECEWISE)
    views = load(arena, 4)
    with torch.no_grad(), pool.session():
        bad(**views)
        bad.armed = True
        with pytest.raises(ZeroDivisionError if how == "python" else RuntimeError) as caught:
            capture_step(pool, bad, (), views, callers=views)
    assert "from the module" in str(caught.value) or how == "sync"  # the original error, not one of the clean-up
    assert torch.equal(torch.ones(2, device=device) + 1, torch.full((2,), 2.0, device=device))
    after = capture(pool, good, load(arena, 4), FULL)
    views = load(arena, 4)
    for step in (before, after):
        step.replay()
        with torch.no_grad():
            assert torch.equal(step.output, good(**views))


def test_b058_piecewise_failure_after_the_first_break_rolls_back(device: torch.device) -> None:
    class Late(toys.Layers):
        armed = False

        def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            x = super().forward(ids, factor)
            if self.armed:
                raise ZeroDivisionError
            return x

    pool, arena, module = make_pool(device), arena_of(4, device), Late().to(device)
    views = load(arena, 4)
    with torch.no_grad(), pool.session():
        module(**views)
        module.armed = True
        with pytest.raises(ZeroDivisionError):
            capture_step(pool, module, (), views, splitting=PIECEWISE, callers=views)
        module.armed = False
        step = capture_step(pool, module, (), views, splitting=PIECEWISE, callers=views)
    step.replay()
    with torch.no_grad():
        assert torch.equal(step.output, module(**views))


def test_replay_after_reset_is_an_error(device: torch.device) -> None:
    step = capture(make_pool(device), toys.Layers().to(device), load(arena_of(4, device), 4), PIECEWISE)
    step.reset()
    with pytest.raises(CaptureError, match="were reset"):
        step.replay()


def test_b061_every_graph_uses_the_one_pool(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, arena, module = make_pool(device), arena_of(8, device), toys.Layers().to(device)
    made = []
    graph = pool.graph

    def counted() -> object:
        made.append(graph())
        return made[-1]

    monkeypatch.setattr(pool, "graph", counted)
    for tokens in (8, 4, 2):
        capture(pool, module, load(arena, tokens), PIECEWISE)
    assert len(made) == 9 and {id(g._pool) for g in made} == {id(pool)}


def test_two_splitting_ops_in_a_row_leave_no_graph_to_replay(device: torch.device) -> None:
    class Twice(nn.Module):
        def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            x, out = factor[:, None].expand(-1, 4) + 0, factor.new_empty(factor.shape[0], 4)
            torch.ops.toy.scale_rows_out(x, factor, out=out)
            torch.ops.toy.scale_rows_out(x, factor, out=out)
            return out + 1

    arena, module = arena_of(4, device), Twice()
    step = capture(make_pool(device), module, load(arena, 4), PIECEWISE)
    assert [isinstance(s, EagerCall) for s in step.segments] == [False, True, False, True, False]
    assert step.graphs[1].empty
    views = load(arena, 4)
    step.replay()
    assert torch.equal(step.output, module(**views))
