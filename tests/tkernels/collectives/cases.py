"""What every rank runs: under torchrun on GPUs, or started by test_collectives.py on the CPU with interpreted kernels.

    torchrun --nproc-per-node 4 tests/tkernels/collectives/cases.py            # all cases that this machine can run, in one process each

Every rank knows all ranks' inputs by seed, so each computes the expected sum itself, in plain torch. A case that fails on one rank
fails on all; the report (JSON, one file a rank) says where.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tkernels.collectives as C
from tkernels import _repeats
from tkernels._op import reference_ops
from tkernels.collectives import norm
from tkernels.collectives import plan as plans
from tkernels.collectives.group import find
from tkernels.quant import FP8

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GPU = torch.cuda.is_available()
MAX_BYTES = 4 << 20 if GPU else 24 << 10


@dataclass
class Rank:
    rank: int
    world: int
    device: torch.device
    group: str

    def inputs(self, shape: tuple[int, ...] | int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """Every rank's x, of mixed magnitude: sums in another order differ in the last bits."""
        made = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-3, 4, (1,), generator=generator).float())
            made.append((x * (1 + rank)).to(dtype))
        return made

    def everywhere(self, text: str) -> list[str]:
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, text)
        return answers


CASES: dict[str, Callable[[Rank], None]] = {}
GPU_ONLY: set[str] = set()
TWO_ON_CPU: set[str] = set()


def case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    CASES[function.__name__] = function
    return function


def gpu_case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    GPU_ONLY.add(function.__name__)
    return case(function)


def small_case(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Of torch rather than of the protocol: on the CPU two ranks are enough."""
    TWO_ON_CPU.add(function.__name__)
    return case(function)


def expected_sum(xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


def same_bits(got: torch.Tensor, want: torch.Tensor, what: Any) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, got.shape, want.dtype, want.shape)
    got, want = got.cpu(), want.cpu()
    nan = got.float().isnan() & want.float().isnan()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    different = (got.view(view) != want.view(view)) & ~nan
    assert not different.any(), f"{what}: {int(different.sum())} of {got.numel()} differ, first {different.nonzero()[0].tolist()}"


@contextmanager
def forced(kind: str) -> Iterator[None]:
    """All-reduces by one algorithm, whatever the table says."""
    name, table = {"one_shot": ("_ONE_SHOT", 1 << 40), "two_shot": ("_ONE_SHOT", 0)}[kind]
    fused = plans._FUSED_ONE_SHOT
    before = getattr(plans, name)
    setattr(plans, name, dict.fromkeys(before, table))
    plans._FUSED_ONE_SHOT = dict.fromkeys(fused, table)
    _repeats.forget()  # launches by the other table
    try:
        yield
    finally:
        _repeats.forget()
        setattr(plans, name, before)
        plans._FUSED_ONE_SHOT = fused


@contextmanager
def raising(*parts: str, kind: type[Exception] = C.CollectiveError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        for part in parts:
            assert part in str(error), f"expected {part!r} in: {error}"
        return
    raise AssertionError(f"expected {kind.__name__} with {parts}")


@contextmanager
def repeating() -> Iterator[None]:
    """In the interpreter too: from the third call that looks alike on, an op repeats its launches."""
    before, _repeats.ENABLED = _repeats.ENABLED, True
    try:
        yield
    finally:
        _repeats.ENABLED = before
        _repeats.forget()


def plans_made() -> int:
    return sum(isinstance(plan, _repeats._Plan) for table in _repeats._tables for plan in table.values())


# -- answers ------------------------------------------------------------------------------------------------------------------------


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


def norm_reference(xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y in fp64, new_residual in the dtype of x)"""
    total = (expected_sum(xs).float() + residual.float()).to(residual.dtype)
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double(), total


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


# -- torch ----------------------------------------------------------------------------------------------------------------------------


@small_case
def compiles_with_fullgraph(at: Rank) -> None:
    name, weight = at.group, torch.ones(64, device=at.device)

    def step(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = C.all_reduce(x * 2, name)
        y, residual = C.all_reduce_add_rms_norm(x + 1, residual, weight, 1e-6, name)
        return C.all_gather(total, name, -1), y, residual, C.reduce_scatter(total, name, 1)

    xs = at.inputs((2, 64), torch.float32, 13)
    x = xs[at.rank].to(at.device)
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    for got, want in zip(compiled(x, x), step(x, x), strict=True):
        assert got.shape == want.shape and got.stride() == want.stride()
        torch.testing.assert_close(got, want)
    for args in ((x, name),):
        torch.library.opcheck(torch.ops.tkernels.all_reduce.default, args, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.tkernels.all_gather.default, (x, 1, name), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.tkernels.reduce_scatter.default, (x, 1, name), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        torch.ops.tkernels.all_reduce_add_rms_norm.default, (x, x, weight, 1e-6, name), test_utils=("test_schema", "test_faketensor")
    )


@case
def process_groups_and_device_meshes_name_groups(at: Rank) -> None:
    mesh = dist.init_device_mesh(at.device.type, (at.world // 2, 2), mesh_dim_names=("dp", "tp"))
    name = C.init_group(mesh["tp"], max_bytes=MAX_BYTES, timeout_s=60.0)
    alone = C.init_group(dist.new_group([at.rank], use_local_synchronization=True))
    xs = at.inputs(32, torch.float32, 14)
    x = xs[at.rank].to(at.device)
    pair = at.rank // 2 * 2
    for group in (name, mesh["tp"], mesh["tp"].get_group()):
        same_bits(C.all_reduce(x, group), expected_sum(xs[pair : pair + 2]), group)
    for out in (C.all_reduce(x, alone), C.all_gather(x, alone), C.reduce_scatter(x, alone)):
        same_bits(out, x, "one rank")
        assert out.data_ptr() != x.data_ptr()
    with raising("one dimension", kind=ValueError):
        C.init_group(mesh)
    for step in range(2):  # overlapping groups take turns
        same_bits(C.all_reduce(x, at.group), expected_sum(xs), step)
        same_bits(C.all_reduce(x, name), expected_sum(xs[pair : pair + 2]), step)
    if name != at.group:
        C.destroy_group(name)
    C.destroy_group(alone)


@case
def wrong_arguments_are_named(at: Rank) -> None:
    x = torch.zeros(8, device=at.device)
    with raising("group: 'nobody'", "init_group", kind=ValueError):
        C.all_reduce(x, "nobody")
    with raising("x: expected float16", kind=TypeError):
        C.all_reduce(x.long(), at.group)
    with raising("max_bytes", "destroy_group", kind=ValueError):
        C.init_group(dist.group.WORLD, max_bytes=MAX_BYTES * 2)
    with raising("timeout_s: expected more than 0", kind=ValueError):
        C.init_group(dist.group.WORLD, timeout_s=0)
    assert C.init_group(dist.group.WORLD, max_bytes=MAX_BYTES, timeout_s=60.0) == at.group
    assert f"{at.world} ranks, workspace" in C.describe_group(at.group)
    C.check()


@case
def calls_that_look_alike_are_repeated(at: Rank) -> None:
    """With other data at other addresses, with one rank's input unaligned from some call on, and all ops in turn."""
    weight = torch.rand(32, generator=torch.Generator().manual_seed(3)).to(at.device)
    with repeating():
        _repeats.forget()
        for step in range(5):
            xs = at.inputs((2 * at.world, 32), torch.float32, 60 + step)
            x = xs[at.rank].to(at.device)
            if step == 4 and at.rank == 1:
                x = torch.cat([x.view(-1)[:1], x.view(-1)])[1:].view(x.shape)
            same_bits(C.all_reduce(x, at.group), expected_sum(xs), step)
            residual = torch.full_like(x, step)
            y, total = C.all_reduce_add_rms_norm(x, residual, weight, 1e-5, at.group)
            want, want_total = norm_reference(xs, residual.cpu(), weight.cpu(), 1e-5)
            same_bits(total, want_total, step)
            torch.testing.assert_close(y.cpu().double(), want, rtol=1e-5, atol=1e-5)
            if at.world == 2 or GPU:
                assert torch.equal(C.all_gather(x, at.group, 1).cpu(), torch.cat(xs, 1)), step
                same_bits(C.reduce_scatter(x, at.group), expected_sum(xs).chunk(at.world)[at.rank], step)
        assert plans_made() == (4 if at.world == 2 or GPU else 2)


@case
def a_repeated_call_raises_once_its_group_has_failed(at: Rank) -> None:
    name, process_group = fresh(at, 60.0)
    x, group = torch.ones(16, device=at.device), find(name)
    with repeating():
        for _ in range(3):
            assert C.all_reduce(x, name)[0] == at.world
        sync()
        assert plans_made() == 1
        group._report[0], group._report[8] = 1, 1  # as the device would
        with raising("waited 60 s for rank 0"):
            C.all_reduce(x, name)
        at.everywhere("")
        C.destroy_group(name)
        with raising("is not set up", kind=ValueError):
            C.all_reduce(x, name)
        C.init_group(process_group, max_bytes=1 << 12, timeout_s=60.0)
        assert plans_made() == 0  # of a workspace that is gone
        assert C.all_reduce(x, name)[0] == at.world
        sync()
        C.destroy_group(name)


# -- failures -------------------------------------------------------------------------------------------------------------------------


def fresh(at: Rank, timeout_s: float) -> tuple[str, Any]:
    process_group = dist.new_group(list(range(at.world)))
    return C.init_group(process_group, max_bytes=1 << 12, timeout_s=timeout_s), process_group


@case
def b125_a_rank_with_another_size_is_named(at: Rank) -> None:
    name, process_group = fresh(at, 1.0)
    warm = C.all_reduce(torch.ones(64, device=at.device), name)
    sync()
    assert warm[0] == at.world
    with raising("group", "rank"):
        C.all_reduce(torch.ones(32 if at.rank == 1 else 64, device=at.device), name)
        sync()
        C.check(name)
    with raising("destroy_group"):  # and stays failed
        C.all_reduce(torch.ones(64, device=at.device), name)
    at.everywhere("")
    C.destroy_group(name)
    at.everywhere("")
    C.init_group(process_group, max_bytes=1 << 12, timeout_s=60.0)
    assert C.all_reduce(torch.ones(64, device=at.device), name)[0] == at.world
    sync()
    C.destroy_group(name)


@case
def b125_a_late_rank_is_named_and_its_absence_is_nan(at: Rank) -> None:
    limit, absence = (0.5, 2.0) if GPU else (1.5, 6.0)  # interpreters on a busy machine drift apart by themselves
    name, _ = fresh(at, limit)
    C.all_reduce(torch.ones(64, device=at.device), name)
    sync()
    at.everywhere("")
    if at.rank == 1:
        time.sleep(absence)
    started = time.monotonic()
    if at.rank != 1:
        with raising(f"waited {limit:g} s for rank 1", "all_reduce (one-shot)"):
            out = C.all_reduce(torch.ones(64, device=at.device), name)
            sync()
            assert out.isnan().all()
            C.check(name)
        assert time.monotonic() - started < absence - 0.1
    at.everywhere("")
    if at.rank == 1:  # the others' data is there
        assert C.all_reduce(torch.ones(64, device=at.device), name)[0] == at.world
    C.destroy_group(name)


@case
def the_launch_counters_wrap(at: Rank) -> None:
    """Each gains 1024 a launch, so it turns negative after two million launches, a matter of minutes."""
    state = find(at.group).state
    assert state is not None
    for start in (2**31 - 2 * 1024, -2 * 1024):
        sync()
        state[:2] = start
        sync()
        at.everywhere("")
        for step in range(50 if GPU else 3):
            xs = at.inputs(200_000 if GPU else 1000, torch.float32, 70 + step)  # several programs
            same_bits(C.all_reduce(xs[at.rank].to(at.device), at.group), expected_sum(xs), (start, step))


@case
def b123_set_up_and_torn_down_many_times(at: Rank) -> None:
    process_group = dist.new_group(list(range(at.world)))
    late = random.Random(at.rank)
    for step in range(20 if GPU else 200 if at.world == 2 else 20):
        name = C.init_group(process_group, max_bytes=1 << 10, timeout_s=60.0)
        if late.random() < 0.3:
            time.sleep(late.random() * 0.004)
        if step % (2 if GPU else 20) == 0:
            assert C.all_reduce(torch.ones(8, device=at.device), name)[0] == at.world
            sync()
        C.destroy_group(name)


# -- CUDA graphs ----------------------------------------------------------------------------------------------------------------------


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = run()
    return graph, out


@gpu_case
def b115_replays_see_the_current_data(at: Rank) -> None:
    """Graphs of several sizes, first captured without a warm-up, replayed in any order with eager calls between, re-captured."""
    held = []
    weight = torch.ones(1024, device=at.device, dtype=torch.bfloat16)
    for n in (1024, 24 * 1024, 1024 * 1024):
        x = torch.zeros(n // 1024, 1024, device=at.device, dtype=torch.bfloat16)
        held.append((x, *captured(lambda x=x: (C.all_reduce(x, at.group), *C.all_reduce_add_rms_norm(x, x, weight, 1e-6, at.group)))))
    common = random.Random(15)
    late = random.Random(at.rank)
    for step in range(600):
        x, graph, outs = held[common.randrange(3)]
        xs = [torch.full_like(x, (step * 7 + rank * 3) % 61 - 30) for rank in range(at.world)]
        x.copy_(xs[at.rank])
        for out in outs:
            out.fill_(float("nan"))
        if late.random() < 0.05:
            time.sleep(late.random() * 0.003)
        graph.replay()
        total = sum(xs[1:], xs[0])
        assert torch.equal(outs[0], total), step
        assert torch.equal(outs[2], total + xs[at.rank]), step
        assert not outs[1].isnan().any(), step
        if step % 5 == 0:
            assert torch.equal(C.all_reduce(x, at.group), total), step
        if step % 100 == 50:
            held[0] = (x, *captured(lambda x=x: (C.all_reduce(x, at.group), *C.all_reduce_add_rms_norm(x, x, weight, 1e-6, at.group))))
    C.check(at.group)


@gpu_case
def b126_soak_of_a_hundred_thousand_replays(at: Rank) -> None:
    """A producer right before each call, sums checked on the device every time."""
    x = torch.zeros(64 * 1024, device=at.device, dtype=torch.bfloat16)
    counter = torch.zeros((), device=at.device)
    wrong = torch.zeros((), device=at.device, dtype=torch.int64)
    lane = torch.arange(x.numel(), device=at.device) % 13

    def run() -> None:
        for n in (4096, 1024, 65536, 8192):
            counter.add_(1)
            x.copy_((counter + lane) % 17 + at.rank)
            out = C.all_reduce(x[:n], at.group)
            want = ((counter + lane[:n]) % 17) * at.world + at.world * (at.world - 1) // 2
            wrong.add_((out != want).sum())

    graph, _ = captured(run)
    for _ in range(25_000):
        graph.replay()
    sync()
    assert int(wrong) == 0, int(wrong)
    C.check(at.group)


@gpu_case
def b120_ranks_with_other_allocator_states_capture_the_same(at: Rank) -> None:
    held = [torch.empty(1 << 20 << at.rank, device=at.device) for _ in range(1 + 3 * at.rank)]
    del held[::2]
    x = torch.full((4096,), at.rank + 1.0, device=at.device)
    graph, out = captured(lambda: C.all_reduce(x, at.group))
    for _ in range(3):
        graph.replay()
        assert (out == at.world * (at.world + 1) / 2).all()


@gpu_case
def two_streams_take_turns(at: Rank) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = at.inputs(50_000, torch.bfloat16, 16)
    x, want = xs[at.rank].to(at.device), expected_sum(xs).to(at.device)
    sync()
    outs = []
    for step in range(200):
        with torch.cuda.stream(streams[step % 2]):
            outs.append(C.all_reduce(x, at.group))
    sync()
    assert all(torch.equal(out, want) for out in outs)
    C.check(at.group)


@gpu_case
def two_graphs_at_once_are_right_or_reported(at: Rank) -> None:
    name, _ = fresh(at, 2.0)
    xs = at.inputs(2000, torch.bfloat16, 17)
    x, want = xs[at.rank].to(at.device), expected_sum(xs).to(at.device)
    C.all_reduce(x, name)
    sync()
    graphs = [captured(lambda: [C.all_reduce(x, name) for _ in range(10)]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    sync()
    try:
        C.check(name)
    except C.CollectiveError:
        return
    assert all(torch.equal(out, want) for _, outs in graphs for out in outs)


@gpu_case
def set_up_within_a_capture_is_refused(at: Rank) -> None:
    process_group = dist.new_group(list(range(at.world)))
    graph = torch.cuda.CUDAGraph()
    with raising("within a CUDA graph capture"), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(1, device=at.device)
        C.init_group(process_group)
    sync()


def runs(name: str, world: int) -> bool:
    return GPU or not (name in GPU_ONLY or (name in TWO_ON_CPU and world > 2))


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    group = C.init_group(max_bytes=MAX_BYTES, timeout_s=60.0)
    at = Rank(rank, world, device, group)
    wanted = sys.argv[2:] or list(CASES)
    results: dict[str, dict[str, Any]] = {}
    for name in wanted:
        if not runs(name, world):
            continue
        started, spent = time.monotonic(), time.process_time()
        try:
            CASES[name](at)
            sync()
            trouble = ""
        except Exception:
            trouble = traceback.format_exc()
        troubles = at.everywhere(trouble)
        results[name] = {
            "seconds": round(time.monotonic() - started, 3),
            "cpu": round(time.process_time() - spent, 2),
            "troubles": {str(r): t for r, t in enumerate(troubles) if t},
        }
        if rank == 0:
            print(
                f"{'FAIL' if any(troubles) else 'ok  '} {results[name]['seconds']:7.2f} s (CPU {results[name]['cpu']:.1f})  {name}",
                flush=True,
            )
            for number, text in enumerate(troubles):
                if text:
                    print(f"  rank {number}: {text}", flush=True)
    if len(sys.argv) > 1 and sys.argv[1] != "-":
        Path(sys.argv[1].format(rank=rank)).write_text(json.dumps(results))
    dist.barrier()
    return int(any(result["troubles"] for result in results.values()))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
