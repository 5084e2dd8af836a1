"""What a decoder-only model is made of, read from a Hugging Face config.

``ModelSpec.from_config(config)`` takes the mapping of a ``config.json`` and answers with a frozen description; families are
Llama (SmolLM2 too), Mistral, Qwen2 and Qwen3. Missing keys take the default that transformers gives them, and whatever the
model here would compute differently is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.rotary import RopeSpec, SpecError

# What transformers (5.24) puts where config.json is silent; keys without a default here are required.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary attention over grouped heads, gated SiLU.

    Sizes are counts (``hidden``, ``intermediate``, ``head_dim`` in elements; ``max_positions`` in tokens). ``windows`` holds, by
    layer, how many of the newest keys a query sees, its own included, or None for all. ``dtype`` is the checkpoint's.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_positions: int
    rms_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    rope: RopeSpec
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config. Raises SpecError naming the key that is missing, wrong or not supported."""
        family = config.get("model_type")
        if family not in _DEFAULTS:
            raise SpecError(f"model_type: expected one of {', '.join(sorted(_DEFAULTS))}, got {family!r}")
        read = _Reader({**_DEFAULTS[family], **config})
        hidden, num_heads = read.count("hidden_size"), read.count("num_attention_heads")
        num_kv_heads = read.count("num_key_value_heads", num_heads)
        head_dim = read.count("head_dim", hidden // num_heads)
        if num_heads % num_kv_heads:
            raise SpecError(f"num_key_value_heads: expected a divisor of num_attention_heads ({num_heads}), got {num_kv_heads}")
        if head_dim % 2:
            raise SpecError(f"head_dim: expected an even number, since rotary embedding pairs dimensions, got {head_dim}")
        if read.config.get("hidden_act", "silu") != "silu":
            raise SpecError(f"hidden_act: expected 'silu', got {read.config['hidden_act']!r}")
        if read.config.get("quantization_config"):
            raise SpecError("quantization_config: quantised checkpoints are not supported; use the unquantised one or a GGUF file")
        num_layers = read.count("num_hidden_layers")
        max_positions = read.count("max_position_embeddings")
        rope = RopeSpec.from_config(read.config, head_dim=head_dim, max_positions=max_positions)
        attention_bias = family in ("llama", "qwen3") and read.flag("attention_bias")
        return cls(
            family=family,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            intermediate=read.count("intermediate_size"),
            vocab=read.count("vocab_size"),
            max_positions=rope.max_positions,
            rms_eps=read.number("rms_norm_eps", 1e-6),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and read.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            tied=read.flag("tie_word_embeddings"),
            windows=_windows(family, read, num_layers),
            rope=rope,
            dtype=_dtype(read.config),
        )


class _Reader:
    """Typed access to a config, with the key in every error."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise SpecError(f"{key}: missing from the model's config")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{key}: expected a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise SpecError(f"{key}: expected a number of at least 0, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value not in (None, False, True):
            raise SpecError(f"{key}: expected true or false, got {value!r}")
        return bool(value)


def _windows(family: str, read: _Reader, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: by ``layer_types``, else from layer ``max_window_layers`` on; off by default."""
    if family == "llama":
        return (None,) * num_layers
    on = family == "mistral" or read.flag("use_sliding_window")
    window = read.count("sliding_window") if on and read.config["sliding_window"] is not None else None
    kinds = read.config.get("layer_types")
    if kinds is None:
        first = 0 if family == "mistral" else int(read.number("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, (list, tuple)) or len(kinds) != num_layers:
        raise SpecError(f"layer_types: expected a list of {num_layers} names, one a layer, got {kinds!r}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise SpecError(f"layer_types[{layer}]: expected 'full_attention' or 'sliding_attention', got {kind!r}")
        if kind == "sliding_attention" and window is None:
            raise SpecError(f"layer_types[{layer}]: 'sliding_attention' without sliding_window (Qwen: and use_sliding_window)")
        if kind == "full_attention" and window is not None and family == "mistral":
            raise SpecError(f"layer_types[{layer}]: 'full_attention', but a Mistral model has one window ({window}) for all layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise SpecError(f"dtype: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]
