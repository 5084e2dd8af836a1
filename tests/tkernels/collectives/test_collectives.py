"""The cases of cases.py on 2 and 4 processes of the CPU, and a rank that is killed; on a GPU machine under torchrun on 2 and 4 GPUs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tkernels.collectives.cases import CASES, GPU, runs
from tests.tkernels.recording_driver import run_recorded
from tkernels._triton import HAVE_TRITON, tl, triton
from tkernels.collectives.lamport import begin
from tkernels.collectives.plan import MAX_WORLD, Launch, Sizes, plan_all_reduce, plan_fused, plan_gather

HERE = Path(__file__).parent
WORLDS = tuple(world for world in (2, 4) if not GPU or torch.cuda.device_count() >= world)


def start(world: int, script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """One process a rank, as torchrun would start them, without its seconds of start-up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    if not GPU:
        environment["TRITON_INTERPRET"] = "1"
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """(return code, output) of each; all are ended, whatever happens."""
    try:
        deadline = time.monotonic() + timeout_s
        return [
            (process.returncode, out)
            for process in processes
            for out, _ in [process.communicate(timeout=max(1, deadline - time.monotonic()))]
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


@cache
def results(world: int) -> dict[str, Any]:
    """All cases in one go: starting the processes takes longer than most cases."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        outs = finish(start(world, "cases.py", f"{folder}/{{rank}}.json"), 240)
        report = Path(folder) / "0.json"
        assert report.exists(), "\n".join(f"rank {rank} ended with {code}:\n{out[-3000:]}" for rank, (code, out) in enumerate(outs))
        return json.loads(report.read_text())


@pytest.mark.parametrize(("name", "world"), [(name, world) for world in WORLDS for name in CASES if runs(name, world)])
def test_case(name: str, world: int) -> None:
    found = results(world)
    assert name in found, f"{name} did not run: {list(found)}"
    assert not found[name]["troubles"], "\n".join(f"rank {rank}: {text}" for rank, text in found[name]["troubles"].items())


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank_is_named_by_the_others(world: int) -> None:
    processes = start(world, "killed.py")
    outs = finish(processes, 120)
    assert outs[1][0] == -signal.SIGKILL
    for rank, (code, out) in enumerate(outs):
        if rank != 1:
            assert code == 0 and "all_reduce (one-shot)" in out and "waited 3 s for rank 1" in out, (rank, code, out[-2000:])


@triton.jit
def _begin_kernel(state, out_ptr):
    launch, finished, alive, _ = begin(state, 0, False)
    tl.store(out_ptr, launch)
    tl.store(out_ptr + 1, finished)
    tl.store(out_ptr + 2, alive)


@pytest.mark.parametrize("launch", [0, 2**21 - 1, -(2**21), -1])
def test_programs_of_a_launch_agree_on_its_number_when_the_counter_is_negative(launch: int, device: torch.device) -> None:
    """Some read it after others have added their shares."""
    for share in (0, 1, 1023):
        state = torch.zeros(64, dtype=torch.int32, device=device)
        state[:2] = launch * 1024 + share
        out = torch.empty(3, dtype=torch.int32, device=device)
        _begin_kernel[(1,)](state.data_ptr(), out)
        assert out.tolist() == [launch, launch, 1], share


_RECORDED = """
from tkernels import _repeats
from tkernels.collectives import group, norm, ops
from tkernels.collectives.symm import Workspace

_repeats.ENABLED = True
made = group.Communicator("g", 1, 2, torch.device("cpu"), None, 1 << 20, 30.0, meetings=SimpleNamespace(exchange=lambda *a: []))
made.attach(Workspace((256, 512), None))
group._GROUPS["g"] = made
x, weight, residual = torch.zeros(8, 64), torch.ones(64), torch.zeros(8, 64)
for kernel, place, args in (
    (ops.all_reduce_kernel, 1, (x, "g")),
    (ops._all_gather, 2, (x, 1, "g")),
    (ops._reduce_scatter, 2, (x, 0, "g")),
    (norm._all_reduce_add_rms_norm, 4, (x, residual, weight, 1e-6, "g")),
):
    call, kept = _repeats.repeating(kernel, group.in_group(place)), []
    for _ in range(3):
        kept.append(call(*args))  # alive: every call has its own memory
    made_anew, again = calls[-2], calls[-1]
    assert made_anew[:4] == again[:4] and made_anew[4:6] == again[4:6], (kernel, made_anew, again)
    outs = [y if isinstance(y, tuple) else (y,) for y in kept]
    theirs = [y.data_ptr() for y in outs[1]]
    mine = [y.data_ptr() for y in outs[2]]
    want = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in made_anew[9:]]
    want = [mine[theirs.index(a)] if a in theirs and not isinstance(a, bool) else a for a in want]
    assert list(again[9:]) == want and (256, 512) in want, (kernel, again[9:], want)
    made.timeout_s += 1  # another look
    call(*args)
    assert [a for a in calls[-1] if a.__class__ is int].count(int(made.timeout_s * 1e9)) == 1
"""


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_repeated_kernels_get_what_tritons_launcher_gives_them(tmp_path: Path) -> None:
    run_recorded(_RECORDED, tmp_path)


@pytest.mark.parametrize("world", range(2, MAX_WORLD + 1))
def test_every_plan_fits_its_workspace(world: int) -> None:
    """Whatever a plan sends lies within its slot, and all slots within a half; grids stay within the counter's step."""
    for max_bytes in (16, 4096, 100_000, 16 << 20):
        sizes = Sizes.of(max_bytes, world)
        assert max(world * sizes.one, 2 * world * sizes.two) <= sizes.half
        for nbytes in {1, 2, 15, 16, 17, 4096, 100_000, 1 << 20, max_bytes - 1, max_bytes, 3 * max_bytes}:
            plan = plan_all_reduce(nbytes, world, sizes, max_bytes)
            vectors = -(-min(nbytes, max_bytes) // 16)
            if plan.kind == "one_shot":
                assert 128 + 16 * vectors <= sizes.one
                assert plan.loop or plan.grid * plan.lanes >= vectors + 1
            elif plan.kind == "two_shot":
                assert 128 + 16 * -(-vectors // world) <= sizes.two
            assert 0 <= plan.grid <= 512
            gather = plan_gather(nbytes, world, sizes)
            assert gather.kind == "library" or 128 + 16 * -(-nbytes // 16) <= sizes.one
        for hidden in (1, 37, 576, 4096, 16384):
            for rows in (1, 63, 64, 511, 512, 5000):
                fused = plan_fused(rows, hidden, 2, world, sizes, max_bytes)
                row_vectors = -(-hidden // 8)
                if fused.kind == "one_shot":
                    assert 128 + 16 * rows * row_vectors <= sizes.one and fused.lanes * fused.split >= row_vectors
                    assert fused.loop or fused.grid == rows * fused.split + 1
                elif fused.kind == "two_shot":
                    assert 128 + 16 * rows * -(-row_vectors // world) <= sizes.two and fused.lanes >= -(-row_vectors // world)
                assert 0 <= fused.grid <= 512


def test_small_messages_take_one_trip_and_large_ones_two() -> None:
    sizes = Sizes.of(16 << 20, 4)
    assert plan_all_reduce(8192, 4, sizes, 16 << 20).kind == "one_shot"
    assert plan_all_reduce(8 << 20, 4, sizes, 16 << 20).kind == "two_shot"
    assert isinstance(plan_gather(64 << 20, 4, sizes), Launch) and plan_gather(64 << 20, 4, sizes).kind == "library"
