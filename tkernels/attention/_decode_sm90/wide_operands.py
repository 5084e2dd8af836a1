"""The operands of products over a 16-bit cache, for the tensor core instructions of one warp, from shared memory: by ``ldmatrix``.

A warp takes KEYS keys of a block: as the rows of K, and transposed on the way as the columns of Vᵀ. Nothing is permuted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tkernels.attention._decode_sm90.fp8_operands import bits, key_warps, warp_bases


@gluon.constexpr_function
def _operand_layout(ROWS, COLUMNS, mma, KEYS_ARE_ROWS):
    """[rows, columns] of keys and dims: a warp's 16-bit operand A of m16n8k16. Of lane (g, t): rows g and g + 8, columns 2t, 2t + 1 and
    eight further on."""
    rows = ROWS // key_warps(mma) if KEYS_ARE_ROWS else ROWS
    columns = COLUMNS if KEYS_ARE_ROWS else COLUMNS // key_warps(mma)
    registers = [[0, 1], [8, 0], [0, 8]]
    registers += [[0, 16 << i] for i in range(bits(columns // 16))] + [[16 << i, 0] for i in range(bits(rows // 16))]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = warp_bases(mma, rows, 0) if KEYS_ARE_ROWS else warp_bases(mma, columns, 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, COLUMNS])


@gluon.jit
def load_k16(block, mma: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr):
    """K of a block [keys, D] → the operand [warps, KEYS, D]."""
    WARPS: gl.constexpr = key_warps(mma)
    k = block.load(_operand_layout(WARPS * KEYS, D, mma, True)).reshape([WARPS, KEYS, D])
    return gl.convert_layout(k, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def first_product(k, q, zeros):
    """K · qᵀ, k [warps, KEYS, D] and q [warps, D, N], over each half of D apart: a chain of half as many instructions."""
    WARPS: gl.constexpr = k.shape[0]
    KEYS: gl.constexpr = k.shape[1]
    HALF: gl.constexpr = k.shape[2] // 2
    a, b = gl.split(k.reshape([WARPS, KEYS, 2, HALF]).permute([0, 1, 3, 2]))
    c, d = gl.split(q.reshape([WARPS, 2, HALF, q.shape[2]]).permute([0, 2, 3, 1]))
    a = gl.convert_layout(a, k.type.layout, assert_trivial=True)
    b = gl.convert_layout(b, k.type.layout, assert_trivial=True)
    c = gl.convert_layout(c, q.type.layout, assert_trivial=True)
    d = gl.convert_layout(d, q.type.layout, assert_trivial=True)
    return mma_v2(a, c, zeros) + mma_v2(b, d, zeros)


@gluon.jit
def _masked(v, mask):
    """v where the bits of mask are set, else 0. Two keys of a dim, which share a register, at once."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [v, mask], dtype=v.dtype, is_pure=True, pack=2)


@gluon.jit
def seen_keys(begin, end, mma: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr):
    """For ``load_v16``: all bits of the keys from ``begin`` on and before ``end``, of the others none."""
    layout: gl.constexpr = gl.SliceLayout(0, _operand_layout(D, key_warps(mma) * KEYS, mma, False))
    key = gl.arange(0, key_warps(mma) * KEYS, layout)
    return gl.where((key >= begin) & (key < end), -1, 0).to(gl.int16)


@gluon.jit
def load_v16(block, seen, mma: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """V of a block [keys, D] → the operand Vᵀ [warps, D, KEYS].

    MASKED: keys that are not seen become 0: what no query may see may be NaN, and 0 · NaN is NaN."""
    WARPS: gl.constexpr = key_warps(mma)
    layout: gl.constexpr = _operand_layout(D, WARPS * KEYS, mma, False)
    v = block.permute([1, 0]).load(layout)
    if MASKED:
        v = _masked(v, seen[None, :] + gl.zeros([D, WARPS * KEYS], gl.int16, layout))
    v = v.reshape([D, WARPS, KEYS]).permute([1, 0, 2])
    return gl.convert_layout(v, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def load_q16(q_block, mma: gl.constexpr):
    """q [N, D] in shared memory → the operand [warps, D, N]."""
    N: gl.constexpr = q_block.shape[0]
    D: gl.constexpr = q_block.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    q = q_block.permute([1, 0]).load(gl.SliceLayout(0, operand)).expand_dims(0).broadcast_to([key_warps(mma), D, N])
    return gl.convert_layout(q, operand, assert_trivial=True)
