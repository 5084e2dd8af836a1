"""All-reduce over all GPUs of this machine, one bf16 vector a rank: ours with its copy-in, NCCL, torch's symmetric memory.

The measuring processes are those of ``bench.collectives`` (checked there before they are timed); this suite starts them once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import ROOT
from bench.peers import OURS
from bench.suite import Outcome, Problem

KIB, MIB = 1 << 10, 1 << 20
SIZES = [2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB]
PEERS = {OURS: "ours", "NCCL": "NCCL", "torch one-shot": "torch one-shot", "torch two-shot": "torch two-shot"}


@functools.cache
def _run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collectives.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torch.cuda.device_count()}"]
        command += ["-m", "bench.collectives", "--out", str(out), "--largest", str(SIZES[-1] // MIB)]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not out.exists():
            raise AssertionError(f"bench.collectives gave no result (exit {done.returncode}): {done.stderr[-2000:]}")
        return json.loads(out.read_text())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="absent: needs two GPUs; the protocols have tests that need none")
@pytest.mark.parametrize("case", SIZES, ids=lambda size: f"{size // KIB} KiB")
@pytest.mark.parametrize("peer", PEERS)
def test_all_reduce(report: Any, case: int, peer: str) -> None:
    row = next(row for row in _run()["rows"]["all_reduce"] if row["bytes"] == case)
    problem = Problem(peers={}, info={"gpus": torch.cuda.device_count(), "message_bytes": case}, tolerance=0.0)
    report(problem, Outcome((row[PEERS[peer]] * 1e-6,)))
