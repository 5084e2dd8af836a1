"""Decode of one query token and of a few on Hopper, over a cache of 16 bits or of e4m3, by the Gluon kernel of _decode_sm90/one_kernel.py.

A sequence's query tokens times the heads of a group are columns of both products, of which there may be 32 (8 of more than 128 dimensions):
8 tokens for groups of up to 4 heads, 4 for up to 8. Columns do not mix, so a launch for several tokens has the bits of one for one token.

Operands go from the stages that TMA fills straight into the registers where the products want them: those of 16 bits by ``ldmatrix``, and
bytes of e4m3 without the second pass through shared memory by which plain Triton loses what such a cache gains. Each warp has its own keys
of a block, so that softmax and the second product wait for no other warp.

The tree of a sequence is that of decode_sm90.py, with a level below: each warp of a program folds its own keys of the blocks of a leaf, and
the warps are summed where the leaf ends. It depends on the sequence's lengths (and window) alone. Rows of no sequence are zeroed here.

Workspace: as in decode_sm90.py. With heads of 128 and 132 multiprocessors, for one token 8 MiB for 64 heads on 8 KV heads (twice that for
many sequences over e4m3), and at most 66, for one KV head. For several tokens 32 MiB with 8 KV heads, and at most 132, with one. A call for
2 to 8 tokens takes one launch, and one of decode_sm90.py with its workspace where it asks for more tokens than this kernel takes; beside
prompts also one for one token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tkernels import _dependent
from tkernels._counters import counters, stood
from tkernels._target import target_of
from tkernels._triton import next_power_of_2
from tkernels.attention import _sm90
from tkernels.attention._common import FP8, LOG2_E
from tkernels.attention._inputs import Inputs
from tkernels.attention.decode import QUERY_LEN

_GROUP = 16  # heads of a group at most; half as many of more than 128 dimensions, or their columns do not fit
_COLUMNS = 32  # of both products at most, tokens times heads of a group; of more than 128 dimensions as many as of a group
_DIMS = (33, 256)
_DIMS_FP8 = (33, 128)
_LEAVES = 64  # of a sequence at most


class Layout(NamedTuple):
    """How a multiprocessor is shared out."""

    block_n: int  # keys of a block
    warps: int  # with keys of their own, of a block
    k_stages: int  # resident blocks
    v_stages: int
    programs_per_sm: int
    leaves: int = 1  # of one sequence, for each multiprocessor that a KV head has
    uncut: int = 1  # blocks of a sequence that is too short to be shared by programs
    least: int = 1  # blocks of a leaf of a longer one, at least: what ends a leaf costs as much as half a block
    split: int = 1  # warps that share the columns of the same keys

    @property
    def num_warps(self) -> int:
        """Of a consumer."""
        return self.warps * self.split

    @property
    def maxnreg(self) -> int | None:
        """Registers a thread, so that the programs fit: of the consumer and of four warps for the loaders and the scheduler."""
        return 65536 // (32 * (self.num_warps + 4) * self.programs_per_sm) // 8 * 8 if self.programs_per_sm > 1 else None


_LAYOUTS = {  # by bytes of an element and head dimension
    (1, 64): Layout(128, 4, 4, 4, 2, leaves=2),
    (1, 128): Layout(128, 4, 4, 4, 1, uncut=4, least=2),
    (2, 64): Layout(128, 4, 5, 5, 1, uncut=4, least=2),
    (2, 128): Layout(128, 4, 3, 3, 1, uncut=4, least=2),
    (2, 256): Layout(64, 4, 3, 3, 1, uncut=4),
}
_MANY = 32  # sequences, padding included, from which on _LAYOUTS_OF_MANY hold: they end in more places, and two programs hide that
_LAYOUTS_OF_MANY = {
    (1, 128): Layout(128, 4, 3, 3, 2, uncut=4, least=2),
    (2, 64): Layout(128, 4, 3, 3, 2, uncut=4, least=2),
}


def layout_of(dim: int, itemsize: int, num_seqs: int = 1, columns: int = 8, queries: int = 1) -> Layout:
    """dim: 64, 128, or 256 of a cache of 16 bits. itemsize: of the cache. All but stages, programs and split is part of the arithmetic, and
    the same for all numbers of sequences and of columns. Measured on an H200."""
    layout = _LAYOUTS[itemsize, dim]
    if columns > 8 and queries > 1:  # with all columns of its keys and a mask for each, a thread spills
        return layout._replace(split=2, programs_per_sm=1)
    few = num_seqs < _MANY or columns > 8  # of more columns two programs do not fit
    return layout if few else _LAYOUTS_OF_MANY.get((itemsize, dim), layout)


def refusal(x: Inputs, arch: str) -> str | None:
    """Why decode.py computes the sequences of 1 to ``most_queries`` tokens of this call, or None where the Gluon kernel does.

    Depends on the device, the model's shape, strides, alignment and features alone, never on lengths, the bucket of query lengths or the
    batch, so that a sequence gets the same bits in every batch. arch: as in tkernels._target.
    """
    fp8 = x.k_cache.dtype == FP8
    problem = _sm90.refusal("decode", x, arch, _DIMS_FP8 if fp8 else _DIMS, cache=FP8 if fp8 else None)
    most = _GROUP if x.dim <= 128 else _GROUP // 2
    if problem is None and x.heads > most * x.kv_heads:
        return f"{x.heads} heads on {x.kv_heads} KV heads: expected at most {most} for each"
    return problem


def most_queries(x: Inputs) -> int:
    """Query tokens, at most, of the sequences that the kernel takes of a call that it does not refuse: by the model's shape alone."""
    columns = _COLUMNS if x.dim <= 128 else _GROUP // 2
    return min(QUERY_LEN, columns // next_power_of_2(x.heads // x.kv_heads))


def constants(
    x: Inputs, has_lse: bool, num_sms: int, queries: int = 1, min_queries: int = 1, layout: Layout | None = None
) -> dict[str, Any]:
    """The kernel's constexpr arguments, for sequences of min_queries to ``queries`` tokens."""
    dim = next_power_of_2(x.dim)
    group = x.heads // x.kv_heads
    rows = queries * next_power_of_2(group)
    columns = max(8, rows)
    layout = layout or layout_of(dim, x.k_cache.element_size(), x.num_seqs, columns, queries)
    programs = max(1, num_sms * layout.programs_per_sm // x.kv_heads)
    return dict(
        DTYPE=_sm90.element(x.q.dtype), CACHE_DTYPE=_sm90.element(x.k_cache.dtype), KV_HEADS=x.kv_heads, GROUP=group, COLUMNS=columns,
        SLOT_ROWS=rows if queries == 1 else columns, HEAD_DIM=x.dim, DIM=dim, PAGE=x.page_size,
        BLOCK_N=layout.block_n, K_STAGES=layout.k_stages, V_STAGES=layout.v_stages,
        PROGRAMS=programs, LEAVES=min(_LEAVES, max(16, layout.leaves * num_sms // x.kv_heads)), UNCUT=layout.uncut, LEAST=layout.least,
        # a quarter of the sequences are searched in a quarter of the instructions
        BY_RANGE=x.num_seqs > programs, SEQS=32 if x.num_seqs <= min(32, programs) else 128,
        MIN_QUERIES=min_queries, QUERIES=queries, SPLIT=layout.split,
        CAUSAL=x.causal or queries == 1, HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=has_lse,
    )  # fmt: skip


def boxes(x: Inputs, constant: dict[str, Any]) -> dict[str, tuple[list[int], Any]]:
    """Descriptor → (shape of what one TMA copies, its layout in shared memory)."""
    dim, queries = constant["DIM"], constant["QUERIES"]
    keys = _sm90.box(x.k_cache.dtype, (1, min(constant["PAGE"], constant["BLOCK_N"]), 1, dim))
    return {"q_desc": _sm90.box(x.q.dtype, (queries, constant["COLUMNS"] // queries, dim)), "k_desc": keys, "v_desc": keys}


def decode_one_sm90(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, queries: int = 1, min_queries: int = 1, place: int = _dependent.ALONE
) -> list[torch.Tensor]:
    """Write the rows of every sequence with ``min_queries`` to ``queries`` query tokens; with min_queries 1 also zeros into the rows of
    no sequence.

    For calls of at least one sequence that ``refusal`` does not refuse. queries: at most ``most_queries``. place: among the launches of a
    set, as in _dependent.py. Returns the temporaries.
    """
    from tkernels.attention._decode_sm90.one_kernel import decode_one_sm90_kernel

    x = inputs
    target = target_of(out.device)
    constant = constants(x, lse is not None, target.num_sms, queries, min_queries)
    layout = layout_of(constant["DIM"], x.k_cache.element_size(), x.num_seqs, constant["COLUMNS"], queries)
    programs = constant["PROGRAMS"]
    owners = min(x.num_seqs, programs)
    grid = min(target.num_sms * layout.programs_per_sm, programs * x.kv_heads)
    rows = owners * x.kv_heads * constant["LEAVES"] * constant["SLOT_ROWS"]
    parts = torch.empty((rows, constant["DIM"]), dtype=torch.float32, device=out.device)
    states = torch.empty((rows, 2), dtype=torch.float32, device=out.device)
    arrivals = counters(owners * x.kv_heads, out.device)
    stride_lt, stride_lh = (lse.stride(0), lse.stride(1)) if lse is not None else (0, 0)
    box = boxes(x, constant)
    _dependent.launch(
        decode_one_sm90_kernel, (grid,), out.device,
        _sm90.descriptor(x.q, *box["q_desc"]), _sm90.descriptor(x.k_cache, *box["k_desc"]), _sm90.descriptor(x.v_cache, *box["v_desc"]),
        out, lse, x.table, x.seq_lens, x.cu_seqlens_q, x.sinks, x.k_scale, x.v_scale, parts, states,
        arrivals,
        x.num_seqs, x.q.shape[0], x.capacity, x.window, x.scale * LOG2_E, x.softcap * LOG2_E, x.v_factor,
        x.k_scale_stride, x.v_scale_stride, x.stride_table, out.stride(0), out.stride(1), stride_lt, stride_lh,
        **constant, num_warps=layout.num_warps, maxnreg=layout.maxnreg, place=place if stood(arrivals) else _dependent.ALONE,
    )  # fmt: skip
    return [parts, states]
