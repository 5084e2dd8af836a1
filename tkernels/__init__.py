"""Triton kernels for transformer inference, safe to capture in CUDA graphs."""

from tkernels.activation import gelu_and_mul, gelu_mul, silu_and_mul, silu_mul
from tkernels.attention import cascade_attention, merge_attention, paged_attention, paged_attention_out
from tkernels.embedding import embedding, embedding_rms_norm
from tkernels.fp8 import (
    add_rms_norm_fp8,
    add_rms_norm_fp8_dynamic,
    rms_norm_fp8,
    rms_norm_fp8_dynamic,
    silu_and_mul_fp8,
    silu_and_mul_fp8_dynamic,
)
from tkernels.head import linear_argmax
from tkernels.layernorm import layer_norm
from tkernels.linear import linear
from tkernels.logits import adjust_logits, count_tokens
from tkernels.logprobs import top_logprobs
from tkernels.qkv import linear_rope_and_cache
from tkernels.quant import quantize_fp8, quantize_fp8_per_block, quantize_fp8_per_token
from tkernels.rmsnorm import add_rms_norm, rms_norm
from tkernels.rope import rope, rope_and_cache
from tkernels.sampling import sample

__all__ = [
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_rms_norm_fp8_dynamic",
    "adjust_logits",
    "cascade_attention",
    "count_tokens",
    "embedding",
    "embedding_rms_norm",
    "gelu_and_mul",
    "gelu_mul",
    "layer_norm",
    "linear",
    "linear_argmax",
    "linear_rope_and_cache",
    "merge_attention",
    "paged_attention",
    "paged_attention_out",
    "quantize_fp8",
    "quantize_fp8_per_block",
    "quantize_fp8_per_token",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_fp8_dynamic",
    "rope",
    "rope_and_cache",
    "sample",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "silu_and_mul_fp8_dynamic",
    "silu_mul",
    "top_logprobs",
]
