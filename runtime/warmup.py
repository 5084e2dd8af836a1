"""Warm-up: capture every size in each mode, prove it, time it against eager, and make the plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from runtime import ranks
from runtime.binding import Call
from runtime.contract import Inputs, kept
from runtime.dispatch import Candidates, Dispatcher, regret
from runtime.key_steps import KeySteps, Representative
from runtime.measure import interleaved_ms
from runtime.padding import check_padding, check_rows, find_written
from runtime.plan import Plan, PlanRow
from runtime.sizes import interval_weights
from runtime.steps import Steps

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what comes next); at the end with done == total."""


def resized(example: Call, steps: Steps, size: int) -> Call:
    """One step's tensors at another size: the first rows, as many as there are; padding makes up the rest.

    Offsets (inputs padded with "last") are cut to what the step still holds.
    """
    binding, padded = steps.binding, steps.padded(size, example.host)
    real = {name: min(value, padded[name]) for name, value in example.sizes.items()}
    tensors = {}
    for name, tensor in example.tensors.items():
        for axis, dim in binding.dims.get(name, {}).items():
            tensor = tensor.narrow(axis, 0, real[dim.name] + dim.extra)
        if steps.pad.get(name) == "last" and not tensor.dtype.is_floating_point:
            tensor = tensor.clamp(max=real[binding.token])
        tensors[name] = tensor
    return Call(tensors, example.host, real)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Compilation, captures and timings do not depend on the caller's modes: no gradients, no inference tensors, no autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def naming_inference_tensors(steps: Steps) -> Iterator[None]:
    """A module that writes state which was made in inference mode runs in inference mode only; graphs run in either."""
    try:
        yield
    except RuntimeError as error:
        made = [name for name, t in steps.persistent.tensors().items() if t.is_inference()]
        made += [name for key in steps.keys.values() for name, t in key.static.items() if t.is_inference()]
        if "inference tensor" not in str(error) or not made:
            raise
        raise ValueError(
            f"{made[0]}: expected a normal tensor, got one made under torch.inference_mode(), and the module writes such tensors; "
            f"make the module and its caches outside of it, or inside of torch.inference_mode(False) (so made: {', '.join(made[:8])})"
        ) from error


class Prepared(NamedTuple):
    """What to warm up for one key: an example call, what makes the steps of a size that are timed and those that are proved, and the modes
    to capture."""

    example: Call
    representative: Representative
    proving: Representative
    modes: frozenset[str] = frozenset(("piecewise", "full"))


Job = tuple[KeySteps, str, int]
"""A step to capture: key, mode, size."""


def in_order(jobs: Iterable[Job], traffic: Mapping[int, float]) -> list[Job]:
    """The largest size of each key and mode first, so that all others fit into its memory; the others by benefit per byte.

    The benefit of a size is the share of steps that it is the next size for; its bytes grow with its rows.
    """
    jobs = list(jobs)
    lists: dict[tuple[KeySteps, str], list[int]] = {}
    for key, mode, size in jobs:
        lists.setdefault((key, mode), []).append(size)
    served = {at: interval_weights(traffic, sizes) for at, sizes in lists.items()}

    def rank(job: Job) -> tuple[bool, float, str]:
        key, mode, size = job
        is_largest = size == max(lists[key, mode])
        return not is_largest, -size if is_largest else -served[key, mode][size] / size, mode

    return sorted(jobs, key=rank)


def capture_all(steps: Steps, todo: Iterable[Job], progress: Progress | None = None, *, between_steps: bool = False) -> None:
    """Capture and prove, within the memory budget. What does not fit any more is dropped, and said.

    between_steps: requests are waiting, so nothing is done that is only good for memory.
    """
    order = in_order(todo, steps.traffic)
    steps.replays += 1  # captures run graphs: what was borrowed before is no longer safe
    budget, held = steps.config.graph.memory_budget, steps.graph_bytes
    full = ""
    pool = steps.pool.session(collect=not between_steps)
    with own_state(steps.device), steps.within.enter(), pool, ExitStack() as state:
        for key in dict.fromkeys(key for key, _, _ in order):
            key.expected, key.sets = (0, []), ((0, False), [])  # of other weights and inputs, maybe
            find_written(steps, key, min(size for k, _, size in order if k is key))
            state.enter_context(kept(key.written))
            check_padding(steps, key, [size for k, _, size in order if k is key])
        for done, (key, mode, size) in enumerate(order):
            what = f"{mode} at size {size}"
            if progress:
                progress(done, len(order), f"capturing {what}")
            if full:
                key.dropped[mode, size] = full
                continue
            try:
                grown = int(ranks.largest(steps.capture(key, mode, size).step.nbytes))
            except torch.OutOfMemoryError as error:
                full = f"out of memory while capturing {what}"
                steps.remark(f"{full}; it and what came after were dropped: {str(error).splitlines()[0]}")
                key.dropped[mode, size] = full
                continue
            except Exception as error:
                steps.failed(key, mode, size, error)
                continue
            held += grown
            if held > budget:
                reason = f"graph.memory_budget = {budget} bytes"
                steps.drop(key, mode, size, reason)
                if any(k.captured for k in steps.keys.values()):
                    full = reason  # sorted by benefit per byte: what comes after is worth less
                    steps.remark(f"{reason} was reached by {what}, which adds {grown}; it and what came after were dropped")
                else:  # nothing else is in the pool: its memory can be given back, and a smaller size may fit
                    steps.pool.reset()
                    held = 0
                    steps.remark(f"{what} was dropped: it alone takes {grown} bytes of {reason}")
        for key in dict.fromkeys(key for key, _, _ in order):
            key.expected, key.sets = (0, []), ((0, False), [])
            check_rows(steps, key)
        steps.persistent.forget_changed_values()
    if progress:
        progress(len(order), len(order), "captured")


def measure_all(steps: Steps, dispatcher: Dispatcher, sizes: Mapping[KeySteps_, Iterable[int]], progress: Progress | None = None) -> None:
    """Time eager and every captured mode at each size, at each context; what the table already holds is not timed again.

    Eager is timed at the usual context, and at another where it could be the cheapest.
    """
    table = dispatcher.table
    jobs = [
        (steps.keys[host], size, context)
        for context in (table.context, *table.other_contexts)
        for host, list_ in sizes.items()
        for size in sorted(list_)
    ]
    steps.replays += 1
    with own_state(steps.device), ExitStack() as state:
        for key in dict.fromkeys(key for key, _, _ in jobs):
            state.enter_context(kept(key.written))
        for done, (key, size, context) in enumerate(jobs):
            if progress:
                progress(done, len(jobs), f"measuring size {size}" + (f" at context {context}" if context else ""))
            usual = context == table.context
            runs = runs_at(steps, key, size, *(() if usual else (context,)))
            for mode in runs:
                captured = key.captured.get((mode, size))
                table.nbytes[key.text, mode, size] = captured.step.nbytes if captured else 0
            costs = table.ms if usual else table.other_contexts[context]
            if all((key.text, mode, size) in costs for mode in runs if usual or mode != "eager"):
                continue
            eager_ms = table.ms.get((key.text, "eager", size))
            found: Mapping[str, float] = {}
            if not usual and eager_ms is not None and len(runs) > 1:
                found = interleaved_ms({mode: run for mode, run in runs.items() if mode != "eager"}, steps.device)
                # The least that it can take: a longer context may hide behind the host's work, a shorter one saves what it saves graphs.
                eager_ms += min(0.0, *(ms - table.ms.get((key.text, mode, size), ms) for mode, ms in found.items()))
            if not found or eager_ms is None or eager_ms < _FAR * min(found.values()):
                found = interleaved_ms(runs, steps.device, far=_FAR)
            costs.update({(key.text, mode, size): ms for mode, ms in found.items()})
    if progress:
        progress(len(jobs), len(jobs), "measured")


_FAR = 2.0  # what took so many times as long as the fastest mode is not timed once more


KeySteps_ = tuple[Any, ...]
"""The host values of a key."""


def runs_at(steps: Steps, key: KeySteps, size: int, *context: int) -> dict[str, Callable[[], object]]:
    """What can run a step of this size, on representative inputs that are loaded now, of the usual context or another."""
    inputs = steps.timed_inputs(key, size, *context)
    if inputs is None:
        return {}
    inputs.load(key.arena)
    exact = key.arena.views(inputs.real)
    runs: dict[str, Callable[[], object]] = {"eager": lambda: key.eager(exact)}
    for mode in ("piecewise", "full"):
        captured = key.captured.get((mode, size))
        if captured is not None:
            runs[mode] = captured.step.replay
    return runs


def measure_regret(
    steps: Steps, dispatcher: Dispatcher, key: KeySteps, sizes: Iterable[int], context: int | None = None
) -> list[dict[str, Any]]:
    """Time, for each step size, the pick, eager, and every mode at its next size, all on a real step of that size; see ``regret``.

    Eager is left out where the table has it at more than twice the cost of a pick that is a graph. context: None is the usual one.
    """
    table = dispatcher.table
    of_context = () if context is None or context == table.context else (context,)
    picks: dict[int, tuple[str, int]] = {}
    measured: dict[int, dict[tuple[str, int], float]] = {}
    steps.replays += 1
    steps.pool.synchronize()  # steps may be under way on other streams
    with own_state(steps.device), kept(key.written):
        for n in sizes:
            call = key.representative(n, *of_context)
            if call is None:
                continue
            decision = dispatcher.decide(key.text, call.sizes, brief=True, context=context)
            picks[n] = decision.mode, decision.size
            fitting = [at for at, c in key.captured.items() if at[1] >= n and all(c.padded[d] >= v for d, v in call.sizes.items())]
            next_sizes = {mode: min(size for m, size in fitting if m == mode) for mode, _ in fitting}
            values = {name: t.to(steps.device) for name, t in call.tensors.items() if name in key.specs}
            runs: dict[tuple[str, int], Callable[[], object]] = {}
            loads: dict[tuple[str, int], Callable[[], object]] = {}
            for at in dict.fromkeys([picks[n], *next_sizes.items(), ("eager", n)]):
                captured = key.captured.get(at)
                runs[at] = partial(key.eager, values) if captured is None else captured.step.replay
                loads[at] = (lambda: None) if captured is None else partial(Inputs(values, call.sizes, captured.padded).load, key.arena)
            eager_ms = dispatcher.eager_ms(key.text, n, context)
            if picks[n][0] != "eager" and eager_ms is not None and decision.ms is not None and eager_ms > _FAR * decision.ms:
                del runs["eager", n]
            measured[n] = interleaved_ms(runs, steps.device, prepare=lambda at, loads=loads: loads[at]())  # type: ignore[misc]
    return regret(picks, measured)


def publish(steps: Steps, dispatcher: Dispatcher) -> None:
    """Tell the dispatcher what is captured now."""
    for key in steps.keys.values():
        dispatcher.keys[key.text] = Candidates({at: c.padded for at, c in key.captured.items()}, dict(key.dropped), key.exact)
    dispatcher.changed()


def make_plan(steps: Steps, dispatcher: Dispatcher, sizes: Mapping[KeySteps_, Iterable[int]], capture_s: float, measure_s: float) -> Plan:
    plan = Plan(str(dispatcher.table.valid_for.get("device", steps.device)), remarks=list(steps.remarks))
    for host, list_ in sizes.items():
        key = steps.keys[host]
        ms = dispatcher.table.ms
        for size in sorted(list_):
            pick = dispatcher.decide(key.text, {steps.binding.token: size}, brief=True)
            shown = pick.mode if pick.size == size else f"{pick.mode}@{pick.size}"
            nbytes = sum(c.step.nbytes for (_, s), c in key.captured.items() if s == size)
            eager, piecewise, full = (ms.get((key.text, mode, size)) for mode in ("eager", "piecewise", "full"))
            plan.rows.append(PlanRow(key.text, size, eager, piecewise, full, shown, nbytes))
    plan.remarks += _other_picks(steps, dispatcher, sizes)
    if earlier := Counter(c.step.proved_on[:10] for key in steps.keys.values() for c in key.captured.values() if c.step.proved_on):
        days = ", ".join(f"{count} on {day}" for day, count in sorted(earlier.items()))
        plan.remarks.append(
            f"proved by earlier starts with the same code, versions, device and shapes: {days}; compared now: the owner of every input. "
            'graph.check = "poison" proves all again'
        )
    plan.capture_seconds, plan.measure_seconds = capture_s, measure_s
    plan.graph_seconds = steps.graph_seconds
    plan.graph_bytes = steps.pool.nbytes()
    plan.arena_bytes = sum(key.arena.nbytes for key in steps.keys.values())
    return plan


def _other_picks(steps: Steps, dispatcher: Dispatcher, sizes: Mapping[KeySteps_, Iterable[int]]) -> list[str]:
    """Where another context makes another pick than the plan's rows show."""
    lines = []
    for context in dispatcher.table.other_contexts:
        for host, list_ in sizes.items():
            text, differ = steps.keys[host].text, []
            for size in sorted(list_):
                here, usual = (dispatcher.decide(text, {steps.binding.token: size}, brief=True, context=c) for c in (context, None))
                if (here.mode, here.size) != (usual.mode, usual.size):
                    differ.append(f"{size} ({here.mode}{'' if here.size == size else f'@{here.size}'})")
            if differ:
                lines.append(f"{text}: at a context of {context} other picks at {', '.join(differ)}".removeprefix("-: "))
    return lines


def warm_up(
    steps: Steps,
    dispatcher: Dispatcher,
    representatives: Iterable[Prepared],
    sizes: Mapping[str, list[int]],
    max_tokens: int,
    progress: Progress | None = None,
) -> Plan:
    """sizes: mode -> sizes to capture. representatives: one for each key."""
    start = time.perf_counter()
    todo: list[Job] = []
    measured: dict[KeySteps_, list[int]] = {}
    with own_state(steps.device), naming_inference_tensors(steps):
        for example, representative, proving, modes in representatives:
            key = steps.keys.get(example.host) or steps.add_key(example, representative, proving, max_tokens)
            key.representative, key.proving, key.modes = representative, proving, modes
            lists = {mode: list_ for mode, list_ in sizes.items() if mode in modes}
            usable = {size for list_ in lists.values() for size in list_ if representative(size) is not None}
            if steps.config.graph.capture == "warmup":
                todo += [(key, mode, s) for mode, list_ in lists.items() for s in list_ if s in usable and (mode, s) not in key.captured]
            measured[key.host] = sorted(usable)
        capture_all(steps, todo, progress)
    publish(steps, dispatcher)
    middle = time.perf_counter()
    measure_all(steps, dispatcher, measured, progress)
    dispatcher.changed()
    return make_plan(steps, dispatcher, measured, middle - start, time.perf_counter() - middle)
