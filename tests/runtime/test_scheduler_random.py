"""The scheduler under random traffic: every policy, prompts with several answers, and the time of a decision."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.schedule_time import measure
from runtime.costs import StepCosts
from runtime.plan import PlanRow
from runtime.policy import CheapestPerToken, Composition
from runtime.request import RequestError
from runtime.scheduler import Step
from tests.runtime.scheduler_rig import Rig

ROWS = [PlanRow("", size, 3.0, 1.0 + size / 8, None, "", 0) for size in (1, 2, 4, 6)]
ALONE = [PlanRow("", size, 9.0 if size > 1 else 0.1, None, None, "", 0) for size in (1, 2, 8)]
POLICIES = [
    CheapestPerToken(StepCosts(ROWS, ROWS)),
    CheapestPerToken(StepCosts(ROWS, ROWS), itl_ms=1.5, ttft_ms=4),
    CheapestPerToken(StepCosts(ROWS, ALONE), itl_ms=1.0),
    lambda load: Composition(load.skipped or not load.decodes, min(load.prompt_tokens, 2)),
]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 14), st.integers(1, 10)),
        st.tuples(st.just("again"), st.integers(0, 100), st.integers(1, 10)),  # an earlier prompt, perhaps with a longer tail
        st.tuples(st.just("samples"), st.integers(1, 14), st.integers(2, 4)),  # several answers to one prompt
        st.tuples(st.just("masked"), st.integers(1, 14), st.integers(1, 10)),  # one token at a time
        st.tuples(st.just("abort"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_to_one_prompt_hold_its_full_pages_once(prefix_cache: bool) -> None:
    """Chunk by chunk: the others wait until the first has computed the pages that they share, then compute the rest each."""
    rig = Rig(prefix_cache=prefix_cache, max_batch_tokens=8)
    first = rig.add(18, n=3)
    others = [rig.add(list(first.prompt_tokens), n=3, sample=sample, first=first) for sample in (1, 2)]
    while not all(each.num_generated for each in others):
        rig.step()
    assert others[0].pages[:4] == others[1].pages[:4] == first.pages[:4]
    assert len({page for each in (first, *others) for page in each.pages[4:]}) == sum(len(each.pages[4:]) for each in (first, *others))
    assert sum(chunk.num_tokens for step in rig.runner.steps for chunk in step.chunks if not chunk.num_generated) == 18 + 2 * 2
    rig.run()
    rig.check_end()


@settings(max_examples=150, deadline=None)
@given(
    operations=operations,
    num_pages=st.integers(5, 14),
    page_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    spare_tokens=st.integers(0, 8),
    prefix_cache=st.booleans(),
    depth=st.integers(1, 2),
    reserve=st.booleans(),
    policy=st.sampled_from([None, *POLICIES]),
    overtake_ms=st.sampled_from([0.0, 3.0, 1e9]),
)
def test_b151_b156_pages_are_neither_lost_nor_shared_and_every_request_ends(
    operations, num_pages, page_size, max_num_seqs, spare_tokens, prefix_cache, depth, reserve, policy, overtake_ms
) -> None:
    """Random arrivals, repeated prompts, aborts, failures and preemptions, with one or two steps in flight."""
    rig = Rig(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_num_seqs + spare_tokens,
        prefix_cache=prefix_cache,
        max_context=24,
        reserve=reserve,
        policy=policy,
        overtake_ms=overtake_ms,
    )
    flying: list[tuple[Step, list[int]]] = []

    def launch() -> bool:
        step = rig.scheduler.schedule()
        if step is None:
            return False
        pending = {chunk.request.number: token for earlier, tokens in flying for chunk, token in zip(earlier.chunks, tokens, strict=True)}
        flying.append((step, rig.runner.launch(step, pending)))
        return True

    def land() -> None:
        step, tokens = flying.pop(0)
        rig.scheduler.complete(step, tokens)
        rig.check()

    def advance() -> bool:
        if len(flying) < depth and launch():
            return True
        if flying:
            land()
            return True
        return False

    def add(prompt, max_tokens: int) -> None:
        try:
            rig.add(prompt, max_tokens)
        except RequestError:
            assert rig.blocks.pages_needed(len(prompt) if isinstance(prompt, list) else prompt, 0) > rig.blocks.usable_pages

    for kind, a, b in operations:
        if kind == "add":
            add(a, b)
        elif kind == "again" and rig.requests:
            add(list(rig.requests[a % len(rig.requests)].tokens[:20]), b)
        elif kind == "masked" and rig.blocks.pages_needed(a, 0) <= rig.blocks.usable_pages:
            rig.add(a, b, mask=lambda tokens: None)
        elif kind == "samples" and rig.blocks.pages_needed(a, 0) <= rig.blocks.usable_pages:
            first = rig.add(a, 4, n=b)
            for sample in range(1, b):
                rig.add(list(first.prompt_tokens), 4, n=b, sample=sample, first=first)
        elif kind == "abort" and rig.requests:
            rig.scheduler.finish(rig.requests[a % len(rig.requests)], "abort")
        elif kind == "fail" and len(flying) == 1:
            rig.scheduler.abandon(flying.pop(0)[0])
        elif kind == "clear":
            rig.blocks.clear_cache()
        elif kind == "step":
            for _ in range(a):
                advance()
        rig.check()
    for _ in range(2000):
        if not advance():
            break
    assert not rig.scheduler.has_work and all(request.finish_reason is not None for request in rig.requests)
    rig.check_end()


def test_prompts_go_on_when_the_only_decode_waits_for_their_page() -> None:
    """The short request overtakes the long one, then needs a page that only the long one can give back, in a step of decodes alone."""
    rig = Rig(
        num_pages=5, page_size=3, max_num_seqs=2, max_batch_tokens=2, prefix_cache=False, max_context=24, reserve=False, overtake_ms=3.0,
        policy=lambda load: Composition(load.skipped or not load.decodes, 0 if load.skipped else min(load.prompt_tokens, 1)),
    )  # fmt: skip
    rig.add(7, 1)
    rig.add(1, 4)
    for _ in range(100):
        step = rig.scheduler.schedule()
        if step is None:
            break
        rig.scheduler.complete(step, rig.runner.launch(step, {}))
    assert not rig.scheduler.has_work
    rig.check_end()


@pytest.mark.parametrize("policy", ["static", "cost"])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_decision_for_256_requests_is_quick(policy: str, waiting: bool) -> None:
    """The target is 100 us on a free core (bench/schedule_time.py measures it); the bound leaves room for a busy test machine."""
    row = measure(policy, 256, waiting, steps=60)
    assert row["decide_us"]["p50"] < 400
