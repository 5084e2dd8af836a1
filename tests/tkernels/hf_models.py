"""Tiny random transformers models of every architecture that the patcher knows, with weights large enough that attention matters."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)  # fmt: skip
WINDOW = 6
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "llama, scaled rope": lambda: transformers.LlamaConfig(
        **_COMMON,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**_COMMON, sliding_window=WINDOW, partial_rotary_factor=0.5),
}  # fmt: skip


def tiny(name: str, device: torch.device, dtype: torch.dtype = torch.float32, attention: str = "eager", config: Any = None) -> Any:
    """The model in eval mode. "eager" attention is the oracle: it has every soft-cap and mask written out."""
    torch.manual_seed(0)
    config = CONFIGS[name]() if config is None else config
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    generator = torch.Generator(device).manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.data.copy_(noise * (2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3))
        if parameter.dim() == 1 and "gemma" not in name:
            parameter.data += 1
    return model


def batch(device: torch.device, side: str = "left") -> dict[str, torch.Tensor]:
    """Three prompts of 12, 7 and 1 tokens, padded on one side; 12 is beyond the windows."""
    ids = torch.randint(2, 96, (3, 12), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones(3, 12, dtype=torch.long, device=device)
    mask[1, slice(0, 5) if side == "left" else slice(7, None)] = 0
    mask[2, slice(0, 11) if side == "left" else slice(1, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}
