"""Watches the addresses of a module's parameters and buffers.

A graph reads the addresses of the day it was captured. Registration hooks see ``module.weight = …`` and a replaced submodule at
once; ``.data =``, ``.to(dtype)`` and ``_parameters[name] =`` fire none, so ``moved`` also sweeps over the slots, comparing the
address in each with the one remembered (about 0.07 µs a slot). ``load_state_dict`` copies in place and moves nothing.

Plain tensor attributes of modules are watched like buffers, and so are numbers, flags and texts (``module.scale = 0.5``): a graph
has frozen them. Those of torch's own modules are left out, they say what the parameters' shapes say.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from operator import getitem
from typing import Any

import torch
from torch.nn.modules import module as _module

_watchers: dict[int, weakref.WeakSet[Persistent]] = defaultdict(weakref.WeakSet)  # by id of the registering module


def _registered(owner: torch.nn.Module, name: str, value: object) -> None:
    for watcher in _watchers.get(id(owner), ()):
        watcher.registered = True


for _register in (
    _module.register_module_parameter_registration_hook,
    _module.register_module_buffer_registration_hook,
    _module.register_module_module_registration_hook,
):
    _register(_registered)


class Persistent:
    """The persistent tensors of a module and their addresses as of the last ``refresh``."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = module
        self.refresh()

    def refresh(self) -> None:
        """Take the present tensors and values as the right ones."""
        self.registered = False
        self._tensors, self._values = _Slots(), _Slots()
        self._modules = list(self._root.modules())  # kept alive: their ids stand in _watchers
        for prefix, module in self._root.named_modules():
            _watchers[id(module)].add(self)
            for slots in (module._parameters, module._buffers, module.__dict__):
                for key, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        self._tensors.add(f"{prefix}.{key}" if prefix else key, slots, key)
                    elif slots is module.__dict__ and isinstance(value, _FROZEN) and (not prefix or not _of_torch(module)):
                        self._values.add(f"{prefix}.{key}" if prefix else key, slots, key)
        self._pointers = [t.data_ptr() for t in self._tensors.now()]
        self._all = list(range(len(self._pointers)))
        self._frozen = self._values.now()

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._tensors.names, self._tensors.now(), strict=True))

    def forget_changed_values(self) -> None:
        """Stop watching values that differ now: the module changes them itself as it runs (a counter, a flag)."""
        kept = _Slots()
        for name, slots, key, then in zip(self._values.names, self._values.dicts, self._values.keys, self._frozen, strict=True):
            if slots.get(key) == then:
                kept.add(name, slots, key)
        self._values, self._frozen = kept, kept.now()

    def code(self) -> tuple[Any, ...]:
        """Changes when compiled code may no longer be right for the module: shapes, dtypes, frozen values; not addresses."""
        shapes = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in self.tensors().items()]
        return tuple(shapes), tuple(zip(self._values.names, self._frozen, strict=True))

    def moved(self, sweep: bool = True) -> str | None:
        """The name of a tensor that is no longer where it was, or of a value that changed; None if all is as it was.

        sweep: also look where no hook can see.
        """
        if self.registered:
            before = dict(zip(self._tensors.names, self._pointers, strict=True))
            probe = Persistent(self._root)
            after = dict(zip(probe._tensors.names, probe._pointers, strict=True))
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            if changed:
                return changed[0]
            self.refresh()
        if not sweep:
            return None
        try:
            if _same_pointers(self._tensors.now(), self._pointers, self._all) and self._values.now() == self._frozen:
                return None
        except (KeyError, TypeError, RuntimeError, AttributeError):  # deleted, set to None, or without a storage
            pass
        for name, slots, key, then in zip(self._tensors.names, self._tensors.dicts, self._tensors.keys, self._pointers, strict=True):
            value = slots.get(key)
            if not isinstance(value, torch.Tensor) or value.data_ptr() != then:
                return name
        for name, slots, key, then in zip(self._values.names, self._values.dicts, self._values.keys, self._frozen, strict=True):
            if key not in slots or slots[key] != then:
                return name
        return None


class _Slots:
    """Places in dictionaries, read all at once without a Python loop."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dicts: list[Any] = []
        self.keys: list[str] = []

    def add(self, name: str, slots: Any, key: str) -> None:
        self.names.append(name)
        self.dicts.append(slots)
        self.keys.append(key)

    def now(self) -> list[Any]:
        return list(map(getitem, self.dicts, self.keys))


_FROZEN = (bool, int, float, str, type(None))
_data_ptr: Any = torch.Tensor.data_ptr


def _of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _pointers_in_python(tensors: list[torch.Tensor], pointers: list[int], indices: list[int]) -> bool:
    return list(map(_data_ptr, tensors)) == pointers


# CUDA builds of torch have this comparison in C++, a tenth of the time
_same_pointers: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _pointers_in_python)
