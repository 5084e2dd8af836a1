"""Kernel launches that are noted once and repeated without Triton's launcher.

That launcher binds the arguments, specialises on them and looks the kernel up at every call: 10 to 40 µs of host time. ``noting``
writes down what an op launches. Between two captured pieces an op is called again and again with the same tensors at the same
addresses, so nothing can change: ``bind`` runs an op once and returns a call that hands the same arguments to the compiled kernels, a
few µs for each. For other memory that looks the same, ``_repeats`` does it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tkernels._triton import INTERPRETED

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""Memory for a temporary of a bound call: (shape, dtype, device) -> tensor, its own until the call has ended."""

_patching = threading.Lock()  # Triton's launcher is the process's
_thread: int | None = None  # whose launches are noted
_binds = False


class Note(NamedTuple):
    """One launch."""

    kernel: Any
    compiled: Any  # None in the interpreter
    grid: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def is_noting() -> bool:
    """Whether the launches of this thread are being noted."""
    return _thread == threading.get_ident()


def is_binding() -> bool:
    """Whether this thread is in ``bind``: what a kernel is given now it gets again at every repeat, beside launches of other streams."""
    return is_noting() and _binds


def bind(op: Callable[..., None], allocate: Allocate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    """Run ``op(*args, **kwargs)``, which returns nothing, and return what runs its launches again on the same memory.

    None when the op does more than allocate, look and launch: then only the op itself does it again. allocate: serves its
    ``torch.empty``. Host values, shapes and addresses are those of now. Triton's launch hooks are not called again. Raises what the op
    raises.
    """
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    recording, notes = Recording(allocate), list[Note]()
    with noting(notes, binds=True), recording, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        op(*args, **kwargs)
    if recording.others or not notes:
        return None
    kept = args, kwargs, recording.made, recording.views
    repeat = _in_interpreter if INTERPRETED else _on_device(device)
    return partial(repeat, tuple(_bound_launch(*note) for note in notes), kept)


@contextmanager
def noting(notes: list[Note], binds: bool) -> Iterator[None]:
    """Every launch that this thread makes through Triton is appended. One thread notes at a time; others wait, unless they only try
    (``may_note``). Not to be nested."""
    global _thread, _binds
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction as Function
    else:
        from triton.runtime.jit import JITFunction as Function
    with _patching:
        launcher = Function.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if warmup or not is_noting():
                return launcher(kernel, *args, grid=grid, warmup=warmup, **options)
            with _disable_current_modes():  # what the interpreter asks of torch is no work of the op's
                compiled = launcher(kernel, *args, grid=grid, warmup=warmup, **options)
            notes.append(Note(kernel, compiled, grid, args, options))
            return compiled

        Function.run, _thread, _binds = run, threading.get_ident(), binds
        try:
            yield
        finally:
            Function.run, _thread, _binds = launcher, None, False


def may_note() -> bool:
    """Whether ``noting`` would begin at once."""
    return not _patching.locked()


class Recording(TorchDispatchMode):
    """Serves ``torch.empty`` from given memory, and counts what else is asked of torch and is work to do again: views are not."""

    def __init__(self, allocate: Allocate) -> None:
        super().__init__()
        self.allocate = allocate
        self.made: list[torch.Tensor] = []
        self.views: list[Any] = []  # alive, as long as launches are told apart by address and identity
        self.sources: dict[int, torch.Tensor] = {}  # what a view, by its id, was taken from
        self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("device") is not None and not kwargs.get("pin_memory"):
            made = self.allocate(args[0], kwargs.get("dtype") or torch.get_default_dtype(), kwargs["device"])
            self.made.append(made)
            return made
        result = func(*args, **kwargs)
        if func.is_view:
            self.views.append(result)
            self.sources |= {id(view): args[0] for view in ([result] if isinstance(result, torch.Tensor) else result)}
        else:
            self.others += 1
        return result


def in_order(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the kernel by name, as its signature lists them, constants too: what a compiled kernel takes."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    defaults = inspect.signature(kernel.fn).parameters
    return {name: given[name] if name in given else defaults[name].default for name in kernel.arg_names}


def _bound_launch(kernel: Any, compiled: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if INTERPRETED:
        return partial(kernel[grid], *args, **options)
    given = in_order(kernel, args, options)
    # An address for each tensor: the launcher takes it as it is, and asks the driver about a tensor's.
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given.values()]
    return compiled.run, size_of(grid, given), (*after_stream(compiled), *values)


def size_of(grid: Any, given: dict[str, Any]) -> tuple[int, int, int]:
    """The three sizes of a grid, which may be a function of the kernel's arguments."""
    x, y, z = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
    return x, y, z


def after_stream(compiled: Any) -> tuple[Any, ...]:
    """What a compiled kernel's ``run`` takes between stream and arguments: function, metadata, launch metadata and the two hooks.
    The same in Triton 3.6 and 3.7."""
    return compiled.function, compiled.packed_metadata, None, None, None


def _in_interpreter(launches: tuple[Any, ...], kept: Any) -> None:
    for run in launches:
        run()


def _on_device(device: torch.device) -> Callable[[tuple[Any, ...], Any], None]:
    index = torch.cuda.current_device() if device.index is None else device.index

    def run(launches: tuple[Any, ...], kept: Any) -> None:
        if torch._C._cuda_getDevice() != index:  # kernels are loaded into the context of one device
            with torch.cuda.device(index):
                return run(launches, kept)
        stream = torch._C._cuda_getCurrentRawStream(index)
        for kernel, (x, y, z), rest in launches:
            kernel(x, y, z, stream, *rest)
        return None

    return run
