"""The captured steps of a module: how they are made, changed and asked about. What calls them is ``runtime.graphed``."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any, Self

import torch

from runtime import sizes as sizing
from runtime import start
from runtime.binding import Binding, Call, Dynamic, key_text
from runtime.calls import Route, illegal_layout, illegal_memory, illegal_shape, illegal_state
from runtime.captured_step import Address
from runtime.config import RuntimeConfig
from runtime.dispatch import Decision, Dispatcher
from runtime.graph import AS_IS, Within
from runtime.key_steps import Captured, KeySteps, Representative
from runtime.plan import Plan
from runtime.stand_in import StandIn
from runtime.steps import Bound, Steps
from runtime.warmup import Prepared, Progress, capture_all, measure_all, measure_regret, own_state, publish, resized, warm_up

MakeInputs = Callable[..., "tuple[tuple[Any, ...], dict[str, Any]] | None"]
_HOT = 8  # steps after which a lazily captured size is worth its capture


class CapturedModule(StandIn):
    """A module and its captured steps: warm-up, capturing again, planning anew, and what there is to know of them."""

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
        within: Within = AS_IS,
    ) -> None:
        super().__init__(module)
        if isinstance(static, str):
            raise TypeError(f"static: expected names of arguments, got the text {static!r}; write [{static!r}]")
        if not isinstance(pad, Mapping):
            raise TypeError(f'pad: expected arguments and what their padding holds, {{"slot_mapping": -1}} for example, got {pad!r}')
        for name, value in pad.items():
            if not isinstance(value, Real) and not (isinstance(value, str) and value == "last"):
                raise ValueError(f'pad: {name}: expected a number or "last", got {value!r}')
        self.config = config
        self.borrow, self._within = borrow, within
        self._binding = Binding(module.forward, dynamic)
        self._size_names = frozenset(self._binding.size_names)
        for name in bounds:
            if name not in self._size_names:
                raise ValueError(f"bounds: no dimension in dynamic is named {name!r}; there are {', '.join(sorted(self._size_names))}")
        self._settings: dict[str, Any] = {"dynamic": dynamic, "pad": pad, "bounds": bounds, "static": tuple(static)}
        self._settings |= {"borrow": borrow, "within": within}
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
        self.__dict__["_is_made"] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module, with the same settings and without graphs: it warms up anew."""
        made = type(self)(copy.deepcopy(self.module, memo), self.config.model_copy(deep=True), **self._settings)
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and ``torch.save``: as a deep copy, without graphs."""
        return partial(type(self), **self._settings), (self.module, self.config)

    # -- set-up ---------------------------------------------------------------------------------------------------------------

    def _prepare(self, example: Call) -> tuple[Steps, Dispatcher]:
        if self._steps is None or self._dispatcher is None:
            own = (*self.module.parameters(), *self.module.buffers())
            device = own[0].device if own else next(iter(example.tensors.values())).device
            self._steps = steps = Steps(
                self.module, self.config, self._binding, self._pad, self._bounds, self._static, device, self._within
            )
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

    # -- changes --------------------------------------------------------------------------------------------------------------

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
            illegal = illegal_shape(key, call) or illegal_memory(key, call.tensors) or illegal_state(self._steps.device.type)
            illegal = illegal or illegal_layout(call.tensors)
        return self._dispatcher.decide(key_text(call.host), call.sizes, illegal, context=context)

    def pick(self, sizes: Mapping[str, int], *, context: int | None = None, **host: Any) -> Decision:
        """What serves a step of these named sizes and host values, without its tensors. context: as for ``at``. Counts nothing."""
        if self._steps is None or self._dispatcher is None:
            raise RuntimeError("pick: nothing is captured yet; call warmup first")
        text = next((key.text for key in self._steps.keys.values() if {name: value for name, _, value in key.host} == host), str(host))
        return self._dispatcher.pick(text, sizes, context=context)

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

    def captured(self, **host: Any) -> list[tuple[str, int]]:
        """(mode, size) of every captured step for these host values."""
        keys = self._steps.keys.values() if self._steps is not None else ()
        return [at for key in keys if {name: value for name, _, value in key.host} == host for at in key.captured]
