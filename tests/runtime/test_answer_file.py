"""Prompts from a file, answers into one: what is there stays, what is not is answered, whatever ended the run before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.answer_file import AnswerFile, answer_lines, left_to_answer, params_of, read_prompts
from runtime.cli import main
from runtime.config import ConfigError
from runtime.request import SamplingParams
from tests.runtime.engine_rig import check_idle, make_engine

DEFAULTS = SamplingParams(max_tokens=5, temperature=1.0)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [{"prompt": [i + 1] * (1 + i % 7), "id": f"p{i}"} for i in range(30)]
    rows[4] |= {"params": {"n": 3}}
    rows[9]["prompt"] = []
    return write(tmp_path / "prompts.jsonl", rows)


def answers_of(path: Path) -> dict[Any, Any]:
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "no prompt is answered twice"
    return found


def answer(device: torch.device, source: str, out: Path, stop_after: int = 10**9) -> int:
    """A run that may be interrupted; returns how many prompts it took."""
    lines = read_prompts(source)
    file = AnswerFile(str(out))
    left = left_to_answer(lines, file)
    engine = make_engine(device)
    add, written = file.add, 0

    def counting(row: dict[str, Any]) -> None:
        nonlocal written
        add(row)
        written += 1
        if written == stop_after:
            raise KeyboardInterrupt

    file.add = counting  # type: ignore[method-assign]
    by_id = {line.id: each for line, each in zip(lines, params_of(lines, DEFAULTS, seeded=True), strict=True)}
    try:
        refused, tokens = answer_lines(engine, left, [by_id[line.id] for line in left], file)
        assert refused == sum("error" in row for row in answers_of(out).values() if row["id"] in {line.id for line in left})
        assert tokens > 0
        check_idle(engine)
    except KeyboardInterrupt:
        while engine.has_work:
            engine.step()
        check_idle(engine)
    finally:
        file.close()
    return len(left)


def test_an_interrupted_run_is_resumed_and_gives_the_same(device: torch.device, tmp_path: Path, source: str) -> None:
    """Also after half a line, which is what a full disk leaves."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    answer(device, source, whole)
    expected = answers_of(whole)
    assert len(expected) == 30 and len(expected["p4"]["answers"]) == 3 and "the prompt is empty" in expected["p9"]["error"]
    assert answer(device, source, parts, stop_after=7) == 30
    assert len(answers_of(parts)) == 7
    with parts.open("a") as file:
        file.write('{"id": "p29", "answers": [{"te')
    assert answer(device, source, parts, stop_after=11) == 23
    assert answer(device, source, parts) == 12
    assert answers_of(parts) == expected
    assert answer_nothing(source, parts) == []


def answer_nothing(source: str, out: Path) -> list[Any]:
    file = AnswerFile(str(out))
    try:
        return left_to_answer(read_prompts(source), file)
    finally:
        file.close()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = AnswerFile(str(out))
    with pytest.raises(ConfigError, match="another process is writing it"):
        AnswerFile(str(out))
    assert AnswerFile(str(out), write=False).answered == set()
    first.close()
    AnswerFile(str(out)).close()


@pytest.mark.parametrize(("known", "code"), [("p", 0), ("another", 2)])
def test_a_command_that_has_nothing_to_do_or_refuses_lets_go_of_its_output(tmp_path: Path, known: str, code: int) -> None:
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "a", "id": "p"}])
    out = write(tmp_path / "out.jsonl", [{"id": known, "answers": []}])
    assert main(["generate", "--input", source, "--output", out, "--quiet"]) == code
    AnswerFile(out).close()


def test_an_output_of_other_prompts_is_left_alone(tmp_path: Path, source: str) -> None:
    out = tmp_path / "out.jsonl"
    write(out, [{"id": "p1", "answers": []}, {"id": "q", "answers": []}])
    with pytest.raises(ConfigError, match=r"it has answers to 1 ids that the input does not have \('q'\)"):
        answer_nothing(source, out)
    for text in ("not json\n", "[1]\n", "{}\n"):
        out.write_text(text)
        with pytest.raises(ConfigError, match='line 1: expected a JSON object with "id"'):
            AnswerFile(str(out))
        assert out.read_text() == text
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        AnswerFile(str(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "id": 1.5}, "line 2: id: expected a text or an integer, got 1.5"),
        ({"prompt": "a", "id": "p"}, "line 2: id 'p' is that of line 1 too"),
        ({"prompt": "a", "params": 3}, "line 2: params: expected an object"),
        ({"text": "a"}, 'line 2: expected a JSON object with "prompt"'),
        (["a"], 'line 2: expected a JSON object with "prompt", got list'),
        ({"prompt": "a", "params": {"top_q": 1}}, "line 2: params: top_q: unknown parameter; did you mean top_p"),
        ({"prompt": "a", "parms": {"top_p": 1}}, "line 2: parms: unknown key; did you mean params"),
        ({"prompt": "a", "params": {"top_p": 7}}, "line 2: params: top_p: input should be less than or equal to 1, got 7"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "ok", "id": "p"}, row])
    with pytest.raises(ConfigError, match=message):
        params_of(read_prompts(source), DEFAULTS)


def test_a_line_may_hold_any_character(tmp_path: Path) -> None:
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "a\u2028b\u0085c"}, {"prompt": [1, 2], "params": {"seed": 4}}])
    lines = read_prompts(source)
    assert [(line.id, line.prompt) for line in lines] == [(1, "a\u2028b\u0085c"), (2, [1, 2])]
    assert [each.seed for each in params_of(lines, DEFAULTS, seeded=True)] == [1, 4]
    plain = tmp_path / "prompts.txt"
    plain.write_text("a\u2028b\x0cc\n\nd", encoding="utf-8")
    assert [(line.id, line.prompt) for line in read_prompts(str(plain))] == [(1, "a\u2028b\x0cc"), (3, "d")]
