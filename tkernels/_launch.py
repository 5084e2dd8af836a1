"""Kernel launches that are prepared once and repeated.

Triton's launcher binds the arguments, specialises on them and looks the kernel up at every call: 10 to 40 µs of host time. Between
two captured pieces an op is called again and again with the same tensors at the same addresses, so nothing of that can change.
``bind`` runs an op once, notes what it launches, and returns a call that hands the same arguments to the compiled kernels: a few
µs for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tkernels._triton import INTERPRETED

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""Memory for a temporary of a bound call: (shape, dtype, device) -> tensor, its own until the call has ended."""

_binding = threading.RLock()  # Triton's launcher is the process's
_thread: int | None = None


def is_binding() -> bool:
    """Whether this thread is in ``bind``: what a kernel is given now it gets again at every repeat, beside launches of other streams."""
    return _thread == threading.get_ident()


def bind(op: Callable[..., None], allocate: Allocate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    """Run ``op(*args, **kwargs)``, which returns nothing, and return what runs its launches again on the same memory.

    None when the op does more than allocate, look and launch: then only the op itself does it again. allocate: serves its
    ``torch.empty``. Host values, shapes and addresses are those of now. Triton's launch hooks are not called again. Raises what the op
    raises.
    """
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    recording = _Recording(allocate)
    with _noting(recording.launches), recording, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        op(*args, **kwargs)
    if recording.others or not recording.launches:
        return None
    kept = args, kwargs, recording.temporaries
    repeat = _in_interpreter if INTERPRETED else _on_device(device)
    return partial(repeat, tuple(recording.launches), kept)


@contextmanager
def _noting(launches: list[Any]) -> Iterator[None]:
    """Every launch that this thread makes through Triton is appended, as a bound one."""
    global _thread
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction as Function
    else:
        from triton.runtime.jit import JITFunction as Function
    with _binding:
        launcher = Function.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if warmup or not is_binding():
                return launcher(kernel, *args, grid=grid, warmup=warmup, **options)
            with _disable_current_modes():  # what the interpreter asks of torch is no work of the op's
                compiled = launcher(kernel, *args, grid=grid, warmup=warmup, **options)
            launches.append(_bound_launch(kernel, compiled, grid, args, options))
            return compiled

        Function.run, _thread = run, threading.get_ident()
        try:
            yield
        finally:
            Function.run, _thread = launcher, None


class _Recording(TorchDispatchMode):
    """Serves ``torch.empty`` from given memory, and counts what else is asked of torch and is work to do again: views are not."""

    def __init__(self, allocate: Allocate) -> None:
        super().__init__()
        self.allocate = allocate
        self.launches: list[Any] = []
        self.temporaries: list[torch.Tensor] = []
        self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("device") is not None and not kwargs.get("pin_memory"):
            made = self.allocate(args[0], kwargs.get("dtype") or torch.get_default_dtype(), kwargs["device"])
            self.temporaries.append(made)
            return made
        result = func(*args, **kwargs)
        if func.is_view:
            self.temporaries.append(result)
        else:
            self.others += 1
        return result


def in_order(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the kernel by name, as its signature lists them, constants too: what a compiled kernel takes."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    defaults = kernel.signature.parameters
    return {name: given[name] if name in given else defaults[name].default for name in kernel.arg_names}


def _bound_launch(kernel: Any, compiled: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if INTERPRETED:
        return partial(kernel[grid], *args, **options)
    given = in_order(kernel, args, options)
    x, y, z = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
    # An address for each tensor: the launcher takes it as it is, and asks the driver about a tensor's.
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given.values()]
    # After the stream: function, metadata, launch metadata and the two hooks. The same in Triton 3.6 and 3.7.
    return compiled.run, (x, y, z), (compiled.function, compiled.packed_metadata, None, None, None, *values)


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
