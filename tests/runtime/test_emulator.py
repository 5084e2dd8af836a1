"""The CPU emulator mirrors what a device's graph does, and refuses what a device refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from runtime.emulator import EmulatedGraph, EmulatedPool
from runtime.graph import IMMORTAL, CaptureError

CPU = torch.device("cpu")


def capture(pool: EmulatedPool, fn: Callable[..., object], *args: object) -> tuple[EmulatedGraph, object]:
    graph = pool.graph()
    with torch.no_grad(), pool.session():
        graph.capture_begin()
        output = fn(*args)
        graph.capture_end()
    return graph, output


def test_replay_reads_new_values_at_the_old_addresses() -> None:
    module, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(3, 4)
    graph, output = capture(EmulatedPool(CPU), lambda: torch.cat(module(x).chunk(2, -1)).sigmoid())
    assert isinstance(output, torch.Tensor)
    address = output.data_ptr()
    x.copy_(torch.randn(3, 4))
    graph.replay()
    assert output.data_ptr() == address
    assert torch.equal(output, torch.cat(module(x).chunk(2, -1)).sigmoid())


def test_rebound_input_is_ignored_as_on_a_device() -> None:
    holder = {"x": torch.ones(3)}
    graph, output = capture(EmulatedPool(CPU), lambda: holder["x"] * 2)
    holder["x"] = torch.full((3,), 5.0)
    graph.replay()
    assert torch.equal(output, torch.full((3,), 2.0))


def test_data_swap_of_a_parameter_is_ignored_as_on_a_device() -> None:
    weight = nn.Parameter(torch.ones(3))
    graph, output = capture(EmulatedPool(CPU), lambda: weight * 2)
    weight.data = torch.full((3,), 5.0)
    graph.replay()
    assert torch.equal(output, torch.full((3,), 2.0))


def test_host_branch_is_frozen() -> None:
    flag = [True]
    x = torch.ones(2)
    graph, output = capture(EmulatedPool(CPU), lambda: x + 1 if flag[0] else x - 1)
    flag[0] = False
    graph.replay()
    assert torch.equal(output, torch.full((2,), 2.0))


def test_in_place_ops_act_on_each_replay() -> None:
    counter = torch.zeros(())
    graph, _ = capture(EmulatedPool(CPU), lambda: counter.add_(1))
    for _ in range(3):
        graph.replay()
    assert counter.item() == 4  # once when captured, and three replays


def test_outputs_that_share_a_storage_still_share_it() -> None:
    x = torch.randn(6)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y[:3], y[3:]

    graph, (a, b) = capture(EmulatedPool(CPU), both)  # type: ignore[misc]
    x.copy_(torch.randn(6))
    graph.replay()
    assert torch.equal(torch.cat([a, b]), x + 1)
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x),
    "format": lambda x: f"{x.sum():.2f}",
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.__setitem__(x > 0, torch.ones(2)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 1, 1])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sync_is_refused_and_poisons_the_capture(name: str) -> None:
    pool, x = EmulatedPool(CPU), torch.tensor([1.0, -1.0, 2.0, -3.0])
    graph = pool.graph()
    with torch.no_grad(), pool.session():
        graph.capture_begin()
        with pytest.raises(CaptureError, match="graph cannot hold"):
            REFUSED[name](x + 0)
        x + 1  # a module that catches the error goes on; the capture is dead nevertheless
        with pytest.raises(CaptureError, match="had died before"):
            graph.capture_end()
    with pytest.raises(CaptureError, match="holds no capture"):
        graph.replay()
    assert capture(pool, lambda: x * 2)  # the pool is usable


def test_syncs_between_captures_are_allowed() -> None:
    pool, x = EmulatedPool(CPU), torch.ones(2)
    with pool.session():
        assert x.sum().item() == 2 and x.tolist() == [1, 1] and "tensor" in str(x)


def test_filling_by_mask_is_not_a_sync() -> None:
    x = torch.tensor([1.0, -1.0])

    def relu() -> torch.Tensor:
        y = x.clone()
        y[y < 0] = 0.0
        return y

    graph, output = capture(EmulatedPool(CPU), relu)
    x.copy_(torch.tensor([-5.0, 3.0]))
    graph.replay()
    assert torch.equal(output, torch.tensor([0.0, 3.0]))


def test_a_custom_op_may_read_values_inside() -> None:
    """What an op does inside is its own: the interpreter of kernels reads tensors on the host all the time."""
    import graph_toys  # noqa: F401

    x, count = torch.ones(3, 2), torch.tensor(2)

    def run() -> torch.Tensor:
        out = torch.zeros(3, 2)
        torch.ops.toy.scale_first_rows_out(x, count, out=out)
        return out

    graph, output = capture(EmulatedPool(CPU), run)
    x.fill_(4)
    graph.replay()
    assert torch.equal(output[:2], torch.full((2, 2), 8.0))


def test_memory_of_dead_intermediates_is_used_again() -> None:
    pool, x = EmulatedPool(CPU), torch.randn(64)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = y + 1
        return y

    _, output = capture(pool, chain)
    assert pool.nbytes() <= 3 * x.nbytes
    assert output is not None


def test_a_live_output_is_not_overwritten_by_another_capture() -> None:
    pool, x = EmulatedPool(CPU), torch.ones(16)
    first, a = capture(pool, lambda: x * 2)
    second, b = capture(pool, lambda: x * 3)
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    assert a.data_ptr() != b.data_ptr()
    first.replay(), second.replay()
    assert torch.equal(a, x * 2) and torch.equal(b, x * 3)


def test_outputs_outlive_the_pool() -> None:
    pool, x = EmulatedPool(CPU), torch.ones(1 << 16)
    graph, output = capture(pool, lambda: x * 2)
    graph.reset()
    pool.reset()
    del pool
    gc.collect()
    junk = [torch.zeros(1 << 16) for _ in range(4)]
    assert isinstance(output, torch.Tensor) and bool((output == 2).all()) and junk


def test_opaque_piece_has_fixed_inputs_and_outputs() -> None:
    """A compiled piece is one node: run anew at each replay, on the captured inputs, into the captured outputs."""
    x = torch.randn(4)
    calls = []

    def piece(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(a.data_ptr())
        return a + 1, a * 2

    pool = EmulatedPool(CPU)
    graph = pool.graph()
    with torch.no_grad(), pool.session():
        graph.capture_begin()
        a, b = graph.launch(piece, x)
        c = a + b
        graph.capture_end()
    assert len(graph._tape or []) == 2
    addresses = [t.data_ptr() for t in (a, b, c)]
    x.copy_(torch.randn(4))
    graph.replay()
    assert torch.equal(c, (x + 1) + (x * 2))
    assert calls == [x.data_ptr()] * 2 and addresses == [t.data_ptr() for t in (a, b, c)]


def test_sync_inside_an_opaque_piece_is_refused() -> None:
    pool, x = EmulatedPool(CPU), torch.ones(2)
    graph = pool.graph()
    with torch.no_grad(), pool.session():
        graph.capture_begin()
        with pytest.raises(CaptureError, match="graph cannot hold"):
            graph.launch(lambda a: a * a.sum().item(), x)
        graph.abort()


def test_capture_works_for_callers_in_inference_mode() -> None:
    x = torch.randn(3)
    with torch.inference_mode():
        pool = EmulatedPool(CPU)
        graph = pool.graph()
        with torch.inference_mode(False), torch.no_grad(), pool.session():
            graph.capture_begin()
            y = x * 2
            graph.capture_end()
    x.fill_(3)
    graph.replay()
    with torch.inference_mode():
        graph.replay()
    assert torch.equal(y, torch.full((3,), 6.0))


def test_collector_is_frozen_during_a_session_and_restored_after_an_error() -> None:
    pool = EmulatedPool(CPU)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), pool.session():
        assert not gc.isenabled() and gc.get_freeze_count() > IMMORTAL
        raise ZeroDivisionError
    assert gc.isenabled() and gc.get_freeze_count() < IMMORTAL


def test_a_users_own_freeze_is_left_alone() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with EmulatedPool(CPU).session():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
