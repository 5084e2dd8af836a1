"""A trace of requests through a real engine, open loop: requests arrive by the clock, however long the queue is.

Prompts are seeded random tokens of the trace's lengths. An answer ends after the trace's number of tokens as by a stop string, so the
scheduler knows no more of its length than with real traffic. What is counted is what the simulator counts (``runtime.outcome``).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from runtime.answer import Answer, Event
from runtime.engine import Engine
from runtime.outcome import Live, Outcome, percentile
from runtime.request import RequestError, SamplingParams
from runtime.simulate import Arrival
from runtime.text import TextStream

_MOST_WAIT_S = 0.01  # between looks at the clock while nothing runs


class _StopAfter(TextStream):
    """Says "stop" after so many tokens, as a stop string in the text would."""

    def __init__(self, count: int) -> None:
        self.left, self.stopped = count, False

    def push(self, token: int) -> str:
        self.left -= 1
        self.stopped = self.left <= 0
        return ""

    def finish(self, tokens: Sequence[int] = ()) -> str:
        return ""


def cut(arrivals: Sequence[Arrival], *, seconds: float, rate: float, scale: float) -> list[Arrival]:
    """Those that arrive within ``seconds`` (0: any time) at this rate, lengths times ``scale``."""
    chosen = [arrival for arrival in arrivals if not seconds or arrival.second / rate <= seconds]
    shrink = lambda tokens: max(1, round(tokens * scale))
    return [
        each._replace(
            prompt=shrink(each.prompt), generated=shrink(each.generated), shared=min(shrink(each.prompt), round(each.shared * scale))
        )
        for each in chosen
    ]


def prompts_of(arrivals: Iterable[Arrival], vocab: int) -> list[list[int]]:
    """Random tokens; requests of one group share their first ones."""
    prompts = []
    for number, arrival in enumerate(arrivals):
        own = np.random.default_rng((1, number)).integers(0, vocab, arrival.prompt - arrival.shared)
        shared = np.random.default_rng((2, *arrival.group.encode())).integers(0, vocab, arrival.shared)
        prompts.append([*shared.tolist(), *own.tolist()])
    return prompts


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    rate: float = 1.0,
    max_tokens: int = 4096,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Outcome:
    """Run the trace to its end. rate: arrivals come so many times as fast. max_tokens: what requests ask for at most.

    ``Outcome.idle``: the device's share of time between steps, on CUDA.
    """
    outcome = Outcome()
    prompts = prompts_of(arrivals, engine.model.spec.vocab)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    events: deque[Event] = deque()
    live: dict[int, Live] = {}
    before = engine.counts()
    clock = DeviceClock(engine) if engine.runner.device.type == "cuda" else None
    start, number = time.perf_counter(), 0
    now = lambda: (time.perf_counter() - start) * 1e3
    try:
        while number < len(arrivals) or engine.has_work:
            while number < len(arrivals) and arrivals[number].second * 1e3 / rate <= now():
                arrival = arrivals[number]
                try:
                    answer: Answer = engine.submit(prompts[number], params, salt=arrival.group.encode(), index=number, events=events)
                    answer.stream = _StopAfter(min(arrival.generated, max_tokens))
                    live[number] = Live(arrival.second * 1e3 / rate, arrival.generated)
                except RequestError:
                    outcome.refused += 1
                number += 1
            if not engine.has_work:
                if number < len(arrivals):
                    if clock is not None:
                        clock.rest()
                    time.sleep(max(0.0, min(_MOST_WAIT_S, (arrivals[number].second * 1e3 / rate - now()) / 1e3)))
                continue
            engine.step()
            outcome.running_sum += len(engine.scheduler.running)
            landed = now()
            while events:
                event = events.popleft()
                if event.token_ids:
                    live[event.index].token(landed, outcome)
                if event.finish_reason is not None:
                    live.pop(event.index).end(outcome)
                    progress(outcome.finished, len(arrivals), "serving")
        outcome.seconds = now() / 1e3
    finally:
        if clock is not None:
            clock.detach()
    _count(outcome, before, engine.counts())
    outcome.idle = None if clock is None else clock.idle_share()
    return outcome


def _count(outcome: Outcome, before: dict[str, Any], after: dict[str, Any]) -> None:
    """What the engine counted meanwhile."""
    for name in ("steps", "prompt_tokens", "preemptions", "cached_tokens"):
        setattr(outcome, name, after[name] - before[name])
    then, now = before["modes"], after["modes"]
    for mode, by_size in now["steps"].items():
        counts = {size: count - then["steps"].get(mode, {}).get(size, 0) for size, count in by_size.items()}
        padding = now["padding_by_mode"][mode] - then["padding_by_mode"][mode]
        rows = sum(size * count for size, count in counts.items())
        outcome.steps_by_mode[mode] += sum(counts.values())
        outcome.tokens_by_mode[mode] += rows - padding
        if mode != "eager":
            outcome.rows += rows
            outcome.padding += padding
    outcome.step_sizes = Counter({size: count - then["step_sizes"].get(size, 0) for size, count in now["step_sizes"].items()})


class HostClock:
    """Host time while it is entered: of scheduling decisions, and of the engine's steps without what they wait for the device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.decide_us: list[float] = []
        self.step_us: list[float] = []

    def __enter__(self) -> HostClock:
        engine, clock, waited = self._engine, time.perf_counter, 0.0
        schedule, read, step = engine.scheduler.schedule, engine.runner.read, engine.step

        def timed_schedule() -> Any:
            start = clock()
            made = schedule()
            if made is not None:
                self.decide_us.append(1e6 * (clock() - start))
            return made

        def timed_read(launched: Any) -> Any:
            nonlocal waited
            start = clock()
            tokens = read(launched)
            waited += clock() - start
            return tokens

        def timed_step() -> None:
            nonlocal waited
            start, waited = clock(), 0.0
            step()
            self.step_us.append(1e6 * (clock() - start - waited))

        engine.scheduler.schedule = timed_schedule  # type: ignore[method-assign]
        engine.runner.read = timed_read  # type: ignore[method-assign]
        engine.step = timed_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        del self._engine.scheduler.schedule, self._engine.runner.read, self._engine.step

    def report(self) -> dict[str, dict[str, float]]:
        cuts = {"decide_us": self.decide_us, "step_us": self.step_us}
        return {name: {f"p{p}": percentile(values, p) for p in (50, 90, 99)} for name, values in cuts.items()}


class DeviceClock:
    """Events on the device around each step: from just before its inputs are copied to just after its tokens are.

    What lies between the end of one step and the start of the next is time in which the device had nothing to do, unless the
    engine itself had no work (``rest``).
    """

    def __init__(self, engine: Engine) -> None:
        self._runner = runner = engine.runner
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []
        self._rested = True
        self._launch = runner.launch
        steps = runner.steps._steps
        self._arenas = [key.arena for key in steps.keys.values()] if steps is not None else []
        self._sends = [arena.send for arena in self._arenas]
        current: list[torch.cuda.Event] = []

        def launch(*step: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            current[:] = [begin]
            begin.record()
            launched = self._launch(*step)
            end.record()
            self._spans.append((begin, end, self._rested))
            self._rested = False
            return launched

        def marking(send: Callable[..., Any]) -> Callable[..., Any]:
            def marked(*args: Any) -> Any:
                current[0].record()  # again: what the host did until here is not the step's
                return send(*args)

            return marked

        runner.launch = launch  # type: ignore[method-assign, assignment]
        for arena, send in zip(self._arenas, self._sends, strict=True):
            arena.send = marking(send)

    def rest(self) -> None:
        """The engine has no work: what comes before the next step is not counted."""
        self._rested = True

    def detach(self) -> None:
        del self._runner.launch
        for arena, send in zip(self._arenas, self._sends, strict=True):
            arena.send = send

    def idle_share(self) -> float | None:
        """Time between steps, as a share of that and the steps; None when no two steps followed each other."""
        torch.cuda.synchronize(self._runner.device)
        idle = busy = 0.0
        for (_, earlier, _), (begin, end, rested) in zip(self._spans, self._spans[1:], strict=False):
            busy += begin.elapsed_time(end)
            if not rested:
                idle += max(0.0, earlier.elapsed_time(begin))
        return idle / (idle + busy) if busy else None
