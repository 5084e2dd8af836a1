"""The caller's modes of torch: inference mode, autocast, threads. None of them may change a result or stop a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import graph_toys as toys
import pytest
import tiny
import torch
from graph_toys import level_costs, make
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from runtime.engine import Engine
from runtime.model import allocate_cache, random_model
from runtime.request import SamplingParams
from runtime.step_module import StepModule


class Counter(nn.Module):
    """Writes its own state, as a cache is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x * 2


@pytest.mark.parametrize("inside", ["module", "warmup", "call", "module and warmup"])
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_inference_mode_anywhere(device: torch.device, inside: str, mode: str) -> None:
    def mode_of(what: str) -> torch.inference_mode | nullcontext[None]:
        return torch.inference_mode() if what in inside.split(" and ") else nullcontext()

    with mode_of("module"):
        module = toys.Layers().to(device)
    fast = make(module, mode=mode, on_capture_error="raise")
    with mode_of("warmup"):
        fast.warmup(*toys.step(8, device))
    level_costs(fast)
    args = toys.step(3, device)
    with torch.no_grad():
        want = module(*args)
    with mode_of("call"):
        got = fast(*args)
    assert torch.allclose(got, want, atol=1e-5) and sum(fast.stats()["steps"][mode].values()) == 1


def test_state_made_in_inference_mode_and_written_by_the_module_is_named(device: torch.device) -> None:
    with torch.inference_mode():
        fast = make(Counter().to(device), {"x": 0}, mode="full")
        with pytest.raises(ValueError, match=r"total: expected a normal tensor, got one made under torch.inference_mode\(\)"):
            fast.warmup(torch.rand(8, device=device))
    with torch.inference_mode(False):
        fast = make(Counter().to(device), {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, device=device))
    x = torch.rand(4, device=device)
    for context in (torch.inference_mode(), nullcontext()):
        with context:
            assert torch.equal(fast(x), x * 2)


def test_models_and_caches_made_in_inference_mode_are_normal_tensors() -> None:
    with torch.inference_mode():
        model = random_model(tiny.CONFIG)
        made = [*model.parameters(), *model.buffers(), *(t for pair in allocate_cache(model.spec, 2, 4) for t in pair)]
        made += StepModule(model, 2).buffers()
    assert not [t for t in made if t.is_inference()]


@pytest.mark.parametrize("inside", ["engine", "generate"])
def test_an_engine_made_in_inference_mode_runs_outside_it_and_the_reverse(inside: str) -> None:
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3)
    config = {"graph": {"max_tokens": 8, "capture_sizes": [2]}, "compile": {"backend": "eager"}, "scheduler": {"max_num_seqs": 2},
              "cache": {"num_pages": 16, "page_size": 4}}  # fmt: skip
    want = [c.token_ids for c in Engine(random_model(tiny.CONFIG), config).generate(prompts, params)]
    with torch.inference_mode() if inside == "engine" else nullcontext():
        engine = Engine(random_model(tiny.CONFIG), config)
    with torch.inference_mode() if inside == "generate" else nullcontext():
        assert [c.token_ids for c in engine.generate(prompts, params)] == want


@pytest.mark.parametrize("first", ["warmup in autocast", "warmup outside"])
def test_autocast_gives_the_modules_own_result(device: torch.device, first: str) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full", on_capture_error="raise")
    args = toys.step(4, device)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
        if first == "warmup outside":
            with torch.autocast(device.type, enabled=False):
                fast.warmup(*args)
        got, want = fast(*args), module(*args)
        assert torch.equal(got, want) and "autocast" in fast.explain(*args).reason
    level_costs(fast)
    got = fast(*args)
    assert torch.allclose(got, module(*args), atol=1e-5) and not torch.equal(got, want.float())
    assert sum(fast.stats()["steps"]["full"].values()) == 1


def test_transforms_of_torch_func_get_the_modules_own_result(device: torch.device) -> None:
    """Their tensors have the type of plain ones and no memory. The loop in C would end the process at one."""
    module = Affine().to(device)
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, 3, device=device))
    level_costs(fast)
    x, many = torch.rand(4, 3, device=device), torch.rand(5, 4, 3, device=device)
    fast(x)
    for _ in range(2):
        assert torch.equal(torch.func.vmap(fast)(many), module(many))
        weights = torch.rand(5, 3, device=device)
        got = torch.func.vmap(lambda weight: torch.func.functional_call(fast, {"weight": weight}, (x,)))(weights)
        assert torch.equal(got, x * weights[:, None] + 1)
        assert torch.equal(fast(x), module(x))
    assert any("torch.func" in reason for reason in fast.stats()["eager_reasons"])


def test_a_function_around_it_can_be_compiled(device: torch.device) -> None:
    """Dynamo leaves the call alone: its own guards would fail at what changes with every step."""
    module = Affine().to(device)
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, 3, device=device))
    level_costs(fast)
    torch._dynamo.reset()
    seen: list[torch.fx.GraphModule] = []
    compiled = torch.compile(lambda x: fast(x + 1) * 2, backend=lambda graph, _: seen.append(graph) or graph.forward)  # type: ignore[func-returns-value]
    for n in (4, 1, 2, 3, 4, 1, 8):
        x = torch.rand(n, 3, device=device)
        assert torch.equal(compiled(x), module(x + 1) * 2)
    assert sum(fast.stats()["steps"]["full"].values()) == 7
    assert all("sub" not in graph.code and len(graph.graph.nodes) <= 5 for graph in seen), "what is before and after it"


def test_dispatch_modes_see_the_modules_own_operators(device: torch.device) -> None:
    """Those that count, record or fake operators; a replay would show them a copy at most."""
    module = Square().to(device)
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, 3, device=device))
    level_costs(fast)
    x = torch.rand(4, 3, device=device)
    fast(x), fast(x)
    with FlopCounterMode(display=False) as counter:
        fast(x)
    assert counter.get_total_flops() == 2 * 4 * 3 * 3
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        assert type(fast(fakes.from_tensor(x))).__name__ == "FakeTensor"
        assert "dispatch mode" in fast.explain(fakes.from_tensor(x)).reason
    assert torch.allclose(fast(x), module(x)) and sum(fast.stats()["steps"]["full"].values()) == 3
    for context in (FlopCounterMode(display=False), torch.autocast(device.type, dtype=torch.bfloat16), nullcontext()):
        with context:
            assert (fast.stage({"tokens": 4}) is not None) == isinstance(context, nullcontext)


def test_a_sparse_argument_is_the_modules_own_affair() -> None:
    module = Square()
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.rand(8, 3))
    level_costs(fast)
    x = torch.rand(4, 3)
    for given in (x, x.to_sparse(), x, x.to_sparse_csr(), x):
        assert torch.allclose(fast(given), module(x), atol=1e-6)
    assert sum(fast.stats()["steps"]["full"].values()) == 3 and "x: graphs take dense tensors" in fast.explain(x.to_sparse()).reason


@pytest.mark.parametrize("view", [torch._neg_view, lambda x: torch.complex(x, x).conj(), lambda x: torch._efficientzerotensor(x.shape)])
def test_views_that_still_have_to_be_carried_out_are(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """x.conj() and its like are the bytes of x and a flag."""
    module = Affine()
    x = view(torch.rand(4, 3))
    fast = make(module, {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.ones(8, 3, dtype=x.dtype))
    level_costs(fast)
    for _ in range(3):
        assert torch.equal(fast(x), module(x))
        assert torch.equal(fast(torch.ones(4, 3, dtype=x.dtype)), torch.ones(4, 3, dtype=x.dtype) * 2 + 1)
    assert sum(fast.stats()["steps"]["full"].values()) == 6


def test_another_default_device_changes_nothing(device: torch.device) -> None:
    """``torch.set_default_device`` reaches every tensor that is made without a device."""
    module = Halves().to(device)
    fast = make(module, {"x": 0, "y": 0}, pad={"y": 1.5}, mode="full", on_capture_error="raise")
    x, y = torch.rand(8, device=device), torch.rand(8, device=device).bfloat16()
    with torch.device("meta"):
        fast.warmup(x, y)
        level_costs(fast)
        for n in (8, 3):
            assert torch.equal(fast(x[:n], y[:n]), x[:n] + y[:n])
    assert sum(fast.stats()["steps"]["full"].values()) == 2


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + 1


class Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_threads_take_turns(device: torch.device) -> None:
    """Each thread has its own input and must get its own result, though both fill one set of input buffers."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = x + 1
            return x

    fast = make(Slow().to(device), {"x": 0}, mode="full", on_capture_error="raise")
    fast.warmup(torch.zeros(8, device=device))
    level_costs(fast)
    wrong: list[torch.Tensor] = []

    def calls(value: float) -> None:
        x = torch.full((8,), value, device=device)
        for _ in range(60):
            y = fast(x)
            if not torch.equal(y, x + 20):
                wrong.append(y)

    threads = [threading.Thread(target=calls, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_modules_warm_up_in_two_threads(device: torch.device) -> None:
    modules = [toys.Layers().to(device) for _ in range(2)]
    fast = [make(m, mode="full", on_capture_error="raise") for m in modules]
    errors: list[BaseException] = []

    def warm_up(i: int) -> None:
        try:
            fast[i].warmup(*toys.step(8, device))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=warm_up, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    args = toys.step(4, device)
    for f, m in zip(fast, modules, strict=True):
        assert torch.allclose(f(*args), m(*args), atol=1e-5)
