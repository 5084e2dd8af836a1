"""Memory for the temporaries of ops that run between two graphs.

Such an op is bound at capture to fixed addresses (runtime/capture.py), its temporaries too, so they have to stay allocated. The
gaps of all steps of a pool run one after another, so they may all use the same memory: what the largest of them needs, and not
that much for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

_ALIGN = 512  # bytes, as the device allocator gives


class Workspace:
    """Blocks that only grow in number. What one call takes does not overlap; two calls share. A bound call keeps what it took."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def call(self) -> Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]:
        """An allocator for the temporaries of one call: ``(shape, dtype, device)`` -> uninitialised tensor."""
        used: dict[int, int] = {}

        def take(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            wanted = math.prod(shape) * dtype.itemsize
            with _disable_current_modes(), torch.inference_mode(False):
                device = torch.empty(0, device=device).device  # as tensors name it: "cuda" is the current one, with its index
                at = next((i for i, b in enumerate(self._blocks) if b.device == device and b.nbytes - used.get(i, 0) >= wanted), None)
                if at is None:
                    at = len(self._blocks)
                    self._blocks.append(torch.empty(max(wanted, 1), dtype=torch.uint8, device=device))
                start = used.get(at, 0)
                used[at] = start + -(-wanted // _ALIGN) * _ALIGN
                return self._blocks[at][start : start + wanted].view(dtype).view(*shape)

        return take

    def overwrite(self) -> None:
        """Junk into all of it: NaN in every float format."""
        for block in self._blocks:
            block.fill_(0xFF)
