"""The block table on the host: which pages each running request holds, and what is still to be written of it for a step.

A step's table is hundreds of rows of hundreds of pages, and a running request gets one page in sixteen tokens: nearly all of it lies in
the staging buffer already, from the step that used the buffer before. So each buffer has a record of what it holds, row by row, and
only what is missing is written (runtime/native.py).
"""

from __future__ import annotations

import numpy as np

from runtime.native import native

_SHIFT = 24
"""A row's state: the number of its admission, and in so many low bits its pages. Within an admission pages are only ever added, so two
states with the same number hold the same pages as far as both go; and no number is given twice."""


class Held:
    """What some memory holds of a table: the states of its rows. Good for that table alone: another one numbers its admissions anew."""

    __slots__ = ("of", "states")

    def __init__(self, of: BlockTable, num_rows: int) -> None:
        self.of, self.states = of, np.zeros(num_rows, np.int64)


class BlockTable:
    """Rows of pages, one for each request that may run.

    pages: [num_rows, num_columns] int32. filled: [num_rows] int64, how many of a row's entries are its request's.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        if num_columns >> _SHIFT:
            raise ValueError(f"num_columns: expected less than {1 << _SHIFT} pages for a request, got {num_columns}")
        self.pages, self.filled = np.zeros((num_rows, num_columns), np.int32), np.zeros(num_rows, np.int64)
        self.written = self.widest = 0
        """Pages that the newest ``put`` has written, and those of its longest row."""
        self._states = np.zeros(num_rows, np.int64)
        self._admissions = 0

    def take(self, row: int) -> None:
        """A request has been admitted: its row holds nothing of it yet."""
        self._admissions += 1
        self.filled[row], self._states[row] = 0, self._admissions << _SHIFT

    def fill(self, row: int, pages: list[int]) -> None:
        """The request's pages since the last time go into its row. pages: all of them; those before must be the same."""
        filled, end = self.filled[row], len(pages)
        self.pages[row, filled:end] = pages[filled:]
        self.filled[row] = end
        self._states[row] += end - filled

    def put(self, rows: np.ndarray, out: np.ndarray, held: Held | None = None) -> Held:
        """Write the table of these rows. Past a row's own pages ``out`` keeps what it holds: no kernel reads there.

        rows: [n] int64. out: [n, num_columns] int32, contiguous. held: what the last ``put`` into this memory returned, if since then
        nobody but ``put`` has written into its first rows; None, or another table's: nothing is known. Returns what it holds now.
        """
        if held is None or held.of is not self:
            held = Held(self, len(self._states))
        made = native()
        if made is not None:
            self.written, self.widest = made.table(out, held.states, rows, self._states, self.pages, _SHIFT)
            return held
        # without C: only as wide as the longest row; at a context of 131,072 the rest would be most of a step's time on the host
        width = self.widest = int(self.filled[rows].max(initial=0))
        out[:, :width] = self.pages[:, :width][rows]
        self.written = width * len(rows)
        return held
