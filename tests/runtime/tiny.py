"""Tiny seeded models, their twins in transformers, and greedy answers of the twins."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from runtime.model import CausalLM, random_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_model(device: torch.device, seed: int = 0, **changes: Any) -> CausalLM:
    """Random weights, larger than usual in the embedding so that the answers are not one token for ever. The same on every device."""
    model, drawn = (random_model({**CONFIG, **changes}, seed, "float32", where) for where in (device, torch.device("cpu")))
    for mine, view in zip(model.hf_state_dict().values(), drawn.hf_state_dict().values(), strict=True):
        mine.copy_(view)
    return model


def twin(model: CausalLM) -> Any:
    """The same weights in transformers, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hf = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in CONFIG.items() if name != "model_type"}))
    missing = hf.load_state_dict({name: view.cpu().clone() for name, view in model.hf_state_dict().items()}, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing
    hf.tie_weights()
    return hf.to(model.embed_tokens.device).eval()


@torch.no_grad()
def greedy(hf: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """``count`` greedy tokens of transformers, alone in a batch, and by how much each logit won."""
    device = next(hf.parameters()).device
    out = hf(torch.tensor([prompt], device=device), use_cache=True)
    tokens: list[int] = []
    gaps: list[float] = []
    while True:
        top = out.logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        if len(tokens) == count:
            return tokens, gaps
        out = hf(torch.tensor([[tokens[-1]]], device=device), past_key_values=out.past_key_values, use_cache=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 10007 + length)
    return torch.randint(CONFIG["vocab_size"], (length,), generator=generator).tolist()


LENGTHS = (1100, 1, 2, 15, 16, 17, 64, 200, 700)  # the longest first, so that those after it compete for what it leaves


@cache
def expected(device: str, count: int = 64) -> list[tuple[list[int], list[float]]]:
    """Answers of transformers to ``prompt_of(length)`` for all LENGTHS."""
    hf = twin(tiny_model(torch.device(device)))
    return [greedy(hf, prompt_of(length), count) for length in LENGTHS]
