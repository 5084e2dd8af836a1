"""The pick is the cheapest legal candidate, and says why."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import warmup
from runtime.costs import StepCosts
from runtime.dispatch import Candidates, Dispatcher, regret
from runtime.measure import CostTable, fingerprint, interleaved_ms
from runtime.plan import PlanRow

KEY = "max_query_len=1"


def test_what_is_far_slower_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, int] = {"slow": 0, "fast": 0, "near": 0}
    took = {"slow": 0.005, "fast": 0.001, "near": 0.0015}
    now = [0.0]

    def run(name: str) -> None:
        calls[name] += 1
        now[0] += took[name]

    monkeypatch.setattr("runtime.measure.time.perf_counter", lambda: now[0])
    ms = interleaved_ms({name: (lambda name=name: run(name)) for name in calls}, torch.device("cpu"), far=2.0)
    assert ms == pytest.approx({name: 1e3 * s for name, s in took.items()})
    assert calls == {"slow": 2, "fast": 8, "near": 8}, "the first call of each is no round"


def dispatcher(costs: dict[tuple[str, int], float | None], eager: dict[int, float] | None = None, **options: Any) -> Dispatcher:
    """Captured (mode, size) with their cost in ms; None: captured and not measured."""
    table = CostTable({})
    table.ms = {(KEY, m, s): ms for (m, s), ms in costs.items() if ms is not None} | {
        (KEY, "eager", s): ms for s, ms in (eager or {}).items()
    }
    made = Dispatcher(table, **options)
    made.keys[KEY] = Candidates({at: {"tokens": at[1], "seqs": min(at[1], 4)} for at in costs})
    return made


def pick(d: Dispatcher, tokens: int, seqs: int = 1) -> tuple[str, int]:
    decision = d.dispatch(KEY, {"tokens": tokens, "seqs": seqs})
    return decision.mode, decision.size


def test_b040_a_larger_full_graph_that_is_cheaper_wins() -> None:
    d = dispatcher({("piecewise", 16): 2.0, ("full", 20): 1.0, ("full", 5): 0.9})
    assert pick(d, 15) == ("full", 20)


def test_within_the_noise_of_a_measurement_the_pick_pads_least() -> None:
    """9 rows at 4.970 ms are not run as 15 because those once took 4.946."""
    costs = {("full", 9): 4.970, ("full", 15): 4.946, ("piecewise", 15): 4.95, ("full", 32): 6.0}
    d = dispatcher(costs)
    decision = d.decide(KEY, {"tokens": 9, "seqs": 1})
    assert (decision.mode, decision.size, decision.ms) == ("full", 9, 4.970)
    assert decision.reason == "within 1% of the cheapest that fits, and pads less"
    reasons = {(a.mode, a.size): a.reason for a in decision.alternatives}
    assert reasons == {("full", 15): "pads more", ("piecewise", 15): "pads more", ("full", 32): "not the cheapest"}
    assert pick(dispatcher(costs | {("full", 15): 4.91}), 9) == ("full", 15), "by more than that it is"
    row = {size: PlanRow("", size, None, None, ms, "", 0) for (mode, size), ms in costs.items() if mode == "full"}
    assert StepCosts(list(row.values()), []).step(9, prompts=False).rows == 9
    row[15] = PlanRow("", 15, None, None, 4.91, "", 0)
    assert StepCosts(list(row.values()), []).step(9, prompts=False).rows == 15


_COST = st.none() | st.sampled_from([1.0, 1.004, 1.008, 1.012, 1.02, 1.5, 3.0])


@given(st.dictionaries(st.integers(1, 12), st.tuples(_COST, _COST, _COST), min_size=1, max_size=6))
def test_the_table_of_the_scheduler_picks_as_the_dispatcher_does(costs: dict[int, tuple[float | None, float | None, float | None]]) -> None:
    """Also where each of a row of costs is within the noise of the next, and the last is not within that of the first."""
    d = dispatcher(
        {(m, s): ms for s, row in costs.items() for m, ms in zip(("full", "piecewise"), row[1:], strict=True) if ms is not None},
        {s: row[0] for s, row in costs.items() if row[0] is not None},
    )
    table = StepCosts([PlanRow("", s, eager, piecewise, full, "", 0) for s, (eager, full, piecewise) in costs.items()], [])
    last = max((s for s, row in costs.items() if row[0] is not None), default=12)  # past it the table lets eager costs rise
    for n in range(1, last + 1):
        assert table.step(n, prompts=False)[1:] == pick(d, n), n


def test_costs_of_steps_that_another_says_what_serves() -> None:
    rows = [PlanRow("", 1, 9.0, None, 5.0, "", 0), PlanRow("", 4, 9.5, 4.5, 4.0, "", 0)]
    table = StepCosts(rows, rows)
    assert table.step(1, False) == (4.0, "full", 4) and table.sizes == [4]
    served = table.served_by(
        lambda tokens, prompts: ("eager", tokens) if tokens == 3 else ("full", tokens) if prompts else ("piecewise", 4)
    )
    assert served.step(1, True) == (5.0, "full", 1) and served.step(1, False) == (4.5, "piecewise", 4)
    assert served.step(3, False) == (pytest.approx(9.0 + 0.5 * 2 / 3), "eager", 3)
    assert served.step(2, True) == (4.0, "full", 2), "not timed: what the rule takes"
    assert served.sizes == [1, 4] and table.sizes == [4] and table.step(1, False).rows == 4


def test_the_nearest_size_wins_where_that_is_asked_for() -> None:
    d = dispatcher({("piecewise", 16): 2.0, ("full", 20): 1.0, ("full", 8): 9.0, ("piecewise", 8): 1.0}, {1: 0.1}, nearest=True)
    assert [pick(d, n) for n in (1, 8, 9, 16, 17, 21)] == [
        ("full", 8), ("full", 8), ("piecewise", 16), ("piecewise", 16), ("full", 20), ("eager", 21),
    ]  # fmt: skip
    text = str(d.decide(KEY, {"tokens": 9, "seqs": 1}))
    assert text.startswith('piecewise at size 16, 7 padding rows, 2.000 ms: graph.pick = "nearest": the smallest that fits')
    assert 'not eager at 9 (0.100 ms): graph.pick = "nearest"' in text


def test_what_was_not_captured_for_one_reason_is_one_line() -> None:
    d = dispatcher({("full", 8): 1.0}, {1: 2.0})
    d.keys[KEY].dropped.update({("piecewise", 8): "no op", ("piecewise", 2): "no op", ("full", 2): "no memory"})
    lines = str(d.decide(KEY, {"tokens": 3, "seqs": 1})).splitlines()
    assert lines[-2:] == ["  not piecewise at 2, 8: not captured: no op", "  not full at 2: not captured: no memory"]


def test_no_cost_is_claimed_for_an_eager_step_larger_than_any_that_was_timed() -> None:
    """The cost of 103 tokens had been said to be that of 4."""
    d = dispatcher({("full", 4): 1.0}, {1: 2.0, 4: 3.0})
    decision = d.decide(KEY, {"tokens": 103, "seqs": 1})
    assert decision.mode == "eager" and decision.ms is None
    assert str(decision).startswith("eager at size 103, 0 padding rows, not measured: no captured size holds 103 tokens (largest: 4)")
    assert dispatcher({("full", 4): 9.0}, {1: 2.0, 4: 3.0}).decide(KEY, {"tokens": 4, "seqs": 1}).ms == 3.0


def test_b040_without_costs_a_full_graph_that_fits_comes_first() -> None:
    d = dispatcher({(m, s): None for m, sizes in (("full", (5, 10, 20)), ("piecewise", (1, 2, 4, 8, 16))) for s in sizes})
    for n in range(1, 21):
        assert pick(d, n) == ("full", min(s for s in (5, 10, 20) if s >= n))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.tuples(st.sampled_from(["full", "piecewise"]), st.integers(1, 12)), st.floats(0.1, 9.0), min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 12), st.floats(0.1, 9.0), max_size=3),
)
def test_b040_every_size_gets_the_cheapest_legal_candidate(costs: dict[tuple[str, int], float], eager: dict[int, float]) -> None:
    d = dispatcher(costs, eager)
    for n in range(1, 15):
        mode, size = pick(d, n)
        fitting = [ms for (_, s), ms in costs.items() if s >= n]
        eager_ms = d.eager_ms(KEY, n)
        if not fitting:
            assert mode == "eager"
        elif mode == "eager":
            assert eager_ms is not None and eager_ms <= min(fitting)
        else:
            least = min(fitting)
            assert costs[mode, size] * 0.99 <= least and (eager_ms is None or eager_ms > least)
            assert all(s >= size for (_, s), ms in costs.items() if s >= n and ms * 0.99 <= least), "the one that pads least"


def test_eager_within_the_noise_of_a_graph_is_not_taken_for_cheaper() -> None:
    costs: dict[tuple[str, int], float | None] = {("full", 9): 4.970, ("full", 15): 4.946}
    for eager, mode in ((4.96, "full"), (4.946, "eager")):
        decision = dispatcher(costs, {9: eager}).decide(KEY, {"tokens": 9, "seqs": 1})
        assert decision.mode == mode and ("no graph that fits is cheaper" in decision.reason) == (mode == "eager")


def test_a_graph_that_does_not_beat_eager_is_not_used() -> None:
    d = dispatcher({("full", 8): 2.0}, {8: 1.0})
    assert pick(d, 8) == ("eager", 8)
    assert d.stats()["eager_reasons"] == {"no graph that fits is cheaper": 1}


def test_eager_cost_lies_between_the_measured_sizes() -> None:
    d = dispatcher({}, {4: 1.0, 8: 3.0})
    assert [d.eager_ms(KEY, n) for n in (1, 4, 6, 8, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("mode", ["full", "piecewise", "eager"])
def test_pinned_mode_is_kept_even_if_dearer(mode: str) -> None:
    d = dispatcher({("full", 8): 3.0, ("piecewise", 8): 2.0}, {8: 1.0}, mode=mode)
    assert pick(d, 5)[0] == mode


def test_another_named_size_must_fit_too() -> None:
    d = dispatcher({("full", 8): 1.0})  # holds 4 seqs
    assert pick(d, 5, seqs=4) == ("full", 8)
    assert pick(d, 5, seqs=5)[0] == "eager"
    assert "5 seqs, it holds 4" in str(d.decide(KEY, {"tokens": 5, "seqs": 5}))


def test_unknown_key_runs_eager_and_is_counted() -> None:
    d = dispatcher({("full", 8): 1.0})
    decision = d.dispatch("max_query_len=3", {"tokens": 5, "seqs": 1})
    assert decision.mode == "eager" and "max_query_len=3" in decision.reason
    assert d.stats()["unknown_keys"] == {"max_query_len=3": 1}


def test_b046_above_the_largest_size_eager_is_a_decision_with_a_reason() -> None:
    d = dispatcher({("full", 8): 1.0})
    assert "no captured size holds 9 tokens (largest: 8)" in str(d.decide(KEY, {"tokens": 9, "seqs": 1}))


def test_exact_candidates_take_no_padding() -> None:
    d = dispatcher({("full", 8): 1.0, ("full", 4): 1.0})
    d.keys[KEY].exact = True
    assert pick(d, 8, 4) == ("full", 8) and pick(d, 7, 4)[0] == "eager"
    assert pick(d, 8, 3)[0] == "eager", "padding in another named size is padding too"
    assert "no graph of exactly 8 tokens, 3 seqs" in str(d.decide(KEY, {"tokens": 8, "seqs": 3}))


def test_explanation_lists_every_alternative_with_its_reason() -> None:
    d = dispatcher({("full", 2): 0.5, ("full", 8): 1.0, ("piecewise", 8): 2.0}, {8: 5.0})
    d.keys[KEY].dropped["piecewise", 2] = "out of memory"
    decision = d.decide(KEY, {"tokens": 3, "seqs": 1})
    assert (decision.mode, decision.size, decision.padding, decision.ms) == ("full", 8, 5, 1.0)
    reasons = {(a.mode, a.size): a.reason for a in decision.alternatives}
    assert reasons == {
        ("eager", 3): "slower",
        ("full", 2): "too small: 3 tokens, it holds 2",
        ("piecewise", 8): "not the cheapest",
        ("piecewise", 2): "not captured: out of memory",
    }


def test_stats_count_steps_and_padding() -> None:
    d = dispatcher({("full", 8): 1.0})
    for n in (5, 8, 9):
        pick(d, n)
    stats = d.stats()
    assert stats["steps"] == {"full": {8: 2}, "piecewise": {}, "eager": {9: 1}}
    assert stats["padding_rows"] == 3 and stats["rows"] == 5 + 8 + 9 + 3 and stats["step_sizes"] == {5: 1, 8: 1, 9: 1}


def test_decisions_are_made_anew_after_a_change() -> None:
    d = dispatcher({("full", 8): 1.0})
    assert pick(d, 8) == ("full", 8)
    d.table.ms[KEY, "eager", 8] = 0.1
    d.changed()
    assert pick(d, 8) == ("eager", 8)


def test_cost_table_is_kept_across_starts(tmp_path: Path) -> None:
    valid_for = fingerprint(torch.device("cpu"), "model a")
    table = CostTable(valid_for, {(KEY, "full", 8): 1.25, ("-", "eager", 4): 0.5}, {(KEY, "full", 8): 4096})
    table.save(tmp_path / "costs.json")
    loaded, reason = CostTable.load(tmp_path / "costs.json", valid_for)
    assert loaded is not None and not reason
    assert loaded.ms == table.ms and loaded.nbytes[KEY, "full", 8] == 4096


def test_stale_cost_table_is_ignored_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    CostTable(fingerprint(torch.device("cpu"), "model a")).save(path)
    for changed in ("model", "torch", "device"):
        valid_for = fingerprint(torch.device("cpu"), "model a") | {changed: "another"}
        loaded, reason = CostTable.load(path, valid_for)
        assert loaded is None and changed in reason and "another" in reason
    for broken in ("", "{}", "[]", '{"valid_for": {}, "rows": [{"key": 1}]}'):
        path.write_text(broken)
        loaded, reason = CostTable.load(path, {})
        assert loaded is None and "not a cost table" in reason
    assert "no such file" in CostTable.load(tmp_path / "none.json", {})[1]


def test_timing_interleaves_and_takes_the_median() -> None:
    calls: list[str] = []
    times = interleaved_ms({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, torch.device("cpu"), repeats=3)
    assert calls == ["a", "b"] * 4 and set(times) == {"a", "b"} and all(ms >= 0 for ms in times.values())


def test_regret_compares_the_pick_with_the_best() -> None:
    rows = regret({4: ("full", 8)}, {4: {("full", 8): 1.1, ("eager", 4): 1.0}})
    assert rows[0]["best"] == ("eager", 4) and rows[0]["regret"] == pytest.approx(0.1)


def by_context() -> Dispatcher:
    """Full wins at short contexts, piecewise at long ones, eager at very long ones."""
    d = dispatcher({("full", 8): 1.0, ("piecewise", 8): 2.0}, {8: 9.0})
    d.table.set_contexts([1024, 128, 8192, 65536])
    d.table.ms = {(KEY, "full", 8): 1.0, (KEY, "piecewise", 8): 2.0, (KEY, "eager", 8): 9.0}
    d.table.other_contexts[128] = {(KEY, "full", 8): 0.5, (KEY, "piecewise", 8): 1.5}
    d.table.other_contexts[8192] = {(KEY, "full", 8): 6.0, (KEY, "piecewise", 8): 4.0}
    d.table.other_contexts[65536] = {(KEY, "full", 8): 60.0, (KEY, "piecewise", 8): 40.0, (KEY, "eager", 8): 39.0}
    return d


@pytest.mark.parametrize(
    ("context", "mode", "ms", "nearest"),
    [
        (None, "full", 1.0, 1024), (0, "full", 0.5, 128), (200, "full", 0.5, 128), (400, "full", 1.0, 1024), (2800, "full", 1.0, 1024),
        (3000, "piecewise", 4.0, 8192), (100_000, "eager", 39.0, 65536),
    ],
)  # fmt: skip
def test_the_pick_follows_the_context_of_the_step(context: int | None, mode: str, ms: float, nearest: int) -> None:
    d = by_context()
    for decision in (d.dispatch(KEY, {"tokens": 8, "seqs": 1}, context=context), d.decide(KEY, {"tokens": 8, "seqs": 1}, context=context)):
        assert (decision.mode, decision.ms, decision.context) == (mode, ms, nearest)
        assert f"{ms:.3f} ms at a context of {nearest}" in str(decision)


def test_eager_that_was_not_timed_at_a_context_costs_what_that_adds_to_graphs() -> None:
    d = by_context()
    assert d.eager_ms(KEY, 8, 8192) == 9.0 + 2.0 and d.eager_ms(KEY, 8, 65536) == 39.0 and d.eager_ms(KEY, 8, 128) == 9.0 - 0.5
    costs = [a.ms for a in d.decide(KEY, {"tokens": 8, "seqs": 1}, context=8192).alternatives if a.mode == "eager"]
    assert costs == [11.0]


def test_what_a_context_adds_it_adds_for_live_rows() -> None:
    """217 rows at a context of 8192, measured: eager 9.9 ms at 1024 and not timed at 8192, a graph of 233 full of rows 15.4 ms, which
    with 217 of them takes 14.5. Eager took 16.4."""
    d = dispatcher({("full", 233): 2.1, ("full", 211): 2.0}, {211: 9.8, 233: 10.0})
    d.table.set_contexts([1024, 8192])
    d.table.ms = {(KEY, "full", 211): 2.0, (KEY, "full", 233): 2.1, (KEY, "eager", 211): 9.8, (KEY, "eager", 233): 10.0}
    d.table.other_contexts[8192] = {(KEY, "full", 211): 13.9, (KEY, "full", 233): 15.4}
    decision = d.decide(KEY, {"tokens": 217, "seqs": 1}, context=8192)
    assert (decision.mode, decision.size) == ("full", 233) and decision.ms == pytest.approx(2.1 + 13.3 * 217 / 233)
    assert next(a.ms for a in decision.alternatives if a.mode == "eager") > 21.0
    assert d.decide(KEY, {"tokens": 217, "seqs": 1}).ms == 2.1, "at the shortest context nothing says what the context adds"


@pytest.mark.parametrize(
    ("usual", "context", "graph_ms", "timed"),
    [
        ((22.5, 22.4), 128, 7.0, True),  # as fast as the graph, most of it attention: without that it may still be
        ((22.5, 22.4), 8192, 60.0, True),
        ((4.0, 10.0), 128, 2.0, False),  # the host holds it back
        ((4.0, 10.0), 8192, 4.5, False),
        ((4.0, 10.0), 8192, 5.5, True),  # attention may hide behind the host's work
    ],
)  # fmt: skip
def test_eager_is_timed_at_a_context_where_it_could_be_the_cheapest(
    usual: tuple[float, float], context: int, graph_ms: float, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {1024: dict(zip(("full", "eager"), usual, strict=True)), context: {"full": graph_ms, "eager": 1.0}}
    runs_at = lambda steps, key, size, at=1024: {mode: (lambda ms=ms: ms) for mode, ms in costs[at].items()}
    monkeypatch.setattr(warmup, "runs_at", runs_at)
    monkeypatch.setattr(warmup, "interleaved_ms", lambda runs, device, **options: {mode: run() for mode, run in runs.items()})
    d = dispatcher({}, {})
    d.table.set_contexts([1024, context])
    key = type("Key", (), {"text": KEY, "written": {}, "captured": {}})()  # can be hashed
    warmup.measure_all(SimpleNamespace(keys={(): key}, replays=0, device=torch.device("cpu")), d, {(): [8]})  # type: ignore[arg-type]
    assert d.table.ms == {(KEY, mode, 8): ms for mode, ms in costs[1024].items()}
    assert ((KEY, "eager", 8) in d.table.other_contexts[context]) == timed


def test_costs_of_contexts_are_kept_across_starts(tmp_path: Path) -> None:
    table = by_context().table
    table.save(tmp_path / "costs.json")
    loaded, _ = CostTable.load(tmp_path / "costs.json", {})
    assert loaded is not None
    assert loaded.context == 1024 and loaded.ms == table.ms and loaded.other_contexts == table.other_contexts
    loaded.set_contexts([1024, 8192])  # what is no longer asked for is dropped, what is left needs no new measurement
    assert loaded.other_contexts == {8192: table.other_contexts[8192]} and loaded.ms == table.ms
    loaded.set_contexts([128])
    assert loaded.ms == {} and loaded.other_contexts == {} and loaded.context == 128


def test_preparation_of_a_call_is_not_timed() -> None:
    order: list[str] = []
    times = interleaved_ms({"a": lambda: order.append("run")}, torch.device("cpu"), repeats=2, prepare=lambda name: time.sleep(0.02))
    assert len(order) == 3 and times["a"] < 10
