"""What Gluon kernels share. To be imported where Gluon is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a role; its name since triton 3.7, and before


@gluon.constexpr_function
def _instruction(name):
    return f"griddepcontrol.{name}; mov.u32 $0, $1;"


@gluon.jit
def _control(NAME: gl.constexpr):
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zeros = gl.full([32 * gl.num_warps()], 0, gl.int32, threads)
    gl.inline_asm_elementwise(_instruction(NAME), "=r,r", [zeros], gl.int32, is_pure=False, pack=1)


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
