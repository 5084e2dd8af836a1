"""What the roles of the kernel share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUPS = gl.constexpr(2)  # consumers
ROWS = gl.constexpr(64)  # query rows of a consumer: the M of one warpgroup MMA
TILE = gl.constexpr(128)  # query rows of a tile
SEQS = gl.constexpr(32)  # sequences that the scheduler searches at once
WIDE = gl.constexpr(128)  # sequences that it counts at once before the first tile
OUT_COLUMNS = gl.constexpr(128)  # of a row that the consumers stage for a store at once
FIELDS = gl.constexpr(8)  # 32-bit words that describe a tile
# threads that meet at a named barrier
HANDSHAKE = gl.constexpr(2 * 128 + 32)  # the consumers and a loader
GIVE_RAW = gl.constexpr(128 + 32)  # the transposer and the loader of V
GIVE_TRANSPOSED = gl.constexpr(2 * 128 + 128)  # the consumers and the transposer
SHIFT = gl.constexpr(8)  # p of 8 bits is 2^(logit - maximum + SHIFT), at most 256 of e4m3's 448: else what is below 2^-9 would be zero


@gluon.constexpr_function
def mma_layout(columns, dtype):
    """Of an accumulator [ROWS, columns] of products of ``dtype``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.jit
def here(x):
    """x, computed where it is used: sums with it do not leave the loop, where they would hold registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)
