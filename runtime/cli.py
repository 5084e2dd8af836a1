"""The command line: ``python -m runtime generate | plan | explain | simulate | bench``.

Exit codes: 0 all went well, 1 something failed while running (a damaged checkpoint, a prompt that cannot be served), 2 the command
or the configuration is wrong. Results go to stdout, errors and the progress bar to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runtime import bench_command, explain_command, generate_command, simulate_command
from runtime.config import ConfigError, RuntimeConfig
from runtime.engine import Engine
from runtime.parallel import is_follower, leave
from runtime.step_costs import measure_steps

_COMMANDS = ("generate", "plan", "explain", "simulate", "bench")
_EXAMPLES = """\
examples:
  python -m runtime generate --config configs/demo.toml --chat "What is the capital of France?" "Name three colours."
  python -m runtime generate --model.path ./SmolLM2-135M-Instruct --input prompts.txt --max-tokens 64 --temperature 0.7
  python -m runtime generate --config configs/demo.toml --input prompts.jsonl --output answers.jsonl --logprobs 5
  python -m runtime plan --config configs/demo.toml --graph.capture_sizes '[1, 2, 4]'
  python -m runtime explain --config configs/demo.toml 1 5 4+120
  python -m runtime explain --config configs/demo.toml addresses
  python -m runtime simulate --trace bench/traces/azure_llm_2023_conv.csv --rate 2 --scheduler.itl_ms 50 --scheduler.ttft_ms 500
  python -m runtime plan --config configs/llama-8b.toml --json costs.json
  python -m runtime bench --config configs/llama-8b.toml --costs costs.json --trace bench/traces/azure_llm_2023_conv.csv --seconds 90
"""


class UsageError(ValueError):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ours to print: one line, with the nearest right option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return _run(list(sys.argv[1:] if argv is None else argv), errors)
    except (UsageError, ConfigError) as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    except (ValueError, RuntimeError, OSError) as error:
        errors.print(f"error: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted")
        return 130


def _run(argv: list[str], errors: Console) -> int:
    parser = _make_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        near = difflib.get_close_matches(argv[0], _COMMANDS, n=1, cutoff=0.6)
        raise UsageError(f"{argv[0]}: unknown command; " + (f"did you mean {near[0]}?" if near else f"expected {', '.join(_COMMANDS)}"))
    behind: list[str] = []  # "--": prompts, whatever they begin with; argparse takes those alone that no prompt stands before
    if argv[:1] == ["generate"] and "--" in argv:
        argv, behind = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.command is None and not unknown:
        parser.print_help(sys.stderr)
        return 2
    if arguments.command == "generate" and not any(word.startswith("-") for word in unknown):
        arguments.prompts += unknown + behind  # argparse takes positional arguments in one run only: these stood behind an option
    elif unknown:
        raise UsageError(_unknown(unknown[0], parser, arguments.command))
    config = RuntimeConfig.load(arguments.config) if arguments.config else RuntimeConfig()
    overrides = {key: _value(text) for key, text in vars(arguments).items() if "." in key and text is not None}
    config = config.override(**overrides)
    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = 160  # what a file or pipe gets shall not be folded to 80 columns
    commands = {"generate": _generate, "plan": _plan, "explain": _explain, "simulate": _simulate, "bench": _bench}
    if is_follower():  # rank 0 speaks for all; what goes wrong still comes from whoever it happens to
        out = errors = Console(quiet=True)
    code = commands[arguments.command](arguments, config, out, errors)
    leave()
    return code


def _make_parser() -> _Parser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m runtime", description="Graph-aware transformer inference.", epilog=_EXAMPLES, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, arguments: str, text: str) -> _Parser:
        usage = f"python -m runtime {name} [--config FILE] [OPTION ...] {arguments}"
        return commands.add_parser(name, help=text, description=text, usage=usage, epilog=_EXAMPLES, formatter_class=plain)

    generate = command("generate", "PROMPT ...", "answer prompts, all at once")
    generate_command.add_arguments(generate)
    plan = command("plan", "", "measure every captured size in each mode, and print what is picked")
    explain = command("explain", "BATCH ...", "say how a batch would run and why, or who owns each input of each captured piece")
    explain_command.add_arguments(explain)
    plan.add_argument("--json", metavar="FILE", help="also time whole steps, and write the costs for --costs here")
    plan.add_argument("--budget-s", metavar="S", type=float, default=0.0, help="seconds for that (default: as many as it takes)")
    simulate = command("simulate", "--trace FILE", "run the scheduler over a trace of requests with a cost table instead of a model")
    simulate_command.add_arguments(simulate)
    bench = command("bench", "--trace FILE", "run a trace of requests through the engine, open loop, and compare with the simulator")
    bench_command.add_arguments(bench)
    for each in (generate, plan, explain, simulate, bench):
        _add_config(each)
    return parser


def _add_config(parser: _Parser) -> None:
    group = parser.add_argument_group("configuration", "Each key of the TOML file; what is given here wins over the file.")
    group.add_argument("--config", metavar="FILE", help="TOML file; without it every key has its default")
    for section, field in RuntimeConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        for name, key in field.annotation.model_fields.items():  # type: ignore[attr-defined]
            choices = [str(choice) for choice in get_args(key.annotation) if isinstance(choice, str)]
            text = f"{key.description} (default {json.dumps(key.default)})".replace("%", "%%")
            group.add_argument(f"--{section}.{name}", metavar="|".join(choices) if len(choices) > 1 else "VALUE", help=text)


def _unknown(argument: str, parser: _Parser, command: str | None) -> str:
    name = argument.split("=")[0]
    if not name.startswith("-"):
        hint = "; a configuration is given with --config FILE" if name.endswith(".toml") else ""
        return f"{argument}: {command} takes no such argument{hint}"
    chosen: argparse.ArgumentParser = parser
    if command:
        chosen = next(action.choices[command] for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    known = [option for action in chosen._actions for option in action.option_strings if option.startswith("--")]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "--help lists all"
    return f"{name}: unknown option; {hint}"


def _value(text: str) -> Any:
    """A value as TOML would read it, and as a string where it is none (a path, "1GiB", auto)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number with thousands of digits
        return text


def _engine(config: RuntimeConfig, out: Console, errors: Console, quiet: bool = False) -> Engine:
    report = lambda line: None if quiet else out.print(line, markup=False)
    with _bar(errors) as progress:
        return Engine(config=config, report=report, progress=progress)


@contextmanager
def _bar(errors: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, as the function that moves it; where nobody would see it, one that does nothing."""
    if not errors.is_terminal:
        yield lambda done, total, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _plan(arguments: argparse.Namespace, config: RuntimeConfig, out: Console, errors: Console) -> int:
    simulate_command.check_outputs(arguments, "json")
    if not (math.isfinite(arguments.budget_s) and arguments.budget_s >= 0):
        raise UsageError(f"--budget-s: expected a number of seconds, 0 or more, got {arguments.budget_s}")
    engine = _engine(config, out, errors)
    out.print(engine.plan)
    if arguments.json:
        with _bar(errors) as progress:
            costs = measure_steps(engine.runner, progress, budget_s=arguments.budget_s)
        Path(arguments.json).write_text(json.dumps(costs, indent=1) + "\n")
        for each in costs["check"]:
            beside = f"{each['decodes']} decodes + {each['chunk']} prompt tokens at context {each['context']}"
            out.print(f"check: {beside}: {each['ms']:.3f} ms measured, {each['table_ms']:.3f} ms by the table")
    return 0


def _bench(arguments: argparse.Namespace, config: RuntimeConfig, out: Console, errors: Console) -> int:
    run = bench_command.prepare(arguments, config)  # what is wrong with the options is said before the model is loaded
    engine = _engine(config, out, errors)
    out.print(engine.plan)
    with _bar(errors) as progress:
        run(engine, out, progress)
    return 0


def _simulate(arguments: argparse.Namespace, config: RuntimeConfig, out: Console, errors: Console) -> int:
    simulate_command.run(arguments, config, out)
    return 0


def _generate(arguments: argparse.Namespace, config: RuntimeConfig, out: Console, errors: Console) -> int:
    return generate_command.run(arguments, config, lambda: _engine(config, out, errors, arguments.quiet), out, errors)


def _explain(arguments: argparse.Namespace, config: RuntimeConfig, out: Console, errors: Console) -> int:
    batches = [explain_command.batch_of(text, config) for text in arguments.batches]  # wrong ones are said before the model is loaded
    explain_command.run(arguments.batches, batches, _engine(config, out, errors), out, arguments.all)
    return 0
