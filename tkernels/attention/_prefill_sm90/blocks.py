"""One block of keys in a consumer, of 16 bits: its products, and its stages given back."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tkernels.attention._prefill_sm90.shared import HANDSHAKE, ROWS, mma_layout
from tkernels.attention._prefill_sm90.softmax import round_weights, softmax
from tkernels.attention._prefill_sm90.stages import give_values, values
from tkernels.attention._sm90_gluon import FIRST_BARRIER, meet


@gluon.jit
def first_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The block of a tile that is computed first, its last one: (p, m, l). Always masked."""
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    sees = gl.convert_layout(sees, gl.SliceLayout(1, LAYOUT))
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    p, m, l, _factor = softmax(s, none, none, sees, key, qk_scale, softcap, window, True, True, HAS_WINDOW, HAS_SOFTCAP)
    return p, m, l


@gluon.jit
def first_half_block(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The same where no row sees the right half of the block: half the products and exponentials."""
    half: gl.constexpr = mma_layout(KEYS // 2, q.dtype)
    p, m, l = first_block(q, k.slice(0, KEYS // 2), sees, stage, qk_scale, softcap, window, half, KEYS // 2, HAS_WINDOW, HAS_SOFTCAP)
    p = gl.join(p, gl.zeros([ROWS, KEYS // 2], gl.float32, half)).permute((0, 2, 1)).reshape([ROWS, KEYS])
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return gl.convert_layout(p, LAYOUT), gl.convert_layout(m, rows), gl.convert_layout(l, rows)


@gluon.jit
def next_block(
    q, ks, vs, i, acc, m, l, p, position, key, qk_scale, softcap, window, zeros,
    MASKED: gl.constexpr, DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, NARROW: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Block i of this role: its Q · Kᵀ is issued, then the P · V of block i - 1, under which the softmax of block i runs.

    p is carried in fp32 and rounded under the Q · Kᵀ, which is faster; with NARROW it is carried rounded, which takes 32 registers fewer at
    the peak (p, s and acc at once).
    """
    o_layout: gl.constexpr = mma_layout(DIM, DTYPE)
    stage = i % K_STAGES
    v_stage = (i - 1) % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_narrow = p if NARROW else round_weights(p, DTYPE, DIM)
    mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
    acc = warpgroup_mma(p_narrow, values(vs, v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    p, m, l, factor = softmax(s, m, l, position, key, qk_scale, softcap, window, False, MASKED, HAS_WINDOW, HAS_SOFTCAP)
    if NARROW:
        p = round_weights(p, DTYPE, DIM)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
    else:
        acc, p_narrow, p = warpgroup_mma_wait(0, [acc, p_narrow, p])
    give_values(vs, v_stage, K_STAGES)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return acc, m, l, p
