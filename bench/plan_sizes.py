"""Padding of planned capture sizes on a real request trace, against the usual list in steps of 8.

    python bench/plan_sizes.py [--graphs 32] [--max-tokens 512] [--json FILE]

The step sizes come from a plain simulation of continuous batching, decode first: each step takes one token of every running request,
then prompt chunks of waiting ones, in order of arrival, up to 8192 tokens. A step lasts 5 ms and 10 µs a token (about a model of
8 B parameters on an H200). Steps above ``--max-tokens`` have no graph and do not count.
Padding is the share of rows of the captured steps that hold no token. The optimum is found by the planner's own dynamic program with
rows as cost, which tests/runtime/test_sizes.py checks against brute force.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, deque
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.sizes import padding_share, plan_sizes

TRACE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"
USUAL = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]


class Arrival(NamedTuple):
    second: float
    prompt: int
    generated: int


def read_trace(path: Path = TRACE) -> list[Arrival]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [
            (datetime.fromisoformat(r["TIMESTAMP"][:26]), int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)
        ]
    start = rows[0][0]
    return [Arrival((when - start).total_seconds(), max(prompt, 1), max(generated, 1)) for when, prompt, generated in rows]


def step_sizes(
    arrivals: list[Arrival], rate: float, *, budget: int = 8192, max_seqs: int = 256, step_s: float = 0.005, token_s: float = 1e-5
) -> Counter[int]:
    """How many steps of each size the trace makes when its arrivals come ``rate`` times as fast."""
    counts: Counter[int] = Counter()
    waiting: deque[list[int]] = deque()  # [prompt tokens still to run, tokens still to generate]
    running: Counter[int] = Counter()  # step number at which so many requests end
    decoding = step = at = 0
    now = 0.0
    while at < len(arrivals) or waiting or decoding:
        while at < len(arrivals) and arrivals[at].second / rate <= now:
            waiting.append([arrivals[at].prompt, arrivals[at].generated])
            at += 1
        if not waiting and not decoding:
            now = arrivals[at].second / rate
            continue
        tokens, begun = decoding, []
        while waiting and tokens < budget and decoding + len(begun) < max_seqs:
            chunk = min(waiting[0][0], budget - tokens)
            tokens += chunk
            waiting[0][0] -= chunk
            if waiting[0][0]:
                break
            begun.append(waiting.popleft()[1] - 1)  # the last chunk gives the first token
        counts[tokens] += 1
        step += 1
        now += step_s + token_s * tokens
        decoding -= running.pop(step, 0)
        for left in begun:
            if left:
                running[step + left] += 1
                decoding += 1
    return counts


def report(graphs: int, max_tokens: int, rates: list[float]) -> list[dict[str, object]]:
    arrivals = read_trace()
    rows = []
    for rate in rates:
        histogram = step_sizes(arrivals, rate)
        planned = plan_sizes(histogram, graphs, max_tokens=max_tokens, required=[256])
        free = plan_sizes(histogram, graphs, max_tokens=max_tokens)
        usual = [n for n in USUAL if n <= max_tokens]
        rows.append({
            "rate": rate, "steps": sum(histogram.values()), "captured_steps": sum(c for n, c in histogram.items() if n <= max_tokens),
            "graphs": len(planned), "padding": padding_share(histogram, planned), "optimum": padding_share(histogram, free),
            "usual_graphs": len(usual), "usual_padding": padding_share(histogram, usual), "sizes": planned,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graphs", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 3.0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    rows = report(arguments.graphs, arguments.max_tokens, arguments.rates)
    print(f"{'rate':>5} {'steps':>8} {'graphs':>7} {'padding':>8} {'optimum':>8} {'usual list':>16}")
    for r in rows:
        usual = f"{r['usual_padding']:.2%} of {r['usual_graphs']}"
        print(f"{r['rate']:>4}x {r['steps']:>8} {r['graphs']:>7} {r['padding']:>8.2%} {r['optimum']:>8.2%} {usual:>16}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
