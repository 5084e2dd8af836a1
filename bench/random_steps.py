"""Random serving steps, each compared bit for bit with the same callable not captured at the same padded size.

An engine with a cache too small for its requests: arrivals, endings, aborts, preemptions, evictions from the prefix cache, chunks of
prompts beside decodes, any size, any mode. After each step: its tokens and the whole KV cache have the bits that the callable that
was captured gives, run uncaptured on the same inputs; and its tokens are the module's own, up to what GEMMs of other shapes round.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from runtime.calls import Staged
from runtime.contract import same_bits
from runtime.engine import Engine
from runtime.graphed import GraphedModule
from runtime.outputs import Loan, taken
from runtime.request import SamplingParams

_MODES = ("auto", "full", "piecewise", "full", "piecewise", "eager")
_COMPARED_WITH_MODULE = 7  # every so many steps


Step = tuple[torch.Tensor | Loan, torch.Tensor | Loan]
"""Tokens and logits; lent by a graph."""


class Difference(AssertionError):
    """A step whose bits are not those of the callable that was captured."""


class Compared:
    """Stands in a runner for its graphed step and compares every call."""

    def __init__(self, fast: GraphedModule, caches: list[torch.Tensor], rng: random.Random) -> None:
        self.fast, self.caches, self.rng = fast, caches, rng
        self.modes: Counter[str] = Counter()
        self.sizes: Counter[int] = Counter()
        self.tokens = self.tokens_of_module = self.staged = 0
        self.context: int | None = None

    def at(self, context: int | None) -> Compared:
        self.context = context
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fast, name)

    def stage(self, sizes: dict[str, int], *, context: int | None, **host: Any) -> Staged | None:
        """As the module's, in a random mode; the call is compared."""
        self._change_mode()
        self.context = context
        staged = self.fast.stage(sizes, context=context, **host)
        if staged is None:
            return None
        key = next(k for k in self.fast._steps.keys.values() if k.text == f"max_query_len={host['max_query_len']}")  # type: ignore[union-attr]

        def run(arrays: dict[str, Any]) -> Step:
            self.staged += 1
            return self._compared({**key.arena.as_tensors(arrays), **host}, lambda arguments: staged())

        return Staged(staged.arrays, run, staged.note)

    def __call__(self, **arguments: Any) -> Step:
        return self._compared(arguments, lambda arguments: self.fast.at(self.context)(**arguments))

    def _change_mode(self) -> None:
        dispatcher = self.fast._dispatcher
        assert dispatcher is not None
        dispatcher.mode = self.rng.choice(_MODES)
        dispatcher.changed()

    def _compared(self, arguments: dict[str, Any], run: Callable[[dict[str, Any]], Step]) -> Step:
        fast = self.fast
        steps = fast._steps
        assert steps is not None
        number = sum(self.modes.values())
        decision = fast.at(self.context).explain(**arguments)
        call = fast._binding.read((), arguments)
        key = steps.keys.get(call.host)
        inputs = {name: t.to(steps.device) for name, t in call.tensors.items()}
        before = [cache.clone() for cache in self.caches] if number % _COMPARED_WITH_MODULE == 0 else []
        got = run(arguments)
        after = [cache.clone() for cache in self.caches]
        with torch.no_grad():
            if key is None:
                want = fast.module(**{**arguments, **inputs})
            elif decision.mode == "eager":
                want = key.eager(inputs)
            else:
                padded = key.captured[decision.mode, decision.size].padded
                want = tuple(t[: call.sizes["seqs"]] for t in key.call(key.arena.load(inputs, call.sizes, padded)))
        where = f"step {number}, {call.sizes}, {decision}"
        tokens, logits = map(taken, got)
        if not same_bits(tokens, want[0]):
            raise Difference(f"{where}: its tokens are {tokens.tolist()}, uncaptured {want[0].tolist()}")
        if not same_bits(logits, want[1]):
            raise Difference(f"{where}: its logits are not those of the callable not captured")
        for i, (cache, then) in enumerate(zip(self.caches, after, strict=True)):
            if not same_bits(cache, then):
                raise Difference(f"{where}: cache {i} differs from what the callable not captured leaves")
        if before:
            self._compare_with_module(tokens, {**arguments, **inputs}, before)
        self.modes[decision.mode] += 1
        self.sizes[call.sizes["tokens"]] += 1
        return got

    def _compare_with_module(self, got: torch.Tensor, inputs: dict[str, Any], before: list[torch.Tensor]) -> None:
        """Count the tokens that the module itself gives on the caches of before the step."""
        after = [cache.clone() for cache in self.caches]
        self._restore(before)
        with torch.no_grad():
            plain = self.fast.module(**inputs)[0]
        self._restore(after)
        self.tokens += len(got)
        self.tokens_of_module += int((plain == got).sum())

    def _restore(self, saved: list[torch.Tensor]) -> None:
        for cache, then in zip(self.caches, saved, strict=True):
            cache.copy_(then)


def run_random_steps(engine: Engine, steps: int, seed: int = 0) -> dict[str, Any]:
    """Serve random requests for so many steps; returns counts. Raises ``Difference`` at the first step that is not the same.

    The engine: any model without a tokenizer, best with few pages, so that requests preempt each other.
    """
    rng = random.Random(seed)
    runner, scheduler = engine.runner, engine.scheduler
    vocab, longest = engine.model.spec.vocab, scheduler.max_context
    compared = Compared(runner.steps, [cache for pair in runner._caches for cache in pair], rng)
    runner.steps = compared  # type: ignore[assignment]
    prefixes = [[rng.randrange(vocab) for _ in range(longest // 3)] for _ in range(4)]  # shared, so that the prefix cache serves
    answers: list[Any] = []
    submitted = aborted = 0
    try:
        while sum(compared.modes.values()) < steps:
            answers = [answer for answer in answers if not answer.finished]
            if len(answers) < rng.randint(1, runner.max_num_seqs + 2):
                prompt = rng.choice(prefixes)[: rng.randint(0, longest // 3)] + [
                    rng.randrange(vocab) for _ in range(rng.randint(1, longest // 3))
                ]
                params = SamplingParams(
                    temperature=rng.choice([0.0, 0.0, 0.7, 1.3]), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 0.8]),
                    max_tokens=rng.choice([1, 3, 12, 40]),
                )  # fmt: skip
                answers.append(engine.submit(prompt, params))
                submitted += 1
            if answers and rng.random() < 0.02:
                engine.abort(rng.choice(answers))
                aborted += 1
            engine.step()
        engine._drop(answers)
    finally:
        runner.steps = compared.fast
    return {
        "steps": sum(compared.modes.values()), "modes": dict(compared.modes), "sizes": len(compared.sizes), "requests": submitted,
        "aborted": aborted, "preemptions": scheduler.preemptions, "evicted_pages": scheduler.blocks.evictions, "staged": compared.staged,
        "tokens_as_module": compared.tokens_of_module / max(compared.tokens, 1),
    }  # fmt: skip
