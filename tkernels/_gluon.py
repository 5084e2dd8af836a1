"""What Gluon kernels share. To be imported where Gluon is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a role; its name since triton 3.7, and before


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    """``wait`` of ``_dependent``: everything before in the stream has finished and is visible; the next kernel may begin to wait."""
    if PDL:
        threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r",
            [gl.full([32 * gl.num_warps()], 0, gl.int32, threads)], gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
