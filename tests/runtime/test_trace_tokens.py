"""200 requests of the conversation trace, lengths scaled down: each answer is transformers', whatever the order of arrival, with prefix
cache and overlap on and off, with pages scarce and plentiful."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import CheckpointError
from runtime.engine import Engine
from runtime.request import SamplingParams
from runtime.simulate import read_trace
from runtime.weights import find_packaged_gguf, prepare
from tests.runtime.tiny import CONFIG, tiny_model, twin

TRACE = Path(__file__).resolve().parents[2] / "bench" / "traces" / "azure_llm_2023_conv.csv"
COUNT, SHARED = 200, 10


@cache
def requests(vocab: int, scale: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate) of the trace's first requests, lengths over ``scale``. A third of the prompts begin alike."""
    draw = random.Random(7)
    token = lambda: draw.randrange(3, vocab)
    beginning = [token() for _ in range(SHARED)]
    made = []
    for number, arrival in enumerate(read_trace(TRACE)[:COUNT]):
        length = max(1, arrival.prompt // scale)
        prompt = [token() for _ in range(length)]
        if number % 3 == 0:
            prompt[: min(SHARED, length)] = beginning[:length]
        made.append((prompt, max(1, min(arrival.generated // scale, 16))))
    return made


def serve(engine: Engine, work: list[tuple[list[int], int]], seed: int) -> list[list[int]]:
    """All answers. Requests arrive in a shuffled order, a few between any two steps."""
    draw = random.Random(seed)
    order = list(range(len(work)))
    draw.shuffle(order)
    answers: dict[int, Any] = {}
    while order or engine.has_work:
        for _ in range(min(len(order), draw.choice((0, 1, 3, 12)))):
            number = order.pop()
            prompt, count = work[number]
            answers[number] = engine.submit(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        engine.step()
    return [answers[number].request.generated for number in range(len(work))]


@torch.no_grad()
def assert_greedy(hf: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is what transformers finds most likely after the prompt and the tokens before it: so it would have said the same."""
    logits = hf(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1)
    for place in (best != torch.tensor(tokens)).nonzero()[:1].flatten().tolist():
        gap = float(logits[place].max() - logits[place, tokens[place]])
        pytest.fail(f"prompt of {len(prompt)}: token {place} is {tokens[place]}, transformers has {int(best[place])}, gap {gap:.3g}")


TINY_POOLS = {
    "plenty": {"cache": {"num_pages": 1200, "page_size": 4}, "scheduler": {"max_num_seqs": 24, "max_batch_tokens": 128}},
    # the longest request alone needs two thirds of the pages; admission without reserve, so that requests are preempted
    "scarce": {
        "cache": {"num_pages": 48, "page_size": 4},
        "scheduler": {"policy": "static", "max_num_seqs": 12, "max_batch_tokens": 48},
    },
}


def tiny_engine(pool: str, prefix: bool, overlap: bool, **graph: Any) -> Engine:
    sections = TINY_POOLS[pool]
    config = {
        "graph": {"capture_sizes": [], **graph},
        "compile": {"backend": "eager"},
        "cache": {**sections["cache"], "prefix_cache": prefix},
        "scheduler": {**sections["scheduler"], "overlap": overlap, "max_context": 256},
        "model": {"device": "cpu"},
    }
    return Engine(tiny_model(torch.device("cpu")), config)


@pytest.fixture(scope="module")
def tiny_answers() -> list[list[int]]:
    """Of the plainest engine, checked against transformers."""
    work = requests(CONFIG["vocab_size"], 40)
    assert len(work) == COUNT and max(len(prompt) for prompt, _ in work) > 90 and min(len(prompt) for prompt, _ in work) < 4
    answers = serve(tiny_engine("plenty", prefix=False, overlap=False), work, seed=0)
    hf = twin(tiny_model(torch.device("cpu")))
    for (prompt, count), tokens in zip(work, answers, strict=True):
        assert len(tokens) == count
        assert_greedy(hf, prompt, tokens)
    assert len({token for tokens in answers for token in tokens}) > 50, "answers of few tokens would hide a mix-up"
    return answers


def _combinations() -> list[Any]:
    """All; those that bring no new pair are slow. Without any of the three the answers are made that the others are compared with."""
    fast = {("plenty", True, True), ("scarce", True, False), ("scarce", False, True)}
    every = itertools.product(("plenty", "scarce"), (False, True), (False, True))
    return [each if each in fast else pytest.param(*each, marks=pytest.mark.slow) for each in every if each != ("plenty", False, False)]


@pytest.mark.parametrize(("pool", "prefix", "overlap"), _combinations())
def test_200_requests_of_the_trace_equal_transformers(tiny_answers: list[list[int]], pool: str, prefix: bool, overlap: bool) -> None:
    engine = tiny_engine(pool, prefix, overlap)
    seed = 1 + 4 * (pool == "scarce") + 2 * prefix + overlap
    assert serve(engine, requests(CONFIG["vocab_size"], 40), seed) == tiny_answers
    stats = engine.stats()
    assert (stats["preemptions"] > 0) == (pool == "scarce")
    assert (stats["cached_tokens"] > 0) == prefix
    assert engine.scheduler.blocks.num_available == engine.scheduler.blocks.usable_pages


def test_200_requests_of_the_trace_through_graphs(tiny_answers: list[list[int]]) -> None:
    engine = tiny_engine("plenty", True, True, capture_sizes=[4, 24], max_tokens=24, mode="full", on_capture_error="raise")
    assert serve(engine, requests(CONFIG["vocab_size"], 40), seed=9) == tiny_answers
    assert sum(engine.stats()["modes"]["steps"]["full"].values()) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "prefix", "overlap"), [("plenty", True, True), ("scarce", True, True), ("scarce", False, False)])
def test_200_requests_of_the_trace_on_smollm2(pool: str, prefix: bool, overlap: bool) -> None:
    try:
        folder = prepare(find_packaged_gguf())
    except CheckpointError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM

    pages = {"plenty": 400, "scarce": 24}[pool]
    policy = {"plenty": "cost", "scarce": "static"}[pool]
    config = {
        "graph": {"capture_sizes": []},
        "compile": {"backend": "eager"},
        "cache": {"num_pages": pages, "prefix_cache": prefix},
        "scheduler": {"policy": policy, "overlap": overlap, "max_num_seqs": 16, "max_batch_tokens": 128, "max_context": 512},
        "model": {"device": "cpu", "dtype": "float32"},
    }
    work = requests(49000, 20)
    engine = Engine(folder, config)
    answers = serve(engine, work, seed=pages)
    assert (engine.stats()["preemptions"] > 0) == (pool == "scarce")
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (prompt, count), tokens in zip(work, answers, strict=True):
        assert len(tokens) == count
        assert_greedy(hf, prompt, tokens)
