"""Tables and pictures from results files: nobody types a figure.

    python bench/report.py                    write the tables between markers in README.md and docs/, and the pictures in docs/img/
    python bench/report.py --check            exit 1 and name what is stale, and change nothing
    python bench/report.py compare OLD NEW    what became slower or faster between two runs of `pytest bench/ --benchmark-json=…`

A table stands between ``<!-- results: NAME -->`` and ``<!-- /results -->``. NAME is a benchmark function without ``test_``
(``add_rms_norm``), or ``file:NAME`` for a results file that a script wrote. Results lie in ``bench/results/``; of several runs on one
GPU the newest that has the benchmark counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs as a script

from bench.pictures import OURS, digest, draw, pictures  # noqa: E402
from bench.results_files import RESULTS, Row, Run, load, newest, runs  # noqa: E402

_MARKER = re.compile(r"(<!-- results: (?P<name>[^>]+?) -->\n)(?P<body>.*?)(<!-- /results -->)", re.DOTALL)
_GONE = " (its results are gone)"
_SLOWER = 1.05  # a ratio above this is a regression


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3g}"


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join('---' for _ in header)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in body)]) + "\n"


def _caption(run: Run) -> str:
    machine = run.machine
    facts = [f"torch {machine.get('torch')}", f"triton {machine.get('triton')}", f"driver {machine.get('driver')}"]
    return f"{run.gpu}, {', '.join(facts)}, commit {machine.get('commit')}, {run.when[:10]} (`bench/results/{run.file}`)."


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    percent = row.info.get("percent_of_roof")
    return _number(row.us) + (f" ({percent:.0f}%)" if percent is not None else "")


def pivot(run: Run, rows: list[Row]) -> str:
    """Cases down, peers across, microseconds and percent of the roof; the fastest of a line in bold."""
    cases, peers = list(dict.fromkeys(row.case for row in rows)), list(dict.fromkeys(row.peer for row in rows))
    at = {(row.case, row.peer): row for row in rows}
    body = []
    for case in cases:
        line = [at.get((case, peer)) for peer in peers]
        best = min(row.us for row in line if row is not None)
        body.append([case, *(f"**{_cell(row)}**" if row is not None and row.us == best else _cell(row) for row in line)])
    absent = sorted(f"{peer} ({why.removeprefix('absent: ')})" for peer, why in run.machine.get("peers", {}).items() if "absent" in why)
    roof = next((row.info["roof"] for row in rows if "roof" in row.info), None)
    unit = "Microseconds"
    if roof:
        unit += f" (percent of the measured roof: {roof['gb_per_s'] / 1e3:.2f} TB/s copied, {roof['tflop_per_s']:.0f} TFLOP/s)"
    note = f" Absent: {', '.join(absent)}." if absent else ""
    if run.machine.get("note"):
        note += f" Note: {run.machine['note']}."
    return markdown(["", *peers], body) + f"\n{unit}. {_caption(run)}{note}\n"


def _by_peer(rows: list[dict[str, Any]], title: str) -> str:
    """Times of a script's rows, peers across."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row["us"]))
    extra = [key for key in ("floor_us",) if key in rows[0]]
    body = [[row["case"], *(_plain(row[key]) for key in extra), *(_plain(row["us"].get(peer)) for peer in peers)] for row in rows]
    return markdown([title, *extra, *peers], body)


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of several kinds apart, by ``what`` they are; regret's belong to its warm-up, which has no table of its own."""
    kinds = dict.fromkeys(row.get("what", "") for row in rows)
    if len(kinds) < 2 or "regret" in kinds:
        return {"": rows}
    return {f"{kind.capitalize()}:": [row for row in rows if row.get("what", "") == kind] for kind in kinds}


_HOST = {"call_us": "a call", "adds_us": "it adds", "staged_adds_us": "staged adds", "sweep_us": "the sweep", "per_piece_us": "a piece"}


def _of_host_times(rows: list[dict[str, Any]]) -> str:
    """A line for each batch, with the parts of a call."""
    rows = [row for row in rows if "skipped" not in row]  # by the end of the run's time
    parts = [part for part in rows[0]["call_parts_us"] if part != "whole"]
    header = ["mode", "batch", *_HOST.values(), *(f"a call's {part}" for part in parts)]
    body = [
        [row["mode"], str(row["batch"]), *(_plain(row[fact]) for fact in _HOST), *(_plain(row["call_parts_us"][part]) for part in parts)]
        for row in rows
    ]
    return markdown(header, body)


def _of_starts(rows: list[dict[str, Any]]) -> str:
    """What captured steps cost the host: a line for each mode and batch."""
    facts = _HOST
    header = ["mode", "batch", *facts.values(), "all graphs, MiB", "their capture, s"]
    body = []
    for row in (row for row in rows if row["what"] == "start-up"):
        graphs = [_plain(row["graph_mib"]), _plain(row["graph_only_s"])]
        for batch in (key for key in row if key.startswith("batch ")):
            body.append([row["mode"], batch.removeprefix("batch "), *(_plain(row[batch][fact]) for fact in facts), *graphs])
    return markdown(header, body)


def _of_regret(rows: list[dict[str, Any]]) -> str:
    """Picks against what was the best when every size was timed again: a line for each context and kind of step."""
    header = ["context", "steps", "sizes timed", "picks: full, piecewise, eager", "within 2% of the best", "worst"]
    body = []
    for row in (row for row in rows if row["what"] == "regret" and "skipped" not in row):
        worst = row["worst"]
        at = f"{worst['regret']:.1%} at {worst['tokens']}: {' '.join(map(str, worst['pick']))}, best {' '.join(map(str, worst['best']))}"
        kind = "decode" if row["key"] == "max_query_len=1" else "with prompts"
        picks = ", ".join(str(row["picks"][mode]) for mode in ("full", "piecewise", "eager"))
        body.append([str(row["context"]), kind, str(row["sizes"]), picks, f"{row['share_within_2_percent']:.1%}", at])
    return markdown(header, body)


def _of_profile(rows: list[dict[str, Any]]) -> str:
    """Shares of a step by kernel and grid, a column for each batch: what takes 1% of a step somewhere, the rest together, the gaps."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    share: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["kernel"] != "gaps":
            share.setdefault((row["kernel"], "×".join(map(str, row["grid"]))), {})[row["batch"]] = row["share_us"]
    whole = {batch: sum(each.get(batch, 0.0) for each in share.values()) for batch in batches}
    shown = [each for each, us in share.items() if any(us.get(batch, 0.0) > 0.01 * whole[batch] for batch in batches)]
    body = [[name, grid, *(_plain(share[name, grid].get(batch)) for batch in batches)] for name, grid in shown]
    others = {batch: whole[batch] - sum(share[each].get(batch, 0.0) for each in shown) for batch in batches}
    gaps = {row["batch"]: row["share_us"] for row in rows if row["kernel"] == "gaps"}
    for title, values in (("others", others), ("all kernels", whole), ("gaps", gaps)):
        body.append([title, "", *(_plain(values[batch]) for batch in batches)])
    return markdown(["kernel", "grid", *(f"batch {batch}" for batch in batches)], body)


def _of_policies(rows: list[dict[str, Any]]) -> str:
    """Simulated traffic: a line for each rate and policy."""
    header = ["rate", "policy", "goodput", "tokens/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "padding", "eager tokens", "running"]
    body = []
    for row in sorted(rows, key=lambda row: (row["rate"], row["policy"])):
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        body.append([
            f"{row['rate']:g}x", row["policy"], f"{row['goodput']:.1%}", f"{row['generated_tokens_per_s']:.0f}", f"{ttft['p50']:.1f}",
            f"{itl['p50']:.2f}", f"{itl['p99']:.1f}", f"{row['padding']:.2%}", f"{row['tokens_by_mode']['eager']:.2%}",
            f"{row['mean_running']:.1f}",
        ])  # fmt: skip
    return markdown(header, body)


def script_table(name: str, folder: Path = RESULTS) -> str:
    """The rows of a results file that a script wrote: by peer where they have ``tflops`` or many ``us``, by ``name``, else as they are."""
    path = folder / f"{name}.json"
    if not path.exists():
        return f"*Not measured yet: no `bench/results/{name}.json`.*\n"
    data = json.loads(path.read_text())
    groups = data["rows"] if isinstance(data["rows"], dict) else _by_kind(data["rows"])
    parts = []
    unit = "Microseconds"
    for title, rows in groups.items():
        if not rows:  # the only ones of a file may be of one kind
            continue
        if "tflops" in rows[0]:
            unit = "TFLOP/s"
            timed = [row for row in rows if "tflops" not in row]
            rows = [row for row in rows if "tflops" in row]
            peers = list(dict.fromkeys(peer for row in rows for peer in row["tflops"]))
            keys = [key for key in ("case", "page_size") if key in rows[0]]
            table = markdown(
                [*keys, *peers],
                [[*(str(row[key]) for key in keys), *(_plain(row["tflops"].get(peer)) for peer in peers)] for row in rows],
            )
            if timed:
                table += "\n" + _by_peer(timed, "case, µs")
        elif isinstance(rows[0].get("us"), dict):
            table = _by_peer(rows, "case")
        elif rows[0].get("what") == "start-up":
            table = _of_starts(rows)
        elif rows[0].get("what") == "host time":
            table = _of_host_times(rows)
        elif "share_us" in rows[0]:
            table = _of_profile(rows)
        elif any(row.get("what") == "regret" for row in rows):
            table, unit = _of_regret(rows), "Units stand in the header"
        elif isinstance(rows[0].get("tokens_by_mode"), dict):
            table = _of_policies(rows)
        elif "name" in rows[0]:
            known = [key for key, value in rows[0].items() if key not in ("name", "us") and isinstance(value, (int, str))]
            keys = [*known, *(key for key in ("floor_us",) if key in rows[0])]
            names = list(dict.fromkeys(row["name"] for row in rows))
            lines: dict[tuple[Any, ...], dict[str, float]] = {}
            for row in rows:
                lines.setdefault(tuple(row[key] for key in keys), {})[row["name"]] = row["us"]
            body = [
                [
                    *(_plain(each) if isinstance(each, float) else str(each) for each in key),
                    *(_number(values[name]) if name in values else "–" for name in names),
                ]
                for key, values in lines.items()
            ]
            table = markdown([*keys, *names], body)
        else:
            keys = list(dict.fromkeys(key for row in rows for key in row))
            table = markdown(keys, [[_plain(row.get(key)) for key in keys] for row in rows])
            if "seconds" in keys:
                unit = "Units stand in the header"
        parts.append((f"{title}\n\n" if title else "") + table)
    machine, unit = data["machine"], data.get("unit", unit)
    caption = f"{unit}. {machine.get('gpu')}, torch {machine.get('torch')}, triton {machine.get('triton')}, commit {machine.get('commit')}"
    return "\n".join(parts) + f"\n{caption} (`bench/results/{name}.json`: `{data['command']}`).\n"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return "–" if value is None else _number(value) if isinstance(value, float) else str(value)


def table(name: str, folder: Path = RESULTS) -> str:
    """What stands between the markers of ``name``."""
    if name.startswith("file:"):
        return script_table(name.removeprefix("file:"), folder)
    chosen = newest(runs(folder), name)
    if not chosen:
        return f"*Not measured yet: `pytest bench/ -k {name} --benchmark-json=bench/results/NAME.json`, then `python bench/report.py`.*\n"
    return "\n".join(pivot(run, rows) for _, (run, rows) in sorted(chosen.items()))


def filled(text: str, folder: Path = RESULTS) -> str:
    """A document with its tables made anew."""
    return _MARKER.sub(lambda match: f"{match[1]}{table(match['name'].strip(), folder)}{match[4]}", text)


def documents(root: Path = ROOT) -> list[Path]:
    return [path for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))] if path.exists()]


def stale(root: Path = ROOT) -> list[str]:
    """Documents and pictures that do not show what the results files say."""
    results = root / "bench" / "results"
    found = [str(path.relative_to(root)) for path in documents(root) if filled(path.read_text(), results) != path.read_text()]
    wanted = pictures(runs(results))
    for name, (_, data) in wanted.items():
        path = root / "docs" / "img" / name
        if not path.exists() or digest(data) not in path.read_text():
            found.append(f"docs/img/{name}")
    made = (path.name for kind in ("roofline", "modes") for path in (root / "docs" / "img").glob(f"{kind}_*.svg"))
    return found + [f"docs/img/{name}{_GONE}" for name in made if name not in wanted]


def write(root: Path = ROOT) -> list[str]:
    """Make everything anew; returns what changed."""
    changed = stale(root)
    for path in documents(root):
        path.write_text(filled(path.read_text(), root / "bench" / "results"))
    for name, (kind, data) in pictures(runs(root / "bench" / "results")).items():
        if f"docs/img/{name}" in changed:
            draw(kind, data, root / "docs" / "img" / name)
    for name in changed:
        if name.endswith(_GONE):
            (root / name.removesuffix(_GONE)).unlink()
    return changed


def compare(old: Run, new: Run) -> tuple[str, int]:
    """(a table of every benchmark that both runs have, worst first; how many of ours became slower)."""
    before = {(row.name, row.case, row.peer): row for row in old.rows}
    shared = [(before[key], row) for row in new.rows if (key := (row.name, row.case, row.peer)) in before]
    shared.sort(key=lambda pair: pair[0].us / pair[1].us)
    body, slower = [], 0
    for was, now in shared:
        ratio = now.us / was.us
        word = "slower" if ratio > _SLOWER else "faster" if ratio < 1 / _SLOWER else ""
        slower += ratio > _SLOWER and now.peer.startswith(OURS)
        body.append([now.name, now.case, now.peer, _number(was.us), _number(now.us), f"{ratio:.3f}", word])
    text = markdown(["benchmark", "case", "peer", "old µs", "new µs", "new / old", ""], body)
    if old.gpu != new.gpu:
        text = f"Different machines: {old.gpu} and {new.gpu}.\n\n{text}"
    return text + f"\nOld: {_caption(old)}\nNew: {_caption(new)}\n", slower


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    commands = parser.add_subparsers(dest="command")
    comparing = commands.add_parser("compare", help="table of two runs; exit 1 if one of our kernels became slower")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "compare":
        try:
            text, slower = compare(load(options.old), load(options.new))
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(text)
        if slower:
            print(f"{slower} of our benchmarks became more than {100 * (_SLOWER - 1):.0f}% slower", file=sys.stderr)
        return int(slower > 0)
    changed = stale() if options.check else write()
    for name in changed:
        print(f"{'stale' if options.check else 'written'}: {name}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
