"""What went wrong in a trace, out of what Dynamo wraps around it."""

from __future__ import annotations

import re

from runtime.signature import BindError, TraceError


class OwnLength(TraceError):
    """A slice whose length has a symbol of its own."""


def is_size_error(error: BaseException) -> bool:
    """Whether a trace failed because the code looks at a size: ordinary symbols may do where plain unknowns did not."""
    while error is not None:
        if type(error).__name__ in (
            "GuardOnDataDependentSymNode",
            "PendingUnbackedSymbolNotFound",
            "ConstraintViolationError",
            "OwnLength",
        ):
            return True
        if "data-dependent" in str(error) or "unbacked" in str(error).lower():
            return True
        error = error.__cause__  # type: ignore[assignment]
    return False


def first_line(error: BaseException) -> str:
    """Of the error that was the cause of all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def readable(error: BaseException) -> Exception:
    """The error that the user should see, from inside what Dynamo wraps around it."""
    chain: list[BaseException] = []
    walk: BaseException | None = error
    while walk is not None and walk not in chain:
        chain.append(walk)
        walk = walk.__cause__ or walk.__context__
    ours = next((link for link in chain if isinstance(link, TraceError | BindError)), None)
    if ours is not None:
        return ours
    text = str(error)
    where = [line.strip() for line in text.splitlines() if line.strip().strip("^~ ")]
    if fixed := re.search(r"specialized it to be a constant \((\d+)\)", text):
        return TraceError(
            f"dynamic: the module's code fixes a size named there to {fixed[1]}, at: {where[-1]}. Take that dimension out of dynamic, "
            "or do not use its value (a loop over it, int(), a shape written as a number)"
        )
    if "side effects" in text:
        return TraceError(
            "the module has side effects in Python: forward changes an attribute, a list or a global, which a captured step would not do "
            'again. Return the value instead, or set compile.split = "capture" and compile.backend = "eager"'
        )
    return TraceError(
        "the module does not trace into one graph: " + "\n".join(where)[:2000] + "\nChange the code that the message points at, or set "
        'compile.split = "capture" and compile.backend = "eager", which need no trace'
    )
