"""What an engine's step does on the host for each running request: next to nothing, so that the device does not wait for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from runtime.engine import Engine
from runtime.request import SamplingParams
from runtime.text import Tokenizer
from tests.runtime.test_ready import calls_of, without_kernels
from tests.runtime.test_text import byte_tokenizer
from tests.runtime.tiny import tiny_model

SIZES = (4, 36)
STEPS = 16  # a page's worth, so that each request takes one and fills one


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(
        tiny_model(torch.device("cpu"), num_hidden_layers=1),
        {
            "compile": {"backend": "eager"},
            "graph": {"mode": "full", "capture_sizes": list(SIZES), "max_tokens": SIZES[1], "contexts": [8]},
            "cache": {"num_pages": 1000, "page_size": STEPS},
            "scheduler": {"max_num_seqs": SIZES[1], "max_batch_tokens": 1024, "max_context": 512},
        },
        tokenizer=Tokenizer(byte_tokenizer()),
    )
    without_kernels(engine.runner.steps)
    return engine


def calls_per_request(engine: Engine, **how: Any) -> Counter[str]:
    """Python ("call") and C functions ("c_call") that a step calls more for each request more."""
    counts = []
    for size in SIZES:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.5)
        answers = [engine.submit([1 + i, 2, 3], params, **how) for i in range(size)]
        for _ in range(20):  # the prompts, and buffers that are made when they first come round
            engine.step()

        def run() -> None:
            for _ in range(STEPS):
                engine.step()

        before = [len(answer.request.generated) for answer in answers]  # unequal where prompts were shared out over steps
        counts.append(calls_of(run))
        assert [len(answer.request.generated) for answer in answers] == [count + STEPS for count in before]
        for answer in answers:
            engine.abort(answer)
        while engine.has_work:
            engine.step()
    return Counter({kind: (counts[1][kind] - counts[0][kind]) / STEPS / (SIZES[1] - SIZES[0]) for kind in ("call", "c_call")})


def test_a_whole_answer_costs_its_steps_no_python_function(engine: Engine) -> None:
    """Two times ``list.append`` in the scheduler and one in the answer; a page taken, filled and hashed in sixteen steps."""
    calls = calls_per_request(engine, whole=True)
    assert calls["call"] <= 0.5 and calls["c_call"] <= 5, calls


def test_a_streamed_answer_costs_a_few(engine: Engine) -> None:
    """Deliver, text, bytes of a token, report, and the event itself."""
    calls = calls_per_request(engine)
    assert calls["call"] <= 6 and calls["c_call"] <= 10, calls
