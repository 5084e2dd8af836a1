"""A GGUF file seen as a Hugging Face checkpoint: metadata to config, tensor names to Hugging Face names, blocks to fp32.

Families: ``llama`` (SmolLM2 and Mistral too), ``qwen2`` and ``qwen3``. What the config cannot express is refused by key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.checkpoint import CheckpointError, TensorInfo
from runtime.rotary import RopeSpec, inverse_frequencies

_FAMILIES = ("llama", "qwen2", "qwen3")
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_ROPE_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.finetuned": "finetuned",
}
_CHECKED_KEYS = {"attention.value_length", "rope.dimension_count"}  # must equal head_dim
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFCheckpoint:
    """A ``Checkpoint`` over a GGUF file. ``fields`` holds the metadata, lists included."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CheckpointError(f"{path}: reading GGUF files needs the gguf package: pip install 'tkernels[gguf]'") from error
        self.path = path
        self._gguf = gguf
        reader = _read(gguf, path)
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._blocks = {self._hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
        self.family: str = self.fields.get("general.architecture", "")
        if self.family not in _FAMILIES:
            raise CheckpointError(f"{path}: general.architecture: expected one of {', '.join(_FAMILIES)}, got {self.family!r}")
        self.config = self._config()
        frequencies = [tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
        if frequencies:
            self.config["rope_scaling"] = self._llama3_scaling(np.asarray(frequencies[0].data, dtype=np.float32))
        self.tensors = {name: self._info(block) for name, block in self._blocks.items()}

    def _info(self, block: Any) -> TensorInfo:
        kind = block.tensor_type.name
        return TensorInfo(tuple(int(n) for n in block.shape[::-1]), kind if kind in ("F16", "BF16") else "F32", self.path)

    @property
    def generation_config(self) -> dict[str, Any]:
        """Token ids that begin, end and pad a text, as generation_config.json has them; an end of turn ends a text too."""
        ids: dict[str, Any] = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config}
        turn = self.fields.get("tokenizer.ggml.eot_token_id")
        if turn is not None and turn != ids.get("eos_token_id"):
            ids["eos_token_id"] = [*([ids["eos_token_id"]] if "eos_token_id" in ids else []), turn]
        return ids

    def get(self, name: str) -> torch.Tensor:
        if name not in self._blocks:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        block = self._blocks[name]
        kinds = self._gguf.GGMLQuantizationType
        if block.tensor_type == kinds.BF16:
            tensor = torch.from_numpy(block.data.view(np.int16).copy()).view(torch.bfloat16)
        elif block.tensor_type in (kinds.F32, kinds.F16):
            tensor = torch.from_numpy(np.array(block.data))
        else:
            try:
                tensor = torch.from_numpy(self._gguf.quants.dequantize(block.data, block.tensor_type))
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: {block.tensor_type.name} blocks are not known to the gguf package"
                ) from error
        tensor = tensor.reshape(self.tensors[name].shape)
        if self.family == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            tensor = _unpermute(tensor, heads)
        return tensor

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in _LAYER_NAMES:
            return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{kind}"
        raise CheckpointError(f"{self.path}: tensor {name}: not part of a model of the families {', '.join(_FAMILIES)}")

    def _config(self) -> dict[str, Any]:
        prefix = f"{self.family}."
        config: dict[str, Any] = {"model_type": self.family, "hidden_act": "silu"}
        scaling: dict[str, Any] = {}
        for key, value in self.fields.items():
            if not key.startswith(prefix):
                continue
            short = key.removeprefix(prefix)
            if short in _CONFIG_KEYS:
                config[_CONFIG_KEYS[short]] = value
            elif short in _ROPE_KEYS:
                scaling[_ROPE_KEYS[short]] = value
            elif short not in _CHECKED_KEYS:
                raise CheckpointError(f"{self.path}: {key}: not known here, the model may need it; got {str(value)[:60]!r}")
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if key not in config:
                raise CheckpointError(f"{self.path}: metadata for {key} is missing; the file is damaged or not a language model")
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("vocab_size", self._rows_of("model.embed_tokens.weight"))
        for short in sorted(_CHECKED_KEYS):
            if self.fields.get(prefix + short, config["head_dim"]) != config["head_dim"]:
                raise CheckpointError(
                    f"{self.path}: {prefix}{short}: expected {config['head_dim']}, the head size, got {self.fields[prefix + short]}"
                )
        if scaling.pop("rope_type", "none") != "none":
            config["rope_scaling"] = {"rope_type": self.fields[prefix + "rope.scaling.type"], **scaling}
        config["tie_word_embeddings"] = "lm_head.weight" not in self._blocks
        biased = "model.layers.0.self_attn.q_proj.bias" in self._blocks
        if self.family != "qwen2":
            config["attention_bias"] = biased
        for name in ("bos", "eos", "padding"):
            if (token := self.fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[f"{name.removesuffix('ding')}_token_id"] = token
        config["dtype"] = self._dtype()
        config["architectures"] = [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.family]]
        return config

    def _rows_of(self, name: str) -> int:
        if name not in self._blocks:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return int(self._blocks[name].shape[-1])

    def _dtype(self) -> str:
        kinds = {block.tensor_type.name for block in self._blocks.values() if len(block.shape) > 1}
        return {frozenset(["F16"]): "float16", frozenset(["BF16"]): "bfloat16"}.get(frozenset(kinds), "float32")

    def _llama3_scaling(self, divisors: np.ndarray) -> dict[str, Any]:
        """GGUF keeps Llama-3 scaling as a tensor of divisors of the frequencies; find the config that gives the same."""
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
        config = {"rope_theta": self.config.get("rope_theta", 10000.0)}
        sizes = {"head_dim": self.config["head_dim"], "max_positions": self.config["max_position_embeddings"]}
        plain, _ = inverse_frequencies(RopeSpec.from_config(config, **sizes))
        scaled, _ = inverse_frequencies(RopeSpec.from_config({**config, "rope_scaling": scaling}, **sizes))
        if divisors.shape != tuple(plain.shape) or not np.allclose((plain / scaled).numpy(), divisors, rtol=1e-4):
            raise CheckpointError(f"{self.path}: tensor rope_freqs.weight: expected the Llama-3 frequency divisors ({scaling}), got others")
        return scaling


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF stores Llama's rotary pairs next to each other (0, 1), (2, 3), …; here pairs are half a head apart."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _read(gguf: Any, path: Path) -> Any:
    """gguf's reader, whose own errors on a file that is cut off speak of array shapes; here they name the tensor."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > size:
                names = [name for name, start in getattr(self, "_starts", []) if start <= offset]
                where = f"in tensor {names[-1]}" if names else "in its metadata"
                raise CheckpointError(f"{path}: cut off {where}: {size} bytes; download it again")
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            starts = [(field.name, start_offs + int(field.parts[-1][0])) for field in fields]
            self._starts = sorted(starts, key=lambda item: item[1])
            super()._build_tensors(start_offs, fields)

    try:
        return Reader(path)
    except CheckpointError:
        raise
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged GGUF file: {error}; download it again") from error
