"""The whole engine against transformers: greedy tokens of prompts of 1 to over 1000 tokens, generated together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.request import SamplingParams
from tests.runtime.tiny import LENGTHS, expected, prompt_of, tiny_model

COUNT = 64
PLENTY = {"cache": {"num_pages": 400, "page_size": 16}, "scheduler": {"max_num_seqs": 16, "max_batch_tokens": 256}}
# The longest request alone needs 73 pages of the 79; three run at once at most, and late ones are preempted.
SCARCE = {"cache": {"num_pages": 80, "page_size": 16}, "scheduler": {"max_num_seqs": 4, "max_batch_tokens": 48}}


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


@pytest.mark.parametrize(("pool", "overlap"), [("plenty", True), ("scarce", True), ("scarce", False)])
@pytest.mark.parametrize("mode", ["eager", "piecewise", "full"])
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
