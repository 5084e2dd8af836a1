"""The model against transformers: every family and rope scaling, one-shot and chunked prefill, decode, mixed batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from runtime.model import CausalLM, ModelSpec, SpecError, allocate_cache, random_model, resolve_device, resolve_dtype
from tests.runtime.paged import PagedModel

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA, MISTRAL, QWEN2, QWEN3 = ({**BASE, "model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3"))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-multi-query": {**LLAMA, "num_key_value_heads": 1},
    "llama-no-kv-heads-key": {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")},
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim-of-its-own": {**LLAMA, "head_dim": 24},
    "smollm2": {**LLAMA, "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True, "rope_theta": 100000.0},
    "mistral-no-window": {**MISTRAL, "sliding_window": None},
    "mistral-window": {**MISTRAL, "sliding_window": 5},
    "mistral-window-1": {**MISTRAL, "sliding_window": 1},
    "qwen2": QWEN2,
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen2-window-from-layer-1": {**QWEN2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2-layer-types": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {**QWEN3, "head_dim": 32},
    "qwen3-bias-window": {**QWEN3, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 500.0},
    "theta-new-key": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"max_position_embeddings": 16, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "llama3-new-key": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn-old-key-no-original": {"max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
    "yarn-mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "beta_fast": 4,
            "beta_slow": 0.5,
            "truncate": False,
        }
    },
    "yarn-attention-factor": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "rope_theta": 1e4}},
    "longrope": {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **_LONG}},
    "longrope-factor": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **_LONG},
    },
}
CASES = {**FAMILIES, **{f"rope-{name}": {**LLAMA, **keys} for name, keys in ROPES.items()}}


class Oracle:
    """transformers on the same weights, one sequence at a time, fed in the same chunks."""

    def __init__(self, model: CausalLM, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        hf_config = AutoConfig.for_model(**copy.deepcopy(config))
        self.hf = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").to(model.embed_tokens.device, dtype).eval()
        loaded = self.hf.load_state_dict(model.hf_state_dict(), strict=False)
        assert not loaded.unexpected_keys and set(loaded.missing_keys) <= ({"lm_head.weight"} if model.spec.tied else set())

    @torch.no_grad()
    def __call__(self, chunks: list[list[int]]) -> torch.Tensor:
        """Logits [tokens, vocab] of one sequence, whole; given in ``chunks`` only where the scaling depends on the length so far."""
        device, rotary = self.hf.device, self.hf.model.rotary_emb
        if rotary.rope_type not in ("dynamic", "longrope"):
            return self.hf(input_ids=torch.tensor([[t for chunk in chunks for t in chunk]], device=device), use_cache=False).logits[0]
        self.hf.model.rotary_emb = type(rotary)(self.hf.config).to(device)  # it remembers the longest sequence it has seen
        cache = DynamicCache(config=self.hf.config)
        return torch.cat([self.hf(input_ids=torch.tensor([c], device=device), past_key_values=cache).logits[0] for c in chunks])


def tolerance(config: dict[str, Any], model: CausalLM, chunks: list[list[int]]) -> float:
    """Twice the error of transformers in fp32 against fp64, and no less than a few roundings of the largest logit."""
    wide, narrow = Oracle(model, config, torch.float64)(chunks), Oracle(model, config)(chunks)
    return max(2 * (narrow - wide).abs().max().item(), 16 * torch.finfo(torch.float32).eps * wide.abs().max().item())


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def split(values: list[int], *lengths: int) -> list[list[int]]:
    assert sum(lengths) == len(values)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, device: torch.device) -> None:
    """One sequence in one piece, one in chunks that end inside pages, one decoded from its first token: all in the same steps."""
    config = CASES[name]
    model = random_model(config, seed=3, device=device)
    paged = PagedModel(model)
    whole = [tokens(33, 1)] + [[t] for t in tokens(3, 2)]
    chunked = split(tokens(29, 3), 6, 11, 5, 7)
    decoded = [[t] for t in tokens(4, 4)]
    steps = [paged.step({"a": a, "b": b, "c": c}) for a, b, c in zip(whole, chunked, decoded, strict=True)]
    oracle = Oracle(model, config)
    for key, chunks in (("a", whole), ("b", chunked), ("c", decoded)):
        got, expected = torch.cat([step[key] for step in steps]), oracle(chunks)
        assert (got - expected).abs().max().item() <= tolerance(config, model, chunks), key
