"""CUDA graphs for machines without a GPU: the same protocol, the same faults, so that a capture fault is a CPU test.

Two levels, because compiled C++ kernels do not pass the dispatcher:

(a) a dispatcher tape: eager code runs once while a mode records every op with the storages it reads and writes; a replay runs
    the ops again into the *same addresses*. Rebound inputs are ignored, branches that the host took are frozen.
(b) ``launch(piece, *args)``: an opaque node with fixed input and output storages.

New tensors live in the pool: fixed blocks, reused once the tensors in them are gone, like the device's allocator. What the
device refuses is refused: reading a value back (``.item()``, ``bool``, ``tolist``, ``numpy``, ``cpu``, printing) and shapes that
depend on data (``nonzero``, boolean indexing). After one, the capture stays poisoned, even if the module catches the error.

Not seen: a raw read of a storage (``data_ptr`` into foreign code), a host copy such as ``torch.tensor([...])`` (recorded as a
constant; a device refuses it unless pinned), what a custom op does inside, and ``x[mask] = t`` with ``t`` of one element (on a
device that is a fill when ``t`` is a host scalar and a sync when it is a device tensor; here both pass).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from runtime.graph import CaptureError, frozen_gc, weak_view
from runtime.op_arguments import tensors_in
from runtime.workspace import Workspace

_Tensor = torch.Tensor
_READS_BACK = {
    _Tensor.tolist, _Tensor.numpy, _Tensor.cpu, _Tensor.__array__, _Tensor.__repr__, _Tensor.__format__, _Tensor.__reduce_ex__
}  # fmt: skip
_handles = itertools.count(1)


class _Block:
    """A piece of pool memory. Tensors made over it keep it alive; while there are any, it is not handed out again."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")
        self.storage = self.bytes.untyped_storage()
        self.start, self.nbytes = self.bytes.data_ptr(), self.bytes.nbytes
        self._unused = torch._C._storage_Use_Count(self.storage._cdata)

    def in_use(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) > self._unused


class EmulatedPool:
    """The memory of emulated graphs: blocks with fixed addresses, handed out again when the tensors in them are gone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = next(_handles)
        self.workspace = Workspace()
        self._blocks: list[_Block] = []
        self._modes = _TapeMode(), _ReadBackMode()
        self._modes[1].tape_mode = self._modes[0]

    def graph(self) -> EmulatedGraph:
        return EmulatedGraph(self)

    @contextmanager
    def session(self, collect: bool = True) -> Iterator[None]:
        with frozen_gc(collect=False), self._modes[0], self._modes[1]:  # garbage holds no device memory here
            try:
                yield
            finally:
                self._modes[0].graph = None

    def take(self, nbytes: int) -> _Block:
        """The best fitting free block, or a new one."""
        fitting = [b for b in self._blocks if b.nbytes >= nbytes and not b.in_use()]
        if fitting:
            return min(fitting, key=lambda b: b.nbytes)
        self._blocks.append(_Block(nbytes))
        return self._blocks[-1]

    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks) + self.workspace.nbytes()

    def owns(self, tensor: torch.Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        return any(block.start <= pointer < block.start + block.nbytes for block in self._blocks)

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return weak_view(tensor)

    def perturb(self) -> object:
        return [torch.full((1 << power,), 0xA5, dtype=torch.uint8, device="cpu") for power in range(6, 21)]

    def follow(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def reset(self) -> None:
        self.handle = next(_handles)
        self.workspace = Workspace()
        self._blocks = []


class EmulatedGraph:
    """A tape of closures. ``capture_begin`` points the pool's modes at it, ``capture_end`` points them away."""

    def __init__(self, pool: EmulatedPool) -> None:
        self._pool = pool
        self._tape: list[Callable[[], None]] | None = None
        self._poison: Exception | None = None
        self.nbytes = 0
        self.empty = False

    def capture_begin(self) -> None:
        mode = self._pool._modes[0]
        if mode.graph is not None:
            raise CaptureError("capture_begin: another capture is in progress on this pool")
        if self._tape is not None:
            raise CaptureError("capture_begin: this graph already holds a capture; make a new one")
        self._tape, self._before = [], self._pool.nbytes()
        mode.graph = self

    def capture_end(self) -> None:
        if self._pool._modes[0].graph is not self:
            raise CaptureError("capture_end called before capture_begin")
        if self._pool._modes[0].depth:
            raise CaptureError(
                'a splitting op inside a compiled piece: the emulator cannot cut compiled code; compile the pieces apart (split = "fx") '
                'or use compile.backend = "eager"'
            )
        self._pool._modes[0].graph = None
        if self._poison is not None:
            self._tape = None
            raise CaptureError(f"the capture had died before: {self._poison}") from self._poison
        assert self._tape is not None
        self.empty = not self._tape
        self.nbytes = self._pool.nbytes() - self._before

    def abort(self) -> None:
        if self._pool._modes[0].graph is self:
            self._pool._modes[0].graph = None
        self._tape = None

    def replay(self) -> None:
        if self._tape is None:
            raise CaptureError("replay of a graph that holds no capture: it was reset, or its capture failed")
        with torch.inference_mode(False), torch.no_grad():
            for run in self._tape:
                run()

    def replayer(self) -> Callable[[], object]:
        return self.replay

    def launch(self, piece: Callable[..., Any], *args: Any) -> Any:
        mode = self._pool._modes[0]
        with mode.opaque():
            result = piece(*args)
        return self.record(piece, args, {}, result)

    def reset(self) -> None:
        self._tape = None

    def poison(self, error: Exception) -> Exception:
        self._poison = self._poison or error
        return error

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Any:
        """Put a call that has just run on the tape. Returns its result with new tensors moved into the pool."""
        assert self._tape is not None
        with _disable_current_modes():
            inputs = _storages((args, kwargs))
            blocks: dict[int, _Block] = {}  # by the new storage: outputs of one op may share one
            copies: list[tuple[int, torch.Tensor]] = []

            def into_pool(t: torch.Tensor) -> torch.Tensor:
                source = t.untyped_storage()
                if source._cdata in inputs or not source.nbytes():
                    return t
                if source._cdata not in blocks:
                    block = blocks[source._cdata] = self._pool.take(source.nbytes())
                    target = weak_view(block.bytes[: source.nbytes()])
                    target.copy_(_bytes(source))
                    copies.append((outputs.index(id(t)), target))
                moved = torch.empty(0, dtype=t.dtype, device=t.device)
                return moved.set_(blocks[source._cdata].storage, t.storage_offset(), t.size(), t.stride())

            outputs = [id(t) for t in tensors_in(result)]
            moved = tree_map_only(torch.Tensor, into_pool, result)
            args, kwargs = tree_map_only(torch.Tensor, self._pin, (args, kwargs))
        self._tape.append(_node(func, args, kwargs, copies))
        return moved

    def _pin(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor's present memory: for the pool's own without keeping it allocated, else kept alive; never a later rebinding."""
        return weak_view(t) if self._pool.owns(t) else t.detach()


def _node(func: Callable[..., Any], args: Any, kwargs: Any, copies: list[tuple[int, torch.Tensor]]) -> Callable[[], None]:
    if not copies:
        return lambda: func(*args, **kwargs)

    def run() -> None:
        outputs = tensors_in(func(*args, **kwargs))
        for index, target in copies:
            target.copy_(_bytes(outputs[index].untyped_storage()))

    return run


def _storages(tree: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors_in(tree)}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _TapeMode(TorchDispatchMode):
    """Level (a): every op of eager code goes onto the tape of the graph being captured; without one it just runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: EmulatedGraph | None = None
        self.depth = 0  # above 0: inside an op or an opaque piece, whose own calls are not recorded

    @contextmanager
    def opaque(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        graph = self.graph
        if graph is None:
            return func(*args, **kwargs)
        reason = _refused(func, args, kwargs)
        if reason:
            raise graph.poison(CaptureError(f"{func}: {reason}, which a graph cannot hold; keep the value on the device"))
        with self.opaque():
            result = func(*args, **kwargs)
        if self.depth or _only_views(func, args, kwargs, result):
            return result
        return graph.record(func, args, kwargs, result)


class _ReadBackMode(TorchFunctionMode):
    """Refuses the reads that never reach the dispatcher on a CPU tensor."""

    tape_mode: _TapeMode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = self.tape_mode.graph
        if func in _READS_BACK and graph is not None and not self.tape_mode.depth:
            name = getattr(func, "__name__", str(func))
            raise graph.poison(
                CaptureError(f"Tensor.{name}: reads a tensor's values on the host, which a graph cannot hold; keep it out of the step")
            )
        return func(*args, **(kwargs or {}))


def _refused(func: Any, args: Any, kwargs: Any) -> str:
    """Why a device could not capture this op, or ""."""
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return "reads a value back to the host"
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        fills = func is not torch.ops.aten.index.Tensor and args[2].numel() == 1
        return "indexes by a boolean mask, so a shape depends on data" if masks and not fills else ""
    if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return ""
    if torch.Tag.dynamic_output_shape in tags:
        return "makes a shape that depends on data"
    return ""


def _only_views(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """An op that merely looks at its inputs in another way has nothing to do at replay."""
    if getattr(func, "namespace", "") != "aten" or func._schema.is_mutable:
        return False
    outputs = _storages(result)
    return bool(outputs) and outputs <= _storages((args, kwargs))
