"""For ``python -m runtime generate --input FILE --output FILE``: prompts from a file, each answered once, whatever happens in between.

Input: one prompt a line, or in a ``.jsonl`` file one object a line: ``{"prompt": text or token ids, "id": …, "params": {…}}``. An id is a
text or an integer, by default the line's number; ``params`` are sampling parameters that win over those of the command.

Output: one object a line, in the order in which they are ready: ``{"id": …, "answers": [{"text", "token_ids", "finish_reason"}]}``, with
"logprobs" if they were asked for, or ``{"id": …, "error": …}`` for a prompt that cannot be served. A line is written whole and at once,
so the file can be read at any time and after a kill. A run that finds such a file goes on behind it: ids that are in it are left out,
and half a line at its end is cut off. A line draws by its own number where it gives no seed, so that a resumed run draws the same.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from runtime.answer import Answer, Event
from runtime.config import ConfigError
from runtime.engine import Engine
from runtime.request import RequestError, SamplingParams

Progress = Callable[[int, int, int], None]
"""Called with (prompts answered, all prompts, tokens so far)."""


_KEYS = {"prompt", "id", "params"}


class Line(NamedTuple):
    """One prompt of a file. params: what it wants otherwise than the command."""

    number: int
    id: str | int
    prompt: Any
    params: dict[str, Any]


def read_prompts(source: str) -> list[Line]:
    """The prompts of a file, or of stdin for "-". Raises ConfigError naming the line."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--input {source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--input {source}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    rows = list(enumerate(text.split("\n"), 1))  # not splitlines: a prompt may hold U+2028
    if not source.endswith(".jsonl"):
        return [Line(number, number, line, {}) for number, line in rows if line.strip()]
    lines: list[Line] = []
    seen: dict[str | int, int] = {}
    for number, raw in rows:
        if not raw.strip():
            continue
        where = f"--input {source}: line {number}"
        try:
            given = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(given, dict) or "prompt" not in given:
            got = f"the keys {', '.join(map(repr, given))}" if isinstance(given, dict) else type(given).__name__
            raise ConfigError(f'{where}: expected a JSON object with "prompt", got {got}')
        for key in given.keys() - _KEYS:  # a file may say more of its prompts, but a slip of the pen shall not go unnoticed
            if near := difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.7):
                raise ConfigError(f"{where}: {key}: unknown key; did you mean {near[0]}?")
        line = Line(number, given.get("id", number), given["prompt"], given.get("params", {}))
        if not isinstance(line.prompt, (str, list)):
            raise ConfigError(f"{where}: prompt: expected a text or a list of token ids, got {line.prompt!r}")
        if isinstance(line.id, bool) or not isinstance(line.id, (str, int)):
            raise ConfigError(f"{where}: id: expected a text or an integer, got {line.id!r}")
        if not isinstance(line.params, dict):
            raise ConfigError(f"{where}: params: expected an object of sampling parameters, got {line.params!r}")
        if line.id in seen:
            raise ConfigError(f"{where}: id {line.id!r} is that of line {seen[line.id]} too")
        seen[line.id] = number
        lines.append(line)
    return lines


def params_of(lines: Iterable[Line], defaults: SamplingParams, *, seeded: bool = False) -> list[SamplingParams]:
    """Each line's parameters. seeded: lines without a seed get their number as seed."""
    all_params = []
    for line in lines:
        given = {**defaults.model_dump(), **line.params}
        if seeded and given["seed"] is None:
            given["seed"] = line.number
        try:
            all_params.append(SamplingParams.model_validate(given))
        except ValidationError as error:
            item = error.errors()[0]
            name = ".".join(map(str, item["loc"]))
            said = f"{item['msg'][0].lower() + item['msg'][1:]}, got {item['input']!r}"
            if item["type"] == "extra_forbidden":
                near = difflib.get_close_matches(name, SamplingParams.model_fields, n=1, cutoff=0.5)
                said = "unknown parameter; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(SamplingParams.model_fields)}")
            raise ConfigError(f"--input: line {line.number}: params: {name}: {said}") from None
    return all_params


class AnswerFile:
    """The output, open for appending by one process. ``answered`` holds the ids that it has."""

    def __init__(self, path: str, *, write: bool = True) -> None:
        self.path, self._file = path, -1
        try:
            if write:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = Path(path).read_bytes() if Path(path).exists() else b""
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"--output {path}: another process is writing it") from error
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be opened: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self.answered = self._ids(whole)
        except ConfigError:
            self.close()
            raise
        if write and len(whole) < len(data):
            os.ftruncate(self._file, len(whole))  # a line that was being written when its process was killed

    def _ids(self, data: bytes) -> set[str | int]:
        ids: set[str | int] = set()
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f'--output {self.path}: line {number}: expected a JSON object with "id", as a run before would have left; '
                    "give another file, or remove this one"
                ) from error
        return ids

    def add(self, row: dict[str, Any]) -> None:
        """Append one line. By the time it returns, the system has it, also if this process is killed then."""
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        while self._file >= 0 and data:
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another one write it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def left_to_answer(lines: Sequence[Line], file: AnswerFile) -> list[Line]:
    """The lines whose ids the file does not have. Raises ConfigError if it has ids of no line: it is then another input's."""
    strange = file.answered - {line.id for line in lines}
    if strange:
        shown = ", ".join(repr(each) for each in sorted(strange, key=str)[:3])
        raise ConfigError(
            f"--output {file.path}: it has answers to {len(strange)} ids that the input does not have ({shown}); give another file"
        )
    return [line for line in lines if line.id not in file.answered]


def answer_lines(
    engine: Engine, lines: Sequence[Line], params: Sequence[SamplingParams], file: AnswerFile, *, chat: bool = False,
    progress: Progress = lambda done, total, tokens: None,
) -> tuple[int, int]:  # fmt: skip
    """Answer all lines; returns how many were refused, and the tokens generated.

    A bounded number waits in the engine at any time, so an input may be of any length.
    """
    most = 4 * engine.config.scheduler.max_num_seqs
    events: deque[Event] = deque()
    waiting: dict[int, list[Answer]] = {}
    todo: Iterator[tuple[int, Line]] = iter(enumerate(lines))
    refused = tokens = done = held = 0
    exhausted = False
    try:
        while waiting or not exhausted:
            while not exhausted and held < most:
                index, line = next(todo, (-1, None))
                if line is None:
                    exhausted = True
                    break
                try:
                    waiting[index] = engine.submit_samples(line.prompt, params[index], chat=chat, index=index, events=events, whole=True)
                    held += params[index].n
                except RequestError as error:
                    file.add({"id": line.id, "error": str(error)})
                    refused, done = refused + 1, done + 1
            if waiting:
                engine.step()
            while events:
                event = events.popleft()
                tokens += len(event.token_ids)
                if event.finish_reason is not None and all(answer.finished for answer in waiting.get(event.index, [])):
                    answers = waiting.pop(event.index, None)
                    if answers is not None:  # else it came with an event before
                        file.add({"id": lines[event.index].id, "answers": [_row(answer) for answer in answers]})
                        done, held = done + 1, held - len(answers)
            progress(done, len(lines), tokens)
    finally:
        for answers in waiting.values():
            for answer in answers:
                engine.abort(answer)
    return refused, tokens


def _row(answer: Answer) -> dict[str, Any]:
    completion = answer.completion()
    row: dict[str, Any] = {"text": completion.text, "token_ids": completion.token_ids, "finish_reason": completion.finish_reason}
    if completion.logprobs is not None:
        # Pairs, since JSON has no integer keys; null for a logarithm of 0, which it has not either.
        number = lambda value: value if value > -float("inf") else None
        row["logprobs"] = [
            {"logprob": number(each.logprob), "top": [[token, number(value)] for token, value in each.top.items()]}
            for each in completion.logprobs
        ]
    return row
