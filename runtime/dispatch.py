"""Which captured step, if any, runs a batch: the cheapest legal candidate by measured cost, padding included.

A candidate is a captured (mode, size), or eager at the batch's own size. Legal means: captured for the same key (the host values
that a graph has frozen), and every named size fits. Of candidates within the noise of a measurement the one that pads least is taken. A
key that was never captured runs eager and is counted. ``graph.pick = "nearest"`` takes the smallest legal graph whatever it costs. Pure
Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.measure import CostTable
from runtime.plan import NOISE, between, choose

MODES = ("full", "piecewise", "eager")


@dataclass(frozen=True)
class Alternative:
    mode: str
    size: int
    ms: float | None
    reason: str
    """Why it was not picked."""


@dataclass(frozen=True)
class Decision:
    """mode and size of the step, the padding rows in it, its predicted cost (None: not measured), and what else there was."""

    mode: str
    size: int
    padding: int
    ms: float | None
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    context: int = 0
    """The measured context whose costs decided, in tokens a sequence; 0 where costs do not depend on it."""

    def __str__(self) -> str:
        cost = "not measured" if self.ms is None else f"{self.ms:.3f} ms" + (f" at a context of {self.context}" if self.context else "")
        lines = [f"{self.mode} at size {self.size}, {self.padding} padding rows, {cost}: {self.reason}"]
        unmeasured: dict[tuple[str, str], list[int]] = {}  # one line for all sizes of a mode that were not captured for one reason
        for a in self.alternatives:
            if a.ms is None:
                unmeasured.setdefault((a.mode, a.reason), []).append(a.size)
            else:
                lines.append(f"  not {a.mode} at {a.size} ({a.ms:.3f} ms): {a.reason}")
        lines += [f"  not {mode} at {', '.join(map(str, sorted(sizes)))}: {why}" for (mode, why), sizes in unmeasured.items()]
        return "\n".join(lines)


@dataclass
class Candidates:
    """What is captured for one key. graphs[(mode, size)]: the padded value of every named size; exact: no padding allowed, in none."""

    graphs: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    dropped: dict[tuple[str, int], str] = field(default_factory=dict)
    exact: bool = False


class Dispatcher:
    """table: measured costs. mode: "auto", or the one mode to use. token: the named size that is the step's size. nearest: the smallest
    graph that fits, not the cheapest."""

    def __init__(self, table: CostTable, *, mode: str = "auto", token: str = "tokens", nearest: bool = False) -> None:
        self.table, self.mode, self.token, self.nearest = table, mode, token, nearest
        self.keys: dict[str, Candidates] = {}
        self._counts: dict[tuple[str, int, str, int], list[int]] = {}  # what is asked of it is added up when asked
        self.unknown_keys: Counter[str] = Counter()
        self.eager_reasons: Counter[str] = Counter()
        self._picks: dict[tuple[str, int, int], Decision] = {}
        self._buckets: dict[int | None, int] = {}
        self.memo: dict[Any, Any] = {}
        """For what a caller makes of decisions: forgotten together with them."""

    def changed(self) -> None:
        """Candidates or costs have changed: forget the decisions made so far."""
        self.memo.clear()
        self._picks.clear()
        self._buckets.clear()

    def dispatch(self, key: str, sizes: Mapping[str, int], illegal: str = "", context: int | None = None) -> Decision:
        """Decide and count. illegal: why no graph may serve this call, if there is a reason outside sizes and key.

        context: the step's tokens of context a sequence, as far as the caller knows; it only chooses among measured costs.
        """
        pick = self.pick(key, sizes, illegal, context)
        self.count(key, sizes[self.token], pick)
        return pick

    def pick(self, key: str, sizes: Mapping[str, int], illegal: str = "", context: int | None = None) -> Decision:
        """The decision, remembered where it can be; not counted."""
        n = sizes[self.token]
        bucket = self.bucket(context)
        pick = self._picks.get((key, n, bucket))
        if pick is None:
            pick = self._picks[key, n, bucket] = self.decide(key, {self.token: n}, brief=True, context=bucket)
        if illegal or (pick.mode != "eager" and not self._serves(key, pick, sizes)):
            pick = self.decide(key, sizes, illegal, brief=True, context=bucket)
        return pick

    def bucket(self, context: int | None) -> int:
        """The measured context whose costs decide at this one, remembered."""
        bucket = self._buckets.get(context)
        if bucket is None:
            bucket = self._buckets[context] = self.table.bucket(context)
        return bucket

    def _serves(self, key: str, pick: Decision, sizes: Mapping[str, int]) -> bool:
        """Whether a pick for the step's own size is one for its other sizes too."""
        candidates = self.keys[key]
        padded = candidates.graphs[pick.mode, pick.size]
        return _fits(sizes, padded) and not (candidates.exact and _pads(sizes, padded))

    def count(self, key: str, n: int, pick: Decision) -> None:
        self.counter(key, n, pick)[0] += 1
        if pick.mode == "eager":
            self.eager_reasons[pick.reason] += 1
            if key not in self.keys:
                self.unknown_keys[key] += 1

    def counter(self, key: str, n: int, pick: Decision) -> list[int]:
        """The count of such steps, in a list of one, for a caller that counts many of them itself; not of eager ones."""
        return self._counts.setdefault((key, n, pick.mode, pick.size), [0])

    @property
    def steps(self) -> Counter[tuple[str, int]]:
        return self._added_up(lambda key, n, mode, size: (mode, size))

    @property
    def padding(self) -> Counter[tuple[str, int]]:
        return self._added_up(lambda key, n, mode, size: (mode, size), lambda n, size: size - n)

    @property
    def step_sizes(self) -> Counter[int]:
        return self._added_up(lambda key, n, mode, size: n)

    @property
    def steps_of_key(self) -> Counter[str]:
        return self._added_up(lambda key, n, mode, size: key)

    def _added_up(self, by: Callable[[str, int, str, int], Any], weight: Callable[[int, int], int] = lambda n, size: 1) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        for (key, n, mode, size), (count,) in list(self._counts.items()):  # a list: another thread may be counting
            if count:
                counts[by(key, n, mode, size)] += count * weight(n, size)
        return counts

    def decide(self, key: str, sizes: Mapping[str, int], illegal: str = "", *, brief: bool = False, context: int | None = None) -> Decision:
        """The decision with its reasons, uncounted. brief: without the alternatives."""
        n = sizes[self.token]
        candidates = self.keys.get(key)
        context = self.table.bucket(context)
        eager_ms = self.eager_ms(key, n, context)

        def cost(mode: str, size: int) -> float | None:
            return self.table.padded(key, mode, size, min(n, size), context)

        def eager(reason: str, others: list[Alternative]) -> Decision:
            largest = max(self.table.at(key, "eager", context), default=0)  # beyond it eager_ms is that one's, which says nothing of n
            return Decision("eager", n, 0, eager_ms if n <= largest else None, reason, tuple(others), context)

        if illegal:
            return eager(illegal, [])
        if self.mode == "eager":
            return eager('graph.mode = "eager"', [])
        if candidates is None:
            return eager(f"nothing was captured for the host values {key}", [])
        if n == 0:
            return eager("an empty step", [])
        legal: list[tuple[tuple[Any, ...], str, int]] = []
        others: list[Alternative] = []
        for (mode, size), padded in sorted(candidates.graphs.items(), key=lambda item: (item[0][1], MODES.index(item[0][0]))):
            ms = cost(mode, size)
            why = ""
            if self.mode not in ("auto", mode):
                why = f'graph.mode = "{self.mode}"'
            elif not _fits(sizes, padded):
                if brief:
                    continue
                short = next(name for name, value in sizes.items() if value > padded[name])
                why = f"too small: {sizes[short]} {short}, it holds {padded[short]}"
            elif candidates.exact and _pads(sizes, padded):
                why = "this module's rows are not independent: padding would change the result"
            if why:
                others.append(Alternative(mode, size, ms, why))
            else:
                legal.append(((size, MODES.index(mode)) if self.nearest else _order(ms, mode, size), mode, size))
        for (mode, size), why in candidates.dropped.items():
            others.append(Alternative(mode, size, None, f"not captured: {why}"))
        if not legal:
            largest = max((size for _, size in candidates.graphs), default=0)
            exactly = ", ".join(f"{value} {name}" for name, value in sizes.items())
            return eager(
                f"no captured size holds {n} {self.token} (largest: {largest})"
                if not candidates.exact
                else f"no graph of exactly {exactly}",
                others,
            )
        legal.sort()
        _, mode, size = legal[0]
        ms = least = cost(mode, size)
        reason = "the cheapest that fits" if ms is not None else "not measured: a full graph first, then the smallest that fits"
        if ms is not None and not self.nearest:
            chosen = choose([(other, m, s) for _, m, s in legal if (other := cost(m, s)) is not None])
            if chosen[2] < size:
                ms, mode, size = chosen
                legal.sort(key=lambda each: each[1:] != (mode, size))
                reason = f"within {NOISE:.0%} of the cheapest that fits, and pads less"
        if self.mode == "auto" and not self.nearest and least is not None and eager_ms is not None and eager_ms <= least:
            others += [Alternative(m, s, cost(m, s), "slower than eager") for _, m, s in legal]
            return eager("no graph that fits is cheaper", others if not brief else [])
        if not brief:
            why = 'graph.pick = "nearest"' if self.nearest else "not the cheapest"
            others = [Alternative(m, s, other := cost(m, s), why if not _below(other, ms) else "pads more")
                      for _, m, s in legal[1:]] + others  # fmt: skip
            if eager_ms is not None:
                why = f'graph.mode = "{self.mode}"' if self.mode != "auto" else why if self.nearest else "slower"
                others.insert(0, Alternative("eager", n, eager_ms, why))
        if self.nearest:
            return Decision(mode, size, size - n, ms, 'graph.pick = "nearest": the smallest that fits', tuple(others), context)
        return Decision(mode, size, size - n, ms, reason, () if brief else tuple(others), context)

    def eager_ms(self, key: str, n: int, context: int | None = None) -> float | None:
        """Eager cost at n, straight between the measured sizes."""
        return between(self.table.at(key, "eager", self.table.bucket(context)), n)

    def graph_ms(self, key: str, size: int) -> float:
        """What a graph of this size would cost: the cheapest mode, straight between the measured sizes; the size if none was."""
        costs = [ms for mode in ("full", "piecewise") if (ms := between(self.table.at(key, mode), size)) is not None]
        return min(costs, default=float(size))

    def stats(self) -> dict[str, Any]:
        """Counts since the start: steps and padding rows by mode and size, and why steps ran eager."""
        steps, padding, step_sizes = self.steps, self.padding, self.step_sizes
        return {
            "steps": {mode: {s: c for (m, s), c in sorted(steps.items()) if m == mode} for mode in MODES},
            "padding_rows": sum(padding.values()),
            "padding_by_mode": {mode: sum(c for (m, _), c in padding.items() if m == mode) for mode in MODES},
            "rows": sum(n * c for n, c in step_sizes.items()) + sum(padding.values()),
            "step_sizes": dict(sorted(step_sizes.items())),
            "unknown_keys": dict(self.unknown_keys),
            "eager_reasons": dict(self.eager_reasons),
        }


def _fits(sizes: Mapping[str, int], padded: Mapping[str, int]) -> bool:
    return all(padded[name] >= value for name, value in sizes.items())


def _pads(sizes: Mapping[str, int], padded: Mapping[str, int]) -> bool:
    return any(padded[name] != value for name, value in sizes.items())


def _below(ms: float | None, other: float | None) -> bool:
    return ms is not None and other is not None and ms < other


def _order(ms: float | None, mode: str, size: int) -> tuple[Any, ...]:
    """Measured ones by cost; without a measurement full before piecewise, then the smallest."""
    return (0, ms, MODES.index(mode), size) if ms is not None else (1, MODES.index(mode), size, 0)


def regret(picks: Mapping[int, tuple[str, int]], measured: Mapping[int, Mapping[tuple[str, int], float]]) -> list[dict[str, Any]]:
    """For each step size: the pick, the best measured candidate, and how much slower the pick is, as a share."""
    rows = []
    for n, pick in sorted(picks.items()):
        best = min(measured[n], key=measured[n].__getitem__)
        rows.append({"tokens": n, "pick": pick, "pick_ms": measured[n][pick], "best": best, "best_ms": measured[n][best],
                     "regret": measured[n][pick] / measured[n][best] - 1.0})  # fmt: skip
    return rows
