"""The loop over the keys of a tile of prefill: prefill.py's, and prefix.py's over a part of them.

Key blocks that lie in the cache whole go through one pipelined loop, and are masked in it where the diagonal or a window cuts them.
Outside of it, with masked loads, are only the block of the window's first key and that of the sequence's last one. So NaN or Inf in V of a
key reaches rows before it, of the same block: 0 · Inf.

With OVERLAP the product of weights and values of a block runs while the softmax of the next one does: in step i of the loop the tensor
cores compute q · K[i], then begin weights[i - 1] · V[i - 1], which nothing waits for but q · K[i + 1]. The state is the same after each
block, so the order of the arithmetic is too.
"""

from __future__ import annotations

from tkernels._triton import INTERPRETED, cast, tl, triton
from tkernels.attention._common import cap_logits, held, page_ids, page_slots, product, read, whole_page_ptrs

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _softmax(
    s, m, l, start, cut, first, last, qk_scale, softcap,
    WHOLE: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(m, l, factor of acc, weights [M, N]) of the state with products ``s`` [M, N] of a block of keys; WHOLE, cut: as in ``_block``."""
    if HAS_SOFTCAP:
        s = cap_logits(s * qk_scale[:, None], softcap)
        qk_scale = tl.full(qk_scale.shape, 1.0, tl.float32)
    if not WHOLE:
        s = _seen(s, start, first, last, HAS_WINDOW)
    elif CAUSAL:
        if cut:
            s = _seen(s, start, first, last, HAS_WINDOW)
    m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new * qk_scale
    if CAUSAL or not WHOLE:
        base = tl.where(m_new == float("-inf"), 0.0, base)  # nothing seen yet: not exp2(-inf + inf)
    p = tl.math.exp2(s * qk_scale[:, None] - base[:, None])
    a = tl.math.exp2(m * qk_scale - base)
    return m_new, l * a + tl.sum(p, 1), a, p


@triton.jit
def _block(
    q, m, l, acc, k_head, v_head, page, start, low, high, cut, first, last, qk_scale, softcap,
    stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One block of keys, its pages in ``page`` [BLOCK_N]. WHOLE: all its keys may be loaded, and unless ``cut`` every row sees them.
    Otherwise keys outside of ``low`` and ``high`` are not even loaded."""
    k_ptrs = _ptrs(k_head, page, start, stride_kp, stride_kn, offs_n, offs_d, PAGE, BLOCK_N)
    v_ptrs = _ptrs(v_head, page, start, stride_vp, stride_vn, offs_n, offs_d, PAGE, BLOCK_N)
    if WHOLE:
        k = _loaded(k_ptrs, mask_d, PAD_D)
        v = _loaded(v_ptrs, mask_d, PAD_D)
    else:
        offs_k = start + offs_n
        loaded = (offs_k >= low) & (offs_k < high)
        mask_kv = loaded[:, None] & mask_d[None, :]
        k = tl.load(k_ptrs, mask=mask_kv, other=0.0)
        v = tl.load(v_ptrs, mask=mask_kv, other=0.0)
    s = product(q, tl.trans(k.to(COMPUTE)), tl.zeros([m.shape[0], BLOCK_N], tl.float32))
    m, l, a, p = _softmax(s, m, l, start, cut, first, last, qk_scale, softcap, WHOLE, CAUSAL, HAS_WINDOW, HAS_SOFTCAP)
    acc = product(cast(p, COMPUTE), v.to(COMPUTE), acc * a[:, None])
    return m, l, acc


@triton.jit
def _loaded(ptrs, mask_d, PAD_D: tl.constexpr):
    if PAD_D:
        x = tl.load(ptrs, mask=mask_d[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def _ptrs(head, page, start, stride_p, stride_n, offs_n, offs_d, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, D] pointers to the keys or values of a block, its pages in ``page`` [BLOCK_N]."""
    slot = page_slots(start, offs_n, PAGE, BLOCK_N)
    return (head + page.to(tl.int64) * stride_p)[:, None] + (slot[:, None] * stride_n + offs_d[None, :])


@triton.jit
def _now(p, zero):
    """p (16 bits, two to a register), by an instruction that stands after the product before it, as only what is not pure keeps its place.

    The assembler lets a product with operands in registers run on only where nothing else defines them before the one before it has ended.
    It would take a move out, so this is ``p | 0`` with a zero [1] that it does not know.
    """
    if _INTERPRETED:
        return p
    else:
        return tl.inline_asm_elementwise("or.b32 $0, $1, $2;", "=r,r,r", [p, zero], dtype=tl.int16, is_pure=False, pack=2)


@triton.jit
def _unknown_zero(x):
    """int32 zero, of which the compiler does not know that it is one: the third coordinate of a program of grids that have one."""
    if _INTERPRETED:
        return x * 0
    else:
        return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.z;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _overlapped(
    q, m, l, acc, k_head, v_head, table_row, page, next_page, begin, whole, seen_begin, seen_end, first, last, qk_scale, softcap,
    stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state with the blocks begin : whole, at least one, of 16-bit operands; see above. The first step's weights are zero, of the
    first block's values, which come anyway: what is NaN there the rows get anyway, but of Inf they get NaN too.

    Weights are carried as int16, or the compiler puts them into shared memory as it does with what is loaded, and waits for the product.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, acc.shape[1])
    zeros = tl.zeros([BLOCK_N], tl.int32)
    p = tl.zeros([m.shape[0], BLOCK_N], tl.int16)
    zero = p + _unknown_zero(begin).to(tl.int16)
    a = tl.full([m.shape[0]], 1.0, tl.float32)
    v_page = page
    for i in tl.range(begin, whole, num_stages=STAGES):
        v_start = tl.maximum(i - 1, begin) * BLOCK_N
        k = _loaded(_ptrs(k_head, page, i * BLOCK_N, stride_kp, stride_kn, offs_n, offs_d, PAGE, BLOCK_N), mask_d, PAD_D)
        v = _loaded(_ptrs(v_head, v_page, v_start, stride_vp, stride_vn, offs_n, offs_d, PAGE, BLOCK_N), mask_d, PAD_D)
        s = product(q, tl.trans(k.to(COMPUTE)), tl.zeros([m.shape[0], BLOCK_N], tl.float32))
        acc = product(_now(p, zero).to(COMPUTE, bitcast=True), v.to(COMPUTE), acc * a[:, None])
        cut = (i < seen_begin) | (i >= seen_end)
        m, l, a, weights = _softmax(s, m, l, i * BLOCK_N, cut, first, last, qk_scale, softcap, True, CAUSAL, HAS_WINDOW, HAS_SOFTCAP)
        p = cast(weights, COMPUTE).to(tl.int16, bitcast=True)
        v_page = held(page)
        page = held(next_page)
        next_page = read(whole_page_ptrs(table_row, tl.minimum(i + 2, whole - 1), offs_n, PAGE, BLOCK_N)) + zeros
    v_start = (whole - 1) * BLOCK_N
    v = _loaded(_ptrs(v_head, v_page, v_start, stride_vp, stride_vn, offs_n, offs_d, PAGE, BLOCK_N), mask_d, PAD_D)
    return m, l, product(p.to(COMPUTE, bitcast=True), v.to(COMPUTE), acc * a[:, None])


@triton.jit
def _seen(s, start, first, last, HAS_WINDOW: tl.constexpr):
    """s [M, N] of the keys from ``start``, -inf where the key is before the row's ``first`` or after its ``last`` [M].

    Keys are counted as 8 i + j: i is a constant in every register of a tensor core's tile, whereas the keys' numbers would be kept in a
    quarter of N registers a thread all through the loop.
    """
    M: tl.constexpr = s.shape[0]
    N: tl.constexpr = s.shape[1]
    i8 = 8 * tl.arange(0, N // 8)[None, :, None]
    j = start + tl.arange(0, 8)[None, None, :]
    s = tl.where(tl.reshape(i8 <= last[:, None, None] - j, [M, N]), s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where(tl.reshape(i8 >= first[:, None, None] - j, [M, N]), s, float("-inf"))
    return s


@triton.jit
def first_page_ids(table_row, begin, whole, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the blocks ``begin`` and ``begin + 1`` for ``fold_keys``, any where those are not before ``whole``.

    Called before q is loaded: the compiler stores q to shared memory, and so waits for it, ahead of what ``fold_keys`` begins with.
    """
    offs_n = tl.arange(0, BLOCK_N)
    page = tl.load(whole_page_ptrs(table_row, begin, offs_n, PAGE, BLOCK_N), mask=begin < whole, other=0)
    next_page = tl.load(whole_page_ptrs(table_row, begin + 1, offs_n, PAGE, BLOCK_N), mask=begin + 1 < whole, other=0)
    zeros = tl.zeros([BLOCK_N], tl.int32)
    return page + zeros, next_page + zeros


@triton.jit
def _edge(
    q, m, l, acc, k_head, v_head, table_row, begin, end, low, high, first, last, qk_scale, softcap,
    stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The state with the blocks begin : end, of which only keys between ``low`` and ``high`` are loaded."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, acc.shape[1])
    for i in tl.range(begin, end, num_stages=1):
        ids = page_ids(table_row, i * BLOCK_N, offs_n, high - 1, PAGE, BLOCK_N)
        m, l, acc = _block(
            q, m, l, acc, k_head, v_head, ids, i * BLOCK_N, low, high, True, first, last, qk_scale, softcap,
            stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
            PAGE, BLOCK_N, False, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE,
        )  # fmt: skip
    return m, l, acc


@triton.jit
def fold_keys(
    q, m, l, acc, k_head, v_head, table_row, page, next_page, low, high, begin, whole, end, seen_begin, seen_end, first, last,
    qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The state (m, l, acc) with the keys that rows see between ``low`` and ``high``, those from ``first`` to ``last`` [BLOCK_M] of a row.

    Blocks begin : whole may be loaded whole, and those from seen_begin to seen_end every row sees whole. The one before ``begin`` (of
    windows) and those from ``whole`` to ``end`` are loaded between ``low`` and ``high`` only. page, next_page: of ``first_page_ids``.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, acc.shape[1])
    if HAS_WINDOW:
        m, l, acc = _edge(
            q, m, l, acc, k_head, v_head, table_row, low // BLOCK_N, begin, low, high, first, last, qk_scale, softcap,
            stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
            PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE,
        )  # fmt: skip
    zeros = tl.zeros([BLOCK_N], tl.int32)
    # page ids are read two blocks ahead: keys are loaded one block ahead, and an address that is not there yet would stop the loop
    if begin < whole:  # without it the assembler sees a way around the loop to its last wait, and waits after every product (d 64)
        if OVERLAP:
            m, l, acc = _overlapped(
                q, m, l, acc, k_head, v_head, table_row, page, next_page, begin, whole, seen_begin, seen_end, first, last,
                qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
                PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE, STAGES,
            )  # fmt: skip
        else:
            for i in tl.range(begin, whole, num_stages=STAGES):
                # of three tf32 products, two ways through the loop spill more than the mask costs
                cut = True if q.dtype == tl.float32 else (i < seen_begin) | (i >= seen_end)
                m, l, acc = _block(
                    q, m, l, acc, k_head, v_head, page, i * BLOCK_N, low, high, cut, first, last,
                    qk_scale, softcap, stride_kp, stride_kn, stride_vp, stride_vn, offs_n, offs_d, mask_d,
                    PAGE, BLOCK_N, True, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE,
                )  # fmt: skip
                page = held(next_page)
                next_page = read(whole_page_ptrs(table_row, tl.minimum(i + 2, whole - 1), offs_n, PAGE, BLOCK_N)) + zeros
    return _edge(
        q, m, l, acc, k_head, v_head, table_row, whole, end, low, high, first, last, qk_scale, softcap,
        stride_kp, stride_kn, stride_vp, stride_vn, mask_d,
        PAGE, BLOCK_N, PAD_D, CAUSAL, HAS_WINDOW, HAS_SOFTCAP, COMPUTE,
    )  # fmt: skip
