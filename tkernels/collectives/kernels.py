"""The kernels: all-reduce in one and in two trips, all-gather, reduce-scatter.

    one_shot:        every rank sends everything to everyone: one trip.          bytes out: (W - 1) · S
    two_shot:        reduce-scatter, then all-gather, in one launch: two trips.  bytes out: 2 (W - 1) / W · S
    all_gather:      one_shot without the sum.
    reduce_scatter:  the first trip of two_shot.

A program sends its vectors before it waits for the same vectors of its peers, so programs need not be resident together.
"""

from __future__ import annotations

from tkernels._triton import tl, triton
from tkernels.collectives.lamport import HEADER_BYTES as _HEADER_BYTES
from tkernels.collectives.lamport import advance, begin, check_headers, end, poll, push, slot_offset, with_header
from tkernels.collectives.words import load_vector, not_empty, of_rank, store4, store_vector, sum_ranks

_HEADER = tl.constexpr(_HEADER_BYTES)
_INTS = ["state", "report", "limit", "n", "inner", "stride", "out_stride"]
_POINTERS = ["x_ptr", "out_ptr"]


@triton.jit
def _send(
    x_ptr, workspaces, launch, v, n, vectors, inner, stride, mask,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Load vectors v, and the header after the last, and push them to all peers. mask: 0 sends nothing."""
    words = load_vector(x_ptr, v, n, inner, stride, (v < vectors).to(tl.int32), LAYOUT)
    words = with_header(words, v == vectors, n, OP, launch)
    push(workspaces, RANK * SLOT + slot_offset(launch, v, vectors, HALF), words, mask, RANK, WORLD)
    return words


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def one_shot_kernel(
    x_ptr, out_ptr, workspaces, state, report, limit, n, inner, stride,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """out [n] = sum of x over ranks."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    launch, finished, alive, limit = begin(state, limit, FENCE)
    vectors = tl.cdiv(n, 128 // dtype.primitive_bitwidth)
    start = tl.program_id(0) * LANES
    first = start + tl.arange(0, LANES)
    v = first
    if LOOP:
        step = tl.num_programs(0) * LANES
        i = start
        while i <= vectors:
            mask = (v <= vectors).to(tl.int32)
            _send(x_ptr, workspaces, launch, v, n, vectors, inner, stride, mask * alive, OP, RANK, WORLD, SLOT, HALF, LAYOUT)
            v += step
            i += step
        counted = advance(state, LANES)
        v = first
        i = start
        while i <= vectors:
            mask = (v <= vectors).to(tl.int32)
            own = load_vector(x_ptr, v, n, inner, stride, (v < vectors).to(tl.int32), LAYOUT)
            got = poll(workspaces[RANK] + slot_offset(launch, v, vectors, HALF), mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
            store_vector(out_ptr, v, sum_ranks(own, got, dtype, RANK, WORLD), n, n, n, (v < vectors).to(tl.int32), OUT_LAYOUT)
            check_headers((i <= vectors) & (vectors < i + LANES), v == vectors, got, n, OP, launch, state, report, alive, RANK, WORLD)
            v += step
            i += step
    else:
        mask = (v <= vectors).to(tl.int32)
        own = _send(x_ptr, workspaces, launch, v, n, vectors, inner, stride, mask * alive, OP, RANK, WORLD, SLOT, HALF, LAYOUT)
        counted = advance(state, LANES)
        got = poll(workspaces[RANK] + slot_offset(launch, v, vectors, HALF), mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        store_vector(out_ptr, v, sum_ranks(own, got, dtype, RANK, WORLD), n, n, n, (v < vectors).to(tl.int32), OUT_LAYOUT)
        check_headers((start <= vectors) & (vectors < start + LANES), v == vectors, got, n, OP, launch, state, report, alive, RANK, WORLD)
    end(state, report, launch, finished, counted, OP, LANES)


@triton.jit
def _send_stripes(
    x_ptr, workspaces, launch, v, n, stripe, vectors, inner, stride, alive,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Vector v of stripe p to rank p, for all p; the header to everyone. Vectors past the end travel as zeros."""
    mask = (v <= stripe).to(tl.int32) * alive
    offset = RANK * SLOT + slot_offset(launch, v, stripe, HALF)
    for step in tl.static_range(1, WORLD):
        g = v + (RANK + step) % WORLD * stripe
        words = load_vector(x_ptr, g, n, inner, stride, ((v < stripe) & (g < vectors)).to(tl.int32), LAYOUT)
        a, b, c, d = with_header(words, v == stripe, n, OP, launch)
        store4(workspaces[(RANK + step) % WORLD] + offset, not_empty(a), not_empty(b), not_empty(c), not_empty(d), mask)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def two_shot_kernel(
    x_ptr, out_ptr, workspaces, state, report, limit, n, inner, stride,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out [n] = sum of x over ranks; rank p sums the p-th stripe of vectors. WORLD slots for each trip."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    launch, finished, alive, limit = begin(state, limit, FENCE)
    vectors = tl.cdiv(n, 128 // dtype.primitive_bitwidth)
    stripe = tl.cdiv(vectors, WORLD)
    step = tl.num_programs(0) * LANES
    start = tl.program_id(0) * LANES
    first = start + tl.arange(0, LANES)
    i = start
    v = first
    while i <= stripe:
        _send_stripes(x_ptr, workspaces, launch, v, n, stripe, vectors, inner, stride, alive, OP, RANK, WORLD, SLOT, HALF, LAYOUT)
        v += step
        i += step
    counted = advance(state, LANES)
    i = start
    v = first
    while i <= stripe:
        g = v + RANK * stripe
        real = ((v < stripe) & (g < vectors)).to(tl.int32)
        own = load_vector(x_ptr, g, n, inner, stride, real, LAYOUT)
        mask = (v <= stripe).to(tl.int32)
        got = poll(workspaces[RANK] + slot_offset(launch, v, stripe, HALF), mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        total = sum_ranks(own, got, dtype, RANK, WORLD)
        offset = (WORLD + RANK) * SLOT + slot_offset(launch, v, stripe, HALF)
        push(workspaces, offset, total, (v < stripe).to(tl.int32) * alive, RANK, WORLD)
        store_vector(out_ptr, g, total, n, n, n, real, OUT_LAYOUT)
        check_headers((i <= stripe) & (stripe < i + LANES), v == stripe, got, n, OP, launch, state, report, alive, RANK, WORLD)
        v += step
        i += step
    i = start
    v = first
    while i < stripe:
        mask = (v < stripe).to(tl.int32)
        address = workspaces[RANK] + WORLD * SLOT + slot_offset(launch, v, stripe, HALF)
        got = poll(address, mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        for s in tl.static_range(WORLD):
            if s != RANK:
                g = v + s * stripe
                store_vector(out_ptr, g, of_rank(got, s, RANK), n, n, n, mask * (g < vectors).to(tl.int32), OUT_LAYOUT)
        v += step
        i += step
    end(state, report, launch, finished, counted, OP, LANES)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def all_gather_kernel(
    x_ptr, out_ptr, workspaces, state, report, limit, n, inner, stride,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out [rows, WORLD, inner] = x [rows, inner] of every rank; n = rows · inner, stride = WORLD · inner."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    launch, finished, alive, limit = begin(state, limit, FENCE)
    vectors = tl.cdiv(n, 128 // dtype.primitive_bitwidth)
    step = tl.num_programs(0) * LANES
    start = tl.program_id(0) * LANES
    first = start + tl.arange(0, LANES)
    i = start
    v = first
    while i <= vectors:
        mask = (v <= vectors).to(tl.int32) * alive
        own = _send(x_ptr, workspaces, launch, v, n, vectors, n, n, mask, OP, RANK, WORLD, SLOT, HALF, LAYOUT)
        store_vector(out_ptr + RANK * inner, v, own, n, inner, stride, (v < vectors).to(tl.int32), OUT_LAYOUT)
        v += step
        i += step
    counted = advance(state, LANES)
    i = start
    v = first
    while i <= vectors:
        mask = (v <= vectors).to(tl.int32)
        got = poll(workspaces[RANK] + slot_offset(launch, v, vectors, HALF), mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        for s in tl.static_range(WORLD):
            if s != RANK:
                words = of_rank(got, s, RANK)
                store_vector(out_ptr + s * inner, v, words, n, inner, stride, (v < vectors).to(tl.int32), OUT_LAYOUT)
        check_headers((i <= vectors) & (vectors < i + LANES), v == vectors, got, n, OP, launch, state, report, alive, RANK, WORLD)
        v += step
        i += step
    end(state, report, launch, finished, counted, OP, LANES)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_POINTERS)
def reduce_scatter_kernel(
    x_ptr, out_ptr, workspaces, state, report, limit, n, inner, stride,
    OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, HALF: tl.constexpr, LAYOUT: tl.constexpr,
    OUT_LAYOUT: tl.constexpr, FENCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """out [rows, inner] = this rank's part of the sum of x [rows, WORLD, inner]; n = rows · inner, stride = WORLD · inner."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    launch, finished, alive, limit = begin(state, limit, FENCE)
    vectors = tl.cdiv(n, 128 // dtype.primitive_bitwidth)
    step = tl.num_programs(0) * LANES
    start = tl.program_id(0) * LANES
    first = start + tl.arange(0, LANES)
    i = start
    v = first
    while i <= vectors:
        mask = (v <= vectors).to(tl.int32) * alive
        offset = RANK * SLOT + slot_offset(launch, v, vectors, HALF)
        for hop in tl.static_range(1, WORLD):
            words = load_vector(x_ptr + (RANK + hop) % WORLD * inner, v, n, inner, stride, (v < vectors).to(tl.int32), LAYOUT)
            a, b, c, d = with_header(words, v == vectors, n, OP, launch)
            store4(workspaces[(RANK + hop) % WORLD] + offset, not_empty(a), not_empty(b), not_empty(c), not_empty(d), mask)
        v += step
        i += step
    counted = advance(state, LANES)
    i = start
    v = first
    while i <= vectors:
        mask = (v <= vectors).to(tl.int32)
        own = load_vector(x_ptr + RANK * inner, v, n, inner, stride, (v < vectors).to(tl.int32), LAYOUT)
        got = poll(workspaces[RANK] + slot_offset(launch, v, vectors, HALF), mask, state, report, limit, OP, RANK, WORLD, SLOT, FENCE)
        store_vector(out_ptr, v, sum_ranks(own, got, dtype, RANK, WORLD), n, n, n, (v < vectors).to(tl.int32), OUT_LAYOUT)
        check_headers((i <= vectors) & (vectors < i + LANES), v == vectors, got, n, OP, launch, state, report, alive, RANK, WORLD)
        v += step
        i += step
    end(state, report, launch, finished, counted, OP, LANES)
