"""Linear layers for few rows, against cuBLAS: the projections of Llama-1B and -8B, bf16, at least 4 × L2 of weights in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tkernels
from bench.peers import EAGER, INDUCTOR, OURS, inductor
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sets_for, sizes
from tkernels.qkv import linear_rope_and_cache_ref

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


QKV = sizes([("1B", 32, 8, 64, 2048), ("8B", 32, 8, 128, 4096)], [("tiny", 4, 2, 8, 64)])
QKV_CASES = [(*shape, rows) for shape in QKV for rows in ROWS]
PAGE_SIZE, POSITIONS = 16, sizes([8192], [64])[0]


@pytest.mark.parametrize("case", QKV_CASES, ids=lambda case: f"{case[0]} {case[1]}+2x{case[2]} heads of {case[3]}, {case[5]} rows")
@pytest.mark.parametrize("peer", [OURS, "tkernels, two ops", EAGER, INDUCTOR])
def test_linear_rope_and_cache(measure: Any, case: tuple[str, int, int, int, int, int], peer: str) -> None:
    """The first half of attention: RMSNorm, the projection to q, k and v, their rotation and the write to the cache."""
    _, heads, kv_heads, dim, k, rows = case
    n = (heads + 2 * kv_heads) * dim

    def build() -> Problem:
        weights = [torch.randn((n, k), device=DEVICE).mul_(k**-0.5).to(DTYPE) for _ in range(sets_for(n * k * DTYPE.itemsize))]
        inputs = [torch.randn((rows, k), device=DEVICE).to(DTYPE) for _ in weights]
        norm_weight = torch.randn(k, device=DEVICE).to(DTYPE)
        angles = torch.rand(POSITIONS, dim // 2, device=DEVICE) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.randint(0, POSITIONS, (rows,), device=DEVICE)
        slots = torch.randperm(2 * rows * PAGE_SIZE, device=DEVICE)[:rows]
        caches = [torch.zeros(2 * rows, PAGE_SIZE, kv_heads, dim, device=DEVICE, dtype=DTYPE) for _ in "kv"]

        def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)

        def fused(i: int) -> tuple[torch.Tensor, ...]:
            q = tkernels.linear_rope_and_cache(inputs[i], weights[i], None, norm_weight, positions, cos_sin, *caches, slots, eps=1e-5)
            return q, *caches

        def two(i: int) -> tuple[torch.Tensor, ...]:
            q, keys, values = split(tkernels.linear(inputs[i], weights[i], norm_weight=norm_weight, eps=1e-5))
            return tkernels.rope_and_cache(q, keys, values, positions, cos_sin, *caches, slots), *caches

        def turn(x: torch.Tensor) -> torch.Tensor:
            cos, sin = cos_sin[positions][:, None].chunk(2, -1)
            x1, x2 = x.float().chunk(2, -1)
            return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)

        def plain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, keys, values = split(F.linear(F.rms_norm(x, (k,), norm_weight, 1e-5), weight))
            caches[0].view(-1, kv_heads, dim).index_copy_(0, slots, turn(keys))
            caches[1].view(-1, kv_heads, dim).index_copy_(0, slots, values)
            return turn(q), *caches

        compiled = inductor(plain)
        wide = [cache.double() for cache in caches]
        x, weight = inputs[0].double(), weights[0].double()
        expected = linear_rope_and_cache_ref(x, weight, None, norm_weight.double(), positions, cos_sin, *wide, slots, eps=1e-5)
        return Problem(
            peers={
                OURS: fused,
                "tkernels, two ops": two,
                EAGER: lambda i: plain(inputs[i], weights[i]),
                INDUCTOR: lambda i: compiled(inputs[i], weights[i]),
            },
            expected=(expected, *wide),
            tolerance=2**-7 if ON_GPU else 1e-5,  # torch rounds to bf16 three times on the way
            bytes=(n * k + rows * (n + k)) * DTYPE.itemsize,
            flops=2 * rows * n * k,
            sets=len(weights),
        )

    measure(build)
