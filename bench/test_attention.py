"""Attention over a paged cache (page 16, pages permuted), 32 query heads on 8 KV heads × 128, bf16.

SDPA and FlexAttention read *contiguous* keys and values, which is easier: no peer in torch reads pages. FlashInfer reads the same pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel

import tkernels
from bench.peers import FLASHINFER, OURS
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sets_for, sizes
from tkernels.attention.ref import paged_attention_ref

HEADS, KV_HEADS, DIM, PAGE_SIZE = sizes([32, 8, 128, 16], [4, 2, 16, 4])
SCALE = DIM**-0.5
FLASH, CUDNN, EFFICIENT = "SDPA flash, contiguous", "SDPA cuDNN, contiguous", "SDPA efficient, contiguous"
FLEX, MATH = "FlexAttention, contiguous", "torch SDPA math, contiguous"
BACKENDS = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
GPU_PEERS = [OURS, FLASH, CUDNN, FLEX, FLASHINFER]


@dataclass
class Paged:
    """``copies`` batches of ``batch`` sequences of ``length`` tokens in one cache; the last ``queries`` tokens of each are queried."""

    batch: int
    length: int
    queries: int

    def __post_init__(self) -> None:
        pages_each = -(-self.length // PAGE_SIZE)
        self.kv_bytes = 2 * self.batch * self.length * KV_HEADS * DIM * DTYPE.itemsize
        self.copies = sets_for(self.kv_bytes)
        pages = self.copies * self.batch * pages_each
        self.caches = [torch.empty((pages, PAGE_SIZE, KV_HEADS, DIM), device=DEVICE, dtype=DTYPE).normal_() for _ in range(2)]
        order = torch.randperm(pages, device=DEVICE).to(torch.int32)
        self.tables = list(order.view(self.copies, self.batch, pages_each))
        self.q = torch.randn((self.batch * self.queries, HEADS, DIM), device=DEVICE).to(DTYPE)
        self.lens = torch.full((self.batch,), self.length, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(self.batch + 1, dtype=torch.int32, device=DEVICE) * self.queries

    def ours(self, i: int) -> torch.Tensor:
        out = tkernels.paged_attention(
            self.q, *self.caches, self.tables[i], self.lens, self.starts, scale=SCALE, max_query_len=self.queries
        )
        assert isinstance(out, torch.Tensor)
        return out

    def contiguous(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, kv_heads, length, dim] of batch i, gathered."""
        k, v = (
            rearrange(cache[self.tables[i].long()], "b p s h d -> b h (p s) d")[:, :, : self.length].contiguous() for cache in self.caches
        )
        return k, v

    def sampled(self, rows: int = 32) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        """(which rows of a result are compared, the oracle's): the first and last queries of the first and the last sequence."""
        picked, expected = [], []
        for s in {0, self.batch - 1}:
            for tail in (False, True):
                count = min(rows, self.queries)
                first = s * self.queries + (self.queries - count if tail else 0)
                keys = self.length if tail else self.length - self.queries + count
                out, _ = paged_attention_ref(
                    self.q[first : first + count].float(), *self.caches, self.tables[0][s : s + 1], self.lens.new_tensor([keys]),
                    self.starts.new_tensor([0, count]), scale=SCALE,
                )  # fmt: skip
                picked.append(torch.arange(first, first + count, device=DEVICE))
                expected.append(out)
        at = torch.cat(picked)
        return lambda out: out[at], torch.cat(expected)


def _flashinfer(paged: Paged, prefill: bool) -> Callable[[int], torch.Tensor]:
    import flashinfer

    wrappers = []
    for table in paged.tables:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        indptr = torch.arange(paged.batch + 1, dtype=torch.int32, device=DEVICE) * table.shape[1]
        last = torch.full((paged.batch,), (paged.length - 1) % PAGE_SIZE + 1, dtype=torch.int32, device=DEVICE)
        if prefill:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                paged.starts, indptr, table.flatten(), last, HEADS, KV_HEADS, DIM, PAGE_SIZE, causal=True, sm_scale=SCALE, q_data_type=DTYPE
            )
        else:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, table.flatten(), last, HEADS, KV_HEADS, DIM, PAGE_SIZE, sm_scale=SCALE, data_type=DTYPE, q_data_type=DTYPE)
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(paged.q, tuple(paged.caches))


def _later(make: Callable[[], Callable[[int], torch.Tensor]]) -> Callable[[int], torch.Tensor]:
    """A peer that is set up at its first call, so that only selected peers pay for it."""
    made: list[Callable[[int], torch.Tensor]] = []

    def call(i: int) -> torch.Tensor:
        if not made:
            made.append(make())
        return made[0](i)

    return call


def _problem(paged: Paged, moved: int, flops: int, causal: bool) -> Problem:
    q = rearrange(paged.q, "(b s) h d -> b h s d", b=paged.batch).contiguous()
    keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def contiguous(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if i not in keys:
            keys[i] = paged.contiguous(i)
        return keys[i]

    def back(out: torch.Tensor) -> torch.Tensor:
        return rearrange(out, "b h s d -> (b s) h d")

    def sdpa(backend: SDPBackend) -> Callable[[int], torch.Tensor]:
        def call(i: int) -> torch.Tensor:
            with sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(q, *contiguous(i), is_causal=causal, scale=SCALE, enable_gqa=True)
            return back(out)

        return call

    def flex() -> Callable[[int], torch.Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        mask = None
        if causal:
            mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, paged.queries, paged.length, device=DEVICE)
        return lambda i: back(compiled(q, *contiguous(i), block_mask=mask, scale=SCALE, enable_gqa=True))

    pick, expected = paged.sampled()
    return Problem(
        peers={
            OURS: paged.ours,
            **{name: sdpa(backend) for name, backend in BACKENDS.items()},
            FLEX: _later(flex),
            FLASHINFER: _later(lambda: _flashinfer(paged, causal)),
        },
        expected=expected,
        pick=pick,
        tolerance=6e-3 if ON_GPU else 1e-5,  # bf16 probabilities: twice the error of SDPA's own kernels
        bytes=moved,
        flops=flops,
        sets=paged.copies,
    )


# FlexAttention compiles for each; bench/attention_decode.py and attention_prefill.py have more, without it
DECODE = sizes([(1, 1024), (1, 8192), (1, 131072), (16, 1024), (64, 2048), (128, 8192)], [(2, 10)])
PREFILL = sizes([(8, 1024), (2, 8192), (1, 16384)], [(2, 12)])


def _name(case: tuple[int, int]) -> str:
    return f"{case[0]} x {case[1]}"


@pytest.mark.parametrize("case", DECODE, ids=_name)
@pytest.mark.parametrize("peer", [*GPU_PEERS, MATH] if not ON_GPU else GPU_PEERS)
def test_decode(measure: Any, case: tuple[int, int], peer: str) -> None:
    def build() -> Problem:
        paged = Paged(*case, queries=1)
        return _problem(paged, paged.kv_bytes + 2 * paged.q.nbytes, 4 * case[0] * case[1] * HEADS * DIM, causal=False)

    measure(build)


@pytest.mark.parametrize("case", PREFILL, ids=_name)
@pytest.mark.parametrize("peer", [*GPU_PEERS, MATH] if not ON_GPU else GPU_PEERS)
def test_prefill(measure: Any, case: tuple[int, int], peer: str) -> None:
    """FLOPs: 4 · batch · heads · length² · dim / 2, since half of the pairs are hidden."""
    batch, length = case

    def build() -> Problem:
        paged = Paged(batch, length, queries=length)
        return _problem(paged, paged.kv_bytes + 2 * paged.q.nbytes, 2 * batch * HEADS * length * length * DIM, causal=True)

    measure(build)
