"""The simulator: what it counts, that it keeps to the engine's rules, and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.simulate_policies import run
from runtime.admission import AnswerLengths, peak_tokens
from runtime.cli import main
from runtime.config import RuntimeConfig
from runtime.costs import StepCosts, load_table
from runtime.plan import PlanRow
from runtime.roofline import GPUS, SHAPES, pages_that_fit, step_ms
from runtime.scheduler import Scheduler
from runtime.simulate import Arrival, make_scheduler, read_trace, simulate

TRACE = Path(__file__).resolve().parents[2] / "bench" / "traces" / "azure_llm_2023_conv.csv"
ROWS = [PlanRow("", size, 10.0, 2.0, 1.0, "", 0) for size in (4, 8)]
EAGER = [PlanRow("", size, 10.0, None, None, "", 0) for size in (1, 64)]


def save_rows(file: Path, device: str, rows: dict[str, list[PlanRow]], **more: object) -> None:
    kinds = {kind: [{name: value for name, value in vars(row).items() if value is not None} for row in each] for kind, each in rows.items()}
    file.write_text(json.dumps({"device": device, **kinds, **more}))


def scheduler(table: StepCosts, policy: str = "static", num_pages: int = 100, **limits) -> Scheduler:
    config = RuntimeConfig.load({"scheduler": {"policy": policy, "max_num_seqs": 4, "max_batch_tokens": 64, **limits}})
    return make_scheduler(config, table, num_pages=num_pages, max_context=512)


def test_one_request_by_hand() -> None:
    """A prompt of 20 tokens runs eager at 10 ms; then three decodes, each padded to 4 rows, at 1 ms."""
    table = StepCosts(ROWS, EAGER)
    outcome = simulate([Arrival(0.0, 20, 4)], scheduler(table), table)
    assert outcome.ttft == [10.0] and outcome.itl == pytest.approx([1.0, 1.0, 1.0]) and outcome.seconds == pytest.approx(0.013)
    report = outcome.report()
    assert (report["steps"], report["requests"], report["goodput"]) == (4, 1, 1.0)
    assert report["tokens_by_mode"] == {"full": 3 / 23, "piecewise": 0.0, "eager": 20 / 23}
    assert report["padding"] == 9 / 12
    assert report["step_sizes"] == {1: 3, 20: 1}


def test_arrivals_are_open_loop_and_rate_divides_their_times() -> None:
    table = StepCosts(ROWS, EAGER)
    arrivals = [Arrival(0.0, 5, 1), Arrival(1.0, 5, 1), Arrival(1.005, 5, 1)]
    slow, fast = (simulate(arrivals, scheduler(table), table, rate=rate) for rate in (1.0, 100.0))
    assert slow.ttft == pytest.approx([10.0, 10.0, 15.0]), "the third waits 5 ms for the second's step"
    assert fast.seconds == pytest.approx(0.03) and fast.ttft == pytest.approx([10.0, 10.0, 19.95])


def test_goodput_needs_both_the_first_token_and_the_gaps_in_time() -> None:
    slow_start = StepCosts(ROWS, [PlanRow("", 1, 501.0, None, None, "", 0), PlanRow("", 2, 501.0, None, None, "", 0)])
    slow_gaps = StepCosts([PlanRow("", 4, 51.0, None, None, "", 0)], EAGER)
    for table, good in ((slow_start, 0.0), (slow_gaps, 0.0), (StepCosts(ROWS, EAGER), 1.0)):
        assert simulate([Arrival(0.0, 20, 4)], scheduler(table), table).report()["goodput"] == good


def test_a_step_in_flight_lets_an_arrival_wait_for_one_more() -> None:
    """By hand: the first request's prompt runs to 10 ms, its decodes of 1 ms follow; the second arrives at 10.5 ms, when the decode that
    ends at 11 ms runs and the one that ends at 12 ms has been composed. Each ended request costs a step more that nobody sees."""
    table = StepCosts(ROWS, EAGER)
    arrivals = [Arrival(0.0, 20, 3), Arrival(0.0105, 20, 1)]
    alone, overlapped = (simulate(arrivals, scheduler(table), table, depth=depth) for depth in (1, 2))
    assert sorted(alone.ttft) == pytest.approx([10.0, 10.5]) and sorted(overlapped.ttft) == pytest.approx([10.0, 11.5])
    assert overlapped.generated_tokens == alone.generated_tokens == 4 and overlapped.steps > alone.steps
    assert overlapped.finished == 2


def test_context_and_pairs_cost_what_the_table_says() -> None:
    table = StepCosts(ROWS, EAGER, kv_ms=0.5, pair_ms=0.25)
    outcome = simulate([Arrival(0.0, 20, 2)], scheduler(table), table)
    assert outcome.ttft == [10.0 + 0.25 * 200] and outcome.itl == [1.0 + 0.5 * 21]


def test_requests_that_can_never_fit_are_refused_and_count_as_not_good() -> None:
    table = StepCosts(ROWS, EAGER)
    outcome = simulate([Arrival(0.0, 400, 2), Arrival(0.0, 20, 2)], scheduler(table, num_pages=5), table)
    assert (outcome.refused, outcome.finished, outcome.report()["goodput"]) == (1, 1, 0.5)


def test_requests_of_a_group_share_pages_and_others_do_not() -> None:
    table = StepCosts(ROWS, EAGER)
    arrivals = [Arrival(0.0, 50, 2, "a", 40), Arrival(1.0, 60, 2, "a", 40), Arrival(2.0, 60, 2, "b", 40), Arrival(3.0, 60, 2)]
    assert simulate(arrivals, scheduler(table), table).cached_tokens == 32


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 150), st.integers(1, 20)).map(lambda each: Arrival(*each)), max_size=25),
    policy=st.sampled_from(["cost", "static"]),
    targets=st.sampled_from([{}, {"itl_ms": 3.0}, {"itl_ms": 12.0, "ttft_ms": 40.0}]),
    depth=st.integers(1, 2),
    num_pages=st.integers(20, 60),
)
@example(  # the last token of the second prompt is left for a step of its own, which the third one must not come before
    arrivals=[Arrival(0.0, 1, 1), Arrival(0.078125, 129, 1), Arrival(0.09375, 1, 1)], policy="cost", targets={}, depth=1, num_pages=20
)
def test_every_request_ends_and_none_waits_behind_later_ones(arrivals, policy, targets, num_pages, depth) -> None:
    """First tokens come in order of arrival, whatever the policy, the targets, and how scarce pages are; so nobody starves."""
    table = StepCosts(ROWS, [PlanRow("", size, 4.0 + size / 8, 1.0 + size / 8, None, "", 0) for size in (1, 16, 32, 64)])
    arrivals = sorted(arrivals, key=lambda arrival: arrival.second)
    made = scheduler(table, policy, num_pages, **targets)
    order: list[int] = []
    complete = made.complete

    def noting(step, tokens):
        grown = complete(step, tokens)
        order.extend(sorted(request.number for request in grown if request.num_generated == 1))
        return grown

    made.complete = noting  # type: ignore[method-assign]
    outcome = simulate(arrivals, made, table, depth=depth)
    assert outcome.finished == len(arrivals) and outcome.generated_tokens == sum(arrival.generated for arrival in arrivals)
    if made.overtake_ms == 0:  # else see test_no_prompt_is_overtaken_for_ever
        assert order == sorted(order)
    assert made.blocks.num_available == made.blocks.usable_pages


def test_the_cost_policy_against_the_static_one_on_the_roofline() -> None:
    """What the project promises of it, on a short piece of the trace at a rate that the static policy does not sustain."""
    arrivals = read_trace(TRACE)[:250]
    static, cost = (run(policy, arrivals, 6.0) for policy in ("static", "cost"))
    assert cost["goodput"] >= 1.15 * static["goodput"]
    assert cost["itl_ms"]["p99"] <= 0.6 * static["itl_ms"]["p99"]
    assert cost["ttft_ms"]["p50"] <= static["ttft_ms"]["p50"]
    assert cost["padding"] <= 0.01 and cost["tokens_by_mode"]["eager"] <= 0.005


def test_costs_of_sizes_that_were_not_measured_lie_on_straight_lines(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    rows = [PlanRow("", size, 50.0, 2.0 + size, 1.0 + size, "", 0) for size in (4, 8, 16)] + [PlanRow("", 64, 90.0, None, None, "", 0)]
    save_rows(file, "some GPU", {"decode": rows, "mixed": rows})
    table = load_table(file, captured={kind: {"piecewise": [2, 6, 16, 32], "full": [2, 6, 16, 32]} for kind in ("decode", "mixed")})
    assert [table.step(tokens, False) for tokens in (1, 5, 6, 9)] == [
        (5.0, "full", 2),
        (7.0, "full", 6),
        (7.0, "full", 6),
        (17.0, "full", 16),
    ]
    assert table.step(17, False)[1:] == ("eager", 17), "no graph was measured that large"
    plain = load_table(file, "fixed", {"decode": {"full": [8]}, "mixed": {"piecewise": [8]}})
    assert plain.step(3, False) == (9.0, "full", 8) and plain.step(3, True) == (10.0, "piecewise", 8) and plain.step(9, True)[1] == "eager"


def test_the_trace_is_read() -> None:
    arrivals = read_trace(TRACE)
    assert len(arrivals) == 19366
    assert arrivals[0] == Arrival(0.0, 374, 44) and arrivals[1].second == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ContextTokens, GeneratedTokens, TIMESTAMP; found"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens; found TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,1\n1,many,3\n", "line 3: invalid literal"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,3\n", "line 2: TIMESTAMP: expected a time, got 'nan'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,-1,1\n", "line 2: ContextTokens: expected 0 to 16777216, got -1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,99999999999\n", "line 2: GeneratedTokens: expected 0 to 16777216, got 99999999999"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens,SharedTokens\n0,1,1,-4\n", "line 2: SharedTokens: expected at least 0, got -4"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(file)


def test_measured_costs_go_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    save_rows(file, "some GPU", {"decode": ROWS, "mixed": EAGER})
    table = load_table(file)
    assert table.source == "measured: some GPU" and table.step(5, False) == (1.0, "full", 8) and table.ms(30, True) == 10.0
    for text, message in {
        "{": "not JSON",
        "{}": 'expected "decode" and "mixed"',
        '{"decode": [], "mixed": []}': "at least one row",
        '{"decode": [{"size": 4}], "mixed": []}': "decode row",
        '{"decode": [{"size": 4, "full_ms": -1}], "mixed": []}': "costs must be above 0",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_table(file)
    with pytest.raises(ValueError, match="cannot be read"):
        load_table(tmp_path / "nowhere.json")


def test_roofline_follows_bytes_then_operations_and_graphs_spare_launches() -> None:
    gpu, shape = GPUS["h200"], SHAPES["llama-8b"]
    assert shape.layer_params + 2 * shape.hidden * shape.vocab == pytest.approx(8.03e9, rel=0.01), "Llama-3-8B's parameters"
    assert shape.kv_bytes == 131072
    one, many = (step_ms(gpu, shape, tokens, "full", 1) for tokens in (1, 32))
    assert one == many, "bound by the weights' bytes"
    assert step_ms(gpu, shape, 2048, "full", 1) > 1.9 * step_ms(gpu, shape, 1024, "full", 1) - 1, "bound by operations"
    modes = [step_ms(gpu, shape, 1, mode, 1) for mode in ("full", "piecewise", "eager")]
    assert modes == sorted(modes) and modes[0] < modes[2]
    assert 30_000 < pages_that_fit(gpu, shape, 16) < 60_000


def test_answer_lengths_are_remembered_and_forgotten() -> None:
    lengths = AnswerLengths()
    assert lengths.remaining(5, 100) == 100 == lengths.most(100)
    for length in (10, 20, 30):
        lengths.add(length)
    assert [lengths.remaining(generated, 100) for generated in (0, 10, 25, 30)] == [20, 15, 5, 100]
    assert lengths.remaining(0, 7) == 7 and lengths.most(100) == 30
    for _ in range(256):
        lengths.add(4)
    assert lengths.remaining(0, 100) == 4 and lengths.most(100) == 4


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=8))
def test_peak_is_the_largest_of_all_moments(requests: list[tuple[int, int]]) -> None:
    held = [sum(now + step for now, coming in requests if coming >= step) for step in range(31)]
    assert peak_tokens(requests) == max(held)


def test_command_prints_the_report_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "run.png"
    common = ["simulate", "--trace", str(TRACE), "--requests", "40", "--rate", "4"]
    code = main([*common, "--json", str(report), "--picture", str(picture), "--scheduler.itl_ms", "50"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    for words in ("roofline (not measured)", "goodput", "time to first token", "padding", "preemptions", "prefix cache", "tokens by mode"):
        assert words in captured.out
    assert json.loads(report.read_text())["report"]["requests"] == 40
    assert picture.read_bytes().startswith(b"\x89PNG")
    costs = tmp_path / "costs.json"
    save_rows(costs, "some GPU", {"decode": ROWS, "mixed": EAGER})
    assert main([*common, "--costs", str(costs)]) == 2
    assert f"cache.num_pages: {costs} does not say how many pages" in capsys.readouterr().err
    assert main([*common, "--costs", str(costs), "--cache.num_pages", "4000"]) == 0
    assert "measured: some GPU" in capsys.readouterr().out
    save_rows(costs, "some GPU", {"decode": ROWS, "mixed": EAGER}, num_pages=4000)
    assert main([*common, "--costs", str(costs)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace"),
        (["--trace", "nowhere.csv"], "--trace nowhere.csv: cannot be read"),
        (["--trace", str(TRACE), "--rate", "0"], "--rate: expected a number above 0"),
        (["--trace", str(TRACE), "--rate", "nan"], "--rate: expected a number above 0"),
        (["--trace", str(TRACE), "--requests", "-1"], "--requests: expected at least 0"),
        (["--trace", str(TRACE), "--costs", "nowhere.json"], "--costs nowhere.json: cannot be read"),
        (["--trace", str(TRACE), "--gpu", "abacus"], "abacus"),
    ],
)
def test_command_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err
