"""``graphed(module, config, …)``: any module, served by captured steps where they are faster.

    fast = graphed(module, {"graph": {"max_tokens": 64}}, dynamic={"x": 0})
    print(fast.warmup(x))       # captures, proves, measures; a first call without it warms up on its own arguments
    y = fast(x)                 # like module(x): the cheapest legal captured step, or eager

Inference only: calls run without gradients, inside ``torch.inference_mode`` or not. Under ``torch.autocast`` and within transforms of
``torch.func`` the module itself runs: graphs are captured without them. A graphed module has one set of input buffers, so calls of
several threads take turns, and a call on another stream waits for the one before.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from runtime import sizes as sizing
from runtime import start
from runtime.binding import PLAIN, Binding, Call, Dynamic, key_text
from runtime.calls import Route, Staged, illegal_layout, illegal_memory, illegal_shape, illegal_state, replay, replay_staged
from runtime.capture import Address
from runtime.config import RuntimeConfig
from runtime.dispatch import Decision, Dispatcher
from runtime.graph import CaptureError
from runtime.plan import Plan
from runtime.ready import Known, Ready, known_call
from runtime.steps import Bound, Captured, KeySteps, Representative, Steps
from runtime.warmup import Prepared, Progress, capture_all, measure_all, measure_regret, own_state, publish, resized, warm_up

MakeInputs = Callable[..., "tuple[tuple[Any, ...], dict[str, Any]] | None"]
_DYNAMIC: Dynamic = {"input_ids": 0}
_PAD: Mapping[str, float | int | str] = {"slot_mapping": -1}
_MAX_ROUTES = 1 << 16
_MAX_READY = 1 << 12
_NEWEST = "newest"  # where the dispatcher's memo has the kind of the newest call
_HOT = 8  # steps after which a lazily captured size is worth its capture


def graphed(
    module: torch.nn.Module,
    config: RuntimeConfig | Mapping[str, Any] | str | Path,
    *,
    dynamic: Dynamic = _DYNAMIC,
    pad: Mapping[str, float | int | str] = _PAD,
    bounds: Mapping[str, Bound] | None = None,
    static: Iterable[str] = (),
    borrow: bool | Collection[int] = False,
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
    """
    return GraphedModule(module, RuntimeConfig.load(config), dynamic=dynamic, pad=pad, bounds=bounds or {}, static=static, borrow=borrow)


class GraphedModule(torch.nn.Module):
    """A module served by captured steps. Its parameters, buffers and state_dict are the module's own. See ``graphed``."""

    def __init__(
        self,
        module: torch.nn.Module,
        config: RuntimeConfig,
        *,
        dynamic: Dynamic,
        pad: Mapping[str, Any],
        bounds: Mapping[str, Bound],
        static: Iterable[str],
        borrow: bool | Collection[int],
    ) -> None:
        super().__init__()
        # The same dictionaries: whatever is done to the parameters of one is done to those of the other.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["module"] = module  # past __setattr__, which would make it a submodule and change the state_dict
        self.config = config
        self.borrow = borrow
        self._binding = Binding(module.forward, dynamic)
        self._size_names = frozenset(self._binding.size_names)
        self._settings: dict[str, Any] = {"dynamic": dynamic, "pad": pad, "bounds": bounds, "static": tuple(static), "borrow": borrow}
        names = set(self._binding.names)
        self._pad = {n: v for n, v in pad.items() if not (n == "slot_mapping" and v == -1 and n not in names)}
        self._bounds, self._static = dict(bounds), self._settings["static"]
        self._steps: Steps | None = None
        self._dispatcher: Dispatcher | None = None
        self._routes: dict[tuple[Any, ...], Route] = {}
        self._lock = threading.RLock()
        self._hot: Counter[tuple[tuple[Any, ...], int]] = Counter()
        self._lists: dict[str, list[int]] = {}
        self.plan: Plan | None = None
        del self.__dict__["training"]  # the module's
        self.__dict__["_is_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """What is no attribute of this class is the module's, as for reading."""
        module = self.__dict__.get("module")
        own = "_is_made" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        if own or module is None or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def train(self, mode: bool = True) -> GraphedModule:
        """As for the module. Graphs captured in the other mode are captured again at the next call, or it raises, as for weights."""
        self.module.train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModule:
        """A copy of the module, with the same settings and without graphs: it warms up anew."""
        made = GraphedModule(copy.deepcopy(self.module, memo), self.config.model_copy(deep=True), **self._settings)
        memo[id(self)] = made
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    # -- set-up ---------------------------------------------------------------------------------------------------------------

    def _prepare(self, example: Call) -> tuple[Steps, Dispatcher]:
        if self._steps is None or self._dispatcher is None:
            own = (*self.module.parameters(), *self.module.buffers())
            device = own[0].device if own else next(iter(example.tensors.values())).device
            self._steps = steps = Steps(self.module, self.config, self._binding, self._pad, self._bounds, self._static, device)
            table = start.load_costs(steps)
            start.load_proofs(steps, table)
            if self.config.graph.histogram:
                steps.traffic = sizing.load_histogram(self.config.graph.histogram)
            self._dispatcher = Dispatcher(
                table, mode=self.config.graph.mode, token=self._binding.token, nearest=self.config.graph.pick == "nearest"
            )
            self._lists = start.sizes_to_capture(steps)
        return self._steps, self._dispatcher

    def warmup(
        self,
        *args: Any,
        make_inputs: MakeInputs | None = None,
        make_proof_inputs: MakeInputs | None = None,
        keys: Iterable[Mapping[str, Any]] = ({},),
        modes: Iterable[Collection[str]] = (),
        contexts: Iterable[int] = (),
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> Plan:
        """Capture, prove and time every size; return the plan.

        Give one representative step as arguments, which is cut to smaller sizes and padded to larger ones. Or give
        ``make_inputs(size, key) -> (args, kwargs)``, called for each of ``keys`` (dicts of host values), so that every size is
        timed on real lengths; it returns None for a size that does not occur with that key. Call again to add keys.
        modes: for each of ``keys`` those to capture, of "full" and "piecewise"; by default all that ``graph.mode`` asks for.
        contexts: where attention matters, the tokens a sequence holds: first the number that ``make_inputs(size, key)`` uses, then
        others, at which every size is timed too, on ``make_inputs(size, key, context)``. ``at(context)`` makes calls that are decided
        by the nearest of them.
        make_proof_inputs: the same for the captures and their proofs, where steps that cost less than those timed show as much.
        The inputs must be harmless to run, as captures and timings run them many times: let them write no page of a cache that holds
        anything. Smaller state (256 MiB in all) is put back afterwards.
        """
        with self._lock:
            representatives: list[Prepared] = []
            contexts = list(contexts)
            if contexts and (make_inputs is None or min(contexts) < 1):
                raise ValueError(f"contexts: expected positive numbers, and make_inputs that takes one of them, got {contexts}")
            if make_inputs is not None:
                if args or kwargs:
                    raise TypeError("warmup: expected a representative step or make_inputs, got both")
                keys, modes = list(keys), list(modes)
                for key, of_key in zip(keys, modes or [("piecewise", "full")] * len(keys), strict=True):
                    example, timed = self._made(make_inputs, dict(key))
                    proving = timed if make_proof_inputs is None else self._made(make_proof_inputs, dict(key))[1]
                    representatives.append(Prepared(example, timed, proving, frozenset(of_key)))
            else:
                example = self._binding.read(args, kwargs)
                if example.sizes[self._binding.token] == 0:
                    raise ValueError("warmup: expected a representative step with at least one token, got an empty one")
                self._prepare(example)
                representatives = [Prepared(example, self._resizer(example), self._resizer(example))]
            if not representatives:
                raise ValueError("warmup: expected at least one key, got none")
            steps, dispatcher = self._prepare(representatives[0].example)
            self._routes.clear()
            if contexts:
                dispatcher.table.set_contexts(contexts)
            self.plan = warm_up(steps, dispatcher, representatives, self._lists, self.config.graph.max_tokens, progress)
            self._check_borrow(steps)
            if self.config.graph.cost_table:
                dispatcher.table.save(self.config.graph.cost_table)
                start.save_proofs(steps)
            return self.plan

    def _check_borrow(self, steps: Steps) -> None:
        if isinstance(self.borrow, bool):
            return
        for key in steps.keys.values():
            tensors = [i for i, dims in enumerate(key.dims) if dims is not None]
            if not set(self.borrow) <= set(tensors):
                raise ValueError(f"borrow: expected numbers of outputs that are tensors, which are {tensors}, got {list(self.borrow)}")

    def _resizer(self, example: Call) -> Representative:
        return lambda size, *context: resized(example, self._steps, size)  # type: ignore[arg-type]

    def _made(self, make_inputs: MakeInputs, key: dict[str, Any]) -> tuple[Call, Representative]:
        token = self._binding.token

        def representative(size: int, *context: int) -> Call | None:
            made = make_inputs(size, key, *context)
            if made is None:
                return None
            call = self._binding.read(made[0], made[1])
            if call.sizes[token] != size:
                raise ValueError(f"make_inputs: asked for {size} {token}, got {call.sizes[token]}")
            return call

        for size in (8, 2, 1, *sorted({s for list_ in self._lists.values() for s in list_}), self.config.graph.max_tokens):
            example = representative(size) if size <= self.config.graph.max_tokens else None
            if example is not None:
                return example, representative
        raise ValueError(f"make_inputs: gave None for every size with key {key}")

    # -- calls ----------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(None, args, kwargs)

    def at(self, context: int | None) -> AtContext:
        """``fast.at(context)(…)`` is a call, and ``fast.at(context).explain(…)`` a question, decided by costs at that context.

        context: tokens that a sequence of the step holds, on average; None: the usual number. It changes no result.
        """
        return AtContext(self, context)

    def _call(self, context: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:  # calls of several threads take turns: they fill the same input buffers
            with_grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # torch.no_grad(), in a fraction of its time
            try:
                steps, dispatcher = self._steps, self._dispatcher
                if steps is None or dispatcher is None:
                    return self._first_call(context, args, kwargs)
                known: Known | None = dispatcher.memo.get(_NEWEST)
                if known is None or known.context != context or (tensors := known.tensors(args, kwargs)) is None:
                    return self._look_up(steps, dispatcher, context, args, kwargs)
                ready = known.ready
                if not ready.is_current() or torch.is_autocast_enabled(ready.device_type):
                    return self._look_up(steps, dispatcher, context, args, kwargs)
                if (moved := steps.persistent.moved(self.config.graph.check != "off")) is not None:
                    return self._look_up(steps, dispatcher, context, args, kwargs, moved)
                ready.count[0] += 1
                return known.run(steps, tensors)
            finally:
                torch._C._set_grad_enabled(with_grad)

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
        illegal = illegal or illegal_state(steps.device) or illegal_layout(tensors)
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
        plain = all(v.__class__ in PLAIN for v in host.values())  # the texts of others need not tell them apart
        known_by = (*sizes.items(), dispatcher.bucket(context), *[(n, v.__class__, repr(v)) for n, v in host.items() if plain])
        ready: Ready | None = dispatcher.memo.get(known_by) if plain else None
        if ready is None or not ready.is_current():
            ready = self._ready_to_stage(steps, dispatcher, sizes, context, host)
            if ready is None:
                return None
            if len(dispatcher.memo) > _MAX_READY:
                dispatcher.memo.clear()
            if plain:
                dispatcher.memo[known_by] = ready
        if torch.is_autocast_enabled(ready.device_type):
            return None
        arena = ready.arena
        with self._lock:  # not between another thread's writing and sending, which would bring this step's buffer to the device
            arrays = arena.hand_out(ready.layout).heads
            return Staged(arrays, partial(self._run_staged, ready, context, arena.handed_out))

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        if sizes.keys() != self._size_names or min(sizes.values()) < 0:
            raise ValueError(f"stage: expected a size of 0 or more for each of {sorted(self._size_names)}, got {dict(sizes)}")

    def _ready_to_stage(
        self, steps: Steps, dispatcher: Dispatcher, sizes: Mapping[str, int], context: int | None, host: Mapping[str, Any]
    ) -> Ready | None:
        self._check_sizes(sizes)
        key = next((key for key in steps.keys.values() if self._binding.host(host, key.specs) == key.host), None)
        if key is None:
            return None
        unlike = key.alike and len({sizes[name] for name in key.alike}) > 1
        if key.static or key.writes_arguments or unlike:
            return None
        decision = dispatcher.pick(key.text, sizes, "", context)
        captured = key.captured.get((decision.mode, decision.size))
        if captured is None:
            return None
        return Ready(key, decision, captured, sizes, dispatcher, self.borrow)

    def _run_staged(self, ready: Ready, context: int | None, handed_out: int, arrays: dict[str, np.ndarray]) -> Any:
        with self._lock:
            with_grad = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                steps, arena = self._steps, ready.arena
                if steps is None or not ready.is_current() or arena.handed_out != handed_out:
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
                torch._C._set_grad_enabled(with_grad)

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

    def captured(self, **host: Any) -> list[tuple[str, int]]:
        """(mode, size) of every captured step for these host values."""
        keys = self._steps.keys.values() if self._steps is not None else ()
        return [at for key in keys if {name: value for name, _, value in key.host} == host for at in key.captured]

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

    # -- changes --------------------------------------------------------------------------------------------------------------

    def _moved(self, name: str) -> None:
        if self.config.graph.on_moved_weight == "raise":
            raise CaptureError(
                f"{name}: it is no longer at the address that the graphs read; call recapture() after changing weights, copy into them "
                'in place (load_state_dict does), or set graph.on_moved_weight = "recapture"'
            )
        self.recapture()

    def _note_hot(self, key: KeySteps, sizes: Mapping[str, int]) -> None:
        """Lazy capture: the size that would serve this step is captured once it has been asked for often enough."""
        n = sizes[self._binding.token]
        size = min((s for list_ in self._lists.values() for s in list_ if s >= n), default=0)
        if not size or n == 0:
            return
        self._hot[key.host, size] += 1
        if self._hot[key.host, size] == _HOT:
            self._capture_now(key, [(key, mode, size) for mode, list_ in self._lists.items() if size in list_ and mode in key.modes])

    def _capture_now(self, key: KeySteps, todo: list[tuple[KeySteps, str, int]]) -> None:
        steps, dispatcher = self._steps, self._dispatcher
        assert steps is not None and dispatcher is not None
        with self._lock:
            capture_all(steps, todo, between_steps=True)
            publish(steps, dispatcher)
            measure_all(steps, dispatcher, {key.host: sorted({size for _, _, size in todo})})
            dispatcher.changed()

    def replan(self, max_graphs: int | None = None, progress: Progress | None = None) -> Plan:
        """Choose the sizes anew for the traffic since the start, by measured costs, and capture what is missing.

        max_graphs: how many, by default ``graph.max_graphs``. Call it between steps, after enough of them.
        """
        with self._lock:
            steps, dispatcher = self._steps, self._dispatcher
            if steps is None or dispatcher is None or not dispatcher.step_sizes:
                raise RuntimeError("replan: there has been no step yet to plan for")
            steps.traffic = dict(dispatcher.step_sizes)
            busiest = max(steps.keys.values(), key=lambda key: dispatcher.steps_of_key[key.text])
            self._lists = start.sizes_to_capture(steps, max_graphs, partial(dispatcher.graph_ms, busiest.text))
            for key in steps.keys.values():
                for mode, size in list(key.captured):
                    if size not in self._lists.get(mode, ()):
                        steps.drop(key, mode, size, "the traffic does not need it")
            representatives = [Prepared(key.example, key.representative, key.proving, key.modes) for key in steps.keys.values()]
            self.plan = warm_up(steps, dispatcher, representatives, self._lists, self.config.graph.max_tokens, progress)
            return self.plan

    def recapture(self) -> None:
        """Capture again what is captured, after weights or caches have moved. Measured costs are kept."""
        with self._lock:
            if self._steps is None or self._dispatcher is None:
                return
            code = self._steps.persistent.code()
            self._steps.persistent.refresh()
            had = self._steps.drop_graphs()
            if self._steps.persistent.code() != code:
                with own_state(self._steps.device):
                    self._steps.recompile()
            capture_all(self._steps, had, between_steps=True)
            publish(self._steps, self._dispatcher)

    def reset(self) -> None:
        """Free all graphs, their memory and the arena. The next call or ``warmup`` starts anew."""
        with self._lock:
            if self._steps is not None:
                self._steps.drop_graphs()
                self._steps.pool.reset()
            self._steps = self._dispatcher = self.plan = None
            self._hot.clear()
            self._routes.clear()

    # -- questions ------------------------------------------------------------------------------------------------------------

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The module itself: no graph, no padding."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """How a call with these arguments would run, with the alternatives and why they were not taken. Counts nothing."""
        return self._explain(None, args, kwargs)

    def _explain(self, context: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        call = self._binding.read(args, kwargs)
        if self._steps is None or self._dispatcher is None:
            raise RuntimeError("explain: nothing is captured yet; call warmup first")
        key = self._steps.keys.get(call.host)
        illegal = ""
        if key is not None:
            illegal = illegal_shape(key, call) or illegal_memory(key, call.tensors) or illegal_state(self._steps.device)
            illegal = illegal or illegal_layout(call.tensors)
        return self._dispatcher.decide(key_text(call.host), call.sizes, illegal, context=context)

    def addresses(self) -> dict[str, list[Address]]:
        """The contract as captured: for each key and mode, at its largest size, every input of every segment."""
        largest: dict[tuple[str, str], tuple[int, Captured]] = {}
        for key in self._steps.keys.values() if self._steps is not None else ():
            for (mode, size), captured in key.captured.items():
                if size > largest.get((key.text, mode), (0,))[0]:
                    largest[key.text, mode] = size, captured
        return {f"{key}, {mode} at size {size}": captured.step.addresses for (key, mode), (size, captured) in largest.items()}

    def regret(self, sizes: Iterable[int] | None = None, context: int | None = None) -> dict[str, list[dict[str, Any]]]:
        """Time every step size again (1 to the maximum, or ``sizes``) in every mode, and compare the pick with the best, for each key.

        context: one of the warm-up's, to pick and to time at; None: the usual one. Eager is timed where it could be the best.
        Rows: tokens, pick, pick_ms, best, best_ms, regret (how much slower the pick is, as a share).
        """
        if self._steps is None or self._dispatcher is None:
            raise RuntimeError("regret: nothing is captured yet; call warmup first")
        wanted = list(sizes) if sizes is not None else list(range(1, self.config.graph.max_tokens + 1))
        table = self._dispatcher.table
        if context is not None and context not in (table.context, *table.other_contexts):
            raise ValueError(f"context: expected one of {[table.context, *table.other_contexts]}, which were measured, got {context}")
        return {key.text: measure_regret(self._steps, self._dispatcher, key, wanted, context) for key in self._steps.keys.values()}

    def stats(self) -> dict[str, Any]:
        """``counts``, and the bytes of graphs and inputs, for which the device's allocator is asked (milliseconds)."""
        steps = self._steps
        arenas = [] if steps is None else [key.arena.nbytes for key in steps.keys.values()]
        return self.counts() | {"graph_bytes": 0 if steps is None else steps.graph_bytes, "arena_bytes": sum(arenas)}

    def counts(self) -> dict[str, Any]:
        """Steps and padding by mode and size, and why steps ran eager."""
        return {"steps": {}} if self._dispatcher is None else self._dispatcher.stats()


class AtContext(NamedTuple):
    """Calls of a graphed module that are decided by costs at one context; made by ``GraphedModule.at``."""

    fast: GraphedModule
    context: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fast._call(self.context, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        return self.fast._explain(self.context, args, kwargs)
