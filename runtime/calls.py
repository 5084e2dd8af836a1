"""One call of a graphed module: is a graph legal for it, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from runtime.binding import Call
from runtime.contract import same_bits
from runtime.graph import CaptureError
from runtime.key_steps import Captured, KeySteps
from runtime.ready import Borrow, Ready, outputs
from runtime.staging import Note
from runtime.steps import Steps


class Route(NamedTuple):
    """What is known of all calls with the same shapes, dtypes and host values. key: None for host values that were never captured.

    names: the tensors among the arguments, by position. illegal: why no graph may serve such a call, or "".
    """

    key: KeySteps | None
    text: str
    names: tuple[tuple[int, str], ...]
    sizes: dict[str, int]
    illegal: str


def illegal_shape(key: KeySteps, call: Call) -> str:
    """Why no graph of this key may serve calls with these shapes and dtypes, or ""."""
    for name, spec in key.specs.items():
        tensor = call.tensors.get(name)
        if tensor is None or tensor.dtype != spec.dtype or tensor.ndim != len(spec.shape):
            got = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            return f"{name}: the graphs take {[str(d) for d in spec.shape]} {spec.dtype}, got {got}"
        for n, wanted in zip(tensor.shape, spec.shape, strict=True):
            if wanted.__class__ is int and n != wanted:
                return f"{name}: the graphs take {[str(d) for d in spec.shape]}, got {list(tensor.shape)}"
    if key.alike and len({call.sizes[name] for name in key.alike}) > 1:
        return f"the outputs do not tell which of {list(key.alike)} they follow, and they differ: {call.sizes}"
    return ""


# Every step asks these: looked up once.
_is_autocast_enabled, _is_any_autocast_enabled = torch.is_autocast_enabled, torch._C._is_any_autocast_enabled
_functorch_transform, _num_dispatch_modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack


def is_autocast(device_type: str) -> bool:
    """Whether ``torch.autocast`` is on for these devices. Mostly it is on for none, which is quicker to ask."""
    return _is_any_autocast_enabled() and _is_autocast_enabled(device_type)


def illegal_state(device_type: str) -> str:
    """Why no graph may serve a call in the caller's present modes, or ""."""
    if is_autocast(device_type):
        return "torch.autocast is on, and graphs are captured without it"
    if _functorch_transform() is not None:  # tensors of vmap, grad and jvp have no memory that could be copied
        return "within a transform of torch.func, and graphs are captured outside"
    if _num_dispatch_modes():  # who counts, records or fakes operators would see a copy and nothing else
        return "within a dispatch mode of torch, and graphs are captured outside"
    return ""


def illegal_layout(tensors: Mapping[str, torch.Tensor]) -> str:
    """Why no graph may serve a call with tensors of these layouts, or ""."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            return f"{name}: graphs take dense tensors, got {tensor.layout}"
    return ""


def illegal_memory(key: KeySteps, tensors: Mapping[str, torch.Tensor]) -> str:
    """Why no graph of this key may serve a call with tensors in this memory, or ""."""
    if key.writes_arguments:
        seen: dict[int, str] = {}
        for name, tensor in tensors.items():
            other = seen.setdefault(tensor.untyped_storage()._cdata, name)
            if other != name:  # copies of them would no longer overlap as they do
                return f"{other} and {name} share memory and the module writes its arguments"
    for name, tensor in key.static.items():
        given = tensors[name]
        same = given.data_ptr() == tensor.data_ptr() and given.shape == tensor.shape and given.stride() == tensor.stride()
        if not same or given.dtype != tensor.dtype:
            return f"{name}: it is static, and not the memory that was captured"
    return ""


def replay(
    steps: Steps,
    key: KeySteps,
    captured: Captured,
    tensors: Mapping[str, torch.Tensor],
    real: Mapping[str, int],
    *,
    poison: bool,
    borrow: Borrow,
) -> Any:
    """Run a captured step on a call's tensors and hand out its real rows."""
    steps.pool.follow()
    values = tensors if not key.static else {n: t for n, t in tensors.items() if n in key.specs}
    views = key.arena.load(values, real, captured.padded)
    _run(steps, key, captured, views, real, poison)
    for name in captured.mutated:
        values[name].copy_(key.arena.real_part(name, views[name], real))
    key.arena.touched(captured.mutated)
    return outputs(steps, key.arena, captured.output.at(real), borrow)


def replay_staged(steps: Steps, ready: Ready) -> Any:
    """A ready step on what was written into the arena's staging buffer, with NaN in its padding, and compared."""
    steps.pool.follow()
    ready.arena.send(ready.layout)
    _run(steps, ready.key, ready.captured, ready.layout.views, ready.sizes, True)
    return outputs(steps, ready.arena, ready.rows, ready.borrow)


def _run(steps: Steps, key: KeySteps, captured: Captured, views: Mapping[str, torch.Tensor], real: Mapping[str, int], poison: bool) -> None:
    if poison:
        _replay_poisoned(key, captured, views, real)
    else:
        captured.step.replay()
    steps.replays += 1


class Staged:
    """The next step, as arrays to write its inputs into; calling it runs the step. Made by ``GraphedModule.stage``, good for one call.

    arrays: input -> numpy array of the real size, over pinned memory that one copy brings to the device; it holds what an earlier
    step left. bfloat16 and float8 appear as their bits, uint16 and uint8. note: which step that was, if its writer said so in
    ``note.now`` after writing and nobody else was handed this memory since; it then stands in ``note.before``, and what is as it was
    need not be written again.
    """

    __slots__ = ("_run", "arrays", "note")

    def __init__(self, arrays: dict[str, np.ndarray], run: Callable[[dict[str, np.ndarray]], Any], note: Note) -> None:
        self.arrays, self.note = arrays, note
        self._run: Callable[[dict[str, np.ndarray]], Any] | None = run

    def __call__(self) -> Any:
        run, self._run = self._run, None
        if run is None:
            raise RuntimeError("staged: this step has run already; call stage again for the next one")
        return run(self.arrays)


def _replay_poisoned(key: KeySteps, captured: Captured, views: Mapping[str, torch.Tensor], real: Mapping[str, int]) -> None:
    """With NaN in the padding, and compared with the callable not captured."""
    key.arena.poison_tails(real, captured.padded)
    if captured.mutated or not captured.idempotent:
        captured.step.replay()  # running the step twice would count twice
        return
    expected = pytree.tree_map_only(torch.Tensor, torch.clone, captured.output.of(key.call(views), real))
    captured.step.replay()
    got = captured.output.of(captured.step.output, real)
    for i, (want, have) in enumerate(zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)):
        if isinstance(want, torch.Tensor) and not same_bits(want, have):
            raise CaptureError(f'graph.check = "poison": output {i} of the replay differs from the same callable not captured')
