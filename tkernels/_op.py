"""Registration of ops: one schema, a kernel, a reference, a fake, and a backward that says there is none.

``define`` puts an op into the ``tkernels`` library. CUDA runs the Triton launcher; the CPU runs the PyTorch reference, or
with ``TRITON_INTERPRET=1`` the same launcher in Triton's interpreter (``reference_ops()`` switches back to the reference for a
while: a whole model in the interpreter takes minutes). Ops are inference-only: a tensor that needs a gradient may pass
through, and the backward pass raises.

``torch.library.Library`` is used rather than ``custom_op`` because it costs 2 to 3 µs a call on the host against 10 to 15.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tkernels import _launch, _repeats
from tkernels._triton import INTERPRETED

_LIBRARY = torch.library.Library("tkernels", "DEF")
_reference_wanted = False  # read at each call on the CPU under the interpreter, nowhere else


def define(
    schema: str,
    *,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    binds: bool = False,
    repeats: bool | Callable[..., Hashable] = True,
) -> Any:
    """Register ``schema`` (without the namespace) and return its ``OpOverload``.

    kernel: launches Triton; also run on the CPU under the interpreter.
    reference: plain PyTorch with the same arguments and the same output strides; what the CPU runs otherwise.
    fake: shapes, dtypes and strides only. tags: what a compiler must know, e.g. that strides must stay as traced.
    binds: the op returns nothing and does nothing but launch, so it gets ``overload.bind(allocate, args, kwargs)``, by which a runtime
        that calls it again and again on the same memory skips Triton's launcher (see ``_launch.bind``).
    repeats: what the op launches follows from how its arguments look and from its host values, as a graph needs it too. Then a call that
        looks like an earlier one skips checks and Triton's launcher (see ``_repeats``). False for an op with a state of its own. A
        function of the arguments says what launches depend on beside them: ``beside`` of ``_repeats.repeating``.
    """
    name = schema.split("(", 1)[0].strip()
    _LIBRARY.define(schema, tags=tags)
    beside = repeats if callable(repeats) else None

    def repeating(call: Callable[..., Any]) -> Callable[..., Any]:
        return _repeats.repeating(call, beside) if repeats else call

    _LIBRARY.impl(name, repeating(_on_its_device(kernel)), "CUDA")
    _LIBRARY.impl(name, _switched(repeating(kernel), reference) if INTERPRETED else reference, "CPU")
    torch.library.register_fake(f"tkernels::{name}", _without_values(name, fake), lib=_LIBRARY)
    overload = getattr(torch.ops.tkernels, name).default
    for device in ("cpu", "cuda"):
        _LIBRARY.impl(name, _without_autocast(device, overload), f"Autocast{device.upper()}")
    if overload._schema.is_mutable:
        _LIBRARY.impl(name, _refuse_gradients(name, overload), "Autograd")
    else:
        torch.library.register_autograd(f"tkernels::{name}", _raising_backward(name), lib=_LIBRARY)
    if binds:
        overload.bind = _binder(kernel, overload)
    return overload


@contextmanager
def reference_ops() -> Iterator[None]:
    """Within it, and in all threads, ops on the CPU run their PyTorch reference also where ``TRITON_INTERPRET=1`` is set."""
    global _reference_wanted
    before, _reference_wanted = _reference_wanted, True
    try:
        yield
    finally:
        _reference_wanted = before


def _without_values(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, but not for one meta tensor among real ones: such a call comes here too, and would return memory that nobody wrote."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if len({x.is_meta for x in tensors}) > 1:
            parameters = getattr(torch.ops.tkernels, name).default._schema.arguments
            named = {**{p.name: x for p, x in zip(parameters, args, strict=False)}, **kwargs}
            empty = next(key for key, x in named.items() if isinstance(x, torch.Tensor) and x.is_meta)
            real = next(x.device for x in tensors if not x.is_meta)
            raise ValueError(f"{empty}: expected a tensor on {real} like the others, got one on meta, which has no values; load them first")
        return fake(*args, **kwargs)

    return run


def _without_autocast(device: str, overload: Any) -> Callable[..., Any]:
    """The op says which dtype comes out; products of torch's within it would follow the caller's autocast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return overload(*args, **kwargs)

    return run


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` on the device of its first argument: Triton launches on the current one, wherever the tensors are."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.index in (torch.cuda.current_device(), None):  # None: on the CPU, which the launcher's checks refuse
            return kernel(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return kernel(x, *args, **kwargs)

    return run


def _binder(kernel: Callable[..., None], overload: Any) -> Callable[..., Callable[[], None] | None]:
    def bind(allocate: _launch.Allocate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
        if args[0].device.type == "cpu" and (_reference_wanted or not INTERPRETED):
            overload(*args, **kwargs)
            return None
        return _launch.bind(kernel, allocate, args, kwargs)

    return bind


def _switched(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return (reference if _reference_wanted else kernel)(*args, **kwargs)

    return run


def _message(name: str) -> str:
    return (
        f"tkernels.{name} is inference-only and has no backward: run it under torch.inference_mode() or torch.no_grad(), "
        "or use the torch module it replaces for training"
    )


def _raising_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_message(name))

    return backward


def _refuse_gradients(name: str, overload: Any) -> Callable[..., Any]:
    """An op that writes into its arguments cannot defer the error to backward: it would have overwritten saved values."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            if any(t.requires_grad for t in tensors):
                raise NotImplementedError(_message(name))
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return forward
