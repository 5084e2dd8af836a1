"""What happens to the scores of a block of 8 bits: weights that rarely change their base, rounded to e4m3.

A weight is 2^x, x = scaled score - base. The base of a row is its largest score in the first block that it sees, less SHIFT; it is raised
only where an x passes LIMIT, just below the end of e4m3 (448 = 2^8.8), and then by as much as makes the row's largest x SHIFT again.
Most blocks of a long row leave it as it is: their exponentials wait for no maximum, and what was summed before needs no factor. A block
that raises it does so before its exponentials, so that no score is too large.

Per row a thread holds one value of its own ([ROWS, 4]: t, the thread of the four that share a row): the base, the same in the four, and the
sum of its weights.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tkernels.attention._prefill_sm90.shared import ROWS, mma_layout
from tkernels.attention._prefill_sm90.softmax import hide_unseen
from tkernels.attention._sm90_gluon import cap

SHIFT = gl.constexpr(8)  # weights 2^-17 of the largest one are 2^-9 then, the least that e4m3 holds; with less, bases are raised less often
LIMIT = gl.constexpr(8.75)
_LIMIT_BITS = gl.constexpr(struct.unpack("i", struct.pack("f", LIMIT.value))[0])  # as an integer
_WORD = gl.constexpr(
    "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y}; }"
)


@gluon.constexpr_function
def _raise_assembly(count):
    """Of the ``count`` x of a thread, by twos of its two rows, those of a row with one above LIMIT lose what its base is raised by, which
    goes to as many registers after them. No work in a warp without such a row, and none changes in the others: a row's bits are its own.

    Compared as integers, which is the same above zero: three in one instruction.
    """
    text = ["{ .reg .pred p; .reg .b32 t, m<4>, up<2>;", *(f"mov.b32 m{i}, ${i};" for i in range(4))]
    text += [f"max.s32 m{i % 4}, m{i % 4}, ${i};" for i in range(4, count)]
    text += ["max.s32 m0, m0, m1; max.s32 m2, m2, m3; max.s32 m0, m0, m2;"]
    text += [f"setp.gt.s32 p, m0, {_LIMIT_BITS.value}; vote.sync.any.pred p, p, -1;"]
    text += ["mov.b32 up0, 0; mov.b32 up1, 0; @!p bra done;"]
    for row in (0, 1):
        own = [f"${i}" for i in range(count) if i // 2 % 2 == row]
        text += [f"mov.b32 m0, {own[0]};", *(f"max.f32 m0, m0, {x};" for x in own[1:])]
        text += [f"shfl.sync.bfly.b32 t, m0, {lane}, 31, -1; max.f32 m0, m0, t;" for lane in (1, 2)]
        text += [f"setp.gt.f32 p, m0, {LIMIT.value}; sub.f32 t, m0, {SHIFT.value}.0; selp.f32 up{row}, t, 0.0, p;"]
        text += [f"sub.f32 {x}, {x}, up{row};" for x in own]
    return " ".join([*text, "done:", *(f"mov.b32 ${count + i}, up{i // 2 % 2};" for i in range(count)), "}"])


@gluon.constexpr_function
def _times_assembly(count):
    """The ``count`` values of a thread, by twos of its two rows, times their rows' factors, unless those of the warp are all 1."""
    text = [f"{{ .reg .pred p; setp.neu.f32 p, ${2 * count}, 1.0; @!p setp.neu.f32 p, ${2 * count + 2}, 1.0;"]
    text += ["vote.sync.any.pred p, p, -1; @!p bra done;"]
    text += [f"mul.f32 ${i}, ${i}, ${2 * count + i // 2 % 2 * 2};" for i in range(count)]
    return " ".join([*text, "done: }"])


@gluon.constexpr_function
def _in_place(kind, count, outputs, inputs):
    """Constraints of assembly whose first output is its first input, of ``count`` registers each."""
    return ",".join([f"={kind}"] * (count * outputs) + [f"{i}" for i in range(count)] + [kind] * (count * (inputs - 1)))


@gluon.constexpr_function
def _halvings(count):
    return count.bit_length() - 1


@gluon.jit
def threads(x):
    """[ROWS, columns] of an accumulator as [ROWS, columns / 8, t, 2]: what a thread holds of a row stands in the second and the last."""
    return x.reshape([ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def owned(own, like):
    """own [ROWS, 4], a value of each thread for each of its rows, beside x [ROWS, columns / 8, 4, 2] as ``like``."""
    return gl.convert_layout(own, gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout)), assert_trivial=True)


@gluon.jit
def _own(x):
    """The first value of each row in a thread: [ROWS, columns / 8, 4, 2] → [ROWS, 4]."""
    first = x.split()[0]
    for _ in gl.static_range(_halvings(x.shape[1])):
        first = first.reshape([ROWS, 2, first.shape[1] // 2, 4]).permute((0, 2, 3, 1)).split()[0]
    return owned(first.reshape([ROWS, 4]), x)


@gluon.jit
def _masked(s, position, key, qk_scale, softcap, window, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """(scores [ROWS, keys / 8, 4, 2], their scale)."""
    if HAS_SOFTCAP:
        s = cap(s, qk_scale, softcap)
        qk_scale = 1.0
    if MASKED:
        s = hide_unseen(s, position, key, window, HAS_WINDOW)
    return threads(s), qk_scale


@gluon.jit
def _first_base(s, qk_scale):
    own = gl.max(gl.max(s, 3), 1)
    return (gl.max(own, 1) * qk_scale - SHIFT)[:, None] + gl.full([ROWS, 4], 0.0, gl.float32, own.type.layout)


@gluon.jit
def _sums(p):
    return gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def first_weights(s, position, key, qk_scale, softcap, window, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """Scores s [ROWS, keys] of the first block → (p [ROWS, keys / 8, 4, 2], base, l), as in ``weights``. Always masked."""
    s, qk_scale = _masked(s, position, key, qk_scale, softcap, window, True, HAS_WINDOW, HAS_SOFTCAP)
    base = _first_base(s, qk_scale)
    p = gl.exp2(s * qk_scale - gl.where(base == float("-inf"), 0.0, base)[:, None, :, None])
    return p, base, _sums(p)


@gluon.jit
def weights(
    s, base, l, position, key, qk_scale, softcap, window, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr
):  # fmt: skip
    """Scores s [ROWS, keys] of one block → (p [ROWS, keys / 8, 4, 2], base, l, factor of what was summed before).

    base: in base 2, -inf where the row has seen no key, which may be before blocks with MASKED alone. l: the thread's sum of its p.
    """
    s, qk_scale = _masked(s, position, key, qk_scale, softcap, window, MASKED, HAS_WINDOW, HAS_SOFTCAP)
    if MASKED:
        base = gl.where(base == float("-inf"), _first_base(s, qk_scale), base)
        x = s * qk_scale - gl.where(base == float("-inf"), 0.0, base)[:, None, :, None]
    else:
        x = s * qk_scale - base[:, None, :, None]
    COUNT: gl.constexpr = s.shape[1] * 4  # of a thread
    x, up = gl.inline_asm_elementwise(
        _raise_assembly(COUNT), _in_place("r", COUNT, 2, 1), [x.to(gl.int32, bitcast=True)], (gl.int32, gl.int32), is_pure=False, pack=COUNT
    )  # fmt: skip
    up = _own(up).to(gl.float32, bitcast=True)
    p = gl.exp2(x.to(gl.float32, bitcast=True))
    factor = gl.exp2(-up)
    return p, base + up, l * factor + _sums(p), factor


@gluon.jit
def times(x, factor):
    """x [ROWS, columns] · factor [ROWS, 4]; no work in a warp where that is 1."""
    COUNT: gl.constexpr = x.shape[1] // 2  # of a thread
    y = threads(x)
    y = gl.inline_asm_elementwise(
        _times_assembly(COUNT), _in_place("f", COUNT, 1, 2), [y, owned(factor, y)[:, None, :, None]], gl.float32, is_pure=False, pack=COUNT
    )  # fmt: skip
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def all_sums(l):
    """The larger sum of a thread's two rows, 0 for NaN. Known when all exponentials are."""
    a, b = l.reshape([4, 2, 8, 4]).permute((0, 2, 3, 1)).split()
    return gl.maximum(gl.maximum(a, b), 0.0).to(gl.int32, bitcast=True)


@gluon.jit
def round_weights(p):
    """p [ROWS, keys / 8, 4, 2] rounded, in words of four [ROWS, keys / 4], as single bytes would be carried one a register.

    The operand of P · V holds keys 4t to 4t + 3 of 16 in the thread that has the scores of keys 2t, 2t + 1, 8 + 2t and 9 + 2t. So keys
    change their order, as those of V did in the transposer, and nothing moves between threads.
    """
    GROUPS: gl.constexpr = p.shape[1] // 2  # of 16 keys
    first, second = p.reshape([ROWS, GROUPS, 2, 4, 2]).permute((0, 1, 3, 2, 4)).split()  # group, t, half | which of the pair
    a, c = first.split()
    b, d = second.split()
    word = gl.inline_asm_elementwise(_WORD, "=r,f,f,f,f", [a, b, c, d], gl.int32, is_pure=True, pack=1)
    return word.reshape([ROWS, 4 * GROUPS])


@gluon.jit
def operand(p, DTYPE: gl.constexpr, DIM: gl.constexpr):
    """The left operand of P · V of what ``round_weights`` gave."""
    p = gl.join(p, p)
    p = gl.join(p, p).reshape([ROWS, 4 * p.shape[1]])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, mma_layout(DIM, DTYPE), 4))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [p], gl.float8e4nv, is_pure=True, pack=4)
