"""Bound calls: launches that are prepared once and repeated on the same memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tkernels import _launch
from tkernels._triton import tl, triton


class Memory:
    """Allocates like torch.empty, and remembers."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def __call__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.given.append(torch.empty(*shape, dtype=dtype, device=device))
        return self.given[-1]


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, width, BLOCK: tl.constexpr = 8):
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) * factor, mask=mask)


def test_an_op_that_also_calls_torch_is_not_bound(device: torch.device) -> None:
    x, y = torch.arange(4.0, device=device), torch.zeros(4, device=device)

    def launches_only(x: torch.Tensor, y: torch.Tensor) -> None:
        _launch.launch(_scale_kernel, (1,), x, y, 2.0, 4)

    def adds_too(x: torch.Tensor, y: torch.Tensor) -> None:
        launches_only(x, y)
        y += 1

    repeat = _launch.bind(launches_only, Memory(), (x, y), {})
    x += 1
    assert repeat is not None and repeat() is None
    assert y.tolist() == [2, 4, 6, 8]
    assert _launch.bind(adds_too, Memory(), (x, y), {}) is None, "the addition would be lost"
    assert y.tolist() == [3, 5, 7, 9], "the op has run"


# Run where Triton compiles: the interpreter changes triton.language for the whole process.
_COMPARE = """
import torch, triton, triton.language as tl
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tkernels import _launch

calls = []
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 77, get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda src, metadata: lambda *args: calls.append(args),
    utils=SimpleNamespace(
        load_binary=lambda *a: ("module", 1234, 32, 0, 1024), get_device_properties=lambda device: {"max_shared_mem": 1 << 17}
    ),
))
torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda index: 77

@triton.jit
def kernel(x_ptr, y_ptr, none_ptr, factor, width, BLOCK: tl.constexpr = 8):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < width) * factor, mask=offs < width)

x, y = torch.zeros(8), torch.zeros(8)
compiled = kernel[(3,)](x, y, None, 2.0, width=1, num_warps=2)
bound = _launch._bound_launch(kernel, compiled, (3,), (x, y, None, 2.0), {"width": 1, "num_warps": 2})
_launch._on_device(torch.device("cuda", 0))((bound,), None)
theirs, ours = calls
theirs = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in theirs]
theirs[6:9] = [None] * 3  # launch metadata and hooks, for profilers
assert list(ours) == theirs, (theirs, ours)
assert ours[:5] == (3, 1, 1, 77, 1234) and ours[-4:] == (None, 2.0, 1, 8), ours
"""


def test_compiled_kernels_get_what_tritons_launcher_gives_them(tmp_path: Path) -> None:
    """Without a device: a driver that writes down what reaches the C launcher, once from Triton's own path and once from ours."""
    script = tmp_path / "compare.py"  # a kernel's source must lie in a file
    script.write_text(_COMPARE)
    path = os.pathsep.join([str(Path(_launch.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
