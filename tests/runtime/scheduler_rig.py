"""A scheduler on a toy model, driven step by step and checked after each."""

from __future__ import annotations

from runtime.blocks import BlockManager
from runtime.costs import StepCosts
from runtime.plan import PlanRow
from runtime.request import Request, SamplingParams
from runtime.scheduler import Scheduler, Step
from tests.runtime.toy import RANGE, ToyRunner, answer

FLAT = StepCosts(*[[PlanRow("", size, 1.0, None, None, "", 0) for size in (1, 64)]] * 2)  # every step takes 1 ms


class Rig:
    """A scheduler, a toy runner, and the loop around them."""

    def __init__(
        self,
        *,
        num_pages=64,
        page_size=4,
        max_num_seqs=8,
        max_batch_tokens=32,
        max_context=64,
        prefix_cache=True,
        policy=None,
        reserve=False,
        overtake_ms=0.0,
    ):
        self.blocks = BlockManager(num_pages, page_size, prefix_cache)
        extra = {"reserve": reserve, "overtake_ms": overtake_ms, "table": FLAT}
        extra |= {} if policy is None else {"policy": policy}
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_context=max_context, **extra
        )
        self.runner = ToyRunner(num_pages, page_size)
        self.requests: list[Request] = []

    def add(self, prompt: list[int] | int, max_tokens: int = 4, ignore_eos: bool = False, n: int = 1, **more) -> Request:
        number = len(self.requests)
        if isinstance(prompt, int):
            prompt = [number * RANGE + i for i in range(prompt)]
        request = Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, n=n), **more)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.scheduler.complete(step, self.runner.launch(step))
        self.check()
        return step

    def run(self, limit: int = 10_000) -> list[Step]:
        steps = []
        while self.scheduler.has_work:
            step = self.step()
            assert step is not None
            steps.append(step)
            assert len(steps) < limit, "the requests do not end"
        return steps

    def check(self) -> None:
        live = [request for request in self.requests if request.pages]
        self.blocks.check([request.pages for request in live])
        for request in live:
            assert request.row >= 0
        rows = [request.row for request in live]
        assert len(set(rows)) == len(rows)
        prompts = {request.number for request in self.scheduler._prefilling}
        rest = [each for each in self.scheduler.running if not each.exhausted and each.number not in prompts]
        assert self.scheduler._decoding == rest, "the list that is kept is what it stands for"

    def check_end(self) -> None:
        assert self.blocks.num_available == self.blocks.usable_pages
        for request in self.requests:
            if request.finish_reason in ("stop", "length"):
                assert request.generated == answer(list(request.prompt_tokens), request.num_generated)
