"""What the suites compare with: which peers are installed, in which version, and how each is called.

A peer that is not there is listed as absent, with the reason, in the JSON and in pytest's summary. On a machine without a GPU only
torch itself is a peer: the suites are smoke tests there.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

OURS = "tkernels"
EAGER = "torch eager"
INDUCTOR = "Inductor"
LIGER = "Liger"
FLASHINFER = "FlashInfer"
_PACKAGES = {LIGER: "liger-kernel", FLASHINFER: "flashinfer-python"}


@functools.cache
def versions() -> dict[str, str]:
    """Peer → its version, or "absent: why"."""
    found = {EAGER: str(torch.__version__), INDUCTOR: str(torch.__version__)}
    for peer, package in _PACKAGES.items():
        try:
            found[peer] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[peer] = f"absent: {package} is not installed"
    if not torch.cuda.is_available():
        for peer in found:
            if peer != EAGER:
                found[peer] = "absent: the smoke test on a CPU compares with torch eager only"
    return found


def why_absent(peer: str) -> str | None:
    """The reason for which ``peer`` (or the package that its name begins with) cannot run here."""
    known = next((name for name in versions() if peer.startswith(name)), None)
    if known is not None and versions()[known].startswith("absent: "):
        return versions()[known].removeprefix("absent: ")
    if known is None and not peer.startswith((OURS, "torch")) and not torch.cuda.is_available():
        return "the smoke test on a CPU compares with torch eager only"
    return None


def why_not_compiled(peer: str, failure: BaseException | None) -> str | None:
    """The reason why a compiled peer has no result: its compiler failed. None for any other failure (a wrong answer, say), and
    for our own kernels, whose compiler may not fail."""
    from torch._dynamo.exc import BackendCompilerFailed

    if peer.startswith(OURS) or not isinstance(failure, BackendCompilerFailed):
        return None
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"torch {torch.__version__} cannot compile it: {type(failure).__name__}: {lines[0] if lines else ''}"[:200]


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled for the shapes that it is called with."""
    return torch.compile(function, dynamic=False, fullgraph=True)
