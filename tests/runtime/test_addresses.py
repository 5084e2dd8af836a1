"""Addresses of many tensors at once: in C, and as torch tells them where that cannot be compiled."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from graph_toys import Layers, level_costs, make, step
from torch import nn

from runtime import addresses

HAS_COMPILER = shutil.which("gcc") is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(addresses, "native", lambda: None)
    return str(request.param)


@pytest.mark.skipif(not HAS_COMPILER or sys.platform != "linux", reason="needs gcc and Python.h, as Triton does")
def test_the_loop_in_c_is_there_where_triton_can_build() -> None:
    pytest.importorskip("triton")
    assert addresses.native() is not None


def test_each_tensor_that_moved_is_seen(way: str) -> None:
    block = torch.arange(12.0)
    tensors = [nn.Parameter(torch.ones(3)), block[4:], block[4:8].view(2, 2), torch.empty(0), torch.tensor(5)]
    stay = addresses.stays(tensors)
    assert stay(tensors) and stay(list(tensors))
    for place, other in enumerate([nn.Parameter(torch.ones(3)), block[3:], block[5:9].view(2, 2), torch.empty(1), torch.tensor(5)]):
        assert not stay([*tensors[:place], other, *tensors[place + 1 :]]), place
    with torch.no_grad():
        tensors[0].mul_(2)
    assert stay(tensors), "changed in place"
    tensors[0].data = torch.ones(3)
    assert not stay(tensors)


def test_what_is_no_tensor_is_not_asked(way: str) -> None:
    """A buffer that was set to None, or to an object of another type that says what it likes."""

    class Liar(torch.Tensor):
        pass

    tensors = [torch.ones(3), torch.ones(2)]
    stay = addresses.stays(tensors)
    for other in (None, 3, "text", torch.ones(2).as_subclass(Liar)):
        try:
            assert not stay([tensors[0], other])
        except (TypeError, RuntimeError, AttributeError):
            assert way == "torch", "in C nothing is raised"


def without_storage() -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    sparse = torch.eye(3).to_sparse()
    torch.func.vmap(lambda x: kept.append(x) or x)(torch.rand(2, 3))  # type: ignore[func-returns-value]
    return [sparse, nn.Parameter(sparse), torch.eye(3).to_sparse_csr(), kept[0]]


@pytest.mark.parametrize("replace", [True, False])
def test_a_tensor_without_storage_does_not_end_the_process(way: str, replace: bool) -> None:
    """Of torch's own types too, and torch throws at a question for its address, which C cannot catch. replace: another object."""
    for other in without_storage():
        tensors = [nn.Parameter(torch.ones(3)), torch.ones(2)]
        stay = addresses.stays(tensors)
        now = list(tensors)
        if replace:
            now[0] = other
        elif type(other) is nn.Parameter:
            torch.utils.swap_tensors(tensors[0], nn.Parameter(other.detach()))
        try:
            assert stay(now) == (not replace and type(other) is not nn.Parameter)
        except (RuntimeError, NotImplementedError):
            assert way == "torch", "in C nothing is raised"


def test_another_object_at_the_same_address_is_another(device: torch.device) -> None:
    """What C has not asked before it does not ask; Persistent looks closer, and then takes the new one."""
    module = Layers().to(device)
    fast = make(module, mode="full")
    fast.warmup(*step(8, device))
    level_costs(fast)
    args = step(3, device)
    fast(*args)
    persistent = fast._steps.persistent  # type: ignore[union-attr]
    weight = module.linears[0].weight
    module.linears[0]._parameters["weight"] = nn.Parameter(weight.data)
    assert persistent.moved() is None and persistent._stay(persistent._tensors.now())
    assert torch.allclose(fast(*args), module(*args), atol=1e-6)


def test_a_weight_that_became_sparse_is_named() -> None:
    module = Layers()
    fast = make(module, mode="full")
    fast.warmup(*step(8))
    level_costs(fast)
    fast(*step(3))
    module.linears[0]._parameters["weight"] = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(ValueError, match=r"linears.0.weight: expected a dense tensor .*, got torch.sparse_coo \[4, 4\]"):
        fast(*step(3))


@pytest.mark.parametrize("strided", [False, True])
def test_every_tensor_is_copied_to_its_place(way: str, strided: bool) -> None:
    kinds = (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int32)
    given = [torch.arange(6).view(2, 3).to(dtype) for dtype in kinds] + [torch.empty(0), torch.tensor(2.5)]
    block, targets = torch.full((2, 6), 7.0), [torch.zeros_like(t) for t in given]
    if strided:
        targets[1] = block[:, :3]  # a head of an input that is padded in its second dimension
    copy = addresses.copier(targets)
    for _ in range(2):
        copy(tuple(given))
        assert all(torch.equal(a, b) for a, b in zip(targets, given, strict=True))
        given = [t.logical_not() if t.dtype is torch.bool else t + 1 for t in given]
    assert block[:, 3:].eq(7).all()


@pytest.mark.parametrize("size", [2047, 2048, 2049, 4096 + 255])
def test_each_byte_of_a_large_input_is_brought_up_to_date(way: str, size: int) -> None:
    """Only runs that differ are written: one other byte, first, last or between, shows; what lies behind the input stays."""
    given, block = torch.randint(0, 255, (size,), dtype=torch.uint8), torch.zeros(size + 8, dtype=torch.uint8)
    copy = addresses.copier([block[:size]])
    for place in (0, 255, 256, size // 2, size - 257, size - 256, size - 255, size - 1):
        given[place] += 1
        copy((given,))
        assert torch.equal(block[:size], given) and not block[size:].any(), place
    if way == "C":  # torch says nothing about memory that overlaps
        block[:size] = given
        addresses.copier([block[8:]])((block[:size],))
        assert torch.equal(block[8:], given)


def test_a_call_gives_the_same_without_the_loop_in_c(way: str) -> None:
    module = Layers()
    fast = make(module, mode="full")
    fast.warmup(*step(8))
    level_costs(fast)
    for n in (3, 8, 3, 3, 1):
        args = step(n)
        assert torch.allclose(fast(*args), module(*args), atol=1e-6)
    module.linears[0].weight.data = torch.randn(4, 4)
    assert torch.allclose(fast(*args), module(*args), atol=1e-6)
