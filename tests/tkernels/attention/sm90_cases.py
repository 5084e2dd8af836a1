"""Calls of the Gluon kernels for Hopper on the CPU: which are taken, what is launched, what each kernel compiles to."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tkernels.attention.cases import Case
from tests.tkernels.attention.test_batches import checked
from tkernels import _dependent, _repeats
from tkernels.attention import paged
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention.decode import QUERY_LEN

ROOT = Path(__file__).parents[3]
SHAPE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 128, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}
ORDER = {  # by place (_dependent.py)
    0: ["touch", "ret"],
    1: ["wait", "launch_dependents", "touch", "ret"],
    2: ["launch_dependents", "touch", "wait", "ret"],
}


def call(page_size: int = 16, dim: int = 64, dtype: torch.dtype = torch.bfloat16, **keywords: Any) -> Inputs:
    """One of 32 tokens of one sequence, on the CPU."""
    q = torch.zeros((32, 4, dim), dtype=dtype)
    cache = torch.zeros((4, page_size, 2, dim), dtype=dtype)
    arguments: dict[str, Any] = dict(q=q, k_cache=cache, v_cache=cache.clone(), window=0, softcap=0.0, k_scale=None) | keywords
    table = arguments.get("block_table", torch.zeros((1, 2), dtype=torch.int32))
    return check_inputs(
        arguments["q"], arguments["k_cache"], arguments["v_cache"], table,
        torch.tensor([32], dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32), 0.1, True, arguments["window"],
        arguments["softcap"], None, arguments["k_scale"], None, 1.0,
    )  # fmt: skip


def launches_chosen(case: Case, max_query_len: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name, with query tokens, and place of each launch of the op, in order; none happens. With the fixture ``on_hopper``."""
    chosen: list[tuple[str, int]] = []

    def noted(kernel: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
        def launch(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
            bound = inspect.signature(kernel).bind(*arguments, **keywords)
            bound.apply_defaults()
            of = bound.arguments
            queries = f" {of['min_queries']} to {of.get('queries', QUERY_LEN)}" if "min_queries" in of else ""
            chosen.append((kernel.__name__ + queries, of.get("place", _dependent.ALONE)))
            return []

        return launch

    for name in ("decode", "prefill"):
        monkeypatch.setattr(paged, name, noted(getattr(paged, name)))
    for module in (paged.decode_sm90, paged.decode_one_sm90, paged.prefill_sm90):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    paged.launch(checked(case), torch.empty_like(case.q), None, max_query_len)
    return chosen


def check_workspace(kernel: ModuleType, case: Case, seqs: int, mib: float, **keywords: int) -> None:
    """Of a call like ``case`` with ``seqs`` sequences on 132 multiprocessors: at most ``mib``, and just that with many.

    keywords: of the kernel's ``constants``."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    x = checked(case)._replace(num_seqs=seqs)
    constant = kernel.constants(x, False, 132, **keywords)
    taken = min(seqs, constant["PROGRAMS"]) * x.kv_heads * constant["LEAVES"] * constant["SLOT_ROWS"] * x.dim * 4
    assert taken <= mib * 2**20 and (seqs < 8192 or taken == mib * 2**20)
    assert constant["BY_RANGE"] == (seqs > constant["PROGRAMS"])


def compile_offline(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Facts of each case; where it is beside others it waits for them when and where it must."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this triton has no Gluon for Hopper")
    import triton

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this triton brings no ptxas")
    command = [sys.executable, "-m", "tests.tkernels.attention.offline_sm90", json.dumps(cases)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for case, facts in zip(cases, found, strict=True):
        assert facts["order"] == ORDER[case.get("pdl", 0)], case
    return found


def launches_of(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """For a fixture: what each launch of the kernel returned, but for temporaries, which must not live longer than without the test."""
    launches: list[Any] = []
    name = kernel.__name__.rpartition(".")[2]
    launch = getattr(kernel, name)

    def listed(*arguments: Any) -> Any:
        result = launch(*arguments)
        launches.append(None if isinstance(result, list) else result)
        return result

    monkeypatch.setattr(kernel, name, listed)
    _repeats.forget()  # a repeated call launches past the list
    yield launches
    assert launches, "the call went to the plain Triton kernel"
