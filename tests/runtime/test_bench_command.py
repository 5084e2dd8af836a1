"""Step costs measured on an engine, a trace through an engine, and the command that puts the simulator beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runtime.step_costs
from runtime.bench_command import _predict
from runtime.cli import main
from runtime.config import ConfigError
from runtime.costs import StepCosts, table_of
from runtime.engine import Engine
from runtime.outputs import taken
from runtime.request import SamplingParams
from runtime.serve_trace import DeviceClock, cut, prompts_of, serve
from runtime.simulate import Arrival
from runtime.step_costs import _coarse_first, attention_ms, composition, measure_steps
from tkernels._op import reference_ops

TRACE = Path(__file__).resolve().parents[2] / "bench" / "traces" / "azure_llm_2023_conv.csv"
CONFIG: dict[str, Any] = {
    "graph": {"capture_sizes": [1, 4], "max_tokens": 8},
    "compile": {"backend": "eager"},
    "cache": {"num_pages": 60, "page_size": 8},
    "scheduler": {"max_num_seqs": 4, "max_batch_tokens": 32, "max_context": 256},
    "model": {"device": "cpu", "path": "random:tiny"},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with reference_ops():
        yield Engine(config=CONFIG)


def test_measured_steps_give_back_the_costs_that_they_were_made_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose steps cost exactly what the model of costs says: bases, both slopes, all modes."""
    factor = {"eager": 3.0, "piecewise": 2.0, "full": 1.0}
    base = lambda mode, size: factor[mode] * (1.0 + 0.01 * size)
    seen: set[tuple[str, int]] = set()

    def ms(self: Any, mode: str, size: int, decodes: int, chunk: int, context: int) -> float:
        assert mode == "eager" or size >= decodes + chunk
        seen.add((mode, decodes + chunk))
        return base(mode, size) + attention_ms(1e-4, 1e-5, decodes, chunk, context, 256)

    monkeypatch.setattr(runtime.step_costs._Timer, "ms", ms)
    data = measure_steps(engine.runner)
    assert data["kv_ms"] == pytest.approx(1e-4) and data["pair_ms"] == pytest.approx(1e-5)
    table = table_of(json.loads(json.dumps(data)))
    for tokens, prompts, mode, rows in ((1, False, "full", 1), (3, False, "full", 4), (8, True, "full", 8), (20, True, "eager", 20)):
        cost = table.step(tokens, prompts)
        assert (cost.mode, cost.rows) == (mode, rows) and cost.ms == pytest.approx(base(mode, rows))
    assert {("eager", 1), ("eager", 32), ("piecewise", 4), ("full", 8)} <= seen
    assert table.num_pages == 60
    assert [check["ms"] for check in data["check"]] == pytest.approx([check["table_ms"] for check in data["check"]])


def test_steps_are_really_timed(engine: Engine) -> None:
    said: list[tuple[int, int, str]] = []
    data = measure_steps(engine.runner, lambda *each: said.append(each), point_ms=1.0)
    for kind, captured in (("decode", {1, 4}), ("mixed", {4, 8})):
        rows = {row["size"]: row for row in data[kind]}
        assert captured <= set(rows)
        assert all(rows[size]["full_ms"] > 0 and rows[size]["piecewise_ms"] > 0 for size in captured)
    assert [row["size"] for row in data["mixed"]][-1] == 32, "steps above the largest graph run eager, up to the largest step"
    assert all(row["eager_ms"] > 0 for row in data["decode"])
    assert said[0][0] == 0 and said[-1][0] == said[-1][1]
    assert engine.stats()["modes"]["step_sizes"] == {}, "timing counts no steps"


def test_steps_longer_than_a_context_are_timed_as_several_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ms(self: Any, mode: str, size: int, decodes: int, chunk: int, context: int) -> float:
        asked.append((decodes, chunk))
        lengths = (self.runner.batch(decodes, chunk, context)["cu_seqlens_q"].diff()[decodes:]).tolist()
        return 1.0 + 1e-5 * sum(each * (min(context, 256 - each) + each / 2) for each in lengths)

    monkeypatch.setattr(engine.runner, "max_batch_tokens", 600)
    monkeypatch.setattr(engine.runner, "bound", lambda longest: 1 if longest == 1 else 32)
    monkeypatch.setattr(runtime.step_costs._Timer, "ms", ms)
    data = measure_steps(engine.runner)
    assert (1, 599) in asked, "three prompts of at most 256 tokens, and the one decode that may run beside them"
    assert data["pair_ms"] == pytest.approx(1e-5)
    assert [row["eager_ms"] for row in data["mixed"] if row["size"] > 256] == pytest.approx([1.0] * 3, abs=1e-4)


def test_a_budget_leaves_sizes_out_evenly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def ms(self: Any, mode: str, size: int, decodes: int, chunk: int, context: int) -> float:
        now[0] += 1.0
        return 1.0

    monkeypatch.setattr(runtime.step_costs._Timer, "ms", ms)
    monkeypatch.setattr(runtime.step_costs.time, "perf_counter", lambda: now[0])
    data = measure_steps(engine.runner, budget_s=19.0)
    assert data["not_timed"] > 0 and (data["decode"][0]["size"], data["decode"][-1]["size"]) == (1, 4)
    assert (data["mixed"][0]["size"], data["mixed"][-1]["size"]) == (2, 32)
    assert data["captured"]["decode"] == {"full": [1, 4], "piecewise": [1, 4]}
    least = measure_steps(engine.runner, budget_s=1e-9)
    assert [[row["size"] for row in least[kind]] for kind in ("decode", "mixed")] == [[1, 4], [2, 32]]
    assert table_of(least, captured=least["captured"]).step(3, False).ms > 0, "enough for a table"
    with pytest.raises(ValueError, match="budget_s: expected 0 or more seconds, got -1"):
        measure_steps(engine.runner, budget_s=-1)
    assert [size for _, size in _coarse_first("decode", list(range(9)))] == [0, 8, 4, 2, 6, 1, 3, 5, 7]


def test_a_forced_mode_gives_the_same_tokens(engine: Engine) -> None:
    arguments = engine.runner.batch(3, 0)
    graphs = engine.runner.steps.captured(max_query_len=1)
    assert set(graphs) == {("full", 1), ("full", 4), ("piecewise", 1), ("piecewise", 4)}
    tokens = []
    for mode, size in (("eager", 3), ("full", 4), ("piecewise", 4)):
        tokens.append(taken(engine.runner.steps.run_as(mode, size, **arguments)[0]).clone())
    assert all(torch.equal(tokens[0], each) for each in tokens)
    with pytest.raises(ValueError, match="nothing was captured for the host values"):
        engine.runner.steps.run_as("full", 4, **{**arguments, "max_query_len": 3})


def test_composition_has_both_kinds_of_tokens() -> None:
    assert [composition(size, 256, 99) for size in (1, 2, 8, 99)] == [(0, 1), (1, 1), (4, 4), (16, 83)]
    assert composition(100, 4, 100) == (3, 97) and composition(100, 4, 40) == (1, 99)


def test_a_trace_is_cut_and_scaled() -> None:
    arrivals = [Arrival(0.0, 100, 10, "a", 80), Arrival(2.0, 3, 1), Arrival(9.0, 5, 5)]
    assert cut(arrivals, seconds=0, rate=1, scale=1) == arrivals
    assert cut(arrivals, seconds=1, rate=4, scale=0.1) == [Arrival(0.0, 10, 1, "a", 8), Arrival(2.0, 1, 1)]


def test_prompts_share_within_a_group_only() -> None:
    first, second, other = prompts_of([Arrival(0, 9, 1, "a", 6), Arrival(0, 8, 1, "a", 6), Arrival(0, 9, 1, "b", 6)], 512)
    assert [len(each) for each in (first, second, other)] == [9, 8, 9]
    assert first[:6] == second[:6] != other[:6] and first[6:8] != second[6:]
    assert max(first + second + other) < 512


def test_every_request_of_a_trace_gets_its_tokens(engine: Engine) -> None:
    arrivals = [Arrival(0.001 * i, 3 + 7 * i, 1 + i % 5) for i in range(12)] + [Arrival(0.02, 300, 2)]
    done: list[tuple[int, int, str]] = []
    outcome = serve(engine, arrivals, progress=lambda *each: done.append(each))
    report = outcome.report()
    assert (report["requests"], report["refused"]) == (12, 1), "the last one does not fit the context"
    assert outcome.generated_tokens == sum(arrival.generated for arrival in arrivals[:12])
    assert outcome.prompt_tokens == sum(arrival.prompt for arrival in arrivals[:12]) and len(outcome.ttft) == 12
    assert len(outcome.itl) == outcome.generated_tokens - 12 and min(outcome.ttft) > 0 and min(outcome.itl) > 0
    assert sum(report["tokens_by_mode"].values()) == pytest.approx(1.0) and sum(outcome.steps_by_mode.values()) == outcome.steps
    ran = sum(size * count for size, count in outcome.step_sizes.items())
    assert ran == sum(outcome.tokens_by_mode.values()) >= outcome.prompt_tokens
    assert not engine.has_work and engine.scheduler.blocks.num_available == 59
    assert done[-1][:2] == (12, 13)


def test_open_loop_waits_for_the_clock(engine: Engine) -> None:
    outcome = serve(engine, [Arrival(0.0, 4, 1), Arrival(0.4, 4, 1)], rate=2.0)
    assert outcome.seconds >= 0.2 and len(outcome.ttft) == 2


def test_costs_are_not_changed_under_running_requests(engine: Engine) -> None:
    table = engine.scheduler.table
    assert table is not None
    answer = engine.submit([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="under way"):
        engine.use_costs(table)
    engine.abort(answer)
    engine.use_costs(table)
    assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_idle_share_is_the_time_between_steps_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of 9 ms of device time; 1 ms between the first two; the engine has no work before the third."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    arena = SimpleNamespace(send=lambda: None)
    original = arena.send

    def launch(step: float) -> str:
        now[0] += step  # the host prepares while the device has nothing to do
        arena.send()
        now[0] += 9.0
        return "launched"

    runner = SimpleNamespace(
        launch=launch, device="cuda", steps=SimpleNamespace(_steps=SimpleNamespace(keys={"key": SimpleNamespace(arena=arena)}))
    )
    clock = DeviceClock(SimpleNamespace(runner=runner))  # type: ignore[arg-type]
    assert runner.launch(5.0) == "launched"
    runner.launch(1.0)
    clock.rest()
    now[0] += 1000.0
    runner.launch(3.0)
    assert clock.idle_share() == pytest.approx(1.0 / (1.0 + 18.0))
    runner.launch, arena.send = launch, original


def test_a_staged_step_begins_when_its_inputs_are_sent(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host prepares before that is no time of the step: else a host that is too slow would never show as idle time."""
    recorded: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.number = len(recorded)
            recorded.append(0)

        def record(self) -> None:
            recorded[self.number] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    before = engine.counts()["modes"]["steps"]["eager"].copy()
    clock = DeviceClock(engine)
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5))
    clock.detach()
    eager = sum(engine.counts()["modes"]["steps"]["eager"].values()) - sum(before.values())
    begins, ends = recorded[::2], recorded[1::2]
    assert set(ends) == {1} and begins.count(1) == eager and begins.count(2) == len(begins) - eager
    assert "launch" not in vars(engine.runner), "nothing stays behind"


def test_what_serves_a_step_is_what_the_dispatcher_says(engine: Engine) -> None:
    engine.runner.steps._dispatcher.table.ms.update({("max_query_len=1", "full", 1): 1e-6})  # type: ignore[union-attr]
    engine.runner.steps._dispatcher.changed()  # type: ignore[union-attr]
    assert engine.runner.pick(1, False) == ("full", 1)
    for decodes, chunk in ((1, 0), (3, 0), (2, 2), (0, 8), (0, 20)):
        said = engine.explain(decodes, chunk)
        assert engine.runner.pick(decodes + chunk, chunk > 0) == (said.mode, said.size)
    before = engine.counts()["modes"]["step_sizes"]
    engine.runner.pick(3, False)
    assert engine.counts()["modes"]["step_sizes"] == before, "asking counts no step"


def test_bench_prints_engine_and_simulator_and_writes_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picked: list[list[bool]] = []

    def predict(engine: Engine, config: Any, table: StepCosts, *more: Any) -> dict[str, Any]:
        steps = [(n, prompts) for n in range(1, 33) for prompts in (False, True) if prompts or n <= 4]
        picked.append([table.step(*step)[1:] == engine.runner.pick(*step) for step in steps])
        return _predict(engine, config, table, *more)

    monkeypatch.setattr("runtime.bench_command._predict", predict)
    config, costs, report = tmp_path / "engine.toml", tmp_path / "costs.json", tmp_path / "report.json"
    sections = {name: "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items()) for name, section in CONFIG.items()}
    config.write_text("\n".join(f"[{name}]\n{text}" for name, text in sections.items()))
    with reference_ops():
        assert main(["plan", "--config", str(config), "--json", str(costs)]) == 0
        assert "check: 1 decodes + 0 prompt tokens" in capsys.readouterr().out
        table = json.loads(costs.read_text())
        table["decode"][0] |= {"full_ms": 1e3, "piecewise_ms": 1e3, "eager_ms": 1e3}  # by this table alone one token would be run as four
        costs.write_text(json.dumps(table))
        common = ["bench", "--config", str(config), "--trace", str(TRACE)]
        options = ["--scale", "0.02", "--requests", "8", "--rate", "20", "30", "--costs", str(costs), "--json", str(report)]
        code = main([*common, *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    for words in ("engine", "simulator", "goodput", "tokens by mode", "median time between tokens: the simulator says"):
        assert words in captured.out
    assert [all(each) for each in picked] == [True, True], "the simulator pads as the engine does"
    data = json.loads(report.read_text())
    assert [run["rate"] for run in data["runs"]] == [20.0, 30.0]
    for run in data["runs"]:
        assert run["report"]["requests"] == run["simulated"]["requests"] == 8
        assert run["report"].keys() == run["simulated"].keys()
        assert 0 < run["host"]["decide_us"]["p50"] <= run["host"]["step_us"]["p50"]
    assert (data["pages"], data["model"]) == (60, "random:tiny")
    for wrong, message in (
        (["--seconds", "-1"], "--seconds"),
        (["--scale", "0"], "--scale"),
        (["--costs", "no.json"], "--costs no.json"),
        (["--parallel.tensor", "2"], "parallel.tensor: bench takes one GPU"),
    ):
        assert main([*common, *wrong]) in (1, 2)
        assert message in capsys.readouterr().err


def test_random_models_are_named() -> None:
    with pytest.raises(ConfigError, match="expected random: and one of llama-8b, llama-1b, tiny, got 'random:nothing'"):
        Engine(config={"model": {"path": "random:nothing"}})
