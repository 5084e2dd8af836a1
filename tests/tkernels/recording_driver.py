"""A GPU driver that only writes down what reaches the C launcher, for a process of its own in which Triton compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DRIVER = """
import importlib, sys, torch, triton, triton.language as tl
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

calls = []
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 77, get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda src, metadata: lambda *args: calls.append(args),
    utils=SimpleNamespace(
        load_binary=lambda *a: ("module", 1234, 32, 0, 1024), get_device_properties=lambda device: {"max_shared_mem": 1 << 17}
    ),
))
torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda index: 77
"""


def run_recorded(code: str, folder: Path) -> None:
    """``code`` after the driver, whose launches are in ``calls``; it must pass. The interpreter changes triton.language for a whole
    process, hence another one; a kernel's source must lie in a file, hence ``folder``."""
    script = folder / "recorded.py"
    script.write_text(_DRIVER + code)
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
