"""Log-probabilities of the drawn token and of the likeliest ones, without a host sync and without writing a softmax.

    logprob(token) = logit(token) − log Σ exp(logit)

Kernel 1 reads the logits once: per 128 columns it leaves their maximum and their sum. Kernel 2, one program a row, finishes from that,
in a fixed order. The n likeliest lie in the n runs with the largest maxima (the lower run first among equals), so it reads those once
more. What is ordered is packed into one integer: the value, then the lower index.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._sampling_kernels import key_of, load_logits, load_raw, logits_of, scaled, tiles_for, value_of
from tkernels._target import target_of
from tkernels._triton import cdiv, next_power_of_2, tl, triton

_RUN = 128  # columns that share a maximum and a sum
_TILE_RUNS = 8  # runs in a tile of kernel 1
_MAX_TOP = 32  # kernel 2 holds 128 times as many tokens in registers
_MAX_VOCAB = 1 << 20

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def top_logprobs_ref(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> Result:
    """The oracle: a log-softmax in fp64, a stable sort."""
    x = logits.double()
    x = torch.where(x.isnan(), -float("inf"), x)
    top = x.amax(-1, keepdim=True)
    z = torch.where(x == top, 0.0, x - top)
    z = torch.where(x == -float("inf"), -float("inf"), z)
    logprobs = z - z.exp().sum(-1, keepdim=True).log()
    logprobs = torch.where(x == -float("inf"), -float("inf"), logprobs)
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    chosen = logprobs.gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :n].contiguous()
    return torch.where(inside, chosen, -float("inf")).float(), order, logprobs.gather(1, order).float()


@triton.jit
def _parts_kernel(
    logits_ptr, values_ptr, stride_row, vocab, num_runs, TILES: tl.constexpr, TILE_RUNS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """values is [rows, 2, runs]: maxima, sums relative to them."""
    row = tl.program_id(0).to(tl.int64)
    runs = tl.program_id(1) * TILES * TILE_RUNS + tl.arange(0, TILE_RUNS)
    offs = tl.arange(0, RUN)
    logits_row = logits_ptr + row * stride_row
    raw = load_raw(logits_row, runs[:, None] * RUN + offs[None, :], vocab)
    for i in range(TILES):
        x = logits_of(raw)
        here = runs
        runs += TILE_RUNS
        # on its way while this tile is summed
        raw = load_raw(logits_row, runs[:, None] * RUN + offs[None, :], tl.where(i + 1 < TILES, vocab, 0))
        top = tl.max(x, 1)
        total = tl.sum(tl.where(x > -float("inf"), tl.exp(scaled(x, top[:, None], 1.0)), 0.0), 1)
        tl.store(values_ptr + row * 2 * num_runs + here, top, mask=here < num_runs)
        tl.store(values_ptr + (row * 2 + 1) * num_runs + here, total, mask=here < num_runs)


@triton.jit
def _packed(x, index):
    """Orders by value, then by the lower index."""
    return (key_of(x, 0).to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit(do_not_specialize=["top_n"], do_not_specialize_on_alignment=["tokens_ptr"])
def _finish_kernel(
    logits_ptr, tokens_ptr, values_ptr, chosen_ptr, ids_ptr, logprobs_ptr, stride_row, vocab, num_runs, top_n,
    BLOCK_RUNS: tl.constexpr, BLOCK_TOP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * stride_row
    runs = tl.arange(0, BLOCK_RUNS)
    mask = runs < num_runs
    tops = tl.load(values_ptr + row * 2 * num_runs + runs, mask=mask, other=-float("inf"))
    sums = tl.load(values_ptr + (row * 2 + 1) * num_runs + runs, mask=mask, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(tops > -float("inf"), sums * tl.exp(scaled(tops, top, 1.0)), 0.0), 0)
    log_total = tl.log(tl.where(total > 0, total, 1.0))  # 0: a row of nothing
    token = tl.load(tokens_ptr + row)
    inside = (token >= 0) & (token < vocab)
    x = load_logits(logits_row + token, inside)
    tl.store(chosen_ptr + row, tl.where(x > -float("inf"), scaled(x, top, 1.0) - log_total, -float("inf")))
    entries = tl.arange(0, BLOCK_TOP)
    likeliest = tl.zeros((BLOCK_TOP,), tl.int32) + num_runs
    keys = tl.where(mask, _packed(tops, runs), -0x7FFFFFFFFFFFFFFF)
    i = 0
    while i < tl.minimum(top_n, num_runs):
        best = tl.max(keys, 0)
        likeliest = tl.where(entries == i, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32), likeliest)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
        i += 1
    columns = likeliest[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = load_logits(logits_row + columns, columns < vocab)
    keys = tl.where(columns < vocab, _packed(x, columns), -0x7FFFFFFFFFFFFFFF)
    i = 0
    while i < top_n:
        best = tl.max(tl.max(keys, 1), 0)
        value = value_of((best >> 32).to(tl.int32), 0)
        tl.store(ids_ptr + row * top_n + i, 0xFFFFFFFF - (best & 0xFFFFFFFF))
        tl.store(logprobs_ptr + row * top_n + i, tl.where(value > -float("inf"), scaled(value, top, 1.0) - log_total, -float("inf")))
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
        i += 1


def _check(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> None:
    _checks.check_float("logits", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits: expected [rows, vocab] with a vocab of 1 to {_MAX_VOCAB}, got {list(logits.shape)}")
    _checks.check_last_stride("logits", logits)
    _checks.check_shape("tokens", tokens, (logits.shape[0],), "one per row of logits")
    _checks.check_dtype("tokens", tokens, torch.int64, "per row")
    _checks.check_device("tokens", tokens, logits, "logits")
    _checks.check_last_stride("tokens", tokens)
    if not 0 <= n <= min(_MAX_TOP, logits.shape[1]):
        raise ValueError(f"n: expected 0 to {min(_MAX_TOP, logits.shape[1])} (and no more than the vocabulary), got {n}")


def _empty(logits: torch.Tensor, n: int) -> Result:
    rows, device = logits.shape[0], logits.device
    return (
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty((rows, n), dtype=torch.int64, device=device),
        torch.empty((rows, n), dtype=torch.float32, device=device),
    )


def _top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> Result:
    _check(logits, tokens, n)
    rows, vocab = logits.shape
    result = _empty(logits, n)
    if rows:
        num_runs = cdiv(vocab, _RUN)
        block_runs = next_power_of_2(num_runs)
        tile_runs = min(_TILE_RUNS, block_runs)
        tiles = tiles_for(rows * cdiv(num_runs, tile_runs), target_of(logits.device).num_sms)
        values = torch.empty((rows, 2, num_runs), dtype=torch.float32, device=logits.device)
        _parts_kernel[(rows, cdiv(num_runs, tile_runs * tiles))](
            logits, values, logits.stride(0), vocab, num_runs, TILES=tiles, TILE_RUNS=tile_runs, RUN=_RUN, num_warps=4
        )
        _finish_kernel[(rows,)](
            logits, tokens, values, *result, logits.stride(0), vocab, num_runs, n,
            BLOCK_RUNS=block_runs, BLOCK_TOP=next_power_of_2(n), RUN=_RUN, num_warps=8,
        )  # fmt: skip
    return result


_op = define(
    "top_logprobs(Tensor logits, Tensor tokens, int n) -> (Tensor, Tensor, Tensor)",
    kernel=_top_logprobs,
    reference=_checks.checked(_check, top_logprobs_ref),
    fake=lambda logits, tokens, n: _empty(logits, n),
)


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> Result:
    """Log-probabilities of one given token a row and of its n likeliest ones; safe in a CUDA graph.

    logits: [rows, vocab] fp16, bf16 or fp32, any row stride, last stride 1. tokens: [rows] int64.
    n: 0 to 32, at most vocab; baked into a graph.
    Returns ([rows] fp32 of ``tokens``, [rows, n] int64 ids, [rows, n] fp32 of these), the likeliest first, the lower id first among
    equals. NaN counts as −∞; −∞, a row of nothing else, and a token outside of the vocabulary have −∞; infinite logits share all.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _op(logits, tokens, n)
