"""Facts about the device a kernel runs on, asked once and cached.

Kernels and tables take their numbers from here, never from a literal: one GPU's peaks are not another's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """What launchers may depend on. All fields are constant for a device, so a captured graph can bake them in."""

    arch: str  # "sm_90", "gfx942", or "cpu"
    num_sms: int  # multiprocessors; on the CPU a small number, so that grids in the interpreter stay small
    has_fp8: bool  # e4m3 conversions in hardware


@functools.cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target(properties.gcnArchName.split(":")[0], properties.multi_processor_count, has_fp8=False)
    return Target(
        arch=f"sm_{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        has_fp8=(properties.major, properties.minor) >= (8, 9),
    )


_CPU = Target(arch="cpu", num_sms=4, has_fp8=True)


def target_of(device: torch.device) -> Target:
    """The target of ``device`` (a CUDA device or the CPU, where Triton's interpreter stands in)."""
    if device.type == "cuda":
        return _cuda_target(device.index if device.index is not None else torch.cuda.current_device())
    return _CPU
