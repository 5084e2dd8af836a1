"""The Gluon kernel of decode_one_sm90.py: kernel.py's roles and handshakes, for sequences of one query token or a few.

Its consumer (one_consumer.py) multiplies on the older tensor cores, from registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels._gluon import depart, enter
from tkernels.attention._decode_sm90.loader import loader
from tkernels.attention._decode_sm90.one_consumer import one_consumer
from tkernels.attention._decode_sm90.scheduler import scheduler
from tkernels.attention._decode_sm90.shared import ONE_FIRST_BARRIER, Q_STAGES, make_rings


@gluon.jit(do_not_specialize=["num_seqs", "num_tokens", "capacity", "window", "stride_bt", "stride_lt", "stride_lh"])
def decode_one_sm90_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    part_ptr, state_ptr, arrivals_ptr,
    num_seqs, num_tokens, capacity, window, qk_scale, softcap, v_factor, stride_ks, stride_vs,
    stride_bt, stride_ot, stride_oh, stride_lt, stride_lh,
    DTYPE: gl.constexpr, CACHE_DTYPE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr,
    SLOT_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PROGRAMS: gl.constexpr, LEAVES: gl.constexpr, UNCUT: gl.constexpr, LEAST: gl.constexpr,
    BY_RANGE: gl.constexpr, SEQS: gl.constexpr, MIN_QUERIES: gl.constexpr, QUERIES: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_K_SCALE: gl.constexpr, HAS_V_SCALE: gl.constexpr, HAS_LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As decode_sm90_kernel, for sequences of MIN_QUERIES to QUERIES tokens, with boxes of [QUERIES, COLUMNS // QUERIES, DIM] for q and
    SLOT_ROWS rows a slot: COLUMNS, or for one token GROUP rounded up to a power of two. With MIN_QUERIES 1 also writes zeros into the rows
    of no sequence. DTYPE: q's. CACHE_DTYPE: the same, or e4m3. SPLIT: warps that share the columns of the same keys."""
    q_shared = gl.allocate_shared_memory(DTYPE, [Q_STAGES, COLUMNS, DIM], gl.NVMMASharedLayout.get_default_for([COLUMNS, DIM], DTYPE))
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DIM], CACHE_DTYPE)
    k_blocks = gl.allocate_shared_memory(CACHE_DTYPE, [K_STAGES, BLOCK_N, DIM], layout)
    v_blocks = gl.allocate_shared_memory(CACHE_DTYPE, [V_STAGES, BLOCK_N, DIM], layout)
    # a part of the consumer's accumulators, whose warps are summed where a leaf ends; swizzled, so that neither side has conflicts
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    scratch = gl.allocate_shared_memory(gl.float32, [gl.num_warps() // SPLIT * (min(COLUMNS, 16) // 2), DIM], swizzled)
    q_full, q_empty, ks, vs, segments = make_rings(k_blocks, v_blocks)
    enter(PDL)
    gl.static_assert(ONE_FIRST_BARRIER + K_STAGES + V_STAGES <= 16, "a multiprocessor has 16 named barriers")
    HANDSHAKE: gl.constexpr = 32 * gl.num_warps() + 32  # the consumer and a loader
    gl.warp_specialize(
        [
            (
                one_consumer,
                (
                    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, part_ptr, state_ptr, arrivals_ptr, cu_ptr,
                    num_seqs, num_tokens, qk_scale, softcap, v_factor, window, stride_ks, stride_vs,
                    stride_ot, stride_oh, stride_lt, stride_lh, q_shared, q_full, q_empty, ks, vs, scratch, segments,
                    KV_HEADS, GROUP, SLOT_ROWS, HEAD_DIM, BLOCK_N, K_STAGES, V_STAGES, LEAVES, HANDSHAKE,
                    MIN_QUERIES, QUERIES, SPLIT, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_K_SCALE, HAS_V_SCALE, HAS_LSE,
                ),
            ),
            (loader, (k_desc, table_ptr, ks, segments, ONE_FIRST_BARRIER, HANDSHAKE, K_STAGES, DIM, PAGE, BLOCK_N)),
            (loader, (v_desc, table_ptr, vs, segments, ONE_FIRST_BARRIER + K_STAGES, HANDSHAKE, V_STAGES, DIM, PAGE, BLOCK_N)),
            (
                scheduler,
                (
                    q_desc, table_ptr, cu_ptr, lens_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, segments,
                    KV_HEADS, GROUP, COLUMNS // QUERIES, DIM, PAGE, BLOCK_N, PROGRAMS, LEAVES, UNCUT, LEAST, BY_RANGE,
                    MIN_QUERIES, QUERIES, HAS_WINDOW, SEQS,
                ),
            ),
        ],
        [1, 1, 1],
        [64, 64, 64],  # registers a thread; the consumer takes what it needs
    )  # fmt: skip
    depart(PDL)
