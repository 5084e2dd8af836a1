"""Fused element-wise kernels: norms, gated activations, rotary embedding. Llama-8B widths, bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tkernels
from bench.peers import EAGER, INDUCTOR, LIGER, OURS, inductor
from bench.suite import DEVICE, DTYPE, Problem, sets_for, sizes
from tkernels.layernorm import layer_norm_ref
from tkernels.quant import quantize_fp8_dynamic_ref
from tkernels.rmsnorm import add_rms_norm_ref, rms_norm_ref
from tkernels.rope import rope_and_cache_ref, rope_ref

TOKENS = sizes([1, 16, 64, 256, 2048, 16384], [2])
(HIDDEN,) = sizes([4096], [64])
(INTERMEDIATE,) = sizes([14336], [96])
HEADS, KV_HEADS, HEAD_DIM = sizes([32, 8, 128], [4, 2, 16])
EPS = 1e-5
PAGE_SIZE = 16

tokens = pytest.mark.parametrize("case", TOKENS, ids=lambda n: f"{n} tokens")


def peers(*names: str) -> Any:
    return pytest.mark.parametrize("peer", names)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def problem(make: Callable[[], tuple], functions: dict[str, Callable], oracle: Callable, moved: int, **keywords: Any) -> Problem:
    """make() gives the arguments of one call; oracle gets those of the first set in fp64."""
    arguments = [make() for _ in range(sets_for(moved))]
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments[0]]
    calls = {name: (lambda i, function=function: function(*arguments[i])) for name, function in functions.items()}
    return Problem(peers=calls, expected=oracle(*wide), bytes=moved, sets=len(arguments), **keywords)


def liger() -> Any:
    import liger_kernel.ops

    return liger_kernel.ops


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_rms_norm(measure: Any, case: int, peer: str) -> None:
    weight = randn(HIDDEN)

    def torch_norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), weight, EPS)

    measure(
        lambda: problem(
            lambda: (randn(case, HIDDEN),),
            {
                OURS: lambda x: tkernels.rms_norm(x, weight, EPS),
                EAGER: torch_norm,
                INDUCTOR: inductor(torch_norm),
                LIGER: lambda x: liger().LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
            },
            lambda x: rms_norm_ref(x, weight, EPS),
            2 * case * HIDDEN * DTYPE.itemsize,
        )
    )


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_add_rms_norm(measure: Any, case: int, peer: str) -> None:
    weight = randn(HIDDEN)

    def torch_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return F.rms_norm(total, (HIDDEN,), weight, EPS), total

    def oracle(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x + residual).to(DTYPE).double()  # rounded to the dtype before it is normalised
        return add_rms_norm_ref(total, torch.zeros_like(total), weight, EPS)

    measure(
        lambda: problem(
            lambda: (randn(case, HIDDEN), randn(case, HIDDEN)),
            {
                OURS: lambda x, residual: tkernels.add_rms_norm(x, residual, weight, EPS),
                EAGER: torch_norm,
                INDUCTOR: inductor(torch_norm),
                LIGER: lambda x, residual: liger().LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False),
            },
            oracle,
            4 * case * HIDDEN * DTYPE.itemsize,
        )
    )


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_layer_norm(measure: Any, case: int, peer: str) -> None:
    weight, bias = randn(HIDDEN), randn(HIDDEN)

    def torch_norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), weight, bias, EPS)

    measure(
        lambda: problem(
            lambda: (randn(case, HIDDEN),),
            {
                OURS: lambda x: tkernels.layer_norm(x, weight, bias, EPS),
                EAGER: torch_norm,
                INDUCTOR: inductor(torch_norm),
                LIGER: lambda x: liger().LigerLayerNormFunction.apply(x, weight, bias, EPS),
            },
            lambda x: layer_norm_ref(x, weight, bias, EPS),
            2 * case * HIDDEN * DTYPE.itemsize,
        )
    )


def _liger_gate_up(x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(x)


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_silu_and_mul(measure: Any, case: int, peer: str) -> None:
    def torch_act(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    measure(
        lambda: problem(
            lambda: (randn(case, 2 * INTERMEDIATE),),
            {OURS: tkernels.silu_and_mul, EAGER: torch_act, INDUCTOR: inductor(torch_act), LIGER: _liger_gate_up},
            torch_act,
            3 * case * INTERMEDIATE * DTYPE.itemsize,
        )
    )


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_gelu_mul(measure: Any, case: int, peer: str) -> None:
    """From two tensors, tanh form, as in Gemma."""

    def torch_act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.gelu(gate, approximate="tanh") * up

    measure(
        lambda: problem(
            lambda: (randn(case, INTERMEDIATE), randn(case, INTERMEDIATE)),
            {
                OURS: tkernels.gelu_mul,
                EAGER: torch_act,
                INDUCTOR: inductor(torch_act),
                LIGER: lambda gate, up: liger().LigerGELUMulFunction.apply(gate, up),
            },
            torch_act,
            3 * case * INTERMEDIATE * DTYPE.itemsize,
        )
    )


def _table(positions: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions, device=DEVICE), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM))
    return torch.cat([angles.cos(), angles.sin()], -1)


def _torch_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cos, sin = rows[:, None].chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@tokens
@peers(OURS, EAGER, INDUCTOR, LIGER)
def test_rope(measure: Any, case: int, peer: str) -> None:
    table = _table(case)
    positions = torch.arange(case, device=DEVICE)

    def torch_rope(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = table[positions]
        return _torch_rope(q, rows), _torch_rope(k, rows)

    doubled = [half.repeat(1, 2)[None].to(DTYPE) for half in table.chunk(2, -1)]

    def in_place(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Liger's works on [batch, heads, tokens, dim] and writes into its inputs."""
        q_out, k_out = liger().LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *doubled)
        return q_out[0].transpose(0, 1), k_out[0].transpose(0, 1)

    def build() -> Problem:
        made = problem(
            lambda: (randn(case, HEADS, HEAD_DIM), randn(case, KV_HEADS, HEAD_DIM)),
            {OURS: lambda q, k: tkernels.rope(q, k, positions, table), EAGER: torch_rope, INDUCTOR: inductor(torch_rope)},
            lambda q, k: rope_ref(q, k, positions, table),
            2 * case * (HEADS + KV_HEADS) * HEAD_DIM * DTYPE.itemsize,
        )
        torch.manual_seed(0)  # the same inputs again, for the peer that overwrites its own
        own = [(randn(case, HEADS, HEAD_DIM), randn(case, KV_HEADS, HEAD_DIM)) for _ in range(made.sets)]
        made.peers[LIGER] = lambda i: in_place(*own[i])
        return made

    measure(build)


@tokens
@peers(OURS, EAGER, INDUCTOR)
def test_rope_and_cache(measure: Any, case: int, peer: str) -> None:
    """Rotation and the write of k and v to their pages; views of one fused projection."""
    table, positions = _table(case), torch.arange(case, device=DEVICE)
    pages = -(-case // PAGE_SIZE)
    caches = [torch.zeros(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    slots = torch.randperm(pages * PAGE_SIZE, device=DEVICE)[:case]

    def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qkv.view(case, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)

    def ours(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tkernels.rope_and_cache(*split(qkv), positions, table, *caches, slots), *caches)

    def plain(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = split(qkv)
        rows = table[positions]
        caches[0].view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, _torch_rope(k, rows))
        caches[1].view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, v)
        return (_torch_rope(q, rows), *caches)

    def oracle(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = [cache.double() for cache in caches]
        return (rope_and_cache_ref(*split(qkv), positions, table, *wide, slots), *wide)

    moved = 2 * case * (HEADS + 2 * KV_HEADS) * HEAD_DIM * DTYPE.itemsize
    measure(
        lambda: problem(
            lambda: (randn(case, (HEADS + 2 * KV_HEADS) * HEAD_DIM),),
            {OURS: ours, EAGER: plain, INDUCTOR: inductor(plain)},
            oracle,
            moved,
        )
    )


@tokens
@peers(OURS, EAGER, INDUCTOR)
def test_quantize_fp8_per_token(measure: Any, case: int, peer: str) -> None:
    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8_dynamic_ref(x, 0)

    measure(
        lambda: problem(
            lambda: (randn(case, HIDDEN),),
            {OURS: tkernels.quantize_fp8_per_token, EAGER: plain, INDUCTOR: inductor(plain)},
            lambda x: tuple(part.double() for part in quantize_fp8_dynamic_ref(x.to(DTYPE), 0)),
            case * HIDDEN * (DTYPE.itemsize + 1),
            tolerance=1e-2,  # a value at the middle of two e4m3 neighbours may go either way
        )
    )
