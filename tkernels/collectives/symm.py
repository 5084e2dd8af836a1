"""Memory that all ranks of a group can write: torch symmetric memory on CUDA, a shared file mapping on the CPU; and host meetings.

A workspace starts empty (all bytes 0xFF) on every rank before any rank learns that it exists: a quick peer's first data can then
never be wiped.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class CollectiveError(RuntimeError):
    """A collective that cannot be served, or a group that has failed. The message names the group, the collective and the ranks."""


@dataclass
class Meetings:
    """Host-side agreement of a group's ranks through its store: no device is involved, so it also works while capturing."""

    store: dist.Store
    name: str
    rank: int
    world: int
    count: int = 0

    def exchange(self, what: str, value: str, timeout_s: float) -> list[str]:
        """Everyone's ``value``, in rank order. Raises CollectiveError naming the ranks that have not arrived in time."""
        self.count += 1
        key = f"{self.count}"
        self.store.set(f"{key}/{self.rank}", f"{what}\n{value}")
        deadline = time.monotonic() + timeout_s
        answers, missing = [], []
        for rank in range(self.world):
            left = max(deadline - time.monotonic(), 0.01)
            try:
                self.store.wait([f"{key}/{rank}"], timedelta(seconds=left))
                their_what, _, their_value = self.store.get(f"{key}/{rank}").decode().partition("\n")
            except (dist.DistStoreError, RuntimeError) as error:
                if not isinstance(error, dist.DistStoreError) and "timeout" not in str(error).lower():
                    raise CollectiveError(f"group {self.name}, rank {self.rank}: the store is gone while at {what}: {error}") from error
                missing.append(rank)
                continue
            if their_what != what:
                raise CollectiveError(
                    f"group {self.name}: rank {rank} is at {their_what} while rank {self.rank} is at {what}; "
                    "all ranks must make the same calls in the same order"
                )
            answers.append(their_value)
        if missing:
            raise CollectiveError(
                f"group {self.name}: rank {self.rank} waited {timeout_s:g} s at {what} for rank {', '.join(map(str, missing))}: "
                "it died, is late, or makes other calls"
            )
        return answers


@dataclass
class Workspace:
    """``addresses[r]``: rank r's workspace as this process sees it. ``owner`` keeps the mappings alive."""

    addresses: tuple[int, ...]
    owner: Any


def map_symmetric(nbytes: int, device: torch.device, group_name: str, meetings: Meetings, timeout_s: float) -> Workspace | str:
    """A workspace of ``nbytes`` on every rank; or, agreed by all ranks, why there is none."""
    try:
        if device.type == "cuda":
            workspace: Workspace | None = _on_cuda(nbytes, device, group_name)
        else:
            workspace = _on_cpu(nbytes, meetings, timeout_s)
        trouble = ""
    except CollectiveError:
        raise
    except (RuntimeError, OSError) as error:
        workspace, trouble = None, (str(error).splitlines() or [repr(error)])[0]
    troubles = meetings.exchange("the mapping of workspaces", trouble, timeout_s)
    for rank, text in enumerate(troubles):
        if text:
            return f"rank {rank}: {text}"
    assert workspace is not None
    return workspace


def _on_cuda(nbytes: int, device: torch.device, group_name: str) -> Workspace:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    buffer.fill_(255)
    torch.cuda.synchronize(device)  # empty before the rendezvous lets a peer in
    handle = symmetric_memory.rendezvous(buffer, group_name)  # type: ignore[arg-type]
    return Workspace(tuple(int(pointer) for pointer in handle.buffer_ptrs), (buffer, handle))


def _on_cpu(nbytes: int, meetings: Meetings, timeout_s: float) -> Workspace:
    """Files in shared memory, unlinked as soon as everyone has mapped them, so that a killed rank leaves nothing behind."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix="tkernels-", dir=folder)
    os.close(handle)
    try:
        own = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        own.fill_(255)
        paths = meetings.exchange("the naming of workspaces", path, timeout_s)
        mapped = [
            own if rank == meetings.rank else torch.from_file(theirs, shared=True, size=nbytes, dtype=torch.uint8)
            for rank, theirs in enumerate(paths)
        ]
        meetings.exchange("the mapping of files", "", timeout_s)
    finally:
        os.unlink(path)
    return Workspace(tuple(tensor.data_ptr() for tensor in mapped), mapped)
