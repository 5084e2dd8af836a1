"""bench/report.py on made-up results: tables, staleness, pictures, comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report, serving
from bench import report as report_module

ROOF = {"gb_per_s": 4000.0, "tflop_per_s": 700.0}


def entry(name: str, case: str, peer: str, us: float, **info: Any) -> dict[str, Any]:
    return {
        "fullname": f"bench/test_elementwise.py::test_{name}[{peer}-{case}]",
        "stats": {"median": us * 1e-6},
        "extra_info": {"case": case, "peer": peer, "us": us, "error": 0.0, **info},
    }


def results(path: Path, when: str, *entries: dict[str, Any], gpu: str = "NVIDIA H200", **machine: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"gpu": gpu, "torch": "2.11", "triton": "3.6", "driver": "580", "commit": "abc", "peers": {}, **machine}
    path.write_text(json.dumps({"machine_info": facts, "datetime": when, "benchmarks": list(entries)}))
    return path


def test_serving_rows_compare_policies_and_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(itl: float, rate: float, **more: float) -> dict[str, Any]:
        cuts = {"p50": itl, "p99": 2 * itl}
        return {
            "goodput": 0.9, "generated_tokens_per_s": rate, "ttft_ms": cuts, "itl_ms": cuts, "padding": 0.01,
            "tokens_by_mode": {"eager": 0.5}, **more,
        }  # fmt: skip

    for policy, itl in (("cost", 8.0), ("static", 20.0)):
        run = {
            "rate": 2.0, "report": report(itl, 100.0, idle_between_steps=0.03), "simulated": report(0.8 * itl, 105.0),
            "host": {"decide_us": {"p50": 80.0}},
        }  # fmt: skip
        check = {"decodes": 1, "chunk": 0, "context": 9, "ms": 2.0, "table_ms": 2.1}
        (tmp_path / f"serving_{policy}.json").write_text(json.dumps({"runs": [run], "check": [check]}))
    (tmp_path / "machine.json").write_text(json.dumps({"gpu": "NVIDIA H200"}))
    assert serving.main(["--work", str(tmp_path), "--gather", "--out", str(tmp_path / "serving_h200.json")]) == 0
    said = capsys.readouterr().out
    for words in (
        "cost at 2x, throughput: simulator / engine 1.050: agrees", "median ITL: simulator / engine 0.800: MISSED",
        "idle between steps 3.00%: MISSED", "goodput 90.0% / 90.0%, ITL p99 0.40, TTFT p50 0.40", "the table says 1.050 of it",
    ):  # fmt: skip
        assert words in said
    text = report_module.script_table("serving_h200", tmp_path)
    assert "| 2x | cost | engine | 90.0% | 100 | 8.0 | 16.0 | 8.00 | 16.0 | 1.00% | 50.00% | 3.00% | 80 |" in text
    assert "| 2x | static | simulator |" in text and "Microseconds" not in text and "NVIDIA H200" in text


def test_rows_of_starts(tmp_path: Path) -> None:
    times = {"call_us": 52.4, "adds_us": 46.4, "staged_adds_us": 48.5, "sweep_us": 16.3, "per_piece_us": 6.02}
    rows = [
        {
            "what": "start-up",
            "mode": "full",
            "graph_mib": 90.0,
            "graph_only_s": 1.86,
            "batch 1": times,
            "batch 8": times | {"call_us": 54.3},
        },
        {"what": "regret", "skipped": "no time"},
    ]
    (tmp_path / "some.json").write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "command": "python some.py", "rows": rows}))
    lines = report.script_table("some", tmp_path).splitlines()
    assert lines[3] == "| full | 8 | 54.30 | 46.40 | 48.50 | 16.30 | 6.02 | 90.00 | 1.86 |" and "regret" not in lines[4]


def test_rows_of_regret_and_of_random_steps(tmp_path: Path) -> None:
    """None is a time, so no unit is said; a part that ran out of time has no line."""
    regret = {
        "what": "regret", "context": 8192, "key": "max_query_len=1", "sizes": 96, "share_within_2_percent": 0.96875,
        "picks": {"full": 93, "piecewise": 0, "eager": 3},
        "worst": {"tokens": 217, "pick": ["eager", 217], "best": ["full", 233], "regret": 0.1265},
    }  # fmt: skip
    for name, rows in {
        "regret": [{"what": "warm-up with contexts"}, regret, {"what": "regret", "skipped": "no time"}],
        "random": [{"what": "random steps", "seconds": 67.76, "modes": {"full": 5, "eager": 2}}],
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "command": "python some.py", "rows": rows}))
    lines = report.script_table("regret", tmp_path).splitlines()
    assert lines[2] == "| 8192 | decode | 96 | 93, 0, 3 | 96.9% | 12.7% at 217: eager 217, best full 233 |" and lines[3] == ""
    assert lines[-1].startswith("Units stand in the header. NVIDIA H200")
    lines = report.script_table("random", tmp_path).splitlines()
    assert lines[2] == "| random steps | 67.76 | full 5, eager 2 |" and lines[-1].startswith("Units stand in the header. NVIDIA H200")


def test_rows_of_host_times(tmp_path: Path) -> None:
    """Batches that a run had no time for have no line."""
    facts = {"call_us": 30.0, "adds_us": 25.0, "staged_adds_us": 24.5, "sweep_us": 4.25, "per_piece_us": 5.0}
    row = {"what": "host time", "mode": "full", "batch": 8, **facts, "call_parts_us": {"whole": 30.0, "fill": 2.75}}
    rows = [row, {"what": "host time", "skipped": "what comes after batch 8: the time is over"}]
    (tmp_path / "some.json").write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "command": "python some.py", "rows": rows}))
    lines = report.script_table("some", tmp_path).splitlines()
    assert lines[2] == "| full | 8 | 30.00 | 25.00 | 24.50 | 4.25 | 5 | 2.75 |" and lines[3] == ""


def test_rows_of_a_profiled_step(tmp_path: Path) -> None:
    """A column for each batch; what is below 1% everywhere stands together."""
    rows = [
        {"batch": batch, "context": 1024, "pdl": "on", "kernel": name, "grid": grid, "launches": 1.0, "kernel_us": us, "share_us": us}
        for batch, name, grid, us in [
            (1, "linear", [128, 1], 90.0), (1, "sample", [1], 0.25), (1, "gaps", [], 7.0),
            (8, "linear", [128, 1], 95.0), (8, "decode", [264], 15.0), (8, "sample", [1], 0.75), (8, "gaps", [], 8.0),
        ]
    ]  # fmt: skip
    (tmp_path / "some.json").write_text(json.dumps({"machine": {"gpu": "NVIDIA H200"}, "command": "python some.py", "rows": rows}))
    lines = report.script_table("some", tmp_path).splitlines()
    assert lines[0] == "| kernel | grid | batch 1 | batch 8 |"
    assert lines[2:7] == [
        "| linear | 128×1 | 90.00 | 95.00 |", "| decode | 264 | – | 15.00 |", "| others |  | 0.25 | 0.75 |",
        "| all kernels |  | 90.25 | 110.8 |", "| gaps |  | 7 | 8 |",
    ]  # fmt: skip


def test_rows_of_simulated_policies(tmp_path: Path) -> None:
    row = {
        "policy": "cost", "rate": 2.0, "goodput": 0.9875, "generated_tokens_per_s": 1681.4, "ttft_ms": {"p50": 40.6},
        "itl_ms": {"p50": 5.34, "p99": 27.0}, "padding": 0.0195, "tokens_by_mode": {"eager": 0.0}, "mean_running": 17.5,
    }  # fmt: skip
    data = {"machine": {"gpu": "NVIDIA H200"}, "command": "python some.py", "unit": "Simulated", "rows": [row, row | {"rate": 1.0}]}
    (tmp_path / "some.json").write_text(json.dumps(data))
    lines = report.script_table("some", tmp_path).splitlines()
    assert lines[2].startswith("| 1x | cost |") and lines[3] == "| 2x | cost | 98.8% | 1681 | 40.6 | 5.34 | 27.0 | 1.95% | 0.00% | 17.5 |"
    assert "Simulated. NVIDIA H200" in lines[-1]


def test_rows_of_a_script_with_times_by_peer(tmp_path: Path) -> None:
    rows = [
        {"case": "1 x 1024", "us": {"ours": 9.0, "sdpa": 7.9}, "floor_us": 0.94},
        {"case": "mixed", "us": {"ours": 260.8}, "floor_us": 213.3},
    ]
    machine = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "abc"}
    (tmp_path / "some.json").write_text(json.dumps({"machine": machine, "command": "python -m some", "rows": rows}))
    text = report.script_table("some", tmp_path)
    assert "| case | floor_us | ours | sdpa |" in text and "| mixed | 213.3 | 260.8 | – |" in text and "Microseconds" in text


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# x\n\n<!-- results: norm -->\nold\n<!-- /results -->\n\nrest\n")
    roofed = dict(bytes=8e6, gb_per_s=3200.0, percent_of_roof=80.0, roof=ROOF)
    results(
        tmp_path / "bench" / "results" / "elementwise_h200.json", "2026-11-30T10:00:00",
        entry("norm", "1 token", "tkernels", 1.5, **roofed), entry("norm", "1 token", "Liger", 1.7, **roofed),
        entry("norm", "64 tokens", "tkernels", 2500.4, **roofed), peers={"FlashInfer": "absent: not installed"},
    )  # fmt: skip
    return tmp_path


def test_a_kind_without_rows_has_no_table(tmp_path: Path) -> None:
    rows = {"": [], "Cliffs": [{"sweep": "length", "worst": 1.32}]}
    (tmp_path / "kinds.json").write_text(json.dumps({"machine": {}, "command": "made", "rows": rows}))
    assert report.script_table("kinds", tmp_path).startswith("Cliffs\n\n| sweep | worst |\n")


def test_table_has_cases_down_and_peers_across(tree: Path) -> None:
    text = report.table("norm", tree / "bench" / "results")
    assert "|  | tkernels | Liger |" in text
    assert "| 1 token | **1.5 (80%)** | 1.7 (80%) |" in text
    assert "| 64 tokens | **2500 (80%)** | – |" in text
    assert "4.00 TB/s copied, 700 TFLOP/s" in text
    assert "NVIDIA H200, torch 2.11, triton 3.6, driver 580, commit abc, 2026-11-30" in text
    assert "Absent: FlashInfer (not installed)." in text


def test_documents_become_stale_and_are_made_anew(tree: Path) -> None:
    assert report.stale(tree) == ["README.md", "docs/img/roofline_elementwise_nvidia_h200.svg"]
    assert report.write(tree)
    assert report.stale(tree) == []
    text = (tree / "README.md").read_text()
    assert "old" not in text and text.endswith("<!-- /results -->\n\nrest\n") and "**1.5 (80%)**" in text
    results(tree / "bench" / "results" / "later.json", "2026-12-01T10:00:00", entry("norm", "1 token", "tkernels", 1.4))
    # A newer run of that benchmark on that GPU counts; it has no roof, so the picture has nothing to show any more.
    assert report.stale(tree) == ["README.md", "docs/img/roofline_elementwise_nvidia_h200.svg (its results are gone)"]
    report.write(tree)
    assert "**1.4**" in (tree / "README.md").read_text()
    assert report.stale(tree) == [] and not list((tree / "docs" / "img").iterdir())


def test_a_table_without_results_says_how_to_get_them(tree: Path) -> None:
    assert "Not measured yet: `pytest bench/ -k rope" in report.table("rope", tree / "bench" / "results")
    assert "no `bench/results/step.json`" in report.table("file:step", tree / "bench" / "results")


def test_two_gpus_have_a_table_each(tree: Path) -> None:
    results(tree / "bench" / "results" / "b.json", "2026-11-01T10:00:00", entry("norm", "1 token", "tkernels", 9.0), gpu="Other")
    text = report.table("norm", tree / "bench" / "results")
    assert "NVIDIA H200, torch" in text and "Other, torch" in text


def test_results_of_scripts_are_pivoted_by_name(tree: Path) -> None:
    rows = [
        {"batch": 1, "name": "full", "us": 900.0},
        {"batch": 1, "name": "eager", "us": 4000.0},
        {"batch": 8, "name": "full", "us": 950.5},
    ]
    data = {"machine": {"gpu": "H200", "torch": "2", "triton": "3", "commit": "c"}, "command": "python -m bench.step", "rows": rows}
    (tree / "bench" / "results" / "step.json").write_text(json.dumps(data))
    text = report.table("file:step", tree / "bench" / "results")
    assert "| batch | full | eager |" in text and "| 1 | 900.0 | 4000 |" in text and "| 8 | 950.5 | – |" in text
    assert report.runs(tree / "bench" / "results")[0].file == "elementwise_h200.json"  # such files are no runs


def test_modes_picture_shows_the_pick(tree: Path) -> None:
    picks = {"tkernels auto": "full"}
    entries = [
        entry("decode_step", f"batch {b}", peer, 900.0 * b, picks=picks) for b in (1, 8) for peer in ("tkernels auto", "tkernels eager")
    ]
    results(tree / "bench" / "results" / "modes.json", "2026-11-30T10:00:00", *entries)
    report.write(tree)
    assert report.stale(tree) == []
    assert (tree / "docs" / "img" / "modes_nvidia_h200.svg").stat().st_size > 1000


def test_compare_finds_what_became_slower(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = results(
        tree / "a.json", "2026-11-30T10:00:00", *(entry("norm", c, "tkernels", us) for c, us in (("x", 1.0), ("y", 2.0), ("z", 3.0)))
    )
    new = results(
        tree / "b.json",
        "2026-12-01T10:00:00",
        *(entry("norm", c, "tkernels", us) for c, us in (("x", 1.2), ("y", 1.0), ("z", 3.01), ("w", 1))),
    )
    assert report.main(["compare", str(old), str(new)]) == 1
    text = capsys.readouterr()
    assert text.out.index("| norm | x | tkernels | 1 | 1.2 | 1.200 | slower |") < text.out.index(
        "| norm | z | tkernels | 3 | 3.01 | 1.003 |  |"
    )
    assert "| norm | y | tkernels | 2 | 1 | 0.500 | faster |" in text.out and "| w |" not in text.out
    assert "1 of our benchmarks became more than 5% slower" in text.err
    assert report.main(["compare", str(old), str(old)]) == 0
    assert report.main(["compare", str(old), str(tree / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"x.json: expected a file of pytest-benchmark \(--benchmark-json\), got keys rows"):
        report.load(path)
