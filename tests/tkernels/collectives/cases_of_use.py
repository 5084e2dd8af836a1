"""Cases: under torch's compiler and groups, repeated calls, wrong arguments, ranks that are late or disagree."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

import tkernels.collectives as C
from tests.tkernels.collectives.rank import (
    GPU,
    MAX_BYTES,
    Rank,
    case,
    expected_sum,
    fresh,
    norm_reference,
    plans_made,
    raising,
    repeating,
    same_bits,
    small_case,
    sync,
)
from tkernels import _repeats
from tkernels.collectives.group import find


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
