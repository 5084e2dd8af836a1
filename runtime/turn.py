"""Whose call of an engine is under way: other threads are refused, instead of going wrong or waiting for who knows how long."""

from __future__ import annotations

import threading


class Turn:
    """``with turn:`` holds it, also several times over in one thread. Raises RuntimeError while another thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another thread is in a call of this engine: let one thread call it, or take turns under a lock of yours")

    def __exit__(self, *error: object) -> None:
        self._lock.release()
