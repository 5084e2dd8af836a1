"""A cost table from a GPU's data sheet and a model's shape, for simulations without a device. An estimate, not a measurement.

Time on the device: the larger of bytes over bandwidth and operations over arithmetic, both at the share of the roof that good
kernels reach, and a fixed cost a kernel. Time on the host: a fixed cost a kernel that it launches itself: all of them in eager
mode, attention's in piecewise mode, one graph in full mode. A step takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.costs import Rule, StepCosts
from runtime.plan import PlanRow


@dataclass(frozen=True)
class Gpu:
    """Data sheet: bytes/s of memory, dense bf16 operations/s, bytes of memory."""

    name: str
    bandwidth: float
    flops: float
    memory: float


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer in bf16."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_params(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


GPUS = {
    gpu.name: gpu for gpu in (Gpu("h200", 4.8e12, 989e12, 141e9), Gpu("h100", 3.35e12, 989e12, 80e9), Gpu("a100", 2.0e12, 312e12, 80e9))
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("llama-1b", 16, 2048, 8192, 32, 8, 64, 128256),
        Shape("llama-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    )
}

_MEMORY_SHARE = 0.85  # of the data sheet's bandwidth; large copies on an H200 reach 4.3 of 4.8 TB/s
_FLOPS_SHARE = 0.70  # of the dense peak, large matrix products
_ATTENTION_SHARE = 0.50  # of the dense peak, prefill attention
_KERNELS_A_LAYER = 9  # norms, four projections, rotation with the cache's write, attention, activation, all as single kernels
_KERNEL_MS = 0.002  # start and end of one kernel inside a graph
_LAUNCH_MS = 0.070  # host time of one kernel without a graph, Python around it: 10 ms for 16 layers on an H200's host
_SPLIT_MS = 0.090  # host time of one piece's graph and the attention call after it: 1.5 ms for 16 layers there
_GAP_MS = 0.002  # between two kernels outside of graphs, on the device
_STEP_MS = 0.2  # inputs to the device, one graph launch, sampled tokens back


def step_ms(gpu: Gpu, shape: Shape, tokens: int, mode: str, seqs: int) -> float:
    """A step of ``tokens`` rows with ``seqs`` sequences to sample for, attention to the context left out."""
    weights = 2 * (shape.layer_params + shape.hidden * shape.vocab)
    work = 2 * (shape.layer_params * tokens + shape.hidden * shape.vocab * seqs)
    moved = 1e3 * weights / (gpu.bandwidth * _MEMORY_SHARE)
    computed = 1e3 * work / (gpu.flops * _FLOPS_SHARE)
    kernels = shape.num_layers * _KERNELS_A_LAYER
    outside = {"eager": kernels, "piecewise": 2 * shape.num_layers, "full": 0}[mode]
    device = max(moved, computed) + kernels * _KERNEL_MS + outside * _GAP_MS
    host = {"eager": kernels * _LAUNCH_MS, "piecewise": shape.num_layers * _SPLIT_MS, "full": 0.0}[mode]
    return _STEP_MS + max(device, host)


def roofline(
    gpu: Gpu,
    shape: Shape,
    sizes: Iterable[int],
    *,
    max_num_seqs: int,
    max_batch_tokens: int,
    full_mixed: bool = True,
    rule: Rule = "cheapest",
) -> StepCosts:
    """sizes: those captured. full_mixed: steps with prompts may run as one full graph too."""
    captured = sorted(sizes)
    largest = max([*captured, max_num_seqs, max_batch_tokens])

    def rows(kind: str, limit: int) -> list[PlanRow]:
        made = []
        for size in sorted({*(size for size in captured if size <= limit), 1, limit}):
            seqs = size if kind == "decode" else min(size, max_num_seqs, 32)
            eager = step_ms(gpu, shape, size, "eager", seqs)
            graph = size in captured
            piecewise = step_ms(gpu, shape, size, "piecewise", seqs) if graph else None
            full = step_ms(gpu, shape, size, "full", seqs) if graph and (kind == "decode" or full_mixed) else None
            made.append(PlanRow(kind, size, eager, piecewise, full, "", 0))
        return made

    return StepCosts(
        rows("decode", max_num_seqs),
        rows("mixed", largest),
        kv_ms=1e3 * shape.kv_bytes / (gpu.bandwidth * _MEMORY_SHARE),
        pair_ms=1e3 * 4 * shape.num_layers * shape.num_heads * shape.head_dim / (gpu.flops * _ATTENTION_SHARE),
        rule=rule,
        source=f"roofline (not measured): {gpu.name}, {shape.name}, bf16",
    )


def pages_that_fit(gpu: Gpu, shape: Shape, page_size: int) -> int:
    """Pages of the KV cache beside the weights, with a tenth of the memory and 4 GB kept for everything else."""
    weights = 2 * (shape.layer_params + 2 * shape.hidden * shape.vocab)
    return max(2, int((0.9 * gpu.memory - weights - 4e9) // (shape.kv_bytes * page_size)))
