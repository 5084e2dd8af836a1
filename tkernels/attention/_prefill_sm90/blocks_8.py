"""One block of keys in a consumer, of 8 bits, as in blocks.py: its products, and its stages given back."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tkernels.attention._prefill_sm90.shared import HANDSHAKE, ROWS, mma_layout
from tkernels.attention._prefill_sm90.softmax_8 import all_sums, first_weights, operand, owned, round_weights, threads, times, weights
from tkernels.attention._prefill_sm90.stages import give_values, place, values
from tkernels.attention._sm90_gluon import FIRST_BARRIER, meet


@gluon.constexpr_function
def _arrive_after_assembly(threads):
    return f"{{ .reg .b32 n; shr.u32 n, $1, 31; add.u32 n, n, $2; bar.arrive n, {threads}; mov.b32 $0, $2; }}"


@gluon.jit
def _arrive_after(x, barrier, THREADS: gl.constexpr):
    """bar.arrive at a named barrier once ``x`` is known, of which each thread holds one, never negative: its sign is added to the number.

    ptxas keeps the order of arrivals and waits for products, not that of other instructions around them.
    """
    number = gl.full(x.shape, 0, gl.int32, x.type.layout) + barrier
    gl.inline_asm_elementwise(_arrive_after_assembly(THREADS), "=r,r,r", [x, number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _first_weights(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    s = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    sees = gl.convert_layout(sees, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    return first_weights(s, sees, key, qk_scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP)


@gluon.jit
def first_block_8(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The block of a tile that is computed first, its last one: (p in words, base, l). Always masked."""
    p, base, l = _first_weights(q, k, sees, stage, qk_scale, softcap, window, LAYOUT, KEYS, HAS_WINDOW, HAS_SOFTCAP)
    return round_weights(p), base, l


@gluon.jit
def first_half_block_8(
    q, k, sees, stage, qk_scale, softcap, window,
    LAYOUT: gl.constexpr, KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """The same where no row sees the right half of the block: half the products and exponentials."""
    half: gl.constexpr = mma_layout(KEYS // 2, q.dtype)
    p, base, l = _first_weights(q, k.slice(0, KEYS // 2), sees, stage, qk_scale, softcap, window, half, KEYS // 2, HAS_WINDOW, HAS_SOFTCAP)
    whole = threads(gl.full([ROWS, KEYS], 0.0, gl.float32, LAYOUT))  # of its layout alone something remains
    # zeros join the words, not the weights: ptxas 12.8 makes one byte pair of cvt.e4m3x2 of constants what a register happens to hold
    words = round_weights(p)
    words = gl.join(words, gl.full(words.shape, 0, gl.int32, words.type.layout)).permute((0, 2, 1)).reshape([ROWS, KEYS // 4])
    words = gl.convert_layout(words, round_weights(whole).type.layout, assert_trivial=True)
    return words, owned(base, whole), owned(l, whole)


@gluon.jit
def next_block_8(
    q, ks, vs, i, acc, base, l, p, position, key, qk_scale, softcap, window, zeros,
    MASKED: gl.constexpr, DTYPE: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, NARROW: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Block i of this role: its Q · Kᵀ is issued, then the P · V of block i - 1, under which the weights of block i are computed."""
    stage, parity = place(i, K_STAGES)
    v_stage, v_parity = place(i - 1, V_STAGES)
    mbarrier.wait(ks.full.index(stage), parity)
    s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(vs.full.index(v_stage), v_parity)
    acc = warpgroup_mma(operand(p, DTYPE, DIM), values(vs, v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p_new, base, l, factor = weights(s, base, l, position, key, qk_scale, softcap, window, MASKED, HAS_WINDOW, HAS_SOFTCAP)
    _arrive_after(all_sums(l), FIRST_BARRIER + stage, HANDSHAKE)  # not the exponentials after the wait for P · V
    acc, p, p_new = warpgroup_mma_wait(0, [acc, p, p_new])
    give_values(vs, v_stage, K_STAGES)
    return times(acc, factor), base, l, round_weights(p_new)
