"""Random serving: arrivals, endings, preemptions, evictions, every mode and size, each step compared with the callable not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.random_steps import Difference, run_random_steps
from runtime.engine import Engine
from tests.runtime.tiny import tiny_model


def engine_of(device: torch.device, check: str, **graph: Any) -> Engine:
    config = {
        "graph": {"max_tokens": 12, "capture_sizes": [1, 2, 4, 7], "check": check, "on_capture_error": "raise", **graph},
        "compile": {"backend": "eager"},
        "cache": {"num_pages": 20, "page_size": 4},
        "scheduler": {
            "max_num_seqs": 5,
            "max_batch_tokens": 16,
            "max_context": 60,
            "policy": "static",
        },  # all modes, whatever this machine measures
    }
    return Engine(tiny_model(device), config)


@pytest.mark.parametrize("check", ["contract", "poison"])
def test_random_steps_have_the_bits_of_the_callable_not_captured(device: torch.device, check: str) -> None:
    found = run_random_steps(engine_of(device, check), 150)
    assert found["steps"] >= 150 and min(found["modes"][mode] for mode in ("full", "piecewise", "eager")) > 4
    assert found["preemptions"] and found["evicted_pages"] and found["aborted"] and found["sizes"] > 6
    assert found["tokens_as_module"] > 0.99 and found["staged"] == found["steps"] - found["modes"]["eager"]


def test_a_step_with_other_bits_is_found(device: torch.device) -> None:
    engine = engine_of(device, "contract")
    steps = engine.runner.steps._steps
    assert steps is not None
    for key in steps.keys.values():
        for (mode, _), captured in key.captured.items():
            if mode == "piecewise":  # what an eager gap that is left out would do
                captured.step.replay = lambda: None
    with pytest.raises(Difference, match="piecewise"):
        run_random_steps(engine, 150)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["contract", "poison"])
def test_ten_thousand_random_steps(device: torch.device, check: str) -> None:
    found = run_random_steps(engine_of(device, check), 10_000)
    assert found["preemptions"] and found["evicted_pages"] and found["sizes"] > 6
