"""The splitting backend: a module cut at its splitting ops, each piece compiled once, one callable stitched from them.

Two ways in:
- ``torch.compile(module, backend="tkernels", options={…})``: Dynamo calls ``tkernels_backend`` and keeps its guards;
- ``compile_callable(module, args, kwargs, config, dynamic)``: what ``runtime.graphed`` uses. Traced once for all sizes, called without
  Dynamo; what its guards stood for is checked when arguments are bound.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from runtime.config import CompileConfig, ConfigError, RuntimeConfig
from runtime.fxnodes import storage_key
from runtime.overlap import Extent, overlaps
from runtime.pieces import PieceError, inductor_available
from runtime.program import Function
from runtime.signature import BindError, Dynamic, TraceError
from runtime.stitched import Input, Piece, Stitched
from runtime.trace import Trace, add_guards, trace

__all__ = [
    "BindError",
    "CompileReport",
    "Compiled",
    "Input",
    "Piece",
    "PieceError",
    "TraceError",
    "compile_callable",
    "inductor_available",
    "tkernels_backend",
]

_log = logging.getLogger(__name__)


OnPiece = Callable[[Piece, Function, tuple[Any, ...]], tuple[Any, ...]]


@dataclass
class CompileReport:
    """What was done.

    calls: pieces per splitting op. distinct: graph pieces with code of their own. min_size: the smallest size that the code is
    valid for (0, or 2 where the module looks at a size; pad 1 to 2 there). notes: what a user should be told.
    """

    calls: dict[str, int]
    distinct: int
    min_size: int
    notes: list[str] = field(default_factory=list)


class Compiled:
    """A module as one callable with the module's signature, stitched from pieces; made by ``compile_callable``.

    ``compiled(*args, **kwargs)`` checks the arguments and runs. Gradients are off inside. It is safe to capture as a whole: nothing
    is traced, compiled or read back in a call, except the first one at a size of ``compile_sizes``, which compiles; so run it once
    per size before a capture. Compiled pieces go through ``runtime.graph.launch``, splitting ops through the dispatcher.

    ``compiled.run(args, kwargs, on_piece=f)`` is the same piece by piece: for each piece ``f(piece, function, inputs)`` must return
    ``function(*inputs)``, a flat tuple of tensors, made in whatever way (capture it, time it, copy the results to fixed buffers).

    Parameters, buffers and other tensors of the module are read by name in each call, so new ones are used, and checked by
    ``bind`` against the dtype, shape and strides that were compiled.
    """

    def __init__(self, found: Trace, stitched: Stitched, report: CompileReport) -> None:
        self.report = report
        self._trace, self._stitched = found, stitched
        self.pieces = stitched.pieces([Input(owner.name, owner.kind) for owner in found.owners])
        touched = {name for piece in self.pieces for name in piece.mutates}
        self._written = [index for index, owner in enumerate(found.owners) if owner.name in touched]
        self.mutates = tuple(found.owners[index].name for index in self._written)
        # What may overlap a written tensor in one call and not in another: arguments; all, where an argument is written.
        argument_written = any(found.owners[index].kind == "caller" for index in self._written)
        kinds = ("caller", "persistent") if argument_written else ("caller",)
        self._exposed = [index for index, owner in enumerate(found.owners) if owner.kind in kinds]
        self._by_size: dict[tuple[int, ...], list[Function]] = {}
        self._bound: set[Any] = set()
        self._layouts = {
            owner.name: _layout(value)
            for owner, value in zip(found.owners, self._placeholder_values(), strict=True)
            if owner.kind == "persistent"
        }

    def _placeholder_values(self) -> list[Any]:
        return [self._stitched.cut.values[name] for name in self._stitched.cut.placeholders]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], on_piece: OnPiece | None = None) -> Any:
        """Run the step; see the class for ``on_piece``."""
        leaves, values = self.bind(args, kwargs)
        functions = self._functions(leaves)
        each = None if on_piece is None else lambda index, function, inputs: on_piece(self.pieces[index], function, inputs)
        with torch.no_grad():
            outputs = self._stitched.program.run(functions, values, each)
        return self._trace.result(outputs, leaves)

    def persistent(self) -> dict[str, torch.Tensor]:
        """The module's tensors that the pieces take, by name, as they are now."""
        return {owner.name: owner.get() for owner in self._trace.owners if owner.get is not None}

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The named sizes of a call: {"tokens": 8, "seqs": 3}."""
        return self._trace.arguments.sizes(self._trace.arguments.flatten(args, kwargs))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Check the arguments against what was compiled; returns the flat leaves and the inputs of the graph. Raises BindError."""
        found = self._trace
        leaves = found.arguments.flatten(args, kwargs)
        key = found.check_key(leaves)
        if key not in self._bound:
            found.check(leaves)
            if len(self._bound) < 4096:
                self._bound.add(key)
        values: list[Any] = []
        for owner in found.owners:
            if owner.kind == "caller":
                values.append(leaves[owner.index])
            elif owner.kind == "size":
                values.append(leaves[owner.index].shape[owner.dim])
            else:
                value = owner.get()  # type: ignore[misc]
                expected = self._layouts[owner.name]
                # the same as _layout(value) != expected, at a third of the time: there is one for each parameter, in each call
                dtype, device, shape, stride = expected
                if value.shape != shape or value.dtype is not dtype or value.stride() != stride or value.device != device:
                    raise BindError(f"{owner.name}: compiled for {_show(expected)}, it is now {_show(_layout(value))}; compile again")
                values.append(value)
        if self._written:
            self._check_overlap(values)
        return leaves, values

    def _check_overlap(self, values: list[Any]) -> None:
        """The pieces were compiled for arguments that lie apart: none may overlap memory that the module writes."""
        owners = self._trace.owners
        written: dict[int | None, list[int]] = {}
        for index in self._written:
            written.setdefault(storage_key(values[index]), []).append(index)
        for index in self._exposed:
            storage = storage_key(values[index])
            if storage is None:
                continue
            for other in written.get(storage, ()):
                if other != index and overlaps(Extent.of(values[index], storage), Extent.of(values[other], storage)):
                    one, two = owners[other].name, owners[index].name
                    raise BindError(f"{one}: the module writes it, and it overlaps {two}; pass tensors that do not share memory")

    def _functions(self, leaves: list[Any]) -> list[Function]:
        wanted, token = self._stitched.config.compile_sizes, self._trace.arguments.token
        if not wanted or token is None or self._stitched.config.backend != "inductor":
            return self._stitched.functions
        sizes = self._trace.arguments.sizes(leaves)
        if sizes[token] not in wanted:
            return self._stitched.functions
        key = tuple(sizes.values())
        if key not in self._by_size:
            symbols = {symbol: leaves[index].shape[dim] for symbol, (index, dim) in self._trace.symbols.items()}
            self._by_size[key] = self._stitched.for_sizes(symbols)
        return self._by_size[key]


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return (value.dtype, value.device, tuple(value.shape), tuple(value.stride()))


def _show(layout: tuple[Any, ...]) -> str:
    return f"{str(layout[0]).removeprefix('torch.')} {list(layout[2])} strides {list(layout[3])} on {layout[1]}"


def compile_callable(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], config: CompileConfig, dynamic: Dynamic
) -> Compiled:
    """Trace ``module`` once with the dimensions of ``dynamic`` unknown, cut it at ``config.splitting_ops``, compile the pieces.

    args, kwargs: one example step; only its shapes, dtypes and host values count. Nothing is computed and nothing written.
    dynamic: argument → dimension (its size is "tokens") or {dimension: "tokens" | "seqs" | "seqs+1" | any name}.
    A piece that the compiler refuses for sizes that are plain unknowns is traced and compiled once more with ordinary symbols, which
    leave out 0 and 1; the report's notes say so.
    Raises TraceError (with what to change), SplitError, PieceError, or RuntimeError when Inductor is asked for and has no compiler.
    """
    found = trace(module, args, kwargs, dynamic, own_lengths=config.backend == "eager")
    try:
        stitched = _stitch(found, config)
    except PieceError as error:
        if not found.unbacked:
            raise
        found = trace(module, args, kwargs, dynamic, refused=str(error))
        stitched = _stitch(found, config)
    add_guards(found, stitched.guards)
    report = CompileReport(dict(stitched.calls), 0, 0 if found.unbacked else 2, [*found.notes, *stitched.notes()])
    compiled = Compiled(found, stitched, report)
    report.distinct = len({piece.same_as for piece in compiled.pieces if piece.kind == "graph"})
    return compiled


def _stitch(found: Trace, config: CompileConfig) -> Stitched:
    return Stitched(found.gm, config, [Input(owner.name, owner.kind) for owner in found.owners])


# ------------------------------------------------------------------------------------------------------ torch.compile's way


def tkernels_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **other: Any
) -> Function:
    """``torch.compile(module, backend="tkernels", options={"splitting_ops": […], "backend": "inductor"})``.

    options: the keys of [compile] in the configuration. Inference only: raises RuntimeError when an input needs a gradient.
    """
    if other.get("mode") not in (None, "default"):
        raise ConfigError(f"mode: the tkernels backend has none, got {other['mode']!r}; use runtime.graphed for CUDA graphs")
    config = RuntimeConfig.load({"compile": dict(options or {})}).compile
    if config.compile_sizes:
        raise ConfigError("compile.compile_sizes: torch.compile specialises by itself (dynamic=False); with runtime.graphed the key works")
    if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in example_inputs):
        raise RuntimeError(
            "the tkernels backend is inference-only: call the compiled module under torch.no_grad() or torch.inference_mode()"
        )
    stitched = Stitched(gm, config)
    for note in stitched.notes():
        _log.warning("%s", note)
    program, functions = stitched.program, stitched.functions

    def call(*inputs: Any) -> Any:
        with torch.no_grad():
            return program.pack(program.run(functions, inputs))

    return call


def _register() -> None:
    """Make ``backend="tkernels"`` known to torch.compile in a source tree, where no entry point says it.

    An installed package is found by torch itself, when it is asked for; registering costs the import of torch._dynamo, a second.
    """
    if "torch._dynamo" not in sys.modules and importlib.metadata.entry_points(group="torch_dynamo_backends", name="tkernels"):
        return
    from torch._dynamo.backends import registry

    if "tkernels" not in registry._COMPILER_FNS:
        registry.register_backend(tkernels_backend, name="tkernels")


_register()
