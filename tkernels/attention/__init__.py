"""Attention over a paged KV cache."""

from tkernels.attention.paged import paged_attention, paged_attention_out

__all__ = ["paged_attention", "paged_attention_out"]
