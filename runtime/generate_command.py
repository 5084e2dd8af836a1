"""``python -m runtime generate``: options, answers on the terminal or into a file, totals."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from runtime.answer import Completion, Event
from runtime.answer_file import AnswerFile, Line, answer_lines, left_to_answer, params_of, read_prompts
from runtime.config import ConfigError, RuntimeConfig
from runtime.engine import Engine
from runtime.parallel import is_follower
from runtime.request import SamplingParams

_IN_JSON = {"logit_bias": '{"11": -5, "13": 2.5}', "allowed_token_ids": "[11, 12, 13]", "stop_token_ids": "[11, 12]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="one prompt each")
    text = (
        'more prompts: one a line, or in a .jsonl file objects with "prompt" (a text or token ids) and, if wanted, "id" and "params" '
        '(sampling parameters); "-" reads stdin'
    )
    parser.add_argument("--input", metavar="FILE", help=text)
    text = "answers as JSON lines, each written when it is ready; a run that finds the file goes on behind what it has"
    parser.add_argument("--output", metavar="FILE", help=text)
    parser.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    parser.add_argument("--quiet", action="store_true", help="print the answers only")
    _add_sampling(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, field in SamplingParams.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{field.description} (default {json.dumps(field.default)})"
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help=f"{field.description}; may be repeated")
        elif name in _IN_JSON:
            group.add_argument(flag, metavar="JSON", help=f"{field.description}, e.g. {_IN_JSON[name]}")
        elif field.annotation is bool:
            group.add_argument(flag, action="store_true", default=None, help=text)
        else:
            group.add_argument(flag, metavar="NUMBER", help=text)


def run(arguments: argparse.Namespace, config: RuntimeConfig, make_engine: Callable[[], Engine], out: Console, errors: Console) -> int:
    """Answer; returns the exit code. make_engine: called once the options are known to be right."""
    lines = [] if arguments.input is None else read_prompts(arguments.input)
    if arguments.output is not None:
        return _into_file(arguments, lines, config, make_engine, out, errors)
    prompts = [*arguments.prompts, *(line.prompt for line in lines)]
    if not prompts:
        raise ConfigError("no prompts: give them as arguments or with --input FILE")
    common = _sampling(arguments)
    params = [common] * len(arguments.prompts) + params_of(lines, common)
    _check_text(config, prompts)
    engine = make_engine()
    if not arguments.quiet:
        out.print(engine.plan)
    started = time.perf_counter()
    answers = _answer(engine, prompts, params, arguments.chat, errors)
    seconds = time.perf_counter() - started
    for answer in answers:
        prompt = prompts[answer.index]
        if answer.finish_reason == "error":
            errors.print(f"error: {answer.error}", markup=False)
        elif arguments.quiet:
            out.print(answer.text, markup=False)
        else:
            title = str(prompt)
            out.rule(Text(title if len(title) <= 100 else f"{title[:97]}..."), align="left")
            out.print(answer.text, markup=False)
    if not arguments.quiet:
        out.rule()
        _print_totals(engine, len(answers), sum(len(answer.token_ids) for answer in answers), seconds, out)
    return 1 if any(answer.finish_reason == "error" for answer in answers) else 0


def _check_text(config: RuntimeConfig, prompts: Sequence[Any]) -> None:
    if config.model.path.startswith("random:") and any(isinstance(p, str) for p in prompts):
        raise ConfigError(
            f"the prompts are text, and {config.model.path} has no tokenizer; give token ids in a .jsonl file with --input, or a model"
        )
    folder = Path(config.model.path).expanduser()
    if (folder / "config.json").is_file() and not (folder / "tokenizer.json").is_file() and any(isinstance(p, str) for p in prompts):
        raise ConfigError(f"the prompts are text, and {folder} has no tokenizer.json; give token ids in a .jsonl file with --input")


def _into_file(
    arguments: argparse.Namespace,
    lines: list[Line],
    config: RuntimeConfig,
    make_engine: Callable[[], Engine],
    out: Console,
    errors: Console,
) -> int:
    if arguments.input is None or arguments.prompts:
        raise ConfigError("--output: expected --input FILE, whose lines it answers, and no other prompts")
    params = params_of(lines, _sampling(arguments), seeded=True)
    by_number = dict(zip((line.number for line in lines), params, strict=True))
    _check_text(config, [line.prompt for line in lines])
    with AnswerFile(arguments.output, write=not is_follower()) as file:
        left = left_to_answer(lines, file)
        if not arguments.quiet:
            out.print(f"{arguments.output}: {len(lines) - len(left)} of {len(lines)} prompts are answered already", markup=False)
        if not left:
            return 0
        engine = make_engine()
        started = time.perf_counter()
        columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts, {task.fields[tokens]} tokens"))
        with Progress(*columns, TimeElapsedColumn(), console=errors) as bar:
            task = bar.add_task("", total=len(left), tokens=0)
            progress = lambda done, total, tokens: bar.update(task, completed=done, tokens=tokens)
            chosen = [by_number[line.number] for line in left]
            refused, tokens = answer_lines(engine, left, chosen, file, chat=arguments.chat, progress=progress)
    if not arguments.quiet:
        out.print(f"{arguments.output}: {len(left) - refused} answered, {refused} refused", markup=False)
        _print_totals(engine, len(left), tokens, time.perf_counter() - started, out)
    return 1 if refused else 0


def _answer(engine: Engine, prompts: list[Any], params: Sequence[SamplingParams], chat: bool, errors: Console) -> list[Completion]:
    counts = TextColumn("tokens, {task.fields[done]} of {task.fields[all]} answers")
    answers = [(index, sample) for index in range(len(prompts)) for sample in range(params[index].n)]
    texts = dict.fromkeys(answers, "")
    tokens: dict[tuple[int, int], list[int]] = {at: [] for at in answers}
    ends: dict[tuple[int, int], Event] = {}
    with Progress(TextColumn("generating"), BarColumn(), MofNCompleteColumn(), counts, TimeElapsedColumn(), console=errors) as progress:
        total = sum(params[index].max_tokens for index, _ in answers)  # less what answers leave unused
        task = progress.add_task("", total=total, done=0, all=len(answers))
        for event in engine.stream(prompts, params, chat=chat, on_error="return"):
            at = event.index, event.sample
            texts[at] += event.text
            tokens[at] += event.token_ids
            progress.advance(task, len(event.token_ids))
            if event.finish_reason is not None:
                ends[at] = event
                total -= params[event.index].max_tokens - len(tokens[at])
                progress.update(task, total=total, done=len(ends))
    return [Completion(texts[at], tokens[at], end.finish_reason or "error", [], end.error, None, *at) for at, end in sorted(ends.items())]


def _print_totals(engine: Engine, answers: int, tokens: int, seconds: float, out: Console) -> None:
    stats = engine.counts()
    plural = "" if answers == 1 else "s"
    out.print(f"{answers} answer{plural}, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")
    out.print(f"start-up: {engine.startup_seconds:.1f} s")
    table = Table("mode", "steps", "share", "by size", title="steps by mode", title_justify="left")
    steps = stats["modes"]["steps"]
    all_steps = sum(sum(by_size.values()) for by_size in steps.values())  # with those whose requests had ended by then
    for mode, by_size in steps.items():
        count = sum(by_size.values())
        table.add_row(mode, str(count), f"{count / max(1, all_steps):.0%}", ", ".join(f"{size}: {n}" for size, n in by_size.items()))
    out.print(table)
    rows, padding = stats["modes"]["rows"], stats["modes"]["padding_rows"]
    out.print(f"padding: {padding} of {rows} rows; preemptions: {stats['preemptions']}")
    out.print(f"prompt tokens: {stats['prompt_tokens']} computed, {stats['cached_tokens']} from the prefix cache")
    for reason, count in stats["modes"]["eager_reasons"].items():
        out.print(f"eager {count}x: {reason}", markup=False)


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(arguments, name) for name in SamplingParams.model_fields}
    for name in _IN_JSON:
        if given[name] is not None:
            try:
                given[name] = json.loads(given[name])
            except ValueError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: expected JSON such as {_IN_JSON[name]}, got {given[name]!r}") from error
    try:
        return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        item = error.errors()[0]
        flag = str(item["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{flag}: {item['msg'][0].lower() + item['msg'][1:]}, got {item['input']!r}") from None
