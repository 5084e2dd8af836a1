"""The Gluon kernel of a "tma" tile of one slice (``_linear_kernels``): many rows of x, products by wgmma. Hopper only.
``_qkv_rows_sm90`` has that of a projection with a rotation, on the same sums.

With many rows x is as large as a program's part of the weights, and every program reads it. So x comes by TMA too, through a ring of its
own, as soon as ``wait`` has returned; the weights' ring is full by then, as in ``_linear_sm90``. No thread touches either: a norm, which
would have each stage of x read and written between two products, is a kernel of its own before this one.

SPLITS programs share the inputs of BLOCK_N outputs, so each reads a part of x only; ``_linear_parts_sm90`` adds their sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tkernels._gluon import barrier, enter
from tkernels._linear_parts_sm90 import add_parts, leave, meet, reset, share_shape
from tkernels._linear_sm90 import CHUNK, outputs_layout, rounded


@gluon.constexpr_function
def _sums_layout(block_n, block_m, warps):
    """Of the sums [block_n, block_m]: more warps than have 16 outputs each share the rows."""
    along = min(warps, block_n // 16)
    return gl.NVMMADistributedLayout([3, 0], [along, warps // along], [16, block_m * along // warps, 16])


@gluon.jit
def _fill(
    w_desc, ring, up_ring, full, slot, first, n, chunk, STAGE_CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Ask for the weights of a stage, from ``chunk`` on, as ``_fill`` of _linear_sm90.py does."""
    bar = full.index(slot)
    mbarrier.expect(bar, STAGE_CHUNKS * BLOCK_N * CHUNK * (4 if GATED else 2))
    lines = ring.index(slot * STAGE_CHUNKS)._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
    if len(w_desc.block_shape) == 4:
        tma.async_copy_global_to_shared(w_desc, [chunk, first, n, 0], bar, lines)
    else:
        tma.async_copy_global_to_shared(w_desc, [chunk, first, 0], bar, lines)
    if GATED:
        lines = up_ring.index(slot * STAGE_CHUNKS)._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [chunk, n + first, 0], bar, lines)


@gluon.jit
def _fill_x(x_desc, x_ring, x_full, slot, chunk, STAGE_CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Ask for a stage of x, from ``chunk`` on."""
    bar = x_full.index(slot)
    mbarrier.expect(bar, STAGE_CHUNKS * BLOCK_M * CHUNK * 2)
    lines = x_ring.index(slot * STAGE_CHUNKS)._reinterpret(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    tma.async_copy_global_to_shared(x_desc, [chunk, 0, 0], bar, lines)


@gluon.jit
def start(
    w_desc, first, n, begin, dtype: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """Memory for weights and x; as much of the weights as it holds, from chunk ``begin`` on, is asked for."""
    line: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = gl.allocate_shared_memory(dtype, [STAGES * STAGE_CHUNKS, BLOCK_N, CHUNK], line)
    up_ring = ring
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES * STAGE_CHUNKS, BLOCK_N, CHUNK], line)
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES * STAGE_CHUNKS, BLOCK_M, CHUNK], line)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        _fill(w_desc, ring, up_ring, full, stage, first, n, begin + stage * STAGE_CHUNKS, STAGE_CHUNKS, BLOCK_N, GATED)
    return ring, up_ring, x_ring, full, x_full


@gluon.jit
def start_x(x_desc, memory, begin, BLOCK_M: gl.constexpr, STAGE_CHUNKS: gl.constexpr, X_STAGES: gl.constexpr):
    """After ``wait``: as much of x as its ring holds is asked for."""
    for stage in gl.static_range(X_STAGES):
        _fill_x(x_desc, memory[2], memory[4], stage, begin + stage * STAGE_CHUNKS, STAGE_CHUNKS, BLOCK_M)


@gluon.jit
def products(
    w_desc, x_desc, memory, first, n, begin, STEPS: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of all products of STEPS stages, and those of the up rows.

    The products of a stage run while those of the next are asked for; what comes next into a stage is asked for a step later, when all
    warps have read it.
    """
    ring, up_ring, x_ring, full, x_full = memory
    ASKED: gl.constexpr = STAGE_CHUNKS * (2 if GATED else 1)  # products of a step
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, _sums_layout(BLOCK_N, BLOCK_M, gl.num_warps()))
    up = acc
    for step in range(STEPS):
        slot = step % STAGES
        x_slot = step % X_STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        mbarrier.wait(x_full.index(x_slot), (step // X_STAGES) & 1)
        for c in gl.static_range(STAGE_CHUNKS):
            b = x_ring.index(x_slot * STAGE_CHUNKS + c).permute((1, 0))
            acc = warpgroup_mma(ring.index(slot * STAGE_CHUNKS + c), b, acc, is_async=True)
            if GATED:
                up = warpgroup_mma(up_ring.index(slot * STAGE_CHUNKS + c), b, up, is_async=True)
        if GATED:
            acc, up = warpgroup_mma_wait(ASKED, [acc, up])
        else:
            acc = warpgroup_mma_wait(ASKED, [acc])
        if X_STAGES < STEPS or STAGES < STEPS:
            if (step > 0) & (step - 1 + min(STAGES, X_STAGES) < STEPS):
                barrier()
                before = begin + (step - 1) * STAGE_CHUNKS
                if step - 1 + X_STAGES < STEPS:
                    _fill_x(x_desc, x_ring, x_full, (step - 1) % X_STAGES, before + X_STAGES * STAGE_CHUNKS, STAGE_CHUNKS, BLOCK_M)
                if step - 1 + STAGES < STEPS:
                    _fill(
                        w_desc, ring, up_ring, full, (step - 1) % STAGES, first, n, before + STAGES * STAGE_CHUNKS,
                        STAGE_CHUNKS, BLOCK_N, GATED,
                    )  # fmt: skip
    if GATED:
        acc, up = warpgroup_mma_wait(0, [acc, up])
    else:
        acc = warpgroup_mma_wait(0, [acc])
        up = acc
    return acc, up


@gluon.jit
def _places(first, share, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr, end: gl.constexpr):
    """Outputs and rows of a share of the tile of outputs from ``first`` on."""
    SHAPE: gl.constexpr = share_shape(BLOCK_N, BLOCK_M, SPLITS)
    HALF: gl.constexpr = SHAPE[0] // 2
    ALONG: gl.constexpr = BLOCK_N // SHAPE[0]  # shares of the same rows
    offs_n = first + gl.arange(0, SHAPE[0], gl.SliceLayout(1, end))
    if ALONG > 1:
        offs_n += (offs_n - first) // HALF * (BLOCK_N // 2 - HALF) + share % ALONG * HALF
    return offs_n, (share // ALONG) * SHAPE[1] + gl.arange(0, SHAPE[1], gl.SliceLayout(0, end))


@gluon.jit
def _residual(residual_ptr, offs_n, offs_m, rows, n, stride_rm, HAS_RESIDUAL: gl.constexpr):
    """What is added to the outputs at the end."""
    mask = (offs_n < n)[:, None] & (offs_m < rows)[None, :]
    residual = mask
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + (offs_m.to(gl.int64) * stride_rm)[None, :] + offs_n[:, None], mask=mask, other=0.0)
    return residual


@gluon.jit
def _finish(
    y, y_up, bias_ptr, residual, y_ptr, offs_n, offs_m, rows, n, dtype: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Bias, activation, residual and the store of outputs."""
    mask = (offs_n < n)[:, None] & (offs_m < rows)[None, :]
    y = rounded(y, 1.0, bias_ptr, offs_n, offs_n < n, dtype, False, HAS_BIAS)
    if GATED:
        y_up = rounded(y_up, 1.0, bias_ptr, n + offs_n, offs_n < n, dtype, False, HAS_BIAS)
        gate = y.to(gl.float32)
        y = (gate / (1.0 + gl.exp(-gate)) * y_up.to(gl.float32)).to(dtype)
    if HAS_RESIDUAL:
        y = (residual.to(gl.float32) + y.to(gl.float32)).to(dtype)
    gl.store(y_ptr + (offs_m.to(gl.int64) * n)[None, :] + offs_n[:, None], y, mask=mask)


@gluon.jit(do_not_specialize=["rows"])
def linear_rows_sm90_kernel(
    w_desc, x_desc, bias_ptr, residual_ptr, y_ptr, part_ptr, arrivals_ptr, rows, n, stride_rm,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    STEPS: gl.constexpr, SPLITS: gl.constexpr, PATIENCE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """w_desc, n: as in ``linear_sm90_kernel``; x_desc: x as [K / 64, rows, 64] in boxes of [STAGE_CHUNKS, BLOCK_M, 64]. STEPS: stages of a
    part of the inputs, no fewer than STAGES and X_STAGES, which are at least 2 where there is another step. SPLITS: a power of two. The
    programs of a tile are neighbours in the grid, so that they run at about the same time. PATIENCE: as in ``meet``."""
    dtype: gl.constexpr = w_desc.dtype
    split = gl.program_id(0)
    first = gl.program_id(1) * BLOCK_N
    begin = split * (STEPS * STAGE_CHUNKS)
    memory = start(w_desc, first, n, begin, dtype, GATED, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES)
    enter(PDL)
    start_x(x_desc, memory, begin, BLOCK_M, STAGE_CHUNKS, X_STAGES)
    end: gl.constexpr = outputs_layout(share_shape(BLOCK_N, BLOCK_M, SPLITS)[0], gl.num_warps(), 0)
    offs_n, offs_m = _places(first, split, BLOCK_N, BLOCK_M, SPLITS, end)
    residual = _residual(residual_ptr, offs_n, offs_m, rows, n, stride_rm, HAS_RESIDUAL)
    acc, up = products(w_desc, x_desc, memory, first, n, begin, STEPS, GATED, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES)
    if SPLITS > 1:
        parts = leave(acc, part_ptr, SPLITS)
        shares, departed = meet(arrivals_ptr, SPLITS, PATIENCE)
        for turn in range(SPLITS):
            share = (split + turn) % SPLITS
            if (shares >> share) & 1:
                if turn > 0:  # of one that did not wait
                    offs_n, offs_m = _places(first, share, BLOCK_N, BLOCK_M, SPLITS, end)
                    residual = _residual(residual_ptr, offs_n, offs_m, rows, n, stride_rm, HAS_RESIDUAL)
                y = gl.convert_layout(add_parts(parts, share, BLOCK_N, BLOCK_M, SPLITS), end)
                _finish(y, y, bias_ptr, residual, y_ptr, offs_n, offs_m, rows, n, dtype, HAS_BIAS, GATED, HAS_RESIDUAL)
        reset(departed, arrivals_ptr, SPLITS)
    else:
        y, y_up = gl.convert_layout(acc, end), gl.convert_layout(up, end)
        _finish(y, y_up, bias_ptr, residual, y_ptr, offs_n, offs_m, rows, n, dtype, HAS_BIAS, GATED, HAS_RESIDUAL)
