"""Programmatic dependent launch: the switch, where the compiled kernels wait, and on a GPU the same bits with and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tkernels
from tkernels import _dependent, _repeats
from tkernels._triton import HAVE_TRITON

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = _dependent.enabled()
    yield
    _dependent.enable(before)


class Kernel:
    """Notes how it is launched."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.seen.append(("launch", options))

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.seen.append(("load", options))
        return SimpleNamespace(run=None)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of some architecture, whose stream is or is not capturing."""
    state = SimpleNamespace(arch="sm_90", capturing=False, driver=13000)
    monkeypatch.setattr(_dependent, "INTERPRETED", False)
    monkeypatch.setattr(_dependent, "target_of", lambda device: state)
    monkeypatch.setattr(_dependent, "_driver", lambda: state.driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def _launches(place: int = _dependent.ALONE) -> list[tuple[str, dict[str, Any]]]:
    kernel = Kernel()
    _dependent.launch(kernel, (1,), DEVICE, place=place, num_warps=4)
    return kernel.seen


def test_off_unless_asked_for(on_a_device: Any) -> None:
    on_a_device.capturing = True
    _dependent.enable(False)
    assert _launches() == [("launch", {"PDL": False, "num_warps": 4})]


def test_captured_launches_are_dependent_and_eager_ones_load_what_a_capture_needs(on_a_device: Any) -> None:
    _dependent.enable(True)
    on = {"PDL": True, "launch_pdl": True, "num_warps": 4}
    assert _launches() == [("load", on), ("launch", {"PDL": False, "num_warps": 4})]
    on_a_device.capturing = True
    assert _launches() == [("launch", on)]


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_kernels_of_a_set_run_beside_each_other_captured_or_not(on_a_device: Any, wanted: bool, capturing: bool) -> None:
    _dependent.enable(wanted)
    on_a_device.capturing = capturing
    first = {"PDL": _dependent.FIRST, "num_warps": 4}
    beside = {"PDL": _dependent.BESIDE, "launch_pdl": True, "num_warps": 4}
    assert _launches(_dependent.FIRST)[-1] == ("launch", first | {"launch_pdl": True} if wanted and capturing else first)
    assert _launches(_dependent.BESIDE) == [("launch", beside)]
    torch.use_deterministic_algorithms(True)  # torch.empty then launches what fills temporaries
    try:
        assert _launches(_dependent.BESIDE) == _launches(_dependent.ALONE)
    finally:
        torch.use_deterministic_algorithms(False)
    for arch, driver in (("sm_80", 13000), ("sm_90", 12020)):  # a driver before CUDA 12.3 cannot capture them
        on_a_device.arch, on_a_device.driver = arch, driver
        assert _launches(_dependent.BESIDE) == [("launch", {"PDL": _dependent.ALONE, "num_warps": 4})]
    for place in (_dependent.FIRST, _dependent.BESIDE):
        assert _launches(place) == [("launch", {"PDL": _dependent.ALONE, "num_warps": 4})]


def test_of_the_captures_of_one_thread(on_a_device: Any) -> None:
    _dependent.enable(False)
    on_a_device.capturing = True
    off = [("launch", {"PDL": _dependent.ALONE, "num_warps": 4})]
    with _dependent.captures(True):
        assert _launches() == [("launch", {"PDL": _dependent.FIRST, "launch_pdl": True, "num_warps": 4})]
        with ThreadPoolExecutor(1) as other:
            assert other.submit(_launches).result() == off
        with _dependent.captures(False):
            assert _launches() == off
        assert _dependent.enabled()
        on_a_device.capturing = False
        assert [what for what, _ in _launches()] == ["load", "launch"]
    assert not _dependent.enabled()
    _dependent.enable(True)
    with pytest.raises(KeyError), _dependent.captures(False):
        raise KeyError
    assert _dependent.enabled()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A call of something that says whether it was made, or an earlier one was repeated."""
    monkeypatch.setattr(_repeats, "ENABLED", True)
    monkeypatch.setattr(_repeats, "DEPENDENT", None)
    plan = _repeats._Plan(*[None] * len(_repeats._Plan._fields))  # type: ignore[arg-type]
    monkeypatch.setattr(_repeats, "_take_down", lambda call, args, kwargs, tensors: (call(*args), plan))
    monkeypatch.setattr(_repeats, "_repeat", lambda plan, pool: "repeated")
    call = _repeats.repeating(lambda x: "made")
    x = torch.zeros(4)
    yield lambda: call(x)
    _repeats._tables.pop()


def test_eager_calls_before_a_capture_load_what_it_needs(on_a_device: Any, repeated: Any) -> None:
    """So they repeat none of those that did not, of this thread or another, before or meanwhile."""
    _dependent.enable(False)
    thrice = ["made", "made", "repeated"]
    assert [repeated() for _ in range(3)] == thrice
    with _dependent.captures(False):
        assert repeated() == "repeated"
    with _dependent.captures(True), ThreadPoolExecutor(1) as other:
        assert other.submit(repeated).result() == "repeated"
        assert [repeated() for _ in range(3)] == thrice
        assert other.submit(repeated).result() == "repeated"
    assert repeated() == "repeated"
    _dependent.enable(True)
    assert repeated() == "made"


@pytest.mark.parametrize(("arch", "on"), [("sm_80", False), ("sm_89", False), ("sm_100", True), ("sm_120", True), ("gfx942", False)])
def test_only_where_the_architecture_has_it(on_a_device: Any, arch: str, on: bool) -> None:
    on_a_device.arch, on_a_device.capturing = arch, True
    _dependent.enable(True)
    assert ("launch_pdl" in _launches()[0][1]) == on


def test_its_state_in_words() -> None:
    _dependent.enable(False)
    assert (
        _dependent.state("sm_90").startswith("off, but in what an engine captures (TKERNELS_PDL=1")
        and _dependent.state("cpu") == "cpu has none"
    )
    _dependent.enable(True)
    assert _dependent.state("sm_100") == "on"


def test_a_captured_call_does_not_repeat_an_eager_one(on_a_device: Any, repeated: Any) -> None:
    for _ in range(3):
        repeated()
    on_a_device.capturing = True
    assert repeated() == "repeated"  # it launches the same
    with _dependent.captures(True):
        assert {repeated() for _ in range(4)} == {"made"}
        on_a_device.capturing = False
        assert [repeated() for _ in range(3)] == ["made", "made", "repeated"]
        on_a_device.capturing = True
        assert repeated() == "made"
    assert repeated() == "repeated"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), (None, False)])
def test_the_environment_sets_it(value: str | None, on: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TKERNELS_PDL"} | ({} if value is None else {"TKERNELS_PDL": value})
    code = "from tkernels import _dependent; print(_dependent.enabled())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(on)


def test_the_interpreter_has_none(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("kernels are compiled here")
    _dependent.enable(True)
    x, weight = torch.randn(2, 16), torch.ones(16)
    torch.testing.assert_close(tkernels.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (16,), weight, 1e-6))


# ---- what the compiled kernels do before they wait

# In a process of its own: this one may have decorated its kernels for the interpreter.
_COMPILE = """
import importlib, json, sys, torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32)
))
from tkernels import _dependent, activation, rmsnorm
from tkernels._linear_kernels import Tile, launch
from tkernels._qkv_kernels import launch as launch_qkv
from tkernels.attention._inputs import check_inputs as decode_inputs
from tkernels.attention._tiles import PrefillTiles
from tkernels.attention.merge import merge
from tkernels.attention.prefix import prefix
from tkernels.rope import _rope_and_cache

_dependent.enable(True)
_dependent._supported = lambda device: True
torch.cuda.is_current_stream_capturing = lambda: True
found = []
run = JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    compiled = run(self, *args, grid=grid, warmup=True, **options)
    found.append((self.__name__, options["PDL"], compiled.metadata.launch_pdl, compiled.asm["ptx"]))

JITFunction.run = compile_only
zeros = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype)
x, norm, bias, residual, y = zeros(4, 512), zeros(512), zeros(128), zeros(4, 128), zeros(4, 128)
for tile in (Tile("vector", 4, 256, 1, 4, 1), Tile("matrix", 64, 64, 1, 4, 3), Tile("matrix", 16, 32, 4, 4, 3)):
    launch(x, zeros(128, 512), bias, norm, residual, False, 1e-6, y, tile)
    launch(x, zeros(256, 512), None, norm, None, True, 1e-6, y, tile)
direct = Tile("matrix", 16, 64, 4, 4, 1)
for tile in (Tile("matrix", 64, 64, 1, 4, 3, splits=2), direct):
    launch(x, zeros(128, 512), None, None, residual, False, 1e-6, y, tile)
launch(x, zeros(256, 512), None, None, None, True, 1e-6, y, direct)
launch(x, zeros(128, 512), bias, None, residual, False, 1e-6, y, Tile("tma", 64, 64, 1, 4, 3, 2))
for tile in (Tile("tma", 16, 256, 4, 4, 2), Tile("tma", 64, 64, 1, 4, 3)):
    for rows in (1, 4):
        launch(x[:rows], zeros(256, 512), zeros(256), norm if tile.slices > 1 else None, residual[:rows], True, 1e-6, y[:rows], tile)
launch(x, zeros(256, 512), None, norm, None, True, 1e-6, y, Tile("tma", 32, 128, 2, 4, 2))  # more inputs than stages hold
rmsnorm.launch(x, norm, 1e-6, 0.0)
rmsnorm.launch(x, norm, 1e-6, 0.0, residual=x)
activation._silu_and_mul(x)
embedding, sampling = (importlib.import_module(f"tkernels.{name}") for name in ("embedding", "sampling"))
rows = torch.zeros(4, dtype=torch.int64)
embedding._embedding(rows, x, rows, rows)
sampling.target_of = lambda device: SimpleNamespace(num_sms=132)
sampling.counters = lambda count, device: torch.zeros(count, dtype=torch.int32)
real, whole = (torch.zeros(4, dtype=dtype) for dtype in (torch.float32, torch.int32))
sampling._sample(x, real, whole, real, rows, rows)
heads, cache, index = zeros(4, 8, 64), zeros(4, 16, 8, 64), zeros(4, dtype=torch.int64)
_rope_and_cache(heads, heads, heads, index, zeros(64, 64, dtype=torch.float32), cache, cache, index)
positions, slots, angles = zeros(4, dtype=torch.int64), zeros(4, dtype=torch.int64), zeros(64, 64, dtype=torch.float32)
for tile in (Tile("vector", 4, 256, 1, 4, 1), Tile("matrix", 64, 64, 1, 4, 3), Tile("matrix", 16, 32, 4, 4, 3), direct):
    scale = None if tile == direct else norm
    launch_qkv(x, zeros(1536, 512), zeros(1536), scale, 1e-6, positions, angles, cache, cache, slots, False, heads, tile)
for tile in (Tile("tma", 16, 256, 4, 4, 2), Tile("tma", 64, 64, 1, 4, 3), Tile("tma", 64, 64, 1, 4, 3, 2)):
    for rows in (1, 4):
        tokens = (positions[:rows], angles, cache, cache, slots[:rows])
        launch_qkv(x[:rows], zeros(1536, 512), zeros(1536), norm if tile.slices > 1 else None, 1e-6, *tokens, False, heads[:rows], tile)
decode = importlib.import_module("tkernels.attention.decode")
decode.target_of = lambda device: SimpleNamespace(arch="sm_90", num_sms=132, has_fp8=True)
decode.counters = lambda count, device: torch.zeros(count, dtype=torch.int32)
table, lens, cu = (torch.zeros(shape, dtype=torch.int32) for shape in ((4, 8), 4, 5))
for queries in (1, 8):
    inputs = decode_inputs(heads, cache, cache, table, lens, cu, 0.125, True, 0, 0.0, None, None, None, 1.0)
    decode.decode(inputs, zeros(4, 8, 64), None, queries)
decode.decode(inputs, zeros(4, 8, 64), None, 1, beside=True, place=_dependent.BESIDE)
parts, lses = zeros(2, 4, 8, 64, dtype=torch.float32), zeros(2, 4, 8, dtype=torch.float32)
prefix(inputs, PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=2), table, lens[:1], 128, parts, lses)
merge(heads, lses[0], parts, lses, a_decides=True)
print(json.dumps(found))
"""


def _pointers_of(load: str, ptx: str) -> set[str]:
    """The numbers of the kernel's pointers that a load's address was computed from; strides are in it too."""
    assert load.startswith("ld.global"), load
    found, registers = set(), re.findall(r"\[\s*(%rd\d+)", load)
    while registers:
        register = registers.pop()
        (operands,) = re.findall(rf"^\s*[\w.]+\s+{register}, (.*);", ptx, re.M)
        found |= set(re.findall(r"_param_(\d+)\]", operands))
        registers += re.findall(r"%rd\d+", operands)
    return found & set(re.findall(r"\.param \.u64 \.ptr .*_param_(\d+)", ptx))


def _refilled(ptx: str) -> bool:
    """Whether weights come into a stage that was read; if so, behind a barrier whose number depends on all that was loaded of it."""
    sources: dict[str, set[str]] = {}  # of a register: the loads from shared memory, by their first register, that it was made from
    weights = {re.findall(r"%r\d+", operands.split("}")[1])[0] for operands in re.findall(r"mma\.sync([^;]*);", ptx)}
    loaded, waited_for, refilled = set(), set(), False
    for line in ptx.partition("griddepcontrol.wait")[2].splitlines():
        written, _, read = re.sub(r"^.*?[\w.:]+\s+", "", line.strip(), count=1).partition("}, " if "{%" in line.split(",")[0] else ", ")
        if "ldmatrix" in line:
            registers = re.findall(r"%r\d+", written)
            sources.update((register, {registers[0]}) for register in registers)
            loaded |= weights & set(registers)
        elif "mma.sync" in line:
            loaded, waited_for = set(), set()
        elif number := re.search(r"clz\.b32 n, (%r\d+); shr\.u32 n, n, 6; bar\.sync n;", line):
            waited_for = sources[number[1]]
        elif "cp.async.bulk.tensor" in line:
            refilled = True
            assert loaded and loaded <= waited_for, line
        elif re.match(r"\s*[a-z]", line):
            made_from = set().union(*(sources.get(register, ()) for register in re.findall(r"%rs?\d+", read)))
            sources.update((register, made_from) for register in re.findall(r"%rs?\d+", written))
    return refilled


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_nothing_but_weights_is_touched_before_the_wait(tmp_path: Path) -> None:
    """Instruction by instruction: before it only loads of weights, which are read once or kept for all rows, and prefetches."""
    (tmp_path / "compile.py").write_text(_COMPILE)
    path = os.pathsep.join([str(Path(tkernels.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(tmp_path / "compile.py")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {name for name, *_ in kernels} == {
        "_vector_kernel",
        "_matrix_kernel",
        "linear_sm90_kernel",
        "_rms_norm_kernel",
        "_gated_kernel",
        "_embedding_kernel",
        "runs_kernel",
        "finish_kernel",
        "_rope_kernel",
        "_vector_qkv_kernel",
        "_matrix_qkv_kernel",
        "linear_rows_sm90_kernel",
        "qkv_sm90_kernel",
        "qkv_rows_sm90_kernel",
        "decode_kernel",
        "_prefix_kernel",
        "_merge_kernel",
    }
    pipelined, ranks, beside, refilled = set(), set(), 0, 0
    for name, asked, metadata, ptx in kernels:
        assert asked and metadata
        if asked == _dependent.BESIDE:  # it waits where it ends, in every way to its end
            beside += 1
            before, _, after = ptx.partition("griddepcontrol.launch_dependents")
            assert "griddepcontrol" not in before and not re.search(r"\b(?:ld|st|atom|red|cp)\.(?!param|shared)", before)
            waits, ends = (after.split(f"{end};") for end in ("griddepcontrol.wait", "ret"))
            assert len(waits) == len(ends) and not re.search(r"\b(?:ld|st|atom|red|cp)\.(?!param|shared)", waits[-1])
            continue
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in after and "griddepcontrol" not in before and "griddepcontrol.wait" not in after, name
        assert not re.search(r"^\s*(@%p\d+\s+)?(bra|ret)\b", before, re.M), f"{name}: a program might leave before it waits"
        touched = re.findall(r"\b(?:ld|st|atom|red|cp)\.(?!param|shared)[\w.:]+[^;]*;", before)
        weights = {"_vector_kernel": {"2"}, "_vector_qkv_kernel": {"2"}, "_rms_norm_kernel": {"1", "2"}}  # parameters; no pointer is absent
        if name.endswith("_sm90_kernel"):  # weights come by descriptor, the first parameter, beside whose sizes x and the norm stand next
            copies = [load for load in touched if load.startswith("cp.async.bulk.tensor")]
            (rank,) = {int(re.findall(r"\.(\d)d\.", load)[0]) for load in copies}
            by_descriptor = "_rows_" in name  # x too, and then there is no norm
            numbers = set() if by_descriptor else {str(2 * rank + 2)}
            used = lambda part: {re.findall(r"\], \[(%rd\d+),", load)[0] for load in re.findall(r"cp\.async\.bulk\.tensor[^;]*;", part)}
            assert len(used(before)) == 1 and len(used(ptx)) == 1 + by_descriptor, (name, used(before), used(ptx))
            ranks.add((name, rank))
            refilled += not by_descriptor and _refilled(ptx)
            assert set().union(*(_pointers_of(load, before) for load in touched if load not in copies)) == numbers, (name, touched)
            continue
        direct = name.startswith("_matrix") and "cp.async" not in ptx  # without a norm, so the weights come right after x
        if name in weights or direct:
            assert touched and set.union(*(_pointers_of(load, before) for load in touched)) <= weights.get(name, {"1"}), (name, touched)
        else:
            assert not touched, (name, touched)
        assert ("prefetch.global.L2" in before) == (name.startswith("_matrix") and not direct)
        pipelined.add((name, not direct))
    assert beside == 1 and refilled == 1
    assert ranks == {(f"{name}_sm90_kernel", rank) for name, rank in (("linear", 3), ("linear_rows", 3), ("qkv", 4), ("qkv_rows", 4))}
    assert {(name, kind) for name in ("_matrix_kernel", "_matrix_qkv_kernel") for kind in (True, False)} <= pipelined
