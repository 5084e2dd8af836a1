"""Capture of one step as a list of segments, ``[graph | eager call]``.

``capture_step`` runs a callable once on fixed inputs. As one full graph, or piecewise: a dispatch mode meets each splitting op,
ends the graph, runs the op, and begins the next graph. This reaches any capturable module and the stitched callable of
runtime/backend.py alike (its compiled pieces arrive through ``graph.launch``).

While it captures it observes who made every tensor that crosses a segment, which is the table of owners: caller (the arena),
piece N, splitting op, persistent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from runtime.captured_step import Address, CapturedStep, EagerCall, Owner
from runtime.emulator import EmulatedPool
from runtime.graph import CaptureError, CudaPool, Graph, Pool, launching_into
from runtime.op_arguments import named_tensors, short_name, storage_address, tensors_in, written_arguments


def make_pool(device: torch.device) -> Pool:
    """The graph memory of a device: real on CUDA, emulated on the CPU."""
    return CudaPool(device) if device.type == "cuda" else EmulatedPool(device)


def capture_step(
    pool: Pool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    splitting: frozenset[Any] = frozenset(),
    fresh: Literal["refuse", "copy"] = "refuse",
    callers: Mapping[str, torch.Tensor] | None = None,
    persistent: Mapping[str, torch.Tensor] | None = None,
) -> CapturedStep:
    """Capture ``fn(*args, **kwargs)`` inside ``pool.session()``. The callable must have run once on the same stream before.

    splitting: op overloads that end a graph and run between two of them; empty: one full graph.
    fresh: what to do with a splitting op that returns new tensors.
    callers: tensors whose memory the caller refills before each replay (the arena's views), by name.
    persistent: parameters and buffers, by name.
    Raises CaptureError; whatever else the callable dies of is raised as it is. Afterwards the pool is usable in either case.
    """
    capture = _Capture(pool, splitting, fresh, callers or {}, persistent or {})
    try:
        capture.begin()
        with launching_into(capture), _Cutter(capture):
            output = fn(*args, **kwargs)
        capture.end()
    except BaseException:
        capture.abort()
        raise
    return capture.finish(output)


@dataclass
class _Origin:
    owner: Owner
    producer: str
    segment: int  # -1: existed before the step


class _Capture:
    """The state of one capture: segments so far and where each tensor's memory came from, by its storage's address."""

    def __init__(
        self, pool: Pool, splitting: frozenset[Any], fresh: str, callers: Mapping[str, torch.Tensor], persistent: Mapping[str, torch.Tensor]
    ) -> None:
        self.pool, self.splitting, self.fresh = pool, splitting, fresh
        self.segments: list[Graph | EagerCall] = []
        self.graph: Graph | None = None
        self.addresses: dict[tuple[int, int], Address] = {}
        self.persistent: dict[str, torch.Tensor] = {}
        self.mutated: set[str] = set()
        self.written: dict[str, torch.Tensor] = {}
        self.other_bytes = 0
        self.launched = 0
        self.inside_piece = False
        self.origins: dict[int, _Origin] = {}
        self.known = dict(persistent)
        for name, tensor in persistent.items():
            self.origins.setdefault(storage_address(tensor), _Origin("persistent", name, -1))
        # the arena's inputs share one storage, so they are told apart by their own addresses
        self.callers = {tensor.data_ptr(): name for name, tensor in callers.items() if tensor.numel()}
        self.caller_bases = {storage_address(tensor) for tensor in callers.values()}
        self.caller_starts = sorted(self.callers)

    # -- segments -------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        graph = self.pool.graph()
        graph.capture_begin()
        self.graph = graph

    def end(self) -> None:
        graph = self.graph
        assert graph is not None
        graph.capture_end()
        self.graph = None
        self.segments.append(graph)

    def abort(self) -> None:
        if self.graph is not None:
            with suppress(Exception):  # the error on its way up is the one to show
                self.graph.abort()
            self.graph = None
        for segment in self.segments:
            if not isinstance(segment, EagerCall):
                segment.reset()
        self.segments.clear()

    def split(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A splitting op: end the graph, run the op on real data, begin the next graph."""
        if self.graph is None:
            return op(*args, **kwargs)
        self.end()
        with _disable_current_modes():
            self.observe(short_name(op), op, args, kwargs, None, kind="split")
        pinned_args, pinned_kwargs = tree_map_only(torch.Tensor, self._hold, (args, kwargs))
        bind, output, bound = getattr(op, "bind", None), None, None
        if bind is None or op._schema.returns:
            output = op(*args, **kwargs)
        else:  # see docs/extending.md; it also runs the op
            held = self.pool.workspace.nbytes()
            bound = bind(self.pool.workspace.call(), pinned_args, pinned_kwargs)
            self.other_bytes += self.pool.workspace.nbytes() - held
        inputs = {storage_address(t) for t in tensors_in((args, kwargs))}
        new = [(i, t) for i, t in enumerate(tensors_in(output)) if storage_address(t) not in inputs and t.numel()]
        if new and self.fresh == "refuse":
            raise CaptureError(
                f"splitting op {op}: it returns new tensors, which land at another address in each step, while the next piece reads "
                "the address of today. Let it write into an out argument that the piece before allocates, or set "
                'graph.fresh_split_outputs = "copy"'
            )
        # The first result itself becomes the buffer that the next piece reads; later results are copied into it.
        call = EagerCall(op, pinned_args, pinned_kwargs, [(i, t.detach()) for i, t in new], bound)
        self.other_bytes += sum(t.untyped_storage().nbytes() for _, t in new)
        segment = len(self.segments)
        self.segments.append(call)
        for _, t in new:
            self.origins[storage_address(t)] = _Origin("splitting op", f"{short_name(op)} (copied)", segment)
        for t in written_arguments(op, args, kwargs):
            self._wrote(t)
            origin = self.origins.get(storage_address(t))
            if origin and origin.owner in ("piece", "splitting op"):
                made = origin.producer.split("memory of ")[-1]
                self.origins[storage_address(t)] = _Origin("splitting op", f"{short_name(op)}; memory of {made}", segment)
        self.begin()
        return output

    def _hold(self, t: torch.Tensor) -> torch.Tensor:
        """The argument for later calls. Memory that a piece made stays in the pool, so it need not be kept allocated."""
        origin = self.origins.get(storage_address(t))
        made_here = origin is not None and origin.segment >= 0 and "(copied)" not in origin.producer
        return self.pool.weak(t) if made_here and self.pool.owns(t) else t.detach()

    def launch(self, piece: Callable[..., Any], *args: Any) -> Any:
        """A compiled piece (see ``graph.launch``). It may say its ``name``, its ``inputs``' names, and which of them it ``writes``."""
        name = getattr(piece, "name", None) or f"compiled piece {self.launched}"
        self.launched += 1
        graph = self.graph
        self.inside_piece = True
        try:
            output = graph.launch(piece, *args) if graph is not None else piece(*args)
        finally:
            self.inside_piece = False
        with _disable_current_modes():
            self.observe(name, None, args, {}, output, names=getattr(piece, "inputs", ()))
            for index in getattr(piece, "writes", ()):  # no dispatcher and no schema shows what compiled code writes
                self._wrote(args[index])
        return output

    # -- owners ---------------------------------------------------------------------------------------------------------------

    def observe(self, name: str, op: Any, args: Any, kwargs: Any, output: Any, kind: str = "graph", names: Sequence[str] = ()) -> None:
        segment = len(self.segments)
        for path, t in named_tensors(op, args, kwargs, names):
            if not t.numel():
                continue
            origin = self._origin(t)
            if origin.segment != segment:
                key = (segment, t.data_ptr() if origin.owner == "caller" else storage_address(t))
                if key not in self.addresses or kind == "split":
                    label = path if kind == "split" else f"{name} {path}"
                    key = key if kind == "graph" else (segment, len(self.addresses))
                    self.addresses[key] = Address(
                        segment, name if kind == "split" else kind, label, origin.owner, origin.producer, t.data_ptr()
                    )
        if kind == "split":
            return
        for t in written_arguments(op, args, kwargs):
            self._wrote(t)
        inputs = {storage_address(t) for t in tensors_in((args, kwargs))}
        for t in tensors_in(output):
            if storage_address(t) not in inputs and t.numel():
                self.origins[storage_address(t)] = _Origin("piece", f"piece {segment}, {name}", segment)

    def _origin(self, t: torch.Tensor) -> _Origin:
        base = storage_address(t)
        if base in self.caller_bases:
            return _Origin("caller", self._caller(t), -1)
        origin = self.origins.get(base)
        if origin is None and self.pool.owns(t):
            # made by compiled code, which allocates without passing the dispatcher
            segment = len(self.segments) - (self.graph is None)
            origin = self.origins[base] = _Origin("piece", f"piece {segment}, compiled code", segment)
        if origin is None:
            name = f"tensor {list(t.shape)} {str(t.dtype).removeprefix('torch.')} #{len(self.persistent)}"
            origin = self.origins[base] = _Origin("held", name, -1)
            self.known[name] = t
        if origin.segment == -1:
            # detached: this memory stays alive whatever is later bound to the name
            self.persistent.setdefault(origin.producer, self.known.get(origin.producer, t).detach())
        return origin

    def _caller(self, t: torch.Tensor) -> str:
        starts = [start for start in self.caller_starts if start <= t.data_ptr()]
        return self.callers[starts[-1]] if starts else "arena"

    def _wrote(self, t: torch.Tensor) -> None:
        origin = self._origin(t)
        if origin.owner == "caller":
            self.mutated.add(origin.producer)
        elif origin.segment == -1:
            self.written[origin.producer] = self.persistent[origin.producer]

    def finish(self, output: Any) -> CapturedStep:
        # Whoever hands the output out copies it before the next replay, so graphs captured later may use its memory.
        output = tree_map_only(torch.Tensor, lambda t: self.pool.weak(t) if type(t) is torch.Tensor and self.pool.owns(t) else t, output)
        nbytes = sum(s.nbytes for s in self.segments if not isinstance(s, EagerCall)) + self.other_bytes
        return CapturedStep(
            self.segments, output, list(self.addresses.values()), nbytes, frozenset(self.mutated), self.persistent, self.written
        )


class _Cutter(TorchDispatchMode):
    """Hands splitting ops to the capture and lets it observe all others."""

    def __init__(self, capture: _Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.capture.splitting:
            return self.capture.split(func, args, kwargs)
        output = func(*args, **kwargs)
        if not self.capture.inside_piece:  # of a compiled piece only some ops pass here; it is observed as a whole
            with _disable_current_modes():
                self.capture.observe(short_name(func), func, args, kwargs, output)
        return output
