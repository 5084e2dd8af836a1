"""Tensors among an op's arguments: which there are, what they are called, and which the op writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def short_name(op: Any) -> str:
    """``addmm`` for ``aten::addmm.default``, ``toy::mix`` for others."""
    return str(op._schema.name).removeprefix("aten::") if hasattr(op, "_schema") else str(op)


def storage_address(t: torch.Tensor) -> int:
    """Where the memory begins that a tensor is a view of."""
    return t.untyped_storage().data_ptr()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [t for item in tree for t in tensors_in(item)]


def named_tensors(op: Any, args: Any, kwargs: Any, names: Sequence[str] = ()) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensor arguments with the names of the op's schema, or with those given."""
    names = [a.name for a in op._schema.arguments] if op is not None else names
    for i, value in enumerate(args):
        name = names[i] if i < len(names) else f"input {i}"
        tensors = tensors_in(value)
        for j, t in enumerate(tensors):
            yield (name if len(tensors) == 1 else f"{name}[{j}]"), t
    for name, value in kwargs.items():
        for t in tensors_in(value):
            yield name, t


def written_arguments(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the op's schema declares as written."""
    if op is None or not op._schema.is_mutable:
        return []
    out: list[torch.Tensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            out += tensors_in(value)
    return out
