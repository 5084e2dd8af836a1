"""A decoder-only language model over a paged KV cache, for one packed step of many sequences.

    h      = embed(input_ids)
    layer:   h = h + o_proj(attention(rope(q, k), v)),  then  h = h + down(silu(gate) · up),  each after an RMSNorm
    logits = lm_head(norm(h[logits_rows]))

There is one fused projection each for q, k, v and for gate, up. A projection takes the norm before it and the activation or the sum
after it into its own kernel where ``tkernels.linear`` has one for the number of rows; that of q, k and v then also rotates, and writes
the keys and values of the step to their pages. Nothing here depends on data, so any size of it can be compiled with
``fullgraph=True`` and captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

import tkernels
from runtime.rotary import Rotary
from runtime.spec import ModelSpec

Rotation = tuple[torch.Tensor, torch.Tensor]  # rows [tokens] int64 into cos_sin [any, head_dim] fp32


class Step(NamedTuple):
    """What attention needs to know of a step, the same in every layer; see ``CausalLM`` for the shapes."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_query_len: int


class Linear(nn.Linear):
    """A projection with what stands around it: ``tkernels.linear`` fuses the norm before it and the activation or sum after it."""

    def forward(
        self,
        input: torch.Tensor,
        norm: Norm | None = None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        if norm is None:
            return tkernels.linear(input, self.weight, self.bias, residual=residual, gated=gated)
        return tkernels.linear(input, self.weight, self.bias, norm_weight=norm.weight, residual=residual, gated=gated, eps=norm.eps)


def _linear(inputs: int, outputs: int, bias: bool, spec: ModelSpec, device: torch.device) -> Linear:
    return cast(Linear, nn.utils.skip_init(Linear, inputs, outputs, bias=bias, dtype=spec.dtype, device=device))


class Norm(nn.Module):
    """The weight of an RMSNorm; the projection that follows applies it."""

    def __init__(self, size: int, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self.eps = spec.rms_eps
        self.weight = nn.Parameter(torch.empty(size, dtype=spec.dtype, device=device), requires_grad=False)


class Attention(nn.Module):
    """Fused q, k, v projection, rotary embedding with the cache write, paged attention, output projection."""

    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None

    def __init__(self, spec: ModelSpec, layer: int, device: torch.device) -> None:
        super().__init__()
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.head_dim, self.eps, self.window = spec.head_dim, spec.rms_eps, spec.windows[layer]
        self.scale = spec.head_dim**-0.5
        self.qkv_proj = _linear(spec.hidden, sum(self.heads) * spec.head_dim, spec.qkv_bias, spec, device)
        self.o_proj = _linear(spec.num_heads * spec.head_dim, spec.hidden, spec.o_bias, spec, device)
        self.q_norm = Norm(spec.head_dim, spec, device) if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec, device) if spec.qk_norm else None
        self.register_buffer("k_cache", None, persistent=False)
        self.register_buffer("v_cache", None, persistent=False)

    def forward(self, residual: torch.Tensor, norm: Norm, rotation: Rotation, step: Step) -> torch.Tensor:
        return self.o_proj(self.context(residual, norm, rotation, step), residual=residual)

    def context(self, x: torch.Tensor, norm: Norm | None, rotation: Rotation, step: Step) -> torch.Tensor:
        """[tokens, heads · head_dim]: what the output projection takes. norm: applied to x first, unless it was."""
        if self.k_cache is None or self.v_cache is None:
            raise RuntimeError("the model has no KV cache: call model.bind_cache(allocate_cache(model.spec, ...)) first")
        q = tkernels.linear_rope_and_cache(
            x,
            self.qkv_proj.weight,
            self.qkv_proj.bias,
            None if norm is None else norm.weight,
            *rotation,
            self.k_cache,
            self.v_cache,
            step.slot_mapping,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )  # [tokens, heads, head_dim]
        # Allocated here, so in the piece before the splitting op: that piece owns it, and its address stays.
        out = torch.empty_like(q)
        tkernels.paged_attention_out(
            q,
            self.k_cache,
            self.v_cache,
            step.block_table,
            step.seq_lens,
            step.cu_seqlens_q,
            scale=self.scale,
            max_query_len=step.max_query_len,
            causal=True,
            window=self.window,
            out=out,
        )
        return out.flatten(1)


class MLP(nn.Module):
    """down(silu(gate) · up) with gate and up in one projection."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__()
        self.gate_up_proj = _linear(spec.hidden, 2 * spec.intermediate, spec.mlp_bias, spec, device)
        self.down_proj = _linear(spec.intermediate, spec.hidden, spec.mlp_bias, spec, device)

    def forward(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(residual, norm, gated=True), residual=residual)


class Layer(nn.Module):
    """One block: each half reads the residual through its norm and adds to it."""

    def __init__(self, spec: ModelSpec, layer: int, device: torch.device) -> None:
        super().__init__()
        self.input_norm = Norm(spec.hidden, spec, device)
        self.attention = Attention(spec, layer, device)
        self.post_norm = Norm(spec.hidden, spec, device)
        self.mlp = MLP(spec, device)

    def forward(self, residual: torch.Tensor, rotation: Rotation, step: Step) -> torch.Tensor:
        residual = self.attention(residual, self.input_norm, rotation, step)
        return self.mlp(residual, self.post_norm)


class CausalLM(nn.Module):
    """The model of a ``ModelSpec``, for inference. Its parameters are uninitialised: see ``load_model`` and ``random_model``.

    forward(input_ids [tokens] int64, positions [tokens] int64, slot_mapping [tokens] int64 (negative: nothing is written),
            block_table [seqs, pages] int32, seq_lens [seqs] int32 (new tokens included; 0: padding), cu_seqlens_q [seqs + 1] int32,
            logits_rows [seqs] int64 (the token whose logits are wanted), max_query_len: upper bound, host integer,
            token_source [tokens] int64 and last_tokens [any] int64, both or neither: where the first is not negative, the token is
            ``last_tokens[token_source]`` and not in ``input_ids``)
        -> logits [seqs, vocab] in the model's dtype.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | str = "cpu") -> None:
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.embed_tokens = nn.Parameter(torch.empty(spec.vocab, spec.hidden, dtype=spec.dtype, device=device), requires_grad=False)
        self.layers = nn.ModuleList(Layer(spec, layer, device) for layer in range(spec.num_layers))
        self.norm = Norm(spec.hidden, spec, device)
        # Tied embeddings are one parameter under one name, so that there is one address to watch.
        self.lm_head = None if spec.tied else _linear(spec.hidden, spec.vocab, False, spec, device)
        self.rotary = Rotary(spec.rope, device)
        self.requires_grad_(False)
        self.eval()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        logits_rows: torch.Tensor,
        max_query_len: int,
        token_source: torch.Tensor | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rotation = self.rotary(positions, seq_lens, cu_seqlens_q)
        step = Step(slot_mapping, block_table, seq_lens, cu_seqlens_q, max_query_len)
        residual = tkernels.embedding(input_ids, self.embed_tokens, token_source, last_tokens)  # [tokens, hidden]
        for layer in self.layers:
            residual = layer(residual, rotation, step)
        # [seqs, hidden] from here on: only the wanted rows go through the last norm and the head
        head = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        return tkernels.linear(tkernels.embedding(logits_rows, residual), head, norm_weight=self.norm.weight, eps=self.norm.eps)

    def bind_cache(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Register one (k, v) pair a layer as non-persistent buffers, replacing those bound before.

        k, v: [pages, page_size, kv_heads, head_dim], last stride 1, one dtype, on the model's device, each with its own storage.
        Raises ValueError naming the layer and what is wrong.
        """
        spec = self.spec
        if len(caches) != spec.num_layers:
            raise ValueError(f"caches: expected {spec.num_layers} pairs, one a layer, got {len(caches)}")
        like = caches[0][0]
        seen: dict[int, str] = {}
        for index, pair in enumerate(caches):
            for name, cache in zip(("k", "v"), pair, strict=True):
                where = f"caches[{index}].{name}"
                got = f"{list(cache.shape)} {cache.dtype} on {cache.device}"
                if cache.dim() != 4 or tuple(cache.shape[2:]) != (spec.num_kv_heads, spec.head_dim):
                    raise ValueError(f"{where}: expected [pages, page_size, {spec.num_kv_heads}, {spec.head_dim}], got {got}")
                if cache.shape != like.shape or cache.dtype != like.dtype:
                    raise ValueError(f"{where}: expected {list(like.shape)} {like.dtype} like caches[0].k, got {got}")
                if cache.device != self.embed_tokens.device:
                    raise ValueError(f"{where}: expected a tensor on {self.embed_tokens.device} like the model, got {got}")
                # Inductor clones whole caches that share storage with another one, at every step.
                address = cache.untyped_storage().data_ptr()
                if address in seen:
                    raise ValueError(f"{where}: shares its storage with {seen[address]}; allocate each cache on its own")
                seen[address] = where
        for layer, (k_cache, v_cache) in zip(self._blocks(), caches, strict=True):
            layer.attention.register_buffer("k_cache", k_cache, persistent=False)
            layer.attention.register_buffer("v_cache", v_cache, persistent=False)

    def _blocks(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight under its Hugging Face name, as a view: fused projections apart again. Writing to a view loads the model.

        A tied head is not repeated: ``transformers`` ties ``lm_head.weight`` itself (load with ``strict=False``).
        """
        views = {"model.embed_tokens.weight": self.embed_tokens.data, "model.norm.weight": self.norm.weight.data}
        if self.lm_head is not None:
            views["lm_head.weight"] = self.lm_head.weight.data
        for index, layer in enumerate(self._blocks()):
            attention, mlp = layer.attention, layer.mlp
            prefix = f"model.layers.{index}"
            rows = [heads * attention.head_dim for heads in attention.heads]
            for kind, fused in attention.qkv_proj.named_parameters():
                for name, part in zip("qkv", fused.data.split(rows), strict=True):
                    views[f"{prefix}.self_attn.{name}_proj.{kind}"] = part
            for kind, fused in mlp.gate_up_proj.named_parameters():
                for name, part in zip(("gate", "up"), fused.data.chunk(2), strict=True):
                    views[f"{prefix}.mlp.{name}_proj.{kind}"] = part
            plain: dict[str, nn.Module | None] = {
                "input_layernorm": layer.input_norm,
                "post_attention_layernorm": layer.post_norm,
                "self_attn.o_proj": attention.o_proj,
                "mlp.down_proj": mlp.down_proj,
                "self_attn.q_norm": attention.q_norm,
                "self_attn.k_norm": attention.k_norm,
            }
            for name, module in plain.items():
                if module is None:
                    continue
                views.update({f"{prefix}.{name}.{kind}": parameter.data for kind, parameter in module.named_parameters()})
        return views
