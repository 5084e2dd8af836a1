"""What happens to the scores of a block: softmax, and weights as operands of P · V."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels.attention._prefill_sm90.shared import mma_layout
from tkernels.attention._sm90_gluon import cap


@gluon.jit
def hide_unseen(s, position, key, window, HAS_WINDOW: gl.constexpr):
    """Scores s [ROWS, keys], -inf of keys after ``position`` [ROWS] and of those before the window."""
    visible = key[None, :] <= position[:, None]
    if HAS_WINDOW:
        visible = visible & (key[None, :] > position[:, None] - window)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def softmax(
    s, m, l, position, key, qk_scale, softcap, window,
    FIRST: gl.constexpr, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Scores s [ROWS, keys] of one block → (p, m, l, factor of what was summed before).

    m: running maximum of the scores (with a soft cap: of the capped ones, in base 2); l: running sum of p = 2^(scaled score - maximum).
    """
    if HAS_SOFTCAP:
        s = cap(s, qk_scale, softcap)
        qk_scale = 1.0
    if MASKED:
        s = hide_unseen(s, position, key, window, HAS_WINDOW)
    m_new = gl.max(s, 1)
    if not FIRST:
        m_new = gl.maximum(m, m_new)
    base = m_new * qk_scale
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    p = gl.exp2(s * qk_scale - base[:, None])
    l_new = gl.sum(p, 1)
    factor = base
    if not FIRST:
        factor = gl.exp2(m * qk_scale - base)
        l_new = l * factor + l_new
    return p, m_new, l_new, factor


@gluon.jit
def round_weights(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """p rounded: the left operand of P · V."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 2))
