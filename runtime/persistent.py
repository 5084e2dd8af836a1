"""Watches the addresses of a module's parameters and buffers.

A graph reads the addresses of the day it was captured. Registration hooks see ``module.weight = …`` and a replaced submodule at
once; ``.data =``, ``.to(dtype)`` and ``_parameters[name] =`` fire none, so ``moved`` also sweeps over the slots, comparing the
address in each with the one remembered (about 0.07 µs a slot). ``load_state_dict`` copies in place and moves nothing.

Plain tensor attributes of modules are watched like buffers.
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
        """Take the present tensors as the right ones."""
        self.registered = False
        self._names, self._slots, self._keys = [], [], []
        self._modules = list(self._root.modules())  # kept alive: their ids stand in _watchers
        for prefix, module in self._root.named_modules():
            _watchers[id(module)].add(self)
            plain = {k: v for k, v in module.__dict__.items() if isinstance(v, torch.Tensor)}
            for slots, keys in ((module._parameters, None), (module._buffers, None), (module.__dict__, plain)):
                for key in slots if keys is None else keys:
                    if slots[key] is not None:
                        self._names.append(f"{prefix}.{key}" if prefix else key)
                        self._slots.append(slots)
                        self._keys.append(key)
        self._pointers = [t.data_ptr() for t in self.tensors().values()]

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, map(getitem, self._slots, self._keys), strict=True))

    def moved(self, sweep: bool = True) -> str | None:
        """The name of a tensor that is no longer where it was, or None. sweep: also look where no hook can see."""
        if self.registered:
            before = dict(zip(self._names, self._pointers, strict=True))
            probe = Persistent(self._root)
            after = dict(zip(probe._names, probe._pointers, strict=True))
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            if changed:
                return changed[0]
            self.refresh()
        if not sweep:
            return None
        try:
            pointers = list(map(_data_ptr, map(getitem, self._slots, self._keys)))
        except (KeyError, TypeError):  # deleted, or set to None
            pointers = [_address(slots.get(key)) for slots, key in zip(self._slots, self._keys, strict=True)]
        if pointers == self._pointers:
            return None
        return next(name for name, now, then in zip(self._names, pointers, self._pointers, strict=True) if now != then)

    @property
    def nbytes(self) -> int:
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors().values()}
        return sum(seen.values())


_data_ptr: Any = torch.Tensor.data_ptr


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else -1
