"""Cases: what the collectives compute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

import tkernels.collectives as C
from tests.tkernels.collectives.rank import (
    FLOATS,
    GPU,
    MAX_BYTES,
    Rank,
    case,
    expected_sum,
    forced,
    norm_reference,
    raising,
    same_bits,
    small_case,
)
from tkernels._op import reference_ops
from tkernels.collectives import norm
from tkernels.collectives import plan as plans
from tkernels.collectives.group import find
from tkernels.quant import FP8


@case
def b121_any_size_down_to_fewer_elements_than_ranks(at: Rank) -> None:
    for dtype in FLOATS if GPU else (torch.bfloat16, torch.float32):
        for kind in ("one_shot", "two_shot"):
            with forced(kind):
                for n in (
                    (0, 1, 7, 8, 9, 15, at.world * 8 - 1) if GPU else (0, 1, 9, 8 * at.world - 1) if dtype == torch.bfloat16 else (5, 16)
                ):
                    xs = at.inputs(n, dtype, n)
                    same_bits(C.all_reduce(xs[at.rank].to(at.device), at.group), expected_sum(xs), (dtype, kind, n))


@case
def b116_all_ranks_and_algorithms_agree_bit_for_bit(at: Rank) -> None:
    for dtype in FLOATS:
        xs = at.inputs(1000 if GPU else 600, dtype, 1)
        x = xs[at.rank].to(at.device)
        outs = []
        for kind in ("one_shot", "two_shot"):
            with forced(kind):
                outs.append(C.all_reduce(x, at.group))
        same_bits(outs[0], expected_sum(xs), dtype)
        same_bits(outs[1], outs[0], dtype)
        sums = at.everywhere(str(outs[0].cpu().float().double().mul(torch.arange(1.0, 1 + len(xs[0]))).sum().item()))
        assert len(set(sums)) == 1, sums


@case
def words_that_look_empty_and_infinities_arrive(at: Rank) -> None:
    for dtype in FLOATS if at.world == 2 or GPU else (torch.float16,):
        xs = at.inputs(64, dtype, 2)
        xs[at.world - 1].view(torch.int16)[:8] = -1  # NaN, and the mark of an empty word
        xs[0][20:22] = float("inf")
        xs[1][21] = float("-inf")
        for kind in ("one_shot", "two_shot"):
            with forced(kind):
                same_bits(C.all_reduce(xs[at.rank].to(at.device), at.group), expected_sum(xs), (dtype, kind))


@case
def views_by_offset_and_row_stride(at: Rank) -> None:
    base = [x.to(at.device) for x in at.inputs((6, 64), torch.bfloat16, 3)]
    cuts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.view(-1)[1:98],
        lambda x: x[:, :16],
        lambda x: x[:, 3:20],
        lambda x: x[::2],
        lambda x: x.view(2, 3, 64)[:, :, 8:24].reshape(2, 3, 16),
    ]
    for number, cut in enumerate(cuts if GPU or at.world == 2 else cuts[2:4]):
        for kind in ("one_shot", "two_shot"):
            with forced(kind):
                out = C.all_reduce(cut(base[at.rank]), at.group)
                same_bits(out, expected_sum([cut(x).cpu() for x in base]), (number, kind))
                assert out.is_contiguous()
    with raising("x: expected last stride 1", "contiguous", kind=ValueError):
        C.all_reduce(base[at.rank].t(), at.group)


@case
def only_one_rank_has_an_unaligned_input(at: Rank) -> None:
    xs = at.inputs(129, torch.float32, 4)
    x = xs[at.rank].to(at.device)
    x = x[1:] if at.rank == 0 else x[1:].clone()
    same_bits(C.all_reduce(x, at.group), expected_sum([x[1:] for x in xs]), "unaligned")


@case
def longer_than_max_bytes_goes_in_pieces(at: Rank) -> None:
    n = MAX_BYTES // 4 + 12
    xs = at.inputs(n, torch.float32, 5)
    same_bits(C.all_reduce(xs[at.rank].to(at.device), at.group), expected_sum(xs), n)


@case
def out_of_place_and_no_alias(at: Rank) -> None:
    xs = at.inputs(256, torch.float32, 6)
    x = xs[at.rank].to(at.device)
    out = C.all_reduce(x, at.group)
    assert out.data_ptr() != x.data_ptr()
    same_bits(x, xs[at.rank], "the input was written")


@case
def b118_b123_stress_with_random_delays(at: Rank) -> None:
    """Sizes, algorithms and dtypes change from call to call, and ranks come late in turns."""
    late = random.Random(at.rank)
    common = random.Random(7)
    for step in range(500 if GPU else 40 // at.world):
        kind = common.choice(("one_shot", "two_shot"))
        n = common.choice((8, 700, 56, 2000, 1, 8 * at.world)) if not GPU else common.choice((8, 1000, 56, 30000, 1, 200000))
        dtype = common.choice(FLOATS)
        xs = at.inputs(n, dtype, step)
        if late.random() < 0.2:
            time.sleep(late.random() * (0.002 if GPU else 0.03))
        with forced(kind):
            same_bits(C.all_reduce(xs[at.rank].to(at.device), at.group), expected_sum(xs), (step, kind, n, dtype))


@case
def all_gather_along_any_dimension(at: Rank) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        for shape in ((3, 8), (2, 5), (0, 4), (2, 3, 16)) if dtype == torch.bfloat16 or GPU else ((2, 3, 4),):
            xs = [(x * 10).to(dtype) for x in at.inputs(shape, torch.float32, 8)]
            for dim in range(len(shape)) if GPU or len(shape) > 2 else (-1,):
                out = C.all_gather(xs[at.rank].to(at.device), at.group, dim)
                assert torch.equal(out.cpu(), torch.cat(xs, dim)), (dtype, shape, dim)
    with raising("dim: expected -2 to 1", kind=ValueError):
        C.all_gather(torch.zeros(2, 2, device=at.device), at.group, 2)


@case
def reduce_scatter_is_a_part_of_all_reduce(at: Rank) -> None:
    for dtype in FLOATS if GPU else (torch.float32,):
        for shape, dim in (((4 * at.world, 8), 0), ((3, 8 * at.world), 1), ((2, 5 * at.world), -1), ((at.world,), 0)):
            xs = at.inputs(shape, dtype, 9)
            x = xs[at.rank].to(at.device)
            out = C.reduce_scatter(x, at.group, dim)
            same_bits(out, expected_sum(xs).chunk(at.world, dim)[at.rank].contiguous(), (dtype, shape, dim))
    with raising("multiple of the", kind=ValueError):
        C.reduce_scatter(torch.zeros(at.world + 1, device=at.device), at.group)


def check_norm(
    at: Rank, rows: int, hidden: int, dtype: torch.dtype, kinds: tuple[str, ...], weight_dtype: torch.dtype | None = None
) -> None:
    xs = at.inputs((rows, hidden), dtype, rows * hidden)
    generator = torch.Generator().manual_seed(hidden)
    residual = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = torch.rand(hidden, generator=generator).to(weight_dtype or dtype)
    want, total = norm_reference(xs, residual, weight, 1e-5)
    scale = torch.tensor([0.02])
    there = [t.to(at.device) for t in (xs[at.rank], residual, weight, scale)]
    found = []
    for kind in kinds:
        with forced(kind):
            y, new_residual = C.all_reduce_add_rms_norm(there[0], there[1], there[2], 1e-5, at.group)
        same_bits(new_residual, total, (rows, hidden, dtype, kind))
        limit = 2 * (want.to(dtype).double() - want).abs().max() + 1e-5 * want.abs().max()
        worst = (y.cpu().double() - want).abs().max()
        assert worst <= limit, (rows, hidden, dtype, kind, float(worst), float(limit))
        if GPU or dtype == torch.bfloat16:
            with forced(kind):
                quantised, again = C.all_reduce_add_rms_norm(there[0], there[1], there[2], 1e-5, at.group, scale=there[3])
            same_bits(again, total, (rows, hidden, dtype, kind, "fp8"))
            same_bits(quantised, (y.cpu().float() / scale).clamp(-448, 448).to(FP8), (rows, hidden, dtype, kind, "fp8"))
        found.append(y)
    for y in found[1:]:
        same_bits(y, found[0], (rows, hidden, dtype, "one-shot and two-shot"))


@case
def fused_norm_agrees_with_the_plain_sum_bit_for_bit(at: Rank) -> None:
    both = ("one_shot", "two_shot")
    check_norm(at, 2, 576 if GPU else 264, torch.bfloat16, both)
    if at.world == 2 or GPU:
        check_norm(at, 1, 72, torch.float16, ("two_shot",), torch.float32)
        check_norm(at, 2, 40, torch.float32, both)
        check_norm(at, 1, 37, torch.bfloat16, ("one_shot",))
    if GPU:
        for hidden in (576, 4096, 16384):
            for rows in (1, 7, 63, 455, 600):
                if rows * hidden * 2 <= MAX_BYTES:
                    check_norm(
                        at,
                        rows,
                        hidden,
                        torch.bfloat16,
                        both if rows * hidden * 2 <= find(at.group).sizes.one_shot_bytes else ("two_shot",),
                    )
        check_norm(at, 5, 4096, torch.float32, both)
    elif at.world == 2:
        before, norm.plan_fused = norm.plan_fused, lambda *args: plans.Launch("one_shot", 32, 2, loop=True)
        try:
            check_norm(at, 3, 64, torch.float32, ("one_shot",))  # a program takes several rows
        finally:
            norm.plan_fused = before


@small_case
def fused_norm_of_views_and_of_no_rows(at: Rank) -> None:
    xs = at.inputs((3, 96), torch.bfloat16, 11)
    residual, weight = torch.randn(3, 64).to(torch.bfloat16), torch.rand(65).to(torch.bfloat16)
    for cut in (slice(8, 72), slice(5, 69)):
        for kind in ("one_shot", "two_shot") if GPU else ("one_shot",) if cut.start == 8 else ("two_shot",):
            with forced(kind):
                y, total = C.all_reduce_add_rms_norm(
                    xs[at.rank].to(at.device)[:, cut], residual.to(at.device), weight.to(at.device)[1:], 1e-6, at.group
                )
            want, want_total = norm_reference([x[:, cut] for x in xs], residual, weight[1:], 1e-6)
            same_bits(total, want_total, (cut, kind))
            assert (y.cpu().double() - want).abs().max() < 0.03
    y, total = C.all_reduce_add_rms_norm(*(torch.zeros(0, 64, device=at.device),) * 2, torch.ones(64, device=at.device), 1e-6, at.group)
    assert y.shape == total.shape == (0, 64)
    with raising("residual: expected [3, 64]", kind=ValueError):
        C.all_reduce_add_rms_norm(
            torch.zeros(3, 64, device=at.device), torch.zeros(3, 65, device=at.device), torch.ones(64, device=at.device), 1e-6, at.group
        )


@case
def the_library_path_gives_the_same_answers(at: Rank) -> None:
    """gloo on the CPU sums in rank order too; NCCL is compared by tolerance."""
    group = find(at.group)
    xs = at.inputs((4, 64 * at.world), torch.bfloat16, 12)
    x = xs[at.rank].to(at.device)
    workspace, group.workspace = group.workspace, None
    try:
        with reference_ops():
            outs = C.all_reduce(x, at.group), C.all_gather(x, at.group, 1), C.reduce_scatter(x, at.group, 1)
            odd = C.all_reduce(x[:1, :3].contiguous(), at.group)
            _, total = C.all_reduce_add_rms_norm(x, x, torch.ones(64 * at.world, device=at.device), 1e-6, at.group)
    finally:
        group.workspace = workspace
    wants = expected_sum(xs), torch.cat(xs, 1), expected_sum(xs).chunk(at.world, 1)[at.rank]
    for out, want in zip((*outs, odd), (*wants, wants[0][:1, :3]), strict=True):
        torch.testing.assert_close(out.cpu(), want, rtol=0.02 if GPU else 0, atol=0.05 if GPU else 0)
    torch.testing.assert_close(total.cpu(), wants[0] + xs[at.rank], rtol=0.02, atol=0.05)
