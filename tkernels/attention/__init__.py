"""Attention over a paged KV cache, and over contiguous ones."""

from tkernels.attention.padded import PaddedLayout, padded_attention, padded_layout
from tkernels.attention.paged import paged_attention, paged_attention_out

__all__ = ["PaddedLayout", "padded_attention", "padded_layout", "paged_attention", "paged_attention_out"]
