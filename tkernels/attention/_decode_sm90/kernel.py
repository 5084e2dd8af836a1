"""The Gluon kernel of decode_sm90.py, one function a role. Triton's interpreter cannot run it: decode.py is its twin and its oracle.

A program (one per multiprocessor) is four roles that work on a stream of segments, a segment being consecutive blocks of one sequence
for one KV head:

- the scheduler (one warp) finds the program's range, cuts it into segments, writes what the others must know about each into shared
  memory and loads its queries;
- two loaders (one warp each) stream the K and the V blocks through rings of stages by TMA;
- the consumer (four warps) computes, and folds what a cut sequence has left in the workspace.

Handshakes as in _prefill_sm90/kernel.py: mbarriers for what TMA fills and for segments, named barriers for stages that are given back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels._gluon import depart, enter
from tkernels.attention._decode_sm90.consumer import consumer
from tkernels.attention._decode_sm90.loader import loader
from tkernels.attention._decode_sm90.scheduler import scheduler
from tkernels.attention._decode_sm90.shared import HANDSHAKE, Q_STAGES, QUERIES, ROWS, make_rings
from tkernels.attention._sm90_gluon import FIRST_BARRIER


@gluon.jit(do_not_specialize=["num_seqs", "capacity", "window", "stride_bt", "stride_lt", "stride_lh"])
def decode_sm90_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    part_ptr, state_ptr, arrivals_ptr,
    num_seqs, capacity, window, qk_scale, softcap, v_factor, stride_ks, stride_vs,
    stride_bt, stride_ot, stride_oh, stride_lt, stride_lh,
    DTYPE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_ROWS: gl.constexpr, SLOT_ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
    LEAVES: gl.constexpr, BY_RANGE: gl.constexpr, MIN_QUERIES: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_K_SCALE: gl.constexpr, HAS_V_SCALE: gl.constexpr, HAS_LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """q_desc: [tokens, heads, HEAD_DIM] in boxes of [QUERIES, GROUP_ROWS, DIM]. k_desc, v_desc: [pages, PAGE, kv_heads, HEAD_DIM] in boxes
    of [1, min(PAGE, BLOCK_N), 1, DIM]. TMA brings zeros for the columns from HEAD_DIM to DIM.

    Each (owner, KV head), an owner being a sequence or with BY_RANGE a range, has LEAVES slots of SLOT_ROWS rows in part_ptr [rows, DIM]
    and state_ptr [rows, 2], and in arrivals_ptr an int32 that is zero and is zero again at the end. qk_scale, softcap: in base 2."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], DTYPE)
    q_shared = gl.allocate_shared_memory(DTYPE, [Q_STAGES, ROWS, DIM], layout)
    k_blocks = gl.allocate_shared_memory(DTYPE, [K_STAGES, BLOCK_N, DIM], layout)
    v_blocks = gl.allocate_shared_memory(DTYPE, [V_STAGES, BLOCK_N, DIM], layout)
    q_full, q_empty, ks, vs, segments = make_rings(k_blocks, v_blocks)
    enter(PDL)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, part_ptr, state_ptr, arrivals_ptr,
                    qk_scale, softcap, v_factor, window, stride_ks, stride_vs, stride_ot, stride_oh, stride_lt, stride_lh,
                    q_shared, q_full, q_empty, ks, vs, segments,
                    KV_HEADS, GROUP, GROUP_ROWS, SLOT_ROWS, HEAD_DIM, DIM, BLOCK_N, DTYPE, K_STAGES, V_STAGES, LEAVES,
                    CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_K_SCALE, HAS_V_SCALE, HAS_LSE,
                ),
            ),
            (loader, (k_desc, table_ptr, ks, segments, FIRST_BARRIER, HANDSHAKE, K_STAGES, DIM, PAGE, BLOCK_N)),
            (loader, (v_desc, table_ptr, vs, segments, FIRST_BARRIER + K_STAGES, HANDSHAKE, V_STAGES, DIM, PAGE, BLOCK_N)),
            (
                scheduler,
                (
                    q_desc, table_ptr, cu_ptr, lens_ptr, num_seqs, capacity, window, stride_bt, q_shared, q_full, q_empty, segments,
                    KV_HEADS, GROUP, GROUP_ROWS, DIM, PAGE, BLOCK_N, PROGRAMS, LEAVES, 1, 1, BY_RANGE,
                    MIN_QUERIES, QUERIES, HAS_WINDOW, 128,
                ),
            ),
        ],
        [1, 1, 1],
        [64, 64, 64],  # registers a thread; the consumer takes what it needs
    )  # fmt: skip
    depart(PDL)
