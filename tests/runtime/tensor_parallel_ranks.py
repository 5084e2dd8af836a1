"""What each rank of test_tensor_parallel.py runs: tiny seeded models, whole engines, tokens written as JSON.

torchrun --nproc-per-node 4 tests/runtime/tensor_parallel_ranks.py OUT_{rank}.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.model import random_model
from runtime.parallel import join, leave
from runtime.request import SamplingParams

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied, KV heads split": BASE,
    "biases, QK-norm, fewer KV heads than ranks, odd vocabulary": {
        **BASE,
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "vocab_size": 323,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
PROMPTS = [[(7 * i + 3 * j) % 320 for j in range(n)] for i, n in enumerate((1, 5, 17, 40))]


def config(mode: str, world: int) -> dict[str, Any]:
    return {
        "model": {"device": "cpu"} if not torch.cuda.is_available() else {},
        "parallel": {"tensor": world},
        "graph": {"mode": mode, "capture_sizes": [4], "max_tokens": 4},
        "compile": {"backend": "eager"},
        "cache": {"num_pages": 64, "page_size": 16},
        "scheduler": {"max_num_seqs": 4, "max_batch_tokens": 64},
    }


def answers(name: str, mode: str, world: int) -> tuple[list[list[int]], dict[str, Any]]:
    settings = RuntimeConfig.load(config(mode, world))
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    model = random_model(MODELS[name], 3, "float32", device, join(settings))
    engine = Engine(model, settings)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    return [completion.token_ids for completion in completions], engine.stats()["modes"]["steps"]


def _threads() -> list[str]:
    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]


def main() -> None:
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    found = {name: answers(name, mode, world) for name, mode in zip(MODELS, ("full", "eager"), strict=True)}
    Path(sys.argv[1].format(rank=os.environ["RANK"])).write_text(json.dumps(found))
    leave()
    left = [name for name in _threads() if name.startswith(("pt_gloo", "pt_nccl"))]
    assert not left, f"these would free tensors after the interpreter's end, which aborts: {left}"


if __name__ == "__main__":
    main()
