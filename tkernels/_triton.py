"""Triton, or a stand-in that keeps ``import tkernels`` working where it is not installed.

Every kernel file imports ``triton`` and ``tl`` from here. Without triton the decorators return an object that raises
only when a kernel is launched; ops still run their PyTorch reference on the CPU.

``INTERPRETED`` is read once, like triton itself reads ``TRITON_INTERPRET``: when a kernel is decorated. Set the variable
before the first import of ``tkernels``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True")

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # the package must import on machines that only want the references
    HAVE_TRITON = False

    class _MissingKernel:
        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getitem__(self, grid: Any) -> Any:
            raise ModuleNotFoundError(
                f"{self.__name__} is a Triton kernel and triton is not installed: pip install triton (Linux), "
                "or run on the CPU without TRITON_INTERPRET to use the PyTorch reference"
            )

    class _MissingLanguage:
        constexpr = staticmethod(lambda value: value)

        def __getattr__(self, name: str) -> Any:
            return None

    class _MissingTriton:
        language = _MissingLanguage()

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return _MissingTriton.jit if fn is None else _MissingKernel(fn.__name__)

    triton: Any = _MissingTriton()  # type: ignore[no-redef]
    tl: Any = _MissingLanguage()  # type: ignore[no-redef]


def gluon_problem(load: Callable[[], object]) -> str | None:
    """Why Gluon kernels cannot be compiled here, or None. load: imports them, and fails where this Triton lacks what they use."""
    if not HAVE_TRITON:
        return "triton is not installed"
    if INTERPRETED:
        return "Triton's interpreter has no Gluon"
    try:
        load()
    except (ImportError, AttributeError) as error:
        return f"this triton lacks what the Gluon kernels use ({error})"
    return None


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, on the host. triton.cdiv gives the same for some 5 µs, because kernels may call it too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and 1 for 0; on the host, see ``cdiv``."""
    return 1 << max(n - 1, 0).bit_length()


if INTERPRETED and not HAVE_TRITON:
    raise ModuleNotFoundError("TRITON_INTERPRET=1 asks for Triton's interpreter, but triton is not installed: pip install triton")

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x (fp32) rounded to nearest even in ``dtype``.

    The interpreter's own casts truncate to bf16, and to e4m3 round wrongly near the smallest normal and lose NaN; hence the
    other forms. An e4m3 cast expects a saturated x (tkernels.quant.to_fp8).
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.where(x == x, rounded, x.to(tl.bfloat16))  # the carry would turn some NaNs into zero
    elif _INTERPRETED and dtype == tl.float8e4nv:
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # three bits of mantissa stay; bias 127 → 7
        subnormal = (magnitude + 24576.0 - 24576.0) * 512.0  # 1.5 · 2**23 steps of 2**-9: rounds to a multiple of 2**-9
        code = tl.where(magnitude < 0.015625, subnormal.to(tl.int32), normal)
        code = tl.where(x == x, code, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(dtype, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation. fp32 operands use no tf32; the interpreter multiplies bf16 only after a cast to fp32,
    because it gets bf16 arithmetic wrong (tests/tkernels/test_harness.py has the canary)."""
    if _INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
