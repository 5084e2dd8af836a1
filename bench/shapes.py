"""Model shapes that the benchmarks run with random weights, as Hugging Face config keys."""

from runtime.shapes import LLAMA_1B, LLAMA_8B, TINY

__all__ = ["LLAMA_1B", "LLAMA_8B", "TINY"]
