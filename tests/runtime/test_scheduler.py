"""The scheduler on a toy model whose answers name their owner."""

from __future__ import annotations

import pytest

from runtime.blocks import BlockManager
from runtime.policy import Composition, Load
from runtime.request import RequestError, SamplingParams
from runtime.scheduler import Scheduler
from tests.runtime.scheduler_rig import Rig
from tests.runtime.toy import answer


@pytest.mark.parametrize("name", ["max_num_seqs", "max_batch_tokens", "max_context"])
@pytest.mark.parametrize("value", [0, -1, None, True])
def test_b160_limits_that_would_schedule_nothing_are_refused(name: str, value: object) -> None:
    limits = {"max_num_seqs": 2, "max_batch_tokens": 8, "max_context": 16, name: value}
    with pytest.raises(ValueError, match=f"{name}: expected a positive integer, got {value}"):
        Scheduler(BlockManager(8, 4), **limits)


@pytest.mark.parametrize("field", ["max_tokens"])
@pytest.mark.parametrize("value", [0, -1, None])
def test_b160_sampling_limits(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_fewer_tokens_than_requests_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs: 9 is above max_batch_tokens 8"):
        Scheduler(BlockManager(8, 4), max_num_seqs=9, max_batch_tokens=8, max_context=16)


def test_decodes_come_first_then_prompts_in_order_of_arrival() -> None:
    rig = Rig(max_batch_tokens=8)
    rig.add(3)
    rig.step()
    rig.add(12)
    rig.add(5)
    step = rig.step()
    assert step is not None
    assert [(chunk.request.number, chunk.num_tokens) for chunk in step.chunks] == [(0, 1), (1, 7)]
    step = rig.step()
    assert step is not None
    assert [(chunk.request.number, chunk.num_tokens) for chunk in step.chunks] == [(0, 1), (1, 5), (2, 2)]
    rig.run()
    rig.check_end()


def test_no_step_passes_the_token_budget_or_the_request_limit() -> None:
    rig = Rig(max_batch_tokens=6, max_num_seqs=3)
    for length in (1, 9, 20, 6, 7, 1, 1):
        rig.add(length, max_tokens=5)
    for step in rig.run():
        assert step.num_tokens <= 6 and len(step.chunks) <= 3
    rig.check_end()


def test_b038_the_last_chunk_of_one_token_samples_once() -> None:
    rig = Rig(max_batch_tokens=5, max_num_seqs=4)
    rig.add(1, max_tokens=8)
    rig.step()
    long = rig.add(9, max_tokens=3)  # chunks of 4, 4 and 1 beside one decode
    seen = []
    while long.finish_reason is None:
        step = rig.step()
        assert step is not None
        seen += [(chunk.num_tokens, chunk.samples) for chunk in step.chunks if chunk.request is long]
    assert seen == [(4, False), (4, False), (1, True), (1, True), (1, True)]
    assert long.generated == answer(list(long.prompt_tokens), 3)


def test_b153_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(num_pages=4, page_size=4)
    for length in (13, 16, 20):
        with pytest.raises(RequestError, match=rf"{length} tokens and needs \d pages of 4; the cache has 3 \(cache.num_pages = 4"):
            rig.add(length)
    small = rig.add(12, max_tokens=1)  # all three usable pages
    tall = rig.add(8, max_tokens=50)  # the prompt fits, the answer does not
    rig.run()
    rig.check_end()
    assert small.finish_reason == "length" and small.num_generated == 1
    assert tall.finish_reason == "length" and tall.num_generated == 5, "12 slots and one token that is never run"


def test_b081_answers_stop_at_the_context_limit() -> None:
    rig = Rig(page_size=4, max_context=16)
    with pytest.raises(RequestError, match="the prompt has 17 tokens, the context holds 16"):
        rig.add(17)
    cases = [
        (rig.add(15, max_tokens=50), 2),
        (rig.add(16, max_tokens=50), 1),
        (rig.add(16, max_tokens=1), 1),
        (rig.add(3, max_tokens=4), 4),
    ]
    rig.run()
    rig.check_end()
    for request, count in cases:
        assert (request.num_generated, request.finish_reason) == (count, "length")


def test_an_empty_prompt_is_refused_and_others_go_on() -> None:
    rig = Rig()
    with pytest.raises(RequestError, match="the prompt is empty"):
        rig.add([])
    rig.add(2)
    rig.run()
    rig.check_end()


@pytest.mark.parametrize("at", [0, 2, 3, 4])
def test_b155_preemption_loses_no_token(at: int) -> None:
    """Two prompts of two pages in a pool of four, the second preempted when it has ``at`` tokens of its answer."""
    rig = Rig(num_pages=5, page_size=4, max_context=16, max_batch_tokens=32)
    first, second = rig.add(8 - at, max_tokens=4 + at), rig.add(8 - at, max_tokens=4 + at)
    lost_at = []
    while rig.scheduler.has_work:
        before = second.preemptions
        rig.step()
        if second.preemptions > before:
            lost_at.append(second.num_generated)
    rig.check_end()
    assert lost_at == [at + 1], "at + 1: the token that needs the third page has been sampled"
    assert first.num_generated == second.num_generated == 4 + at


def test_b080_a_preempted_request_returns_at_a_page_boundary() -> None:
    rig = Rig(num_pages=4, page_size=4, max_context=12, prefix_cache=False)
    first, second = rig.add(3, max_tokens=9), rig.add(4, max_tokens=8)
    rig.run()
    rig.check_end()
    assert rig.scheduler.preemptions > 0 and first.preemptions == 0, "the latest arrival is preempted"
    assert (first.num_generated, second.num_generated) == (9, 8)


def test_the_earliest_request_is_never_preempted() -> None:
    rig = Rig(num_pages=6, page_size=2, max_context=10)
    for _ in range(6):
        rig.add(2, max_tokens=8)
    rig.run()
    rig.check_end()
    assert rig.requests[0].preemptions == 0 and rig.scheduler.preemptions > 0


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_b146_a_prompt_in_the_cache_runs_at_least_its_last_token(length: int) -> None:
    rig = Rig(page_size=4)
    prompt = list(range(length))
    first = rig.add(prompt)
    rig.run()
    again = rig.add(prompt)
    step = rig.step()
    assert step is not None
    assert again.num_cached == (length - 1) // 4 * 4
    assert step.chunks[0].start == again.num_cached and step.chunks[0].num_tokens == length - again.num_cached >= 1
    rig.run()
    assert again.generated == first.generated


def test_b150_pages_are_found_only_after_they_were_written() -> None:
    rig = Rig(page_size=4)
    first = rig.add(list(range(9)))
    step = rig.scheduler.schedule()
    assert step is not None
    rig.scheduler.finish(first, "abort")
    rig.scheduler.abandon(step)  # it never ran
    again = rig.add(list(range(9)))
    rig.run()  # the toy runner fails if an unwritten page is read
    assert again.num_cached == 0 and again.generated == answer(list(range(9)), 4)


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    rig = Rig(max_num_seqs=1)
    failing, waiting = rig.add(4), rig.add(4)
    step = rig.scheduler.schedule()
    assert step is not None
    assert rig.scheduler.abandon(step) == [failing]
    rig.run()
    rig.check_end()
    assert (failing.finish_reason, waiting.finish_reason) == ("error", "length")
    assert failing.num_registered == 0


def test_salts_share_no_pages() -> None:
    rig = Rig(page_size=4)
    prompt = list(range(12))
    rig.add(prompt, salt=b"a")
    rig.run()
    other, same = rig.add(prompt, salt=b"b"), rig.add(prompt, salt=b"a")
    rig.run()
    assert (other.num_cached, same.num_cached) == (0, 8)


def test_stop_token_ends_the_answer() -> None:
    rig = Rig()
    request = rig.add(2, max_tokens=10, eos_tokens=frozenset({4}))
    rig.run()
    assert (request.generated, request.finish_reason) == ([2, 3, 4], "stop")


def test_ignored_stop_token_does_not() -> None:
    rig = Rig()
    request = rig.add(2, max_tokens=5, ignore_eos=True, eos_tokens=frozenset({3}))
    rig.run()
    assert (request.generated, request.finish_reason) == ([2, 3, 4, 5, 6], "length")


def test_b158_pages_of_an_aborted_request_wait_for_the_step_in_flight() -> None:
    rig = Rig(num_pages=5, page_size=4)
    first = rig.add(8, max_tokens=8)
    step = rig.scheduler.schedule()
    assert step is not None
    held = list(first.pages)
    rig.scheduler.finish(first, "abort")
    second = rig.add(16, max_tokens=1)
    assert rig.scheduler.schedule() is None, "four pages are needed, two are still being written"
    assert first.pages == held
    rig.scheduler.complete(step, rig.runner.launch(step))
    assert first.pages == [] and first.generated == []
    rig.run()
    assert second.generated == answer(list(second.prompt_tokens), 1)


def test_a_policy_decides_how_many_prompt_tokens_join() -> None:
    asked = []

    def policy(load: Load) -> Composition:
        asked.append((load.decodes, load.prompt_tokens))
        return Composition(True, min(load.prompt_tokens, 4 - load.decodes % 4))

    rig = Rig(policy=policy, max_batch_tokens=16)
    rig.add(10, max_tokens=3)
    rig.add(3, max_tokens=3)
    assert [step.num_tokens for step in rig.run()][:4] == [4, 4, 4, 2]
    assert asked[0] == (0, 13)
    rig.check_end()


def test_a_policy_may_leave_the_decodes_out_of_a_step_but_not_of_two() -> None:
    rig = Rig(policy=lambda load: Composition(load.skipped or not load.decodes, min(load.prompt_tokens, 4)), max_batch_tokens=16)
    first = rig.add(3, max_tokens=12)
    rig.step()
    rig.add(17)
    assert [[chunk.request is first for chunk in step.chunks] for step in rig.run()][:4] == [[False], [True, False], [False], [True, False]]
    rig.check_end()
    rig = Rig(policy=lambda load: Composition(not load.decodes, min(load.prompt_tokens, 4)), max_batch_tokens=16)
    rig.add(3, max_tokens=12)
    rig.step()
    rig.add(17)
    rig.step()
    with pytest.raises(AssertionError, match="twice in a row"):
        rig.step()


def test_decodes_run_when_the_prompt_that_was_to_run_alone_does_not_fit() -> None:
    rig = Rig(
        policy=lambda load: Composition(load.skipped or not load.decodes, load.prompt_tokens), num_pages=4, page_size=4, max_context=12
    )
    first = rig.add(9, max_tokens=3)
    rig.step()
    second = rig.add(9, max_tokens=3)
    rig.run()
    rig.check_end()
    assert (first.num_generated, second.num_generated) == (3, 3)


@pytest.mark.parametrize("reserve", [False, True])
def test_admission_by_the_peak_needs_no_preemption(reserve: bool) -> None:
    """Answers of one length: after the first ones have ended, how long the others will be is known."""
    rig = Rig(num_pages=30, page_size=4, max_context=64, reserve=reserve)
    for _ in range(30):
        rig.add(8, max_tokens=24)
    rig.run()
    rig.check_end()
    assert (rig.scheduler.preemptions == 0) == reserve


def test_a_first_request_is_admitted_however_long_it_may_become() -> None:
    rig = Rig(num_pages=5, page_size=4, max_context=64, reserve=True)
    rig.add(8, max_tokens=500)
    rig.add(3, max_tokens=500)
    rig.run()
    rig.check_end()
    assert rig.scheduler.preemptions == 0


def test_a_short_prompt_overtakes_a_long_one_that_is_in_time() -> None:
    for overtake_ms, order in ((0.0, [0, 1, 2]), (100.0, [2, 1, 0])):
        rig = Rig(max_batch_tokens=8, overtake_ms=overtake_ms)
        for length in (40, 16, 3):
            rig.add(length, max_tokens=2)
        firsts: list[int] = []
        for step in rig.run():
            firsts += [chunk.request.number for chunk in step.chunks if chunk.samples and chunk.num_generated == 0]
        assert firsts == order
        rig.check_end()


def test_no_prompt_is_overtaken_for_ever() -> None:
    """Two short prompts arrive at every step and would take all of it: the long one has its turn once it has waited long enough."""
    rig = Rig(max_batch_tokens=8, max_num_seqs=8, max_context=64, overtake_ms=10.0)
    long = rig.add(40, max_tokens=1)
    for step in range(60):
        if long.num_generated:
            break
        for _ in range(2):
            rig.add(4, max_tokens=1)
        rig.step()
        assert long.num_scheduled == 0 or step >= 10, "it is in time, and shorter ones are there"
    assert long.num_generated == 1 and step <= 10 + 40 // 8 + 2
    rig.run()
    rig.check_end()


def test_equal_inputs_give_equal_steps() -> None:
    def trace() -> list[list[tuple[int, int, int]]]:
        rig = Rig(num_pages=9, page_size=2, max_batch_tokens=7, max_num_seqs=4)
        for length in (3, 11, 2, 7, 7, 1):
            rig.add(length, max_tokens=6)
        return [[(c.request.number, c.start, c.num_tokens) for c in step.chunks] for step in rig.run()]

    assert trace() == trace()
