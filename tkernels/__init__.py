"""Triton kernels for transformer inference, safe to capture in CUDA graphs."""

from tkernels.linear import linear
from tkernels.rmsnorm import add_rms_norm, rms_norm

__all__ = ["linear", "add_rms_norm", "rms_norm"]
