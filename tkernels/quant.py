"""Conversion to fp8 (e4m3), the one convention of this package: ``stored = saturate(x / scale)`` and ``x ≈ stored · scale``.

Values beyond ±448 saturate, infinities included; NaN stays NaN. The division is in fp32 and rounded to nearest even once.
"""

from __future__ import annotations

import torch

from tkernels._triton import cast, tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8_ref(x: torch.Tensor) -> torch.Tensor:
    """x (fp32 or wider) saturated to ±448 and rounded to e4m3."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


@triton.jit
def to_fp8(x):
    """x (fp32) saturated to ±448 and rounded to e4m3. Comparisons rather than minimum and maximum, which would turn NaN into 448."""
    x = tl.where(x > 448.0, 448.0, x)
    x = tl.where(x < -448.0, -448.0, x)
    return cast(x, tl.float8e4nv)
