"""The first step of a model: gather the tokens' embeddings, and where one kernel shall do both, normalise them.

    residual = table[ids];   y = rms_norm(residual)

An id outside the table gives NaN in its row, on every path; it never reads outside.
"""

from __future__ import annotations

import torch

from tkernels import _checks, _dependent
from tkernels._dependent import wait
from tkernels._op import define
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.rmsnorm import check, launch, rms_norm_ref

_BLOCK = 1024  # columns of a program at most


def embedding_ref(
    ids: torch.Tensor, table: torch.Tensor, source: torch.Tensor | None = None, previous: torch.Tensor | None = None
) -> torch.Tensor:
    """The oracle."""
    if source is not None and previous is not None:
        held = (source >= 0) & (source < len(previous))
        before = previous[torch.where(held, source, 0)] if len(previous) else torch.full_like(ids, -1)
        ids = torch.where(source < 0, ids, torch.where(held, before, -1))
    known = (ids >= 0) & (ids < table.shape[0])
    rows = table[torch.where(known, ids, 0)] if table.shape[0] else table.new_zeros((*ids.shape, table.shape[1]))
    return torch.where(known[..., None], rows, float("nan"))


@triton.jit(
    do_not_specialize=["vocab", "num_previous", "stride_ids", "stride_source"], do_not_specialize_on_alignment=["ids_ptr", "source_ptr"]
)
def _embedding_kernel(
    ids_ptr, source_ptr, previous_ptr, table_ptr, out_ptr, stride_ids, stride_source, stride_previous, stride_table,
    vocab, num_previous, hidden,
    HAS_SOURCE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < hidden
    wait(PDL)
    token = tl.load(ids_ptr + row * stride_ids)
    if HAS_SOURCE:
        source = tl.load(source_ptr + row * stride_source)
        held = (source >= 0) & (source < num_previous)
        before = tl.load(previous_ptr + tl.where(held, source, 0) * stride_previous, mask=held, other=-1)
        token = tl.where(source < 0, token, before)
    known = (token >= 0) & (token < vocab)
    x = tl.load(table_ptr + tl.where(known, token, 0) * stride_table + offs, mask=mask & known, other=0.0)
    x = tl.where(known, x.to(tl.float32), float("nan"))
    tl.store(out_ptr + row * hidden + offs, cast(x, out_ptr.dtype.element_ty), mask=mask)


def _check_embedding(
    ids: torch.Tensor, table: torch.Tensor, source: torch.Tensor | None = None, previous: torch.Tensor | None = None
) -> None:
    _check_ids(ids, table)
    _checks.check_float("table", table)
    if (source is None) != (previous is None):
        raise ValueError("source, previous: expected both or neither, since source says which of previous a token is")
    if source is None or previous is None:
        return
    _checks.check_shape("source", source, tuple(ids.shape), "like ids")
    _checks.check_dtype("source", source, torch.int64, "indices")
    _checks.check_device("source", source, table, "table")
    if previous.dim() != 1:
        raise ValueError(f"previous: expected [any], got {list(previous.shape)}")
    _checks.check_dtype("previous", previous, torch.int64, "token ids")
    _checks.check_device("previous", previous, table, "table")


def _check_ids(ids: torch.Tensor, table: torch.Tensor) -> None:
    if table.dim() != 2:
        raise ValueError(f"table: expected [vocab, hidden], got {list(table.shape)}")
    _checks.check_last_stride("table", table)
    if ids.dim() != 1:
        raise ValueError(f"ids: expected [tokens], got {list(ids.shape)}")
    _checks.check_dtype("ids", ids, torch.int64, "indices")
    _checks.check_device("ids", ids, table, "table")


def _embedding(
    ids: torch.Tensor, table: torch.Tensor, source: torch.Tensor | None = None, previous: torch.Tensor | None = None
) -> torch.Tensor:
    _check_embedding(ids, table, source, previous)
    (tokens,), (vocab, hidden) = ids.shape, table.shape
    out = torch.empty((tokens, hidden), dtype=table.dtype, device=table.device)
    if tokens and hidden:
        block = min(_BLOCK, next_power_of_2(hidden))
        strides = (0, 0) if source is None or previous is None else (source.stride(0), previous.stride(0))
        _dependent.launch(
            _embedding_kernel, (tokens, cdiv(hidden, block)), out.device,
            ids, source, previous, table, out, ids.stride(0), *strides, table.stride(0),
            vocab, 0 if previous is None else len(previous), hidden,
            HAS_SOURCE=source is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


_embedding_op = define(
    "embedding(Tensor ids, Tensor table, Tensor? source=None, Tensor? previous=None) -> Tensor",
    kernel=_embedding,
    reference=_checks.checked(_check_embedding, embedding_ref),
    fake=lambda ids, table, source=None, previous=None: torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device),
)


def embedding(
    ids: torch.Tensor, table: torch.Tensor, source: torch.Tensor | None = None, previous: torch.Tensor | None = None
) -> torch.Tensor:
    """table[ids], or any rows of a matrix; some ids can be tokens that the device has and the host does not know yet.

        out[t] = table[ids[t]]                    where source[t] < 0, or without source
               = table[previous[source[t]]]       else

    ids, source: [tokens] int64. previous: [any] int64. table: [vocab, hidden] fp16, bf16 or fp32, last stride 1. A row or a place
    that is not there gives a row of NaN. Returns [tokens, hidden] like table, contiguous.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _embedding_op(ids, table, source, previous)


def embedding_rms_norm_ref(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle."""
    residual = embedding_ref(ids, table)
    return rms_norm_ref(residual, weight, eps, weight_offset), residual


def _check(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    if table.dim() == 2:
        check(table, weight, eps, name="table")
    _check_ids(ids, table)


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
