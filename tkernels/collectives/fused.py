"""All-reduce, residual add and RMSNorm in one launch; y in the dtype of x, or in fp8 for the linear layer that follows.

    new_residual = round(round(sum of x over ranks) + residual)
    y            = round(new_residual / sqrt(mean(new_residual²) + eps) · weight)      fp8: saturate(y / scale)

The sum is that of the plain kernels bit for bit. Squares are summed in fp32 within a vector of 16 bytes, in one order, and vectors in
fp64, so that their order, which differs between the two kernels, does not survive the rounding: a row's bits do not depend on how many
rows are in the batch.
"""

from __future__ import annotations

from tkernels._triton import tl, triton
from tkernels.collectives.lamport import STATE_WORDS, advance, begin, check_headers, end, poll, push, slot_offset, swap, with_header
from tkernels.collectives.words import FLAT, load_vector, not_empty, of_rank, pack, store4, store_vector, sum_ranks, unpack
from tkernels.quant import divide, to_fp8

MAX_SPLIT_ROWS = 63  # rows whose programs swap their partial sums: with 8 programs each and the header one launch
MAX_SPLIT = 8  # programs a row
_WORDS_OFFSET = tl.constexpr(4 * STATE_WORDS)
_FLAT = tl.constexpr(FLAT.value)
_INTS = ["state", "report", "limit", "rows", "hidden", "x_stride", "residual_stride"]
_POINTERS = ["x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr", "scale_ptr"]


@triton.jit
def _add_word(word, residual, dtype: tl.constexpr):
    low, high = unpack(word, dtype)
    residual_low, residual_high = unpack(residual, dtype)
    return pack(low + residual_low, high + residual_high, dtype)


@triton.jit
def _squares(a, b, dtype: tl.constexpr):
    """The sum of the squares in two words; ``fma`` spelled out, so that every kernel rounds alike."""
    a_low, a_high = unpack(a, dtype)
    b_low, b_high = unpack(b, dtype)
    if dtype == tl.float32:
        return tl.fma(b_low, b_low, a_low * a_low)
    else:
        return tl.fma(a_high, a_high, a_low * a_low) + tl.fma(b_high, b_high, b_low * b_low)


@triton.jit
def _add(words, residual, dtype: tl.constexpr):
    """(four rounded sums, the sum of their squares), which is widened per vector: fp64 for each element would take a conversion each."""
    a = _add_word(words[0], residual[0], dtype)
    b = _add_word(words[1], residual[1], dtype)
    c = _add_word(words[2], residual[2], dtype)
    d = _add_word(words[3], residual[3], dtype)
    return a, b, c, d, (_squares(a, b, dtype) + _squares(c, d, dtype)).to(tl.float64)


@triton.jit
def _rstd(square, hidden, eps):
    """square: in fp64. Its quotient is not worth a division in fp64: only the order of summation had to vanish."""
    return tl.rsqrt(square.to(tl.float32) / hidden + eps)


@triton.jit
def _norm_word(word, weight_low, weight_high, rstd, dtype: tl.constexpr):
    low, high = unpack(word, dtype)
    return pack(low * rstd * weight_low, high * rstd * weight_high, dtype)


@triton.jit
def _fp8_pair(word, scale, dtype: tl.constexpr):
    """The values of a word as e4m3 bytes, the first one lowest."""
    low, high = unpack(word, dtype)
    byte = to_fp8(divide(low, scale)).to(tl.uint8, bitcast=True).to(tl.int32)
    if dtype == tl.float32:
        return byte
    else:
        return byte | (to_fp8(divide(high, scale)).to(tl.uint8, bitcast=True).to(tl.int32) << 8)


@triton.jit
def _load_weight(weight_ptr, v, i: tl.constexpr, hidden, PER: tl.constexpr, mask):
    if PER == 4:
        low = tl.load(weight_ptr + v * 4 + i, mask=(mask != 0) & (v * 4 + i < hidden), other=0.0)
        return low, low
    else:
        e = v * 8 + 2 * i
        low = tl.load(weight_ptr + e, mask=(mask != 0) & (e < hidden), other=0.0)
        return low, tl.load(weight_ptr + e + 1, mask=(mask != 0) & (e + 1 < hidden), other=0.0)


@triton.jit
def _load_weights(weight_ptr, v, hidden, dtype: tl.constexpr, mask, LAYOUT: tl.constexpr):
    """The weights of a vector, as they lie there: a use, and widening is one, waits for them. See ``_widen``."""
    PER: tl.constexpr = 128 // dtype.primitive_bitwidth
    if LAYOUT == _FLAT and weight_ptr.dtype.element_ty == dtype:
        return load_vector(weight_ptr, v, hidden, hidden, hidden, mask, LAYOUT)
    else:
        return (
            _load_weight(weight_ptr, v, 0, hidden, PER, mask)
            + _load_weight(weight_ptr, v, 1, hidden, PER, mask)
            + _load_weight(weight_ptr, v, 2, hidden, PER, mask)
            + _load_weight(weight_ptr, v, 3, hidden, PER, mask)
        )


@triton.jit
def _widen(loaded, weight_dtype: tl.constexpr, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """Eight fp32 values of what ``_load_weights`` returned: low and high of each word."""
    if LAYOUT == _FLAT and weight_dtype == dtype:
        return unpack(loaded[0], dtype) + unpack(loaded[1], dtype) + unpack(loaded[2], dtype) + unpack(loaded[3], dtype)
    else:
        wide = ()
        for i in tl.static_range(8):
            wide = wide + (loaded[i].to(tl.float32),)  # type: ignore[assignment]
        return wide


@triton.jit
def _store_norm(
    y_ptr, v, words, loaded, rstd, scale, hidden, dtype: tl.constexpr, mask, LAYOUT: tl.constexpr, FP8: tl.constexpr, WEIGHT: tl.constexpr
):
    weights = _widen(loaded, WEIGHT, dtype, LAYOUT)
    a = _norm_word(words[0], weights[0], weights[1], rstd, dtype)
    b = _norm_word(words[1], weights[2], weights[3], rstd, dtype)
    c = _norm_word(words[2], weights[4], weights[5], rstd, dtype)
    d = _norm_word(words[3], weights[6], weights[7], rstd, dtype)
    if not FP8:
        store_vector(y_ptr, v, (a, b, c, d), hidden, hidden, hidden, mask, LAYOUT)
    else:
        PER: tl.constexpr = 128 // dtype.primitive_bitwidth
        BITS: tl.constexpr = 2 * PER  # of e4m3 that one word of x becomes
        low = _fp8_pair(a, scale, dtype) | (_fp8_pair(b, scale, dtype) << BITS)
        high = _fp8_pair(c, scale, dtype) | (_fp8_pair(d, scale, dtype) << BITS)
        if LAYOUT == _FLAT:  # one store a vector: rows of y are whole vectors
            p = y_ptr.to(tl.int64) + v.to(tl.int64) * PER
            if PER == 8:
                bytes8 = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
                tl.store(p.to(tl.pointer_type(tl.int64)), bytes8, mask=mask != 0)
            else:
                tl.store(p.to(tl.pointer_type(tl.int32)), (low & 0xFFFF) | (high << 16), mask=mask != 0)
            return
        for i in tl.static_range(PER):
            half = low if i < PER // 2 else high
            byte = (half >> (8 * (i % (PER // 2)))) & 0xFF
            tl.store(y_ptr + v * PER + i, byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True), mask=(mask != 0) & (v * PER + i < hidden))


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def one_shot_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr, workspaces, state, report, limit,
    rows, hidden, x_stride, residual_stride, eps,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    FP8: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """SPLIT programs a row; they swap their partial sums through the words behind the state, so all of a row must be resident.

    With LOOP a program takes every num_programs-th row (then SPLIT is 1). The row after the last is the header.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 128 // dtype.primitive_bitwidth
    launch, finished, alive, limit = begin(state, limit, FENCE)
    row_vectors = tl.cdiv(hidden, PER)
    vectors = rows * row_vectors
    part = tl.program_id(0) % SPLIT
    lanes = tl.arange(0, LANES)
    v = part * LANES + lanes  # in its row
    row = tl.program_id(0) // SPLIT
    programs = tl.num_programs(0) // SPLIT
    scale = 1.0
    if FP8:
        scale = tl.load(scale_ptr).to(tl.float32)
    if LOOP:
        while row <= rows:
            real = ((v < row_vectors) & (row < rows)).to(tl.int32)
            is_header = (row == rows) & (v == 0)
            slot_v = tl.where(row == rows, vectors + lanes, row * row_vectors + v)
            words = load_vector(x_ptr + row.to(tl.int64) * x_stride, v, hidden, hidden, hidden, real, LAYOUT)
            words = with_header(words, is_header, rows * hidden, OP, launch)
            sent = real | is_header.to(tl.int32)
            push(workspaces, RANK * SLOT + slot_offset(launch, slot_v, vectors, HALF), words, sent * alive, RANK, WORLD)
            row += programs
        row = tl.program_id(0) // SPLIT
        counted = advance(state, LANES)
        weights = _load_weights(weight_ptr, v, hidden, dtype, (v < row_vectors).to(tl.int32), LAYOUT)
        while row <= rows:
            real = ((v < row_vectors) & (row < rows)).to(tl.int32)
            is_header = (row == rows) & (v == 0)
            slot_v = tl.where(row == rows, vectors + lanes, row * row_vectors + v)
            sent = real | is_header.to(tl.int32)
            own = load_vector(x_ptr + row.to(tl.int64) * x_stride, v, hidden, hidden, hidden, real, LAYOUT)
            residual = load_vector(residual_ptr + row.to(tl.int64) * residual_stride, v, hidden, hidden, hidden, real, LAYOUT)
            got = poll(
                workspaces[RANK] + slot_offset(launch, slot_v, vectors, HALF), sent, state, report, limit, OP, RANK, WORLD, SLOT, FENCE
            )
            a, b, c, d, squares = _add(sum_ranks(own, got, dtype, RANK, WORLD), residual, dtype)
            out = row.to(tl.int64) * hidden
            store_vector(total_ptr + out, v, (a, b, c, d), hidden, hidden, hidden, real, LAYOUT)
            square = tl.sum(tl.where(real != 0, squares, 0.0), 0)
            rstd = _rstd(square, hidden, eps)
            _store_norm(y_ptr + out, v, (a, b, c, d), weights, rstd, scale, hidden, dtype, real, LAYOUT, FP8, weight_ptr.dtype.element_ty)
            check_headers(row == rows, is_header, got, rows * hidden, OP, launch, state, report, alive, RANK, WORLD)
            row += programs
    else:
        real = ((v < row_vectors) & (row < rows)).to(tl.int32)
        is_header = (row == rows) & (v == 0)
        slot_v = tl.where(row == rows, vectors + v, row * row_vectors + v)
        own = load_vector(x_ptr + row.to(tl.int64) * x_stride, v, hidden, hidden, hidden, real, LAYOUT)
        # Asked for before the stores to the peers, behind which loads would queue.
        residual = load_vector(residual_ptr + row.to(tl.int64) * residual_stride, v, hidden, hidden, hidden, real, LAYOUT)
        weights = _load_weights(weight_ptr, v, hidden, dtype, real, LAYOUT)
        own = with_header(own, is_header, rows * hidden, OP, launch)
        sent = real | is_header.to(tl.int32)
        push(workspaces, RANK * SLOT + slot_offset(launch, slot_v, vectors, HALF), own, sent * alive, RANK, WORLD)
        counted = advance(state, LANES)
        got = poll(workspaces[RANK] + slot_offset(launch, slot_v, vectors, HALF), sent, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        a, b, c, d, squares = _add(sum_ranks(own, got, dtype, RANK, WORLD), residual, dtype)
        square = tl.sum(tl.where(real != 0, squares, 0.0), 0)
        if SPLIT > 1:
            square = _swap_squares(square, state, row, rows, part, lanes, limit, SPLIT)
        out = row.to(tl.int64) * hidden
        store_vector(total_ptr + out, v, (a, b, c, d), hidden, hidden, hidden, real, LAYOUT)
        rstd = _rstd(square, hidden, eps)
        _store_norm(y_ptr + out, v, (a, b, c, d), weights, rstd, scale, hidden, dtype, real, LAYOUT, FP8, weight_ptr.dtype.element_ty)
        check_headers(row == rows, is_header, got, rows * hidden, OP, launch, state, report, alive, RANK, WORLD)
    end(state, report, launch, finished, counted, OP, LANES)


@triton.jit
def _swap_squares(square, state, row, rows, part, lanes, limit, SPLIT: tl.constexpr):
    """The sum over all SPLIT programs of a row, the same in each. Words of fp64 [row, reader, writer]; lane i serves program i."""
    bits = square.to(tl.int64, bitcast=True) + lanes.to(tl.int64) * 0
    bits = tl.where(bits == -1, 0x7FFFFFFFFFFFFFFF, bits)
    base = state + _WORDS_OFFSET + (row * (SPLIT * SPLIT)).to(tl.int64) * 8
    to = base + (lanes * SPLIT + part).to(tl.int64) * 8
    source = base + (part * SPLIT + lanes).to(tl.int64) * 8
    swapping = ((lanes < SPLIT) & (row < rows)).to(tl.int32)
    return tl.sum(swap(to, bits, source, swapping, limit).to(tl.float64, bitcast=True), 0)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def two_shot_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, scale_ptr, workspaces, state, report, limit,
    rows, hidden, x_stride, residual_stride, eps,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    FP8: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program holds whole rows; rank p sums the p-th part of each. The row after the last is the header."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER: tl.constexpr = 128 // dtype.primitive_bitwidth
    launch, finished, alive, limit = begin(state, limit, FENCE)
    row_vectors = tl.cdiv(hidden, PER)
    part = tl.cdiv(row_vectors, WORLD)  # vectors of a row that one rank sums
    vectors = rows * part
    lanes = tl.arange(0, LANES)
    scale = 1.0
    if FP8:
        scale = tl.load(scale_ptr).to(tl.float32)
    row = tl.program_id(0)
    while row <= rows:
        is_header = (row == rows) & (lanes == 0)
        slot_v = tl.where(row == rows, vectors + lanes, row * part + lanes)
        sent = (is_header | ((row < rows) & (lanes < part))).to(tl.int32)
        offset = RANK * SLOT + slot_offset(launch, slot_v, vectors, HALF)
        for hop in tl.static_range(1, WORLD):
            v = (RANK + hop) % WORLD * part + lanes
            real = ((lanes < part) & (v < row_vectors) & (row < rows)).to(tl.int32)
            words = load_vector(x_ptr + row.to(tl.int64) * x_stride, v, hidden, hidden, hidden, real, LAYOUT)
            a, b, c, d = with_header(words, is_header, rows * hidden, OP, launch)
            store4(workspaces[(RANK + hop) % WORLD] + offset, not_empty(a), not_empty(b), not_empty(c), not_empty(d), sent * alive)
        row += tl.num_programs(0)
    counted = advance(state, LANES)
    row = tl.program_id(0)
    while row <= rows:
        is_header = (row == rows) & (lanes == 0)
        slot_v = tl.where(row == rows, vectors + lanes, row * part + lanes)
        sent = (is_header | ((row < rows) & (lanes < part))).to(tl.int32)
        x_row = x_ptr + row.to(tl.int64) * x_stride
        residual_row = residual_ptr + row.to(tl.int64) * residual_stride
        mine = RANK * part + lanes
        real = ((lanes < part) & (mine < row_vectors) & (row < rows)).to(tl.int32)
        own = load_vector(x_row, mine, hidden, hidden, hidden, real, LAYOUT)
        residuals = ()
        for s in tl.static_range(WORLD):
            v = s * part + lanes
            real = ((lanes < part) & (v < row_vectors) & (row < rows)).to(tl.int32)
            residuals = residuals + load_vector(residual_row, v, hidden, hidden, hidden, real, LAYOUT)
        got = poll(workspaces[RANK] + slot_offset(launch, slot_v, vectors, HALF), sent, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        own = sum_ranks(own, got, dtype, RANK, WORLD)
        sent = ((lanes < part) & (row < rows)).to(tl.int32)
        push(workspaces, (WORLD + RANK) * SLOT + slot_offset(launch, slot_v, vectors, HALF), own, sent * alive, RANK, WORLD)
        check_headers(row == rows, is_header, got, rows * hidden, OP, launch, state, report, alive, RANK, WORLD)
        weights = ()  # on their way while the sums are
        for s in tl.static_range(WORLD):
            v = s * part + lanes
            real = ((lanes < part) & (v < row_vectors) & (row < rows)).to(tl.int32)
            weights = weights + (_load_weights(weight_ptr, v, hidden, dtype, real, LAYOUT),)  # type: ignore[assignment]
        address = workspaces[RANK] + WORLD * SLOT + slot_offset(launch, slot_v, vectors, HALF)
        got = poll(address, sent, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        out = row.to(tl.int64) * hidden
        totals = ()
        squares = lanes.to(tl.float64) * 0
        for s in tl.static_range(WORLD):
            v = s * part + lanes
            real = ((lanes < part) & (v < row_vectors) & (row < rows)).to(tl.int32)
            if s == RANK:
                words = own
            else:
                words = of_rank(got, s, RANK)
            residual = (residuals[4 * s], residuals[4 * s + 1], residuals[4 * s + 2], residuals[4 * s + 3])
            a, b, c, d, square = _add(words, residual, dtype)
            store_vector(total_ptr + out, v, (a, b, c, d), hidden, hidden, hidden, real, LAYOUT)
            totals = totals + (a, b, c, d)  # type: ignore[assignment]
            squares += tl.where(real != 0, square, 0.0)
        rstd = _rstd(tl.sum(squares, 0), hidden, eps)
        for s in tl.static_range(WORLD):
            v = s * part + lanes
            real = ((lanes < part) & (v < row_vectors) & (row < rows)).to(tl.int32)
            words = (totals[4 * s], totals[4 * s + 1], totals[4 * s + 2], totals[4 * s + 3])
            _store_norm(y_ptr + out, v, words, weights[s], rstd, scale, hidden, dtype, real, LAYOUT, FP8, weight_ptr.dtype.element_ty)
        row += tl.num_programs(0)
    end(state, report, launch, finished, counted, OP, LANES)
