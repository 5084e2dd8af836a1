"""What Gluon kernels share. To be imported where Gluon is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a role; its name since triton 3.7, and before


@gluon.constexpr_function
def _warps(mma):
    return mma.warps_per_cta


@gluon.constexpr_function
def _instruction(name):
    return f"griddepcontrol.{name}; mov.u32 $0, $1;"


@gluon.jit
def _control(NAME: gl.constexpr):
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zeros = gl.full([32 * gl.num_warps()], 0, gl.int32, threads)
    gl.inline_asm_elementwise(_instruction(NAME), "=r,r", [zeros], gl.int32, is_pure=False, pack=1)


@gluon.jit
def one_of_each(a):
    """What ``barrier_behind`` takes of a left operand a [batch, rows, inputs] of mma.sync, of 16 bits, whose inputs each warp has: for each
    thread the largest, as an integer, of an element of each 16 x 16 that it has loaded."""
    WARPS: gl.constexpr = _warps(a.type.layout.parent)
    ALONG: gl.constexpr = min(WARPS[1], a.shape[1] // 16)
    x = a.to(gl.int16, bitcast=True)
    x = x.reshape([a.shape[0] // WARPS[0], WARPS[0], a.shape[1] // (16 * ALONG), ALONG, 2, 8, a.shape[2] // 16, 2, 4, 2])
    x, _ = gl.split(x.permute([0, 1, 2, 3, 5, 6, 8, 4, 7, 9]))  # what a thread has of 16 x 16 is 2 x 2 x 2
    x, _ = gl.split(x)
    x, _ = gl.split(x)
    return gl.max(gl.max(gl.max(x.to(gl.int32), 5), 2), 0)


@gluon.jit
def barrier_behind(read):
    """``barrier`` of all warps, which none reaches before it has ``read``, an int32 of each thread made from all that it has loaded.

    A load from shared memory that is still on its way does not hold a barrier up, and behind it TMA, which keeps no order with such loads,
    may write what the load is about to read. So the barrier's number takes a bit from what was loaded. It is 0, which the assembler does
    not know: there are at most 32 leading zeros.
    """
    gl.inline_asm_elementwise(
        "{ .reg .b32 n; clz.b32 n, $1; shr.u32 n, n, 6; bar.sync n; mov.u32 $0, n; }", "=r,r,~{memory}", [read], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def enter(PDL: gl.constexpr):
    """``wait`` of _dependent.py."""
    if PDL == 1:
        _control("wait")
    if PDL > 0:
        _control("launch_dependents")


@gluon.jit
def depart(PDL: gl.constexpr):
    """``depart`` of _dependent.py."""
    if PDL == 2:
        _control("wait")
