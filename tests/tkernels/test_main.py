"""``python -m tkernels info``: what runs here, and which tables apply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tkernels import __main__ as command
from tkernels._target import target_of
from tkernels.attention import decode_sm90, prefill_sm90

TABLES = Path(command.__file__).parent / "tables"


def test_info_names_device_versions_ops_and_tables(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    command.info()
    out = capsys.readouterr().out
    arch = target_of(device).arch
    assert ("multiprocessors" if device.type == "cuda" else f"{torch.get_num_threads()} threads") in out.splitlines()[0]
    assert arch in out.splitlines()[0] and f"torch   {torch.__version__}" in out
    assert "rms_norm" in out and "paged_attention_out" in out
    for kernel, module in (("prefill", prefill_sm90), ("decode", decode_sm90)):
        line = next(line for line in out.splitlines() if line.startswith(f"gluon   {kernel} "))
        assert ("not in use: " in line) == (module.absence(arch) is not None), line
    for name in ("linear", "attention"):
        line = next(line for line in out.splitlines() if line.startswith(f"table   {name}: "))
        assert ("in use" in line) == (arch in command._tables()[name]), line


def test_every_shipped_table_is_counted() -> None:
    counted = command._tables()
    entries = json.loads((TABLES / "linear_sm_90.json").read_text())["entries"]
    assert counted["linear"]["sm_90"] == len(entries) > 0
    assert set(counted["attention"]) == set(json.loads((TABLES / "attention.json").read_text()))


def test_tune_says_what_it_needs() -> None:
    if torch.cuda.is_available():
        pytest.skip("it would tune")
    done = subprocess.run([sys.executable, "-m", "tkernels", "tune"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    done = subprocess.run([sys.executable, "-m", "tkernels", "tune", "--shapes", "3x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected OUTxIN" in done.stderr
