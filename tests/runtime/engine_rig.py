"""Small engines for the tests of the engine, and what must hold of one that has nothing to do."""

from __future__ import annotations

from typing import Any

import torch

from runtime.engine import Engine
from runtime.request import SamplingParams
from runtime.text import Tokenizer
from tests.runtime.test_text import TEMPLATE, byte_tokenizer
from tests.runtime.tiny import tiny_model


def config(**sections: Any) -> dict[str, Any]:
    """Eager, so that an engine starts in milliseconds; the modes have their own tests."""
    sections.setdefault("graph", {"mode": "eager", "capture_sizes": []})
    sections.setdefault("cache", {"num_pages": 33, "page_size": 8})
    sections.setdefault("scheduler", {"max_num_seqs": 4, "max_batch_tokens": 32})
    return {"compile": {"backend": "eager"}, **sections}


def make_engine(device: torch.device, text: bool = False, **sections: Any) -> Engine:
    return Engine(tiny_model(device), config(**sections), tokenizer=Tokenizer(byte_tokenizer(), TEMPLATE) if text else None)


def check_idle(engine: Engine) -> None:
    """Nothing is held, and the engine still answers."""
    assert not engine.has_work
    engine.scheduler.blocks.check([])
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(answer.token_ids) == 3
