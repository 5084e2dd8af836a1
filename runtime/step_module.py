"""What a runner captures: the model and the sampler as one module, which of its inputs' dimensions vary, and what padding holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tkernels
from runtime.model import CausalLM

_TOKENS = ("input_ids", "token_source", "positions", "slot_mapping")
_SEQS = ("block_table", "seq_lens", "logits_rows", "temperature", "top_k", "top_p", "seeds", "draws")
DYNAMIC: dict[str, dict[int, str]] = {
    **{name: {0: "tokens"} for name in _TOKENS},
    **{name: {0: "seqs"} for name in _SEQS},
    "cu_seqlens_q": {0: "seqs+1"},
}
# A padding row has no tokens (cu_seqlens_q stays at its end), writes nothing, reads nothing, and is sampled greedily from row 0.
PAD: dict[str, Any] = {"slot_mapping": -1, "token_source": -1, "top_p": 1.0, "cu_seqlens_q": "last"}


class StepModule(nn.Module):
    """The model and the sampler, one call a step.

    input_ids, positions, slot_mapping: [tokens] int64. token_source: [tokens] int64, the row of ``last_tokens`` that holds the
    token, or -1 where ``input_ids`` does. block_table [seqs, pages] int32, seq_lens [seqs] int32, cu_seqlens_q [seqs + 1] int32,
    logits_rows [seqs] int64; temperature, top_p [seqs] fp32, top_k [seqs] int32, seeds, draws [seqs] int64 as ``tkernels.sample``.
    Returns tokens [seqs] int64; with ``gives_logits`` also the logits, [seqs, vocab] in the model's dtype.
    """

    last_tokens: torch.Tensor

    def __init__(self, model: CausalLM, max_num_seqs: int, *, gives_logits: bool = False) -> None:
        super().__init__()
        self.model, self.gives_logits = model, gives_logits
        device = model.embed_tokens.device
        with torch.inference_mode(False):  # it is written in steps, which may be outside of inference mode
            self.register_buffer("last_tokens", torch.zeros(max_num_seqs, dtype=torch.int64, device=device), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_source: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        logits_rows: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seeds: torch.Tensor,
        draws: torch.Tensor,
        max_query_len: int,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        step = (positions, slot_mapping, block_table, seq_lens, cu_seqlens_q, logits_rows, max_query_len)
        logits = self.model(input_ids, *step, token_source, self.last_tokens)
        tokens = tkernels.sample(logits, temperature, top_k, top_p, seeds, draws)
        return (tokens, logits) if self.gives_logits else tokens
