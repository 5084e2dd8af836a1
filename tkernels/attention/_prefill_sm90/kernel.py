"""The Gluon kernel of prefill_sm90.py, one function a role. Triton's interpreter cannot run it: prefill.py is its twin and its oracle.

A program (one per multiprocessor) is six roles that work on a stream of tiles, a tile being 2 · 64 query tokens of one query head:

- the scheduler (one warp) takes tiles from an atomic counter, writes what the others must know about each into shared memory and
  loads its queries; so no other role divides, searches or reads lengths;
- two loaders (one warp each) stream the K and the V blocks of the tile through rings of stages by TMA, last block first;
- the cleaner (one warp) zeroes the rows of V that no query of the tile may see, before the consumers multiply them;
- two consumers (four warps each) compute 64 rows each: softmax of one block while the P · V of the block before runs.

Of 8 bits, the transposer (four warps) takes the cleaner's place: it reads the blocks of V that the loader brings and writes them, cleaned,
transposed into a second ring, which is the one that the consumers read.

The stream ends with a tile of no blocks, all of whose words are zero. By then every load has been waited for by who uses it, and
consumers wait for their stores.

Handshakes: mbarriers for what TMA fills and for tiles; named barriers (inline assembly) for stages that consumers give back, since an
``mbarrier.arrive`` of Gluon synchronises all the warps of its role first. Every role sees the same tiles in the same order and counts
its stages itself. Nothing is read beyond a tile's last page; TMA clips whatever page id the table holds to the cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tkernels._gluon import depart, enter
from tkernels.attention._prefill_sm90.consumer import consumer
from tkernels.attention._prefill_sm90.loaders import cleaner, loader
from tkernels.attention._prefill_sm90.scheduler import scheduler
from tkernels.attention._prefill_sm90.shared import FIELDS, GIVE_RAW, HANDSHAKE, OUT_COLUMNS, ROWS, WARPGROUPS
from tkernels.attention._prefill_sm90.transposer import transposer
from tkernels.attention._sm90_gluon import FIRST_BARRIER, WORK_STAGES, Stages, Work


@gluon.jit(do_not_specialize=["num_seqs", "capacity", "window", "stride_bt", "stride_lt", "stride_lh"])
def prefill_sm90_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, counter_ptr,
    num_seqs, capacity, window, qk_scale, softcap, v_factor, stride_bt, stride_ot, stride_oh, stride_lt, stride_lh,
    DTYPE: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    MIN_QUERY: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, RAW_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, WORKER_REGISTERS: gl.constexpr, TRANSPOSER_REGISTERS: gl.constexpr, OUT_DTYPE: gl.constexpr,
    NARROW: gl.constexpr, CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, HALF_DIAGONAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """q_desc: [tokens, heads, HEAD_DIM] in boxes of [ROWS, 1, DIM], out_desc in boxes of min(DIM, OUT_COLUMNS) columns. k_desc, v_desc:
    [pages, PAGE, kv_heads, HEAD_DIM] in boxes of [1, min(PAGE, BLOCK_N), 1, DIM]. TMA brings zeros for the columns from HEAD_DIM to DIM
    and does not write them. counter_ptr: an int32 that is zero and is zero again at the end. qk_scale, softcap: in base 2. RAW_STAGES: of
    8-bit V before it is transposed; V_STAGES: of what the consumers read."""
    enter(PDL)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], DTYPE)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_shared = gl.allocate_shared_memory(DTYPE, [WARPGROUPS, ROWS, DIM], layout)
    k_blocks = gl.allocate_shared_memory(DTYPE, [K_STAGES, BLOCK_N, DIM], layout)
    EIGHT: gl.constexpr = DTYPE.primitive_bitwidth == 8
    if EIGHT:  # V as TMA brings it, and transposed
        raw_blocks = gl.allocate_shared_memory(DTYPE, [RAW_STAGES, BLOCK_N, DIM], layout)
        v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DIM, BLOCK_N], DTYPE)
        v_blocks = gl.allocate_shared_memory(DTYPE, [V_STAGES, DIM, BLOCK_N], v_layout)
    else:
        v_blocks = gl.allocate_shared_memory(DTYPE, [V_STAGES, BLOCK_N, DIM], layout)
    # a 64-byte swizzle needs half the address registers of a 128-byte one, and its stores meet no bank conflicts either
    columns: gl.constexpr = min(DIM, OUT_COLUMNS)
    out_shared = gl.allocate_shared_memory(OUT_DTYPE, [WARPGROUPS, ROWS, columns], gl.NVMMASharedLayout(64, 16, rank=2))
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier)
    V_FULL: gl.constexpr = V_STAGES if EIGHT else 2 * V_STAGES  # the second half is the cleaner's
    v_full = gl.allocate_shared_memory(gl.int64, [V_FULL, 1], barrier)
    tile_full = gl.allocate_shared_memory(gl.int64, [WORK_STAGES, 1], barrier)
    tile_empty = gl.allocate_shared_memory(gl.int64, [WORK_STAGES, 1], barrier)
    words = gl.allocate_shared_memory(gl.int32, [WORK_STAGES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=WARPGROUPS)
    for stage in gl.static_range(WORK_STAGES):
        mbarrier.init(tile_full.index(stage), count=1)
        mbarrier.init(tile_empty.index(stage), count=WARPGROUPS + 3)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(V_FULL):
        mbarrier.init(v_full.index(stage), count=1)
    tiles = Work(words, tile_full, tile_empty)
    ks = Stages(k_blocks, k_full)
    vs = Stages(v_blocks, v_full)
    RAW_BARRIER: gl.constexpr = FIRST_BARRIER + K_STAGES + V_STAGES
    if EIGHT:
        raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], barrier)
        for stage in gl.static_range(RAW_STAGES):
            mbarrier.init(raw_full.index(stage), count=1)
        raw = Stages(raw_blocks, raw_full)
    else:
        raw = vs
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
                    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, 0, DTYPE, HEAD_DIM, DIM, BLOCK_N, K_STAGES, V_STAGES,
                    NARROW, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HALF_DIAGONAL,
                ),
            ),
            (
                consumer,
                (
                    out_desc, out_ptr, lse_ptr, sinks_ptr, qk_scale, softcap, v_factor, window, stride_ot, stride_oh, stride_lt, stride_lh,
                    q_shared, out_shared, q_full, q_empty, ks, vs, tiles, 1, DTYPE, HEAD_DIM, DIM, BLOCK_N, K_STAGES, V_STAGES,
                    NARROW, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, HALF_DIAGONAL,
                ),
            ),
            (
                loader,
                (k_desc, table_ptr, window, ks, tiles, FIRST_BARRIER, HANDSHAKE, K_STAGES, False, GROUP, DIM, PAGE, BLOCK_N, HAS_WINDOW),
            ),
            (
                loader,
                (
                    v_desc, table_ptr, window, raw, tiles, RAW_BARRIER if EIGHT else FIRST_BARRIER + K_STAGES,
                    GIVE_RAW if EIGHT else HANDSHAKE, RAW_STAGES if EIGHT else V_STAGES, not EIGHT, GROUP, DIM, PAGE, BLOCK_N, HAS_WINDOW,
                ),
            ),
            (
                transposer,
                (raw, vs, tiles, window, RAW_BARRIER, FIRST_BARRIER + K_STAGES, DIM, BLOCK_N, RAW_STAGES, V_STAGES, HAS_WINDOW),
            ) if EIGHT else (cleaner, (vs, tiles, window, DTYPE, DIM, BLOCK_N, V_STAGES, HAS_WINDOW)),
            (
                scheduler,
                (
                    q_desc, cu_ptr, lens_ptr, counter_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, tiles,
                    HEADS, GROUP, DIM, BLOCK_N, MIN_QUERY, CAUSAL, HAS_WINDOW,
                ),
            ),
        ],
        [4, 1, 1, 4 if EIGHT else 1, 1],
        [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, TRANSPOSER_REGISTERS if EIGHT else WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
    depart(PDL)
