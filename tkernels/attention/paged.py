"""Paged attention: decode, prefill over a cached prefix and mixed batches in one op, and its form that writes into a given output.

Which kernel computes a sequence is chosen on the device by that sequence's query length: 1 to 8 decode.py, more prefill.py. On Hopper,
where they take the call: up to 8, or as many as fit its columns, decode_one_sm90.py, from there to 8 decode_sm90.py, more prefill_sm90.py.
``max_query_len`` only says which kernels are launched: its bucket is 1, 2, 4, 8 or more. The equation and every convention are in ref.py.
"""

from __future__ import annotations

import numbers

import torch

from tkernels import _checks
from tkernels._dependent import ALONE, BESIDE, FIRST
from tkernels._op import define
from tkernels._target import target_of
from tkernels._triton import next_power_of_2
from tkernels.attention import decode_one_sm90, decode_sm90, prefill_sm90
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention.decode import QUERY_LEN, decode, decode_of_mixed
from tkernels.attention.prefill import prefill
from tkernels.attention.ref import Scale, output_dtype, paged_attention_ref

Optional = torch.Tensor | None


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, causal: bool, window: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float, out: torch.Tensor, lse: Optional,
) -> None:  # fmt: skip
    inputs = check_inputs(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window, softcap, sinks, k_scale, v_scale, v_factor
    )
    _check_output("out", out, tuple(q.shape), output_dtype(q.dtype), q)
    _checks.check_last_stride("out", out)
    if lse is not None:
        _check_output("lse", lse, tuple(q.shape[:2]), torch.float32, q)
    launch(inputs, out, lse, max_query_len)


def launch(inputs: Inputs, out: torch.Tensor, lse: Optional, max_query_len: int) -> None:
    """Write every row of ``out`` and ``lse``. For cascade.py, which has checked its arguments too."""
    if inputs.q.shape[0] == 0:
        return
    if inputs.num_seqs == 0:  # every row belongs to no sequence; the kernels would have no length to read
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    kept = launch_decode(inputs, out, lse, max_query_len)
    if max_query_len > QUERY_LEN:
        if prefill_sm90.refusal(inputs, out, target_of(out.device).arch) is None:
            prefill_sm90.prefill_sm90(inputs, out, lse, QUERY_LEN + 1, BESIDE)
        else:
            prefill(inputs, out, lse, QUERY_LEN + 1)
    del kept


def launch_decode(inputs: Inputs, out: torch.Tensor, lse: Optional, max_query_len: int) -> list[torch.Tensor]:
    """Write the rows of every sequence with 1 to QUERY_LEN query tokens, and of no sequence; ``max_query_len`` as in the op.

    Several launches are a set (_dependent.py): each fills what the one before leaves of the device, and an empty one costs little. That
    of prompts is the last: its programs take tiles as they come, so they even out where the ranges of decode end. Returns the
    temporaries, which must outlive the launch of the set's last kernel. With more than QUERY_LEN there always is a FIRST one.
    """
    arch = target_of(out.device).arch
    if decode_one_sm90.refusal(inputs, arch) is None:
        return _launch_few(inputs, out, lse, max_query_len)
    if max_query_len > QUERY_LEN:
        return decode_of_mixed(inputs, out, lse)
    return decode(inputs, out, lse, 1 if max_query_len <= 1 else QUERY_LEN)


def _launch_few(inputs: Inputs, out: torch.Tensor, lse: Optional, max_query_len: int) -> list[torch.Tensor]:
    """``launch_decode`` where decode_one_sm90.py computes the sequences of 1 to ``most`` tokens.

    A launch for no more tokens than are asked for has the fewest columns, and is the fastest. Beside prompts most sequences have one token:
    a launch of their own is faster for them, and has the bits of the one for several.
    """
    most, prompts = decode_one_sm90.most_queries(inputs), max_query_len > QUERY_LEN
    if max_query_len <= 1:
        spans = [(1, 1)]  # fewest and most query tokens of the sequences of a launch
    elif prompts and most > 1:
        spans = [(2, most), (1, 1)]
    else:
        spans = [(1, min(most, next_power_of_2(max_query_len)))]
    if max_query_len > most and most < QUERY_LEN:
        spans.insert(0, (most + 1, QUERY_LEN))
    kept: list[torch.Tensor] = []
    place = FIRST if prompts or len(spans) > 1 else ALONE
    for fewest, queries in spans:
        if queries <= most:
            kept += decode_one_sm90.decode_one_sm90(inputs, out, lse, queries, fewest, place)
        elif decode_sm90.refusal(inputs, target_of(out.device).arch) is None:
            kept += decode_sm90.decode_sm90(inputs, out, lse, fewest, place)
        else:
            kept += decode(inputs, out, lse, queries, min_queries=fewest, beside=True, place=place)
        place = BESIDE
    return kept


def _check_output(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: torch.Tensor) -> None:
    _checks.check_shape(name, x, shape, "like q")
    _checks.check_dtype(name, x, dtype, "for this q")
    _checks.check_device(name, x, q, "q")
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name}: expected memory of its own for every element, got strides {list(x.stride())}; do not expand it")
    if x.shape[1] * x.stride(1) >= 1 << 31:  # kernels count from a token's first head in int32
        raise ValueError(f"{name}: expected the heads of a token to span fewer than 2**31 elements, got strides {list(x.stride())}")


def _functional(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, causal: bool, window: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, lse = _fake(q)
    _attend(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, max_query_len, causal, window, softcap,
        sinks, k_scale, v_scale, v_factor, out, lse,
    )  # fmt: skip
    return out, lse


def _fake(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape, dtype=output_dtype(q.dtype), device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _functional_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, causal: bool, window: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_inputs(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window, softcap, sinks, k_scale, v_scale, v_factor
    )
    return paged_attention_ref(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=scale, max_query_len=max_query_len, causal=causal,
        window=window or None, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_factor if v_scale is None else v_scale * v_factor,
    )  # fmt: skip


def _attend_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float, max_query_len: int, causal: bool, window: int, softcap: float,
    sinks: Optional, k_scale: Optional, v_scale: Optional, v_factor: float, out: torch.Tensor, lse: Optional,
) -> None:  # fmt: skip
    _check_output("out", out, tuple(q.shape), output_dtype(q.dtype), q)
    if lse is not None:
        _check_output("lse", lse, tuple(q.shape[:2]), torch.float32, q)
    result = _functional_ref(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, max_query_len, causal, window, softcap,
        sinks, k_scale, v_scale, v_factor,
    )  # fmt: skip
    out.copy_(result[0])
    if lse is not None:
        lse.copy_(result[1])


_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, float scale, "
    "SymInt max_query_len, bool causal, int window, float softcap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float v_factor"
)
_paged_attention_op = define(f"paged_attention({_INPUTS}) -> (Tensor, Tensor)", kernel=_functional, reference=_functional_ref, fake=_fake)
_paged_attention_out_op = define(
    f"paged_attention_out({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    kernel=_attend,
    reference=_attend_ref,
    fake=lambda *_: None,
    binds=True,
)


def split_scale(name: str, scale: Scale) -> tuple[torch.Tensor | None, float]:
    """A scale as (tensor on the device, host factor): a number needs no tensor, a tensor is read by the kernel at each replay."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, torch.Tensor):
        return scale, 1.0
    if isinstance(scale, (int, float, numbers.Real)) and not isinstance(scale, bool):  # numpy's numbers are Real
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name}: expected a positive number, got {scale}")
        return None, float(scale)
    raise TypeError(f"{name}: expected a number, a float32 tensor [], [1] or [kv_heads], or None, got {type(scale).__name__}")


def scale_of_logits(scale: float, k_factor: float) -> float:
    if scale is None or isinstance(scale, str):
        raise TypeError(f"scale: expected a positive number, head_dim ** -0.5 for example, got {scale!r}")
    return scale * k_factor


def _host_window(window: int | None) -> int:
    if window is None:
        return 0
    if window < 1:
        raise ValueError(f"window: expected None or a number of keys of at least 1, got {window}")
    return window


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = Σ_k softmax_k(scale · q[t, h] · K[k, h]) · V[k, h] over the keys of the sequence of token t.

    q: [tokens, heads, dim] fp16, bf16, fp32 or float8_e4m3fn, any strides with the last 1; dim 1 to 256; heads a multiple of kv_heads.
        The scale of e4m3 queries is part of ``scale``. They want an e4m3 cache, and prefill on Hopper then multiplies 8 bits: faster
        than bf16, but softmax weights are rounded to e4m3 too, each by up to 1/16 of itself, from 2^-14 of the row's largest down by more.
    k_cache, v_cache: [pages, page_size, kv_heads, dim] like q, or float8_e4m3fn; any strides with the last 1; page_size 1 to 256.
    block_table: [seqs, max_pages] int32, page ids; entries past a sequence's last page are not read;
        max_pages · page_size at most 2**30.
    seq_lens: [seqs] int32, keys of each sequence, its query tokens included; 0 marks a padding row: zero output, LSE -inf.
        Cut at ``max_pages · page_size`` in the kernel, since the host cannot see it without a sync.
    cu_seqlens_q: [seqs + 1] int32, where each sequence's query tokens start; rows past the last value come out zero.
    scale: multiplies q · k, positive. max_query_len: upper bound of the query lengths; its bucket (1, 2, 4, 8, more) is baked into a graph.
        A sequence longer than its bucket may be left unwritten (on the CPU reference, one longer than it is: ValueError).
    causal: a query at position p sees keys 0 .. p (queries are the last tokens of a sequence). window: it sees p - window + 1 .. p.
    softcap: logits become softcap · tanh(logits / softcap); 0: none. sinks: [heads] logits that enter the denominator and the LSE.
    k_scale, v_scale: stored value · scale = true value; a positive number (baked into a graph) or a float32 tensor [], [1] or [kv_heads].
    return_lse: also return the natural log of the denominator, [tokens, heads] fp32, for ``merge_attention``.
    Returns out [tokens, heads, dim] like q (bf16 for e4m3 queries), contiguous. Raises ValueError or TypeError naming the argument that
    is wrong.
    """
    k_tensor, k_factor = split_scale("k_scale", k_scale)
    v_tensor, v_factor = split_scale("v_scale", v_scale)
    out, lse = _paged_attention_op(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale_of_logits(scale, k_factor), max_query_len, causal,
        _host_window(window), softcap, sinks, k_tensor, v_tensor, v_factor,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def paged_attention_out(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """``paged_attention`` into ``out`` [tokens, heads, dim] of the dtype that it returns (last stride 1, a token's heads within 2**31
    elements) and, if given, ``lse`` [tokens, heads] fp32.

    Every element of both is written. This is the default splitting op: the piece before it allocates ``out``.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    k_tensor, k_factor = split_scale("k_scale", k_scale)
    v_tensor, v_factor = split_scale("v_scale", v_scale)
    _paged_attention_out_op(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale_of_logits(scale, k_factor), max_query_len, causal,
        _host_window(window), softcap, sinks, k_tensor, v_tensor, v_factor, out, lse,
    )  # fmt: skip
