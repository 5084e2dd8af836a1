"""What a request asks of its logits before a token is drawn: penalties, a bias, a mask of allowed tokens; in one pass.

    x = logit
    x = x / repetition where x > 0 else x · repetition        for tokens of the prompt or the answer
    x = x − frequency · n − presence · [n > 0]                n: how often the answer has the token
    x = x + bias[token]
    x = −∞                                                    where the mask forbids the token, and for NaN

The state belongs to request slots and stays on the device: ``counts`` [slots, vocab] has in its low 31 bits n, and in its sign bit
whether the prompt has the token; ``count_tokens`` keeps it, in the graph or beside it. So a row's result depends on its own request
only, in any row, any batch and any mode.

Source: repetition as in arXiv 1909.05858 (CTRL), the others as in OpenAI's API; the mask is packed as xgrammar packs it.
"""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import cdiv, next_power_of_2, tl, triton

_BLOCK = 2048  # columns a program: 16 a thread
_MAX_BIAS = 1024  # entries of a slot, which every program of a row reads
_IN_PROMPT = -(1 << 31)  # the sign bit


def adjust_logits_ref(
    logits: torch.Tensor,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    repetition: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The oracle: dense state, row by row, the steps of the module's docstring."""
    rows, vocab = logits.shape
    x = logits.float()
    state = next((s for s in (counts, bias_ids, mask) if s is not None), None)
    if state is None or rows == 0:
        return torch.where(x.isnan(), -float("inf"), x)
    slots = torch.arange(rows, device=x.device) if slots is None else slots
    live = ((slots >= 0) & (slots < state.shape[0]))[:, None]
    slots = torch.where(live[:, 0], slots, 0)
    if state.shape[0] == 0:
        return torch.where(x.isnan(), -float("inf"), x)
    if counts is not None:
        assert repetition is not None and presence is not None and frequency is not None
        own = counts[slots]
        answered = own & ~_IN_PROMPT
        factor = torch.where(live & (own != 0), repetition[:, None], 1.0)
        x = torch.where(x > 0, x / factor, x * factor)
        x = x - torch.where(live, frequency[:, None] * answered, 0.0)
        x = x - torch.where(live & (answered > 0), presence[:, None], 0.0)
    if bias_ids is not None:
        assert bias_values is not None
        ids = bias_ids[slots].long()
        ids = torch.where(live & (ids >= 0) & (ids < vocab), ids, vocab)  # a column of its own takes what is no entry
        dense = torch.zeros(rows, vocab + 1, device=x.device).scatter(1, ids, bias_values[slots])
        x = x + dense[:, :vocab]
    if mask is not None:
        columns = torch.arange(vocab, device=x.device)
        allowed = (mask[slots][:, columns // 32] >> (columns % 32)) & 1
        x = torch.where(live & (allowed == 0), -float("inf"), x)
    return torch.where(x.isnan(), -float("inf"), x)


# One scalar a row or a slot: nothing is gained from their alignment, and a caller's slice of them must not compile anew.
_SCALARS = ["slots_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr", "bias_ids_ptr", "bias_values_ptr", "mask_ptr"]


@triton.jit(do_not_specialize_on_alignment=_SCALARS, do_not_specialize=["num_slots", "num_bias"])
def _adjust_kernel(
    logits_ptr, out_ptr, slots_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, bias_ids_ptr, bias_values_ptr, mask_ptr,
    stride_row, stride_counts, stride_bias, stride_mask, vocab, num_slots, num_bias, BLOCK: tl.constexpr, BLOCK_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    in_vocab = columns < vocab
    x = tl.load(logits_ptr + row * stride_row + columns, mask=in_vocab, other=0.0).to(tl.float32)
    slot = row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)
    has_state = (slot >= 0) & (slot < num_slots)
    if counts_ptr is not None:
        repetition = tl.load(repetition_ptr + row)
        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        if has_state & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)):
            count = tl.load(counts_ptr + slot * stride_counts + columns, mask=in_vocab, other=0)
            answered = count & 0x7FFFFFFF
            punished = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(count != 0, punished, x)
            x -= frequency * answered.to(tl.float32)
            x -= tl.where(answered > 0, presence, 0.0)
    if mask_ptr is not None:
        word = tl.load(mask_ptr + slot * stride_mask + columns // 32, mask=in_vocab & has_state, other=-1)
        x = tl.where(((word >> (columns % 32)) & 1) != 0, x, -float("inf"))
    out = out_ptr + row * vocab
    tl.store(out + columns, tl.where(x == x, x, -float("inf")), mask=in_vocab)
    if bias_ids_ptr is not None:
        # Sparse: each program adds the entries that lie in its columns to what it has just stored.
        tl.debug_barrier()  # they are read by other threads than stored them
        entries = tl.arange(0, BLOCK_BIAS)
        ids = tl.load(bias_ids_ptr + slot * stride_bias + entries, mask=(entries < num_bias) & has_state, other=-1)
        mine = (ids >= start) & (ids < start + BLOCK) & (ids < vocab)
        biased = tl.load(out + ids, mask=mine, other=0.0) + tl.load(bias_values_ptr + slot * stride_bias + entries, mask=mine, other=0.0)
        tl.store(out + ids, tl.where(biased == biased, biased, -float("inf")), mask=mine)


def _check_adjust(
    logits: torch.Tensor,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    repetition: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    _checks.check_float("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: expected [rows, vocab], got {list(logits.shape)}")
    rows, vocab = logits.shape
    _checks.check_last_stride("logits", logits)
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    given = [name for name, x in penalties.items() if x is not None]
    if len(given) != (0 if counts is None else 3):
        raise ValueError(
            f"counts: expected it together with repetition, presence and frequency, got counts {'without' if counts is None else 'with'} "
            f"{', '.join(given) or 'any of them'}"
        )
    if (bias_ids is None) != (bias_values is None):
        raise ValueError(f"bias_{'ids' if bias_ids is None else 'values'}: expected bias_ids and bias_values together, got one of them")
    state = {"counts": counts, "bias_ids": bias_ids, "mask": mask}
    num_slots = {name: x.shape[0] if x.dim() else 0 for name, x in state.items() if x is not None}
    if len(set(num_slots.values())) > 1:
        raise ValueError(f"{next(reversed(num_slots))}: expected as many slots in all state, got {num_slots}")
    slot_count = next(iter(num_slots.values()), 0)
    if slots is None and num_slots and slot_count != rows:
        raise ValueError(f"slots: expected them, since logits have {rows} rows and the state {slot_count} slots")
    for name, x in {"slots": slots, **penalties}.items():
        if x is not None:
            _checks.check_shape(name, x, (rows,), "one per row of logits")
            _checks.check_dtype(name, x, torch.int64 if name == "slots" else torch.float32, "per row")
            _checks.check_last_stride(name, x)
            _checks.check_device(name, x, logits, "logits")
    width = bias_ids.shape[1] if bias_ids is not None and bias_ids.dim() == 2 else 0
    if width > _MAX_BIAS:
        raise ValueError(f"bias_ids: expected at most {_MAX_BIAS} entries a slot, got {width}")
    for name, x, columns, dtype in (
        ("counts", counts, vocab, torch.int32), ("bias_ids", bias_ids, width, torch.int32),
        ("bias_values", bias_values, width, torch.float32), ("mask", mask, cdiv(vocab, 32), torch.int32),
    ):  # fmt: skip
        if x is not None:
            why = "like bias_ids" if name == "bias_values" else "by slot and vocabulary"
            _checks.check_shape(name, x, (slot_count, columns), why)
            _checks.check_dtype(name, x, dtype, "per slot")
            _checks.check_last_stride(name, x)
            _checks.check_device(name, x, logits, "logits")
    if bias_ids is not None and bias_values is not None and bias_ids.stride(0) != bias_values.stride(0):
        raise ValueError(f"bias_values: expected bias_ids' row stride {bias_ids.stride(0)}, got {bias_values.stride(0)}")


def _adjust(
    logits: torch.Tensor,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    repetition: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    _check_adjust(logits, slots, counts, repetition, presence, frequency, bias_ids, bias_values, mask)
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        num_slots = next((x.shape[0] for x in (counts, bias_ids, mask) if x is not None), 0)
        num_bias = 0 if bias_ids is None else bias_ids.shape[1]
        strides = (0 if x is None else x.stride(0) for x in (counts, bias_ids, mask))
        _adjust_kernel[(rows, cdiv(vocab, _BLOCK))](
            logits, out, slots, counts, repetition, presence, frequency, bias_ids, bias_values, mask,
            logits.stride(0), *strides, vocab, num_slots, num_bias, BLOCK=_BLOCK, BLOCK_BIAS=next_power_of_2(num_bias), num_warps=4,
        )  # fmt: skip
    return out


_adjust_op = define(
    "adjust_logits(Tensor logits, Tensor? slots=None, Tensor? counts=None, Tensor? repetition=None, Tensor? presence=None, "
    "Tensor? frequency=None, Tensor? bias_ids=None, Tensor? bias_values=None, Tensor? mask=None) -> Tensor",
    kernel=_adjust,
    reference=_checks.checked(_check_adjust, adjust_logits_ref),
    fake=lambda logits, *args, **kwargs: torch.empty(logits.shape, dtype=torch.float32, device=logits.device),
)


def adjust_logits(
    logits: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    repetition: torch.Tensor | None = None,
    presence: torch.Tensor | None = None,
    frequency: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits after penalties, bias and mask, for ``sample``; safe in a CUDA graph.

    logits: [rows, vocab] fp16, bf16 or fp32, any row stride, last stride 1.
    slots: [rows] int64, the slot that holds each row's state; negative (or past the last): the row is only copied. None: row r has
    slot r. counts: [slots, vocab] int32, kept by ``count_tokens``; with it repetition (1 is off), presence and frequency (0 is off),
    each [rows] fp32. bias_ids: [slots, n] int32, the ids of a slot all different, negative for no entry, n ≤ 1024; bias_values: the
    same in fp32, same strides. mask: [slots, ceil(vocab / 32)] int32, bit ``id % 32`` of word ``id // 32`` allows a token.
    Returns [rows, vocab] fp32, contiguous; NaN is −∞. A row with everything forbidden is all −∞, and ``sample`` gives 0 for it.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _adjust_op(logits, slots, counts, repetition, presence, frequency, bias_ids, bias_values, mask)


def count_tokens_ref(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, prompt: bool = False) -> None:
    """The oracle."""
    live = (slots >= 0) & (slots < counts.shape[0]) & (tokens >= 0) & (tokens < counts.shape[1])
    at = slots[live], tokens[live]
    if prompt:
        counts[at] = counts[at] | _IN_PROMPT
    else:
        counts.index_put_(at, torch.ones_like(at[0], dtype=torch.int32), accumulate=True)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=["slots_ptr", "tokens_ptr"])
def _count_kernel(
    counts_ptr, slots_ptr, tokens_ptr, stride_counts, num_tokens, num_slots, vocab, PROMPT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_tokens
    slots = tl.load(slots_ptr + offs, mask=mask, other=-1)
    tokens = tl.load(tokens_ptr + offs, mask=mask, other=-1)
    mask = (slots >= 0) & (slots < num_slots) & (tokens >= 0) & (tokens < vocab)
    # Integers: whatever the order of the programs, the counts are the same.
    if PROMPT:
        tl.atomic_or(counts_ptr + slots * stride_counts + tokens, tl.full((BLOCK,), -2147483648, tl.int32), mask=mask, sem="relaxed")
    else:
        tl.atomic_add(counts_ptr + slots * stride_counts + tokens, tl.full((BLOCK,), 1, tl.int32), mask=mask, sem="relaxed")


def _check_count(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, prompt: bool = False) -> None:
    if counts.dim() != 2:
        raise ValueError(f"counts: expected [slots, vocab], got {list(counts.shape)}")
    _checks.check_dtype("counts", counts, torch.int32, "as adjust_logits reads them")
    _checks.check_last_stride("counts", counts)
    if tokens.dim() != 1:
        raise ValueError(f"tokens: expected [n], got {list(tokens.shape)}")
    _checks.check_shape("slots", slots, tuple(tokens.shape), "one per token")
    for name, x in (("slots", slots), ("tokens", tokens)):
        _checks.check_dtype(name, x, torch.int64, "")
        _checks.check_last_stride(name, x)
        _checks.check_device(name, x, counts, "counts")


def _count(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, prompt: bool = False) -> None:
    _check_count(counts, slots, tokens, prompt)
    if len(tokens):
        block = min(256, max(32, next_power_of_2(len(tokens))))
        _count_kernel[(cdiv(len(tokens), block),)](
            counts, slots, tokens, counts.stride(0), len(tokens), *counts.shape, PROMPT=prompt, BLOCK=block, num_warps=1
        )


_count_op = define(
    "count_tokens(Tensor(a!) counts, Tensor slots, Tensor tokens, bool prompt=False) -> ()",
    kernel=_count,
    reference=_checks.checked(_check_count, count_tokens_ref),
    fake=lambda counts, slots, tokens, prompt=False: None,
)


def count_tokens(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, *, prompt: bool = False) -> None:
    """Note in ``counts`` that the requests of these slots have these tokens: one more of each, or that the prompt has them.

    counts: [slots, vocab] int32, written; zero it, or a slot's row of it, for a new request. slots, tokens: [n] int64; a slot or token
    out of range (negative: a padding row) notes nothing. A token may come several times.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    _count_op(counts, slots, tokens, prompt)
