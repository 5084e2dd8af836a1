"""Log-probabilities of the drawn token and of the likeliest ones, without a host sync and without writing a softmax.

    logprob(token) = logit(token) − log Σ exp(logit)

Kernel 1 reads the logits once: per 4096 columns it leaves their maximum, their sum and their n largest, each value and id packed into
one integer that orders by value and then by the lower id. Kernel 2, one program a row, finishes from that, in a fixed order.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._sampling_kernels import key_of, load_logits, scaled, value_of
from tkernels._triton import cdiv, next_power_of_2, tl, triton

_BLOCK = 4096
_MAX_TOP = 32  # of each 4096 columns: kernel 2 holds a million tokens' candidates in registers up to here
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


@triton.jit(do_not_specialize=["top_n"])
def _parts_kernel(
    logits_ptr, values_ptr, keys_ptr, stride_row, vocab, num_parts, top_n, BLOCK: tl.constexpr
):  # fmt: skip
    """values is [rows, 2, parts]: maxima, sums relative to them. keys is [rows, parts, n]."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab
    x = load_logits(logits_ptr + row * stride_row + columns, mask)
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x > -float("inf"), tl.exp(scaled(x, top, 1.0)), 0.0), 0)
    tl.store(values_ptr + row * 2 * num_parts + part, top)
    tl.store(values_ptr + (row * 2 + 1) * num_parts + part, total)
    keys = (key_of(x, 0).to(tl.int64) << 32) | (0xFFFFFFFF - columns.to(tl.int64))
    keys = tl.where(mask, keys, -0x7FFFFFFFFFFFFFFF)
    i = 0
    while i < top_n:
        best = tl.max(keys, 0)
        tl.store(keys_ptr + (row * num_parts + part) * top_n + i, best)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
        i += 1


@triton.jit(do_not_specialize=["top_n"], do_not_specialize_on_alignment=["tokens_ptr"])
def _finish_kernel(
    logits_ptr, tokens_ptr, values_ptr, keys_ptr, chosen_ptr, ids_ptr, logprobs_ptr,
    stride_row, vocab, num_parts, top_n, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_PARTS)
    mask = parts < num_parts
    tops = tl.load(values_ptr + row * 2 * num_parts + parts, mask=mask, other=-float("inf"))
    sums = tl.load(values_ptr + (row * 2 + 1) * num_parts + parts, mask=mask, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(tops > -float("inf"), sums * tl.exp(scaled(tops, top, 1.0)), 0.0), 0)
    log_total = tl.log(tl.where(total > 0, total, 1.0))  # 0: a row of nothing
    token = tl.load(tokens_ptr + row)
    inside = (token >= 0) & (token < vocab)
    x = load_logits(logits_ptr + row * stride_row + token, inside)
    tl.store(chosen_ptr + row, tl.where(x > -float("inf"), scaled(x, top, 1.0) - log_total, -float("inf")))
    entries = tl.arange(0, BLOCK_KEYS)
    keys = tl.load(keys_ptr + row * num_parts * top_n + entries, mask=entries < num_parts * top_n, other=-0x7FFFFFFFFFFFFFFF)
    i = 0
    while i < top_n:
        best = tl.max(keys, 0)
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
        num_parts = cdiv(vocab, _BLOCK)
        values = torch.empty((rows, 2, num_parts), dtype=torch.float32, device=logits.device)
        keys = torch.empty((rows, num_parts, n), dtype=torch.int64, device=logits.device)
        block = min(_BLOCK, next_power_of_2(vocab))
        _parts_kernel[(rows, num_parts)](logits, values, keys, logits.stride(0), vocab, num_parts, n, BLOCK=block, num_warps=8)
        _finish_kernel[(rows,)](
            logits, tokens, values, keys, *result, logits.stride(0), vocab, num_parts, n,
            BLOCK_PARTS=next_power_of_2(num_parts), BLOCK_KEYS=next_power_of_2(num_parts * n), num_warps=4,
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

    logits: [rows, vocab] fp16, bf16 or fp32, any row stride, last stride 1. tokens: [rows] int64. n: 0 to 32, baked into a graph.
    Returns ([rows] fp32 of ``tokens``, [rows, n] int64 ids, [rows, n] fp32 of these), the likeliest first, the lower id first among
    equals. NaN counts as −∞; −∞, a row of nothing else, and a token outside of the vocabulary have −∞; infinite logits share all.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _op(logits, tokens, n)
