"""What the decode and the prefill kernel share: page addresses, logits, and the fold of two softmax states.

A softmax state over some keys is (m, l, acc): the largest logit in base 2, the sum of 2^(logit - m) and the sum of 2^(logit - m) · V.
The empty state is (-inf, 0, 0).
"""

from __future__ import annotations

import torch

from tkernels._triton import INTERPRETED, cast, dot, tl, triton

LOG2_E = 1.4426950408889634
FP8 = torch.float8_e4m3fn

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def read(ptr):
    """The int32 value(s) at ptr, which no kernel writes meanwhile.

    Inline assembly keeps the load out of the software pipeline: a ``tl.load`` that feeds the address of another becomes a stage of
    its own, with its own wait, and takes stages away from K and V. Page ids and lengths are in L1 after the first block.
    The pipeline reads ahead without a predicate, past the end of its loop too: callers clamp the address, not only the use.
    """
    if _INTERPRETED:
        value = tl.load(ptr)
    else:
        value = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=True, pack=1)
    return value


@triton.jit
def widen(x):
    """e4m3 as fp16, exactly. For tiles that a product reads along the axis that does not lie together in memory.

    "Not pure" keeps the compiler from widening after it has laid the tile out for the product: it would gather single bytes from shared
    memory, which halves the speed of the whole kernel (triton 3.6).
    """
    if _INTERPRETED:
        return x.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def scaled_rows(q, COMPUTE: tl.constexpr):
    """(rows of q [M, D] over their largest element, in COMPUTE; that element): fp8 keys are multiplied in fp16, which q may not fit."""
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    return cast(q.to(tl.float32) / largest[:, None], COMPUTE), largest


@triton.jit
def scaled_tile(
    q, head, scale, v_factor, k_scale_ptr, v_scale_ptr, stride_ks, stride_vs,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, NORMALISE_Q: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of a tile of prefill: (q [M, D] as it is multiplied, what makes logits of its products with keys [M], the factor of values)."""
    if HAS_K_SCALE:
        scale *= tl.load(k_scale_ptr + head * stride_ks)
    if HAS_V_SCALE:
        v_factor *= tl.load(v_scale_ptr + head * stride_vs)
    qk_scale = tl.full([q.shape[0]], 1.0, tl.float32) * scale
    if NORMALISE_Q:
        q, largest = scaled_rows(q, COMPUTE)
        qk_scale *= largest
    return q, qk_scale, v_factor


@triton.jit
def product(a, b, acc):
    """acc + a @ b, accumulated in fp32. fp32 operands are multiplied as three tf32 products on the tensor cores: about the accuracy
    of fp32, where exact fp32 products of this size would not fit the registers."""
    if _INTERPRETED or a.dtype != tl.float32:
        return dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def page_ids(table_row, start, offs_n, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 pages of the tokens ``start + offs_n`` (any shape); start is a multiple of BLOCK_N.

    ``last`` is the last valid token; later ones take its page, so that no page id beyond it is read (a padded table holds -1 there).
    """
    if PAGE % BLOCK_N == 0:  # a block of keys lies in one page: one id is read
        page = read(table_row + tl.minimum(start, last) // PAGE) + tl.zeros(offs_n.shape, tl.int32)
    else:
        page = read(table_row + tl.minimum(start + offs_n, last) // PAGE)
    return page


@triton.jit
def whole_page_ptrs(table_row, index, offs_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the page ids of the index-th block of keys lie, all of which are valid: one pointer if they lie in one page, else [BLOCK_N]."""
    if PAGE % BLOCK_N == 0:
        ptrs = table_row + index * BLOCK_N // PAGE
    elif BLOCK_N % PAGE == 0:
        ptrs = table_row + index * (BLOCK_N // PAGE) + offs_n // PAGE
    else:
        ptrs = table_row + (index * BLOCK_N + offs_n) // PAGE
    return ptrs


@triton.jit
def held(x):
    """x (int32), by a move. A loop's variable that is assigned another one of its variables as it is keeps its first value for ever
    where the loop is pipelined (triton 3.6)."""
    if _INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def page_slots(start, offs_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 slots of the tokens ``start + offs_n`` in their pages. Where pages divide blocks they do not depend on ``start``, so that
    offsets inside a page leave the loop: 64-bit arithmetic for every token costs more than the softmax."""
    if PAGE % BLOCK_N == 0:
        slot = start % PAGE + offs_n
    elif BLOCK_N % PAGE == 0:
        slot = offs_n % PAGE
    else:
        slot = (start + offs_n) % PAGE
    return slot


@triton.jit
def cap_logits(s, softcap):
    """softcap · tanh(s / softcap) for s and softcap in base 2. tanh by one exponential; both of its ends are right (±softcap)."""
    t = tl.math.exp2(tl.abs(s) * (-2.0 * 1.4426950408889634 / softcap))
    return tl.where(s < 0, -softcap, softcap) * ((1.0 - t) / (1.0 + t))


@triton.jit
def merge_states(m, l, acc, mb, lb, accb, AXIS: tl.constexpr):
    """Fold the state (mb, lb, accb) into (m, l, acc): m, l [M]; acc [M, D], or [D, M] with AXIS 0.

    AXIS: the axis of acc along which its m and l are repeated. Explicit fma, so that every place that folds gives the same bits.
    Folding into the empty state copies exactly.
    """
    m_new = tl.maximum(m, mb)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # two empty states: not exp2(-inf + inf)
    a = tl.math.exp2(m - base)
    b = tl.math.exp2(mb - base)
    l = tl.fma(l, a, lb * b)
    a = tl.broadcast_to(tl.expand_dims(a, AXIS), acc.shape)
    return m_new, l, tl.fma(acc, a, accb * tl.expand_dims(b, AXIS))


@triton.jit
def finish(m, l, sink, v_factor, HAS_SINKS: tl.constexpr):
    """(factor for acc, natural LSE) of a finished state [M], with the sink's logit ``sink`` [M] (natural) in the denominator.

    The change of base is an explicit fma too: left to itself, the compiler fuses it with the subtraction in one caller and not in another.
    """
    if HAS_SINKS:
        m_new = tl.maximum(m, sink * 1.4426950408889634)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        factor = tl.math.exp2(m - base)
        l = tl.fma(l, factor, tl.math.exp2(tl.fma(sink, 1.4426950408889634, -base)))
        m = m_new
    else:
        factor = 1.0
    empty = l == 0.0  # no key seen: zero output, LSE -inf
    divisor = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.math.log2(divisor)) * 0.6931471805599453)
    return tl.where(empty, 0.0, v_factor * factor / divisor), lse
