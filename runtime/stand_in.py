"""A module in another's place: the same parameters, buffers and state_dict, and whatever else it has."""

from __future__ import annotations

from typing import Any, Self

import torch


class StandIn(torch.nn.Module):
    """Reads and writes of what this class has not are the module's. What is set before ``_is_made`` is true is this object's own."""

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # The same dictionaries: whatever is done to the parameters of one is done to those of the other.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["module"] = module  # past __setattr__, which would make it a submodule and change the state_dict
        del self.__dict__["training"]  # the module's

    def __setattr__(self, name: str, value: Any) -> None:
        """What is no attribute of this class is the module's, as for reading."""
        module = self.__dict__.get("module")
        own = "_is_made" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
        if own or module is None or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def train(self, mode: bool = True) -> Self:
        """As for the module. Graphs captured in the other mode are captured again at the next call, or it raises, as for weights."""
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)
