"""Decode of one query token on Hopper, over a cache of 16 bits or of e4m3, by the Gluon kernel of _decode_sm90/one_kernel.py.

Operands go from the stages that TMA fills straight into the registers where the products want them: those of 16 bits by ``ldmatrix``, and
bytes of e4m3 without the second pass through shared memory by which plain Triton loses what such a cache gains. Each warp has its own keys
of a block, so that softmax and the second product wait for no other warp.

The tree of a sequence is that of decode_sm90.py, with a level below: each warp of a program folds its own keys of the blocks of a leaf, and
the warps are summed where the leaf ends. It depends on the sequence's length (and window) alone. Rows of no sequence are zeroed here.

Workspace: as in decode_sm90.py. With heads of 128 and 132 multiprocessors 8 MiB for 64 heads on 8 KV heads, and at most 66, for 16 on one.
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

_GROUP = 16  # heads of a group at most: columns of two products; half as many of more than 128 dimensions, or they do not fit
_DIMS = (33, 256)
_DIMS_FP8 = (33, 128)
_LEAVES = 64  # of a sequence at most


class Layout(NamedTuple):
    """How a multiprocessor is shared out."""

    block_n: int  # keys of a block
    warps: int  # of a consumer, which share a block's keys
    k_stages: int  # resident blocks
    v_stages: int
    programs_per_sm: int
    leaves: int = 1  # of one sequence, for each multiprocessor that a KV head has
    uncut: int = 1  # blocks of a sequence that is too short to be shared by programs
    least: int = 1  # blocks of a leaf of a longer one, at least

    @property
    def maxnreg(self) -> int | None:
        """Registers a thread, so that the programs fit: of the consumer and of four warps for the loaders and the scheduler."""
        return 65536 // (32 * (self.warps + 4) * self.programs_per_sm) // 8 * 8 if self.programs_per_sm > 1 else None


_LAYOUTS = {  # by bytes of an element and head dimension
    (1, 64): Layout(128, 4, 4, 4, 2, leaves=2),
    (1, 128): Layout(128, 4, 4, 4, 1),
    (2, 64): Layout(128, 4, 5, 5, 1, uncut=4),
    (2, 128): Layout(128, 4, 3, 3, 1, uncut=4),
    (2, 256): Layout(64, 4, 3, 3, 1, uncut=4),
}
_MANY = 32  # sequences, padding included, from which on _LAYOUTS_OF_MANY hold: they end in more places, and two programs hide that
_LAYOUTS_OF_MANY = {(2, 64): Layout(128, 4, 3, 3, 2, uncut=4)}


def layout_of(dim: int, itemsize: int, num_seqs: int = 1) -> Layout:
    """dim: 64, 128, or 256 of a cache of 16 bits. itemsize: of the cache. All but stages and programs is part of the arithmetic, and the
    same for all numbers of sequences. Measured on an H200."""
    layout = _LAYOUTS[itemsize, dim]
    return layout if num_seqs < _MANY else _LAYOUTS_OF_MANY.get((itemsize, dim), layout)


def refusal(x: Inputs, arch: str) -> str | None:
    """Why decode.py computes the sequences of one token of this call, or None where the Gluon kernel does.

    Depends on the device, the model's shape, strides, alignment and features alone, never on lengths, the bucket of query lengths or the
    batch, so that a sequence gets the same bits in every batch. arch: as in tkernels._target.
    """
    fp8 = x.k_cache.dtype == FP8
    problem = _sm90.refusal("decode", x, arch, _DIMS_FP8 if fp8 else _DIMS, cache=FP8 if fp8 else None)
    most = _GROUP if x.dim <= 128 else _GROUP // 2
    if problem is None and x.heads > most * x.kv_heads:
        return f"{x.heads} heads on {x.kv_heads} KV heads: expected at most {most} for each"
    return problem


def constants(x: Inputs, has_lse: bool, num_sms: int, layout: Layout | None = None) -> dict[str, Any]:
    """The kernel's constexpr arguments."""
    dim = next_power_of_2(x.dim)
    group = x.heads // x.kv_heads
    columns = max(8, next_power_of_2(group))
    layout = layout or layout_of(dim, x.k_cache.element_size(), x.num_seqs)
    programs = max(1, num_sms * layout.programs_per_sm // x.kv_heads)
    return dict(
        DTYPE=_sm90.element(x.q.dtype), CACHE_DTYPE=_sm90.element(x.k_cache.dtype), KV_HEADS=x.kv_heads, GROUP=group, COLUMNS=columns,
        SLOT_ROWS=next_power_of_2(group), HEAD_DIM=x.dim, DIM=dim, PAGE=x.page_size,
        BLOCK_N=layout.block_n, K_STAGES=layout.k_stages, V_STAGES=layout.v_stages,
        PROGRAMS=programs, LEAVES=min(_LEAVES, max(16, layout.leaves * num_sms // x.kv_heads)), UNCUT=layout.uncut, LEAST=layout.least,
        BY_RANGE=x.num_seqs > programs,
        HAS_WINDOW=x.window > 0, HAS_SOFTCAP=x.softcap > 0, HAS_SINKS=x.sinks is not None,
        HAS_K_SCALE=x.k_scale is not None, HAS_V_SCALE=x.v_scale is not None, HAS_LSE=has_lse,
    )  # fmt: skip


def boxes(x: Inputs, constant: dict[str, Any]) -> dict[str, tuple[list[int], Any]]:
    """Descriptor → (shape of what one TMA copies, its layout in shared memory)."""
    keys = _sm90.box(x.k_cache.dtype, (1, min(constant["PAGE"], constant["BLOCK_N"]), 1, constant["DIM"]))
    return {"q_desc": _sm90.box(x.q.dtype, (1, constant["COLUMNS"], constant["DIM"])), "k_desc": keys, "v_desc": keys}


def decode_one_sm90(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, place: int = _dependent.ALONE) -> list[torch.Tensor]:
    """Write the rows of every sequence with one query token, and zeros into the rows of no sequence.

    For calls of at least one sequence that ``refusal`` does not refuse. place: among the launches of a set, as in _dependent.py.
    Returns the temporaries.
    """
    from tkernels.attention._decode_sm90.one_kernel import decode_one_sm90_kernel

    x = inputs
    target = target_of(out.device)
    constant = constants(x, lse is not None, target.num_sms)
    layout = layout_of(constant["DIM"], x.k_cache.element_size(), x.num_seqs)
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
        **constant, num_warps=layout.warps, maxnreg=layout.maxnreg, place=place if stood(arrivals) else _dependent.ALONE,
    )  # fmt: skip
    return [parts, states]
