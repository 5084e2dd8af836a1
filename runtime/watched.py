"""Whether any of the watched dictionaries has changed, in constant time.

CPython (3.12 and later) tells a watcher of every change of a dictionary, and torch.compile's watcher numbers the changes of all
dictionaries it was asked about with one counter. A dictionary of our own, changed on purpose, reads that counter: if it has only
gone up by our own changes, no watched dictionary has changed. This takes a third of a microsecond, for any number of them.

The counter is torch's own affair, so ``EPOCH`` is None unless a trial at import shows that it counts as said; callers then look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._dynamo import guards


class Epoch:
    """version: a function that begins to watch a dictionary and returns the number of its latest change."""

    def __init__(self, version: Callable[[dict[Any, Any]], int]) -> None:
        self._version = version
        self._probe: dict[str, int] = {"": 0}
        self._asked = 0
        version(self._probe)

    def watch(self, dicts: Iterable[dict[Any, Any]]) -> None:
        """They must be kept alive."""
        for each in dicts:
            self._version(each)

    def now(self) -> int:
        """Equal at two times between which no watched dictionary was changed. Also another number when one is watched anew."""
        asked = self._asked = self._asked + 1  # a number of this call's own: threads that meet here make it differ, never equal
        self._probe[""] = asked
        return self._version(self._probe) - asked


def _counts_changes(epoch: Epoch) -> bool:
    """Whether each way to change a module's dictionaries shows, and nothing else does."""
    module = torch.nn.Linear(1, 1, bias=False, device="meta")
    hooks: dict[int, Any] = OrderedDict()
    module.scale = 1.0  # type: ignore[assignment]
    epoch.watch([module.__dict__, module._parameters, hooks])
    changes: list[Callable[[], object]] = [
        lambda: setattr(module, "scale", 2.0),
        lambda: module.eval(),
        lambda: setattr(module, "forward", lambda x: x),
        lambda: module._parameters.__setitem__("weight", torch.nn.Parameter(module.weight.detach())),
        lambda: module._parameters.pop("weight"),
        lambda: hooks.__setitem__(1, None),
        lambda: hooks.__delitem__(1),
        lambda: delattr(module, "scale"),
    ]
    for change in changes:
        before = epoch.now()
        others = {"not": "watched"}
        others["it"] = "either"
        if epoch.now() != before:
            return False
        change()
        if epoch.now() == before:
            return False
    return True


def _made() -> Epoch | None:
    try:
        epoch = Epoch(guards.dict_version)
        return epoch if _counts_changes(epoch) else None
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):  # this torch has no such function, or another one
        return None


EPOCH: Epoch | None = _made()
