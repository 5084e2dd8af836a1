"""Planned sizes on the step sizes of a real trace: hardly any padding, where the usual list in steps of 8 pads a lot."""

from __future__ import annotations

import pytest

from bench.plan_sizes import USUAL, read_trace, step_sizes
from runtime.sizes import padding_share, plan_sizes


@pytest.fixture(scope="module")
def arrivals() -> list:
    return [a for a in read_trace() if a.second < 600]  # ten minutes of the hour; bench/plan_sizes.py takes all of it


@pytest.mark.parametrize(("rate", "at_most"), [(0.5, 0.01), (1.0, 0.01), (3.0, None)])
def test_planned_sizes_on_the_trace(arrivals: list, rate: float, at_most: float | None) -> None:
    histogram = step_sizes(arrivals, rate)
    planned = plan_sizes(histogram, 32, max_tokens=512, required=[256])
    padding, optimum = padding_share(histogram, planned), padding_share(histogram, plan_sizes(histogram, 32, max_tokens=512))
    assert len(planned) == 32 and padding <= optimum + 0.001
    assert at_most is None or padding <= at_most
    assert padding_share(histogram, USUAL) > 3 * padding


def test_simulation_serves_every_token_of_the_trace(arrivals: list) -> None:
    few = arrivals[:200]
    histogram = step_sizes(few, 1.0)
    tokens = sum(n * count for n, count in histogram.items())
    assert tokens == sum(a.prompt + a.generated - 1 for a in few)  # the last token of a request is never run


def test_trace_has_its_licence_beside_it() -> None:
    from bench.plan_sizes import TRACE

    assert "CC BY 4.0" in (TRACE.parent / "README.md").read_text()
