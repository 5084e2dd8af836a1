"""The benchmark suites as a smoke test: every case's check passes, its figures reach the JSON, and two runs compare."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tkernels._op import reference_ops

ROOT = Path(__file__).resolve().parent.parent


def clean_environment() -> dict[str, str]:
    """Without what pytest-xdist leaves there: pytest-benchmark times nothing in its workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        f"{ROOT}/pyproject.toml",
        f"--rootdir={ROOT}",
        *arguments,
    ]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=clean_environment(), check=False)


@pytest.mark.slow
def test_all_suites_pass_and_name_what_is_absent(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run("bench", f"--benchmark-json={out}", "-rs")
    assert done.returncode == 0, done.stdout[-6000:]
    data = json.loads(out.read_text())
    assert {"gpu", "driver", "torch", "triton", "peers"} <= data["machine_info"].keys() and "commit" in data["run"]
    names = {entry["fullname"].split("::")[0].removeprefix("bench/test_").removesuffix(".py") for entry in data["benchmarks"]}
    assert names >= {"elementwise", "linear", "attention", "sampling", "runtime_modes", "serving", "hf_generate"}
    for entry in data["benchmarks"]:
        info = entry["extra_info"]
        assert info["error"] <= info["tolerance"] and entry["stats"]["median"] == pytest.approx(info["us"] * 1e-6)
    for peer, version in data["machine_info"]["peers"].items():
        assert not version.startswith("absent: ") or f"{peer}: absent, " in done.stdout


@pytest.mark.slow
def test_two_runs_compare(tmp_path: Path) -> None:
    suite = [f"{ROOT}/bench/test_elementwise.py", "-k", "silu_and_mul"]
    assert run(*suite, "--benchmark-autosave", cwd=tmp_path).returncode == 0
    done = run(*suite, "--benchmark-compare", cwd=tmp_path)
    assert done.returncode == 0 and "(NOW)" in done.stdout and "(0001_" in done.stdout, done.stdout
    assert "machine_info is different" not in done.stdout


def test_a_peer_that_cannot_be_compiled_is_absent_and_a_failing_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "test_uncompiled.py").write_text(
        "import pytest, torch\n"
        "from bench.suite import DEVICE, Problem\n"
        "def refuse(graph, inputs):\n"
        "    raise TypeError('list indices must be integers')\n"
        "@pytest.mark.parametrize('case', [1])\n"
        "@pytest.mark.parametrize('peer', ['tkernels', 'torch eager', 'torch compiled', 'torch failing'])\n"
        "def test_uncompiled(measure, case, peer):\n"
        "    x = torch.ones(4, device=DEVICE)\n"
        "    uncompiled = torch.compile(lambda y: y + 1, backend=refuse)\n"
        "    peers = {'tkernels': lambda i: uncompiled(x), 'torch eager': lambda i: x, 'torch compiled': lambda i: uncompiled(x),\n"
        "             'torch failing': lambda i: x[None][1]}\n"
        "    measure(lambda: Problem(peers=peers, expected=x.double(), bytes=16))\n"
    )
    done = run("-p", "bench.conftest", str(tmp_path / "test_uncompiled.py"), "-rs")
    assert "torch compiled: absent, torch" in done.stdout and "list indices must be integers" in done.stdout, done.stdout
    assert "2 failed, 1 passed, 1 skipped" in done.stdout, done.stdout


def test_a_wrong_result_is_not_timed(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(
        "import pytest, torch\n"
        "from bench.suite import DEVICE, Problem\n"
        "@pytest.mark.parametrize('case', [1])\n"
        "@pytest.mark.parametrize('peer', ['tkernels', 'torch eager', 'Liger', 'torch other'])\n"
        "def test_wrong(measure, case, peer):\n"
        "    x = torch.ones(4, device=DEVICE)\n"
        "    peers = {'tkernels': lambda i: x + 1e-3, 'torch eager': lambda i: x, 'torch other': lambda i: x * float('nan')}\n"
        "    measure(lambda: Problem(peers=peers, expected=x.double(), bytes=16, tolerance=1e-5))\n"
    )
    out = tmp_path / "out.json"
    done = run("-p", "bench.conftest", str(tmp_path / "test_wrong.py"), f"--benchmark-json={out}")
    assert done.returncode == 1
    assert "tkernels: error 0.001 is above" in done.stdout and "so it was not timed" in done.stdout
    assert "torch other: error inf is above" in done.stdout
    assert [entry["extra_info"]["peer"] for entry in json.loads(out.read_text())["benchmarks"]] == ["torch eager"]


def test_graph_runtime_writes_its_file_after_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import graph_runtime

    out = tmp_path / "graph_runtime.json"
    arguments = ["--small", "--backend", "eager", "--parts", "startup", "host", "random", "split", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["graph_runtime", *arguments])
    with reference_ops():
        graph_runtime.main()
    rows = json.loads(out.read_text())["rows"]
    host = ["host time in all"] * 2 + ["host time"] * 2
    assert [row["what"] for row in rows] == ["start-up"] * 2 + host + ["random steps"] * 2 + ["split"] * 2
    assert all(row["pages_written"] == 1 for row in rows if row["what"].startswith("host time") and "batch" in row)
    assert all(
        row["call_parts_us"]["sweep"] > 0 and row["by_hand_us"]["block_table renewed"] > 0 for row in rows if row["what"] == "host time"
    )
    assert all(row["steps"] >= 40 for row in rows if row["what"] == "random steps")
    monkeypatch.setattr(sys, "argv", ["graph_runtime", *arguments, "--budget-s", "0"])
    graph_runtime.main()
    assert all("skipped" in row for row in json.loads(out.read_text())["rows"])


def test_peers_that_cannot_take_turns_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is through, and what torch compiled for it forgotten, before the next begins; one that fails stops no other."""
    from bench import suite

    seen: list[str] = []
    monkeypatch.setattr(suite.torch.compiler, "reset", lambda: seen.append("reset"))

    def peer(name: str, fails: bool = False) -> Callable[[int], torch.Tensor]:
        def call(_: int) -> torch.Tensor:
            seen.append(name)
            if fails and seen.count(name) > 1:
                raise AssertionError("while it was timed")
            return torch.ones(2)

        return call

    peers = {"a": peer("a"), "b": peer("b", fails=True), "c": peer("c")}
    problem = suite.Problem(peers=peers, expected=torch.ones(2), wall=True, units=2, apart=True, repeats=2)
    outcomes = suite.measure(problem, list(peers))
    assert [name for name, _ in itertools.groupby(seen)] == ["a", "reset", "b", "reset", "c", "reset"]
    assert outcomes["a"].seconds and outcomes["c"].seconds and isinstance(outcomes["b"].failure, AssertionError)
