"""The first step of a model in one kernel: gather the tokens' embeddings and normalise them.

    residual = table[ids];   y = rms_norm(residual)

An id outside the table gives NaN in its row, on every path; it never reads outside.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels.rmsnorm import check, launch, rms_norm_ref


def embedding_rms_norm_ref(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle."""
    known = (ids >= 0) & (ids < table.shape[0])
    rows = table[torch.where(known, ids, 0)] if table.shape[0] else table.new_zeros((*ids.shape, table.shape[1]))
    residual = torch.where(known[..., None], rows, float("nan"))
    return rms_norm_ref(residual, weight, eps, weight_offset), residual


def _check(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    if table.dim() != 2:
        raise ValueError(f"table: expected [vocab, hidden], got {list(table.shape)}")
    check(table, weight, eps, name="table")
    _checks.check_last_stride("table", table)
    if ids.dim() != 1:
        raise ValueError(f"ids: expected [tokens], got {list(ids.shape)}")
    _checks.check_dtype("ids", ids, torch.int64, "indices")
    _checks.check_device("ids", ids, table, "table")


def _embedding_rms_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(ids, table, weight, eps)
    y, residual, _ = launch(table, weight, eps, weight_offset, ids=ids)
    assert residual is not None
    return y, residual


_embedding_rms_norm_op = define(
    "embedding_rms_norm(Tensor ids, Tensor table, Tensor weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_embedding_rms_norm,
    reference=_checks.checked(_check, embedding_rms_norm_ref),
    fake=lambda ids, table, weight, eps, weight_offset=0.0: (
        torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device),
        torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device),
    ),
)


def embedding_rms_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(table[ids]), table[ids]) in one kernel.

    ids: [tokens] int64; one outside the table gives a row of NaN. table: [vocab, hidden] fp16, bf16 or fp32, last stride 1.
    weight, eps, weight_offset: as in rms_norm. Returns (y, residual), both [tokens, hidden] like table, contiguous.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _embedding_rms_norm_op(ids, table, weight, eps, weight_offset)
