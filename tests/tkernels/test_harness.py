"""Canaries: what of the interpreter may be trusted, and that the package works around the rest.

On the CPU the kernels run in Triton's interpreter, on numpy. Trusted there: loads, stores and casts to fp32 of every dtype, fp32, fp16
and integer arithmetic, reductions, dot on fp32 and fp16, 32-bit wrap-around. Not trusted: arithmetic on bf16 (raw bits have been
multiplied), casts fp32 → bf16 (they truncate) fp32 → e4m3 (wrong around the smallest
normal, no NaN), and loads of e4m3 NaN. Kernels therefore load, convert to
fp32, compute, and round with ``tkernels._triton.cast``; matrix products go through ``tkernels._triton.dot``. Programs run one after
another and dots are exact, so a green CPU run shows neither freedom from races nor the rounding of tensor cores: every kernel test
takes the ``device`` fixture and runs on a GPU too.

A canary that fails says which results not to believe; canaries of known faults are xfail(strict=False), so a repaired interpreter
shows as XPASS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from oracle import FP8

from bench.profile_step import Kernel, _short, shares
from tkernels._op import _on_its_device
from tkernels._triton import INTERPRETED, cast, dot, tl, triton
from tkernels.quant import to_fp8
from tkernels.rmsnorm import rms_norm, rms_norm_ref


@triton.jit
def _copy_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(tl.float32))


@triton.jit
def _plain_cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@triton.jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, cast(tl.load(x_ptr + offs), y_ptr.dtype.element_ty))


@triton.jit
def _to_fp8_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y_ptr + offs, to_fp8(tl.load(x_ptr + offs)))


@triton.jit
def _bf16_add_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, (x + x).to(tl.float32))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, PLAIN: tl.constexpr):
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    if PLAIN:
        tl.store(c_ptr + offs, tl.dot(a, b))
    else:
        tl.store(c_ptr + offs, dot(a, b, tl.zeros((16, 16), tl.float32)))


@triton.jit
def _multiply_kernel(x_ptr, y_ptr, factor):
    tl.store(y_ptr, tl.load(x_ptr) * factor)


def _all_fp8(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(FP8)


def _hard_to_round(device: torch.device) -> torch.Tensor:
    """8192 fp32 values: random ones over many binades, and for every e4m3 value its neighbours and the exact ties between them."""
    codes = _all_fp8(device).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat([codes, ties, ties * (1 + 1e-6), ties * (1 - 1e-6)])
    noise = torch.randn(8192 - exact.numel(), device=device) * torch.logspace(-6, 2, 8192 - exact.numel(), device=device)
    return torch.cat([exact, noise.clamp(-448, 448)])


def _bf16_ties(device: torch.device) -> torch.Tensor:
    bits = torch.randint(0x3F00_0000, 0x4400_0000, (4096,), dtype=torch.int32, device=device)
    bits[:1024] = bits[:1024] & -0x10000 | 0x8000  # exactly between two bf16 values
    x = bits.view(torch.float32)
    x[-3:] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_b165_loads_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    x = _all_fp8(device) if dtype == FP8 else torch.randn(256, device=device).to(dtype)
    x = torch.where(x.float().isnan(), torch.zeros_like(x), x)
    y = torch.empty(256, device=device)
    _copy_kernel[(1,)](x, y, 256)
    torch.testing.assert_close(y, x.float(), rtol=0, atol=0)


@pytest.mark.xfail(INTERPRETED, strict=False, reason="the interpreter loads the NaN codes of e4m3 as 480")
def test_b165_canary_e4m3_nan_loads(device: torch.device) -> None:
    y = torch.empty(256, device=device)
    _copy_kernel[(1,)](_all_fp8(device), y, 256)
    assert y.isnan().nonzero().flatten().tolist() == [127, 255]


def test_b165_cast_rounds_to_nearest_even_bf16(device: torch.device) -> None:
    x = _bf16_ties(device)
    y = torch.empty(4096, dtype=torch.bfloat16, device=device)
    _cast_kernel[(1,)](x, y, 4096)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_b165_cast_rounds_to_nearest_even_e4m3(device: torch.device) -> None:
    x = _hard_to_round(device)
    y = torch.empty(8192, dtype=FP8, device=device)
    _cast_kernel[(1,)](x, y, 8192)
    assert torch.equal(y.view(torch.uint8), x.to(FP8).view(torch.uint8))


def test_b165_every_e4m3_code_survives_a_round_trip(device: torch.device) -> None:
    codes = _all_fp8(device)
    y = torch.empty(256, dtype=FP8, device=device)
    _to_fp8_kernel[(1,)](codes.float(), y, 256)
    same = y.view(torch.uint8) == codes.view(torch.uint8)
    assert bool((same | codes.float().isnan()).all())


def test_b103_to_fp8_saturates_and_keeps_nan(device: torch.device) -> None:
    x = torch.tensor(
        [448.0, 449, 464, 465, 480, 1e4, float("inf"), -1e4, -float("inf"), float("nan"), 0, -0.0, 1e-9, -1e-9, 3, 500], device=device
    )
    y = torch.empty(16, dtype=FP8, device=device)
    _to_fp8_kernel[(1,)](x, y, 16)
    assert y.float()[:7].tolist() == [448.0] * 7
    assert y.float()[7:9].tolist() == [-448.0] * 2
    assert bool(y.float()[9].isnan())
    assert y.float()[10:].tolist() == [0, 0, 0, 0, 3, 448]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_b165_b166_dot_is_right_in_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """The package's dot, in fp32 without tf32: the precision is stated, not left to a default."""
    a, b = torch.randn(16, 16, device=device).to(dtype), torch.randn(16, 16, device=device).to(dtype)
    c = torch.empty(16, 16, device=device)
    _dot_kernel[(1,)](a, b, c, PLAIN=False)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_b165_int32_multiplication_wraps(device: torch.device) -> None:
    """Otherwise an offset that overflows on the GPU would look right here."""
    x = torch.tensor([70_000], dtype=torch.int32, device=device)
    y = torch.empty(1, dtype=torch.int64, device=device)
    with np.errstate(over="ignore"):
        _multiply_kernel[(1,)](x, y, 70_000)
    assert y.item() == (70_000 * 70_000 + 2**31) % 2**32 - 2**31


@pytest.mark.skipif(not INTERPRETED, reason="a fault of the interpreter")
@pytest.mark.xfail(strict=False, reason="the interpreter multiplies bf16 as raw bits")
def test_b165_canary_plain_bf16_dot() -> None:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    c = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, PLAIN=True)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="a fault of the interpreter")
@pytest.mark.xfail(strict=False, reason="the interpreter adds bf16 as raw bits")
def test_b165_canary_plain_bf16_arithmetic() -> None:
    x = torch.randn(64).bfloat16()
    y = torch.empty(64)
    with np.errstate(over="ignore"):
        _bf16_add_kernel[(1,)](x, y, 64)
    torch.testing.assert_close(y, (x + x).float(), rtol=0, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="a fault of the interpreter")
@pytest.mark.xfail(strict=False, reason="the interpreter truncates fp32 → bf16")
def test_b165_canary_plain_bf16_store() -> None:
    x = _bf16_ties(torch.device("cpu"))[:-3]
    x = torch.cat([x, x[:3]])
    y = torch.empty(4096, dtype=torch.bfloat16)
    _plain_cast_kernel[(1,)](x, y, 4096)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="a fault of the interpreter")
@pytest.mark.xfail(strict=False, reason="the interpreter rounds fp32 → e4m3 wrongly near the smallest normal")
def test_b165_canary_plain_e4m3_cast() -> None:
    x = _hard_to_round(torch.device("cpu"))
    y = torch.empty(8192, dtype=FP8)
    _plain_cast_kernel[(1,)](x, y, 8192)
    assert torch.equal(y.view(torch.uint8), x.to(FP8).view(torch.uint8))


@pytest.mark.skipif(not INTERPRETED, reason="launchers never launch an empty grid; the interpreter must not mind one either")
def test_b161_canary_empty_grid() -> None:
    y = torch.full((16,), 7.0)
    _copy_kernel[(0,)](torch.zeros(16), y, 16)
    assert y.tolist() == [7.0] * 16


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Tensor:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    run = _on_its_device(lambda x, y, *, z: (current[0], y, z))
    assert [run(Tensor(device), 1, z=2) for device in ("cuda:1", "cuda:0", "cpu")] == [(1, 1, 2), (0, 1, 2), (0, 1, 2)]
    assert current == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_run_on_a_gpu_that_is_not_the_current_one() -> None:
    x = torch.randn(3, 64, device="cuda:1")
    weight = torch.ones(64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(rms_norm(x, weight), rms_norm_ref(x, weight, 1e-6))


def _run_python(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_reference_without_triton() -> None:
    out = _run_python("""
        import sys
        sys.modules["triton"] = None  # an import of it fails
        import torch, tkernels
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        y = tkernels.rms_norm(x, torch.ones(8), 1e-6)
        assert torch.equal(y, torch.nn.functional.rms_norm(x.float(), (8,), eps=1e-6).bfloat16())
        one = torch.ones(2)
        print(tkernels.sample(torch.eye(2), one * 0, one.int(), one, one.long(), one.long()).tolist())
        try:
            tkernels.rms_norm(x, torch.ones(7), 1e-6)
        except ValueError as error:
            print(error)
        from tkernels.rmsnorm import _rms_norm_kernel
        try:
            _rms_norm_kernel[(1,)](x)
        except ModuleNotFoundError as error:
            print(error)
    """)
    lines = out.splitlines()
    assert lines[0] == "[0, 1]"
    assert lines[1] == "weight: expected [8] like x's last dimension, got [7]"
    assert "pip install triton" in lines[2]


def test_interpreter_without_triton_says_what_to_install() -> None:
    out = _run_python(
        """
        import sys
        sys.modules["triton"] = None
        try:
            import tkernels
        except ModuleNotFoundError as error:
            print(error)
        """,
        TRITON_INTERPRET="1",
    )
    assert "pip install triton" in out


def test_shares_of_overlapping_kernels_and_gaps_add_up_to_the_span():
    one = [Kernel("a", (4,), 0.0, 10.0), Kernel("b", (8,), 6.0, 15.0), Kernel("c", (1,), 7.0, 9.0), Kernel("a", (4,), 17.0, 20.0)]
    rows = {(row["kernel"], *row["grid"]): row for row in shares([one, list(reversed(one))])}
    assert {key: row["share_us"] for key, row in rows.items()} == {("a", 4): 13.0, ("b", 8): 5.0, ("c", 1): 0.0, ("gaps",): 2.0}
    assert rows["a", 4] == {"kernel": "a", "grid": [4], "launches": 2.0, "kernel_us": 6.5, "share_us": 13.0}
    assert rows["gaps",]["launches"] == 1


def test_shares_keep_kernels_of_one_name_with_different_grids_apart():
    rows = shares([[Kernel("a", (1,), 0.0, 1.0), Kernel("a", (2,), 1.0, 4.0)]])
    assert [(row["kernel"], row["grid"], row["share_us"]) for row in rows] == [("a", [2], 3.0), ("a", [1], 1.0), ("gaps", [], 0.0)]


@pytest.mark.parametrize(("name", "short"), [
    ("_rms_norm_kernel", "_rms_norm_kernel"),
    ("void at::native::(anonymous namespace)::fill<float, at::Of<int, (int)4>>(int, float)", "at::native::fill"),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, Params<float>>(Params<float>)", "internal::gemvx::kernel"),
    ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
])  # fmt: skip
def test_names_of_kernels_are_short_and_still_tell_them_apart(name: str, short: str) -> None:
    assert _short(name) == short
