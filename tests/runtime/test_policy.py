"""Chunks chosen by measured cost."""

from __future__ import annotations

import pytest

from runtime.costs import StepCosts
from runtime.plan import PlanRow
from runtime.policy import CheapestPerToken, Composition, Load, fill_budget

Costs = dict[int, tuple[float | None, float | None, float | None]]  # size -> (eager, piecewise, full) ms


def rows(costs: Costs) -> list[PlanRow]:
    return [PlanRow("", size, *ms, "", 0) for size, ms in costs.items()]


def table(costs: Costs, decode: Costs | None = None, **more) -> StepCosts:
    return StepCosts(rows(costs if decode is None else decode), rows(costs), **more)


# A launch-bound GPU: eager costs 10 ms whatever the size, graphs follow the work.
GPU = {8: (10.0, 2.0, 1.5), 64: (10.0, 2.5, 2.0), 128: (10.0, 3.0, 2.8), 256: (10.0, 4.0, 4.5), 512: (10.0, 6.0, None)}


def test_static_takes_all() -> None:
    assert fill_budget(Load(3, 0, 100)) == Composition(True, 100)


@pytest.mark.parametrize(
    ("decodes", "prompt", "chosen"),
    [
        (8, 504, 504),  # lands on 512 as it is
        (8, 512, 504),  # 520 tokens would run eager at 10 ms; 512 in a graph take 6
        (8, 120, 120),  # exactly 128
        (8, 130, 120),  # 138 tokens pad to 256 for 4 ms, 29 us each; 128 take 2.8, 22 us each
        (8, 240, 240),  # 248 tokens padded to 256 are cheaper each than 128
        (0, 4000, 4000),  # one long eager step at 10 ms: 2.5 us a token, cheaper than any graph
        (0, 3, 3),  # below every captured size
        (64, 1, 1),  # one token must come along
    ],
)
def test_the_cheapest_step_per_token(decodes: int, prompt: int, chosen: int) -> None:
    assert CheapestPerToken(table(GPU))(Load(decodes, 0, prompt)) == Composition(True, chosen)


def test_decode_keeps_its_full_graph_where_a_chunk_alone_is_cheaper() -> None:
    """Together 612 tokens have no graph; apart they are a full graph of 128 and a captured chunk of 512."""
    policy = CheapestPerToken(table({512: (30.0, 6.0, None), 1024: (60.0, None, None)}, decode={128: (10.0, None, 1.0)}))
    assert policy(Load(100, 0, 512)) == Composition(False, 512)
    assert policy(Load(100, 0, 512, skipped=True)) == Composition(True, 0), "and then the decodes alone"


LINEAR: Costs = {size: (1.0 + size / 10,) * 3 for size in (1, 16, 32, 64, 128, 256, 512)}


@pytest.mark.parametrize("itl_ms", [10.0, 20.0, 60.0])
def test_a_target_for_the_time_between_tokens_bounds_the_step(itl_ms: float) -> None:
    costs = table(LINEAR)
    chosen = CheapestPerToken(costs, itl_ms=itl_ms)(Load(4, 0, 508, backlog=508))
    assert chosen.decode and 0 < costs.ms(4 + chosen.prompt_tokens, True) <= itl_ms
    assert CheapestPerToken(costs)(Load(4, 0, 508)).prompt_tokens == 508, "without a target nothing is held back"


def test_prompts_in_a_hurry_get_longer_chunks() -> None:
    policy = CheapestPerToken(table(LINEAR), itl_ms=60.0, ttft_ms=500.0)
    calm = policy(Load(4, 0, 508, backlog=508)).prompt_tokens
    late = policy(Load(4, 0, 508, backlog=508, oldest_ms=400.0)).prompt_tokens
    assert calm < late


def test_prompts_go_on_where_decode_alone_misses_the_target() -> None:
    policy = CheapestPerToken(table(LINEAR), itl_ms=5.0)
    assert policy(Load(200, 0, 300, backlog=300)).prompt_tokens > 0


def test_context_lengthens_steps_and_so_shortens_chunks() -> None:
    policy = CheapestPerToken(table(LINEAR, kv_ms=1e-4), itl_ms=40.0)
    short, long = (policy(Load(8, context, 500, backlog=9999)).prompt_tokens for context in (0, 200_000))
    assert 0 < long < short


def test_the_fixed_rule_serves_by_the_nearest_size_whatever_it_costs() -> None:
    costs: Costs = {8: (1.0, 5.0, None), 16: (1.0, 2.0, 9.0)}
    fixed, cheapest = table(costs, rule="fixed"), table(costs)
    assert fixed.step(5, True) == (5.0, "piecewise", 8) and fixed.step(9, True) == (9.0, "full", 16)
    assert cheapest.step(5, True) == (1.0, "eager", 5)
    assert fixed.step(17, True).mode == "eager"


def test_cost_of_a_padded_step_is_the_cheapest_size_that_holds_it() -> None:
    costs = table(GPU)
    assert costs.ms(5, True) == 1.5 and costs.ms(9, True) == 2.0 and costs.ms(512, True) == 6.0
    assert costs.ms(600, True) == 10.0
    assert table({8: (10.0, 5.0, None), 16: (10.0, 3.0, None)}).ms(8, True) == 3.0, "a larger size that is faster serves smaller steps"


def test_eager_grows_along_its_last_slope() -> None:
    costs = table({4: (4.0, None, None), 8: (6.0, None, None)})
    assert costs.ms(6, True) == 5.0 and costs.ms(8, True) == 6.0 and costs.ms(16, True) == 10.0


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    assert table({4: (6.0, None, None), 8: (5.9, None, None)}).ms(1000, True) == 5.9


@pytest.mark.parametrize("costs", [{}, {4: (None, None, None)}, {4: (1.0, None, None)}])
def test_without_measurements_it_fills(costs: Costs) -> None:
    assert CheapestPerToken(table(costs))(Load(2, 0, 50)) == Composition(True, 50)


def test_prompts_go_on_where_only_decode_was_measured() -> None:
    policy = CheapestPerToken(table({}, {1: (1.0, None, 0.5)}), itl_ms=50)
    assert policy(Load(1, 10, 100)) == Composition(True, 100)


def test_every_choice_is_possible() -> None:
    for targets in ({}, {"itl_ms": 3.0}, {"itl_ms": 3.0, "ttft_ms": 9.0}):
        policy = CheapestPerToken(table(GPU), **targets)
        for decodes in range(0, 70, 3):
            for prompt in (1, 2, 7, 60, 500, 600):
                chosen = policy(Load(decodes, 0, prompt, backlog=prompt))
                assert 1 <= chosen.prompt_tokens <= prompt or policy(Load(decodes, 0, prompt, backlog=prompt, skipped=True)).decode
