"""Model shapes that the benchmarks run with random weights, as Hugging Face config keys."""

from runtime.shapes import LLAMA_1B, LLAMA_8B, TINY

__all__ = ["BY_NAME", "LLAMA_1B", "LLAMA_8B", "TINY"]

BY_NAME = {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B}
