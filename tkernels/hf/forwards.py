"""What the patched modules compute: the forward passes that ``patch`` puts on instances, on their own parameters.

Three ways to run the same equation, by what sets the pace:

- under torch.compile norms, activations and rotations are written out for Inductor to fuse (see ``tkernels.nn``);
- in eager steps of few tokens the host sets the pace, and launching one of torch's fused operators cost it a third of launching a
  Triton kernel, when that was measured (before calls that look alike repeated their launches): up to ``HOST_BOUND`` elements those run
  where they exist;
- everything else is our kernels.

Linear layers stream weights in their own kernels only under torch.compile, where a launch costs the host nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tkernels import activation
from tkernels.linear import linear
from tkernels.nn import llama_norm, normalise, rows
from tkernels.rope import rope

HOST_BOUND = 1 << 18  # elements of an activation: 64 tokens × 4096, which a GPU passes in 2 to 3 µs


class Rotation(NamedTuple):
    """What a patched rotary module gives to the patched attention of each layer: angles in fp32 instead of the model's dtype."""

    cos_sin: torch.Tensor  # [1 or batch, length, rotary_dim] fp32: cos, then sin
    positions: torch.Tensor | None  # [batch · length] int64, the row of each token in it; None under torch.compile


class Gate(NamedTuple):
    """One activation: alone in torch, and times ``up`` as kernels and equations, from two tensors or from [gate | up]."""

    act: Callable[[torch.Tensor], torch.Tensor]
    pair: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    pair_ref: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    packed: Callable[[torch.Tensor], torch.Tensor]
    packed_ref: Callable[[torch.Tensor], torch.Tensor]


def _gelu(approximate: str) -> Gate:
    return Gate(
        lambda gate: F.gelu(gate, approximate=approximate),
        lambda gate, up: activation.gelu_mul(gate, up, approximate),
        lambda gate, up: activation.gelu_mul_ref(gate, up, approximate),
        lambda x: activation.gelu_and_mul(x, approximate),
        lambda x: activation.gelu_and_mul_ref(x, approximate),
    )


GATES = {
    "silu": Gate(F.silu, activation.silu_mul, activation.silu_mul_ref, activation.silu_and_mul, activation.silu_and_mul_ref),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
}


def linear_forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type):
        return linear(x, self.weight, self.bias)
    return F.linear(x, self.weight, self.bias)


def llama_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and x.numel() <= HOST_BOUND and x.dtype == self.weight.dtype:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
    return llama_norm(self, x)


def rotary_forward(base: type) -> Callable[..., Rotation]:
    """The angles come from the model's own module, so every kind of scaled rope is right, also those that change as they run."""

    def forward(self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Rotation:
        cos, sin = base.forward(self, x.new_empty(0, dtype=torch.float32), position_ids, *args, **kwargs)  # type: ignore[attr-defined]
        half = cos.shape[-1] // 2  # transformers repeats each angle for the two partners
        table = torch.cat([cos[..., :half], sin[..., :half]], -1)
        if torch.compiler.is_compiling():
            return Rotation(table, None)
        numbers = torch.arange(table.shape[0] * table.shape[1], device=table.device).view(table.shape[:2])
        return Rotation(table, numbers.expand(x.shape[0], -1).reshape(-1))

    return forward


def _turn(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The rotation as an equation; x [batch, length, heads, dim]."""
    wide = x.float()
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin[:, :, None].chunk(2, -1)
    x1, x2 = wide[..., :rotary].chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, wide[..., rotary:]], -1).to(x.dtype)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation, q_norm: Any, k_norm: Any, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """QK-norm and rotation; q, k [batch, length, heads, dim]."""
    if rotation.positions is None:
        if q_norm is not None:
            q, k = (normalise(x, norm.weight, norm_eps(norm), offset) for x, norm in ((q, q_norm), (k, k_norm)))
        return _turn(q, rotation.cos_sin), _turn(k, rotation.cos_sin)
    q_out, k_out = rope(
        q.flatten(0, 1), k.flatten(0, 1), rotation.positions, rotation.cos_sin.flatten(0, 1),
        q_weight=None if q_norm is None else q_norm.weight, k_weight=None if k_norm is None else k_norm.weight,
        eps=0.0 if q_norm is None else norm_eps(q_norm), weight_offset=offset,
    )  # fmt: skip
    return q_out.view(q.shape), k_out.view(k.shape)


def norm_eps(module: torch.nn.Module) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps  # type: ignore[return-value]


def _project(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v [batch, length, heads, dim]; strided views where the projection is fused."""
    if hasattr(self, "qkv_proj"):
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        kv_heads = self.config.num_key_value_heads
        return heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    return tuple(proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))


def attention_forward(
    cache_name: str, eager: Callable[..., Any], settings: Callable[[Any], dict[str, Any]], offset: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """A decoder layer's attention: projections, QK-norm and rotation in one kernel, cache, attention interface, projection.

    cache_name: how this version of transformers calls the cache argument. eager: the model file's own eager attention.
    settings: the keywords that this architecture gives to the interface. offset: of the QK-norm weights.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = kwargs.pop(cache_name, None)
        if cache is None:
            cache = kwargs.pop("past_key_values", None)  # the older name, which transformers still takes
        q, k, v = _project(self, hidden_states)
        q, k = _rotate(q, k, position_embeddings, getattr(self, "q_norm", None), getattr(self, "k_norm", None), offset)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            extra = {"kwargs": kwargs} if cache_name == "cache" else {}
            k, v = cache.update(k, v, self.layer_idx, **extra)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0, scaling=self.scaling,
            **settings(self), **kwargs,
        )  # fmt: skip
        return self.o_proj(out.flatten(2)), weights

    return forward


def mlp_forward(gate: Gate) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """down(act(gate(x)) · up(x))."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        g, up = self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling():
            return self.down_proj(gate.pair_ref(g, up))
        return self.down_proj(gate.act(g).mul_(up) if g.numel() <= HOST_BOUND else gate.pair(rows(g), rows(up)))

    return forward


def fused_mlp_forward(gate: Gate) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The same with gate and up in one projection."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.gate_up_proj(hidden_states)
        if torch.compiler.is_compiling():
            return self.down_proj(gate.packed_ref(x))
        if x.numel() <= 2 * HOST_BOUND:
            g, up = x.chunk(2, -1)
            return self.down_proj(gate.act(g).mul_(up))
        return self.down_proj(gate.packed(rows(x)))

    return forward
