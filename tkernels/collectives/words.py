"""Vectors of 16 bytes as four int32 words: loads and stores by any layout, and the sum over ranks.

One lane is one vector. An fp32 word holds one value, a bf16 or fp16 word two.
"""

from __future__ import annotations

from tkernels._triton import INTERPRETED, cast, tl, triton

_INTERPRETED = tl.constexpr(INTERPRETED)

# How the lanes reach the elements of x and out.
FLAT = tl.constexpr(0)  # one contiguous run, 16-byte aligned
ROWS = tl.constexpr(1)  # rows of whole 16-byte vectors at an aligned stride
ELEMENTS = tl.constexpr(2)  # anything else: element by element


@triton.constexpr_function
def int32s(n):
    return (tl.int32,) * n


@triton.jit
def load4(address, mask):
    """Four words at ``address`` [lanes] int64, 16-byte aligned; zeros where mask (int32) is 0."""
    if _INTERPRETED:
        p = address.to(tl.pointer_type(tl.int32))
        q = mask != 0
        return tl.load(p, q, 0), tl.load(p + 1, q, 0), tl.load(p + 2, q, 0), tl.load(p + 3, q, 0)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.s32 q, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
            "@q ld.global.v4.b32 {$0,$1,$2,$3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r", [address, mask], dtype=int32s(4), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store4(address, a, b, c, d, mask):
    if _INTERPRETED:
        p = address.to(tl.pointer_type(tl.int32))
        q = mask != 0
        tl.store(p, a, q)
        tl.store(p + 1, b, q)
        tl.store(p + 2, c, q)
        tl.store(p + 3, d, q)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.s32 q, $6, 0; mov.u32 $0, 0; @q st.relaxed.sys.global.v4.b32 [$1], {$2,$3,$4,$5}; }",
            "=&r,l,r,r,r,r,r", [address, a, b, c, d, mask], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_vector(ptr, v, n, inner, stride, mask, LAYOUT: tl.constexpr):
    """Vector v [lanes] of a message of n elements, where element e lies at (e // inner) · stride + e % inner; zeros past the end."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    PER: tl.constexpr = 128 // dtype.primitive_bitwidth
    if LAYOUT == FLAT:
        return load4(ptr.to(tl.int64) + v.to(tl.int64) * 16, mask)
    elif LAYOUT == ROWS:
        row_vectors = inner // PER
        offset = (v // row_vectors).to(tl.int64) * stride + (v % row_vectors) * PER
        return load4(ptr.to(tl.int64) + offset * (dtype.primitive_bitwidth // 8), mask)
    else:
        words = ()
        for i in tl.static_range(4):
            if dtype == tl.float32:
                words = words + (_load_element(ptr, v * PER + i, n, inner, stride, mask).to(tl.int32, bitcast=True),)  # type: ignore[assignment]
            else:
                low = _load_element(ptr, v * PER + 2 * i, n, inner, stride, mask).to(tl.int16, bitcast=True).to(tl.int32)
                high = _load_element(ptr, v * PER + 2 * i + 1, n, inner, stride, mask).to(tl.int16, bitcast=True).to(tl.int32)
                words = words + ((low & 0xFFFF) | (high << 16),)  # type: ignore[assignment]
        return words


@triton.jit
def _load_element(ptr, e, n, inner, stride, mask):
    return tl.load(ptr + (e // inner).to(tl.int64) * stride + e % inner, mask=(mask != 0) & (e < n), other=0.0)


@triton.jit
def store_vector(ptr, v, words, n, inner, stride, mask, LAYOUT: tl.constexpr):
    """The inverse of ``load_vector``; nothing is written past element n."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    PER: tl.constexpr = 128 // dtype.primitive_bitwidth
    if LAYOUT == FLAT:
        store4(ptr.to(tl.int64) + v.to(tl.int64) * 16, words[0], words[1], words[2], words[3], mask)
    elif LAYOUT == ROWS:
        row_vectors = inner // PER
        offset = (v // row_vectors).to(tl.int64) * stride + (v % row_vectors) * PER
        store4(ptr.to(tl.int64) + offset * (dtype.primitive_bitwidth // 8), words[0], words[1], words[2], words[3], mask)
    else:
        for i in tl.static_range(4):
            if dtype == tl.float32:
                _store_element(ptr, v * PER + i, words[i].to(tl.float32, bitcast=True), n, inner, stride, mask)
            else:
                _store_element(ptr, v * PER + 2 * i, words[i].to(tl.int16).to(dtype, bitcast=True), n, inner, stride, mask)
                _store_element(ptr, v * PER + 2 * i + 1, (words[i] >> 16).to(tl.int16).to(dtype, bitcast=True), n, inner, stride, mask)


@triton.jit
def _store_element(ptr, e, value, n, inner, stride, mask):
    tl.store(ptr + (e // inner).to(tl.int64) * stride + e % inner, value, mask=(mask != 0) & (e < n))


@triton.jit
def not_empty(word):
    """A word of data that looks empty becomes another NaN."""
    return tl.where(word == -1, 0x7FFFFFFF, word)


@triton.jit
def of_rank(got, s: tl.constexpr, RANK: tl.constexpr):
    """The four words of rank s in what ``poll`` returned."""
    k: tl.constexpr = 4 * (s if s < RANK else s - 1)
    return got[k], got[k + 1], got[k + 2], got[k + 3]


@triton.jit
def unpack(word, dtype: tl.constexpr):
    """The two values of a word in fp32; an fp32 word holds one, and the other is zero."""
    if dtype == tl.float32:
        return word.to(tl.float32, bitcast=True), tl.zeros_like(word).to(tl.float32)
    elif dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _pack_asm(dtype):
    return f"cvt.rn.{'bf16x2' if dtype == tl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@triton.jit
def pack(low, high, dtype: tl.constexpr):
    """Both rounded to nearest even in one instruction; the compiler converts them one by one, at a quarter of the rate each."""
    if dtype == tl.float32:
        return low.to(tl.int32, bitcast=True)
    elif not _INTERPRETED:
        return tl.inline_asm_elementwise(_pack_asm(dtype), "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        rounded_low = cast(low, dtype).to(tl.int16, bitcast=True).to(tl.int32)
        rounded_high = cast(high, dtype).to(tl.int16, bitcast=True).to(tl.int32)
        return (rounded_low & 0xFFFF) | (rounded_high << 16)


@triton.jit
def _sum_word(own, got, i: tl.constexpr, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Word i of the sum over ranks 0 to WORLD - 1, in fp32, rounded once: the one order that every kernel and rank uses."""
    if RANK == 0:
        low, high = unpack(own, dtype)
    else:
        low, high = unpack(got[i], dtype)
    for s in tl.static_range(1, WORLD):
        if s == RANK:
            more_low, more_high = unpack(own, dtype)
        else:
            more_low, more_high = unpack(got[4 * (s if s < RANK else s - 1) + i], dtype)
        low += more_low
        high += more_high
    return pack(low, high, dtype)


@triton.jit
def sum_ranks(own, got, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    return (
        _sum_word(own[0], got, 0, dtype, RANK, WORLD),
        _sum_word(own[1], got, 1, dtype, RANK, WORLD),
        _sum_word(own[2], got, 2, dtype, RANK, WORLD),
        _sum_word(own[3], got, 3, dtype, RANK, WORLD),
    )
