"""Calls that look like an earlier one: the same launches, on their own memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from op_samples import SAMPLES
from recording_driver import run_recorded

import tkernels
from tkernels import _counters, _launch, _repeats
from tkernels._linear_kernels import Tile
from tkernels._op import _on_its_device
from tkernels._triton import HAVE_TRITON, tl, triton

linear_module = sys.modules["tkernels.linear"]


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_repeats, "ENABLED", True)
    _repeats.forget()
    yield
    _repeats.forget()


def _plans() -> list[Any]:
    return [plan for table in _repeats._tables for plan in table.values() if isinstance(plan, _repeats._Plan)]


def _refilled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Other memory that looks alike; floats hold other numbers, and integers, which may be indices, the same."""
    return tuple(torch.empty_like(a).copy_(a * 1.5 if a.dtype in (torch.float32, torch.bfloat16) else a) if isinstance(a, torch.Tensor)
                 and a.is_contiguous() else a for a in args)  # fmt: skip


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, width, stride, BLOCK: tl.constexpr = 8):
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    tl.store(y_ptr + offs, tl.load(x_ptr + offs * stride, mask=mask) * factor, mask=mask)


def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _scale_kernel[(1,)](x, y, factor, x.shape[0], x.stride(0))
    return y


def _copies(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.clone() if isinstance(v, torch.Tensor) and v.is_contiguous() else v for v in values)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_bits_are_those_of_the_op(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op: calls that are taken down, then calls with other memory and other numbers. Outputs and what the op wrote are compared."""
    op = getattr(torch.ops.tkernels, name).default
    for args, kwargs in SAMPLES[name](device)[:3]:
        for _ in range(2):
            op(*_copies(args), **kwargs)
        theirs, ours = _copies(_refilled(args)), _copies(_refilled(args))
        got = op(*ours, **kwargs)
        monkeypatch.setattr(_repeats, "ENABLED", False)
        want = op(*theirs, **kwargs)
        monkeypatch.setattr(_repeats, "ENABLED", True)
        outputs = ((want, got),) if not isinstance(want, tuple) else zip(want, got, strict=True)
        for x, y in (*outputs, *zip(theirs, ours, strict=True)):
            if isinstance(x, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
                assert torch.equal(_bits(x), _bits(y))
    if not name.startswith("linear"):  # the sample shapes are in no table: they go to cuBLAS
        assert _plans(), "an op that only launches is repeated"


@pytest.mark.parametrize("gated", [False, True])
def test_a_linear_with_a_norm_of_its_own_is_repeated(gated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = lambda target, dtype, variant, *shape: None if "norm" in variant else Tile("matrix", 16, 32, 1, 4, 2)
    monkeypatch.setattr(linear_module, "choose", choose)
    weight, norm = torch.randn(32, 64, device=device).bfloat16(), torch.randn(64, device=device).bfloat16()
    for _ in range(4):
        x = torch.randn(3, 64, device=device).bfloat16()
        got = tkernels.linear(x, weight, norm_weight=norm, gated=gated)
        monkeypatch.setattr(_repeats, "ENABLED", False)
        assert torch.equal(got, tkernels.linear(x, weight, norm_weight=norm, gated=gated))
        monkeypatch.setattr(_repeats, "ENABLED", True)
    (plan,) = _plans()
    assert len(plan.launches) == 2 and len(plan.temporaries) == 1


def test_what_looks_otherwise_is_another_call(device: torch.device) -> None:
    scale = _repeats.repeating(_scale)
    x = torch.arange(64.0, device=device)
    for _ in range(4):
        for view in (x[:8], x[8:16], x[:16:2], x[:4], x[1:9], x[:8].double(), x[:1]):
            for factor in (2.0, 3.0):
                assert torch.equal(scale(view, factor), view * factor)
    assert len(_plans()) == 2 * 6, "x[:8] and x[8:16] look alike; x[1:9] is aligned otherwise"


def test_zeros_of_either_sign_are_two_host_values(device: torch.device) -> None:
    """Equal to Python, and not to a product. The interpreter forgets the sign, so what would be launched is looked at."""
    scale, x = _repeats.repeating(_scale), torch.ones(8, device=device)
    for _ in range(4):
        scale(x, 0.0), scale(x, -0.0)
    assert sorted(str(plan.constants[0]) for plan in _plans()) == ["-0.0", "0.0"]
    _repeats._tables.pop()


def test_of_two_arguments_at_one_address_none_is_taken_for_the_other(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = (torch.randn(2, 16, device=device) for _ in range(3))
    add = torch.ops.tkernels.silu_mul.default
    taken: list[int] = []
    noting = _launch.noting
    monkeypatch.setattr(_launch, "noting", lambda *args, **kwargs: taken.append(1) or noting(*args, **kwargs))
    for left, right in ((x, x), (x, x), (x, x), (x, y), (x, y), (y, z), (z, z), (y, x)):
        torch.testing.assert_close(add(left, right), torch.nn.functional.silu(left) * right)
    assert len(_plans()) == 1 and len(taken) == 1, "nor is it tried"


def test_wrong_calls_are_refused_after_right_ones(device: torch.device) -> None:
    x, weight = torch.randn(2, 16, device=device), torch.randn(16, device=device)
    for _ in range(4):
        tkernels.rms_norm(x, weight)
        with pytest.raises(ValueError, match=r"weight: expected \[16\]"):
            tkernels.rms_norm(x, weight[:8])
        with pytest.raises(ValueError, match="expected last stride 1"):
            tkernels.rms_norm(x.t().contiguous().t(), weight)
    assert len(_plans()) == 1


def test_what_also_calls_torch_or_points_elsewhere_is_not_repeated(device: torch.device) -> None:
    constant = torch.ones(8, device=device)

    def adds_too(x: torch.Tensor) -> torch.Tensor:
        return _scale(x, 2.0) + 1

    def reads_another(x: torch.Tensor) -> torch.Tensor:
        _scale(constant, 3.0)
        return _scale(x, 2.0)

    def returns_its_argument(x: torch.Tensor) -> torch.Tensor:
        _scale(x, 2.0)
        return x

    x = torch.arange(8.0, device=device)
    for call, want in ((adds_too, x * 2 + 1), (reads_another, x * 2), (returns_its_argument, x)):
        repeated = _repeats.repeating(call)
        for _ in range(4):
            assert torch.equal(repeated(x), want)
        assert list(_repeats._tables.pop().values()) == [False], call.__name__


def test_views_are_followed_into_what_they_were_taken_from(device: torch.device) -> None:
    """Of arguments, of temporaries, of views; also where a view happens to start where another argument does, when it is taken down."""

    def call(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        between = torch.empty(16, dtype=x.dtype, device=x.device)
        _scale_kernel[(2,)](x.view(2, 8)[1:][0], between[8:], 2.0, 8, 1)
        _scale_kernel[(1,)](other, between.split([8, 8])[0], 1.0, 8, 1)
        return _scale(between[1::2], 3.0)

    repeated, both = _repeats.repeating(call), torch.arange(16.0, device=device)
    for i in range(5):
        x, other = (both, both[8:]) if i < 2 else (torch.randn(16, device=device), torch.randn(8, device=device))
        assert torch.equal(repeated(x, other), torch.cat([other, x[8:] * 2])[1::2] * 3)
    (plan,) = _repeats._tables.pop().values()
    assert isinstance(plan, _repeats._Plan) and len(plan.views) == 3


def test_lent_memory_is_lent_again(device: torch.device) -> None:
    """As counters are, which two launches must not share."""
    pool = [torch.full((8,), float(i), device=device) for i in range(8)]
    taken: list[int] = []

    def borrow() -> torch.Tensor:
        taken.append(len(taken))
        return _repeats.lend(pool[taken[-1]], borrow)

    def call(x: torch.Tensor) -> torch.Tensor:
        return _scale(borrow(), 1.0)

    repeated = _repeats.repeating(call)
    assert [repeated(pool[0])[0].item() for _ in range(6)] == [0, 1, 2, 3, 4, 5] and len(_plans()) == 1


def test_a_full_table_begins_anew(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_repeats, "MOST", 3)
    scale = _repeats.repeating(_scale)
    x = torch.arange(8.0, device=device)
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0):
        assert torch.equal(scale(x, factor), x * factor)
    assert len(_plans()) == 1 and len(_repeats._tables.pop()) == 2


def test_threads_do_not_note_each_other(device: torch.device) -> None:
    """A call is taken down while another thread launches: the other's launch is none of the plan's. They take turns, as the interpreter
    runs one kernel at a time."""
    inside, launched = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def waits(x: torch.Tensor) -> torch.Tensor:
        if _launch.is_noting():
            inside.set()
            assert launched.wait(30)
        return _scale(x, 2.0)

    def other() -> None:
        try:
            assert inside.wait(30) and not _launch.is_noting()
            results.append(_repeats.repeating(_scale)(torch.arange(8.0, device=device), 3.0))
        finally:
            launched.set()

    thread = threading.Thread(target=other)
    thread.start()
    repeated, x = _repeats.repeating(waits), torch.arange(8.0, device=device)
    table = _repeats._tables[-1]
    for _ in range(3):
        assert torch.equal(repeated(x), x * 2)
    thread.join()
    assert torch.equal(results[0], x * 3) and not _launch.is_noting()
    (plan,) = table.values()
    assert isinstance(plan, _repeats._Plan) and len(plan.launches) == 1


_COMPARE = """
from tkernels import _repeats

address = lambda x: x.data_ptr() if isinstance(x, torch.Tensor) else x

from tkernels.rmsnorm import _add_rms_norm
x, residual, weight = torch.zeros(3, 64), torch.zeros(5, 80)[:3, :64], torch.ones(64)
repeated = _repeats.repeating(_add_rms_norm)
for _ in range(3):
    y, total = repeated(x, residual, weight, 1e-6, 0.0)
assert [type(p) for t in _repeats._tables for p in t.values()] == [_repeats._Plan]
first, _, ours = calls
theirs = [address(a) for a in first]
theirs[6:9] = [None] * 3  # launch metadata and hooks, for profilers
given = {a.data_ptr() for a in (x, residual, weight)}
own = [i for i, a in enumerate(first) if isinstance(a, torch.Tensor) and a.data_ptr() not in given]
assert [ours[i] for i in own] == [y.data_ptr(), total.data_ptr()], (ours, own)
assert [a for i, a in enumerate(ours) if i not in own] == [a for i, a in enumerate(theirs) if i not in own], (theirs, ours)

seen = []
triton.knobs.runtime.launch_enter_hook.add(seen.append)  # a profiler listens: its hooks get what they always get
repeated(x, residual, weight, 1e-6, 0.0)
assert calls[-1][6] is not None and calls[-1][7] is triton.knobs.runtime.launch_enter_hook
triton.knobs.runtime.launch_enter_hook.remove(seen.append)
repeated(x, residual, weight, 1e-6, 0.0)
assert calls[-1][6:9] == (None, None, None)
"""


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_compiled_kernels_get_what_tritons_launcher_gives_them(tmp_path: Path) -> None:
    """Without a device: once from Triton's own path and once from ours."""
    run_recorded(_COMPARE, tmp_path)


_DESCRIBED = """
import triton.backends.nvidia.driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor
from tkernels import _repeats

@triton.jit
def copy_kernel(x_desc, y_ptr, n: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, n), x_desc.load([0, 0]).reshape(n))

def copy(x):
    y = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    copy_kernel[(1,)](TensorDescriptor(x, list(x.shape), list(x.stride()), [2, 64]), y, 128)
    return y

repeated = _repeats.repeating(copy)
xs = [torch.empty(2, 64, dtype=torch.bfloat16) for _ in range(4)]
for x in xs:
    y = repeated(x)
assert [type(p) for t in _repeats._tables for p in t.values()] == [_repeats._Plan]
seen = []
fill = lambda *args: seen.append(args) or "map"
names = "fill_tma_descriptor", "fill_tma_descriptor_tiled"  # in 3.6 and in 3.7
triton.runtime.driver.active.utils.__dict__.update({name: fill for name in names})
meta = {"swizzle": 3, "elem_size": 2, "elem_type": next(iter(nvidia.TMA_DTYPE_DEVICE_TO_HOST)), "block_size": [2, 64], "fp4_padded": False}
made = [nvidia.make_tensordesc_arg(next(a for a in call if hasattr(a, "padding")), meta) for call in calls]
assert [address for address, *_ in seen] == [x.data_ptr() for x in xs]
assert len({repr(m) for m in made}) == 1 and len({repr(rest) for _, *rest in seen}) == 1, (made, seen)

import weakref
memory = [weakref.ref(each) for each in (*xs, y)]
del x, xs, y
for each in calls, seen, made:
    each.clear()
assert not any(each() is not None for each in memory), "the plan keeps the memory of the call that was taken down"
"""


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_a_descriptor_is_made_again_over_the_memory_of_the_call_and_keeps_none(tmp_path: Path) -> None:
    run_recorded(_DESCRIBED, tmp_path)


def test_a_part_that_is_repeated_by_itself_is_part_of_the_whole(device: torch.device) -> None:
    """Its launch must be noted for the whole, though it had a plan of its own by then."""
    part = _repeats.repeating(lambda x: _scale(x, 2.0))
    whole = _repeats.repeating(lambda x: _scale(part(x), 3.0))
    for start in range(4):
        x = torch.arange(start, start + 8.0, device=device)
        assert torch.equal(part(x), x * 2)
    for start in range(4):
        x = torch.arange(start, start + 8.0, device=device)
        assert torch.equal(whole(x), x * 6)
    plan = next(iter(_repeats._tables.pop().values()))
    assert isinstance(plan, _repeats._Plan) and len(plan.launches) == 2
    _repeats._tables.pop()


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[700], [1] * 10 + [30], [1, 5, 300]], ids=str)
def test_prefill_through_descriptors_is_repeated(device: torch.device, lens: list[int]) -> None:
    attend = sys.modules["tkernels.attention.paged"]._attend
    repeated = _repeats.repeating(_on_its_device(attend))
    tokens, cu = sum(lens), torch.tensor([0, *lens], device=device).cumsum(0).int()
    table = torch.randperm(len(lens) * 64, device=device).int().view(len(lens), 64)
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(*shape, device=device).bfloat16() for shape in ((tokens, 8, 128), *[(len(lens) * 64, 16, 2, 128)] * 2))
        seq_lens = torch.tensor([n + 17 * seed for n in lens], device=device, dtype=torch.int32)
        outs = [torch.full_like(q, float("nan")) for _ in range(2)]
        for call, out in zip((attend, repeated), outs, strict=True):
            call(q, k, v, table, seq_lens, cu, 0.1, 2048, True, 0, 0.0, None, None, None, 1.0, out, None)
        assert torch.equal(*outs) and not outs[0].isnan().any()
    assert [isinstance(plan, _repeats._Plan) for plan in _repeats._tables.pop().values()] == [True]


@pytest.mark.gpu
def test_captured_calls_and_other_streams(device: torch.device) -> None:
    """Splits of a linear use counters: those of a captured call are its own, whether it was repeated or not."""
    call = _repeats.repeating(_on_its_device(linear_module._linear))
    tile = Tile("matrix", 64, 64, 1, 4, 3, splits=4)
    x, weight = torch.randn(16, 2048, device=device).bfloat16(), torch.randn(2048, 2048, device=device).bfloat16()
    before = linear_module.choose
    linear_module.choose = lambda *_: tile  # type: ignore[attr-defined]
    try:
        want = call(x, weight)
        for _ in range(3):
            assert torch.equal(call(x, weight), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(x, weight)
        other = torch.cuda.Stream()
        for _ in range(50):
            graph.replay()
            with torch.cuda.stream(other):
                got = call(x, weight)
            torch.cuda.synchronize()
            assert torch.equal(captured, want) and torch.equal(got, want)
    finally:
        linear_module.choose = before  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    for index in (1, 0, 1):
        x, weight = torch.randn(3, 64, device=f"cuda:{index}"), torch.ones(64, device=f"cuda:{index}")
        for _ in range(4):
            torch.testing.assert_close(tkernels.rms_norm(x, weight), tkernels.rmsnorm.rms_norm_ref(x, weight, 1e-6))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_capture_on_a_gpu_that_is_not_the_current_one_keeps_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a stream is capturing is asked of the tensors' device."""
    monkeypatch.setattr(linear_module, "choose", lambda *_: Tile("matrix", 64, 64, 1, 4, 3, splits=4))
    call, device = _repeats.repeating(_on_its_device(linear_module._linear)), torch.device("cuda:1")
    x, weight = torch.randn(16, 2048, device=device).bfloat16(), torch.randn(2048, 2048, device=device).bfloat16()
    for _ in range(3):
        want = call(x, weight)
    taken = _counters._words[device]._taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph), torch.cuda.device(0):
        got = call(x, weight)
    graph.replay()
    torch.cuda.synchronize(device)
    assert _counters._words[device]._taken == taken + 2048 // 64 and torch.equal(got, want)


@pytest.mark.gpu
def test_a_call_takes_less_than_half_of_the_host_time(device: torch.device) -> None:
    args = SAMPLES["paged_attention_out"](device)[0][0]

    def host_us() -> float:
        times = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.ops.tkernels.paged_attention_out.default(*args)
            times.append(time.perf_counter() - start)
        return sorted(times)[20] * 1e6

    ours = host_us()
    _repeats.ENABLED = False
    assert ours < host_us() / 2
