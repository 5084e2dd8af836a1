"""How many prompt tokens join a step. Pure Python; the scheduler asks once a step that has prompts to work on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from runtime.plan import PlanRow

_MARGIN = 0.95  # a smaller chunk must be this much cheaper per token: measured costs are noisy, and every chunk costs a step


def fill_budget(num_decodes: int, num_prompt_tokens: int) -> int:
    """``policy = "static"``: as many as fit."""
    return num_prompt_tokens


class CheapestPerToken:
    """``policy = "cost"``: the chunk whose step costs least per token, by the plan's measurements.

    All prompt tokens that may join, or so many that the step lands on a captured size. So a step of 520 tokens becomes one of 512
    in a graph and leaves 8 for the next, where that is cheaper; and where a long eager step costs less per token, it is taken.
    """

    def __init__(self, rows: Sequence[PlanRow]) -> None:
        """rows: of the plan, for steps with prompts in them."""
        self._sizes = sorted(row.size for row in rows)
        by_size = {row.size: row for row in rows}
        self._eager = [(size, ms) for size in self._sizes if (ms := by_size[size].eager_ms) is not None]
        # What a step padded to each size costs: of all captured sizes that hold it, the cheapest.
        self._captured: list[float] = []
        best = float("inf")
        for size in reversed(self._sizes):
            costs = (by_size[size].piecewise_ms, by_size[size].full_ms)
            best = min([best, *(ms for ms in costs if ms is not None)])
            self._captured.append(best)
        self._captured.reverse()
        self._known: dict[tuple[int, int], int] = {}

    def ms(self, tokens: int) -> float:
        """Predicted cost of a step: the cheapest captured size that holds it, or eager on the line through its measured neighbours."""
        index = bisect_left(self._sizes, tokens)
        captured = self._captured[index] if index < len(self._sizes) else float("inf")
        return min(captured, self._eager_ms(tokens))

    def _eager_ms(self, tokens: int) -> float:
        points = self._eager
        if len(points) < 2:
            return points[0][1] if points else float("inf")
        index = min(max(bisect_left(points, (tokens, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        slope = max(0.0, (y1 - y0) / (x1 - x0))  # noise must not make more tokens cheaper
        return y1 + slope * (tokens - x1) if tokens > x1 else max(y0, y1 - slope * (x1 - tokens))

    def __call__(self, num_decodes: int, num_prompt_tokens: int) -> int:
        key = num_decodes, num_prompt_tokens
        chosen = self._known.get(key)
        if chosen is None:
            chosen = self._known[key] = self._choose(*key)
        return chosen

    def _choose(self, num_decodes: int, num_prompt_tokens: int) -> int:
        most = num_decodes + num_prompt_tokens
        best, best_cost = most, self.ms(most) / most * _MARGIN
        for size in self._sizes:
            if num_decodes < size < most and self.ms(size) / size < best_cost:
                best, best_cost = size, self.ms(size) / size
        return best - num_decodes
