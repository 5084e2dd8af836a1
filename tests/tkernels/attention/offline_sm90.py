"""Compile the Gluon kernels for sm_90 without a GPU and count what ptxas spills: a program, since it needs TRITON_INTERPRET=0.

    TRITON_INTERPRET=0 python -m tests.tkernels.attention.offline_sm90 '[{"kernel": "prefill", "dim": 128, "page_size": 16}, …]'

prints a JSON list: {"registers", "serialised" (whether each product waits for the one before it), "spills" (bytes stored and loaded),
"shared" (bytes), "wgmma" (instructions), "mma" (those of a warp), "selects" (of 16 bits), "permutes" (of bytes), "order" (how the warps
that begin the program touch memory, wait, and let the next kernel begin), "give_backs", "leading_zeros" (how often the assembler has such
instructions, None without a disassembler)} a case.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tkernels import _dependent
from tkernels.attention import decode_one_sm90, decode_sm90, prefill, prefill_sm90
from tkernels.attention._common import FP8
from tkernels.attention._decode_sm90.kernel import decode_sm90_kernel
from tkernels.attention._decode_sm90.one_kernel import decode_one_sm90_kernel
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention._prefill_sm90.kernel import prefill_sm90_kernel
from tkernels.attention._tiles import long_prefill_tiles, prefill_tiles
from tkernels.attention.ref import output_dtype

_POINTERS = (
    "out_ptr", "lse_ptr", "table_ptr", "lens_ptr", "cu_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "counter_ptr",
    "part_ptr", "state_ptr", "arrivals_ptr",
)  # fmt: skip
_FP32 = ("lse_ptr", "k_scale_ptr", "v_scale_ptr", "part_ptr", "state_ptr")
_FLOATS = ("qk_scale", "softcap", "v_factor")
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8e4nv"}


def inputs(
    dim: int, page_size: int, dtype: torch.dtype, heads: int, kv_heads: int, causal: bool, window: int, softcap: float, sinks: bool,
    scales: bool, fp8: bool,
) -> Inputs:  # fmt: skip
    """The arguments of a call on 32 tokens, on the CPU."""
    cache = torch.zeros((4, page_size, kv_heads, dim), dtype=FP8 if fp8 else dtype)
    return check_inputs(
        torch.zeros((32, heads, dim), dtype=dtype), cache, cache.clone(), torch.zeros((1, 2), dtype=torch.int32),
        torch.tensor([32], dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32), dim**-0.5, causal, window, softcap,
        torch.zeros(heads, dtype=output_dtype(dtype)) if sinks else None, *((torch.ones(kv_heads),) * 2 if scales else (None, None)), 1.0,
    )  # fmt: skip


def compile_case(
    kernel: str = "prefill", dim: int = 128, page_size: int = 16, dtype: str = "bfloat16", heads: int = 32, kv_heads: int = 8,
    causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: bool = False, lse: bool = False, scales: bool = False,
    pdl: int = 0, fp8: bool = False, queries: int = 1, min_queries: int = 1, layout: list[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """pdl: as the kernels take it. fp8: the caches. queries, layout: of decode_one_sm90, the shipped one if None; min_queries: of
    both decodes. Kernel "long_prefill": the plain kernel with the tiles for rows of many keys."""
    x = inputs(dim, page_size, getattr(torch, dtype), heads, kv_heads, causal, window, softcap, sinks, scales, fp8)
    if kernel == "long_prefill":
        return _assembled(_compiled_long_prefill(x))
    element, result, options = _NAMES[x.q.dtype], _NAMES[output_dtype(x.q.dtype)], {"num_warps": 4}
    if kernel == "prefill":
        function, boxes = prefill_sm90_kernel, prefill_sm90.boxes(x.q.dtype, dim, page_size)
        constants: dict[str, Any] = dict(prefill_sm90.constants(x, lse, 9)) | {"PDL": pdl}
    elif kernel == "decode_one":
        chosen = decode_one_sm90.Layout(*layout) if layout else None
        constants = decode_one_sm90.constants(x, lse, 132, queries, min_queries, chosen) | {"PDL": pdl}
        chosen = chosen or decode_one_sm90.layout_of(
            constants["DIM"], x.k_cache.element_size(), columns=constants["COLUMNS"], queries=queries
        )
        function, boxes = decode_one_sm90_kernel, decode_one_sm90.boxes(x, constants)
        options = {"num_warps": chosen.num_warps, "maxnreg": chosen.maxnreg}
    else:
        constants = decode_sm90.constants(x, lse, 132, min_queries) | {"PDL": pdl}
        function, boxes = decode_sm90_kernel, decode_sm90.boxes(x.q.dtype, dim, page_size, constants["GROUP_ROWS"])
    absent = {"lse_ptr": not lse, "sinks_ptr": not sinks, "k_scale_ptr": not scales, "v_scale_ptr": not scales}
    signature: dict[str, str] = {}
    for name in function.arg_names:
        if name in boxes:
            shape, shared = boxes[name]
            of = {"q_desc": element, "out_desc": result}.get(name, _NAMES[x.k_cache.dtype])
            signature[name] = f"tensordesc<{of}{shape},{shared!r}>"
        elif name in constants:
            signature[name] = "constexpr"
        elif absent.get(name):
            signature[name], constants[name] = "constexpr", None
        elif name in _POINTERS:
            signature[name] = "*" + ("fp32" if name in _FP32 else result if name in ("out_ptr", "sinks_ptr") else "i32")
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    aligned = [name for name in signature if name in (*_POINTERS, "stride_ot", "stride_oh") and signature[name] != "constexpr"]
    attributes = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(function, signature, constants, attributes)
    return _assembled(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def _compiled_long_prefill(x: Inputs) -> Any:
    """As ``prefill`` launches it for many keys of sm_90, which is recorded in place of a launch."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with mock.patch.object(_dependent, "launch", lambda *args, **options: calls.append((args, options))):
        prefill.prefill(
            x._replace(capacity=1 << 20),
            x.q.clone(),
            None,
            9,
            *(of("sm_90", x.dim, x.k_cache.element_size()) for of in (prefill_tiles, long_prefill_tiles)),
        )
    (kernel, _, _, *args), constants = calls[0]
    assert constants["PART"] == prefill.LONG and constants["OVERLAP"], "this shape has no tiles for many keys"
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    constants["PDL"] = constants.pop("place")
    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        value = constants.get(parameter.name, args[i] if i < len(args) else None)
        if value is None or parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + {torch.int32: "i32", torch.float32: "fp32"}.get(value.dtype, _NAMES.get(value.dtype, ""))
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and signature[parameter.name] != "constexpr" and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={k: v for k, v in options.items() if v is not None})


def _assembled(compiled: Any) -> dict[str, Any]:
    ptx = compiled.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        command = [str(ptxas), "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
        disassembler = ptxas.with_name("nvdisasm")
        sass = None
        if disassembler.exists():
            asked = [str(disassembler), "-c", "kernel.cubin"]
            sass = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "serialised": "serialized" in report,
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync.aligned"),
        "selects": ptx.count("selp.b16"),
        "permutes": ptx.count("prmt.b32"),
        "order": _order(ptx),
        "give_backs": None if sass is None else sass.count("BAR.ARV"),
        "leading_zeros": None if sass is None else sass.count("FLO.U32"),
    }


def _order(ptx: str) -> list[str]:
    """Of "wait", "launch_dependents" and "touch" (global memory, repetitions left out), as they stand up to "ret". The other warps' code
    stands behind that, and they run only between the first and the last of these."""
    found: list[str] = []
    for control, end, touch in re.findall(r"griddepcontrol\.(\w+)|\b(ret);|\b(ld|st|atom|red|cp)\.(?!param|shared)", ptx):
        event = control or end or (touch and "touch")
        if not found or found[-1] != event:
            found.append(event)
        if end:
            break
    return found


if __name__ == "__main__":
    print(json.dumps([compile_case(**case) for case in json.loads(sys.argv[1])]))
