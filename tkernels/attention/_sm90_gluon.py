"""What the Gluon kernels share (_prefill_sm90, _decode_sm90): rings in shared memory, their handshakes, lengths, the soft cap."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WORK_STAGES = gl.constexpr(4)  # pieces of work that the scheduler may be ahead, and one that the consumers are at
FIRST_BARRIER = gl.constexpr(8)  # named barriers below it belong to the compiler (0, 1 and one a role)


class Work(NamedTuple):
    """The ring of descriptions of work, [WORK_STAGES, 32-bit words of each], filled by the scheduler, read by the others."""

    words: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Stages(NamedTuple):
    """A ring of K or V blocks. ``full`` is its writer's, which is TMA but for transposed blocks; each stage is given back at a named
    barrier of its own."""

    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.constexpr_function
def _named_barrier(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def meet(kind: gl.constexpr, barrier, THREADS: gl.constexpr):
    """bar.arrive or bar.sync at a named barrier, whose number may be a run-time value; THREADS: of all roles that meet there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.full([32 * gl.num_warps()], 0, gl.int32, layout) + barrier
    gl.inline_asm_elementwise(_named_barrier(kind, THREADS), "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def get_word(work, stage, field: gl.constexpr):
    return gl.sum(work.words.index(stage).slice(field, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def put_word(work, stage, field: gl.constexpr, value):
    """One word of a description: where there is no register left to hold all of them, as ``put_words`` does."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    work.words.index(stage).slice(field, 1).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def put_words(work, stage, values):
    """The words of a description, those that ``values`` lacks zero: a lane each, so that one store writes them."""
    WORDS: gl.constexpr = work.words.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, WORDS, layout)
    words = gl.zeros([WORDS], gl.int32, layout)
    for i in gl.static_range(len(values)):
        words = gl.where(lane == i, values[i], words)
    work.words.index(stage).store(words)


@gluon.jit
def wait_work(work, k):
    """The stage where the k-th description lies now."""
    stage = k % WORK_STAGES
    mbarrier.wait(work.full.index(stage), (k // WORK_STAGES) & 1)
    return stage


@gluon.jit
def wait_room(work, k):
    """The stage where the k-th description can be written now, as all have read what lay there; then say so at ``full``."""
    stage = k % WORK_STAGES
    mbarrier.wait(work.empty.index(stage), ((k // WORK_STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def end_work(work, stage, AT_ONCE: gl.constexpr):
    """The last description, of no blocks: the roles end. They read other words before they know that, and the stage may never have held
    one, so that shared memory would say what an earlier kernel left there: a first block of -2^30, say, and loaders would run on to it.
    AT_ONCE: written by ``put_words``, else by ``put_word``."""
    WORDS: gl.constexpr = work.words.shape[1]
    if AT_ONCE:
        put_words(work, stage, ())
    else:
        for field in gl.static_range(WORDS):
            put_word(work, stage, field, 0)
    mbarrier.arrive(work.full.index(stage), count=1)


@gluon.jit
def add(a, b):
    """For ``gl.associative_scan``."""
    return a + b


@gluon.jit
def lengths_of(cu_ptr, lens_ptr, s, num_seqs, capacity):
    """(first query row, query tokens, keys) of the sequences ``s``; 0 of those past the last one."""
    live = s < num_seqs
    first_row = gl.load(cu_ptr + s, mask=live, other=0)
    query_len = gl.load(cu_ptr + s + 1, mask=live, other=0) - first_row
    length = gl.minimum(gl.maximum(gl.load(lens_ptr + s, mask=live, other=0), 0), capacity)
    return first_row, query_len, length


@gluon.jit
def sequence(cu_ptr, lens_ptr, s, capacity):
    """(first query row, query tokens, keys) of one sequence."""
    first_row = gl.load(cu_ptr + s)
    query_len = gl.load(cu_ptr + s + 1) - first_row
    length = gl.minimum(gl.maximum(gl.load(lens_ptr + s), 0), capacity)
    return first_row, query_len, length


@gluon.jit
def touch(pointers):
    """Have what int32 ``pointers`` [32] name brought near, and wait for nothing."""
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _reciprocal(x):
    """1 / x to one unit in the last place: the operator's division takes three times the instructions, and registers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def cap(s, scale, softcap):
    """softcap · tanh(x / softcap) = 2 · softcap / (1 + e^(-2 x / softcap)) - softcap of x = s · scale, right at both ends."""
    t = gl.exp2(s * (scale * (-2.0 * 1.4426950408889634) / softcap))
    return _reciprocal(1.0 + t) * (2.0 * softcap) - softcap
