"""Tiny checkpoints for tests: configs, the folder that ``save_pretrained`` would write, and the comparison of two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.model import CausalLM

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "llama-tied": {**CONFIG, "tie_word_embeddings": True},
    "llama-bias": {**CONFIG, "attention_bias": True},
    "qwen2": {**CONFIG, "model_type": "qwen2"},
    "qwen3": {**CONFIG, "model_type": "qwen3", "head_dim": 32},
}


def write_folder(folder: Path, model: CausalLM, config: dict[str, Any], *, shards: int = 1) -> Path:
    """What ``save_pretrained`` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: view.clone() for name, view in model.hf_state_dict().items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, folder / file)
        placed.update(dict.fromkeys(names[shard::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def assert_same_weights(got: CausalLM, expected: CausalLM) -> None:
    views = got.hf_state_dict()
    for name, view in expected.hf_state_dict().items():
        assert torch.equal(views.pop(name), view), name
    assert not views
