"""All captured steps of one module: a ``KeySteps`` for each key (combination of host values), in it one step for each (mode, size).

``Steps`` owns what these share: the graph pool, the watched parameters, the splitting ops.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from runtime.arena import Arena
from runtime.binding import Binding, Call, key_text
from runtime.bound import prove_bound
from runtime.capture import capture_step, make_pool
from runtime.config import RuntimeConfig
from runtime.contract import Expected, Inputs, expect, kept, prove
from runtime.graph import AS_IS, CaptureError, Within
from runtime.inputs import Dim, InputSpec
from runtime.key_steps import Captured, KeySteps, NamedCall, Representative
from runtime.outputs import OutputDims, StepOutput, probe_outputs
from runtime.persistent import Persistent
from runtime.proofs import KeyFacts, Proofs, StepProof, owners_digest, today
from runtime.sizes import default_histogram
from runtime.split import resolve_ops

Bound = int | Callable[[int, dict[str, Any]], int]
"""The largest value of a named size: a number, or a function of the step's size and its host values."""


class Steps:
    def __init__(
        self,
        module: torch.nn.Module,
        config: RuntimeConfig,
        binding: Binding,
        pad: Mapping[str, Any],
        bounds: Mapping[str, Bound],
        static: Iterable[str],
        device: torch.device,
        within: Within = AS_IS,
    ) -> None:
        self.within = within
        self.module, self.config, self.binding = module, config, binding
        self.pad, self.bounds, self.static = dict(pad), dict(bounds), frozenset(static)
        self.device = device
        self.pool = make_pool(device)
        self.persistent = Persistent(module)
        self.keys: dict[tuple[Any, ...], KeySteps] = {}
        self.remarks: list[str] = []
        self.graph_seconds = 0.0
        self.replays = 0
        """How often any graph of the pool has run. Graphs share memory, so each replay may overwrite the outputs of all others."""
        self.traffic: Mapping[int, float] = default_histogram(config.graph.max_tokens)
        """How often steps of each size occur, as far as known."""
        self.splitting = overloads(config.compile.splitting_ops)
        self.known = Proofs(None)
        """What earlier starts have proved and this one need not."""
        self.proved = Proofs(None)
        """What holds now, for the next start."""

    # -- sizes ----------------------------------------------------------------------------------------------------------------

    def padded(self, size: int, host: tuple[Any, ...]) -> dict[str, int]:
        """Every named size of a graph of ``size`` tokens: all that can occur with so many, at most the bound."""
        values = {name: value for name, _, value in host}
        sizes = {}
        for name in self.binding.size_names:
            bound = self.bounds.get(name, size)
            sizes[name] = size if name == self.binding.token else min(size, bound(size, values) if callable(bound) else bound)
        return sizes

    # -- keys -----------------------------------------------------------------------------------------------------------------

    def add_key(self, example: Call, representative: Representative, proving: Representative, max_tokens: int) -> KeySteps:
        """Prepare a key: its arena, its compiled callable, the dimensions of its outputs."""
        self.binding.check_names(example.tensors, self.pad, self.static)
        static = {n: t for n, t in example.tensors.items() if n in self.static}
        specs = {}
        for name, tensor in example.tensors.items():
            if name not in static:
                where = {axis % tensor.ndim: dim for axis, dim in self.binding.dims.get(name, {}).items()}
                shape = tuple(where.get(axis, n) for axis, n in enumerate(tensor.shape))
                specs[name] = InputSpec(name, shape, tensor.dtype, self.pad.get(name, 0))
        arena = Arena(specs.values(), self.padded(max_tokens, example.host), self.device)
        module_call, call = self._on_named(self.module, example, static), self._on_named(self._compiled(example), example, static)
        state, text = self.persistent.tensors() | static, key_text(example.host)
        name = self._proof_name(text, example, specs, static, max_tokens)
        facts = self.known.keys.get(name)
        if facts is not None and set(facts.written) <= set(state):
            dims: OutputDims = [None if leaf is None else {axis: Dim(*dim) for axis, dim in leaf.items()} for leaf in facts.dims]
            alike, follows = facts.alike, facts.follows_size
        else:
            facts = None
            samples = self._samples(proving, max_tokens)
            run = lambda i: module_call({n: t.to(self.device) for n, t in samples[i].tensors.items() if n in specs})
            with kept(state):
                dims, alike, follows = probe_outputs(
                    module_call, specs, self.device, self.binding.size_names, [s.sizes for s in samples], run
                )
        key = KeySteps(example.host, text, specs, arena, call, module_call, dims, representative, proving, static, example, alike)
        key.follows_size, key.proof_name = follows, name
        if facts is not None:
            key.facts_date, key.checked, key.compared = facts.date, True, set(facts.rows)
            key.written = {each: state[each] for each in facts.written}
            if facts.exact:
                self.serve_exact(key, facts.exact)
        self.keys[example.host] = key
        return key

    def _proof_name(
        self, text: str, example: Call, specs: Mapping[str, InputSpec], static: dict[str, torch.Tensor], max_tokens: int
    ) -> str:
        """The key, and a digest of the shapes that its steps rest on beside those of the parameters."""
        stored = self.module.state_dict(keep_vars=True).keys()
        held = [
            # how many pages a cache has may differ from start to start: kernels take it as an argument
            (name, str(t.dtype), tuple(t.shape) if name in stored else tuple(t.shape[1:]), t.is_contiguous())
            for name, t in (self.persistent.tensors() | static).items()
        ]
        inputs = [(name, [str(d) for d in spec.shape], str(spec.dtype), spec.pad) for name, spec in specs.items()]
        around = repr((example.host, inputs, sorted(self.padded(max_tokens, example.host).items()), held))
        return f"{text} #{hashlib.sha256(around.encode()).hexdigest()[:16]}"

    def _on_named(self, fn: Callable[..., Any], example: Call, static: Mapping[str, torch.Tensor]) -> NamedCall:
        build, host = self.binding.build, example.host

        def call(tensors: Mapping[str, torch.Tensor]) -> Any:
            args, kwargs = build({**static, **tensors}, host)
            return fn(*args, **kwargs)

        return call

    def recompile(self) -> None:
        """Compile every key anew: shapes, dtypes or frozen values of the module have changed."""
        for key in self.keys.values():
            key.call = self._on_named(self._compiled(key.example), key.example, key.static)
            key.checked = key.exact = False
            key.why_exact = key.facts_date = ""
            for known in (key.rows_checked, key.compared, key.ran):
                known.clear()
        self.known, self.proved = Proofs(None), Proofs(None)

    def _samples(self, representative: Representative, max_tokens: int) -> list[Call]:
        """Representative steps of a few sizes, for the shapes of the outputs."""
        calls = [call for size in range(min(max_tokens, 12), 0, -1) if (call := representative(size)) is not None]
        return calls or [call for call in [representative(max_tokens)] if call is not None]

    def _compiled(self, example: Call) -> Callable[..., Any]:
        """The callable to capture: the module itself, or what runtime/backend.py makes of it.

        split = "fx" cuts the traced graph and compiles the pieces. "capture" compiles it whole, if at all, and leaves the cutting to
        the capture. "auto" is fx where there is something to compile and it can be traced, else capture.
        """
        compile = self.config.compile
        if compile.backend == "eager" and compile.split != "fx":
            return self.module
        from runtime.backend import TraceError, compile_callable

        tensors = {n: t.to(self.device) for n, t in example.tensors.items()}
        args, kwargs = self.binding.build(tensors, example.host)
        dynamic = {name: {axis: str(dim) for axis, dim in dims.items()} for name, dims in self.binding.dims.items() if name in tensors}
        if compile.split == "capture":
            compile = compile.model_copy(update={"splitting_ops": []})
        try:
            compiled = compile_callable(self.module, args, kwargs, compile, dynamic)
        except TraceError as error:
            if compile.split != "auto":
                raise
            self.remark(f"not compiled, the module runs as it is and is cut while capturing: {error}")
            return self.module
        for note in compiled.report.notes:
            self.remark(note)
        return compiled

    # -- one step -------------------------------------------------------------------------------------------------------------

    def inputs(self, key: KeySteps, size: int) -> list[Inputs]:
        """The sets of inputs a step of this size is captured and proved with: a full one and, where padding is legal, one with a tail."""
        if key.sets[0] != (size, key.exact):
            lengths = (size, max(1, size - max(1, size // 4)))
            calls = [key.proving(n) for n in dict.fromkeys(lengths) if n == size or not key.exact]
            key.sets = (size, key.exact), [self.padded_to(key, call, size) for call in calls if call is not None]
        return key.sets[1]

    def timed_inputs(self, key: KeySteps, size: int, *context: int) -> Inputs | None:
        """What a step of this size is timed with, at the usual context or another; None where it does not occur."""
        call = key.representative(size, *context)
        return None if call is None else self.padded_to(key, call, size)

    def padded_to(self, key: KeySteps, call: Call, size: int) -> Inputs:
        """A call's inputs, in a step of this size."""
        values = {name: t for name, t in call.tensors.items() if name in key.specs}
        return Inputs(values, call.sizes, self.padded(size, key.host))

    def capture(self, key: KeySteps, mode: str, size: int) -> Captured:
        """Capture and prove one step, inside ``pool.session()``. Raises what went wrong; nothing is left of it then."""
        sets = self.inputs(key, size)
        known = self.known.steps.get((key.proof_name, mode, size))
        # Once uncaptured on this stream: library handles, lazy compilation and workspaces come now.
        if known is None:
            self._expect(key, size, sets)
        elif size not in key.ran:
            key.call(sets[0].load(key.arena))
        key.ran.add(size)
        views = sets[0].load(key.arena)
        start = time.perf_counter()
        step = capture_step(
            self.pool,
            key.call,
            (views,),
            {},
            splitting=self.splitting if mode == "piecewise" else frozenset(),
            fresh=self.config.graph.fresh_split_outputs,
            callers={**views, **key.static},
            persistent=self.persistent.tensors(),
        )
        self.graph_seconds += time.perf_counter() - start
        step.written |= {name: key.static[name] for name in step.mutated if name in key.static}
        step.mutated -= frozenset(key.static)
        try:
            if mode == "piecewise" and len(step.segments) == 1:
                ops = ", ".join(self.config.compile.splitting_ops) or "none is configured"
                raise NothingToSplit(f"no splitting op is called ({ops}), so this is the full graph")
            owners = owners_digest(step.addresses, step.kinds)
            if known is not None and known.owners == owners:
                step.verified(known.date)
            else:
                expected = self._expect(key, size, sets)
                sets[0].load(key.arena)
                prove_bound(step, self.pool, key.static.values(), f"{mode} at size {size}")
                found, idempotent = prove(step, key.call, sets, key.arena, key.dims, self.pool, f"{mode} at size {size}", expected)
                known = StepProof(today(), owners, tuple(sorted(found)), idempotent)
        except BaseException:
            step.reset()
            raise
        self.proved.steps[key.proof_name, mode, size] = known
        mutated = frozenset(known.mutated)
        captured = Captured(step, StepOutput(step.output, key.dims), mutated, known.idempotent, self.padded(size, key.host))
        key.writes_arguments |= bool(mutated)
        key.captured[mode, size] = captured
        key.dropped.pop((mode, size), None)
        return captured

    def _expect(self, key: KeySteps, size: int, sets: list[Inputs]) -> list[Expected]:
        if key.expected[0] != size:
            key.expected = size, [expect(key.call, given, key.arena, key.dims) for given in sets]
        return key.expected[1]

    def facts(self) -> dict[str, KeyFacts]:
        """What is known of each key, for the next start. Of a key whose padding was not looked at there is nothing."""
        found = {}
        for key in self.keys.values():
            if key.checked:
                dims = tuple(None if leaf is None else {axis: (dim.name, dim.extra) for axis, dim in leaf.items()} for leaf in key.dims)
                found[key.proof_name] = KeyFacts(
                    key.facts_date or today(),
                    dims,
                    key.alike,
                    key.follows_size,
                    tuple(key.written),
                    key.why_exact,
                    tuple(sorted(key.compared)),
                )
        return found

    def serve_exact(self, key: KeySteps, why: str) -> None:
        """Padding would change what this key's steps give: its graphs serve their own size alone."""
        key.exact, key.why_exact = True, why
        self.remark(f"{key.text}: {why}; graphs are used at exactly their size only".removeprefix("-: "))

    def drop(self, key: KeySteps, mode: str, size: int, reason: str) -> None:
        captured = key.captured.pop((mode, size), None)
        if captured is not None:
            captured.step.reset()
        key.dropped[mode, size] = reason

    def failed(self, key: KeySteps, mode: str, size: int, error: Exception) -> None:
        """A capture failed: raise, or say so once and serve the size in another mode."""
        if isinstance(error, NothingToSplit):
            key.dropped[mode, size] = str(error)
            self.remark(f"piecewise: {error}")
            return
        if self.config.graph.on_capture_error == "raise":
            raise error
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, CaptureError) else str(error)
        key.dropped[mode, size] = reason
        if self.remark(f"{mode} at size {size} was not captured: {reason}"):
            warnings.warn(f"{mode} graph of size {size} was not captured and runs in another mode: {reason}", stacklevel=4)

    def remark(self, text: str) -> bool:
        """Note for the plan; True if it is new."""
        if text in self.remarks:
            return False
        self.remarks.append(text)
        return True

    # -- all of them ----------------------------------------------------------------------------------------------------------

    @property
    def graph_bytes(self) -> int:
        return self.pool.nbytes()

    def drop_graphs(self) -> list[tuple[KeySteps, str, int]]:
        """Reset every graph; returns what there was."""
        had = [(key, mode, size) for key in self.keys.values() for mode, size in key.captured]
        self.pool.synchronize()
        self.replays += 1
        for key in self.keys.values():
            for captured in key.captured.values():
                captured.step.reset()
            key.captured.clear()
        return had


class NothingToSplit(CaptureError):
    """Piecewise was asked for and the step calls no splitting op."""


def overloads(names: Iterable[str]) -> frozenset[Any]:
    """The op overloads that configured names of splitting ops stand for. A name that is not registered yet gives none."""
    found: set[Any] = set()
    for op in resolve_ops(names):
        namespace, _, name = op.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            found |= {getattr(packet, overload) for overload in packet.overloads() if op.overload in ("", overload)}
    return frozenset(found)
