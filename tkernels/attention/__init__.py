"""Attention over a paged KV cache, and over contiguous ones."""

from tkernels.attention.cascade import cascade_attention
from tkernels.attention.merge import merge_attention
from tkernels.attention.padded import PaddedLayout, padded_attention, padded_layout
from tkernels.attention.paged import paged_attention, paged_attention_out

__all__ = [
    "PaddedLayout",
    "cascade_attention",
    "merge_attention",
    "padded_attention",
    "padded_layout",
    "paged_attention",
    "paged_attention_out",
]
