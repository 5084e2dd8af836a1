"""``python -m runtime explain``: how batches would run and why, and who owns every input of every captured piece."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runtime.captured_step import Address
from runtime.config import ConfigError, RuntimeConfig
from runtime.engine import Engine

_LONGEST_PERIOD = 8  # segments of a layer: a layer cut at its splitting ops has two for each
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
    do, are one row, unless ``every_row``."""
    segments = [list(group) for _, group in groupby(rows, lambda row: row.segment)]
    signatures = [tuple(_signature(row) for row in segment) for segment in segments]
    at = 0
    while at < len(segments):
        period, repeats = (1, 1) if every_row else _repeated(signatures, at)
        for segment in segments[at : at + period]:
            for row in segment:
                yield _cells(row)
        if repeats > 1:
            first, last = segments[at + period][0].segment, segments[at + period * repeats - 1][0].segment
            number = sum(map(len, segments[at + period : at + period * repeats]))
            like = f"{segments[at][0].segment} to {segments[at + period - 1][0].segment}" if period > 1 else f"{segments[at][0].segment}"
            yield (
                f"{first} to {last}", f"{repeats - 1} times segment{'s' if period > 1 else ''} {like}", f"{number} inputs",
                "as there", "--all names them", "each its own", _standing(segments[at][0]),
            )  # fmt: skip
        at += period * repeats


def _repeated(signatures: list[tuple[str, ...]], at: int) -> tuple[int, int]:
    """(segments in a period, how often it comes) from segment ``at`` on: the period that covers most, if it comes often enough."""
    best = (1, 1)
    for period in range(1, _LONGEST_PERIOD + 1):
        repeats, model = 1, signatures[at : at + period]
        while signatures[at + period * repeats : at + period * (repeats + 1)] == model:
            repeats += 1
        if repeats >= _REPEATS and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _signature(row: Address) -> str:
    text = f"{row.kind}|{row.input}|{row.owner}|{row.producer}|{_standing(row)}"
    return re.sub(r"\d+", "#", text)


def _standing(row: Address) -> str:
    if not row.verified:
        return "no"
    return f"on {row.proved_on[:10]}" if row.proved_on else "yes"


def _cells(row: Address) -> tuple[str, ...]:
    return str(row.segment), row.kind, row.input, row.owner, row.producer, f"{row.address:#x}", _standing(row)
