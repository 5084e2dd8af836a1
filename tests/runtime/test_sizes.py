"""Which sizes get graphs: explicit lists, and the planner against brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sizes import capture_sizes, default_histogram, interval_weights, load_histogram, padding_share, plan_sizes


def sizes(configured: object, **limits: int) -> list[int]:
    return capture_sizes(configured, **{"max_tokens": 64, "max_num_seqs": 40, **limits})[0]  # type: ignore[arg-type]


def test_b045_lists_are_clipped_deduplicated_and_sorted() -> None:
    assert sizes([8, 8, 2]) == [2, 8, 40, 64]
    chosen, remark = capture_sizes([96, 8], max_tokens=64, max_num_seqs=40)
    assert chosen == [8, 40, 64] and "[96]" in remark and "64" in remark


def test_b045_empty_list_turns_graphs_off_and_says_so() -> None:
    chosen, remark = capture_sizes([], max_tokens=64, max_num_seqs=40)
    assert chosen == [] and "graphs are off" in remark


def test_b045_list_that_is_empty_after_clipping_leaves_the_maximum_and_the_request_limit_and_says_so() -> None:
    chosen, remark = capture_sizes([96, 80], max_tokens=64, max_num_seqs=40)
    assert chosen == [40, 64] and "[80, 96] left out" in remark


@pytest.mark.parametrize("bad", [[-1], [0], [True], [2.5], ["8"]])
def test_b045_nonsense_is_refused(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="capture_sizes: expected token counts of at least 1"):
        sizes(bad)


def test_b045_planned_sizes_stay_within_a_small_maximum() -> None:
    assert sizes("auto", max_tokens=2, max_num_seqs=2) == [1, 2]


@pytest.mark.parametrize("configured", ["auto", [1, 2, 4, 8]])
def test_b046_request_limit_and_maximum_are_captured(configured: object) -> None:
    assert {11, 64} <= set(sizes(configured, max_num_seqs=11, max_graphs=4))


def test_request_limit_above_the_maximum_adds_nothing() -> None:
    assert sizes([4], max_tokens=8, max_num_seqs=40) == [4, 8]


def cost_of(histogram: dict[int, float], chosen: list[int]) -> float:
    return sum(weight * min(s for s in chosen if s >= n) for n, weight in histogram.items() if n <= chosen[-1])


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(1, 9), st.integers(0, 5), min_size=1),
    st.integers(1, 4),
    st.sets(st.integers(1, 8), max_size=2),
)
def test_planner_is_optimal(histogram: dict[int, float], count: int, required: set[int]) -> None:
    """Against every subset of the sizes."""
    chosen = plan_sizes(histogram, count, max_tokens=8, required=required)
    must = required | {8}
    room = max(count, len(must))
    assert must <= set(chosen) and len(chosen) <= room and chosen == sorted(set(chosen))
    best = min(
        cost_of(histogram, sorted(must | set(extra)))
        for k in range(room - len(must) + 1)
        for extra in itertools.combinations(range(1, 9), k)
    )
    assert cost_of(histogram, chosen) == pytest.approx(best)


def test_planner_follows_the_cost_of_a_step() -> None:
    """When steps up to 8 rows cost the same, sizes below 8 are wasted."""
    histogram = {n: 1.0 for n in range(1, 33)}
    flat_below_8 = plan_sizes(histogram, 5, max_tokens=32, cost=lambda n: max(n, 8))
    assert min(flat_below_8) == 8 and min(plan_sizes(histogram, 5, max_tokens=32)) < 8


def test_planner_is_fast_enough_for_start_up() -> None:
    assert len(plan_sizes(default_histogram(2048), 32, max_tokens=2048)) == 32


def test_histogram_files(tmp_path: Path) -> None:
    as_json, as_lines = tmp_path / "h.json", tmp_path / "h.txt"
    as_json.write_text(json.dumps({"3": 2, "8": 1}))
    as_lines.write_text("3\n8\n3\n")
    assert load_histogram(as_json) == load_histogram(as_lines) == {3: 2.0, 8: 1.0}
    for content in ("", "three", '{"3": "x"}', '{"-3": 1}'):
        as_json.write_text(content)
        with pytest.raises(ValueError, match=r"graph\.histogram"):
            load_histogram(as_json)
    with pytest.raises(ValueError, match="cannot be read"):
        load_histogram(tmp_path / "none")


def test_interval_weights_are_shares_of_the_steps_that_are_served() -> None:
    assert interval_weights({1: 1, 3: 2, 4: 1, 9: 50}, [2, 4]) == {2: 0.25, 4: 0.75}


def test_padding_share_counts_rows() -> None:
    assert padding_share({3: 1, 4: 1, 9: 100}, [4]) == pytest.approx(1 / 8)
    assert padding_share({}, [4]) == 0.0
