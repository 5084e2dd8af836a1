"""The architectures that ``patch`` knows: which classes they are made of, and how each class computes.

To add one: its model file's classes in ``_KNOWN``, and, if its attention is not of these forms, a settings function. Everything is
found by exact class, so a model that subclasses one of these (other arithmetic may hide there) is reported and left.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tkernels.hf import forwards
from tkernels.nn import gemma_norm

Settings = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Names in ``transformers.models.<module>.modeling_<module>``; each class starts with ``prefix``."""

    module: str
    prefix: str
    settings: Settings  # keywords of the attention interface, by attention module
    gemma: bool = False  # norms multiply by 1 + weight
    fused_mlp: bool = False  # gate and up in one projection
    activation: str = "act_fn"  # attribute of the MLP


def _no_settings(attention: Any) -> dict[str, Any]:
    return {}


def _layer_window(attention: Any) -> dict[str, Any]:
    return {"sliding_window": attention.sliding_window}


def _model_window(attention: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(attention.config, "sliding_window", None)}


def _gemma2(attention: Any) -> dict[str, Any]:
    return {"sliding_window": attention.sliding_window, "softcap": attention.attn_logit_softcapping}


_KNOWN = {
    "llama": Architecture(module="llama", prefix="Llama", settings=_no_settings),
    "mistral": Architecture(module="mistral", prefix="Mistral", settings=_model_window),
    "qwen2": Architecture(module="qwen2", prefix="Qwen2", settings=_layer_window),
    "qwen3": Architecture(module="qwen3", prefix="Qwen3", settings=_layer_window),
    "gemma2": Architecture(module="gemma2", prefix="Gemma2", settings=_gemma2, gemma=True),
    "gemma3_text": Architecture(module="gemma3", prefix="Gemma3", settings=_layer_window, gemma=True),
    "phi3": Architecture(module="phi3", prefix="Phi3", settings=_model_window, fused_mlp=True, activation="activation_fn"),
}
SUPPORTED = tuple(_KNOWN)
_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh", "GELUActivation": "gelu"}


@dataclass(frozen=True)
class Rule:
    """How modules of one class are replaced. ``refuse`` gives the reason why one of them cannot be, or None."""

    kind: str
    now: str
    make: Callable[[torch.nn.Module], type]
    refuse: Callable[[torch.nn.Module], str | None]


def patched_class(base: type, forward: Callable[..., Any]) -> type:
    """A subclass of ``base`` with another forward and the same name, so that isinstance, hooks and printed models stay as they were."""
    return type(base.__name__, (base,), {"forward": forward, "_tkernels_base": base, "__module__": base.__module__})


def _accepts(module: torch.nn.Module) -> str | None:
    return None


@functools.cache
def rules(model_type: str) -> dict[type, Rule]:
    """Exact class → rule, for the text model of ``model_type``."""
    architecture = _KNOWN[model_type]
    file = importlib.import_module(f"transformers.models.{architecture.module}.modeling_{architecture.module}")
    attention, mlp, norm, rotary = (
        getattr(file, architecture.prefix + name) for name in ("Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    )
    cache_name = "cache" if "cache" in inspect.signature(attention.forward).parameters else "past_key_values"
    attention_class = patched_class(
        attention,
        forwards.attention_forward(
            cache_name, file.eager_attention_forward, architecture.settings, 1.0 if architecture.gemma else 0.0
        ),
    )  # fmt: skip
    rotary_class = patched_class(rotary, forwards.rotary_forward(rotary))
    norm_class = patched_class(norm, gemma_norm if architecture.gemma else forwards.llama_norm_forward)
    linear_class = patched_class(torch.nn.Linear, forwards.linear_forward)
    build_mlp = forwards.fused_mlp_forward if architecture.fused_mlp else forwards.mlp_forward
    mlp_classes = {name: patched_class(mlp, build_mlp(gate)) for name, gate in forwards.GATES.items()}

    def refuse_attention(module: torch.nn.Module) -> str | None:
        norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
        if any(getattr(type(head_norm), "_tkernels_base", type(head_norm)) is not norm for head_norm in norms):
            return "its QK-norm is not the model's RMSNorm"
        if any(head_norm._forward_hooks or head_norm._forward_pre_hooks for head_norm in norms):
            return "its QK-norm has hooks, which the fused kernel would pass by"
        if len({forwards.norm_eps(head_norm) for head_norm in norms}) > 1:
            return "its two QK-norms have different eps"
        return None

    def activation_of(module: torch.nn.Module) -> str | None:
        return _ACTIVATIONS.get(type(getattr(module, architecture.activation)).__name__)

    def refuse_mlp(module: torch.nn.Module) -> str | None:
        if activation_of(module) is not None:
            return None
        return f"no kernel for the activation {type(getattr(module, architecture.activation)).__name__}"

    return {
        attention: Rule("rope", "QK-norm and rotation in one kernel", lambda module: attention_class, refuse_attention),
        rotary: Rule("rope", "angles in fp32", lambda module: rotary_class, _accepts),
        norm: Rule("norm", "tkernels.rms_norm", lambda module: norm_class, _accepts),
        mlp: Rule("mlp", "gated activation in one kernel", lambda module: mlp_classes[activation_of(module) or ""], refuse_mlp),
        torch.nn.Linear: Rule("linear", "tkernels.linear under torch.compile", lambda module: linear_class, _accepts),
    }


def attention_types(model_type: str) -> tuple[type, type]:
    """(attention, rotary): the classes that must be replaced together."""
    found = [base for base, rule in rules(model_type).items() if rule.kind == "rope"]
    return found[0], found[1]
