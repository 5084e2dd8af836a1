"""The operands of products over an e4m3 cache, for the tensor core instructions of one warp, from shared memory.

The order of what is summed over, and of rows, is free. So a thread takes what lies together: of each of its keys a quarter of the
dimensions of K (q is permuted alike), or an eighth of those of V (the output is permuted back where a leaf ends). A thread's bytes then are
its registers of the operand, read 16 at a time; the swizzle of TMA makes that free of conflicts.

V's rows are wanted in pairs of keys: two bytes of each are interleaved while they are widened to fp16, which holds every e4m3 value. P
leaves the first product with a thread per key, and is wanted with a thread per column: ``movmatrix`` transposes 8 × 8.

Of a warp's 32 lanes, g is lane // 4 and t is lane % 4, as in the description of mma.m16n8k16 in the PTX manual.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def bits(n):
    """log2 of a power of two."""
    return n.bit_length() - 1


@gluon.constexpr_function
def key_warps(mma):
    """Warps that each have keys of their own."""
    return mma.warps_per_cta[0]


@gluon.constexpr_function
def column_warps(mma):
    """Warps that share the columns of the same keys: eight to each in turn."""
    return mma.warps_per_cta[2]


@gluon.constexpr_function
def warp_bases(mma, keys, axis):
    """Of a layout [keys, dims] (axis 0) or [dims, keys] (axis 1): ``keys`` to each warp, those that share columns the same ones."""
    own = [[keys << i, 0] if axis == 0 else [0, keys << i] for i in range(bits(key_warps(mma)))]
    return [[0, 0]] * bits(column_warps(mma)) + own


@gluon.constexpr_function
def _k_layout(BLOCK_N, D, mma):
    """[keys, dims]: lane (g, t) has dims t · D/4 … of keys g, g + 8, … of its warp."""
    keys = BLOCK_N // key_warps(mma)
    registers = [[0, 1 << i] for i in range(bits(D // 4))] + [[1 << i, 0] for i in range(3, bits(keys))]
    lanes = [[0, D // 4], [0, D // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases(mma, keys, 0), [], [BLOCK_N, D])


@gluon.constexpr_function
def _v_layout(BLOCK_N, D, mma):
    """[keys, dims]: lane (g, t) has dims g · D/8 … of keys 2t, 2t + 1, 2t + 8, … of its warp; four dims of two keys lie together."""
    keys = BLOCK_N // key_warps(mma)
    registers = [[0, 1], [0, 2], [1, 0]] + [[0, 1 << i] for i in range(2, bits(D // 8))] + [[1 << i, 0] for i in range(3, bits(keys))]
    lanes = [[2, 0], [4, 0], [0, D // 8], [0, D // 4], [0, D // 2]]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases(mma, keys, 0), [], [BLOCK_N, D])


@gluon.jit
def _widen_k(k):
    """e4m3 → fp16, four dims of a key at once."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [k], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _widen_v(v):
    """e4m3 → fp16, four dims of two keys at once: in, dims of one key and then of the other; out, both keys' first dim, their second, …"""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 x, y; .reg .b16 a, b, c, d;
        prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; mov.b32 {a, b}, x; mov.b32 {c, d}, y;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }""",
        "=r,=r,=r,=r,r,r", [v], dtype=gl.float16, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def _widen_v_masked(v, mask):
    """``_widen_v`` of v where the bits of mask are set, else 0. mask: a register an element, of which each key's first one is read."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 x, y, p, q; .reg .b16 a, b, c, d; and.b32 p, $4, $6; and.b32 q, $5, $10;
        prmt.b32 x, p, q, 0x5140; prmt.b32 y, p, q, 0x7362; mov.b32 {a, b}, x; mov.b32 {c, d}, y;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [v, mask], dtype=gl.float16, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def load_k(block, mma: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr):
    """K of a block [keys, D] → the operand [warps, KEYS, D], its dims permuted: thread t of a product's four has D/4 that lie together."""
    WARPS: gl.constexpr = key_warps(mma)
    layout: gl.constexpr = _k_layout(WARPS * KEYS, D, mma)
    k = _widen_k(block.load(layout))
    k = k.reshape([WARPS, KEYS, 4, D // 16, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape([WARPS, KEYS, D])
    return gl.convert_layout(k, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def load_v(block, begin, end, mma: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """V of a block [keys, D] → the operand Vᵀ [warps, D, KEYS], whose dims are permuted: row 16 j + 8 h + g is dim g · D/8 + 2 j + h.

    MASKED: keys before ``begin`` and from ``end`` on become 0: what no query may see may be NaN, and 0 · NaN is NaN."""
    WARPS: gl.constexpr = key_warps(mma)
    layout: gl.constexpr = _v_layout(WARPS * KEYS, D, mma)
    v = block.load(layout)
    if MASKED:
        row = gl.arange(0, WARPS * KEYS, gl.SliceLayout(1, layout))
        keep = (row >= begin) & (row < end)
        v = _widen_v_masked(v, gl.where(keep, -1, 0)[:, None] + gl.zeros([WARPS * KEYS, D], gl.int32, layout))
    else:
        v = _widen_v(v)
    v = v.reshape([WARPS, KEYS // 16, 2, 4, 2, 8, D // 32, 2, 2])  # keys by 16, by 8, t, (dim 1); g, dims by 4, (dim 0), (key)
    v = v.permute([0, 6, 4, 7, 5, 1, 2, 3, 8]).reshape([WARPS, D, KEYS])
    return gl.convert_layout(v, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def transpose(p, mma: gl.constexpr):
    """P [warps, KEYS, N] in 16 bits as the first product leaves it → as the operand of the second."""
    WARPS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    N: gl.constexpr = p.shape[2]
    p = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)
    p = p.reshape([WARPS, KEYS // 8, 8, N // 8, 8]).permute([0, 1, 4, 3, 2]).reshape([WARPS, KEYS, N])
    return gl.convert_layout(p, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.constexpr_function
def _q_layout(N, D, mma):
    """[columns, dims]: lane (g, t) has dims t · D/4 … of columns g, g + 8, … of its warp; those of other keys have the same."""
    split = bits(column_warps(mma))
    registers = [[0, 1 << i] for i in range(bits(D // 4))] + [[1 << i, 0] for i in range(3 + split, bits(N))]
    lanes = [[0, D // 4], [0, D // 2], [1, 0], [2, 0], [4, 0]]
    warps = [[8 << i, 0] for i in range(split)] + [[0, 0]] * bits(key_warps(mma))
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [N, D])


@gluon.jit
def load_q(q_block, mma: gl.constexpr):
    """q [N, D] in shared memory → (the operand [warps, D, N] in fp16, over a power of two; that power [N]).

    The power is the largest element's (2^-60 at least, 1 of zeros), so that all fit fp16 and only what is far below it is rounded."""
    N: gl.constexpr = q_block.shape[0]
    D: gl.constexpr = q_block.shape[1]
    WARPS: gl.constexpr = key_warps(mma)
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    layout: gl.constexpr = _q_layout(N, D, mma)
    q = q_block.load(layout).to(gl.float32)
    largest = gl.max(gl.abs(q), 1)
    exponent = gl.minimum(gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 67), 253)
    exponent = gl.where(largest == 0.0, 127, exponent)
    power = (exponent << 23).to(gl.float32, bitcast=True)
    q = (q * ((254 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
    q = q.reshape([N, 4, D // 16, 2, 2]).permute([2, 3, 1, 4, 0]).reshape([D, N])
    q = gl.convert_layout(q, gl.SliceLayout(0, operand), assert_trivial=True).expand_dims(0).broadcast_to([WARPS, D, N])
    return gl.convert_layout(q, operand, assert_trivial=True), gl.convert_layout(power, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
