"""What the tests of every Gluon kernel for Hopper check on a GPU, each of cases of its own. tolerance: as cases.check takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.tkernels.attention.cases import Case, check
from tests.tkernels.attention.test_batches import part
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels.attention import paged


def on_device(keywords: dict[str, Any], heads: int = 8) -> dict[str, Any]:
    """Of a call with as many heads, 2 of keys: sinks instead of True, scales instead of "device"."""
    made = {name: torch.tensor([0.5, 2.0], device="cuda") if value == "device" else value for name, value in keywords.items()}
    return made | ({"sinks": torch.randn(heads, device="cuda")} if "sinks" in made else {})


def check_inside_a_wider_out(case: Case) -> None:
    """Columns beyond the head dimension, which fill a block up to a power of two, are not written."""
    dim = case.q.shape[2]
    wide = torch.full((*case.q.shape[:2], dim + 8), float("nan"), dtype=case.q.dtype, device="cuda")
    paged.paged_attention_out(*case.tensors, **case.keywords, out=wide[..., :dim])
    assert torch.equal(wide[..., :dim], attend(case)[0]) and torch.isnan(wide[..., dim:]).all()


def check_strides(case: Case) -> None:
    """q inside a fused projection, out inside a larger tensor, LSE by head, pages ordered by head: the bits of what is contiguous."""
    expected, expected_lse = attend(case)
    tokens, heads, dim = case.q.shape
    fused = torch.full((tokens, heads + 4, dim), float("nan"), device="cuda")
    fused[:, 2:-2] = case.q.float()
    by_head = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (case.k_cache, case.v_cache)]
    wide = torch.full((tokens, heads + 1, dim), float("nan"), dtype=expected.dtype, device="cuda")
    lse = torch.full((heads, tokens), float("nan"), device="cuda").t()
    q = fused.to(case.q.dtype)[:, 2:-2]
    paged.paged_attention_out(q, *by_head, *case.tensors[3:], **case.keywords, out=wide[:, :-1], lse=lse)
    assert torch.equal(wide[:, :-1], expected) and torch.equal(lse, expected_lse)
    assert torch.isnan(wide[:, -1:]).all()


def check_pages_before_the_window(case: Case, freed: str, tolerance: float | None = None) -> None:
    """What they hold, NaN too, changes no bit: not in the blocks that are skipped, not in the one where the window begins.

    freed: "gone", the table says -1, or "reused", it names page 0, which is NaN.
    """
    expected, expected_lse = attend(case)
    check(case, expected, expected_lse, tolerance)
    page_size, query_lens = case.k_cache.shape[1], case.cu_seqlens_q.diff().tolist()
    for s, (length, query_len) in enumerate(zip(case.seq_lens.tolist(), query_lens, strict=True)):
        start = max(length - query_len - case.keywords["window"] + 1, 0)  # the first key that a query sees
        case.block_table[s, : start // page_size] = -1 if freed == "gone" else 0
        page = int(case.block_table[s, start // page_size])
        case.k_cache[page, : start % page_size] = case.v_cache[page, : start % page_size] = float("nan")
    out, lse = attend(case)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def check_after_filling_shared_memory(value: int, cases: Iterable[Case], tolerance: float | None = None) -> None:
    """Another kernel left ``value`` wherever this one's programs begin."""
    from tests.tkernels.attention.shared_memory import fill_shared_memory

    for case in cases:
        fill_shared_memory(value)
        check(case, *attend(case), tolerance)


def check_bits_alone(case: Case, *buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence alone, in the bucket of its own number of query tokens and in others, has the bits that it has in the batch."""
    out, lse = attend(case)
    starts = case.cu_seqlens_q.tolist()
    for s in range(len(case.seq_lens)):
        rows = slice(starts[s], starts[s + 1])
        for bucket in (None, *buckets):
            alone, alone_lse = attend(part(case, s, s + 1, bucket))
            assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows]), f"sequence {s} in bucket {bucket or 'of its own'}"
    return out, lse


def check_a_thousand_runs_beside_other_work(case: Case) -> None:
    """Programs of other kernels come between those of a launch: no bit depends on it."""
    expected, _ = attend(case)
    noise, other = torch.randn((2048, 2048), device="cuda"), torch.cuda.Stream()
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                noise @ noise
        assert torch.equal(attend(case)[0], expected), i


def check_a_thousand_runs_under_stress(case: Case, tolerance: float | None = None) -> None:
    """Bit-identical while another stream's kernels take multiprocessors and bandwidth at changing moments, launches close together."""
    expected, expected_lse = attend(case)
    check(case, expected, expected_lse, tolerance)
    other = torch.cuda.Stream()
    noise = torch.randn((4096, 4096), device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        with torch.cuda.stream(other):
            if i % 3 == 0:
                noise[: 256 * (1 + i % 16)] @ noise
            elif i % 7 == 0:
                noise.mul_(1.0)
        out, lse = attend(case)
        wrong += (out != expected).sum() + (lse != expected_lse).sum()
        if i % 50 == 0:
            torch.cuda.synchronize()
    assert int(wrong) == 0


def check_dependent_launches(case: Case) -> None:
    """In a graph in which the launch before writes the queries and the one after overwrites them: the same bits, however often."""
    expected, expected_lse = attend(case)
    out, lse = torch.full_like(expected, float("nan")), torch.full_like(expected_lse, float("nan"))
    q = torch.zeros_like(case.q)

    def step() -> None:
        for _ in range(3):
            q.copy_(case.q)
            paged.paged_attention_out(q, *case.tensors[1:], **case.keywords, out=out, lse=lse)
            q.zero_()

    graph, _ = captured(step, dependent=True)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
