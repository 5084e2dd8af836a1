"""``graphed(module, config, …)``: any module, served by captured steps where they are faster.

    fast = graphed(module, {"graph": {"max_tokens": 64}}, dynamic={"x": 0})
    print(fast.warmup(x))       # captures, proves, measures; a first call without it warms up on its own arguments
    y = fast(x)                 # like module(x): the cheapest legal captured step, or eager

Inference only: calls run without gradients, inside ``torch.inference_mode`` or not. Under ``torch.autocast`` and within transforms of
``torch.func`` the module itself runs: graphs are captured without them. A graphed module has one set of input buffers, so calls of
several threads take turns, and a call on another stream waits for the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from runtime.binding import PLAIN, Dynamic, key_text
from runtime.calls import Route, Staged, illegal_layout, illegal_memory, illegal_shape, illegal_state, is_autocast, replay, replay_staged
from runtime.captured_module import CapturedModule
from runtime.config import RuntimeConfig
from runtime.dispatch import Decision, Dispatcher
from runtime.graph import AS_IS, CaptureError, Within
from runtime.key_steps import Captured, KeySteps
from runtime.ready import Known, Ready, known_call, ready_to_stage
from runtime.staging import Note
from runtime.steps import Bound, Steps

# Every step asks these: looked up once.
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled

_DYNAMIC: Dynamic = {"input_ids": 0}
_PAD: Mapping[str, float | int | str] = {"slot_mapping": -1}
_MAX_ROUTES = 1 << 16
_MAX_READY = 1 << 12
_NEWEST = "newest"  # where the dispatcher's memo has the kind of the newest call


def graphed(
    module: torch.nn.Module,
    config: RuntimeConfig | Mapping[str, Any] | str | Path,
    *,
    dynamic: Dynamic = _DYNAMIC,
    pad: Mapping[str, float | int | str] = _PAD,
    bounds: Mapping[str, Bound] | None = None,
    static: Iterable[str] = (),
    borrow: bool | Collection[int] = False,
    within: Within = AS_IS,
) -> GraphedModule:
    """Wrap a module so that its calls run as captured steps where that is faster.

    dynamic: argument -> the dimension that is the token count, or {dimension: size name}, a name such as "tokens", "seqs" or
        "seqs+1". The first name given is the size of a step. Nested tensors are named "batch.ids", "caches.0.1".
    pad: argument -> what its padding rows hold: a number (default 0) or "last" (its last real row, for offsets). Entries for
        arguments that the module does not have are refused, except the default.
    bounds: the largest value of another named size; at token size N it is padded to min(N, bound). A function of (N, host values)
        where it depends on them: with q tokens a sequence ``{"seqs": lambda tokens, host: tokens // host["q"]}``.
    static: tensor arguments that are not copied (KV caches): every call must pass the same memory, another address runs eager.
    borrow: outputs are the graph's own memory, not copies, and good until the next captured step; using one after that raises. Or
        the numbers of the outputs that graphs hand out as a ``Loan``, which costs nothing until it is taken; the others are copies.
    within: a context that captures, and the calls just before them, run within; see ``Within``.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}; a function can be the forward of one")
    if not isinstance(within, Within):
        raise TypeError(f"within: expected a runtime.graph.Within (name, enter), got {type(within).__name__}")
    loaded = RuntimeConfig.load(config)
    return GraphedModule(module, loaded, dynamic=dynamic, pad=pad, bounds=bounds or {}, static=static, borrow=borrow, within=within)


class GraphedModule(CapturedModule):
    """A module served by captured steps. Its parameters, buffers and state_dict are the module's own. See ``graphed``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(None, args, kwargs)

    def at(self, context: int | None) -> AtContext:
        """``fast.at(context)(…)`` is a call, and ``fast.at(context).explain(…)`` a question, decided by costs at that context.

        context: tokens that a sequence of the step holds, on average; None: the usual number. It changes no result.
        """
        return AtContext(self, context)

    def _call(self, context: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling():  # constant to it; false whenever this runs
            return _untraced_call(self, context, args, kwargs)
        with self._lock:  # calls of several threads take turns: they fill the same input buffers
            if with_grad := _is_grad_enabled():
                _set_grad_enabled(False)  # torch.no_grad(), in a fraction of its time
            try:
                steps, dispatcher = self._steps, self._dispatcher
                if steps is None or dispatcher is None:
                    return self._first_call(context, args, kwargs)
                known: Known | None = dispatcher.memo.get(_NEWEST)
                if known is None or known.context != context or (tensors := known.tensors(args, kwargs)) is None:
                    return self._look_up(steps, dispatcher, context, args, kwargs)
                ready = known.ready
                if not ready.is_current() or is_autocast(ready.device_type):
                    return self._look_up(steps, dispatcher, context, args, kwargs)
                if (moved := steps.persistent.moved(self.config.graph.check != "off")) is not None:
                    return self._look_up(steps, dispatcher, context, args, kwargs, moved)
                ready.count[0] += 1
                return known.run(steps, tensors)
            finally:
                _set_grad_enabled(with_grad)

    def _first_call(self, context: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Warms up on its own arguments."""
        if self._binding.read(args, kwargs).sizes[self._binding.token] == 0:
            return self.module(*args, **kwargs)
        self.warmup(*args, **kwargs)
        assert self._steps is not None and self._dispatcher is not None
        return self._look_up(self._steps, self._dispatcher, context, args, kwargs)

    def _look_up(
        self,
        steps: Steps,
        dispatcher: Dispatcher,
        context: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        moved: str | None = None,
    ) -> Any:
        """A call that is not like the one before: decide, and make ready for the next of its kind. moved: what the sweep has found."""
        route, tensors, known_by = self._route(steps, args, kwargs)
        key, illegal = route.key, route.illegal
        if key is not None and not illegal and (key.static or key.writes_arguments):
            illegal = illegal_memory(key, tensors)
        illegal = illegal or illegal_state(steps.device.type) or illegal_layout(tensors)
        decision = dispatcher.dispatch(route.text, route.sizes, illegal, context)
        if key is None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(steps.device), (args, kwargs))
            return self.module(*args, **kwargs)
        if decision.mode == "eager":
            if self.config.graph.capture == "lazy":
                self._note_hot(key, route.sizes)
            return self._run_eager(key, tensors, illegal)
        moved = moved or steps.persistent.moved(sweep=self.config.graph.check != "off")
        if moved is not None:
            self._moved(moved)
        captured = key.captured.get((decision.mode, decision.size))
        if captured is None:  # the capture that the moved weight made necessary has failed
            return self._run_eager(key, tensors, illegal)
        poison = self.config.graph.check == "poison"
        if known_by is not None and not (poison or key.static or key.writes_arguments):
            known = self._known(dispatcher, known_by, key, decision, captured, route.sizes, context, args, kwargs)
            given = None if known is None else known.tensors(args, kwargs)
            if known is not None and given is not None:
                return known.run(steps, given)
        return replay(steps, key, captured, tensors, route.sizes, poison=poison, borrow=self.borrow)

    def _known(
        self,
        dispatcher: Dispatcher,
        known_by: tuple[Any, ...],
        key: KeySteps,
        decision: Decision,
        captured: Captured,
        sizes: dict[str, int],
        context: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Known | None:
        """What serves calls like this one, remembered; from now on it is looked at first."""
        memo = dispatcher.memo
        remembered_as = known_by, context, len(args), tuple(kwargs)
        known: Known | None = memo.get(remembered_as)
        ready = known.ready if known is not None and known.ready.is_current() else None
        if known is None or ready is None or known.tensors(args, kwargs) is None:  # new, or its tensors lie elsewhere or otherwise
            ready = ready or Ready(key, decision, captured, sizes, dispatcher, self.borrow)
            known = known_call(ready, context, args, kwargs, self._binding.names)
            if known is None:
                return None
            if len(memo) > _MAX_READY:
                memo.clear()
            memo[remembered_as] = known
        memo[_NEWEST] = known
        return known

    def stage(self, sizes: Mapping[str, int], *, context: int | None = None, **host: Any) -> Staged | None:
        """Arrays to write the next step's inputs into, so that one copy brings them all to the device; calling it runs the step.

            staged = fast.stage({"tokens": 5, "seqs": 5}, max_query_len=1)
            if staged is not None:
                staged.arrays["ids"][...] = ids
                y = staged()

        sizes: the step's named sizes. context: as for ``at``. host: the arguments that are no tensors. Every tensor argument must be
        written, and nothing else of this module may run in between. None where the step takes no graph, or has arguments that are
        static or written: then make tensors and call the module, which counts the step.
        """
        steps, dispatcher = self._steps, self._dispatcher
        if steps is None or dispatcher is None:
            self._check_sizes(sizes)
            return None
        plain, known_by = True, [*sizes.items(), dispatcher.bucket(context)]
        for name, value in host.items():
            kind = value.__class__
            if kind not in PLAIN:  # the texts of others need not tell them apart
                plain = False
                break
            known_by += name, kind, value if kind is int else repr(value)
        remembered_as = tuple(known_by)
        ready: Ready | None = dispatcher.memo.get(remembered_as) if plain else None
        if ready is None or not ready.is_current():
            self._check_sizes(sizes)
            ready = ready_to_stage(steps, dispatcher, sizes, context, host, self.borrow)
            if ready is None:
                return None
            if len(dispatcher.memo) > _MAX_READY:
                dispatcher.memo.clear()
            if plain:
                dispatcher.memo[remembered_as] = ready
        arena = ready.arena
        if illegal_state(ready.device_type):
            return None
        with self._lock:  # not between another thread's writing and sending, which would bring this step's buffer to the device
            arrays, note = arena.hand_out(ready.layout).heads, arena.staging.note
            return Staged(arrays, partial(self._run_staged, ready, context, note), note)

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        if sizes.keys() != self._size_names or min(sizes.values()) < 0:
            raise ValueError(f"stage: expected a size of 0 or more for each of {sorted(self._size_names)}, got {dict(sizes)}")

    def _run_staged(self, ready: Ready, context: int | None, note: Note, arrays: dict[str, np.ndarray]) -> Any:
        with self._lock:
            if with_grad := _is_grad_enabled():
                _set_grad_enabled(False)
            try:
                steps, arena = self._steps, ready.arena
                if steps is None or not ready.is_current() or arena.staging.note is not note:
                    raise RuntimeError(
                        "staged: another step of this module has been staged, run or captured since; call stage, write and run without "
                        "one in between"
                    )
                check = self.config.graph.check
                if (moved := steps.persistent.moved(check != "off")) is not None:
                    tensors = arena.as_tensors(arrays)  # capturing again loads other inputs
                    self._moved(moved)
                    return self._call(context, *self._binding.build({n: tensors[n] for n in ready.key.specs}, ready.key.host))
                ready.count[0] += 1
                return replay_staged(steps, ready) if check == "poison" else ready.run(steps)
            finally:
                _set_grad_enabled(with_grad)

    def run_as(self, mode: str, size: int, *args: Any, **kwargs: Any) -> Any:
        """Run a call in this mode, by the graph captured at this size, whatever would be picked; "eager" at its own size. Counts
        nothing: it is there for timing. Raises KeyError where no such step is captured."""
        with self._lock, torch.no_grad():
            steps = self._steps
            if steps is None:
                raise RuntimeError("run_as: nothing is captured yet; call warmup first")
            route, tensors, _ = self._route(steps, args, kwargs)
            if route.key is None or route.illegal:
                raise ValueError(f"run_as: {route.illegal or f'nothing was captured for the host values {route.text}'}")
            if mode == "eager":
                return self._run_eager(route.key, tensors, "")
            return replay(steps, route.key, route.key.captured[mode, size], tensors, route.sizes, poison=False, borrow=self.borrow)

    def _route(
        self, steps: Steps, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Route, dict[str, torch.Tensor], tuple[Any, ...] | None]:
        """What serves this call, remembered by its shapes, dtypes and host values; its tensors by name; and what it is remembered by."""
        signature = self._binding.signature(args, kwargs)
        if signature is not None:
            values, known_by = signature
            if (route := self._routes.get(known_by)) is not None:
                return route, {name: values[i] for i, name in route.names}, known_by
        call = self._binding.read(args, kwargs)
        key = steps.keys.get(call.host)
        names = tuple((i, name) for i, name in enumerate(self._binding.names) if name in call.tensors)
        route = Route(key, key_text(call.host), names, call.sizes, "" if key is None else illegal_shape(key, call))
        if signature is None:
            return route, call.tensors, None
        if len(self._routes) > _MAX_ROUTES:
            self._routes.clear()
        self._routes[known_by] = route
        return route, call.tensors, known_by

    def _run_eager(self, key: KeySteps, tensors: Mapping[str, torch.Tensor], illegal: str) -> Any:
        """What was timed as eager: the callable that the graphs were captured from. The module, where that is not made for the call."""
        device = key.arena.device
        # From pinned memory a copy would still be reading when the caller, who has not asked for that, writes the next step into it.
        tensors = {n: t if t.device == device else t.to(device, non_blocking=not t.is_pinned()) for n, t in tensors.items()}
        return key.module_call(tensors) if illegal else key.eager(tensors)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The module itself: no graph, no padding."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def _moved(self, name: str) -> None:
        if self.config.graph.on_moved_weight == "raise":
            raise CaptureError(
                f"{name}: it is no longer at the address that the graphs read; call recapture() after changing weights, copy into them "
                'in place (load_state_dict does), or set graph.on_moved_weight = "recapture"'
            )
        self.recapture()


@torch.compiler.disable
def _untraced_call(fast: GraphedModule, context: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call inside of a compiled function: Dynamo would guard on what changes with every step."""
    return fast._call(context, args, kwargs)


class AtContext(NamedTuple):
    """Calls of a graphed module that are decided by costs at one context; made by ``GraphedModule.at``."""

    fast: GraphedModule
    context: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fast._call(self.context, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        return self.fast._explain(self.context, args, kwargs)
