"""Decisions that all ranks of a run must share. Alone, a process agrees with itself.

Ranks run the same deterministic program; what they measure differs: times, free memory. A rank that picked another graph than the
others would issue other collectives, so each such number passes through ``largest``, and everyone goes on with the same one.
``runtime.parallel`` sets how ranks ask each other; it happens on the host.
"""

from __future__ import annotations

from collections.abc import Callable

_ask: Callable[[float], float] | None = None


def agree_through(ask: Callable[[float], float] | None) -> None:
    """``ask(value)`` returns the largest value of all ranks; None: this process is alone."""
    global _ask
    _ask = ask


def largest(value: float) -> float:
    """The largest of the ranks' values. All ranks call it at the same point."""
    return value if _ask is None else _ask(value)


def smallest(value: float) -> float:
    return -largest(-value)
