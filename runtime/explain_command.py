"""``python -m runtime explain``: how batches would run and why, and who owns every input of every captured piece."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime.captured_step import Address
from runtime.config import ConfigError, RuntimeConfig
from runtime.engine import Engine

_LONGEST_PERIOD = 8  # segments of a layer: a layer cut at its splitting ops has two for each
_LONGEST_LAYER = 24  # inputs of a layer in a full graph
_REPEATS = 3  # of which the later ones are folded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    text = '"8": 8 decoding requests; "8+120": beside a chunk of 120 prompt tokens; "addresses": the inputs of every piece'
    parser.add_argument("batches", nargs="+", metavar="BATCH", help=text)
    parser.add_argument("--all", action="store_true", help="with addresses, every row; else layers like the one before are one line")


def batch_of(text: str, config: RuntimeConfig) -> tuple[int, int] | None:
    """(decoding requests, prompt tokens) of a BATCH argument; None for ``addresses``."""
    if text == "addresses":
        return None
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", text)
    if match is None:
        raise ConfigError(f'BATCH: expected "8", "8+120" or "addresses", got {text!r}')
    decodes, chunk = int(match[1]), int(match[2] or 0)
    limits = config.scheduler
    if decodes + (chunk > 0) > limits.max_num_seqs:
        raise ConfigError(f"BATCH {text}: {decodes + (chunk > 0)} requests, scheduler.max_num_seqs is {limits.max_num_seqs}")
    if not 0 < decodes + chunk <= limits.max_batch_tokens:
        raise ConfigError(
            f"BATCH {text}: expected 1 to {limits.max_batch_tokens} tokens (scheduler.max_batch_tokens), got {decodes + chunk}"
        )
    return decodes, chunk


def run(texts: Iterable[str], batches: Iterable[tuple[int, int] | None], engine: Engine, out: Console, every_row: bool) -> None:
    """Print each batch's decision, or the tables of addresses. batches: of the texts, as ``batch_of`` reads them."""
    for text, batch in zip(texts, batches, strict=True):
        out.rule(text, align="left")
        if batch is not None:
            out.print(str(engine.explain(*batch)), markup=False)
            continue
        for title, rows in engine.addresses().items():
            table = Table("segment", "kind", "input", "owner", "made by", "address", "verified", title=title, title_justify="left")
            for cells in table_rows(rows, every_row):
                table.add_row(*(Text(cell) for cell in cells))
            out.print(table)


def table_rows(rows: list[Address], every_row: bool = False) -> Iterator[tuple[str, ...]]:
    """Cells of the rows. Segments that repeat those before them but for numbers (of layers, of pieces) and addresses, and stand as they
    do, are one row, unless ``every_row``; so are rows within a segment."""
    segments = [list(group) for _, group in groupby(rows, lambda row: row.segment)]
    signatures = [tuple(_signature(row) for row in segment) for segment in segments]
    for begin, period, repeats in _folds(signatures, 1 if every_row else _LONGEST_PERIOD):
        for segment in segments[begin : begin + period]:
            yield from _rows_of(segment, every_row)
        if repeats > 1:
            last = begin + period * repeats - 1
            number = sum(map(len, segments[begin + period : last + 1]))
            like = " to ".join(dict.fromkeys((str(segments[begin][0].segment), str(segments[begin + period - 1][0].segment))))
            yield (
                f"{segments[begin + period][0].segment} to {segments[last][0].segment}", f"{repeats - 1} times segment {like}",
                f"{number} inputs", "as there", "--all names them", "each its own", _standing(segments[begin][0]),
            )  # fmt: skip


def _rows_of(segment: list[Address], every_row: bool) -> Iterator[tuple[str, ...]]:
    for begin, period, repeats in _folds([_signature(row) for row in segment], 1 if every_row else _LONGEST_LAYER):
        yield from map(_cells, segment[begin : begin + period])
        if repeats > 1:
            above = "the row above" if period == 1 else f"the {period} rows above"
            yield (
                str(segment[0].segment), segment[0].kind, f"{repeats - 1} times {above}", "as there", "--all names them", "each its own",
                _standing(segment[begin]),
            )  # fmt: skip


def _folds(signatures: Sequence[Any], longest: int) -> Iterator[tuple[int, int, int]]:
    """(begin, period, repeats) of runs whose first ``period`` entries come ``repeats`` times; at each place the one that covers most."""
    at = 0
    while at < len(signatures):
        best = (1, 1)
        for period in range(1, longest + 1) if longest > 1 else ():
            repeats, model = 1, signatures[at : at + period]
            while signatures[at + period * repeats : at + period * (repeats + 1)] == model:
                repeats += 1
            if repeats >= _REPEATS and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        yield at, *best
        at += best[0] * best[1]


def _signature(row: Address) -> str:
    text = f"{row.kind}|{row.input}|{row.owner}|{row.producer}|{_standing(row)}"
    return re.sub(r"\d+", "#", text)


def _standing(row: Address) -> str:
    if not row.verified:
        return "no"
    return f"on {row.proved_on[:10]}" if row.proved_on else "yes"


def _cells(row: Address) -> tuple[str, ...]:
    return str(row.segment), row.kind, row.input, row.owner, row.producer, f"{row.address:#x}", _standing(row)
