"""One block of keys in a consumer: its products, and its stages given back."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tkernels.attention._prefill_sm90.shared import GIVE_TRANSPOSED, HANDSHAKE, ROWS, mma_layout
from tkernels.attention._prefill_sm90.softmax import all_sums, operand, round_weights, softmax
from tkernels.attention._sm90_gluon import FIRST_BARRIER, meet


@gluon.jit
def values(vs, stage):
    """The block of V in ``stage`` as [keys, columns]; of 8 bits it lies transposed."""
    block = vs.blocks.index(stage)
    if block.dtype.primitive_bitwidth == 8:
        block = block.permute((1, 0))
    return block


@gluon.jit
def give_values(vs, stage, K_STAGES: gl.constexpr):
    THREADS: gl.constexpr = GIVE_TRANSPOSED if vs.blocks.dtype.primitive_bitwidth == 8 else HANDSHAKE
    meet("arrive", FIRST_BARRIER + K_STAGES + stage, THREADS)


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
    EIGHT: gl.constexpr = q.dtype.primitive_bitwidth == 8
    p, m, l, _factor = softmax(s, none, none, sees, key, qk_scale, softcap, window, True, True, EIGHT, HAS_WINDOW, HAS_SOFTCAP)
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
    MASKED: gl.constexpr, DTYPE: gl.constexpr, DIM: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, NARROW: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Block i of this role: its Q · Kᵀ is issued, then the P · V of block i - 1, under which the softmax of block i runs.

    p is carried in fp32 and rounded under the Q · Kᵀ, which is faster; with NARROW (of 16 bits only) it is carried rounded, which takes 32
    registers fewer at the peak (p, s and acc at once).
    """
    o_layout: gl.constexpr = mma_layout(DIM, DTYPE)
    EIGHT: gl.constexpr = DTYPE.primitive_bitwidth == 8
    stage = i % K_STAGES
    v_stage = (i - 1) % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    s = warpgroup_mma(q, ks.blocks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_narrow = p if NARROW else round_weights(p, DTYPE, DIM)
    mbarrier.wait(vs.full.index(v_stage), ((i - 1) // V_STAGES) & 1)
    acc = warpgroup_mma(operand(p_narrow, DTYPE, DIM), values(vs, v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    if not EIGHT:
        meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    p, m, l, factor = softmax(s, m, l, position, key, qk_scale, softcap, window, False, MASKED, EIGHT, HAS_WINDOW, HAS_SOFTCAP)
    if EIGHT:
        _arrive_after(all_sums(l), FIRST_BARRIER + stage, HANDSHAKE)  # not the exponentials after the wait for P · V
    if NARROW:
        p = round_weights(p, DTYPE, DIM)
        acc, p_narrow = warpgroup_mma_wait(0, [acc, p_narrow])
    else:
        acc, p_narrow, p = warpgroup_mma_wait(0, [acc, p_narrow, p])
    give_values(vs, v_stage, K_STAGES)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
    return acc, m, l, p


@gluon.jit
def pass_block(ks, vs, i, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Give block i back unread, after it has come: an arrival before the loader has met the one before would count for that."""
    stage = i % K_STAGES
    v_stage = i % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    mbarrier.wait(vs.full.index(v_stage), (i // V_STAGES) & 1)
    give_values(vs, v_stage, K_STAGES)
    return i + 1
