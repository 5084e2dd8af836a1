"""A step's block table is completed, not written anew: whatever happened since, it holds what the scheduler says."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import Layers, level_costs, make, step
from test_addresses import HAS_COMPILER
from test_ready import without_kernels

from runtime import block_table
from runtime.block_table import BlockTable
from runtime.blocks import BlockManager
from runtime.engine import Engine
from runtime.native import native
from runtime.request import Request, RequestError, SamplingParams
from runtime.scheduler import Scheduler, Step
from runtime.staging import Note
from runtime.step_arrays import StepArrays
from tests.runtime.tiny import tiny_model

needs_c = pytest.mark.skipif(not HAS_COMPILER, reason="needs gcc and Python.h, as Triton does")
ROWS, COLUMNS, PAGE, TOKENS = 6, 12, 4, 16


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(block_table, "native", lambda: None)
    elif native() is None:
        pytest.skip("nothing was compiled: test_addresses.py says whether it should be")
    return str(request.param)


class Buffers:
    """As of staging: written in turn, each with a note; of two sets of captured steps."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.turns = [0, 0]
        self.memory = [[{"block_table": np.zeros((ROWS, COLUMNS), np.int32)} for _ in range(4)] for _ in range(2)]
        self.notes = [[Note() for _ in range(4)] for _ in range(2)]
        self.reused = self.written = self.whole = 0

    def put(self, arrays: StepArrays, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        of = self.rng.randrange(2)
        turn = self.turns[of] = (self.turns[of] + (self.rng.random() < 0.95)) % 4  # a step that was staged and not run: the same again
        memory, note = self.memory[of][turn], Note(self.notes[of][turn].now)
        self.notes[of][turn] = note
        for name, array in given.items():
            memory.setdefault(name, np.zeros(TOKENS + 1, array.dtype))
        out = {name: whole[: len(given.get(name, arrays.rows))] for name, whole in memory.items()}
        if self.rng.random() < 0.05:  # another writer, who leaves no note, or one who fails
            for whole in memory.values():
                whole[...] = self.rng.randrange(1, 99)
            return {}
        self.reused += note.before is not None
        note.now = arrays.write(given, out, note.before)
        self.written += arrays.table.written
        self.whole += len(arrays.rows) * int(arrays.table.filled[arrays.rows].max())
        for name, whole in memory.items():
            whole[len(out[name]) :] = 0  # padding
        return out


def expected(step: Step, launched: list[Request]) -> dict[str, list[Any]]:
    """Every array but the block table, token by token. launched: of the step before, in whose order its tokens lie."""
    found: dict[str, list[Any]] = {name: [] for name in ("input_ids", "token_source", "positions", "slot_mapping", "logits_rows")}
    for request, start, count, _, _ in step.rows:
        for position in range(start, start + count):
            is_known = position < len(request.tokens)
            found["input_ids"].append(request.tokens[position] if is_known else 0)
            found["token_source"].append(-1 if is_known else launched.index(request))
            found["positions"].append(position)
            found["slot_mapping"].append(request.pages[position // PAGE] * PAGE + position % PAGE)
        found["logits_rows"].append(len(found["positions"]) - 1)
    requests = [row[0] for row in step.rows]
    return {
        **found,
        "seq_lens": [row[1] + row[2] for row in step.rows],
        "cu_seqlens_q": [0, *(last + 1 for last in found["logits_rows"])],
        "temperature": [request.params.temperature for request in requests],
        "top_k": [request.params.top_k for request in requests],
        "top_p": [request.params.top_p for request in requests],
        "seeds": [request.seed for request in requests],
        "draws": [row[4] for row in step.rows],
    }


@pytest.mark.parametrize("seed", range(3))
def test_buffers_hold_the_step_whatever_happened(way: str, seed: int) -> None:
    """Arrivals, endings, aborts, preemptions, prefixes from the cache, reused rows and pages, other writers into the same memory."""
    rng = random.Random(seed)
    scheduler = Scheduler(BlockManager(25, PAGE), max_num_seqs=ROWS, max_batch_tokens=TOKENS, max_context=COLUMNS * PAGE)
    arrays, buffers = StepArrays(ROWS, COLUMNS, PAGE, lambda request: None), Buffers(rng)
    prefixes = [[rng.randrange(50) for _ in range(12)] for _ in range(3)]
    flying: deque[Step] = deque()
    running: list[Request] = []
    launched: list[Request] = []
    compared = number = as_before = 0
    before: dict[str, np.ndarray] = {}
    while compared < 2000:
        if rng.random() < 0.2 and len(scheduler.waiting) < 3:
            tokens = tuple(rng.choice(prefixes)[: rng.randrange(13)] + [rng.randrange(50) for _ in range(rng.randrange(1, 9))])
            params = SamplingParams(max_tokens=rng.choice([1, 4, 25]), temperature=rng.choice([0, 0.5]), top_k=rng.randrange(3), top_p=0.5)
            request = Request(number, tokens, params)
            number += 1
            try:
                scheduler.add(request)
                running.append(request)
            except RequestError:
                pass
        running = [request for request in running if request.finish_reason is None]
        if running and rng.random() < 0.03:
            scheduler.finish(rng.choice(running), "abort")
        if len(flying) < 2 and (now := scheduler.schedule()) is not None:
            given = arrays.of(now)
            assert {name: array.tolist() for name, array in given.items()} == expected(now, launched)
            out = buffers.put(arrays, given)
            if out:
                arrays.check(given, out)
                for row, chunk in zip(out["block_table"], now.chunks, strict=True):
                    assert row[: len(chunk.request.pages)].tolist() == chunk.request.pages
                for name, array in given.items():
                    assert np.array_equal(out[name], array), name
                compared += 1
            as_before += sum(before.get(name) is array for name, array in given.items())
            before = given
            if rng.random() < 0.98 or any(row[0].num_sampling > 1 for row in now.rows):  # else it fails on its way
                arrays.launched()
                launched = [row[0] for row in now.rows]
                flying.append(now)
            else:
                scheduler.abandon(now)
        if flying and (len(flying) == 2 or rng.random() < 0.3):
            landed = flying.popleft()
            scheduler.complete(landed, [rng.randrange(50) for _ in landed.rows])
    assert scheduler.preemptions and scheduler.blocks.evictions and buffers.reused > 1500 and as_before > 3000
    if way == "C":
        assert buffers.written < 0.7 * buffers.whole, "most of it was there already, crowded as it is"


@needs_c
def test_steady_decode_writes_new_pages_only() -> None:
    """256 requests of many pages: each new page goes into each buffer once, and nothing else does."""
    rows, length, ring, page = 256, 100, 4, 16
    table, order = BlockTable(rows, 512), np.random.default_rng(0).permutation(rows)
    lengths = length * page + np.arange(rows) % page
    held, out = [[] for _ in range(rows)], np.zeros((ring, rows, 512), np.int32)  # type: ignore[var-annotated]
    notes: list[Any] = [None] * ring
    following = iter(range(1, 1 << 20))
    for row in range(rows):
        table.take(row)
    for number in range(4 * ring):
        for row in np.flatnonzero(-(-lengths // page) > table.filled).tolist():
            held[row] += [next(following) for _ in range(-(-int(lengths[row]) // page) - len(held[row]))]
            table.fill(row, held[row])
        turn = number % ring
        notes[turn] = table.put(order, out[turn], notes[turn])
        if number < ring:
            assert table.written == sum(map(len, held)), "the first time round"
        else:
            assert table.written == ring * rows // page
        for row, got in zip(order.tolist(), out[turn], strict=True):
            assert got[: len(held[row])].tolist() == held[row]
        lengths += 1


def test_rows_that_move_and_rows_taken_again_are_written(way: str) -> None:
    table, out = BlockTable(3, 4), np.zeros((3, 4), np.int32)
    for row, pages in enumerate(([1, 2], [3], [4, 5, 6])):
        table.take(row)
        table.fill(row, pages)
    held = table.put(np.array([0, 1, 2]), out)
    assert out.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
    held = table.put(np.array([1, 2]), out[:2], held)
    assert out[0, 0] == 3 and out[1, :3].tolist() == [4, 5, 6]
    out[2] = 0  # padding past the real rows
    held = table.put(np.array([1, 2, 0]), out, held)
    assert out[2, :2].tolist() == [1, 2] and (way == "numpy" or table.written == 2)
    table.take(1)
    table.fill(1, [7])  # as many pages as before, of another request
    held = table.put(np.array([1, 2, 0]), out, held)
    assert out[0, 0] == 7 and (way == "numpy" or table.written == 1)
    held = table.put(np.array([1, 2, 0]), out, held)
    assert way == "numpy" or table.written == 0
    other = BlockTable(3, 4)
    for row in range(3):
        other.take(row)
        other.fill(row, [8])
    held = table.put(np.array([1, 2, 0]), out, other.put(np.array([0, 1, 2]), out))
    assert out[:, 0].tolist() == [7, 4, 1], "states of another table say nothing"
    held = table.put(np.array([1, 2]), out[:2], held)
    out[2] = 0
    table.put(np.array([1, 2, 0]), out, held)
    assert out[2, :2].tolist() == [1, 2], "the same row in the same place, and padding there in between"


@needs_c
def test_c_refuses_arrays_that_do_not_fit() -> None:
    good = {"out": np.zeros((2, 4), np.int32), "held": np.zeros(3, np.int64), "rows": np.array([0, 2]), "states": np.zeros(3, np.int64)}
    pages = np.zeros((3, 4), np.int32)
    assert native().table(*good.values(), pages, 24) == (0, 0)
    wrong = {"out": np.zeros((2, 3), np.int32), "held": np.zeros(2, np.int64), "rows": np.array([0, 3]), "states": np.full(3, 5)}
    for name, array in [*wrong.items(), ("rows", np.array([-1, 0])), ("rows", np.zeros(4, np.int64))]:
        with pytest.raises(ValueError, match="do not fit"):
            native().table(*{**good, name: array}.values(), pages, 24)
    frozen = np.zeros((2, 4), np.int32)
    frozen.flags.writeable = False
    for out in (frozen, np.zeros((4, 2), np.int32).T, None):
        with pytest.raises((ValueError, BufferError, TypeError)):
            native().table(*{**good, "out": out}.values(), pages, 24)


def test_notes_are_lost_when_others_get_the_buffer(device: torch.device) -> None:
    """A call with tensors, an upload, a writer that takes no notes; and late words about an earlier hand-out reach nobody."""
    fast = make(Layers().to(device), mode="full", on_capture_error="raise")
    fast.warmup(*step(8, device))
    without_kernels(level_costs(fast))
    ids, factor = (t.cpu() for t in step(3, device))
    arena = next(iter(fast._steps.keys.values())).arena  # type: ignore[union-attr]
    ring = arena.staging.ring

    def staged(word: str | None) -> Note:
        staged = fast.stage({"tokens": 3})
        assert staged is not None
        staged.note.now = word
        staged()
        return staged.note

    def uploaded() -> None:
        arena.host({"tokens": 3}, {"tokens": 8})
        arena.upload({"tokens": 3}, {"tokens": 8})

    def rest() -> None:
        while ring.turn:
            staged("rest")

    rest()
    for other in (lambda: fast(ids, factor), uploaded, lambda: staged(None)):
        staged("before")
        rest()
        other()
        assert ring.turn == 1
        rest()
        note = staged("after")
        assert note.before is None and ring.turn == 1
        rest()
        assert staged("again").before == "after"
        rest()
        not_run = fast.stage({"tokens": 3})
        assert not_run is not None and not_run.note.before == "again"
        note.now = "late"
        assert staged("once more").before is None, "the same memory, which was handed out and not noted"
        rest()


@needs_c
@pytest.mark.parametrize(("name", "found"), [("block_table", "row 0 of the block table"), ("top_p", "top_p holds")])
def test_poison_finds_what_somebody_else_wrote(device: torch.device, name: str, found: str) -> None:
    config = {
        "graph": {"mode": "full", "capture_sizes": [1], "max_tokens": 1, "check": "poison", "contexts": [8]},
        "compile": {"backend": "eager"},
        "cache": {"num_pages": 20, "page_size": 4},
        "scheduler": {"max_num_seqs": 1, "max_batch_tokens": 16, "max_context": 60},
    }
    engine = Engine(tiny_model(device, num_hidden_layers=1), config)
    engine.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=50, ignore_eos=True))
    arena = next(iter(engine.runner.steps._steps.keys.values())).arena  # type: ignore[union-attr]
    staging, begin = arena.staging, arena._offsets[name]
    for _ in range(staging.ring.size + 4):
        engine.step()
    assert engine.runner.inputs.table.written <= 3, "the steps before left the rest"
    for buffer in staging._buffers:
        buffer[begin : begin + 4] = 0
    with pytest.raises(AssertionError, match=found):
        engine.step()
