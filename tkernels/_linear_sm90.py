"""The Gluon kernel of a "tma" tile of several slices (``_linear_kernels``): weights stream by TMA through a ring in shared memory, and a
few rows of x lie beside it. Hopper only. ``_qkv_sm90`` has that of a projection with a rotation, on the same sums; for tiles of one slice
there is ``_linear_rows_sm90``.

Before ``wait`` a program has asked for as much of its weights as the ring holds, so where launches are dependent they come while the
kernel before still runs, whatever that one does. x comes after ``wait`` by plain loads, in pieces of at most 32 KiB, is multiplied by
the norm's weight on its way to shared memory, and the next piece is on its way in registers while one is used.

The weights are the left operand. The chunks of 64 inputs are dealt out to SLICES sums, each in one warp (mma.sync), which are added once
at the end, in order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tkernels._gluon import barrier, barrier_behind, enter, one_of_each

CHUNK = gl.constexpr(64)  # inputs of a line of 128 bytes, what TMA swizzles


@gluon.constexpr_function
def _sums_layout(warps, slices):
    """Of the sums [slices, block_n, block_m]."""
    along = min(slices, warps)
    return gl.NVMMADistributedLayout([2, 0], [along, warps // along, 1], [1, 16, 8])


@gluon.constexpr_function
def _x_layout(chunks, warps):
    """Of a piece [chunks, any rows, 64]: 8 lanes load a line of 128 bytes, a warp up to 512 bytes of a row."""
    lanes = min(4, chunks)
    along = max(1, min(warps, chunks // lanes))
    return gl.BlockedLayout([1, 1, 8], [lanes, 4 // lanes, 8], [along, warps // along, 1], [2, 1, 0])


@gluon.constexpr_function
def outputs_layout(block_n, warps, slices):
    """Of the outputs [block_n, block_m]: neighbours along the lanes, two of 64 in a thread, which has all slices of them."""
    lanes, each = min(32, block_n), max(1, min(2, block_n // 32))
    if slices:
        return gl.SliceLayout(0, gl.BlockedLayout([slices, each, 1], [1, lanes, 32 // lanes], [1, 1, warps], [1, 2, 0]))
    return gl.BlockedLayout([each, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _fill(
    w_desc, ring, up_ring, full, step, first, n,
    STAGES: gl.constexpr, STAGE_CHUNKS: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Ask for the weights of a step: rows from ``first`` on, with GATED also from n + ``first`` on. A descriptor of halves of heads
    [.., halves, rows, ..] gives row n and those after it of the half ``first`` and then of the next one."""
    slot = step % STAGES
    bar = full.index(slot)
    mbarrier.expect(bar, STAGE_CHUNKS * BLOCK_N * CHUNK * (4 if GATED else 2))
    if len(w_desc.block_shape) == 4:
        halves = ring.index(slot)._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [step * STAGE_CHUNKS, first, n, 0], bar, halves)
    else:
        tma.async_copy_global_to_shared(w_desc, [step * STAGE_CHUNKS, first, 0], bar, ring.index(slot))
    if GATED:
        tma.async_copy_global_to_shared(w_desc, [step * STAGE_CHUNKS, n + first, 0], bar, up_ring.index(slot))


@gluon.jit
def _step(
    w_desc, ring, up_ring, full, x_piece, acc, up, step, s, first, n,
    STEPS: gl.constexpr, STAGES: gl.constexpr, STAGE_CHUNKS: gl.constexpr, PIECE: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, GATED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The products of step ``step``, the s-th of its piece of x. New weights come into its stage once all warps have it in registers."""
    dtype: gl.constexpr = x_piece.dtype
    slot = step % STAGES
    line: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    ROUNDS: gl.constexpr = STAGE_CHUNKS // SLICES
    parts = ring.index(slot)._reinterpret(dtype, [ROUNDS, SLICES, BLOCK_N, CHUNK], line)
    up_parts = up_ring.index(slot)._reinterpret(dtype, [ROUNDS, SLICES, BLOCK_N, CHUNK], line)
    read = step  # nothing; then what the rounds have read
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    for c in gl.static_range(ROUNDS):
        if x_piece.shape[0] == PIECE:  # one row
            x_part = x_piece._reinterpret(dtype, [PIECE // SLICES, SLICES, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            b = x_part.index(s * ROUNDS + c).load(gl.SliceLayout(2, right))
            b = gl.broadcast(b[:, :, None], gl.zeros([SLICES, CHUNK, BLOCK_M], dtype, right))[0]
        else:
            x_part = x_piece._reinterpret(dtype, [PIECE // SLICES, SLICES, BLOCK_M, CHUNK], line)
            b = x_part.index(s * ROUNDS + c).permute((0, 2, 1)).load(right)
        a = parts.index(c).load(left)
        a_up = a
        if GATED:
            a_up = up_parts.index(c).load(left)
        # all loads of a round are on their way before its first product: the assembler, to save registers, would have them wait in turn
        barrier()
        if STAGES < STEPS:
            read = one_of_each(a) if c == 0 else gl.maximum(read, one_of_each(a))
            if GATED:
                read = gl.maximum(read, one_of_each(a_up))
            if c == ROUNDS - 1 and step + STAGES < STEPS:
                barrier_behind(read)
                _fill(w_desc, ring, up_ring, full, step + STAGES, first, n, STAGES, STAGE_CHUNKS, BLOCK_N, GATED)
        acc = mma_v2(a, b, acc)
        if GATED:
            up = mma_v2(a_up, b, up)
    return acc, up


@gluon.jit
def _piece(
    w_desc, ring, up_ring, full, x_piece, acc, up, piece, first, n,
    STEPS: gl.constexpr, PIECE_STEPS: gl.constexpr, STAGES: gl.constexpr, STAGE_CHUNKS: gl.constexpr, PIECE: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, GATED: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The products of a piece of x."""
    if STEPS <= STAGES and STEPS <= PIECE_STEPS:
        for s in gl.static_range(STEPS):
            acc, up = _step(
                w_desc, ring, up_ring, full, x_piece, acc, up, s, s, first, n,
                STEPS, STAGES, STAGE_CHUNKS, PIECE, BLOCK_N, BLOCK_M, GATED, SLICES,
            )  # fmt: skip
    else:
        for s in range(gl.minimum(PIECE_STEPS, STEPS - piece * PIECE_STEPS)):
            acc, up = _step(
                w_desc, ring, up_ring, full, x_piece, acc, up, piece * PIECE_STEPS + s, s, first, n,
                STEPS, STAGES, STAGE_CHUNKS, PIECE, BLOCK_N, BLOCK_M, GATED, SLICES,
            )  # fmt: skip
    return acc, up


@gluon.jit
def _put_x(x, norm, buffer, BLOCK_M: gl.constexpr, HAS_NORM: gl.constexpr):
    """A piece [chunks, rows, 64], times the norm's weight, to shared memory; returns sums of the squares that a thread has
    [chunks, rows, 8]."""
    PIECE: gl.constexpr = x.shape[0]
    X_ROWS: gl.constexpr = x.shape[1]
    dtype: gl.constexpr = x.dtype
    squares = 0.0
    if HAS_NORM:
        wide = x.to(gl.float32)
        squares = gl.sum(gl.reshape(wide * wide, [PIECE, X_ROWS, CHUNK // 8, 8]), 3)
        x = (wide * norm.to(gl.float32)).to(dtype)
    if X_ROWS < BLOCK_M:
        buffer._reinterpret(dtype, [PIECE, 1, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).store(x)
    else:
        buffer._reinterpret(dtype, [PIECE, BLOCK_M, CHUNK], gl.NVMMASharedLayout(128, 16, 3)).store(x)
    return squares


@gluon.jit
def _scale(squares, eps, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """By what the norm scales the outputs."""
    scale = gl.rsqrt(gl.sum(gl.sum(squares, 2), 0) / K + eps)
    if scale.shape[0] < BLOCK_M:
        return gl.sum(scale, 0) + gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)
    else:
        return gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT)


@gluon.jit
def rounded(y, scale, bias_ptr, offs_n, mask_n, dtype: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr):
    """y · scale + bias in ``dtype``, as in _linear_sums.py."""
    if HAS_BIAS:
        bias = gl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(gl.float32)[:, None] + gl.zeros_like(y)
        if HAS_NORM:
            y = gl.fma(y, scale, bias)
        else:
            y += bias
    elif HAS_NORM:
        y *= scale
    return y.to(dtype)


@gluon.jit
def start(
    w_desc, first, n, dtype: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, X_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Memory for weights and x; as much of the weights as it holds is asked for."""
    STEPS: gl.constexpr = (K + CHUNK * STAGE_CHUNKS - 1) // (CHUNK * STAGE_CHUNKS)
    line: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    ring = gl.allocate_shared_memory(dtype, [STAGES, STAGE_CHUNKS, BLOCK_N, CHUNK], line)
    up_ring = ring
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, STAGE_CHUNKS, BLOCK_N, CHUNK], line)
    x_lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # of 128 bytes, X_ROWS for each chunk
    x_shared = gl.allocate_shared_memory(dtype, [2 if PIECE * CHUNK < K else 1, PIECE * X_ROWS, CHUNK], x_lines)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    for step in gl.static_range(STAGES if STAGES < STEPS else STEPS):
        _fill(w_desc, ring, up_ring, full, step, first, n, STAGES, STAGE_CHUNKS, BLOCK_N, GATED)
    return ring, up_ring, x_shared, full


@gluon.jit
def first_x(norm_ptr, K: gl.constexpr, HAS_NORM: gl.constexpr, X_ROWS: gl.constexpr, PIECE: gl.constexpr):
    """Row and column of each element of the first piece of x, and the norm's weight there, which may be read before ``wait``."""
    x_layout: gl.constexpr = _x_layout(PIECE, gl.num_warps())
    offs_c = gl.arange(0, PIECE, gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))[:, None, None]
    offs_m = gl.arange(0, X_ROWS, gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))[None, :, None]
    offs_i = gl.arange(0, CHUNK, gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))[None, None, :]
    offs_k = offs_c * CHUNK + offs_i
    norm = offs_k
    if HAS_NORM:
        norm = gl.load(norm_ptr + offs_k, mask=offs_k < K, other=0.0)
    return offs_m, offs_k, norm


@gluon.jit
def products(
    w_desc, memory, x, norm, x_ptrs, norm_ptr, offs_m, offs_k, rows, first, n, eps,
    K: gl.constexpr, HAS_NORM: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, PIECE: gl.constexpr, SCALED: gl.constexpr, end: gl.constexpr,
):  # fmt: skip
    """The sums of all products, those of the up rows, and the scale [SCALED, BLOCK_M] in the layout ``end``. memory: as ``start``
    returns it. x, norm: the first piece, which is there or on its way."""
    ring, up_ring, x_shared, full = memory
    STEPS: gl.constexpr = (K + CHUNK * STAGE_CHUNKS - 1) // (CHUNK * STAGE_CHUNKS)
    PIECE_STEPS: gl.constexpr = PIECE // STAGE_CHUNKS
    PIECES: gl.constexpr = (STEPS + PIECE_STEPS - 1) // PIECE_STEPS
    acc = gl.zeros([SLICES, BLOCK_N, BLOCK_M], gl.float32, _sums_layout(gl.num_warps(), SLICES))
    up = acc
    barrier()  # or the assembler, to save registers, would ask for a part of x once it has stored another
    squares = _put_x(x, norm, x_shared.index(0), BLOCK_M, HAS_NORM)
    scale = gl.full([1, 1], 1.0, gl.float32, end)
    if PIECES == 1:
        if HAS_NORM:
            scale = _scale(squares, eps, K, SCALED, BLOCK_M, end)
        barrier()
        acc, up = _piece(
            w_desc, ring, up_ring, full, x_shared.index(0), acc, up, 0, first, n,
            STEPS, PIECE_STEPS, STAGES, STAGE_CHUNKS, PIECE, BLOCK_N, BLOCK_M, GATED, SLICES,
        )  # fmt: skip
    else:
        for piece in range(PIECES):
            barrier()
            at = offs_k + (piece + 1) * (PIECE * CHUNK)
            x = gl.load(x_ptrs + (piece + 1) * (PIECE * CHUNK), mask=(offs_m < rows) & (at < K), other=0.0)
            if HAS_NORM:
                norm = gl.load(norm_ptr + at, mask=at < K, other=0.0)
            acc, up = _piece(
                w_desc, ring, up_ring, full, x_shared.index(piece % 2), acc, up, piece, first, n,
                STEPS, PIECE_STEPS, STAGES, STAGE_CHUNKS, PIECE, BLOCK_N, BLOCK_M, GATED, SLICES,
            )  # fmt: skip
            square = _put_x(x, norm, x_shared.index((piece + 1) % 2), BLOCK_M, HAS_NORM)
            if HAS_NORM:
                squares += square
        if HAS_NORM:
            scale = _scale(squares, eps, K, SCALED, BLOCK_M, end)
    return acc, up, scale


@gluon.jit(do_not_specialize=["rows"])
def linear_sm90_kernel(
    w_desc, x_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, stride_xm, stride_rm, eps,
    K: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    X_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGE_CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, PIECE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """w_desc: the weight as [K / 64, outputs, 64] in boxes of [STAGE_CHUNKS, BLOCK_N, 64]. n: outputs; with GATED the up rows stand n after
    the gate's. X_ROWS: of x that are read, 1 or BLOCK_M. PIECE: chunks of x that are brought at once, whole stages."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    end: gl.constexpr = outputs_layout(BLOCK_N, gl.num_warps(), SLICES)
    first = gl.program_id(0) * BLOCK_N
    memory = start(w_desc, first, n, dtype, K, GATED, X_ROWS, BLOCK_N, STAGE_CHUNKS, STAGES, PIECE)
    offs_m, offs_k, norm = first_x(norm_ptr, K, HAS_NORM, X_ROWS, PIECE)
    x_ptrs = x_ptr + (offs_m.to(gl.int64) * stride_xm + offs_k)
    end_n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, end))
    end_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, end))
    mask = (end_n < n)[:, None] & (end_m < rows)[None, :]
    enter(PDL)
    x = gl.load(x_ptrs, mask=(offs_m < rows) & (offs_k < K), other=0.0)
    residual = mask
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + (end_m.to(gl.int64) * stride_rm)[None, :] + end_n[:, None], mask=mask, other=0.0)
    acc, up, scale = products(
        w_desc, memory, x, norm, x_ptrs, norm_ptr, offs_m, offs_k, rows, first, n, eps,
        K, HAS_NORM, GATED, BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, SLICES, PIECE, BLOCK_N, end,
    )  # fmt: skip
    y = gl.sum(gl.convert_layout(acc, end.parent), 0)
    y = rounded(y, scale, bias_ptr, end_n, end_n < n, dtype, HAS_NORM, HAS_BIAS)
    if GATED:
        y_up = gl.sum(gl.convert_layout(up, end.parent), 0)
        y_up = rounded(y_up, scale, bias_ptr, n + end_n, end_n < n, dtype, HAS_NORM, HAS_BIAS)
        gate = y.to(gl.float32)
        y = (gate / (1.0 + gl.exp(-gate)) * y_up.to(gl.float32)).to(dtype)
    if HAS_RESIDUAL:
        y = (residual.to(gl.float32) + y.to(gl.float32)).to(dtype)
    gl.store(y_ptr + (end_m.to(gl.int64) * n)[None, :] + end_n[:, None], y, mask=mask)
