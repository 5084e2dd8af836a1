"""Tensor parallelism: every rank holds a share of each projection and the heads that go with it, and runs the same program.

    column-parallel (q, k, v, gate, up):  y_r = x · W_rᵀ           W_r: rows of W; no communication
    row-parallel (o, down):               y   = Σ_r x_r · W_rᵀ     W_r: columns of W; the sum is fused with residual add and norm
    vocabulary-parallel (embedding, head): rows of the table; embeddings are summed, logits gathered

KV heads are split, or, where there are fewer than ranks, each is held by several. Sums run in rank order, so all ranks sample the
same tokens and the scheduler needs no messages. Ranks are started by torchrun, on one host or several.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tkernels
from runtime import ranks
from runtime.config import ConfigError, RuntimeConfig
from runtime.decoder import CausalLM, Step
from runtime.spec import ModelSpec
from tkernels import collectives
from tkernels.collectives.group import find

_MAX_BYTES = 16 << 20  # the longest all-reduce of one launch: 2048 tokens of hidden 4096 in bf16
_TIMEOUT_S = 120.0  # at the start-up one rank may compile its pieces that much longer than another
_joined: list[str] = []  # the group of this process, between join and leave


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among ``world`` ranks; ``group`` is the name that collectives take."""

    group: str
    rank: int
    world: int

    def local_spec(self, spec: ModelSpec) -> ModelSpec:
        """What one rank computes. Raises ConfigError when heads or columns cannot be shared out evenly."""
        world = self.world
        for what, count in (("num_attention_heads", spec.num_heads), ("intermediate_size", spec.intermediate)):
            if count % world:
                raise ConfigError(f"parallel.tensor: expected a divisor of the model's {what} ({count}), got {world}")
        if spec.num_kv_heads % world and world % spec.num_kv_heads:
            raise ConfigError(
                f"parallel.tensor: expected a divisor or a multiple of the model's num_key_value_heads ({spec.num_kv_heads}), got {world}"
            )
        return dataclasses.replace(
            spec,
            num_heads=spec.num_heads // world,
            num_kv_heads=max(1, spec.num_kv_heads // world),
            intermediate=spec.intermediate // world,
            vocab=-(-spec.vocab // world),
        )

    def cut(self, name: str, full: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
        """This rank's part of a weight of the whole model (``spec``), by its Hugging Face name."""
        local = self.local_spec(spec)
        *_, module, kind = name.split(".")
        if module in ("embed_tokens", "lm_head"):
            part = full[self.rank * local.vocab : (self.rank + 1) * local.vocab]
            return F.pad(part, (0, 0, 0, local.vocab - len(part)))  # rows past the vocabulary: the last rank's
        if module in ("k_proj", "v_proj"):
            rows = local.num_kv_heads * spec.head_dim
            return full.narrow(0, self.rank * spec.num_kv_heads // self.world * spec.head_dim, rows)
        if module in ("q_proj", "gate_proj", "up_proj"):
            return full.chunk(self.world, 0)[self.rank]
        if module in ("o_proj", "down_proj"):
            if kind == "weight":
                return full.chunk(self.world, 1)[self.rank]
            return full if self.rank == 0 else torch.zeros_like(full)  # a bias is added once
        return full


class ParallelCausalLM(CausalLM):
    """The share of one rank; called like ``CausalLM``, by all ranks together. ``spec``: local heads and columns, whole vocabulary."""

    def __init__(self, spec: ModelSpec, parallel: TensorParallel, device: torch.device | str = "cpu") -> None:
        local = parallel.local_spec(spec)
        super().__init__(local, device)
        self.parallel, self.local_vocab = parallel, local.vocab
        self.spec = dataclasses.replace(local, vocab=spec.vocab)

    def _embed(self, input_ids: torch.Tensor, token_source: torch.Tensor | None, last_tokens: torch.Tensor | None) -> torch.Tensor:
        if token_source is not None and last_tokens is not None:
            input_ids = torch.where(token_source >= 0, last_tokens[token_source.clamp(min=0)], input_ids)
        row = input_ids - self.parallel.rank * self.local_vocab
        mine = (row >= 0) & (row < self.local_vocab)
        part = F.embedding(row.clamp(0, self.local_vocab - 1), self.embed_tokens)
        return collectives.all_reduce(torch.where(mine[:, None], part, 0), self.parallel.group)  # one rank's value, and zeros

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
        group = self.parallel.group
        rotation = self.rotary(positions, seq_lens, cu_seqlens_q)
        step = Step(slot_mapping, block_table, seq_lens, cu_seqlens_q, max_query_len)
        residual = self._embed(input_ids, token_source, last_tokens)  # [tokens, hidden], the same on all ranks
        layers = self._blocks()
        x = tkernels.rms_norm(residual, layers[0].input_norm.weight, layers[0].input_norm.eps)
        for index, layer in enumerate(layers):
            part = layer.attention.o_proj(layer.attention.context(x, None, rotation, step))
            x, residual = collectives.all_reduce_add_rms_norm(part, residual, layer.post_norm.weight, layer.post_norm.eps, group)
            part = layer.mlp.down_proj(layer.mlp.gate_up_proj(x, gated=True))
            norm = self.norm
            if index + 1 < len(layers):
                norm = layers[index + 1].input_norm
            else:  # [seqs, hidden] from here on: only the wanted rows go through the last sum, norm and head
                part, residual = part[logits_rows], residual[logits_rows]
            x, residual = collectives.all_reduce_add_rms_norm(part, residual, norm.weight, norm.eps, group)
        head = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        logits = collectives.all_gather(tkernels.linear(x, head), group, -1)  # [seqs, world · local_vocab]
        return logits if logits.shape[-1] == self.spec.vocab else logits[:, : self.spec.vocab].contiguous()


def join(config: RuntimeConfig) -> TensorParallel | None:
    """Take this process's place among ``parallel.tensor`` ranks, as torchrun has set them up; None for one rank.

    Raises ConfigError when the process was not started by torchrun with as many ranks.
    """
    wanted = config.parallel.tensor
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted != world:
        raise ConfigError(
            f"parallel.tensor: {wanted} ranks are configured and {world} {'are' if world > 1 else 'is'} running; "
            f"start with: torchrun --nproc-per-node {wanted} -m runtime ..."
        )
    if wanted == 1:
        return None
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
    mesh = dist.init_device_mesh("cuda" if on_gpu else "cpu", (world,), mesh_dim_names=("tp",))
    group = collectives.init_group(mesh["tp"], _MAX_BYTES, _TIMEOUT_S)
    _joined[:] = [group]
    meetings = find(group).meetings
    assert meetings is not None
    ranks.agree_through(lambda value: max(map(float, meetings.exchange("a shared decision", repr(float(value)), 600.0))))
    return TensorParallel(group, mesh.get_local_rank(), world)


def leave() -> None:
    """At the end of the program: no rank goes while another still needs it.

    The group goes too: as long as it holds its ProcessGroup, threads of gloo live on, and one that still has a tensor to free when the
    interpreter is gone aborts the process.
    """
    if dist.is_initialized():
        ranks.agree_through(None)
        for group in _joined:
            collectives.destroy_group(group)
        _joined.clear()
        dist.barrier()
        dist.destroy_process_group()


def is_follower() -> bool:
    """Whether another rank of this run does the printing."""
    return int(os.environ.get("RANK", "0")) > 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1
