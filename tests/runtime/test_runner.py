"""From a scheduler's step to arrays, and what the captured sizes mean for them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from runtime.blocks import BlockManager
from runtime.config import ConfigError, RuntimeConfig
from runtime.request import Request, SamplingParams
from runtime.runner import Runner
from runtime.scheduler import Scheduler, Step
from runtime.step_module import StepModule
from tests.runtime.tiny import tiny_model


def make_runner(device: torch.device, **sections: Any) -> Runner:
    sections.setdefault("graph", {"mode": "eager", "capture_sizes": []})
    sections.setdefault("cache", {"num_pages": 20, "page_size": 4})
    sections.setdefault("scheduler", {"max_num_seqs": 5, "max_batch_tokens": 16})
    config = RuntimeConfig.load({"compile": {"backend": "eager"}, **sections})
    return Runner(tiny_model(device), config, 64)


class Rig:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        limits = runner.config.scheduler
        self.scheduler = Scheduler(
            BlockManager(runner.num_pages, runner.page_size, runner.config.cache.prefix_cache),
            max_num_seqs=limits.max_num_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            max_context=runner.max_context,
        )
        self.count = 0

    def add(self, length: int, **params: Any) -> Request:
        request = Request(
            self.count, tuple(range(self.count * 30, self.count * 30 + length)), SamplingParams(**{"max_tokens": 20, **params})
        )
        self.scheduler.add(request)
        self.count += 1
        return request

    def step(self) -> Step:
        """Schedule, check every array, and answer 7 to everybody."""
        step = self.scheduler.schedule()
        assert step is not None
        check(self.runner, step)
        self.scheduler.complete(step, [7] * len(step.chunks))
        return step


def check(runner: Runner, step: Step) -> None:
    """Every array, recomputed token by token from the step."""
    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in runner.arguments(step).items()}
    ids, positions, slots, rows = [], [], [], []
    for request, start, count, _, _ in step.chunks:
        for position in range(start, start + count):
            ids.append(request.tokens[position])
            positions.append(position)
            page = request.pages[position // runner.page_size]
            slots.append(page * runner.page_size + position % runner.page_size)
        rows.append(len(ids) - 1)
    assert arrays["input_ids"].tolist() == ids
    assert arrays["positions"].tolist() == positions
    assert arrays["slot_mapping"].tolist() == slots
    assert arrays["logits_rows"].tolist() == rows
    assert arrays["seq_lens"].tolist() == [chunk.start + chunk.num_tokens for chunk in step.chunks]
    assert np.diff(arrays["cu_seqlens_q"]).tolist() == [chunk.num_tokens for chunk in step.chunks]
    assert arrays["cu_seqlens_q"][0] == 0
    for row, chunk in enumerate(step.chunks):
        held = chunk.request.pages
        assert arrays["block_table"][row, : len(held)].tolist() == held
    assert arrays["draws"].tolist() == [chunk.num_generated for chunk in step.chunks]
    wide = max(chunk.num_tokens for chunk in step.chunks)
    assert arrays["max_query_len"] == (1 if wide == 1 else runner.max_batch_tokens)


def test_arrays_of_chunks_decodes_and_mixed_steps(device: torch.device) -> None:
    runner = make_runner(device)
    rig = Rig(runner)
    for length in (10, 6, 1):
        rig.add(length)
    widths = set()
    for _ in range(12):
        widths.add(rig.step().max_query_len)
    assert 1 in widths and max(widths) > 4, "both kinds of steps came by"


def test_b076_a_chunk_may_begin_inside_a_page(device: torch.device) -> None:
    runner = make_runner(device, scheduler={"max_num_seqs": 1, "max_batch_tokens": 3})
    rig = Rig(runner)
    request = rig.add(10)
    starts = []
    while request.num_generated == 0:
        starts.append(rig.step().chunks[0].start)
    assert starts == [0, 3, 6, 9]


def test_the_table_follows_a_preempted_request_to_its_new_pages(device: torch.device) -> None:
    runner = make_runner(device, cache={"num_pages": 7, "page_size": 4, "prefix_cache": False})
    rig = Rig(runner)
    for length in (8, 8, 4):
        rig.add(length)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.scheduler.preemptions > 0


def test_a_token_still_being_sampled_is_taken_from_the_device(device: torch.device) -> None:
    """Two steps in flight give the tokens that one at a time gives."""
    runner = make_runner(device)

    def answers(depth: int) -> list[list[int]]:
        rig = Rig(runner)
        requests = [rig.add(length, max_tokens=9) for length in (5, 12, 2)]
        flying: list[Any] = []
        while rig.scheduler.has_work:
            scheduled = rig.scheduler.schedule() if len(flying) < depth else None
            if scheduled is not None:
                flying.append((scheduled, runner.launch(scheduled)))
            else:
                done, launched = flying.pop(0)
                rig.scheduler.complete(done, runner.read(launched))
        return [request.generated for request in requests]

    assert answers(2) == answers(1)


def test_a_short_sequence_after_a_long_one_reads_its_own_pages(device: torch.device) -> None:
    """A captured step's table is written as wide as its longest sequence; behind that lies what an earlier step wrote."""
    runner = make_runner(device, graph={"mode": "full", "capture_sizes": [2], "max_tokens": 2, "on_capture_error": "raise"})
    runner.warmup()
    rig = Rig(runner)

    def run(length: int) -> list[int]:
        request = rig.add(length, max_tokens=4)
        while rig.scheduler.has_work:
            step = rig.scheduler.schedule()
            assert step is not None
            rig.scheduler.complete(step, runner.read(runner.launch(step)))
        return request.generated

    alone = run(5)
    run(50)
    rig.count = 0  # the same prompt
    beside = run(5)
    assert alone == beside
    assert sum(runner.steps.stats()["steps"]["full"].values()) >= 8


def test_b005_b006_inputs_of_a_padded_step_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests at the captured size 8: tokens are padded to 8, requests to the limit, in every input alike."""
    seen: list[dict[str, tuple[int, ...]]] = []
    forward = StepModule.forward

    @functools.wraps(forward)
    def watching(*args: Any, **kwargs: Any) -> torch.Tensor:
        values = inspect.signature(forward).bind(*args, **kwargs).arguments
        seen.append({name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)})
        return forward(*args, **kwargs)

    monkeypatch.setattr(StepModule, "forward", watching)
    runner = make_runner(device, graph={"mode": "full", "capture_sizes": [1, 2, 4, 8], "max_tokens": 8, "on_capture_error": "raise"})
    runner.warmup()
    assert {(shapes["input_ids"][0], shapes["seq_lens"][0]) for shapes in seen} >= {(1, 1), (2, 2), (4, 4), (5, 5), (8, 5)}
    for shapes in seen:
        (tokens,), (seqs,) = shapes["input_ids"], shapes["seq_lens"]
        for name in ("positions", "slot_mapping", "token_source"):
            assert shapes[name] == (tokens,)
        for name in ("logits_rows", "temperature", "top_k", "top_p", "seeds", "draws"):
            assert shapes[name] == (seqs,)
        assert shapes["block_table"] == (seqs, runner.num_columns) and shapes["cu_seqlens_q"] == (seqs + 1,)
    rig = Rig(runner)
    for _ in range(5):
        rig.add(1)
    step = rig.scheduler.schedule()
    assert step is not None
    assert len(runner.read(runner.launch(step))) == 5


@pytest.mark.parametrize("limit", [5, 11])
def test_b046_the_request_limit_is_a_captured_size(device: torch.device, limit: int) -> None:
    runner = make_runner(
        device,
        graph={"mode": "full", "capture_sizes": [1, 2, 4, 8], "max_tokens": 12, "on_capture_error": "raise"},
        scheduler={"max_num_seqs": limit, "max_batch_tokens": 16},
    )
    runner.warmup()
    rig = Rig(runner)
    for _ in range(limit):
        rig.add(1)
    step = rig.scheduler.schedule()
    assert step is not None
    decision = runner.steps.explain(**runner.arguments(step))
    assert (decision.mode, decision.size) == ("full", min(size for size in (8, limit, 12) if size >= limit))


def test_b048_the_table_has_a_column_for_every_page_a_request_may_hold(device: torch.device) -> None:
    assert make_runner(device, cache={"num_pages": 100, "page_size": 4}).num_columns == 16, "64 tokens of context"
    assert make_runner(device, cache={"num_pages": 10, "page_size": 4}).num_columns == 9, "all usable pages"
    assert make_runner(device, cache={"num_pages": 100, "page_size": 48}).num_columns == 2, "rounded up"


def test_sizes_of_the_cache(device: torch.device) -> None:
    runner = make_runner(device, cache={"page_size": 4})
    assert runner.num_pages == 5 * 16 + 1, "never more than all requests at full context need"
    with pytest.raises(ConfigError, match=r"cache.num_pages: expected at least 2 \(page 0 is reserved for padding\), got 1"):
        make_runner(device, cache={"num_pages": 1, "page_size": 4})


def test_representative_steps_stay_within_every_limit(device: torch.device) -> None:
    """Also where a captured size is longer than a whole context, so that it takes several prompts."""
    runner = make_runner(
        device,
        cache={"num_pages": 4, "page_size": 4},
        graph={"mode": "auto", "capture_sizes": [1, 2, 7, 30, 70], "max_tokens": 80, "on_capture_error": "raise"},
        scheduler={"max_num_seqs": 6, "max_batch_tokens": 80},
    )
    assert runner.max_context == 12
    plan = runner.warmup()
    assert [row.size for row in plan.rows if row.key == "max_query_len=1"] == [1, 2, 6]
    assert [row.size for row in plan.rows if row.key == "max_query_len=80"] == [2, 6, 7, 30, 70], "80 tokens do not fit 6 contexts of 12"
    for decodes, prompt_tokens in ((6, 0), (5, 1), (5, 12), (0, 72), (2, 30)):
        batch = runner.batch(decodes, prompt_tokens)
        assert len(batch["input_ids"]) == decodes + prompt_tokens and len(batch["seq_lens"]) <= 6
        assert int(batch["positions"].max()) < 12 and int(batch["seq_lens"].max()) <= 12
        assert (batch["slot_mapping"] == -1).all() and batch["block_table"].min() >= 1 and batch["block_table"].max() <= 3
    for decodes, prompt_tokens in ((7, 0), (6, 1), (0, 73), (0, 0)):
        with pytest.raises(ValueError, match="batch: expected 1 to 6 requests of up to 12 tokens"):
            runner.batch(decodes, prompt_tokens)


@pytest.mark.parametrize("decodes", [1, 2, 5, 6])
def test_timed_sequences_differ_in_length_and_hold_the_context_on_average(device: torch.device, decodes: int) -> None:
    """Decode attention does not cut sequences of equal length: 15 or 16 of 1024 tokens ran 4% faster than 10 to 14 of them, and the costs
    made a scheduler pad for it in traffic, where no two are equal."""
    runner = make_runner(device, scheduler={"max_num_seqs": 8, "max_batch_tokens": 16, "max_context": 64}, cache={"num_pages": 200})
    starts = runner.batch(decodes, 7, 20)["seq_lens"] - torch.tensor([1] * decodes + [7])
    held = starts[:decodes].float()
    assert held.mean() == 20.0 and held.min() >= 10 and held.max() <= 30 and int(starts[-1]) == 20
    assert len(set(held.tolist())) == decodes


@pytest.mark.gpu
def test_b163_tokens_are_read_only_after_they_arrived(device: torch.device) -> None:
    def answers(delay: int) -> list[list[int]]:
        runner = make_runner(device)
        rig = Rig(runner)
        requests = [rig.add(length, max_tokens=5) for length in (3, 9)]
        while rig.scheduler.has_work:
            step = rig.scheduler.schedule()
            assert step is not None
            torch.cuda._sleep(delay)
            rig.scheduler.complete(step, runner.read(runner.launch(step)))
        return [request.generated for request in requests]

    assert answers(50_000_000) == answers(1)


@pytest.mark.gpu
def test_the_cache_takes_the_memory_that_is_left(device: torch.device) -> None:
    total = torch.cuda.mem_get_info(device)[1]
    runner = make_runner(device, cache={"page_size": 16}, scheduler={"max_num_seqs": 4096, "max_batch_tokens": 8192})
    assert runner.num_pages == 4096 * 4 + 1, "a tiny model: all that can be needed"
    with pytest.raises(ConfigError, match=r"cache.num_pages: no memory for a KV cache"):
        make_runner(device, cache={"page_size": 16}, graph={"mode": "eager", "capture_sizes": [], "memory_budget": total})


def test_the_static_policy_takes_plain_graphs(device: torch.device) -> None:
    """Full for decode, piecewise beside prompts, the nearest size, eager above: whatever this machine measures."""
    limits = {"max_num_seqs": 9, "max_batch_tokens": 20, "policy": "static"}
    runner = make_runner(device, graph={"max_tokens": 24, "on_capture_error": "raise"}, scheduler=limits, cache={"num_pages": 40})
    runner.warmup()
    sizes = {kind: runner.steps.captured(max_query_len=bound) for kind, bound in (("decode", 1), ("mixed", 20))}
    assert sorted(sizes["decode"]) == [("full", size) for size in (1, 2, 4, 8, 9)]
    assert sorted(sizes["mixed"]) == [("piecewise", size) for size in (2, 4, 8, 9, 16)], "no step has 24 tokens"
    for (decodes, chunk), picked in {
        (3, 0): ("full", 4), (9, 0): ("full", 9), (1, 2): ("piecewise", 4), (0, 10): ("piecewise", 16), (3, 14): ("eager", 17),
    }.items():  # fmt: skip
        decision = runner.steps.explain(**runner.batch(decodes, chunk))
        assert (decision.mode, decision.size) == picked
    pinned = make_runner(device, graph={"mode": "full", "capture_sizes": [4], "max_tokens": 8}, scheduler=limits)
    pinned.warmup()
    assert ("full", 4) in pinned.steps.captured(max_query_len=20)


def test_warm_up_leaves_the_cache_clean(device: torch.device) -> None:
    """Page 0 stays finite, and no page is written by dummy steps."""
    runner = make_runner(device, graph={"mode": "auto", "capture_sizes": [1, 4], "max_tokens": 8, "on_capture_error": "raise"})
    runner.warmup()
    for k_cache, v_cache in runner._caches:
        assert not k_cache.any() and not v_cache.any()


def test_steps_touch_no_page_of_others(device: torch.device) -> None:
    """After a big batch a small padded one; pages that it does not own keep every byte."""
    runner = make_runner(device, graph={"mode": "full", "capture_sizes": [4, 8], "max_tokens": 8, "on_capture_error": "raise"})
    runner.warmup()
    rig = Rig(runner)
    for length in (1, 1, 1, 1, 1):
        rig.add(length, max_tokens=2)
    while len(rig.scheduler.running) != 1 and rig.scheduler.has_work:
        step = rig.scheduler.schedule()
        assert step is not None
        rig.scheduler.complete(step, runner.read(runner.launch(step)))
    last = rig.add(3, max_tokens=5)
    before = [cache.clone() for pair in runner._caches for cache in pair]
    while rig.scheduler.has_work:
        step = rig.scheduler.schedule()
        assert step is not None
        own = set(last.pages)
        rig.scheduler.complete(step, runner.read(runner.launch(step)))
    for old, new in zip(before, [cache for pair in runner._caches for cache in pair], strict=True):
        changed = {page for page in range(runner.num_pages) if not torch.equal(old[page], new[page])}
        assert changed and changed <= own
