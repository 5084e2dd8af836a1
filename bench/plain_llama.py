"""A Llama decode step in plain PyTorch over contiguous KV caches: what a careful user writes without this package.

It is the peer of the decode-step benchmarks: eager, compiled, `mode="reduce-overhead"`, and compiled inside one hand-made CUDA
graph. Same weights as ours (fused QKV and gate-up projections), SDPA with grouped heads, greedy argmax at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange


class PlainLlamaStep(torch.nn.Module):
    """ids, positions [batch] → next ids [batch]; every sequence holds ``context`` tokens, the new one is written at the end."""

    def __init__(self, model: torch.nn.Module, batch: int, context: int) -> None:
        super().__init__()
        spec = model.spec
        self.spec, self.context = spec, context
        self.model = model
        device, dtype = model.embed_tokens.device, model.embed_tokens.dtype
        shape = (batch, spec.num_kv_heads, context, spec.head_dim)
        self.k_caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)]
        self.v_caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)]
        self.register_buffer("at", torch.tensor([context - 1], device=device), persistent=False)

    def _rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        spec, model = self.spec, self.model
        residual = F.embedding(ids, model.embed_tokens)
        cos, sin = model.rotary.cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [batch, 1, head_dim / 2]
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        for layer, k_cache, v_cache in zip(model.layers, self.k_caches, self.v_caches, strict=True):
            x = F.rms_norm(residual, (spec.hidden,), layer.input_norm.weight, spec.rms_eps)
            q, k, v = layer.attention.qkv_proj(x).split(sizes, -1)
            q = self._rope(rearrange(q, "b (h d) -> b h d", d=spec.head_dim), cos, sin)
            k = self._rope(rearrange(k, "b (h d) -> b h d", d=spec.head_dim), cos, sin)
            k_cache.index_copy_(2, self.at, k.unsqueeze(2))
            v_cache.index_copy_(2, self.at, rearrange(v, "b (h d) -> b h 1 d", d=spec.head_dim))
            out = F.scaled_dot_product_attention(q.unsqueeze(2), k_cache, v_cache, enable_gqa=True)  # [batch, heads, 1, head_dim]
            residual = residual + layer.attention.o_proj(rearrange(out, "b h 1 d -> b (h d)"))
            gate, up = layer.mlp.gate_up_proj(F.rms_norm(residual, (spec.hidden,), layer.post_norm.weight, spec.rms_eps)).chunk(2, -1)
            residual = residual + layer.mlp.down_proj(F.silu(gate) * up)
        x = F.rms_norm(residual, (spec.hidden,), model.norm.weight, spec.rms_eps)
        return F.linear(x, model.embed_tokens if model.lm_head is None else model.lm_head.weight)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.logits(ids, positions).argmax(-1)
