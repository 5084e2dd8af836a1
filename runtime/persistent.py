"""Watches the addresses of a module's parameters and buffers.

A graph reads the addresses of the day it was captured. Registration hooks see ``module.weight = …`` and a replaced submodule at
once; ``.data =``, ``.to(dtype)`` and ``_parameters[name] =`` fire none, so ``moved`` also sweeps over the slots, comparing the
address and the layout in each with those remembered. ``load_state_dict`` copies in place and moves nothing.

Plain tensor attributes of modules are watched like buffers, and so are numbers, flags and texts (``module.scale = 0.5``): a graph
has frozen them. Of torch's own modules with parameters the sizes are left out, they say what the parameters' shapes say; ``eps``,
``p`` and ``training`` are not. Hooks, a replaced ``forward`` and the children of each module are watched too: a graph holds the
kernels of those of its capture.

Where the interpreter tells of changed dictionaries (runtime/watched.py), the slots are read again only after one was changed; what is
left for each step are the addresses and layouts, which a loop in C compares (runtime/native.py).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import repeat
from operator import getitem, is_
from typing import Any

import torch
from torch.nn.modules import module as _module

from runtime import addresses, watched

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
        named = dict(self._root.named_modules())
        self._modules = list(named.values())  # kept alive: their ids stand in _watchers
        self._module_names = list(named)
        for prefix, module in named.items():
            _watchers[id(module)].add(self)
            frozen = _FROZEN if not prefix or not _of_torch(module) or not (module._parameters or module._buffers) else (bool, float, str)
            sizes = _sizes_of_torch(module)
            for slots in (module._parameters, module._buffers, module.__dict__):
                for key, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        self._tensors.add(f"{prefix}.{key}" if prefix else key, slots, key)
                    elif slots is module.__dict__ and isinstance(value, frozen) and key not in sizes:
                        self._values.add(f"{prefix}.{key}" if prefix else key, slots, key)
        now = self._now = self._tensors.now()
        addressed = list(map(_address, now))
        if None in addressed:
            i = addressed.index(None)
            raise ValueError(
                f"{self._tensors.names[i]}: expected a dense tensor with memory of its own, which graphs read by its address, "
                f"got {now[i].layout} {list(now[i].shape)}; make it dense, or run the module itself"
            )
        self._pointers = addressed
        self._layouts = list(map(addresses.layout_of, now))
        self._devices = [t.device for t in now]
        self._stay = addresses.stays(now)
        self._frozen = self._values.now()
        self._dicts: list[dict[str, Any]] = [m.__dict__ for m in self._modules]
        self._hooks: list[dict[int, Any]] = [d for m in self._modules for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks_then = [d.copy() for d in self._hooks]
        self._forwards = list(map(dict.get, self._dicts, repeat("forward")))
        # Read through the modules' dictionaries: deleting from a ModuleList makes it a new dictionary of children.
        self._parents = [m.__dict__ for m in self._modules if m._modules or isinstance(m, _CONTAINERS)]
        self._children: list[dict[str, Any]] = [each["_modules"].copy() for each in self._parents]
        self._epoch: int | None = None  # not looked at yet
        if watched.EPOCH is not None:
            slots = (d for m in self._modules for d in (m._parameters, m._buffers, m._modules))
            watched.EPOCH.watch([*self._dicts, *self._hooks, *slots])

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._tensors.names, self._tensors.now(), strict=True))

    def forget_changed_values(self) -> None:
        """Stop watching values that differ now: the module changes them itself as it runs (a counter, a flag)."""
        kept = _Slots()
        for name, slots, key, then in zip(self._values.names, self._values.dicts, self._values.keys, self._frozen, strict=True):
            if key in slots and same_value(slots[key], then):
                kept.add(name, slots, key)
        self._values, self._frozen = kept, kept.now()

    def code(self) -> tuple[Any, ...]:
        """Changes when compiled code may no longer be right for the module: shapes, dtypes, frozen values; not addresses. All as of
        the last ``refresh``."""
        shapes = zip(self._tensors.names, self._layouts, self._devices, strict=True)
        values = [(name, value.__class__, repr(value)) for name, value in zip(self._values.names, self._frozen, strict=True)]
        return (
            tuple(shapes),
            tuple(values),
            tuple(map(tuple, self._hooks_then)),
            tuple(map(id, self._modules)),
            tuple(map(id, self._forwards)),
        )

    def moved(self, sweep: bool = True) -> str | None:
        """The name of a tensor that is no longer where it was, or of a value that changed; None if all is as it was.

        sweep: also look where no hook can see.
        """
        if self.registered:
            probe = Persistent(self._root)
            before, after = self._facts(), probe._facts()
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            changed = changed or [name for name in (self._changed_value(), self._changed_code()) if name]
            if changed:
                return changed[0]
            self.refresh()
        if not sweep:
            return None
        epoch = None if watched.EPOCH is None else watched.EPOCH.now()
        try:
            unchanged = epoch is not None and epoch == self._epoch  # the same objects in every slot
            now = self._now if unchanged else self._tensors.now()
            if self._stay(now):
                if unchanged:
                    return None
                values = self._values.now()
                if not all(map(is_, values, self._frozen)):
                    if not all(map(same_value, values, self._frozen)):
                        return self._changed_value()
                    self._frozen = values  # other objects of the same value
                changed_code = self._changed_code()
                if changed_code is None:
                    self._now, self._epoch = now, epoch
                return changed_code
        except (KeyError, TypeError, RuntimeError, AttributeError):  # deleted, set to None, or without a storage
            pass
        at = zip(self._tensors.names, self._tensors.dicts, self._tensors.keys, self._pointers, self._layouts, strict=True)
        for name, slots, key, then, layout in at:
            value = slots.get(key)
            if not isinstance(value, torch.Tensor) or _address(value) != then or addresses.layout_of(value) != layout:
                return name
        value_or_code = self._changed_value() or self._changed_code()
        if value_or_code is None:  # other objects over the same memory: from now on these
            self._stay = addresses.stays(self._tensors.now())
        return value_or_code

    def _facts(self) -> dict[str, Any]:
        """What a new registration may change, by name."""
        facts: dict[str, Any] = {f"module {n or 'itself'}": id(m) for n, m in zip(self._module_names, self._modules, strict=True)}
        return {**dict(zip(self._tensors.names, zip(self._pointers, self._layouts, strict=True), strict=True)), **facts}

    def _changed_value(self) -> str | None:
        for name, slots, key, then in zip(self._values.names, self._values.dicts, self._values.keys, self._frozen, strict=True):
            if key not in slots or not same_value(slots[key], then):
                return name
        return None

    def _changed_code(self) -> str | None:
        """A hook that was added or removed, a ``forward`` that was replaced, or a child that came, went or moved."""
        if self._hooks != self._hooks_then:
            i = next(i for i, (d, then) in enumerate(zip(self._hooks, self._hooks_then, strict=True)) if d != then)
            return f"the hooks of {self._module_names[i // 2] or 'the module'}"
        forwards = list(map(dict.get, self._dicts, repeat("forward")))
        if forwards != self._forwards:
            i = next(i for i, (now, then) in enumerate(zip(forwards, self._forwards, strict=True)) if now is not then)
            return f"forward of {self._module_names[i] or 'the module'}"
        children = list(map(getitem, self._parents, repeat("_modules")))
        if children != self._children:
            parent = next(d for d, now, then in zip(self._parents, children, self._children, strict=True) if now != then)
            name = next(name for name, d in zip(self._module_names, self._dicts, strict=True) if d is parent)
            return f"the children of {name or 'the module'}"
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


_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)  # the first child may come past every hook
_FROZEN = (bool, int, float, str, type(None))


def _address(tensor: torch.Tensor) -> int | None:
    """None: it has no memory of its own, as a sparse one."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def same_value(a: object, b: object) -> bool:
    """The same to a kernel: True, 1 and 1.0 are not, nor are 0.0 and -0.0; a NaN is."""
    return a is b or (a.__class__ is b.__class__ and (repr(a) == repr(b) if isinstance(a, float) else a == b))


def _sizes_of_torch(module: torch.nn.Module) -> set[str]:
    """Attributes that say nothing new: sizes that a class of torch's own keeps of its parameters, in a class made from it too; and a
    flag that backward sets."""
    names = {"_is_full_backward_hook"}
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.nn.") and (module._parameters or module._buffers):
            names |= {name for name in cls.__dict__.get("__constants__", ()) if type(module.__dict__.get(name)) is int}
    return names


def _of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
