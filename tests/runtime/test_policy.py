"""Chunks chosen by measured cost."""

from __future__ import annotations

import pytest

from runtime.plan import PlanRow
from runtime.policy import CheapestPerToken, fill_budget


def plan(costs: dict[int, tuple[float | None, float | None, float | None]]) -> CheapestPerToken:
    """size -> (eager, piecewise, full) ms"""
    return CheapestPerToken([PlanRow("", size, *ms, "", 0) for size, ms in costs.items()])


# A launch-bound GPU: eager costs 10 ms whatever the size, graphs follow the work.
GPU = {8: (10.0, 2.0, 1.5), 64: (10.0, 2.5, 2.0), 128: (10.0, 3.0, 2.8), 256: (10.0, 4.0, 4.5), 512: (10.0, 6.0, None)}


def test_static_takes_all() -> None:
    assert fill_budget(3, 100) == 100


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
    assert plan(GPU)(decodes, prompt) == chosen


def test_cost_of_a_padded_step_is_the_cheapest_size_that_holds_it() -> None:
    policy = plan(GPU)
    assert policy.ms(5) == 1.5 and policy.ms(9) == 2.0 and policy.ms(512) == 6.0
    assert policy.ms(600) == 10.0
    assert plan({8: (10.0, 5.0, None), 16: (10.0, 3.0, None)}).ms(8) == 3.0, "a larger size that is faster serves smaller steps too"


def test_eager_grows_along_its_last_slope() -> None:
    policy = plan({4: (4.0, None, None), 8: (6.0, None, None)})
    assert policy.ms(6) == 5.0 and policy.ms(8) == 6.0 and policy.ms(16) == 10.0


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    policy = plan({4: (6.0, None, None), 8: (5.9, None, None)})
    assert policy.ms(1000) == 5.9


@pytest.mark.parametrize("costs", [{}, {4: (None, None, None)}, {4: (1.0, None, None)}])
def test_without_measurements_it_fills(costs: dict) -> None:
    assert plan(costs)(2, 50) == 50


def test_every_choice_is_possible() -> None:
    policy = plan(GPU)
    for decodes in range(0, 70, 3):
        for prompt in (1, 2, 7, 60, 500, 600):
            assert 1 <= policy(decodes, prompt) <= prompt
