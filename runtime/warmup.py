"""Warm-up: capture every size in each mode, prove it, time it against eager, and make the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from runtime.binding import Call
from runtime.dispatch import Candidates, Dispatcher
from runtime.measure import interleaved_ms
from runtime.plan import Plan, PlanRow
from runtime.steps import KeySteps, Representative, Steps

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


def capture_all(
    steps: Steps, todo: Iterable[tuple[KeySteps, str, int]], progress: Progress | None = None, *, between_steps: bool = False
) -> None:
    """Capture and prove, largest first so that smaller graphs fit into the memory of larger ones. Within the memory budget.

    between_steps: requests are waiting, so nothing is done that is only good for memory.
    """
    order = sorted(todo, key=lambda item: (-item[2], item[1]))
    budget = steps.config.graph.memory_budget
    full = ""
    with torch.inference_mode(False), torch.no_grad(), steps.pool.session(collect=not between_steps):
        for key in dict.fromkeys(key for key, _, _ in order):
            steps.check_padding(key, min((size for k, _, size in order if k is key and size > 1), default=1))
        for done, (key, mode, size) in enumerate(order):
            if progress:
                progress(done, len(order), f"capturing {mode} at size {size}")
            if full:
                key.dropped[mode, size] = full
                continue
            before = steps.pool.nbytes()
            try:
                steps.capture(key, mode, size)
            except torch.OutOfMemoryError as error:
                full = f"out of memory while capturing {mode} at size {size}"
                steps.remark(f"{full}; it and all smaller captures were dropped: {str(error).splitlines()[0]}")
                key.dropped[mode, size] = full
            except Exception as error:
                steps.failed(key, mode, size, error)
            else:
                if steps.pool.nbytes() > budget:
                    grown = steps.pool.nbytes() - before
                    full = f"graph.memory_budget of {budget} bytes was reached"
                    steps.drop(key, mode, size, full)
                    steps.remark(f"{full} by {mode} at size {size} (it adds {grown} bytes); it and what came after was dropped")
        steps.persistent.forget_changed_values()
    if progress:
        progress(len(order), len(order), "captured")


def measure_all(steps: Steps, dispatcher: Dispatcher, sizes: Mapping[KeySteps_, Iterable[int]], progress: Progress | None = None) -> None:
    """Time eager and every captured mode at each size; what the table already holds is not timed again."""
    jobs = [(steps.keys[host], size) for host, list_ in sizes.items() for size in sorted(list_)]
    table = dispatcher.table
    with torch.inference_mode(False), torch.no_grad():
        for done, (key, size) in enumerate(jobs):
            if progress:
                progress(done, len(jobs), f"measuring size {size}")
            runs = runs_at(steps, key, size)
            for mode in runs:
                captured = key.captured.get((mode, size))
                table.nbytes[key.text, mode, size] = captured.step.nbytes if captured else 0
            if all((key.text, mode, size) in table.ms for mode in runs):
                continue
            for mode, ms in interleaved_ms(runs, steps.device).items():
                table.ms[key.text, mode, size] = ms
    if progress:
        progress(len(jobs), len(jobs), "measured")


KeySteps_ = tuple[Any, ...]
"""The host values of a key."""


def runs_at(steps: Steps, key: KeySteps, size: int) -> dict[str, Callable[[], object]]:
    """What can run a step of this size, on representative inputs that are loaded now."""
    call = key.representative(size)
    if call is None:
        return {}
    inputs = steps.inputs(key, size)[0]
    views = inputs.load(key.arena)
    exact = key.arena.views(inputs.real)
    runs: dict[str, Callable[[], object]] = {"eager": lambda: key.eager(exact)}
    for mode in ("piecewise", "full"):
        captured = key.captured.get((mode, size))
        if captured is not None:
            runs[mode] = captured.step.replay
    assert views is not None
    return runs


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
    plan.capture_seconds, plan.measure_seconds = capture_s, measure_s
    plan.graph_bytes = steps.pool.nbytes()
    plan.arena_bytes = sum(key.arena.nbytes for key in steps.keys.values())
    return plan


def warm_up(
    steps: Steps,
    dispatcher: Dispatcher,
    representatives: Iterable[tuple[Call, Representative]],
    sizes: Mapping[str, list[int]],
    max_tokens: int,
    progress: Progress | None = None,
) -> Plan:
    """sizes: mode -> sizes to capture. representatives: an example call and its resizer for each key."""
    start = time.perf_counter()
    todo: list[tuple[KeySteps, str, int]] = []
    measured: dict[KeySteps_, list[int]] = {}
    for example, representative in representatives:
        key = steps.keys.get(example.host) or steps.add_key(example, representative, max_tokens)
        key.representative = representative
        usable = {size for list_ in sizes.values() for size in list_ if representative(size) is not None}
        if steps.config.graph.capture == "warmup":
            todo += [(key, mode, s) for mode, list_ in sizes.items() for s in list_ if s in usable and (mode, s) not in key.captured]
        measured[key.host] = sorted(usable)
    capture_all(steps, todo, progress)
    publish(steps, dispatcher)
    middle = time.perf_counter()
    measure_all(steps, dispatcher, measured, progress)
    dispatcher.changed()
    return make_plan(steps, dispatcher, measured, middle - start, time.perf_counter() - middle)
