"""Groups: set-up, the registry that ops look names up in, and what a failed group says.

name = init_group(process_group)          # all ranks of it, once, before the first graph is captured
y = all_reduce(x, name)
check(name)                               # after a synchronisation: raises if a launch of the group has failed
destroy_group(name)                       # all ranks of it
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tkernels import _repeats
from tkernels._triton import HAVE_TRITON, INTERPRETED
from tkernels.collectives.fused import MAX_SPLIT, MAX_SPLIT_ROWS
from tkernels.collectives.lamport import REPORT_WORDS, STATE_WORDS
from tkernels.collectives.plan import MAX_WORLD, Sizes
from tkernels.collectives.symm import CollectiveError, Meetings, Workspace, map_symmetric

Group = Any  # a name, a dist.ProcessGroup, or a DeviceMesh of one dimension
_COMPILE_TIMEOUT_S = 600.0  # a rank that compiles is not late: see Communicator.meet
OPS = ("", "all_reduce (one-shot)", "all_reduce (two-shot)", "all_gather", "reduce_scatter",
       "all_reduce_add_rms_norm (one-shot)", "all_reduce_add_rms_norm (two-shot)")  # fmt: skip

_GROUPS: dict[str, Communicator] = {}
_generations: dict[str, int] = {}  # how often a name was set up: keys of the store must not meet those of an earlier life


@dataclass
class Communicator:
    """One group as its ops see it. ``workspace`` is None where only the library (NCCL, gloo) is used; ``why`` says why."""

    name: str
    rank: int
    world: int
    device: torch.device
    process_group: Any
    max_bytes: int
    timeout_s: float
    meetings: Meetings | None = None
    workspace: Workspace | None = None
    why: str = ""
    sizes: Sizes = field(default_factory=lambda: Sizes(0, 0, 0))
    state: torch.Tensor | None = None
    report: torch.Tensor | None = None
    fences: bool = False
    failed: str = ""  # what check() has raised
    _report: Any = None
    _addresses: tuple[tuple[int, ...], int, int] | None = None
    _stream: Any = None  # of the last eager call, and its handle
    _handle: int | None = None
    _met: set[Any] = field(default_factory=set)

    def attach(self, workspace: Workspace) -> None:
        """Give the group its workspace; from here on its kernels may run."""
        self.workspace, self.sizes = workspace, Sizes.of(self.max_bytes, self.world)
        words = STATE_WORDS + 2 * (MAX_SPLIT_ROWS + 1) * MAX_SPLIT**2  # int32; behind the state, fp64 words between programs, empty
        self.state = torch.full((words,), -1, dtype=torch.int32, device=self.device)
        self.state[:STATE_WORDS] = 0
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        report: Any = self.report.numpy()
        self._report = memoryview(report)  # read at each call, in a tenth of the time that an array takes
        self._addresses = workspace.addresses, self.state.data_ptr(), self.report.data_ptr()
        _repeats.forget()  # launches noted for an earlier group of this name, which had other memory

    def addresses(self) -> tuple[tuple[int, ...], int, int, int]:
        """(workspaces, state, report, limit in ns): the arguments that every kernel takes."""
        assert self._addresses is not None
        return *self._addresses, int(self.timeout_s * 1e9)

    def check(self) -> None:
        """Raise CollectiveError if a launch of this group has failed, as far as the device has said so; does not wait for it."""
        if self.failed:
            raise CollectiveError(self.failed)
        if self.workspace is None or not (self._report[0] or self._report[1] or self._report[2]):
            return
        self.failed = (
            f"group {self.name}: {self._failure()}. What it computed since then is NaN or wrong; destroy_group and init_group on all ranks"
        )
        raise CollectiveError(self.failed)

    def _failure(self) -> str:
        """The report in words: see lamport.py for its layout."""
        late, disagreed, overlapped = (int(word) for word in self._report[:3])
        if disagreed:
            others = [rank for rank in range(self.world) if self._report[40 + rank]]
            said = "; ".join(
                f"rank {rank}: {OPS[int(self._report[40 + rank])]} of {int(self._report[24 + rank])} elements" for rank in others
            )
            return f"{OPS[disagreed]} on rank {self.rank} met other calls ({said}): all ranks must make the same calls in one order"
        if late:
            missing = ", ".join(str(rank) for rank in range(self.world) if self._report[8 + rank])
            return f"{OPS[late]} on rank {self.rank} waited {self.timeout_s:g} s for rank {missing}: it died, is late, or makes other calls"
        return f"{OPS[overlapped]} on rank {self.rank} ran while another call of the group did: use one stream, replay one graph at a time"

    def meet(self, key: Any, compile_kernel: Callable[[], None]) -> None:
        """Before the first use of a kernel: compile it, and wait on the host until all ranks have. So the time-out on the device
        never counts a compilation. Works while capturing, since only the host takes part."""
        if key in self._met:
            return
        assert self.meetings is not None
        compile_kernel()
        self.meetings.exchange(
            f"the first use of {key}", "", max(self.timeout_s, _COMPILE_TIMEOUT_S) if not INTERPRETED else self.timeout_s
        )
        self._met.add(key)

    def order_streams(self) -> None:
        """Before a launch: a stream other than the last one's waits for it. In a graph only the device can see an overlap, and
        reports it."""
        if self.device.type != "cuda":
            return
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle == self._handle:
            return
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._handle = stream, handle


def init_group(group: Group = None, max_bytes: int = 16 << 20, timeout_s: float = 30.0) -> str:
    """Set up collectives over a process group, and return the name by which the ops take it. Called by all of its ranks.

    group: a dist.ProcessGroup, a DeviceMesh of one dimension (``mesh["tp"]``), or None for all ranks.
    max_bytes: the longest message that one launch carries; longer ones go in pieces. The workspace takes about four times as much.
    timeout_s: how long a rank waits for its peers before the group fails with CollectiveError.
    A second call with the same arguments changes nothing. The workspace never grows, so no call can need to grow it in a capture.
    Raises ValueError naming the argument; CollectiveError when ranks disagree or are missing, or within a CUDA graph capture.
    """
    if not 0 < max_bytes <= 1 << 30:
        raise ValueError(f"max_bytes: expected 1 to {1 << 30}, got {max_bytes}")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s: expected more than 0 seconds, got {timeout_s}")
    process_group = _process_group(group)
    name = process_group.group_name
    if name in _GROUPS:
        known = _GROUPS[name]
        if (known.max_bytes, known.timeout_s) != (max_bytes, timeout_s):
            raise ValueError(
                f"group {name} exists with max_bytes={known.max_bytes}, timeout_s={known.timeout_s:g}; got {max_bytes}, {timeout_s:g}: "
                "destroy_group it first on all ranks, outside any capture, and capture its graphs again"
            )
        return name
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CollectiveError(f"group {name}: init_group within a CUDA graph capture; call it before")
    world, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    on_gpu = _has_nccl(process_group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    made = Communicator(name, rank, world, device, process_group, max_bytes, timeout_s)
    if world > 1:
        _generations[name] = _generations.get(name, -1) + 1
        store = dist.PrefixStore(f"tkernels/{name}/{_generations[name]}", dist.distributed_c10d._get_default_store())
        made.meetings = Meetings(store, name, rank, world)
        found = _workspace(made)
        if isinstance(found, str):
            made.why = found
        else:
            made.attach(found)
        if on_gpu:  # the communicator of NCCL cannot be made in a capture
            dist.all_reduce(torch.zeros(1, device=device), group=process_group)
            torch.cuda.synchronize(device)
        made.meetings.exchange("the end of init_group", "", timeout_s)
    _GROUPS[name] = made
    return name


def _workspace(group: Communicator) -> Workspace | str:
    """The shared workspace, or why the library has to do. The same answer on all ranks."""
    assert group.meetings is not None
    mine = f"{socket.gethostname()}\n{group.device.type}\n{group.max_bytes}\n{group.timeout_s}"
    theirs = [answer.split("\n") for answer in group.meetings.exchange("init_group", mine, group.timeout_s)]
    for rank, (_, *rest) in enumerate(theirs):
        if rest != mine.split("\n")[1:]:
            raise CollectiveError(
                f"group {group.name}: rank {rank} has device, max_bytes, timeout_s = {', '.join(rest)}, "
                f"rank {group.rank} has {group.device.type}, {group.max_bytes}, {group.timeout_s}; they must agree"
            )
    hosts = sorted({host for host, *_ in theirs})
    if group.device.type == "cpu" and not INTERPRETED:
        return "on the CPU the ranks exchange through gloo unless TRITON_INTERPRET=1"
    if len(hosts) > 1:
        return f"the ranks are on several hosts ({', '.join(hosts)})"
    if group.world > MAX_WORLD:
        return f"{group.world} ranks, and the kernels take up to {MAX_WORLD}"
    if not HAVE_TRITON:
        return "triton is not installed"
    nbytes = 2 * Sizes.of(group.max_bytes, group.world).half
    found = map_symmetric(nbytes, group.device, group.name, group.meetings, group.timeout_s)
    if isinstance(found, str):
        warnings.warn(f"group {group.name}: no symmetric memory ({found}); all its collectives use NCCL", stacklevel=3)
    return found


def destroy_group(group: Group) -> None:
    """Free the group's workspace. Called by all ranks that live, also when the group has failed.

    Graphs that hold calls of the group must not be replayed after.
    """
    name = group_name(group)
    gone = _GROUPS.pop(name, None)
    if gone is None:
        raise ValueError(_unknown(name))
    if gone.workspace is not None and gone.meetings is not None:
        if gone.device.type == "cuda":
            torch.cuda.synchronize(gone.device)
        with suppress(CollectiveError):  # of a rank that died, which writes no more
            gone.meetings.exchange("destroy_group", "", gone.timeout_s)  # nobody still writes into a peer


def check(group: Group = None) -> None:
    """Raise CollectiveError if a launch of ``group``, or of any group when it is None, has failed. Synchronise the device first:
    launches that have not ended have not reported."""
    for known in [find(group_name(group))] if group is not None else list(_GROUPS.values()):
        known.check()


def describe_group(group: Group) -> str:
    """One line: ranks, workspace, and what carries the messages."""
    known = find(group_name(group))
    if known.world == 1:
        return f"group {known.name}: 1 rank, collectives are copies"
    if known.workspace is None:
        return f"group {known.name}: {known.world} ranks through {dist.get_backend(known.process_group)}: {known.why}"
    megabytes = 2 * known.sizes.half / 1e6
    return f"group {known.name}: {known.world} ranks, workspace {megabytes:.1f} MB, messages up to {known.max_bytes} bytes a launch"


def find(name: str) -> Communicator:
    found = _GROUPS.get(name)
    if found is None:
        raise ValueError(_unknown(name))
    return found


def in_group(place: int) -> Callable[..., Hashable]:
    """``beside`` of ``_repeats.repeating`` for an op whose argument at ``place`` is a group's name.

    Raises if the group has failed and orders the streams, since a repeated call skips the op, which does so too. Returns what launches
    depend on, None where the group launches no kernel of ours.
    """

    def beside(*args: Any, **kwargs: Any) -> Hashable:
        found = find(args[place])
        if found.workspace is None or found.world == 1:
            return None
        found.check()
        found.order_streams()
        return found.world, found.timeout_s, found.fences

    return beside


def _unknown(name: str) -> str:
    known = ", ".join(_GROUPS) or "none"
    return f"group: {name!r} is not set up; call tkernels.collectives.init_group on all of its ranks first (known: {known})"


def group_name(group: Group) -> str:
    """The name under which ops know ``group``: itself, or that of a ProcessGroup or DeviceMesh."""
    return group if isinstance(group, str) else _process_group(group).group_name


def _process_group(group: Group) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise CollectiveError("torch.distributed is not initialised: start with torchrun and call torch.distributed.init_process_group")
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of one dimension such as mesh['tp'], got {group}")
        return group.get_group()
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if not hasattr(group, "group_name"):
        raise ValueError(f"group: expected a ProcessGroup, a DeviceMesh of one dimension or None, got {type(group).__name__}")
    return group


def _has_nccl(process_group: Any) -> bool:
    if not torch.cuda.is_available() or "cuda" not in {device.type for device in process_group._device_types}:
        return False
    return process_group._get_backend(torch.device("cuda")).name() == "nccl"
