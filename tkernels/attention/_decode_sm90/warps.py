"""The states of the warps of a leaf, each of its own keys, as one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels.attention._decode_sm90.fp8_operands import bits


@gluon.constexpr_function
def row_layouts(N, D, WARPS, SPLIT):
    """Of the state of all warps: (accumulators of every second column [warps, N / 2, D], m and l [warps, N], their sum [N, D]). N: 8 or 16.

    A thread has the same element of the warps of all keys; lanes run along D, four elements each, then along columns, and so do warps."""
    w = bits(WARPS * SPLIT)
    free = [("d", i) for i in range(2, bits(D))] + [("n", i) for i in range(bits(N // 2))]
    lanes = (free[:5] + [None] * 5)[:5]
    warps = (free[5 : 5 + w] + [None] * w)[:w]
    rest = free[5 + w :]

    def half(x):
        return [0, 0, 0] if x is None else [0, 0, 1 << x[1]] if x[0] == "d" else [0, 1 << x[1], 0]

    def narrow(x):
        return [0, 2 << x[1]] if x is not None and x[0] == "n" else [0, 0]

    def whole(x):
        return [0, 0] if x is None else [0, 1 << x[1]] if x[0] == "d" else [2 << x[1], 0]

    sources = [1 << i for i in range(bits(WARPS))]
    layout_half = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]] + [[i, 0, 0] for i in sources] + [half(x) for x in rest],
        [half(x) for x in lanes], [half(x) for x in warps], [], [WARPS, N // 2, D],
    )  # fmt: skip
    layout_narrow = gl.DistributedLinearLayout(
        [[i, 0] for i in sources] + [[0, 1]] + [narrow(x) for x in rest if x[0] == "n"],
        [narrow(x) for x in lanes], [narrow(x) for x in warps], [], [WARPS, N],
    )  # fmt: skip
    layout_whole = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0]] + [whole(x) for x in rest], [whole(x) for x in lanes], [whole(x) for x in warps], [], [N, D]
    )
    return layout_half, layout_narrow, layout_whole


@gluon.constexpr_function
def whole_layout(N, D, WARPS, SPLIT):
    """Of the sum [N, D]: of more than 16 columns each thread has the same of all sixteens."""
    of = row_layouts(min(N, 16), D, WARPS, SPLIT)[2]
    more = [[16 << i, 0] for i in range(bits(max(N // 16, 1)))]
    return gl.DistributedLinearLayout(of.reg_bases + more, of.lane_bases, of.warp_bases, [], [N, D])


@gluon.jit
def merge_warps(m, l, acc, scratch, SPLIT: gl.constexpr, WIDE: gl.constexpr):
    """The warps' states of a leaf as one: (m [N], l [N], acc [N, D]), summed in the order of the warps, dims in their own order.

    Of 32 columns 16 at a time: what the warps exchange must fit beside the stages."""
    WARPS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    if N <= 16:
        m, l, acc = _merge_columns(m, l, acc, scratch, SPLIT, WIDE)
    else:
        ma, mb = gl.split(m.reshape([WARPS, 2, 16]).permute([0, 2, 1]))
        la, lb = gl.split(l.reshape([WARPS, 2, 16]).permute([0, 2, 1]))
        a, b = gl.split(acc.reshape([WARPS, D, 2, 16]).permute([0, 1, 3, 2]))
        ma, la, a = _merge_columns(ma, la, a, scratch, SPLIT, WIDE)
        mb, lb, b = _merge_columns(mb, lb, b, scratch, SPLIT, WIDE)
        whole: gl.constexpr = whole_layout(N, D, WARPS, SPLIT)
        rows: gl.constexpr = gl.SliceLayout(1, whole)
        m = gl.convert_layout(gl.join(ma, mb).permute([1, 0]).reshape([N]), rows)
        l = gl.convert_layout(gl.join(la, lb).permute([1, 0]).reshape([N]), rows)
        acc = gl.convert_layout(gl.join(a, b).permute([2, 0, 1]).reshape([N, D]), whole, assert_trivial=True)
    return m, l, acc


@gluon.jit
def _merge_columns(m, l, acc, scratch, SPLIT: gl.constexpr, WIDE: gl.constexpr):
    """``merge_warps`` of 8 or 16 columns, l [warps, N]."""
    WARPS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    layouts: gl.constexpr = row_layouts(N, D, WARPS, SPLIT)
    half: gl.constexpr = layouts[0]
    narrow: gl.constexpr = layouts[1]
    whole: gl.constexpr = layouts[2]
    rows: gl.constexpr = gl.SliceLayout(1, whole)
    ml = gl.join(m, l)
    m, l = gl.split(gl.convert_layout(ml, _join_layout(narrow)))
    m = gl.convert_layout(m, narrow, assert_trivial=True)
    l = gl.convert_layout(l, narrow, assert_trivial=True)
    m_new = gl.max(m, 0)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    factor = gl.exp2(m - base[None, :])
    l = gl.sum(l * factor, 0)
    even, odd = gl.split(factor.reshape([WARPS, N // 2, 2]))
    a, b = gl.split(acc.reshape([WARPS, D, N // 2, 2]))
    a = _sum_warps(a, even, scratch, half, WIDE)
    b = _sum_warps(b, odd, scratch, half, WIDE)
    acc = gl.join(a, b).permute([0, 2, 1]).reshape([N, D])
    acc = gl.convert_layout(acc, whole, assert_trivial=True)
    return gl.convert_layout(m_new, rows), gl.convert_layout(l, rows), acc


@gluon.constexpr_function
def _join_layout(layout):
    """[a, b, 2] whose last axis lies in a thread, from [a, b]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1]] + [[*x, 0] for x in layout.reg_bases], [[*x, 0] for x in layout.lane_bases], [[*x, 0] for x in layout.warp_bases], [],
        [*layout.shape, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _flat(layout):
    """[a · b, c] from [a, b, c]."""

    def flat(bases):
        return [[x[0] * layout.shape[1] + x[1], x[2]] for x in bases]

    return gl.DistributedLinearLayout(
        flat(layout.reg_bases), flat(layout.lane_bases), flat(layout.warp_bases), [], [layout.shape[0] * layout.shape[1], layout.shape[2]]
    )


@gluon.jit
def _sum_warps(acc, factor, scratch, half: gl.constexpr, WIDE: gl.constexpr):
    """Accumulators of half of the columns [warps, D, N / 2] → [N / 2, D]. scratch: [warps · N / 2, D], shared memory."""
    WARPS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    if WIDE:
        acc = acc.permute([0, 2, 1])
    else:  # as the words of V lie in its operand
        acc = acc.reshape([WARPS, D // 16, 2, 8, N]).permute([0, 4, 3, 1, 2])
    scratch.store(acc.reshape([WARPS * N, D]))
    acc = scratch.load(_flat(half)).reshape([WARPS, N, D])
    acc = gl.convert_layout(acc, half, assert_trivial=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(2, half), assert_trivial=True)
    return gl.sum(acc * factor[:, :, None], 0)
