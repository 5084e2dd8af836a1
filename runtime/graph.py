"""The ``Graph`` protocol and its CUDA implementation.

A graph records device work once and replays it into the same addresses. ``capture_begin`` … ``capture_end`` records; when
``capture_end`` returns, the recorded work has also been run once, so whatever runs next sees real data. ``launch(piece, *args)``
runs a compiled piece inside a capture: on CUDA that is just the call, the emulator makes one node of it.

All graphs of one ``Pool`` share its memory and its capture stream. Captures happen inside ``pool.session()``. Code above this
file never asks which implementation it has (runtime/emulator.py is the one for machines without a GPU).
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from runtime.workspace import Workspace


class CaptureError(RuntimeError):
    """A step that cannot be captured, or a graph that may not be replayed. The message says why and what to do."""


class Within(NamedTuple):
    """A context that captures, and the calls just before them, run within: a setting of kernels that the runtime does not know."""

    name: str  # measured costs hold for captures within it alone
    enter: Callable[[], AbstractContextManager[object]]


AS_IS = Within("", nullcontext)


class Graph(Protocol):
    nbytes: int
    """Bytes that this capture added to its pool. 0 before ``capture_end``."""

    empty: bool
    """Nothing was recorded: a replay would do nothing."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None:
        """End the recording and run it once. Raises what the capture died of; the pool stays usable."""

    def abort(self) -> None:
        """Drop a half-made capture after an error: stream and pool are as before ``capture_begin``."""

    def replay(self) -> None: ...

    def replayer(self) -> Callable[[], object]:
        """``replay`` with nothing around it, for the loop over a step's segments. Not to be called after ``reset``."""

    def launch(self, piece: Callable[..., Any], *args: Any) -> Any: ...

    def reset(self) -> None:
        """Free the graph. It cannot be replayed again."""


class Pool(Protocol):
    device: torch.device
    handle: Any
    """What identifies the memory pool; the same for every graph of this pool."""
    workspace: Workspace
    """Temporaries of the ops that run between graphs."""

    def graph(self) -> Graph: ...

    def session(self, collect: bool = True) -> AbstractContextManager[None]:
        """Where captures happen: capture stream current, garbage collector frozen. Restored on leaving, also by an error.

        One at a time in the process. On leaving, the device is done with what the session ran.
        collect: free garbage and cached memory first, which takes a good part of a second; not for captures between steps.
        """

    def nbytes(self) -> int:
        """Of the graphs' memory and the workspace."""

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without keeping it allocated, so that later captures may reuse it. Only for memory of this pool."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory came from a capture into this pool."""

    def perturb(self) -> object:
        """Make the eager allocator hand out other addresses for as long as the returned object lives."""

    def follow(self) -> None:
        """Call before a step's inputs are filled: they and the graphs are one memory, so steps on several streams must take turns."""

    def synchronize(self) -> None: ...

    def reset(self) -> None:
        """Give the memory back. Every graph of the pool must have been reset."""


IMMORTAL = 2000
"""More objects than Python 3.12 sets apart from the collector by itself (375 at start), fewer than any ``gc.freeze()`` does (5,000)."""

_current = threading.local()
_one_session = threading.RLock()


@contextmanager
def launching_into(capture: Any) -> Iterator[None]:
    """While this is active on the thread, ``launch`` goes to ``capture.launch``."""
    previous = getattr(_current, "capture", None)
    _current.capture = capture
    try:
        yield
    finally:
        _current.capture = previous


def launch(piece: Callable[..., Any], *args: Any) -> Any:
    """Run a compiled piece: as one node of the capture in progress on this thread, else as a plain call.

    Stitched callables run every compiled piece through this function, which is how any of them can be captured.
    """
    capture = getattr(_current, "capture", None)
    return piece(*args) if capture is None else capture.launch(piece, *args)


@contextmanager
def frozen_gc(collect: bool) -> Iterator[None]:
    """No garbage collector until the end. collect: one collection before, so that garbage holds no device memory meanwhile.

    A collection inside a capture can finalise a compiled kernel, and unloading its module is not allowed there. One per capture
    would dominate start-up, so there is one in all. Sessions of other threads wait: collector and capture stream are the process's.
    """
    with _one_session:
        # A user's own freeze must not be undone by ours. It holds every object; Python 3.12 by itself moves its immortal ones there.
        enabled, freeze = gc.isenabled(), gc.get_freeze_count() < IMMORTAL
        if collect:
            gc.collect()
        if freeze:
            gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if freeze:
                gc.unfreeze()
            if enabled:
                gc.enable()


class CudaGraph:
    """One ``torch.cuda.CUDAGraph`` in a shared pool."""

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.nbytes = 0
        self.empty = False

    def capture_begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._before = torch.cuda.memory_reserved(self._pool.device)
        # thread_local: another thread of the process (a tokeniser, a data loader) may use the device meanwhile
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        assert self._graph is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._graph.capture_end()
        self.empty = any("Graph is empty" in str(w.message) for w in caught)
        self.nbytes = torch.cuda.memory_reserved(self._pool.device) - self._before
        self.replay()

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if not _has_ended(graph):  # else the capture was good, and died of its instantiation or its first run
            with suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()
        if _has_ended(graph):
            graph.reset()
        else:
            self._pool.give_up(graph)

    def replay(self) -> None:
        if self._graph is None:
            raise CaptureError("replay of a graph that holds no capture: it was reset, or its capture failed")
        self._graph.replay()

    def replayer(self) -> Callable[[], object]:
        assert self._graph is not None
        return super(torch.cuda.CUDAGraph, self._graph).replay  # past the Python wrapper, which looks for a debug tracker

    def launch(self, piece: Callable[..., Any], *args: Any) -> Any:
        return piece(*args)

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: the math libraries keep a workspace (32 MiB and more on Hopper) for each stream that they have seen."""
    return torch.cuda.Stream(device)


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether it holds a finished capture, and so gives its hold on the pool back by itself. Only ``pool`` tells."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _empty_capture(handle: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is empty
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        graph.capture_end()
    return graph


_dead: list[torch.cuda.CUDAGraph] = []  # the pinned-memory allocator keeps a pointer to a graph whose capture never ended


class CudaPool:
    """One memory pool for all graphs of a module, captured on the device's one capture stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.handle = torch.cuda.graph_pool_handle()
        self.workspace = Workspace()
        self._handles = {tuple(self.handle)}
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._stream = _capture_stream(self.device)
        self._last: torch.cuda.Stream | None = None  # where the newest step was put
        self._last_raw = -1
        self._ranges: list[tuple[int, int]] = []

    def graph(self) -> CudaGraph:
        if self._keeper is None:  # the allocator refuses to capture into a pool whose graphs have all been reset; this one never is
            self._keeper = _empty_capture(self.handle)
        return CudaGraph(self)

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a capture that the device has invalidated: ``capture_end`` raises before it gives anything back."""
        for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):
                give_back(self.device.index, self.handle)
        graph.reset()
        _dead.append(graph)
        # The pinned-memory allocator goes on recording into this pool, so later captures take another. Until one has ended well,
        # torch's generator believes that it is being captured and refuses to draw: the new keeper's capture frees it.
        self._new_handle()
        self._keeper = _empty_capture(self.handle)
        torch.cuda.empty_cache()

    def _new_handle(self) -> None:
        if self._keeper is not None:
            self._keeper.reset()
            self._keeper = None
        self.handle = torch.cuda.graph_pool_handle()
        self._handles.add(tuple(self.handle))
        self._ranges = []

    @contextmanager
    def session(self, collect: bool = True) -> Iterator[None]:
        with frozen_gc(collect):
            torch.cuda.synchronize(self.device)
            if collect:
                torch.cuda.empty_cache()  # once here, not once a graph as torch.cuda.graph does
            self._ranges = []
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                    yield
            finally:
                self._stream.synchronize()  # the next step may come on any stream
                if collect:
                    torch.cuda.empty_cache()  # what the uncaptured runs left: cached for the capture stream, no other may use it

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) in self._handles]

    def nbytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments()) + self.workspace.nbytes()

    def owns(self, tensor: torch.Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        if not any(start <= pointer < stop for start, stop in self._ranges):
            # the pool only grows while capturing, so a snapshot (milliseconds) is needed only for an address not seen before
            self._ranges = [(s["address"], s["address"] + s["total_size"]) for s in self._segments()]
        return any(start <= pointer < stop for start, stop in self._ranges)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return weak_view(tensor)

    def perturb(self) -> object:
        # one block for each size class of the caching allocator up to 32 MiB: what is freed after capture is taken again by these
        return [torch.full((1 << power,), 0xA5, dtype=torch.uint8, device=self.device) for power in range(9, 26)]

    def follow(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self._last_raw:
            stream = torch.cuda.current_stream(self.device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._last_raw = stream, raw

    def synchronize(self) -> None:
        with _one_session:  # a device may not be waited for while any of its streams is being captured
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        with _one_session:
            torch.cuda.synchronize(self.device)
            self._handles.clear()
            self.workspace = Workspace()
            self._new_handle()
            torch.cuda.empty_cache()


def weak_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes that does not own them. Whoever uses it must know that the memory stays allocated."""
    storage = tensor.untyped_storage()
    with _disable_current_modes():  # bookkeeping: no capture in progress may record it
        return _over(storage, tensor)


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    bytes_ = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())
