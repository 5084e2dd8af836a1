"""Which step sizes get a graph.

``capture_sizes`` reads the configuration: explicit lists are checked, deduplicated and clipped; ``"auto"`` is planned. In either
case the largest size and the request limit are captured, unless the list is explicitly empty, which turns graphs off.

The planner picks, for a histogram of step sizes, the k sizes with the least total cost when every step is padded up to the next
size, by dynamic programming over the sizes that occur. cost: what a step padded to a size costs; by default its row count, so
that the plan has the fewest padding rows possible.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np


def default_histogram(max_tokens: int) -> dict[int, float]:
    """For lack of anything known: size n weighs 1/n. Every octave of sizes is as likely, which is flat in padding *share*."""
    return {n: 1.0 / n for n in range(1, max_tokens + 1)}


def load_histogram(path: str | Path) -> dict[int, float]:
    """A file of step sizes: JSON ``{"size": count}``, as ``stats()["step_sizes"]`` is, or one size a line, each counted once."""
    try:
        text = Path(path).expanduser().read_text()
    except OSError as error:
        raise ValueError(f"graph.histogram: {path}: cannot be read: {error.strerror}") from error
    try:
        if text.lstrip().startswith("{"):
            histogram = {int(size): float(count) for size, count in json.loads(text).items()}
        else:
            histogram = {}
            for line in text.split():
                histogram[int(line)] = histogram.get(int(line), 0.0) + 1.0
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f'graph.histogram: {path}: expected JSON {{"size": count}} or one step size a line: {error}') from error
    if not histogram or min(histogram) < 0 or min(histogram.values()) < 0:
        raise ValueError(f"graph.histogram: {path}: expected step sizes and counts of at least 0, and at least one")
    return histogram


def capture_sizes(
    configured: Literal["auto"] | Iterable[int],
    *,
    max_tokens: int,
    max_num_seqs: int,
    max_graphs: int = 32,
    histogram: Mapping[int, float] | None = None,
    cost: Callable[[int], float] | None = None,
) -> tuple[list[int], str]:
    """The sizes to capture, ascending, and a remark for the user ("" if there is nothing to say)."""
    required = {max_tokens, min(max_num_seqs, max_tokens)}
    if isinstance(configured, str):
        return plan_sizes(histogram or default_histogram(max_tokens), max_graphs, max_tokens=max_tokens, required=required, cost=cost), ""
    sizes = list(configured)
    bad = [n for n in sizes if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if bad:
        raise ValueError(f"graph.capture_sizes: expected token counts of at least 1, got {bad[0]!r}")
    if not sizes:
        return [], "graph.capture_sizes = []: graphs are off"
    clipped = sorted({n for n in sizes if n > max_tokens})
    remark = f"graph.capture_sizes: {clipped} left out, they are above graph.max_tokens = {max_tokens}" if clipped else ""
    return sorted({n for n in sizes if n <= max_tokens} | required), remark


def plain_sizes(max_tokens: int) -> list[int]:
    """The plain list: 1, 2, 4, and then in steps of 8."""
    return [size for size in (1, 2, 4, *range(8, max_tokens + 1, 8)) if size <= max_tokens]


def plan_sizes(
    histogram: Mapping[int, float],
    count: int,
    *,
    max_tokens: int,
    required: Iterable[int] = (),
    cost: Callable[[int], float] | None = None,
) -> list[int]:
    """At most ``count`` sizes (more only if more are required) with the least total cost over the histogram.

    Steps above ``max_tokens`` run without a graph and do not count. O(n² · count) in numpy, for n sizes that occur.
    """
    must = sorted({n for n in required if 1 <= n <= max_tokens} | {max_tokens})
    occurring = sorted({n for n, weight in histogram.items() if 1 <= n <= max_tokens and weight > 0} | set(must))
    sizes = np.array(occurring)
    weight = np.array([float(histogram.get(n, 0.0)) for n in occurring])
    price = np.array([float(n if cost is None else cost(n)) for n in occurring])
    below = np.concatenate([[0.0], np.cumsum(weight)])  # weight of the sizes before i
    n, forced = len(sizes), np.isin(sizes, must)
    # best[j]: least cost of all steps up to sizes[j], the last graph being j; one more graph in each round
    best = below[1:] * price
    last_forced = np.maximum.accumulate(np.where(forced, np.arange(n), -1))
    best[np.concatenate([[-1], last_forced[:-1]]) >= 0] = np.inf  # a required size lies below the only graph
    came_from: list[np.ndarray] = []
    # step[j, i]: cost of the steps in (sizes[i], sizes[j]] when padded to sizes[j]
    step = (below[1:, None] - below[None, 1:]) * price[:, None]
    index = np.arange(n)
    previous_forced = np.concatenate([[-1], last_forced[:-1]])
    step[(index[None, :] >= index[:, None]) | (index[None, :] < previous_forced[:, None])] = np.inf
    results = [best[-1]]
    total = np.empty_like(step)
    for _ in range(max(count, len(must)) - 1):
        np.add(step, best[None, :], out=total)
        source = total.argmin(axis=1)
        best = total[index, source]
        came_from.append(source)
        results.append(best[-1])
    graphs = int(np.argmin(results))  # fewest graphs that reach the optimum
    picked, at = [n - 1], n - 1
    for source in reversed(came_from[:graphs]):
        at = int(source[at])
        picked.append(at)
    return [int(sizes[i]) for i in reversed(picked)]


def interval_weights(histogram: Mapping[int, float], sizes: Iterable[int]) -> dict[int, float]:
    """For each size, the share of the steps that it is the next size for."""
    ascending = sorted(set(sizes))
    weights = dict.fromkeys(ascending, 0.0)
    for n, weight in histogram.items():
        if 1 <= n <= ascending[-1]:
            weights[ascending[bisect_left(ascending, n)]] += weight
    total = sum(weights.values()) or 1.0
    return {size: weight / total for size, weight in weights.items()}


def padding_share(histogram: Mapping[int, float], sizes: Iterable[int]) -> float:
    """Padding rows / all rows of the steps that a graph of these sizes serves."""
    ascending = np.array(sorted(sizes))
    real = rows = 0.0
    for n, count in histogram.items():
        if 1 <= n <= (ascending[-1] if len(ascending) else 0):
            real += n * count
            rows += int(ascending[np.searchsorted(ascending, n)]) * count
    return 1.0 - real / rows if rows else 0.0
