"""Programmatic dependent launch: in a captured step the next kernel starts while the one before ends, and fetches its weights meanwhile.

    TKERNELS_PDL=1, enable(True) before the capture, or ``with captures(True)`` around it; off by default

A kernel launched so begins before the one before it has finished. ``wait`` returns when that one has, with all that it wrote. So, in
every program, also in those that depart early: before ``wait`` nothing is read but weights, and nothing is written, since the memory may
still be read by the kernel before. ``wait`` then also lets the next kernel begin: not earlier, or that one could overtake two
kernels, and what it waits for would not be all that came before it.

Only captured launches are made so. Eager ones gain nothing, as the host is slower than the gap, and a weight that
has just been written (a cast, a load) would be read too early. Hence what is required of a captured step: it does not itself write a weight
that ``rms_norm``, ``linear`` or ``linear_rope_and_cache`` reads in it. The arithmetic is the same, and so are the bits.

Beside that, and always on, captured or not: kernels that one op launches for different rows of its output, a set, run beside each
other. The first one begins like any kernel; the others wait for nothing before they begin, as what they read was there before the first,
but they end no earlier than the one before them. So when the last one has ended all have. Hence, for who launches a set: its first kernel
is never left out; each has temporaries and counters of its own, which live until the last one was launched; and nothing that one of them
reads is written between their launches. Where it is (counters that torch has just zeroed: ``_counters.stood``), that one is ALONE.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tkernels import _repeats
from tkernels._target import target_of
from tkernels._triton import HAVE_TRITON, INTERPRETED, tl, triton

if HAVE_TRITON and not INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:  # never called: PDL is 0 there

    def gdc_wait() -> None: ...

    def gdc_launch_dependents() -> None: ...


ALONE, FIRST, BESIDE = 0, 1, 2  # a kernel by itself, the first one of a set, another one of it; a dependent one by itself has PDL=FIRST
_wanted = False


class _Here(threading.local):
    on: bool | None = None  # what this thread captures within ``captures``


_here = _Here()


def enable(on: bool) -> None:
    """For what is captured from now on; of this process."""
    global _wanted
    _wanted = on
    _note(on)
    if on:
        _repeats.forget()  # the next eager call loads what a capture needs


def enabled() -> bool:
    on = _here.on
    return _wanted if on is None else on


@contextmanager
def captures(on: bool) -> Iterator[None]:
    """For what this thread captures within, whatever ``enable`` said, and for the eager calls before it, which load what it needs."""
    before = _here.on
    _note(on)
    _here.on = on
    try:
        yield
    finally:
        _here.on = before


def _note(on: bool) -> None:
    if on:
        _repeats.DEPENDENT = enabled


enable(os.environ.get("TKERNELS_PDL", "0") in ("1", "true", "True"))


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, place: int = ALONE, **options: Any) -> Any:
    """``kernel[grid](*args, **options)`` with its ``PDL``, and with the launch attribute where it applies. Returns the compiled kernel.

    place: ALONE, or which one of a set it is.
    """
    if INTERPRETED or not _supported(device):
        return kernel[grid](*args, PDL=ALONE, **options)
    if place == BESIDE and torch.are_deterministic_algorithms_enabled():  # then torch.empty may write too: to this one's temporaries
        place = ALONE
    if place == BESIDE:
        return kernel[grid](*args, PDL=BESIDE, launch_pdl=True, **options)
    wanted = enabled()
    if wanted and torch.cuda.is_current_stream_capturing():
        return kernel[grid](*args, PDL=FIRST, launch_pdl=True, **options)
    if wanted:
        _ = kernel.warmup(*args, grid=grid, PDL=FIRST, launch_pdl=True, **options).run  # loads it, which a capture does not allow
    return kernel[grid](*args, PDL=place, **options)


def state(arch: str) -> str:
    """In words, for a device of that architecture."""
    if not _has(arch):
        return f"{arch} has none"
    return "on" if _wanted else "off, but in what an engine captures (TKERNELS_PDL=1 before the start turns it on for all captures)"


def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and _has(target_of(device).arch) and _driver() >= 12030


@functools.cache
def _driver() -> int:
    """CUDA of the driver, 12030 for 12.3: the first that captures dependent launches."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _has(arch: str) -> bool:
    """Compute capability 9.0 or more."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


@triton.jit
def wait(PDL: tl.constexpr):
    """Everything before in the stream has finished and is visible; the next kernel may begin to wait."""
    if PDL == 1:
        gdc_wait()
    if PDL > 0:  # another one of a set waits at its end
        gdc_launch_dependents()


@triton.jit
def depart(PDL: tl.constexpr):
    """The end of a program: one of a set does not end before the kernel before it."""
    if PDL == 2:
        gdc_wait()


@triton.jit
def prefetch_rows(rows, first, width, LINES: tl.constexpr, PDL: tl.constexpr):
    """Ask for LINES lines of 128 bytes of each row [N] of pointers to 2-byte elements, from column ``first``, into L2. Reads nothing."""
    if PDL:
        columns = tl.minimum(first + tl.arange(0, LINES) * 64, width - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [rows[:, None] + columns[None, :]], dtype=tl.int32, is_pure=False, pack=1
        )
