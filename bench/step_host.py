"""Host time of an engine's step by part, with many running requests and a device that takes no time. On the CPU.

    python -m bench.step_host [--running 16 64 256] [--steps 200] [--json FILE]

The captured steps of a tiny model are replaced by nothing, so what is left is what a device would wait for: the decision, the arrays,
staging and launch, taking tokens back, text and events. "whole": answers that are taken at their end, as ``generate`` does; "stream":
an event with text for every token. Each part is the smallest of all steps, as the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from runtime.engine import Engine
from runtime.model import random_model
from runtime.request import SamplingParams
from runtime.text import Tokenizer

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def engine_of(running: int) -> Engine:
    """All its decodes in one captured step, whose replay does nothing."""
    fast = FastTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    config = {
        "compile": {"backend": "eager"},
        "graph": {"mode": "full", "capture_sizes": [running], "max_tokens": running, "contexts": [16]},
        "cache": {"num_pages": running * 64 + 1, "page_size": 16},
        "scheduler": {"max_num_seqs": running, "max_batch_tokens": max(512, running)},
    }
    engine = Engine(random_model(MODEL, 0, "float32", torch.device("cpu")), config, tokenizer=Tokenizer(fast))
    steps = engine.runner.steps._steps
    assert steps is not None
    for key in steps.keys.values():
        for captured in key.captured.values():
            captured.step.replay = lambda: None
    return engine


def measure(engine: Engine, running: int, steps: int, whole: bool) -> dict[str, float]:
    """Microseconds of a step and of its parts."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            spent[part].append(1e6 * (time.perf_counter() - start))
            return result

        setattr(owner, name, run)

    params = SamplingParams(max_tokens=steps + 100, ignore_eos=True, temperature=0.5)
    answers = [engine.submit([1 + i % 200] * (32 + i % 64), params, whole=whole) for i in range(running)]
    while any(not answer.request.generated for answer in answers):
        engine.step()
    parts = [
        (engine, "step", "step"),
        (engine.scheduler, "schedule", "decision"),
        (engine.runner, "launch", "launch"),
        (engine.runner.inputs, "of", "of it arrays"),
        (engine.runner, "read", "read"),
        (engine.scheduler, "complete", "take back"),
        (engine, "_land", "land"),
    ]
    for part in parts:
        timed(*part)
    for _ in range(steps):
        engine.step()
        for answer in answers:
            answer.events.clear()
    for owner, name, _ in parts:
        delattr(owner, name)
    for answer in answers:
        engine.abort(answer)
    while engine.has_work:
        engine.step()
    best = {part: min(values) for part, values in spent.items()}
    land = best.pop("land")
    return {**best, "text and events": land - best["read"] - best["take back"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for running in options.running:
        engine = engine_of(running)
        for kind in ("whole", "stream"):
            found = results[f"{kind} {running}"] = measure(engine, running, options.steps, kind == "whole")
            print(f"{kind:>6} {running:4d} requests: " + ", ".join(f"{part} {us:.0f}" for part, us in found.items()) + " µs", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
