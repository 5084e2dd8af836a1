"""Many requests through the engine, against transformers on the same weights: time per generated token, all requests together.

Prompts and answers of different lengths (seeded), greedy. The peers get the same requests: transformers' generate() as one left-padded
batch that runs to the longest answer, and its continuous batching.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from bench.peers import OURS
from bench.shapes import LLAMA_1B, TINY
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sizes
from runtime import Engine, SamplingParams
from runtime.model import random_model
from tkernels._op import reference_ops

transformers = pytest.importorskip("transformers")
BATCH, CONTINUOUS = "torch, transformers generate", "torch, transformers continuous batching"
REQUESTS = sizes([16, 64], [3])
PROMPTS, ANSWERS = sizes([(32, 512), (16, 256)], [(3, 9), (2, 5)])


@functools.cache
def _models() -> tuple[Any, Any]:
    shape = LLAMA_1B if ON_GPU else TINY
    model = random_model(shape, seed=0, dtype=DTYPE, device=DEVICE)
    config = transformers.LlamaConfig(**shape, attn_implementation="sdpa", pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with torch.device(DEVICE):
        peer = transformers.LlamaForCausalLM(config).to(DTYPE).eval()
    peer.load_state_dict(model.hf_state_dict(), strict=False)
    return model, peer


def _requests(count: int, vocab: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, lengths of the answers)"""
    draw = random.Random(0)
    prompts = [[draw.randrange(1, vocab) for _ in range(draw.randint(*PROMPTS))] for _ in range(count)]
    return prompts, [draw.randint(*ANSWERS) for _ in range(count)]


@functools.cache
def _engine() -> Engine:
    """One for all cases, with room for all requests of the largest."""
    model, _ = _models()
    prompts, lengths = _requests(max(REQUESTS), model.spec.vocab)
    pages = sum(-(-(len(prompt) + length) // 16) for prompt, length in zip(prompts, lengths, strict=True))
    config = {
        "cache": {"num_pages": pages + 64, "prefix_cache": False},
        "scheduler": {"max_num_seqs": max(REQUESTS), "max_batch_tokens": 2048 if ON_GPU else 16},
        "graph": {"max_tokens": 512, "capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512]} if ON_GPU else {"capture_sizes": []},
        "compile": {"backend": "eager"},
        "model": {"device": str(DEVICE)},
    }
    return Engine(model, config)


@pytest.fixture(autouse=True)
def _ops() -> Any:
    with reference_ops():
        yield


@pytest.mark.parametrize("case", REQUESTS, ids=lambda count: f"{count} requests")
@pytest.mark.parametrize("peer", [OURS, BATCH, CONTINUOUS] if ON_GPU else [OURS, BATCH])
def test_serving(measure: Any, case: int, peer: str) -> None:
    def build() -> Problem:
        model, theirs = _models()
        prompts, lengths = _requests(case, model.spec.vocab)
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        engine = _engine()
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=DEVICE)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=DEVICE)

        def batch(_: int) -> list[list[int]]:
            longest = max(lengths)
            out = theirs.generate(padded, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False)
            return [row[:length] for row, length in zip(out[:, width:].tolist(), lengths, strict=True)]

        def continuous(_: int) -> list[list[int]]:
            options = transformers.GenerationConfig(max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1, pad_token_id=0)
            answers = theirs.generate_batch(inputs=prompts, generation_config=options, progress_bar=False)
            by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
            return [by_prompt[tuple(prompt)][:length] for prompt, length in zip(prompts, lengths, strict=True)]

        with torch.no_grad():
            firsts = theirs.generate(padded, attention_mask=mask, max_new_tokens=1, do_sample=False)[:, -1].tolist()

        def check(name: str, answers: list[list[int]]) -> float:
            """Share of requests whose first token differs from transformers'.

            With random weights the two largest logits often lie within a rounding of bf16; a wrong engine would miss nearly all.
            """
            assert [len(answer) for answer in answers] == lengths
            return sum(a[0] != b for a, b in zip(answers, firsts, strict=True)) / case

        return Problem(
            peers={
                OURS: lambda i: [answer.token_ids for answer in engine.generate(prompts, params)],
                BATCH: batch,
                CONTINUOUS: continuous,
            },
            check=check, tolerance=0.3 if ON_GPU else 0.0, wall=True, units=sum(lengths), repeats=3 if ON_GPU else 1,
            info={"requests": case, "generated_tokens": sum(lengths), "prompt_tokens": sum(map(len, prompts))},
        )  # fmt: skip

    measure(build)
