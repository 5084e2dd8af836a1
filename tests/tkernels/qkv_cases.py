"""Calls of linear_rope_and_cache with all that may stand around what they read, and their comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tkernels import _rope_kernels

PAGES, PAGE_SIZE, POSITIONS, EPS = 9, 8, 8, 1e-5


@dataclasses.dataclass
class Case:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None
    positions: torch.Tensor
    cos_sin: torch.Tensor
    caches: list[torch.Tensor]
    slots: torch.Tensor
    heads: tuple[int, int, int]

    def arguments(self, caches: list[torch.Tensor]) -> tuple[Any, ...]:
        return self.x, self.weight, self.bias, self.norm, self.positions, self.cos_sin, *caches, self.slots

    def empty(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.caches]

    def rotated(self, y: torch.Tensor, caches: list[torch.Tensor], interleaved: bool) -> torch.Tensor:
        """By the kernel of rope_and_cache, from a projection."""
        q, k, v = y.view(y.shape[0], -1, caches[0].shape[3]).split(self.heads, 1)
        return _rope_kernels.launch(
            q, k, v, self.positions, self.cos_sin, None, *caches, self.slots, None, None, EPS, 0.0, None, None, interleaved
        )


def make_case(rows: int, shape: tuple[int, ...], device: torch.device, *, bias: bool = False, norm: bool = False, k: int = 96,
          dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None) -> Case:  # fmt: skip
    """Positions up to the table's end and one past it, slots in any order with padding, x and weight as slices, caches with a pattern."""
    heads, kv_heads, dim, rot_dim = shape
    n = (heads + 2 * kv_heads) * dim
    positions = torch.randint(0, POSITIONS, (rows,), device=device)
    slots = torch.randperm(PAGES * PAGE_SIZE, device=device)[:rows]
    if rows > 2:
        positions[-2:] = torch.tensor([POSITIONS - 1, POSITIONS])
        slots[:2] = torch.tensor([-1, PAGES * PAGE_SIZE])
    return Case(
        torch.randn(rows, 2 * k + 8, device=device).to(dtype)[:, 8 : 8 + k],
        torch.randn(n, k + 8, device=device).to(dtype)[:, :k] / k**0.5,
        torch.randn(n, device=device).to(dtype) if bias else None,
        torch.randn(k, device=device).to(dtype) if norm else None,
        positions,
        torch.randn(POSITIONS, rot_dim + 2, device=device)[:, :rot_dim],
        [torch.full((PAGES, PAGE_SIZE, kv_heads, dim), 3.0, device=device).to(cache_dtype or dtype) for _ in "kv"],
        slots,
        (heads, kv_heads, kv_heads),
    )


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, any NaN like another."""
    return got.shape == want.shape and torch.equal(got.float().nan_to_num(7.5), want.float().nan_to_num(7.5))
