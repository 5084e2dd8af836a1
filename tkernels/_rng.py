"""Counter-based random numbers: Philox 4×32-10 of (seed, step, token id), and exponential noise made from it.

A draw depends on these three numbers and on nothing else: not on the launch, the row, the batch or the GPU. Every replay of a
graph draws anew because the step is a device input.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The seed's two words are the key, the counter is
(token id // 2, low word of the step, high word of the step, 0); an even id takes the first two output words, an odd one the others.
"""

from __future__ import annotations

import torch

from tkernels._triton import INTERPRETED, tl, triton

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_INTERPRETED = tl.constexpr(INTERPRETED)


def _multiply(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a · m for words held in int64, without passing 2**63."""
    low, high = a * (m & 0xFFFF), a * (m >> 16)  # each below 2**48
    middle = (low >> 16) + high
    return middle >> 16, ((middle << 16) | (low & 0xFFFF)) & _LOW


def philox_ref(seeds: torch.Tensor, steps: torch.Tensor, counters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """seeds, steps, counters: int64, broadcast together → four words each, as int64 of 0 to 2**32 − 1."""
    key0, key1 = seeds & _LOW, (seeds >> 32) & _LOW
    c0, c1, c2, c3 = counters & _LOW, steps & _LOW, (steps >> 32) & _LOW, torch.zeros_like(counters)
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _W0) & _LOW, (key1 + _W1) & _LOW
    return torch.broadcast_tensors(c0, c1, c2, c3)


def log_exponential_ref(seeds: torch.Tensor, steps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log E in fp64, E exponential with mean 1. The oracle of ``log_exponential``."""
    words = philox_ref(seeds, steps, ids >> 1)
    high, low = (torch.where((ids & 1) == 0, words[i], words[i + 2]) for i in range(2))
    w = (high.double() + (low.double() + 0.5) * 2.0**-32) * 2.0**-32
    return torch.log(-torch.log1p(-w))


@triton.jit
def _log2(x):
    """One instruction on NVIDIA (error 2**-22: absolute for x of 0.5 to 2, relative elsewhere) for some twenty of Triton's own."""
    if _INTERPRETED:
        return tl.log2(x)
    elif tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _log_exponential_of(high, low):
    w = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    w = tl.minimum(w, 0.99999994)
    # −log(1 − w): below 1/8 a series to 6·10⁻⁸ of it, since 1 − w is rounded; above, the logarithm
    series = w * (1.0 + w * (0.5 + w * (0.33333333 + w * (0.25 + w * (0.2 + w * (0.16666667 + w * 0.14285714))))))
    exponential = tl.where(w < 0.125, series, _log2(1.0 - w) * -0.6931471805599453)
    return _log2(exponential) * 0.6931471805599453


@triton.jit
def log_exponential(seed, step, first, COUNT: tl.constexpr):
    """log E, E = −log(1 − w) exponential with mean 1: [N, COUNT] for the ids from first[N] on, even ones; seed, step: int64 scalars.

    w has 64 random bits, so that small E, which win a race over a large vocabulary, keep fp32's relative precision: with 24-bit
    uniforms about one draw in a hundred over 128 k equal tokens would be a tie. It stays inside (0, 1): E is never 0 nor infinite.
    """
    pairs = (first // 2)[:, None] + tl.arange(0, COUNT // 2)[None, :]
    zeros = tl.zeros_like(pairs)
    step_low, step_high = step.to(tl.int32), (step >> 32).to(tl.int32)
    high0, low0, high1, low1 = tl.philox(seed, pairs, zeros + step_low, zeros + step_high, zeros, n_rounds=10)
    return tl.interleave(_log_exponential_of(high0, low0), _log_exponential_of(high1, low1))
