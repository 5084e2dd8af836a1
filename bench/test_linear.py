"""Linear layers for few rows, against cuBLAS: the projections of Llama-1B and -8B, bf16, at least 4 × L2 of weights in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tkernels
from bench.peers import EAGER, INDUCTOR, OURS, inductor
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sets_for, sizes

SHAPES = sizes(
    [
        ("1B qkv", 3072, 2048), ("1B o", 2048, 2048), ("1B gate-up", 16384, 2048), ("1B down", 2048, 8192), ("1B head", 128256, 2048),
        ("8B qkv", 6144, 4096), ("8B o", 4096, 4096), ("8B gate-up", 28672, 4096), ("8B down", 4096, 14336),
    ],
    [("tiny", 48, 64)],
)  # fmt: skip
ROWS = sizes([1, 8, 16, 64, 256], [1])
CASES = [(name, n, k, rows) for name, n, k in SHAPES for rows in ROWS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}x{case[2]}, {case[3]} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER])
def test_linear(measure: Any, case: tuple[str, int, int, int], peer: str) -> None:
    _, n, k, rows = case

    def build() -> Problem:
        weights = [torch.randn((n, k), device=DEVICE).mul_(k**-0.5).to(DTYPE) for _ in range(sets_for(n * k * DTYPE.itemsize))]
        inputs = [torch.randn((rows, k), device=DEVICE).to(DTYPE) for _ in weights]
        return Problem(
            peers={
                OURS: lambda i: tkernels.linear(inputs[i], weights[i]),
                EAGER: lambda i: F.linear(inputs[i], weights[i]),
            },
            expected=F.linear(inputs[0].double(), weights[0].double()),
            bytes=(n * k + rows * (n + k)) * DTYPE.itemsize,
            flops=2 * rows * n * k,
            sets=len(weights),
        )

    measure(build)


GATED = [(name, n, k, rows) for name, n, k, rows in CASES if "gate-up" in name or name == "tiny"]


@pytest.mark.parametrize("case", GATED, ids=lambda case: f"{case[0]} {case[1]}x{case[2]}, {case[3]} rows")
@pytest.mark.parametrize("peer", [OURS, EAGER, INDUCTOR])
def test_norm_linear_silu(measure: Any, case: tuple[str, int, int, int], peer: str) -> None:
    """The first half of an MLP: RMSNorm, gate and up in one projection, silu(gate) · up."""
    _, n, k, rows = case

    def build() -> Problem:
        weights = [torch.randn((n, k), device=DEVICE).mul_(k**-0.5).to(DTYPE) for _ in range(sets_for(n * k * DTYPE.itemsize))]
        inputs = [torch.randn((rows, k), device=DEVICE).to(DTYPE) for _ in weights]
        norm_weight = torch.randn(k, device=DEVICE).to(DTYPE)

        def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            gate, up = F.linear(F.rms_norm(x, (k,), norm_weight.to(x.dtype), 1e-5), weight).chunk(2, -1)
            return F.silu(gate) * up

        compiled = inductor(plain)
        return Problem(
            peers={
                OURS: lambda i: tkernels.linear(inputs[i], weights[i], norm_weight=norm_weight, gated=True, eps=1e-5),
                EAGER: lambda i: plain(inputs[i], weights[i]),
                INDUCTOR: lambda i: compiled(inputs[i], weights[i]),
            },
            expected=plain(inputs[0].double(), weights[0].double()),
            tolerance=2**-7 if ON_GPU else 1e-5,  # torch rounds to bf16 three times on the way
            bytes=(n * k + rows * (n // 2 + k)) * DTYPE.itemsize,
            flops=2 * rows * n * k,
            sets=len(weights),
        )

    measure(build)
