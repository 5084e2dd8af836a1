"""Batches for the attention tests: a paged cache with permuted pages, whatever a kernel must not read filled with NaN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import tkernels
from tkernels.attention.ref import paged_attention_ref


@dataclass
class Case:
    """One call: tensors by the names of paged_attention, and its keywords."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.cu_seqlens_q


def make_case(
    lens: list[int],
    query_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_pages: int | None = None,
    interleaved: bool = False,
    extra_rows: int = 0,
    poison: bool = True,
    q_dtype: torch.dtype | None = None,
    **keywords: Any,
) -> Case:
    """Sequences with ``lens`` keys and ``query_lens`` queries. Free slots hold NaN, unused table entries -1, page 0 is all NaN.

    dtype: of the cache, and of q if q_dtype does not say otherwise; a float8 dtype makes fp16 queries.
    """
    q_dtype = q_dtype or (torch.float16 if dtype == torch.float8_e4m3fn else dtype)
    counts = [-(-n // page_size) for n in lens]
    width = max(counts, default=0) if max_pages is None else max_pages
    pages = sum(counts) + 2
    order = (torch.randperm(pages - 1) + 1).tolist()  # page 0 stays free
    shape = (pages, 2, page_size, kv_heads, dim) if interleaved else (2, pages, page_size, kv_heads, dim)
    store = torch.full(shape, float("nan") if poison else 0.0)
    k, v = (store[:, 0], store[:, 1]) if interleaved else (store[0], store[1])
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    for s, n in enumerate(lens):
        for i in range(counts[s]):
            page = order.pop()
            table[s, i] = page
            used = min(page_size, n - i * page_size)
            k[page, :used] = torch.randn(used, kv_heads, dim)
            v[page, :used] = torch.randn(used, kv_heads, dim)
    store = store.to(dtype).to(device)
    k, v = (store[:, 0], store[:, 1]) if interleaved else (store[0], store[1])
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    q = torch.randn(int(starts[-1]) + extra_rows, heads, dim)
    if extra_rows:
        q[-extra_rows:] = float("nan")
    q = q.to(q_dtype).to(device)
    keywords.setdefault("scale", dim**-0.5)
    keywords.setdefault("max_query_len", max(query_lens, default=1))
    return Case(
        q, k, v, table.to(device), torch.tensor(lens, dtype=torch.int32, device=device), starts.to(torch.int32).to(device), keywords
    )


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in fp64 on the CPU, from the same stored values."""
    q, k, v, *index = (t.cpu().float() if t.dtype == torch.float8_e4m3fn else t.cpu() for t in case.tensors)
    keywords = {n: (x.cpu().double() if isinstance(x, torch.Tensor) else x) for n, x in case.keywords.items() if n != "return_lse"}
    return paged_attention_ref(q.double(), k.double(), v.double(), *index, **keywords)


def _by_sequence(case: Case, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """The relative error of each sequence, the worst KV head of each, and the rows of no sequence: where a fault lies."""
    starts, lens = case.cu_seqlens_q.tolist(), case.seq_lens.tolist()
    lines = []
    for s, length in enumerate(lens):
        mine, theirs = actual[starts[s] : starts[s + 1]], expected[starts[s] : starts[s + 1]]
        if mine.numel():
            by_head = (mine - theirs).norm(dim=(0, 2)) / theirs.norm(dim=(0, 2)).clamp_min(1e-12)
            error = float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
            worst = float(by_head.nan_to_num(torch.inf).max())
            lines.append(f"  sequence {s}: {length} keys, {len(mine)} queries: {error:.2e}, worst head {worst:.2e}")
    return "\n".join([*lines, f"  rows of no sequence: they add up to {float(actual[starts[-1] :].abs().sum()):.2e}, expected 0"])


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(case: Case, out: torch.Tensor, lse: torch.Tensor | None = None, tolerance: float | None = None) -> float:
    """Against the oracle, relative to its norm, and element by element. tolerance: of the norm; None: by out's dtype. Returns the error."""
    expected, expected_lse = oracle(case)
    tolerance = tolerance or TOLERANCE[out.dtype]
    actual = out.cpu().double()
    assert torch.isfinite(actual).all(), f"not finite: {_by_sequence(case, actual, expected)}"
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
    largest = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    assert error <= tolerance and largest <= 4 * tolerance, (
        f"error {error:.2e} of the norm, {largest:.2e} of the largest value; expected at most {tolerance:.0e} and {4 * tolerance:.0e}.\n"
        + _by_sequence(case, actual, expected)
    )
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=max(TOLERANCE[out.dtype], 1e-4), rtol=1e-4)
    return error


def check_far_pages(query_len: int, heads: int = 32) -> None:
    """A sequence in the highest pages of a cache of 2.2e9 elements equals the same one in the lowest pages. On a GPU."""
    pages = 2_200_000_000 // (16 * 8 * 128)
    k_cache = torch.zeros((pages, 16, 8, 128), dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    for cache in (k_cache, v_cache):
        cache[:20] = torch.randn((20, 16, 8, 128), device="cuda")
        cache[-20:] = cache[:20]
    table = torch.stack((torch.arange(20), torch.arange(pages - 20, pages))).int().cuda()
    q = torch.randn((query_len, heads, 128), device="cuda").bfloat16().repeat(2, 1, 1)
    starts, lens = torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32).cuda(), torch.tensor([317, 317], dtype=torch.int32).cuda()
    out = tkernels.paged_attention(q, k_cache, v_cache, table, lens, starts, scale=0.088, max_query_len=query_len)
    assert isinstance(out, torch.Tensor)
    assert torch.isfinite(out).all() and out.abs().max() > 0
    assert torch.equal(out[:query_len], out[query_len:])
