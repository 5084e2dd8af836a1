"""Device functions of the Lamport push protocol: the data is its own flag.

A message is cut into vectors of 16 bytes. A rank stores its vectors straight into its slot of every peer's workspace, then polls
its own workspace until the peers' vectors have arrived. A workspace word that nobody has written reads 0xFFFFFFFF (*empty*), which
is NaN in fp32 and twice NaN in bf16 and fp16; a sender turns such a word into another NaN. So no flag and no barrier is on the way.
The reader empties what it has read, and two halves of the workspace alternate by a launch counter in device memory, so nothing is
cleared or waited for at the end of a launch, and nothing of the protocol is a host value that a graph could freeze.
docs/collectives.md argues the ordering.

One lane is one vector: tensors are [lanes] with lanes = 32 · num_warps, so that each thread holds exactly one. Words are int32.
Every slot begins with a header of one vector (elements, op, launch, 0), by which ranks that disagree about a call are found.
"""

from __future__ import annotations

import time
from typing import Any

from tkernels._triton import INTERPRETED, tl, triton
from tkernels.collectives.words import int32s, load4, not_empty, of_rank, store4

HEADER_BYTES = 128  # in front of the data of a slot; one vector of it is used, the rest keeps the data on a 128-byte line
MAX_GRID = 512  # programs of a launch; half of the counter's step, see `advance`
REPORT_WORDS = 64  # int32 words of the error report in host memory; see the offsets below
STATE_WORDS = 64  # int32 words of device state in front of the words between programs

# State, in device memory: word 0 counts launches, 1 finished launches (each gains _TICK a launch), 2 is set once a launch has failed.
# Report, in memory that the host reads: word 0: op of a time-out, 1: op of a disagreement, 2: op of an overlap;
# from 8: 1 for each rank that did not arrive; from 24: elements, and from 40: op, in the header of a rank that disagreed.
# The counters wrap: a launch's number is the counter shifted, which rounds down also where it is negative, as division would not.
_TICK_BITS = tl.constexpr(10)
_TICK = tl.constexpr(1 << 10)
_HEADER = tl.constexpr(HEADER_BYTES)
_INTERPRETED = tl.constexpr(INTERPRETED)


def _wait_on_host(started: int, limit: Any) -> bool:
    """In the interpreter: let the other ranks run; whether there is time left."""
    time.sleep(0.0005)
    return time.monotonic_ns() - started < int(limit.handle.data.item())


# The compiler refuses kernels that refer to functions of the host, and None is no function.
_now: Any = time.monotonic_ns if INTERPRETED else None
_time_left: Any = _wait_on_host if INTERPRETED else None


@triton.constexpr_function
def _poll_asm(peers, rank, slot, op, fence):
    """The vectors of all ``peers`` at [pointer + s · slot], s ≠ rank: load them until none has an empty word, then empty them.

    Outputs 4 words a peer; inputs pointer, mask, state, report, limit in ns. At the limit: say who is missing, and go on with NaN.
    """
    words = [f"${i}" for i in range(4 * peers)]
    pointer, mask, state, report, limit = (f"${4 * peers + i}" for i in range(5))
    ranks = [s for s in range(peers + 1) if s != rank]
    four = [words[4 * j : 4 * j + 4] for j in range(peers)]
    lines = ["{ .reg .pred p, q; .reg .u32 n, t; .reg .u64 s, w;"]
    lines += [f"mov.u32 {word}, 0;" for word in words]
    lines += [f"setp.ne.s32 q, {mask}, 0; @!q bra DONE;"]
    lines += [f"setp.eq.u64 q, {limit}, 0; selp.u32 n, 1, 4096, q; mov.u64 s, 0;", "AGAIN:"]
    for own, s in zip(four, ranks, strict=True):
        lines += [f"ld.relaxed.sys.global.v4.b32 {{{','.join(own)}}}, [{pointer}+{s * slot}];"]
    lines += [f"max.u32 t, {words[0]}, {words[1]};"] + [f"max.u32 t, t, {word};" for word in words[2:]]
    lines += ["setp.ne.u32 p, t, 0xffffffff; @p bra ARRIVED;", "sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra AGAIN;"]
    # The clock is read once in 4096 polls, about a millisecond.
    lines += ["mov.u64 w, %globaltimer; setp.eq.u64 p, s, 0; @p mov.u64 s, w; sub.u64 w, w, s; mov.u32 n, 4096;"]
    lines += [f"setp.lt.u64 p, w, {limit}; @p bra AGAIN;", "@q bra ARRIVED;"]  # q: this group has failed before, nothing new to say
    lines += [f"mov.u32 n, 1; st.relaxed.sys.global.u32 [{state}+8], n;"]
    for own, s in zip(four, ranks, strict=True):
        lines += [f"max.u32 t, {own[0]}, {own[1]}; max.u32 t, t, {own[2]}; max.u32 t, t, {own[3]};"]
        lines += [f"setp.eq.u32 p, t, 0xffffffff; @p st.relaxed.sys.global.u32 [{report}+{32 + 4 * s}], n;"]
    lines += [f"fence.acq_rel.sys; mov.u32 t, {op}; st.relaxed.sys.global.u32 [{report}], t;"]  # after its details
    lines += ["ARRIVED:", "fence.acq_rel.sys;" if fence else "", "mov.u32 t, 0xffffffff;"]
    lines += [f"st.relaxed.sys.global.v4.b32 [{pointer}+{s * slot}], {{t,t,t,t}};" for s in ranks]
    return "\n".join(lines) + "\nDONE: }"


@triton.constexpr_function
def _poll_constraints(peers):
    return ",".join(["=&r"] * (4 * peers)) + ",l,r,l,l,l"


@triton.jit
def poll(
    address, mask, state, report, limit, OP: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT: tl.constexpr, FENCE: tl.constexpr
):
    """Wait for the vectors of all other ranks at address + s · SLOT; returns 4 (WORLD - 1) words in rank order and empties them.

    limit: nanoseconds; 0 takes one look. What has not arrived by then stays empty, so NaN, and state and report say so.
    """
    if _INTERPRETED:
        got = ()
        started = _now()
        gave_up = False
        for s in tl.static_range(WORLD):
            if s != RANK:
                a, b, c, d = load4(address + s * SLOT, mask)
                while tl.max(((a == -1) | (b == -1) | (c == -1) | (d == -1)).to(tl.int32) * mask, 0) != 0 and _time_left(started, limit):
                    a, b, c, d = load4(address + s * SLOT, mask)
                if tl.max(((a == -1) | (b == -1) | (c == -1) | (d == -1)).to(tl.int32) * mask, 0) != 0 and limit > 0:
                    tl.store((report + 32 + 4 * s).to(tl.pointer_type(tl.int32)), 1)
                    gave_up = True
                empty = a * 0 - 1
                store4(address + s * SLOT, empty, empty, empty, empty, mask)
                got = got + (a, b, c, d)  # type: ignore[assignment]
        if gave_up:
            tl.store((state + 8).to(tl.pointer_type(tl.int32)), 1)
            tl.store(report.to(tl.pointer_type(tl.int32)), OP)
        return got
    else:
        return tl.inline_asm_elementwise(
            _poll_asm(WORLD - 1, RANK, SLOT, OP, FENCE), _poll_constraints(WORLD - 1), [address, mask, state, report, limit],
            dtype=int32s(4 * (WORLD - 1)), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def swap(to, word, source, mask, limit):
    """Store ``word`` (int64) at ``to``, take the word at ``source`` once it is not empty, and empty it. Between programs of one GPU.

    The interpreter runs programs one after another, so there a program may only swap with itself.
    """
    if _INTERPRETED:
        tl.store(to.to(tl.pointer_type(tl.int64)), word, mask != 0)
        taken = tl.load(source.to(tl.pointer_type(tl.int64)), mask != 0, 0)
        tl.store(source.to(tl.pointer_type(tl.int64)), taken * 0 - 1, mask != 0)
        return taken
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p, q; .reg .u32 n; .reg .u64 e, s, w; setp.ne.s32 q, $4, 0; mov.u64 $0, 0; @!q bra DONE;"
            "mov.u64 e, 0xffffffffffffffff; mov.u64 s, 0; mov.u32 n, 4096; st.relaxed.gpu.global.u64 [$1], $2;"
            "AGAIN: ld.relaxed.gpu.global.u64 $0, [$3]; setp.ne.u64 p, $0, e; @p bra ARRIVED;"
            "sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra AGAIN; mov.u32 n, 4096;"
            "mov.u64 w, %globaltimer; setp.eq.u64 p, s, 0; @p mov.u64 s, w; sub.u64 w, w, s; setp.lt.u64 p, w, $5; @p bra AGAIN;"
            "ARRIVED: st.relaxed.gpu.global.u64 [$3], e; DONE: }",
            "=&l,l,l,l,r,l", [to, word, source, mask, limit], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def push(workspaces, offset, words, mask, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store ``words`` at ``offset`` of every peer's workspace, the next rank first, so that the links share the load."""
    a, b, c, d = not_empty(words[0]), not_empty(words[1]), not_empty(words[2]), not_empty(words[3])
    for step in tl.static_range(1, WORLD):
        store4(workspaces[(RANK + step) % WORLD] + offset, a, b, c, d, mask)


@triton.jit
def begin(state, limit, FENCE: tl.constexpr):
    """(number of this launch, whether the group still works, ns to wait). Nothing is pushed once a launch has failed: a peer
    must not take the rest for data."""
    p = state.to(tl.pointer_type(tl.int32))
    launch = tl.load(p, volatile=True) >> _TICK_BITS
    finished = tl.load(p + 1, volatile=True) >> _TICK_BITS
    failed = tl.load(p + 2, volatile=True)
    if FENCE:
        if not _INTERPRETED:
            launch += tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.u32 $0, 0;", "=r,r", [launch], dtype=tl.int32, is_pure=False, pack=1
            )
    return launch, finished, (failed == 0).to(tl.int32), tl.where(failed == 0, limit, 0)


@triton.jit
def _share():
    """What a program adds to the counters, _TICK in all over a launch of any grid."""
    return tl.where(tl.program_id(0) == 0, _TICK + 1 - tl.num_programs(0), 1)


@triton.jit
def advance(state, LANES: tl.constexpr):
    """Count this launch; lane 0 gets the count before, which ``end`` looks at, so that nobody waits for it here.

    A program that has not added its share can never read the number of the next launch.
    """
    tl.debug_barrier()  # all threads have read the counter
    lanes = tl.arange(0, LANES)
    # Only lane 0 acts. The pointers differ by lane because the compiler makes one atomic of equal ones and shuffles its result: that
    # and the result of a scalar atomic, which goes to all threads behind a barrier, are waited for at once.
    pointers = state.to(tl.pointer_type(tl.int32)) + lanes
    return tl.atomic_add(pointers, _share() + lanes * 0, mask=lanes == 0, sem="relaxed", scope="gpu")


@triton.jit
def end(state, report, launch, finished, counted, OP: tl.constexpr, LANES: tl.constexpr):
    """Count this launch as finished, and report it if another launch of the group overlapped it (two streams, two graphs at once).

    In order, as many launches have finished as had begun before this one, and every share falls into this launch's thousand. Of two
    launches that took the same number, some share falls into the next thousand, or a second program 0 finds the first one's share,
    which is more than half.
    """
    lanes = tl.arange(0, LANES)
    p = state.to(tl.pointer_type(tl.int32))
    tl.atomic_add(p + 1, _share(), sem="relaxed", scope="gpu")
    again = (tl.program_id(0) == 0) & ((counted & (_TICK - 1)) >= _TICK // 2)
    overlap = (lanes == 0) & ((finished != launch) | ((counted >> _TICK_BITS) != launch) | again)
    tl.store(p + 2 + lanes * 0, 1, mask=overlap)
    tl.store((report + 8).to(tl.pointer_type(tl.int32)) + lanes * 0, OP, mask=overlap)


@triton.jit
def slot_offset(launch, v, vectors, HALF: tl.constexpr):
    """Byte offset of vector v in a slot of this launch's half; the vector after the last is the header."""
    return (launch & 1).to(tl.int64) * HALF + tl.where(v == vectors, 0, _HEADER + v.to(tl.int64) * 16)


@triton.jit
def with_header(words, is_header, n, OP: tl.constexpr, launch):
    a, b, c, d = words
    return tl.where(is_header, n, a), tl.where(is_header, OP, b), tl.where(is_header, launch & 0xFFFF, c), tl.where(is_header, 0, d)


@triton.jit
def check_headers(here, is_header, got, n, OP: tl.constexpr, launch, state, report, alive, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Compare the headers of all ranks with this one's, in the program that has them (``here``). ``poll`` has reported absent ones."""
    if here:
        p = report.to(tl.pointer_type(tl.int32)) + is_header.to(tl.int32) * 0
        for s in tl.static_range(WORLD):
            if s != RANK:
                their_n, their_op, their_launch, _ = of_rank(got, s, RANK)
                same = (their_n == n) & (their_op == OP) & (their_launch == (launch & 0xFFFF))
                differs = is_header & (their_n != -1) & (alive != 0) & (same == 0)
                tl.store(p + 24 + s, their_n, mask=differs)
                tl.store(p + 40 + s, their_op, mask=differs)
                tl.store(p + 1, OP, mask=differs)
                tl.store(state.to(tl.pointer_type(tl.int32)) + 2 + is_header.to(tl.int32) * 0, 1, mask=differs)
