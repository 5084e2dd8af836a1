"""The sums of a few-row projection, for the kernels that differ in what they do with them: ``_linear_kernels``, ``_qkv_kernels``."""

from __future__ import annotations

from tkernels._triton import cast, dot, tl, triton


@triton.jit
def stream(ptrs, mask, EVEN: tl.constexpr):
    """Weights are read once: they should not push anything else out of L2."""
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _weighted(x, norm, squares):
    """x times the norm's weight, rounded, and its squares; the norm's scale is one number a row and is applied to the sums."""
    wide = x.to(tl.float32)
    return cast(wide * norm.to(tl.float32), x.dtype), squares + wide * wide


@triton.jit
def _row(x_ptr, m, rows, k, mask_k, offs_k, stride_xm, norm, w, w_up, acc, up, squares, HAS_NORM: tl.constexpr, GATED: tl.constexpr):
    """One row of x against a tile of the weights; norm [BLOCK_K] multiplies it."""
    x = tl.load(x_ptr + tl.cast(m, tl.int64) * stride_xm + k + offs_k, mask=mask_k & (m < rows), other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= norm
    acc += w * x[None, :]
    if GATED:
        up += w_up * x[None, :]
    return acc, up, squares


@triton.jit
def vector_sums(
    x_ptr, norm_ptr, w_ptrs, up_ptrs, w, w_up, mask_n, offs_k, rows, stride_xm,
    K: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of each row of x with a tile of the weights, added over steps but not over lanes; w and w_up are the first step's."""
    zero = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc0, acc1, acc2, acc3 = zero, zero, zero, zero
    up0, up1, up2, up3 = zero, zero, zero, zero
    square = tl.zeros([BLOCK_K], tl.float32)
    square0, square1, square2, square3 = square, square, square, square
    for k in tl.static_range(0, K, BLOCK_K):
        mask_k = offs_k + k < K
        wide = w.to(tl.float32)
        wide_up = w_up.to(tl.float32)
        norm = square
        if HAS_NORM:
            norm = tl.load(norm_ptr + k + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        acc0, up0, square0 = _row(x_ptr, 0, rows, k, mask_k, offs_k, stride_xm, norm, wide, wide_up, acc0, up0, square0, HAS_NORM, GATED)
        if BLOCK_M > 1:
            acc1, up1, square1 = _row(
                x_ptr, 1, rows, k, mask_k, offs_k, stride_xm, norm, wide, wide_up, acc1, up1, square1, HAS_NORM, GATED
            )
        if BLOCK_M > 2:
            acc2, up2, square2 = _row(
                x_ptr, 2, rows, k, mask_k, offs_k, stride_xm, norm, wide, wide_up, acc2, up2, square2, HAS_NORM, GATED
            )
            acc3, up3, square3 = _row(
                x_ptr, 3, rows, k, mask_k, offs_k, stride_xm, norm, wide, wide_up, acc3, up3, square3, HAS_NORM, GATED
            )
        if k + BLOCK_K < K:
            mask_next = mask_n & (offs_k + k + BLOCK_K < K)[None, :]
            w = stream(w_ptrs + k + BLOCK_K, mask_next, EVEN)
            if GATED:
                w_up = stream(up_ptrs + k + BLOCK_K, mask_next, EVEN)
    return (acc0, acc1, acc2, acc3), (up0, up1, up2, up3), (square0, square1, square2, square3)


@triton.jit
def row_sum(acc, up, squares, eps, K: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr):
    """A row's outputs [BLOCK_N] and its up outputs from what ``vector_sums`` gives, and by what the norm scales them."""
    y = tl.sum(acc, 1)
    y_up = y
    if GATED:
        y_up = tl.sum(up, 1)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return y, y_up, scale


@triton.jit
def rounded(y, scale, bias_ptr, offs_n, mask_n, dtype: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """y · scale + bias in ``dtype``. Whether a compiler contracts such a product depends on what stands around it, so it is told to:
    all kernels of a projection give the same bits."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        if HAS_NORM:
            y = tl.fma(y, scale, bias)
        else:
            y += bias
    elif HAS_NORM:
        y *= scale
    return cast(y, dtype)


# Tiles without stages ("direct") load weights and x from memory straight into the registers from which tensor cores take them, with all
# loads of a step on their way at once and nothing in shared memory. Of a fragment a thread holds, in its row, pairs of inputs that are
# eight apart; it loads eight inputs that are neighbours. Since a sum has no order of its own, inputs are renamed within each 32: what a
# thread has loaded is what it multiplies, for weights and x alike. Dimensions [8, SLICES, BLOCK_K / 32, rows / 8, 32] are such that
# Triton's layout of the load gives lanes to the first and the last, warps to the slices, registers to the others.


@triton.jit
def places(COUNT: tl.constexpr, DIRECT: tl.constexpr):
    """0 … COUNT - 1 as ``matrix_sums`` takes the weights' rows: [COUNT], or [8, 1, 1, COUNT / 8, 1]."""
    if DIRECT:
        return tl.arange(0, 8)[:, None, None, None, None] + tl.arange(0, COUNT // 8)[None, None, None, :, None] * 8
    else:
        return tl.arange(0, COUNT)


@triton.jit
def _inputs(BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """The inputs of a step [1, SLICES, BLOCK_K / 32, 1, 32], neighbours last."""
    runs = tl.arange(0, BLOCK_K // 32)[None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    return tl.arange(0, SLICES)[None, :, None, None, None] * BLOCK_K + runs


@triton.jit
def direct_weights(w_rows, mask_n, k_begin, k_total, EVEN: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """The weights of the step that begins at ``k_begin``."""
    at = k_begin + _inputs(BLOCK_K, SLICES)
    return stream(w_rows + at, mask_n & (at < k_total), EVEN)


@triton.jit
def _fragments(x, LEFT: tl.constexpr):
    """What was loaded [8, SLICES, BLOCK_K / 32, rows / 8, 32] as an operand, [SLICES, rows, BLOCK_K] or with the last two exchanged."""
    SLICES: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = 8 * x.shape[3]
    BLOCK_K: tl.constexpr = 32 * x.shape[2]
    x = tl.reshape(x, (8, SLICES, BLOCK_K // 32, ROWS // 8, 4, 4, 2))
    if LEFT:
        return tl.reshape(tl.permute(x, (1, 3, 0, 2, 5, 4, 6)), (SLICES, ROWS, BLOCK_K))
    else:
        return tl.reshape(tl.permute(x, (1, 2, 5, 4, 6, 3, 0)), (SLICES, BLOCK_K, ROWS))


@triton.jit
def _late_zero(x_ptr, rows):
    """0.0, of which no compiler knows before all threads have asked for what stands before: ``rows`` has no sign.

    The assembler moves products up past a barrier, each to its loads, which saves registers: the loads then wait one after another.
    """
    tl.debug_barrier()
    return (tl.load(x_ptr).to(tl.int16, bitcast=True).to(tl.int32) & (rows >> 31)).to(tl.float32)


@triton.jit
def direct_sums(
    x_ptr, norm_ptr, w_rows, up_rows, w, w_up, mask_n, rows, stride_xm, k_begin, k_total,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """As ``matrix_sums``, over STEPS steps; w and w_up are the first step's. The squares are added up over the inputs of each slice."""
    place_m = places(BLOCK_M, True)
    x_rows = x_ptr + place_m.to(tl.int64) * stride_xm
    mask_m = place_m < rows
    squares = tl.zeros([8, SLICES, BLOCK_M // 8], tl.float32)
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    up = acc
    for step in tl.static_range(STEPS):  # unrolled: carried by a loop, 16-bit numbers would be taken out of their registers and put back
        k = k_begin + step * (SLICES * BLOCK_K)
        at = k + _inputs(BLOCK_K, SLICES)
        x = tl.load(x_rows + at, mask=mask_m if EVEN else mask_m & (at < k_total), other=0.0)
        w_next = w
        up_next = w_up
        if step + 1 < STEPS:
            w_next = direct_weights(w_rows, mask_n, k + SLICES * BLOCK_K, k_total, EVEN, BLOCK_K, SLICES)
            if GATED:
                up_next = direct_weights(up_rows, mask_n, k + SLICES * BLOCK_K, k_total, EVEN, BLOCK_K, SLICES)
        norm = x
        if HAS_NORM:  # by each row on its own: where x's row is
            norm = tl.load(norm_ptr + (at + place_m * 0), mask=at < k_total, other=0.0)
        zero = _late_zero(x_ptr, rows)
        if HAS_NORM:
            x, square = _weighted(x, norm, 0.0)
            squares += tl.sum(tl.sum(square, 4), 2)
        x = _fragments(x, False)
        acc = dot(_fragments(w, True), x, acc + zero)
        if GATED:
            up = dot(_fragments(w_up, True), x, up + zero)
        w = w_next
        w_up = up_next
    return acc, up, tl.reshape(tl.permute(squares, (1, 2, 0)), (SLICES, 1, BLOCK_M))


@triton.jit
def matrix_sums(
    x_ptr, norm_ptr, w_rows, up_rows, mask_n, rows, stride_xm, k_begin, k_end, k_total,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The weights' rows times x over [k_begin, k_end), the same for the up rows, and the squares of x; slices not yet added up."""
    # The weights are the left operand: 64 of their rows fill a warpgroup's tile, or 16 a warp's, whatever the rows of x.
    # Slice s of a step holds its own BLOCK_K inputs; each warp multiplies its slices, and they are summed once at the end.
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = tl.arange(0, BLOCK_M) < rows
    x_rows = x_ptr + tl.arange(0, BLOCK_M).to(tl.int64) * stride_xm
    if SLICES == 1:
        squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = acc
        for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=NUM_STAGES):
            mask_k = offs_k + k < k_total
            mask_w = mask_n[:, None] & mask_k[None, :]
            w = stream(w_rows[:, None] + (offs_k + k)[None, :], mask_w, EVEN)
            mask_x = mask_m[None, :] if EVEN else mask_m[None, :] & mask_k[:, None]
            x = tl.load(x_rows[None, :] + (offs_k + k)[:, None], mask=mask_x, other=0.0)
            if HAS_NORM:
                norm = tl.load(norm_ptr + k + offs_k, mask=mask_k, other=0.0)
                x, squares = _weighted(x, norm[:, None], squares)
            acc = dot(w, x, acc)
            if GATED:
                up = dot(stream(up_rows[:, None] + (offs_k + k)[None, :], mask_w, EVEN), x, up)
    else:
        offs_s = tl.arange(0, SLICES) * BLOCK_K
        squares = tl.zeros([SLICES, BLOCK_K, BLOCK_M], tl.float32)
        acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
        up = acc
        for k in tl.range(k_begin, k_end, SLICES * BLOCK_K, num_stages=NUM_STAGES):
            at = k + offs_s[:, None] + offs_k[None, :]  # [SLICES, BLOCK_K]
            mask_w = mask_n[None, :, None] & (at < k_total)[:, None, :]
            w = stream(w_rows[None, :, None] + at[:, None, :], mask_w, EVEN)
            mask_x = mask_m[None, None, :] if EVEN else mask_m[None, None, :] & (at < k_total)[:, :, None]
            x = tl.load(x_rows[None, None, :] + at[:, :, None], mask=mask_x, other=0.0)
            if HAS_NORM:
                norm = tl.load(norm_ptr + at, mask=at < k_total, other=0.0)
                x, squares = _weighted(x, norm[:, :, None], squares)
            acc = dot(w, x, acc)
            if GATED:
                up = dot(stream(up_rows[None, :, None] + at[:, None, :], mask_w, EVEN), x, up)
    return acc, up, squares


@triton.jit
def _in_order(x):
    """The sum over the first axis of x [a power of two, M], neighbours first. ``tl.sum`` adds in the order of the layout, and which that is
    depends on all that a kernel loads and stores: kernels with the same sums could differ in the last bit of a norm."""
    LEVELS: tl.constexpr = tl.constexpr(x.shape[0].value.bit_length() - 1)
    M: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, M)), (0, 2, 1)))
        x = left + right
    return tl.reshape(x, (M,))


@triton.jit
def matrix_end(acc, up, squares, eps, k_total, HAS_NORM: tl.constexpr, SLICES: tl.constexpr):
    """Outputs [BLOCK_N, BLOCK_M] and up outputs from what ``matrix_sums`` gives, and by what the norm scales them."""
    if SLICES > 1:
        acc = tl.sum(acc, 0)
        up = tl.sum(up, 0)
        squares = tl.reshape(squares, (squares.shape[0] * squares.shape[1], squares.shape[2]))
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(_in_order(squares) / k_total + eps)[None, :]
    return acc, up, scale


@triton.jit
def share(k_total, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """Where this program's part of K begins and ends."""
    k_begin = 0
    k_end = k_total
    if SPLITS > 1:
        size = tl.cdiv(tl.cdiv(k_total, SPLITS), STEP) * STEP
        k_begin = tl.program_id(1) * size
        k_end = tl.minimum(k_begin + size, k_total)
    return k_begin, k_end


@triton.jit
def arrive(acc, part_ptr, arrivals_ptr, SPLITS: tl.constexpr):
    """Leave this program's sums [N, M] with those of the other parts of K; returns where they are, and whether all have arrived."""
    N: tl.constexpr = acc.shape[0]
    M: tl.constexpr = acc.shape[1]
    # [program of n, split, N, M]; the last program to arrive adds the splits in order, whichever it is
    own = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    parts = part_ptr + tl.program_id(0).to(tl.int64) * (SPLITS * N * M) + own
    tl.store(parts + tl.program_id(1) * (N * M), acc)
    tl.debug_barrier()  # all threads have stored before one of them releases
    arrived = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    return parts, arrived == SPLITS - 1


@triton.jit
def add_parts(parts, arrivals_ptr, SPLITS: tl.constexpr):
    """The sum of all parts, in order; for the program that arrived last."""
    SIZE: tl.constexpr = parts.shape[0] * parts.shape[1]
    tl.debug_barrier()  # no thread reads before the one that acquires
    tl.store(arrivals_ptr + tl.program_id(0), 0)  # for the next launch
    acc = tl.load(parts)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(parts + split * SIZE)
    return acc
