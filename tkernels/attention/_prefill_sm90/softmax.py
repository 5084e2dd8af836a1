"""What happens to the scores of a block: softmax, and weights as operands of P · V."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels.attention._prefill_sm90.shared import ROWS, SHIFT, mma_layout
from tkernels.attention._sm90_gluon import cap


@gluon.jit
def _max(s, CHAINS: gl.constexpr):
    """The largest score of each row. CHAINS: by four chains of comparisons in a thread, not by one: they are what the exponentials of a
    block wait for, and products of 8 bits leave less to do meanwhile."""
    if CHAINS:
        KEYS: gl.constexpr = s.shape[1]
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        four = gl.max(s.reshape([ROWS, 2, KEYS // 16, 4, 2]), 2)  # half, (of its groups of 8 keys), t, which of the pair
        return gl.convert_layout(gl.max(gl.max(gl.max(four, 3), 1), 1), rows)
    else:
        return gl.max(s, 1)


@gluon.jit
def softmax(
    s, m, l, position, key, qk_scale, softcap, window,
    FIRST: gl.constexpr, MASKED: gl.constexpr, EIGHT: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores s [ROWS, keys] of one block → (p, m, l, factor of what was summed before).

    m: running maximum of the scores (with a soft cap: of the capped ones, in base 2); l: running sum of p = 2^(scaled score - maximum),
    which is 2^SHIFT times as large where it is rounded to 8 bits (EIGHT).
    """
    if HAS_SOFTCAP:
        s = cap(s, qk_scale, softcap)
        qk_scale = 1.0
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
    m_new = _max(s, EIGHT)
    if not FIRST:
        m_new = gl.maximum(m, m_new)
    base = m_new * qk_scale
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    if EIGHT:
        p = gl.exp2(s * qk_scale - (base - SHIFT)[:, None])
    else:
        p = gl.exp2(s * qk_scale - base[:, None])
    l_new = gl.sum(p, 1)
    factor = base
    if not FIRST:
        factor = gl.exp2(m * qk_scale - base)
        l_new = l * factor + l_new
    return p, m_new, l_new, factor


@gluon.jit
def all_sums(l):
    """The larger sum of a thread's two rows, 0 for NaN. Known when all exponentials are."""
    a, b = l.reshape([4, 2, 8]).permute((0, 2, 1)).split()
    return gl.maximum(gl.maximum(a, b), 0.0).to(gl.int32, bitcast=True)


@gluon.jit
def round_weights(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """p rounded: the left operand of P · V; of 8 bits its words of four [ROWS, keys / 4], as single bytes would be carried one a register.

    Of 8 bits, the operand holds keys 4t to 4t + 3 of 16 in the thread that has the scores of keys 2t, 2t + 1, 8 + 2t and 9 + 2t. So keys
    change their order, as those of V did in the transposer, and nothing moves between threads.
    """
    if DTYPE.primitive_bitwidth == 8:
        KEYS: gl.constexpr = p.shape[1]
        p = p.reshape([ROWS, KEYS // 32, 2, 2, 4, 2]).permute((0, 1, 4, 3, 5, 2))  # t, half, which of the pair, group of 16
        even, odd = p.split()
        first, second = odd.split()
        p = gl.join(even, gl.join(second, first)).permute((0, 1, 5, 2, 3, 4))  # group, t, half, which
        first, second = p.split()
        a, c = first.split()
        b, d = second.split()
        word = gl.inline_asm_elementwise(
            "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }",
            "=r,f,f,f,f", [a, b, c, d], gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return word.reshape([ROWS, KEYS // 4])
    else:
        return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 2))


@gluon.jit
def operand(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """The left operand of P · V of what ``round_weights`` gave."""
    if DTYPE.primitive_bitwidth == 8:
        p = gl.join(p, p)
        p = gl.join(p, p).reshape([ROWS, 4 * p.shape[1]])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 4))
        p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [p], gl.float8e4nv, is_pure=True, pack=4)
    return p
