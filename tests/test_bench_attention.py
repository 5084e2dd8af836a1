"""The sweeps of the attention bench: what counts as a cliff, and that points are checked and timed."""

from __future__ import annotations

import json

import pytest
import torch

from bench import attention_sweep
from bench.attention_common import Batch
from bench.attention_sweep import LENGTHS, by_batch, by_length, check, measure, ratios
from bench.harness import write_results
from bench.report import script_table
from tkernels.attention.ref import paged_attention_ref


def by_reference(x, out, lse, queries) -> None:
    """In the kernel's place: an interpreted kernel takes a second a sweep."""
    result, _ = paged_attention_ref(x.q, x.k_cache, x.v_cache, x.table, x.seq_lens, x.cu_seqlens_q, scale=x.scale)
    out.copy_(result)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(attention_sweep, "launch", by_reference)
    pages, heads, dim, seqs = 40, 4, 16, 5
    k_cache, v_cache = torch.randn(2, pages, 4, 2, dim).unbind(0)
    tables = [torch.randperm(pages, dtype=torch.int32)[:30].view(5, 6)]
    starts = torch.arange(seqs + 1, dtype=torch.int32)
    return Batch(torch.randn(seqs, heads, dim), k_cache, v_cache, tables, torch.full((5,), 24, dtype=torch.int32), starts, 0)


def test_a_cliff_is_what_lies_above_the_line_between_neighbours() -> None:
    affine = {n: 5.0 + 0.01 * n for n in LENGTHS}
    assert max(ratios(affine).values()) == pytest.approx(1.0) and set(ratios(affine)) == set(LENGTHS[1:-1])
    roof = {n: max(5.0, 0.01 * n) for n in LENGTHS}  # latency, then bandwidth
    powers = {n: us for n, us in roof.items() if n & (n - 1) == 0}
    assert max(ratios(roof).values()) < 1.01 and max(ratios(powers).values()) < 1.01
    step = {n: 5.0 + (1.5 if n > 256 else 0.0) for n in LENGTHS}  # a page more costs another wave
    found = ratios(step)
    assert max(found, key=lambda n: found[n]) == 257 and found[257] == pytest.approx(6.5 / 5.0, rel=0.01)
    bump = {1: 5.0, 2: 5.0, 4: 6.0, 8: 5.0, 16: 5.0}
    assert ratios(bump)[4] == pytest.approx(1.2)


def test_lengths_are_powers_of_two_and_one_beside_them() -> None:
    assert LENGTHS[:8] == [1, 2, 3, 4, 5, 7, 8, 9] and LENGTHS[-4:] == [65536, 65537, 131071, 131072]


def test_points_are_checked_and_a_wrong_one_is_not_timed(cache: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    times = measure(cache, [(1, 1), (3, 17), (5, 24)], rounds=1)
    assert set(times) == {(1, 1), (3, 17), (5, 24)} and min(times.values()) > 0

    def wrong(inputs, out, lse, queries):
        by_reference(inputs, out, lse, queries)
        out[-1, -1] += 0.5

    monkeypatch.setattr(attention_sweep, "launch", wrong)
    with pytest.raises(AssertionError, match="wrong at 3 x 17"):
        measure(cache, [(3, 17)], rounds=1)
    monkeypatch.setattr(attention_sweep, "launch", lambda *_: None)
    ((call, given),) = attention_sweep._calls(cache, [(2, 9)])[2, 9][:1]
    with pytest.raises(AssertionError, match="wrong at 2 x 9"):
        check(call, given)


def test_sweeps_become_a_table(cache: Batch, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, rows = by_length(cache, 2, [1, 2, 3, 4, 5])
    batches, more = by_batch(cache, 9, range(1, 5))
    assert list(lengths) == [1, 2, 3, 4, 5] and list(batches) == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("of the line") == 3
    cases = [{"case": "1 x 8", "us": {"ours": 1.0}, "floor_us": 0.5}]
    write_results(tmp_path / "a.json", "x", {"": cases, attention_sweep.TITLE: rows + more}, curves_us={"length": lengths})
    text = script_table("a", tmp_path)
    assert "| batch, b x 9 | b - 1 and b + 1 | 4 |" in text and "| 1 x 8 |" in text
    assert json.loads((tmp_path / "a.json").read_text())["curves_us"]["length"].keys() == {"1", "2", "3", "4", "5"}
