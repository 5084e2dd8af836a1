"""The command line: output, errors, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file

from runtime import explain_command
from runtime.captured_step import Address, Owner
from runtime.cli import main
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.generate_command import _answer
from runtime.request import SamplingParams
from tests.runtime.test_text import TEMPLATE, byte_tokenizer
from tests.runtime.tiny import CONFIG, tiny_model

ROOT = Path(__file__).parents[2]
TRACE = str(ROOT / "bench/traces/azure_llm_2023_conv.csv")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration file beside a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(torch.device("cpu"))
    save_file(
        {name: view.clone() for name, view in model.hf_state_dict().items() if name != "lm_head.weight"}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    file = folder / "engine.toml"
    file.write_text(f"""
[model]
path = {json.dumps(str(folder))}
[graph]
capture_sizes = [1, 2]
max_tokens = 4
[compile]
backend = "eager"
[cache]
num_pages = 40
page_size = 8
[scheduler]
max_num_seqs = 4
max_batch_tokens = 32
""")
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_prints_plan_answers_rate_and_modes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "--config", str(config), "--max-tokens", "6", "ab", "--chat", "cd")
    assert code == 0, err
    for column in ("size", "eager ms", "piecewise ms", "full ms", "pick"):
        assert column in out
    assert re.search(r"2 answers, 12 tokens in [\d.]+ s: [\d.]+ tokens/s", out)
    assert "steps by mode" in out and "piecewise" in out
    assert "12/12 tokens, 2 of 2 answers" in err


def test_quiet_prints_the_answers_only(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "--config", str(config), "--quiet", "--max-tokens", "3", "ab")
    assert code == 0 and "plan" not in out and "tokens/s" not in out and out.endswith("\n")


def test_prompts_from_files(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, json_lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("first\n\nsecond\n")
    json_lines.write_text('{"prompt": "third"}\n')
    common = ("--config", str(config), "--max-tokens", "2")
    code, out, _ = run(capsys, "generate", *common, "--input", str(lines), "zeroth")
    assert code == 0 and "3 answers" in out and out.index("zeroth") < out.index("first") < out.index("second")
    code, out, _ = run(capsys, "generate", *common, "--input", str(json_lines))
    assert code == 0 and "1 answer," in out and "third" in out
    json_lines.write_text('{"prompt": "third"}\n{"promt": "fourth"}\n')
    code, _, err = run(capsys, "generate", *common, "--input", str(json_lines))
    assert code == 2 and 'line 2: expected a JSON object with "prompt"' in err


def test_overrides_win_over_the_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plan", "--config", str(config), "--graph.capture_sizes", "[3]", "--graph.max_tokens=6", "--scheduler.max_num_seqs", "3"
    )
    assert code == 0
    assert re.findall(r"^[│|]\s+(\d+) [│|]", out, re.MULTILINE) == ["3", "3", "6"], (
        "decode has 3, the limit of requests; with chunks 3 and 6"
    )


def test_explain_batches_and_addresses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", "--config", str(config), "--graph.mode", "piecewise", "1", "3+12", "addresses")
    assert code == 0, err
    assert re.search("piecewise at size [124], [013] padding rows", out), "whichever size measured cheapest"
    assert "eager at size 15" in out and "no captured size holds 15 tokens" in out
    for word in ("owner", "caller", "persistent", "splitting op", "slot_mapping", "k_cache", "0x", "yes"):
        assert word in out


def test_layers_like_the_one_before_are_one_line() -> None:
    """In a full graph its inputs are. A segment whose proof is missing, or whose owner is another, is never folded."""

    def rows(odd: int | None = None) -> list[Address]:
        found = [Address(0, "graph", "embedding weight", "persistent", "model.embed", 0x10, True)]
        for layer in range(12):
            owner: Owner = "held" if layer == odd else "piece"
            found.append(Address(2 * layer + 1, "my::op", "q", owner, f"piece {2 * layer}, linear", 0x100 + layer, True))
            found.append(Address(2 * layer + 2, "graph", "linear weight", "persistent", f"model.layers.{layer}.w", 0x200 + layer, True))
            found.append(Address(2 * layer + 2, "graph", "x", "splitting op", "my::op", 0x300 + layer, layer != 11))
        return found

    cells = list(explain_command.table_rows(rows()))
    assert [row[0] for row in cells] == ["0", "1", "2", "2", "3 to 22", "23", "24", "24"]
    assert cells[4][1] == "10 times segment 1 to 2" and cells[4][2] == "30 inputs" and cells[4][-1] == "yes"
    assert cells[-1][-1] == "no"
    assert [row[0] for row in explain_command.table_rows(rows(odd=5)) if "to" in row[0]] == ["3 to 10", "14 to 23"]
    assert len(list(explain_command.table_rows(rows(), every_row=True))) == len(rows())
    full = [replace(row, segment=0, kind="graph") for row in rows()]
    assert [row[2] for row in explain_command.table_rows(full)][:5] == [
        "embedding weight",
        "q",
        "linear weight",
        "x",
        "10 times the 3 rows above",
    ]
    assert len(list(explain_command.table_rows(full, every_row=True))) == len(full)


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 6))
def test_folds_leave_nothing_out(entries: list[str], longest: int) -> None:
    """Unfolded, the runs are the entries, in their order; the empty list too."""
    runs = list(explain_command._folds(entries, longest))
    assert [entry for begin, period, repeats in runs for entry in entries[begin : begin + period] * repeats] == entries
    assert all(period <= longest and (repeats == 1 or repeats >= 3) for _, period, repeats in runs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--graph.mod", "full", "x"], "--graph.mod: unknown option; did you mean --graph.mode?"),
        (["generate", "--max-token", "3", "x"], "--max-token: unknown option; did you mean --max-tokens?"),
        (["generate", "--graph.mode", "fast", "x"], "graph.mode: input should be 'auto', 'full', 'piecewise' or 'eager', got 'fast'"),
        (["generate", "--scheduler.max_num_seqs", "0", "x"], "scheduler.max_num_seqs: input should be greater than 0, got 0"),
        (["generate", "--temperature", "-1", "x"], "--temperature: input should be greater than or equal to 0"),
        (["generate", "--max-tokens", "many", "x"], "--max-tokens: input should be a valid integer"),
        (["generate", "--model.path", "m"], "no prompts"),
        (["generate", "x"], "model.path: expected a Hugging Face folder"),
        (["generate", "--config", "nowhere.toml", "x"], "nowhere.toml: cannot be read"),
        (["generate", "--input", "nowhere.txt"], "--input nowhere.txt: cannot be read"),
        (["explain", "--model.path", "m", "many"], "BATCH: expected"),
        (["explain", "--model.path", "m", "0"], "BATCH 0: expected 1 to"),
        (["explain", "--model.path", "m", "300"], "BATCH 300: 300 requests, scheduler.max_num_seqs is 256"),
        (["explain"], "BATCH"),
        (["generat"], "generat: unknown command; did you mean generate?"),
        (["serve"], "serve: unknown command; expected generate, plan, explain, simulate"),
        (["simulate", "--trace", "nowhere.csv"], "--trace nowhere.csv: cannot be read"),
        (["plan", "--graph.max_tokens", "9" * 5000], "graph.max_tokens: "),
        (["--confg"], "--confg: unknown option"),
        (["plan", "configs/demo.toml"], "configs/demo.toml: plan takes no such argument; a configuration is given with --config FILE"),
        (["plan", "--model.path", "random:tiny", "--json", "x", "--budget-s", "nan"], "--budget-s: expected a number of seconds"),
        (["generate", "--model.path", "random:tiny", "text"], "the prompts are text, and random:tiny has no tokenizer"),
        (["generate", "--model.path", "/no/model", "x"], "model.path: /no/model: no such file or folder"),
        (
            ["plan", "--model.path", "random:tiny", "--json", "/no/costs.json"],
            "--json /no/costs.json: cannot be written: there is no folder",
        ),
        (["simulate", "--trace", TRACE, "--picture", "/"], "--picture /: expected a file to write, got a folder"),
        (["bench", "--model.path", "random:tiny", "--trace", TRACE, "--save-costs", "/no/c"], "--save-costs /no/c: cannot be written"),
        (["generate", "--model.device", "tpu", "--model.path", ".", "x"], "model.device: expected"),
    ],
)
def test_usage_and_configuration_errors_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and "Traceback" not in err


def test_behind_two_dashes_all_are_prompts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--config", str(config), "--graph.mode", "eager"]
    code, out, err = run(capsys, *arguments, "first", "--max-tokens", "2", "second", "--", "--third", "-fourth")
    assert code == 0, err
    assert out.index("first") < out.index("second") < out.index("--third") < out.index("-fourth") and "4 answers" in out


def test_files_may_begin_with_a_byte_order_mark(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked, prompts, lines = tmp_path / "marked.toml", tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    marked.write_text(config.read_text(), encoding="utf-8-sig")
    prompts.write_text("ab\n", encoding="utf-8-sig")
    lines.write_text('{"prompt": "ab"}\n', encoding="utf-8-sig")
    arguments = ["generate", "--config", str(marked), "--graph.mode", "eager", "--max-tokens", "3", "--quiet"]
    plain = run(capsys, *arguments, "ab")
    assert plain[0] == 0, plain[2]
    for file in (prompts, lines):
        assert run(capsys, *arguments, "--input", str(file))[:2] == plain[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 3}', "line 2: prompt: expected a text or a list of token ids, got 3"),
        ('{"prompt": null}', "line 2: prompt: expected a text or a list of token ids, got None"),
        ("[" * 100_000, "line 2: not JSON: maximum recursion depth exceeded"),
    ],
    ids=["number", "null", "deep"],
)
def test_a_line_that_is_no_prompt_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "ab"}}\n{line}\n')
    code, out, err = run(capsys, "generate", "--config", str(config), "--input", str(file))
    assert (code, out) == (2, "") and f"--input {file}: {message}" in err


def test_files_that_are_not_utf8_are_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes(b"# caf\xe9\n")
    code, _, err = run(capsys, "plan", "--config", str(file))
    assert code == 2 and f"{file}: not valid TOML" in err
    code, _, err = run(capsys, "generate", "--config", str(config), "--input", str(file))
    assert code == 2 and f"--input {file}: not UTF-8 text: invalid continuation byte at byte 5" in err


def test_a_folder_without_a_tokenizer_takes_token_ids_only(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in config.parent.glob("*"):
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    arguments = ["generate", "--config", str(config), "--model.path", str(tmp_path), "--max-tokens", "2", "--compile.backend", "eager"]
    code, out, err = run(capsys, *arguments, "text")
    assert (code, out) == (2, "") and f"the prompts are text, and {tmp_path} has no tokenizer.json" in err
    prompts = tmp_path / "ids.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n')
    code, out, err = run(capsys, *arguments, "--graph.mode", "eager", "--input", str(prompts))
    assert code == 0 and "1 answer, 2 tokens" in out, err


def test_progress_counts_the_tokens_that_there_are(config: Path) -> None:
    engine = Engine(config=RuntimeConfig.load(config).override(**{"graph.mode": "eager"}))
    shown = io.StringIO()
    errors = Console(force_terminal=True, color_system=None, file=shown, width=120)
    _answer(engine, ["ab", "y" * 400], [SamplingParams(max_tokens=6)] * 2, False, errors)  # the other one is refused
    assert re.search(r"6/6 .*2 of 2 answers", shown.getvalue())


def test_generate_reads_parameters_of_each_line_and_writes_json_lines(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"prompt": "ab"}, {"prompt": [1, 2], "id": "x", "params": {"max_tokens": 5, "n": 2, "temperature": 1.0}}, {"prompt": "y" * 400}]
    prompts.write_text("\n\n".join(json.dumps(row) for row in rows))
    options = ["--config", str(config), "--graph.mode", "eager", "--input", str(prompts), "--max-tokens", "3", "--logit-bias", '{"5": -9}']
    code, out, err = run(capsys, "generate", *options, "--output", str(answers), "--logprobs", "1")
    assert code == 1 and "2 answered, 1 refused" in out, err
    found = {row["id"]: row for row in map(json.loads, answers.read_text().splitlines())}
    assert list(map(len, (found[1]["answers"], found["x"]["answers"]))) == [1, 2] and "400 tokens" in found[5]["error"]
    assert [len(each["token_ids"]) for each in found["x"]["answers"]] == [5, 5]
    assert all(len(each["top"]) == 1 for each in found[1]["answers"][0]["logprobs"])
    code, out, err = run(capsys, "generate", *options, "--output", str(answers))
    assert code == 0 and "3 of 3 prompts are answered already" in out, err
    code, out, err = run(capsys, "generate", *options, "--quiet")
    assert code == 1 and out.split("\n")[0] == found[1]["answers"][0]["text"].split("\n")[0]


def test_a_key_that_does_not_exist_in_the_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[graph]\nmodes = 'full'\n")
    code, _, err = run(capsys, "plan", "--config", str(file))
    assert code == 2 and "graph.modes: unknown key; did you mean graph.mode?" in err
    file.write_text("graph = 3\n")
    code, _, err = run(capsys, "plan", "--config", str(file))
    assert code == 2 and "graph: expected a section, [graph] with keys below it, got 3" in err


def test_run_time_errors_exit_with_1(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "--config", str(config), "--model.path", str(tmp_path), "x")
    assert code == 1 and f"{tmp_path / 'config.json'}" in err
    code, out, err = run(capsys, "generate", "--config", str(config), "--max-tokens", "2", "--quiet", "fine", "y" * 400)
    assert code == 1 and "prompt 1: the prompt has 400 tokens and needs 50 pages of 8; the cache has 39" in err
    assert out.strip(), "the other prompt is answered"


def test_help_names_commands_keys_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2 and "generate" in err
    for arguments, words in {
        ("--help",): ("generate", "plan", "explain"),
        ("generate", "--help"): ("--graph.mode", "--max-tokens", "--chat", "examples"),
    }.items():
        with pytest.raises(SystemExit) as done:
            main(list(arguments))
        assert done.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_python_m_runtime_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "runtime", "generate"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "error: no prompts" in done.stderr


def test_threads_of_the_command_wait_asleep_unless_it_is_said_otherwise() -> None:
    """Beside other programs threads that spin make a step many times slower. A program that imports the package is left as it is."""
    code = "import os, sys; sys.argv = [{!r}]; import runtime; print(os.environ.get('OMP_WAIT_POLICY'))"
    for argv, own, expected in (("-m", {}, "PASSIVE"), ("-m", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ("mine.py", {}, "None")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | own
        command = [sys.executable, "-c", code.format(argv)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
