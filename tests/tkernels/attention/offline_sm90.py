"""Compile the Gluon prefill kernel for sm_90 without a GPU and count what ptxas spills: a program, since it needs TRITON_INTERPRET=0.

    TRITON_INTERPRET=0 python -m tests.tkernels.attention.offline_sm90 '[{"dim": 128, "page_size": 16}, …]'

prints a JSON list: {"registers", "spills" (bytes stored and loaded), "shared" (bytes), "wgmma" (instructions)} a case.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tkernels.attention import prefill_sm90
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention._prefill_sm90.kernel import prefill_sm90_kernel

_POINTERS = ("out_ptr", "lse_ptr", "table_ptr", "lens_ptr", "cu_ptr", "sinks_ptr", "counter_ptr")
_FLOATS = ("qk_scale", "softcap", "v_factor")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def inputs(
    dim: int, page_size: int, dtype: torch.dtype, heads: int, kv_heads: int, causal: bool, window: int, softcap: float, sinks: bool
) -> Inputs:
    """The arguments of a call on 32 tokens, on the CPU."""
    cache = torch.zeros((4, page_size, kv_heads, dim), dtype=dtype)
    return check_inputs(
        torch.zeros((32, heads, dim), dtype=dtype), cache, cache.clone(), torch.zeros((1, 2), dtype=torch.int32),
        torch.tensor([32], dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32), dim**-0.5, causal, window, softcap,
        torch.zeros(heads, dtype=dtype) if sinks else None, None, None, 1.0,
    )  # fmt: skip


def compile_case(
    dim: int = 128, page_size: int = 16, dtype: str = "bfloat16", heads: int = 32, kv_heads: int = 8, causal: bool = True,
    window: int = 0, softcap: float = 0.0, sinks: bool = False, lse: bool = False,
) -> dict[str, Any]:  # fmt: skip
    x = inputs(dim, page_size, getattr(torch, dtype), heads, kv_heads, causal, window, softcap, sinks)
    element = _NAMES[x.q.dtype]
    boxes = prefill_sm90.boxes(x.q.dtype, dim, page_size)
    constants: dict[str, Any] = dict(prefill_sm90.constants(x, lse, 9))
    signature: dict[str, str] = {}
    for name in prefill_sm90_kernel.arg_names:
        if name in boxes:
            shape, layout = boxes[name]
            signature[name] = f"tensordesc<{element}{shape},{layout!r}>"
        elif name in constants:
            signature[name] = "constexpr"
        elif (name == "lse_ptr" and not lse) or (name == "sinks_ptr" and not sinks):
            signature[name], constants[name] = "constexpr", None
        elif name in _POINTERS:
            signature[name] = "*" + {"out_ptr": element, "sinks_ptr": element, "lse_ptr": "fp32"}.get(name, "i32")
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    aligned = [name for name in (*_POINTERS, "stride_ot", "stride_oh") if signature[name] != "constexpr"]
    attributes = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(prefill_sm90_kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = kernel.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        command = [str(ptxas), "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
    }


if __name__ == "__main__":
    print(json.dumps([compile_case(**case) for case in json.loads(sys.argv[1])]))
