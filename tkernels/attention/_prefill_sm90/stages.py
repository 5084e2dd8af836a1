"""Stages of K and V in a consumer: read, given back."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tkernels.attention._prefill_sm90.shared import GIVE_TRANSPOSED, HANDSHAKE
from tkernels.attention._sm90_gluon import FIRST_BARRIER, meet


@gluon.jit
def place(i, STAGES: gl.constexpr):
    """(stage, parity of its barrier) of block i of a ring of 2, 4 or 8 stages, without what a division of signed numbers takes."""
    LOG: gl.constexpr = STAGES.bit_length() - 1
    gl.static_assert(STAGES == 1 << LOG)
    return i & (STAGES - 1), (i >> LOG) & 1


@gluon.jit
def values(vs, stage):
    """The block of V in ``stage`` as [keys, columns]; of 8 bits it lies transposed."""
    block = vs.blocks.index(stage)
    if block.dtype.primitive_bitwidth == 8:
        block = block.permute((1, 0))
    return block


@gluon.jit
def give_values(vs, stage, K_STAGES: gl.constexpr):
    THREADS: gl.constexpr = GIVE_TRANSPOSED if vs.blocks.dtype.primitive_bitwidth == 8 else HANDSHAKE
    meet("arrive", FIRST_BARRIER + K_STAGES + stage, THREADS)


@gluon.jit
def pass_block(ks, vs, i, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Give block i back unread, after it has come: an arrival before the loader has met the one before would count for that."""
    stage = i % K_STAGES
    v_stage = i % V_STAGES
    mbarrier.wait(ks.full.index(stage), (i // K_STAGES) & 1)
    meet("arrive", FIRST_BARRIER + stage, HANDSHAKE)
    mbarrier.wait(vs.full.index(v_stage), (i // V_STAGES) & 1)
    give_values(vs, v_stage, K_STAGES)
    return i + 1
