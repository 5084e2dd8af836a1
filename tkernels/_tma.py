"""Descriptors for TMA, Hopper's copies between global and shared memory, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def tma_problem(tensor: torch.Tensor) -> str | None:
    """Why no TMA descriptor can describe ``tensor``."""
    if tensor.numel() == 0:
        return "empty"
    if tensor.data_ptr() % 16:
        return "its address is no multiple of 16 bytes"
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        if size > 1 and (stride == 0 or stride * tensor.element_size() % 16):
            return f"strides {list(tensor.stride())}: expected multiples of 16 bytes"
    return None


def descriptor(tensor: torch.Tensor, box: list[int], layout: Any) -> Any:
    """Of ``tensor`` in boxes of this shape."""
    # the stride of a dimension of one element means nothing, but TMA wants a multiple of 16 bytes
    strides = [stride if size > 1 else 16 // tensor.element_size() for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return described(tensor, tensor.shape, [*strides[:-1], 1], box, layout)


def described(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: list[int], layout: Any) -> Any:
    """Of ``tensor``'s memory as ``shape`` with ``strides``, which no view need have: one would cost as much as the descriptor."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(shape), list(strides), box, layout)
