"""The same collectives through ``torch.distributed``: NCCL on GPUs, gloo on the CPU, where they are also the references.

On the CPU sums run in rank order in fp32 and round once, like the kernels'. NCCL keeps its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tkernels.collectives.group import Communicator
from tkernels.collectives.symm import CollectiveError

_T = TypeVar("_T")


def _named(group: Communicator, op: str, run: Callable[[], _T]) -> _T:
    try:
        return run()
    except RuntimeError as error:
        raise CollectiveError(
            f"group {group.name}: {op} on rank {group.rank} of {group.world} failed, a peer is gone or late: {error}"
        ) from error


def _gathered(x: torch.Tensor, group: Communicator, op: str) -> torch.Tensor:
    """[world, *x.shape]; bytes, so that any dtype travels."""
    gathered = torch.empty((group.world, *x.shape), dtype=x.dtype, device=x.device)
    if x.numel():
        flat = x.contiguous().view(-1).view(torch.uint8)
        out = gathered.view(-1).view(torch.uint8)
        if x.device.type == "cuda":
            _named(group, op, lambda: dist.all_gather_into_tensor(out, flat, group=group.process_group))
        else:
            _named(group, op, lambda: dist.all_gather(list(out.chunk(group.world)), flat, group=group.process_group))
    return gathered


def _sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts.dtype)


def all_reduce(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    if x.device.type != "cuda":
        return _sum_in_rank_order(_gathered(x, group, "all_reduce")).contiguous()
    # c10d works in place. Reduce-scatter and all-gather would save the copy of x, and were slower still (docs/collectives.md).
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        _named(group, "all_reduce", lambda: dist.all_reduce(out, group=group.process_group))
    return out


def all_gather(x: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    parts = _gathered(x, group, "all_gather")
    if dim == 0:
        return parts.flatten(0, 1)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def reduce_scatter(x: torch.Tensor, group: Communicator, dim: int) -> torch.Tensor:
    size = x.shape[dim] // group.world
    if x.device.type != "cuda":
        return _sum_in_rank_order(_gathered(x, group, "reduce_scatter").narrow(dim + 1, group.rank * size, size)).contiguous()
    ordered = x.unflatten(dim, (group.world, size)).movedim(dim, 0).contiguous()
    out: Any = torch.empty(ordered.shape[1:], dtype=x.dtype, device=x.device)
    if out.numel():
        _named(group, "reduce_scatter", lambda: dist.reduce_scatter_tensor(out, ordered, group=group.process_group))
    return out
