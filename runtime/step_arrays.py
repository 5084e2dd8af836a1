"""A step's inputs as arrays, made from the scheduler's rows. No torch.

With hundreds of requests what is done for each of them is the host's time, so that is little and in C: what does not change from step
to step lies in arrays by row of the block table, and is written when a request takes the row or gets a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import NamedTuple

import numpy as np

from runtime.block_table import BlockTable, Held
from runtime.request import Request
from runtime.scheduler import Step

Arrays = dict[str, np.ndarray]


class Written(NamedTuple):
    """What a step's arrays lie in holds: the arrays written, and the block table's state."""

    arrays: Mapping[str, np.ndarray]
    table: Held


class StepArrays:
    """The rows of the block table, one for each running request, and the arrays of steps.

    What is as it was a step ago is the same array, which cannot be written: so it need not be written again where it lies already.

    num_rows: requests that may run. num_columns: pages that one may hold. admit: told of each request that takes a row and asks for
    more than the captured step's draws.
    """

    def __init__(self, num_rows: int, num_columns: int, page_size: int, admit: Callable[[Request], None]) -> None:
        self.page_size, self._admit = page_size, admit
        self.rows = np.zeros(0, np.int64)
        """Of the newest step."""
        self.widest = 1
        """Tokens of its longest chunk."""
        self.asks_more = False
        """Whether one of its requests asks for more than the captured step's draws."""
        self._pages: list[list[int]] = []  # of its requests: the next step mostly has the same
        self._range, self._ones = np.arange(num_rows + 1), np.ones(num_rows, np.int64)
        self.table = BlockTable(num_rows, num_columns)
        self._table_pages: list[list[int] | None] = [None] * num_rows
        self._temperature, self._top_p = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        self._top_k, self._seeds = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int64)
        self._asks_more = np.zeros(num_rows, bool)
        self._source = np.full(num_rows, -1, np.int64)
        self._launched = self.rows
        """Those of the newest step that is under way, whose tokens ``_source`` tells."""
        self._draws: Arrays = {}
        """How the requests of the newest step draw."""
        self._even: Arrays = {}
        """Inputs of a step in which each of these has one token, and of one whose tokens the step before samples in the same order."""

    def of(self, step: Step) -> Arrays:
        """All inputs but the block table, at the step's real sizes."""
        requests, all_starts, all_counts, _, generated = zip(*step.rows, strict=True)
        size = len(requests)
        pages = [request.pages for request in requests]
        if len(pages) != len(self._pages) or not all(map(is_, pages, self._pages)):
            # A list of pages is made by an admission and lives as long: with the same ones the rows are the same too.
            row_list = [request.row for request in requests]
            for row, each, request in zip(row_list, pages, requests, strict=True):
                if self._table_pages[row] is not each:
                    self._take_row(request)
            self._pages, self.rows = pages, np.array(row_list)
            self._new_rows()
        rows, starts = self.rows, np.fromiter(all_starts, np.int64, size)
        self.widest = max(all_counts)
        counts = self._ones[:size] if self.widest == 1 else np.array(all_counts)
        ends = starts + counts
        for i in np.flatnonzero(ends > self.table.filled[rows] * self.page_size).tolist():
            self.table.fill(requests[i].row, pages[i])
        # Where a step in flight (this one is counted too) samples the last token, that lies on the device.
        is_sampled = np.fromiter([request.num_sampling for request in requests], np.int64, size) > 1
        draws = {**self._draws, "draws": np.fromiter(generated, np.int64, size)}
        if self.widest == 1:
            slots = slots_of(self.table.pages, rows, starts, self.page_size)
            arrays = {**draws, **self._even, "positions": starts, "slot_mapping": slots, "seq_lens": ends.astype(np.int32)}
            if rows is self._launched and is_sampled.all():
                return arrays
            offsets = self._range[: size + 1]
        else:
            offsets = offsets_of(counts)
            arrays = from_chunks(starts, counts, offsets, self.table.pages, rows, self.page_size, **draws)
        last, tokens, sources = offsets[1:] - 1, int(offsets[-1]), self._source[rows]
        assert (sources[is_sampled] >= 0).all(), "a token that is not known is not one that the newest step samples"
        ids, token_source = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
        token_source[last] = np.where(is_sampled, sources, -1)
        for i in np.flatnonzero(~is_sampled | (counts > 1)).tolist():
            known = requests[i].tokens[all_starts[i] : all_starts[i] + all_counts[i]]
            ids[offsets[i] : offsets[i] + len(known)] = known
        return {**arrays, "input_ids": ids, "token_source": token_source}

    def _new_rows(self) -> None:
        """The step has other rows than the one before: what follows from them alone."""
        rows = self.rows
        each, offsets = self._range[: len(rows)], self._range[: len(rows) + 1]
        sampling: Arrays = {"temperature": self._temperature, "top_k": self._top_k, "top_p": self._top_p, "seeds": self._seeds}
        self.asks_more = bool(self._asks_more[rows].any())
        self._draws = {name: _frozen(array[rows]) for name, array in sampling.items()}
        self._even = {
            "input_ids": _frozen(np.zeros_like(each)),
            "token_source": _frozen(each.copy()),
            "cu_seqlens_q": _frozen(offsets.astype(np.int32)),
            "logits_rows": _frozen(each.copy()),
        }

    def launched(self) -> None:
        """The newest step is under way: its tokens will lie in its order, for the next one to take."""
        self._source.fill(-1)
        self._source[self.rows] = self._range[: len(self.rows)]
        self._launched = self.rows

    def write(self, arrays: Arrays, out: Mapping[str, np.ndarray], before: object) -> Written:
        """Write the newest step's arrays and block table. out: by name. before: what it returned when it last wrote there, if nobody else
        has written there since; what is right already is left. Anything else: nothing is known."""
        known = before if isinstance(before, Written) else None
        table = self.table.put(self.rows, out["block_table"], None if known is None else known.table)
        write_changed(arrays, out, {} if known is None else known.arrays)
        return Written(arrays, table)

    def wide_table(self) -> np.ndarray:
        """The newest step's table in memory of its own."""
        table = np.zeros((len(self.rows), self.table.pages.shape[1]), np.int32)
        self.table.put(self.rows, table)
        return table

    def check(self, arrays: Arrays, out: Mapping[str, np.ndarray]) -> None:
        """Assert that ``out`` holds the newest step: each array, and of each row of the table the request's pages as the scheduler has
        them."""
        for name, array in arrays.items():
            assert np.array_equal(out[name], array), f"{name} holds {out[name]}, not {array}"
        for i, (pages, filled) in enumerate(zip(self._pages, self.table.filled[self.rows].tolist(), strict=True)):
            row = out["block_table"][i, :filled]
            assert row.tolist() == pages[:filled], f"row {i} of the block table holds {row}, not pages {pages}"

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


def slots_of(table: np.ndarray, rows: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Where the token at each position is written. Token by token, not page by page: a chunk may begin anywhere in a page."""
    return table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size


def write_changed(arrays: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> None:
    """Write each of the arrays but those that were written there before: the same objects, which nobody can have changed."""
    for name, array in arrays.items():
        if before.get(name) is not array or array.flags.writeable:
            out[name][...] = array


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def from_chunks(
    starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, table: np.ndarray, rows: np.ndarray, page_size: int, **others: np.ndarray
) -> Arrays:
    """Positions, slots and lengths follow from where each chunk starts, how long it is, and its pages, which are a row of a table."""
    positions, size = starts, int(offsets[-1])
    if len(counts) < size:  # else one token each, which most steps are: nothing to spread
        positions = np.arange(size) - np.repeat(offsets[:-1] - starts, counts)
        rows = np.repeat(rows, counts)
    return {
        **others,
        "positions": positions,
        "slot_mapping": slots_of(table, rows, positions, page_size),
        "seq_lens": (starts + counts).astype(np.int32),
        "cu_seqlens_q": offsets.astype(np.int32),
        "logits_rows": offsets[1:] - 1,
    }
