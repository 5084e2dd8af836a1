"""Decode of sequences with up to 8 query tokens on Hopper, as speculative decoding makes them, by the Gluon kernel of _decode_sm90.

The query rows of such a sequence, tokens times the heads of a group, are rows of one warpgroup MMA, so all cost the same. Keys
come by TMA through six stages of 32 KiB (eight of 16 for heads of up to 64), where decode.py's pipeline holds one block of keys once it
takes that many columns. Those whose rows fit the columns of decode_one_sm90.py are computed there, in every bucket: which kernel computes
a sequence depends on its own query length and the model's shape alone. So this one has those of 5 to 8 tokens and 5 to 8 heads a group.

Again a tree fixed by a sequence's own length, over equal ranges that are cut between its leaves (decode.py), with two levels: blocks of
128 keys are folded into leaves (as many blocks each), leaves into the row. There are leaves enough for one sequence to take all programs of
a KV head, or 64 of them. Workspace: a slot per leaf of each cut sequence, at most one of which begins in a range. With heads of 128, 8 of
them on each KV head and 132 multiprocessors: at most 64 MiB for 8 KV heads, and 264 MiB for one, which takes 132 sequences or more.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels import _dependent
from tkernels._counters import counters, stood
from tkernels._target import target_of
from tkernels._triton import next_power_of_2
from tkernels.attention import _sm90
from tkernels.attention._common import LOG2_E
from tkernels.attention._inputs import Inputs
from tkernels.attention.decode import QUERY_LEN

_GROUP = 8  # heads of a group at most: 64 rows
_DIMS = (33, 128)
_BLOCK_N = 128
_LEAVES = 64  # of a sequence at most: few KV heads have many programs each, and a workspace that grows with both
_STAGES = {64: 4, 128: 3}  # K blocks that are resident, and V blocks: with two of queries 224 KiB of shared memory; 8 named barriers


def enable(on: bool) -> None:
    """Whether calls that are made or captured from now on may come here, or to decode_one_sm90.py. False sends them to decode.py, to
    compare the two."""
    _sm90.enable("decode", on)


def absence(arch: str) -> str | None:
    """Why no call is computed by the Gluon kernel here, or None. arch: as in tkernels._target."""
    return _sm90.absence("decode", arch)


def refusal(x: Inputs, arch: str) -> str | None:
    """Why decode.py computes this call, or None where the Gluon kernel does.

    Depends on the device, the model's shape, strides, alignment and features alone, never on lengths, the bucket of query lengths or the
    batch, so that a sequence gets the same bits in every batch. arch: as in tkernels._target.
    """
    problem = _sm90.refusal("decode", x, arch, _DIMS)
    if problem is None and x.heads > _GROUP * x.kv_heads:
        return f"{x.heads} heads on {x.kv_heads} KV heads: expected at most {_GROUP} for each"
    return problem


def constants(x: Inputs, has_lse: bool, num_sms: int, min_queries: int) -> dict[str, Any]:
    """The kernel's constexpr arguments, for sequences of min_queries to 8 tokens."""
    dim = next_power_of_2(x.dim)
    group_rows = next_power_of_2(x.heads // x.kv_heads)
    programs = max(1, num_sms // x.kv_heads)
    return dict(
        DTYPE=_sm90.element(x.q.dtype), KV_HEADS=x.kv_heads, GROUP=x.heads // x.kv_heads, GROUP_ROWS=group_rows,
        SLOT_ROWS=QUERY_LEN * group_rows, HEAD_DIM=x.dim, DIM=dim, PAGE=x.page_size, BLOCK_N=_BLOCK_N,
        K_STAGES=_STAGES[dim], V_STAGES=_STAGES[dim], PROGRAMS=programs,
        LEAVES=min(_LEAVES, max(16, next_power_of_2(programs))), BY_RANGE=x.num_seqs > programs, MIN_QUERIES=min_queries,
        CAUSAL=x.causal, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=has_lse,
    )  # fmt: skip


def boxes(dtype: torch.dtype, dim: int, page_size: int, group_rows: int) -> dict[str, tuple[list[int], Any]]:
    """Descriptor → (shape of what one TMA copies, its layout in shared memory)."""
    keys = _sm90.box(dtype, (1, min(page_size, _BLOCK_N), 1, dim))
    return {"q_desc": _sm90.box(dtype, (QUERY_LEN, group_rows, dim)), "k_desc": keys, "v_desc": keys}


def decode_sm90(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, min_queries: int, place: int = _dependent.ALONE
) -> list[torch.Tensor]:
    """Write the rows of every sequence with min_queries to 8 query tokens.

    For calls of at least one sequence that ``refusal`` does not refuse. place: among the launches of a set, as in _dependent.py. Returns
    the temporaries.
    """
    from tkernels.attention._decode_sm90.kernel import decode_sm90_kernel

    x = inputs
    target = target_of(out.device)
    constant = constants(x, lse is not None, target.num_sms, min_queries)
    programs = constant["PROGRAMS"]
    owners = min(x.num_seqs, programs)
    grid = min(target.num_sms, programs * x.kv_heads)
    rows = owners * x.kv_heads * constant["LEAVES"] * constant["SLOT_ROWS"]
    parts = torch.empty((rows, constant["DIM"]), dtype=torch.float32, device=out.device)
    states = torch.empty((rows, 2), dtype=torch.float32, device=out.device)
    arrivals = counters(owners * x.kv_heads, out.device)
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    box = boxes(x.q.dtype, x.dim, x.page_size, constant["GROUP_ROWS"])
    _dependent.launch(
        decode_sm90_kernel, (grid,), out.device,
        _sm90.descriptor(x.q, *box["q_desc"]), _sm90.descriptor(x.k_cache, *box["k_desc"]), _sm90.descriptor(x.v_cache, *box["v_desc"]),
        out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale, parts, states,
        arrivals,
        x.num_seqs, x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.k_scale_stride, x.v_scale_stride, x.stride_table, out.stride(0), out.stride(1), stride_lt, stride_lh,
        **constant, num_warps=4, place=place if stood(arrivals) else _dependent.ALONE,
    )  # fmt: skip
    return [parts, states]
