"""``graphed``: outputs that a graph lends, and steps whose inputs are staged in its buffers."""

from __future__ import annotations

from typing import Any

import graph_toys as toys
import pytest
import torch
from graph_toys import close, level_costs, make
from torch import nn

from runtime.contract import same_bits
from runtime.outputs import Loan, StaleOutputError


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
