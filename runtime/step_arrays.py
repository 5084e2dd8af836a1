"""A step's inputs as arrays, made from the scheduler's rows. No torch.

With hundreds of requests what is done for each of them is the host's time, so that is little and in C: what does not change from step
to step lies in arrays by row of the block table, and is written when a request takes the row or gets a page.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import numpy as np

from runtime.block_table import BlockTable, Held
from runtime.request import Request
from runtime.scheduler import Step

Arrays = dict[str, np.ndarray]


class StepArrays:
    """The rows of the block table, one for each running request, and the arrays of steps.

    num_rows: requests that may run. num_columns: pages that one may hold. admit: told of each request that takes a row and asks for
    more than the captured step's draws.
    """

    def __init__(self, num_rows: int, num_columns: int, page_size: int, admit: Callable[[Request], None]) -> None:
        self.page_size, self._admit = page_size, admit
        self.rows = np.zeros(0, np.int64)
        """Of the newest step."""
        self.widest = 1
        """Tokens of its longest chunk."""
        self._pages: list[list[int]] = []  # of its requests: the next step mostly has the same
        self._range, self._ones = np.arange(num_rows + 1), np.ones(num_rows, np.int64)
        self.table = BlockTable(num_rows, num_columns)
        self._table_pages: list[list[int] | None] = [None] * num_rows
        self._temperature, self._top_p = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        self._top_k, self._seeds = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int64)
        self._asks_more = np.zeros(num_rows, bool)
        self._source = np.full(num_rows, -1, np.int64)

    def of(self, step: Step) -> Arrays:
        """All inputs but the block table, at the step's real sizes."""
        requests, all_starts, all_counts = [row[0] for row in step.rows], [row[1] for row in step.rows], [row[2] for row in step.rows]
        pages = [request.pages for request in requests]
        if len(pages) != len(self._pages) or not all(map(is_, pages, self._pages)):
            # A list of pages is made by an admission and lives as long: with the same ones the rows are the same too.
            row_list = [request.row for request in requests]
            for row, each, request in zip(row_list, pages, requests, strict=True):
                if self._table_pages[row] is not each:
                    self._take_row(request)
            self._pages, self.rows = pages, np.array(row_list)
        rows, starts = self.rows, np.array(all_starts)
        self.widest = max(all_counts)
        counts = self._ones[: len(rows)] if self.widest == 1 else np.array(all_counts)
        offsets = offsets_of(counts)
        ends, last, size = starts + counts, offsets[1:] - 1, int(offsets[-1])
        for i in np.flatnonzero(ends > self.table.filled[rows] * self.page_size).tolist():
            self.table.fill(requests[i].row, pages[i])
        # Where a step in flight (this one is counted too) samples the last token, that lies on the device.
        is_sampled = np.array([request.num_sampling for request in requests]) > 1
        sources = self._source[rows]
        assert (sources[is_sampled] >= 0).all(), "a token that is not known is not one that the newest step samples"
        ids, token_source = np.zeros(size, np.int64), np.full(size, -1, np.int64)
        token_source[last] = np.where(is_sampled, sources, -1)
        if size > len(rows) or not is_sampled.all():
            for i in np.flatnonzero(~is_sampled | (counts > 1)).tolist():
                tokens = requests[i].tokens[all_starts[i] : all_starts[i] + all_counts[i]]
                ids[offsets[i] : offsets[i] + len(tokens)] = tokens
        return from_chunks(
            starts,
            counts,
            offsets,
            self.table.pages,
            rows,
            self.page_size,
            input_ids=ids,
            token_source=token_source,
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seeds=self._seeds[rows],
            draws=np.array([row[4] for row in step.rows]),
        )

    @property
    def asks_more(self) -> bool:
        """Whether a request of the newest step asks for more than the captured step's draws."""
        return bool(self._asks_more[self.rows].any())

    def launched(self) -> None:
        """The newest step is under way: its tokens will lie in its order, for the next one to take."""
        self._source.fill(-1)
        self._source[self.rows] = self._range[: len(self.rows)]

    def put_table(self, out: np.ndarray, held: Held | None = None) -> Held:
        """Block table of the newest step; see ``BlockTable.put``."""
        return self.table.put(self.rows, out, held)

    def wide_table(self) -> np.ndarray:
        """The same, in memory of its own."""
        table = np.zeros((len(self.rows), self.table.pages.shape[1]), np.int32)
        self.put_table(table)
        return table

    def check_table(self, out: np.ndarray) -> None:
        """Assert that each row of the newest step's table holds its request's pages, as the scheduler has them."""
        for i, (pages, filled) in enumerate(zip(self._pages, self.table.filled[self.rows].tolist(), strict=True)):
            assert out[i, :filled].tolist() == pages[:filled], f"row {i} of the block table holds {out[i, :filled]}, not pages {pages}"

    def _take_row(self, request: Request) -> None:
        """A request has been admitted: its row holds nothing of it yet."""
        row, params = request.row, request.params
        self._table_pages[row] = request.pages
        self.table.take(row)
        self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
        self._seeds[row] = request.seed
        asks = self._asks_more[row] = request.adjusts or params.logprobs is not None
        if asks:
            self._admit(request)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """Where each chunk begins in the step's tokens, and the end of the last one."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def from_chunks(
    starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, table: np.ndarray, rows: np.ndarray, page_size: int, **others: np.ndarray
) -> Arrays:
    """Positions, slots and lengths follow from where each chunk starts, how long it is, and its pages, which are a row of a table."""
    positions, size = starts, int(offsets[-1])
    if len(counts) < size:  # else one token each, which most steps are: nothing to spread
        positions = np.arange(size) - np.repeat(offsets[:-1] - starts, counts)
        rows = np.repeat(rows, counts)
    # Token by token, not page by page: a chunk may begin anywhere in a page (B076).
    slots = table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return {
        **others,
        "positions": positions,
        "slot_mapping": slots,
        "seq_lens": (starts + counts).astype(np.int32),
        "cu_seqlens_q": offsets.astype(np.int32),
        "logits_rows": offsets[1:] - 1,
    }
