"""Triton kernels for transformer inference, safe to capture in CUDA graphs."""

from tkernels.activation import gelu_and_mul, gelu_mul, silu_and_mul, silu_mul
from tkernels.attention import paged_attention, paged_attention_out
from tkernels.linear import linear
from tkernels.rmsnorm import add_rms_norm, rms_norm
from tkernels.rope import rope, rope_and_cache
from tkernels.sampling import sample

__all__ = [
    "add_rms_norm",
    "gelu_and_mul",
    "gelu_mul",
    "linear",
    "paged_attention",
    "paged_attention_out",
    "rms_norm",
    "rope",
    "rope_and_cache",
    "sample",
    "silu_and_mul",
    "silu_mul",
]
