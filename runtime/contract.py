"""The proof of a captured step, made right after its capture.

The step's replay is compared with the same callable not captured, bit for bit, on two sets of inputs: a full one and one with a
padded tail. Meanwhile the eager allocator hands out other addresses than at capture, and the graph's outputs are overwritten
first. So a graph that reads memory nobody refills, an eager gap whose result lands elsewhere, or an output that is not written
shows here and not in serving. Then the padding is shaken (NaN in float tails, other values in integer tails that have no declared
one): if a real row changes, the module mixes rows, and it is only served at exact sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.arena import Arena
from runtime.captured_step import CapturedStep
from runtime.graph import CaptureError, Pool
from runtime.op_arguments import written_arguments
from runtime.outputs import OutputDims, cut_to_real

Call = Callable[[Mapping[str, torch.Tensor]], Any]
RESTORED_BYTES = 256 << 20  # so much state, in all, is put back after runs that the caller did not ask for


@dataclass
class Inputs:
    """A set of inputs that can be put into the arena again and again. real: its sizes; padded: the graph's."""

    values: Mapping[str, torch.Tensor]
    real: Mapping[str, int]
    padded: Mapping[str, int]

    def load(self, arena: Arena) -> Mapping[str, torch.Tensor]:
        arena.touched(arena.names)
        return arena.load(self.values, self.real, self.padded)


@dataclass
class Expected:
    """What the callable that is captured makes of a set of inputs, uncaptured. after: the inputs then; mutated: those it changed."""

    output: Any
    after: dict[str, torch.Tensor]
    mutated: set[str]


def expect(reference: Call, given: Inputs, arena: Arena, dims: OutputDims) -> Expected:
    """Run it once."""
    views = given.load(arena)
    before = {n: v.clone() for n, v in views.items()}
    output = _clone(cut_to_real(reference(views), dims, given.real))
    after = {n: v.clone() for n, v in views.items()}
    return Expected(output, after, {n for n, v in after.items() if not same_bits(v, before[n])})


def prove(
    step: CapturedStep,
    reference: Call,
    inputs: list[Inputs],
    arena: Arena,
    dims: OutputDims,
    pool: Pool,
    name: str,
    known: list[Expected] | None = None,
) -> tuple[frozenset[str], bool]:
    """Compare replays with the callable not captured. Returns the arena inputs that the step writes into, and whether running the
    step twice is running it once. known: what ``expect`` gave for each of the inputs, when that has been run before.

    Raises CaptureError naming the step and the output that differs. Leaves the arena with the last set of inputs.
    """
    mutated: set[str] = set(step.mutated)
    idempotent = True
    for i, given in enumerate(inputs):
        problem = _compare(step, reference, given, arena, dims, pool, mutated, {}, known[i] if known else None)
        if problem and step.written:
            # A step that changes its own state (a counter, a running maximum) differs when run twice: put the state back between.
            problem = _compare(step, reference, given, arena, dims, pool, mutated, moderate(step.written))
            idempotent = False
        if problem:
            raise CaptureError(f"{name}: {problem}")
    step.verified()
    return frozenset(mutated), idempotent


def _compare(
    step: CapturedStep,
    reference: Call,
    given: Inputs,
    arena: Arena,
    dims: OutputDims,
    pool: Pool,
    mutated: set[str],
    state: Mapping[str, torch.Tensor],
    known: Expected | None = None,
) -> str:
    """What differs, or "". Rows past the real ones are not compared: an op may leave them as it finds them."""
    saved = {n: t.clone() for n, t in state.items()}

    def restore() -> None:
        _restore(state, saved)

    expected = known or expect(reference, given, arena, dims)
    mutated |= expected.mutated
    state_after = {n: t.clone() for n, t in state.items()}
    restore()
    views = given.load(arena)
    held = pool.perturb()
    _overwrite(step, pool)
    step.replay()
    pool.synchronize()
    del held
    replayed = pytree.tree_leaves(cut_to_real(step.output, dims, given.real))
    for i, (want, got) in enumerate(zip(pytree.tree_leaves(expected.output), replayed, strict=True)):
        if isinstance(want, torch.Tensor) and not same_bits(want, got):
            problem = f"output {i} of the replay differs from the same callable not captured ({difference(want, got)})"
            restore()
            given.load(arena)
            again = pytree.tree_leaves(cut_to_real(reference(views), dims, given.real))[i]
            if not same_bits(want, again):
                problem += "; but so does the callable from itself when it is called twice: it draws random numbers or depends on state"
            return problem
    for n, v in views.items():
        if not same_bits(v, expected.after[n]):
            return f"input {n}: the replay writes other values into it than the same callable not captured"
    for n, t in state.items():
        if not same_bits(t, state_after[n]):
            return f"{n}: the replay leaves other values in it than the same callable not captured"
    return ""


def _overwrite(step: CapturedStep, pool: Pool) -> None:
    """Junk into the outputs, so that one which the replay does not write cannot pass with the values of its capture; and into the
    workspace, which promises nothing about what it holds."""
    pool.workspace.overwrite()
    for leaf in pytree.tree_leaves(step.output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() and pool.owns(leaf):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                leaf.fill_(float("nan"))
            else:
                leaf.fill_(1)


def rows_mix(reference: Call, module: Call, given: Inputs, arena: Arena, dims: OutputDims, declared: Mapping[str, Any]) -> str:
    """Why real rows change with what rows past them hold, or "". declared: inputs whose padding value the user gave."""
    plain = _clone(cut_to_real(reference(given.load(arena)), dims, given.real))
    undeclared = [n for n in arena.names if n not in declared]
    views = given.load(arena)
    arena.poison_tails(given.real, given.padded)
    arena.shake_tails(undeclared, given.real, given.padded)
    shaken = _clone(cut_to_real(reference(views), dims, given.real))
    arena.touched(arena.names)
    if (i := _first_difference(plain, shaken)) is not None:
        return f"output {i}: real rows change with what the padding rows hold"
    # Values on either side of the real ones: a maximum or a minimum over all rows shows with these only. Both occur in the step, so
    # that they are good as indices.
    for name in undeclared:
        if (i := _extreme_shows(reference, given, arena, dims, name)) is not None:
            return f"output {i}: real rows change with what the padding rows of {name} hold"
    # An op may leave rows past the real ones unwritten; then no later op may carry what was there into a real row.
    plain = _clone(cut_to_real(module(given.load(arena)), dims, given.real))
    views = given.load(arena)
    with _FillEmpty():
        filled = cut_to_real(module(views), dims, given.real)
    if (i := _first_difference(plain, filled)) is not None:
        return f"output {i}: real rows change with what new memory holds, so an op reads rows that no op has written"
    return ""


def _extreme_shows(reference: Call, given: Inputs, arena: Arena, dims: OutputDims, name: str) -> int | None:
    """The output that changes between padding of the same value as all real rows and padding above or below it, of one input."""
    values = given.values.get(name)
    if values is None or values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool or not values.numel():
        return None
    low, high = values.min(), values.max()
    if bool(low == high):
        return None
    for real, tail in ((low, high), (high, low)):
        runs = []
        for padding in (real, tail):
            views = given.load(arena)
            views[name].fill_(padding)
            arena.real_part(name, views[name], given.real).fill_(real)
            runs.append(_clone(cut_to_real(reference(views), dims, given.real)))
        arena.touched(arena.names)
        if (i := _first_difference(*runs)) is not None:
            return i
    return None


def _restore(state: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    for name, t in saved.items():
        # what was made in inference mode can only be written in it; leaving it for the others would turn gradients on
        with torch.inference_mode() if state[name].is_inference() else nullcontext():
            _unexpanded(state[name]).copy_(_unexpanded(t, like=state[name]))


def _unexpanded(t: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Each element of an expanded tensor once: torch refuses to write it several times. like: the tensor that says what is expanded."""
    for axis, stride in enumerate((t if like is None else like).stride()):
        if stride == 0 and t.shape[axis] > 1:
            t = t.narrow(axis, 0, 1)
    return t


def written_state(module: Call, given: Inputs, arena: Arena, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which of the state the module writes, as far as its ops declare."""
    by_storage = {t.untyped_storage()._cdata: name for name, t in state.items()}
    with _Writes() as writes:
        module(given.load(arena))
    return {by_storage[cdata]: state[by_storage[cdata]] for cdata in writes.storages if cdata in by_storage}


def moderate(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The smaller ones, up to ``RESTORED_BYTES`` in all."""
    chosen: dict[str, torch.Tensor] = {}
    total = 0
    for name, t in sorted(state.items(), key=lambda item: item[1].nbytes):
        total += t.nbytes
        if total > RESTORED_BYTES:
            break
        chosen[name] = t
    return chosen


@contextmanager
def kept(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put state of a moderate size back as it was before."""
    saved = {name: t.clone() for name, t in moderate(state).items()}
    try:
        yield
    finally:
        _restore(state, saved)


class _Writes(TorchDispatchMode):
    """Notes the storages of arguments that ops declare as written."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages |= {t.untyped_storage()._cdata for t in written_arguments(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


class _FillEmpty(TorchDispatchMode):
    """Memory that is allocated and not written holds NaN, or a large number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "_opname", "") in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"):
            result.fill_(float("nan") if result.dtype.is_floating_point or result.dtype.is_complex else 1)
        return result


def _first_difference(a: Any, b: Any) -> int | None:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if isinstance(x, torch.Tensor) and not same_bits(x, y)), None)


def differs_from_module(
    reference: Call,
    module: Call,
    given: Inputs,
    arena: Arena,
    dims: OutputDims,
    state: Mapping[str, torch.Tensor],
    roundings: int,
) -> str:
    """Why the padded callable is not the module at the real size, or "", by tolerance for floats. Of the outputs only float ones can
    be compared so. state: what the step writes, compared too, and put back. roundings: see ``roundings_of``."""
    state = moderate(state)
    saved = {n: t.clone() for n, t in state.items()}
    try:
        got = _clone(cut_to_real(reference(given.load(arena)), dims, given.real))
        left = {n: t.clone() for n, t in state.items()}
        _restore(state, saved)
        exact = Inputs(given.values, given.real, given.real)
        want = cut_to_real(module(exact.load(arena)), dims, given.real)
        for i, (a, b) in enumerate(zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True)):
            if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a.numel() and not _close(a, b, roundings):
                return f"output {i}: rows of the padded step differ from the module at the real size ({difference(a, b)})"
        for n, t in state.items():
            if not (_close(t, left[n], roundings) if t.dtype.is_floating_point and t.numel() else same_bits(t, left[n])):
                return f"{n}: the padded step leaves other values in it than the module at the real size ({difference(t, left[n])})"
    finally:
        _restore(state, saved)
        arena.touched(arena.names)
    return ""


def roundings_of(module: torch.nn.Module) -> int:
    """How many roundings of its largest value an output may differ by where GEMMs run in other shapes. Each matrix adds its own, and the
    layers behind amplify them: 400 were measured in the logits of 30 Llama layers (121 matrices) in fp32 on a CPU. A stack of matrices in
    one tensor counts as many. Padding that leaks into real rows changes them by far more."""
    shapes = [t.shape for t in module.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor) and t.ndim > 1]
    return 64 + 16 * sum(shape[:-2].numel() for shape in shapes)


def _close(a: torch.Tensor, b: torch.Tensor, roundings: int) -> bool:
    """Within so many roundings of the largest value in the tensor, and 2% of it; within 64 in any case."""
    scale = a.float().nan_to_num(0, 0, 0).abs().max().item()
    limit = max(64 * torch.finfo(a.dtype).eps, min(roundings * torch.finfo(a.dtype).eps, 0.02)) * max(scale, 1e-6)
    return bool(torch.isclose(a.float(), b.float(), rtol=0.0, atol=limit, equal_nan=True).all())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits; a NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = _BITS[a.element_size()]
    return bool(torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)))


def difference(want: torch.Tensor, got: torch.Tensor) -> str:
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{list(want.shape)} {want.dtype} against {list(got.shape)} {got.dtype}"
    apart = want.ne(got) & ~(want.isnan() & got.isnan())
    rows = apart.reshape(apart.shape[0], -1).any(1) if apart.ndim else apart.reshape(1)
    gap = (want.double() - got.double()).abs().nan_to_num(float("inf")).max().item() if want.numel() else 0.0
    return f"{int(rows.sum())} of {rows.numel()} rows, by up to {gap:.3g}"


def _clone(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)
