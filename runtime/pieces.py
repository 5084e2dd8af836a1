"""Compile the pieces of a cut graph with Inductor, each distinct one once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from runtime.fxnodes import meta_key, storage_key
from runtime.graph import launch
from runtime.overlap import may_overlap
from runtime.program import Function, Segment


class PieceError(RuntimeError):
    """A piece that Inductor does not compile. The message names the piece by its ops and gives the compiler's reason."""


class Guard(NamedTuple):
    """A condition on sizes that a piece was compiled under, in the form of a shape environment's own."""

    expr: Any
    sloc: str


class CompiledPiece(NamedTuple):
    """Inductor's code for one piece, and the conditions on sizes that it was compiled under."""

    artifact: Callable[..., tuple[Any, ...]]
    guards: list[Guard]


class Launched:
    """A compiled piece in its place in a program, as a capture sees it: its name, its inputs' names, which of them it writes.

    The first call looks whether the compiler has merged values that eager keeps apart (it returns ``x`` for ``x + 0``). Where one
    of the two is written later, the piece returns a copy from then on.
    """

    def __init__(self, piece: CompiledPiece, segment: Segment, name: str, inputs: tuple[str, ...]) -> None:
        self.name, self.inputs = name, inputs
        self.writes = tuple(place for place, name in enumerate(segment.inputs) if name in segment.mutates)
        self.copied: tuple[int, ...] = ()
        self._artifact, self._segment = piece.artifact, segment
        self._call = self._first_call

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return self._call(*args)

    def function(self) -> Function:
        """How a program calls it: through ``launch``, since the dispatcher sees nothing of compiled code."""
        return functools.partial(launch, self)

    def _first_call(self, *args: Any) -> tuple[Any, ...]:
        outputs = self._artifact(*args)
        merged = _merged(self._segment, args, outputs)
        if merged is not None:
            self.copied = merged
            self._call = self._copying_call if merged else self._artifact
        return self._apart(outputs)

    def _copying_call(self, *args: Any) -> tuple[Any, ...]:
        return self._apart(self._artifact(*args))

    def _apart(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(output.clone() if place in self.copied else output for place, output in enumerate(outputs))


def _merged(segment: Segment, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, ...] | None:
    """Outputs that lie in the memory of another value though they should not, and where one of the two is exposed. None when an
    empty output shows nothing."""
    known: dict[int, set[int | None]] = {}  # address → the storages that are expected there; a caller may pass views of one tensor
    for value, expected in zip(args, segment.input_values, strict=True):
        if isinstance(value, torch.Tensor) and value.numel():
            known.setdefault(value.untyped_storage().data_ptr(), set()).add(storage_key(expected))
    merged = []
    for place, (value, expected) in enumerate(zip(outputs, segment.output_values, strict=True)):
        if not value.numel():
            return None
        mine = storage_key(expected)
        others = known.setdefault(value.untyped_storage().data_ptr(), {mine})
        if mine not in others and segment.exposed & (others | {mine}):
            merged.append(place)
    return tuple(merged)


# Layers of one model share an entry, and so do several traces of one module (one per set of host values).
_COMPILED: dict[Any, CompiledPiece] = {}


def inductor_available(device: torch.device | str) -> str | None:
    """None when Inductor can compile for the device, else the reason why not."""
    if torch.device(device).type == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:
            detail = next(iter(str(error).splitlines()), type(error).__name__)
            return f"Inductor needs a C++ compiler for the CPU and found none ({detail}); install g++ or set CXX"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else f"Inductor needs Triton for {device}, and it cannot be imported or the device is too old for it"


def compile_piece(segment: Segment, values: list[Any], shape_env: Any) -> CompiledPiece:
    """Inductor's code for a piece whose inputs look like ``values`` (fake tensors and sizes).

    shape_env: owner of the symbols in ``values``; None when all sizes are numbers. Must not be called inside a capture.
    Raises PieceError when Inductor fails on it, RuntimeError when there is no compiler for the device.
    """
    from torch._dynamo.exc import RestartAnalysis
    from torch._inductor import standalone_compile
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    key = (segment.key, tuple(meta_key(value) for value in values), _ranges(values, shape_env))
    if key not in _COMPILED:
        for device in {value.device for value in values if isinstance(value, torch.Tensor)}:
            if reason := inductor_available(device):
                raise RuntimeError(f'{reason}. Or set compile.backend = "eager".')
        known = {str(guard.expr) for guard in shape_env.guards} if shape_env is not None else set()
        mode = torch._subclasses.FakeTensorMode(shape_env=shape_env or ShapeEnv())
        with mode:
            fakes = [_alone(value) if isinstance(value, torch.Tensor) else value for value in values]
        # Inductor's own graphs are off: the runtime captures, and a graph within a graph is refused by the device.
        options = {"config_patches": {"triton.cudagraphs": False}}
        try:
            with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
                module = _with_inputs(segment.module, fakes)
                artifact = standalone_compile(module, fakes, dynamic_shapes="from_tracing_context", options=options)
        except RestartAnalysis:  # Dynamo's own, when it has called the backend: it traces again
            raise
        except Exception as error:  # of whatever type: lowering asserts, guards on an unknown size, the C++ compiler's own
            raise PieceError(_failure(segment, error)) from error
        guards = shape_env.guards if shape_env is not None else []
        added = [Guard(guard.expr, str(guard.sloc)) for guard in guards if str(guard.expr) not in known]
        _COMPILED[key] = CompiledPiece(artifact, added)
    return _COMPILED[key]


def _failure(segment: Segment, error: Exception) -> str:
    targets = [node.target for node in segment.module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    ops = list(dict.fromkeys(str(getattr(target, "__name__", target)) for target in targets))
    shown = ", ".join(ops[:4]) + (f" and {len(ops) - 4} more" if len(ops) > 4 else "")
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"Inductor does not compile the piece of {shown}: {line}"


def _alone(value: torch.Tensor) -> torch.Tensor:
    """A fake like ``value`` in a storage of its own: Inductor would clone and copy back whole caches that share one (k and v in one
    tensor). ``alias_reason`` has made sure that they do not really overlap. The offset stays: alignment is derived from it."""
    offset = value.storage_offset()
    if isinstance(offset, int) and offset == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    return torch.empty(reach, dtype=value.dtype, device=value.device).as_strided(value.size(), value.stride(), offset)


def _with_inputs(gm: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
    """A copy whose placeholders show these values. Other nodes show none: theirs belong to the fake mode of the trace."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    inputs = iter(fakes)
    for node in graph.nodes:
        node.meta = {"example_value": next(inputs)} if node.op == "placeholder" else {}
    return fx.GraphModule(gm, graph)


def _ranges(values: list[Any], shape_env: Any) -> tuple[Any, ...]:
    symbols: set[Any] = set()
    for value in values:
        sizes = (*value.size(), *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                symbols |= size.node.expr.free_symbols
    return tuple(sorted((str(symbol), str(shape_env.var_to_range.get(symbol))) for symbol in symbols))


def concrete(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A fake value with numbers for its symbols. Call it under a fake mode."""
    number = lambda size: at_sizes(size, sizes)
    if isinstance(value, torch.SymInt):
        return number(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, offset = [number(s) for s in value.shape], [number(s) for s in value.stride()], number(value.storage_offset())
    reach = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
    return torch.empty(reach, dtype=value.dtype, device=value.device).as_strided(shape, stride, offset)


def at_sizes(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size as a number: symbols as in ``sizes``."""
    return size if isinstance(size, int) else int(size.node.expr.subs(sizes))


def alias_reason(segment: Segment, names: Mapping[str, str]) -> str:
    """Why a compiler must not have this piece, or "": it writes memory that it also reads under another name.

    names: what to call an input in the message.
    """
    if segment.keep_eager or not segment.mutates:
        return segment.keep_eager
    tensors = [(name, value) for name, value in zip(segment.inputs, segment.input_values, strict=True) if isinstance(value, torch.Tensor)]
    for name, value in tensors:
        key = storage_key(value)
        for other, held in tensors:
            if name in segment.mutates and other != name and key is not None and key == storage_key(held) and may_overlap(value, held, key):
                return f"it writes {names.get(name, name)}, which overlaps {names.get(other, other)}"
    return ""
