"""cascade_attention: against the oracle over prefix and own keys as one sequence, and how the prefix is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tkernels
from tests.tkernels.attention.cases import Case, check, make_case
from tkernels import _launch
from tkernels._op import reference_ops
from tkernels._triton import cdiv
from tkernels.attention import cascade
from tkernels.attention._tiles import prefill_tiles
from tkernels.attention.prefix import splits_of

PAGES = 32  # of 8 keys: four splits on the CPU


@dataclass
class Cascade:
    """A call: the case holds q, the caches, the own tables and lengths."""

    case: Case
    shared_block_table: torch.Tensor
    shared_len: torch.Tensor

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k_cache, v_cache, *own = self.case.tensors
        return tkernels.cascade_attention(
            q, k_cache, v_cache, self.shared_block_table, self.shared_len, *own, return_lse=True, **self.case.keywords
        )

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Every sequence as one: pages of one key, those of the prefix first."""
        case, page_size = self.case, self.case.k_cache.shape[1]
        length = min(int(self.shared_len), page_size * self.shared_block_table.numel())
        slots = torch.arange(page_size, dtype=torch.int32)
        tables = [(table.cpu()[:, None] * page_size + slots).flatten() for table in (self.shared_block_table.flatten(), *case.block_table)]
        lens = [n + length if n else 0 for n in case.seq_lens.tolist()]
        whole = torch.stack([torch.cat((tables[0][:length], table)) for table in tables[1:]]) if lens else case.block_table.cpu()
        k_cache, v_cache = (cache.flatten(0, 1)[:, None] for cache in (case.k_cache, case.v_cache))
        check(replace(case, k_cache=k_cache, v_cache=v_cache, block_table=whole, seq_lens=torch.tensor(lens, dtype=torch.int32)), out, lse)


def make(shared: int, lens: list[int], query_lens: list[int], pages: int = PAGES, **keywords: Any) -> Cascade:
    """Sequences of ``lens`` own keys behind a prefix of ``shared``, whose table has room for ``pages``; -1 and NaN in what is unused."""
    page_size = keywords.setdefault("page_size", 8)
    case = make_case([min(shared, pages * page_size), *lens], [0, *query_lens], dim=keywords.pop("dim", 16), max_pages=pages, **keywords)
    own = replace(case, block_table=case.block_table[1:], seq_lens=case.seq_lens[1:], cu_seqlens_q=case.cu_seqlens_q[1:])
    return Cascade(own, case.block_table[0], torch.tensor([shared], dtype=torch.int32, device=case.q.device))


@pytest.fixture
def splits_seen(monkeypatch) -> list[int]:
    seen: list[int] = []

    def noting(inputs, tiles, table, length, capacity, parts, lse):
        seen.append(parts.shape[0])
        prefix(inputs, tiles, table, length, capacity, parts, lse)

    prefix = cascade.prefix
    monkeypatch.setattr(cascade, "prefix", noting)
    return seen


@pytest.mark.parametrize("shared", [0, 1, 60, 100, 129, PAGES * 8, PAGES * 8 + 5])
def test_prefix_of_any_length(shared, device, splits_seen):
    """Decode, several tokens, a padding row and rows past the end; no prefix, one key, fewer blocks than splits, a page half full, all of
    the table, and a length beyond it, which is cut."""
    call = make(shared, [5, 9, 0, 1], [1, 3, 1, 1], extra_rows=2, device=device)
    call.check(*call.run())
    assert splits_seen and splits_seen[0] > 1


@pytest.mark.parametrize(
    ("keywords", "heads", "dim"),
    [
        ({"softcap": 5.0}, 4, 16),
        ({"sinks": True}, 4, 16),
        ({"k_scale": 0.5, "v_scale": 1.5}, 6, 24),
        ({"dtype": torch.float16}, 10, 40),
        ({"dtype": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": "per head"}, 4, 16),
        ({"dtype": torch.float8_e4m3fn, "k_scale": "per head", "softcap": 3.0, "sinks": True}, 2, 20),
        ({"dtype": torch.float8_e4m3fn, "q_dtype": torch.float8_e4m3fn, "v_scale": 1.5}, 4, 16),
        ({"interleaved": True, "page_size": 32}, 4, 16),
        ({"page_size": 3}, 4, 16),
    ],
    ids=str,
)
def test_features_of_a_split_prefix(keywords, heads, dim, device, splits_seen):
    values = {"sinks": torch.randn(heads, device=device)}
    per_head = torch.rand(2, device=device) + 0.5
    keywords = {name: per_head if x == "per head" else values[name] if x is True and name in values else x for name, x in keywords.items()}
    pages = cdiv(256, keywords.get("page_size", 8))
    call = make(150, [5, 9, 1], [1, 3, 1], pages, heads=heads, dim=dim, device=device, **keywords)
    call.check(*call.run())
    assert splits_seen and splits_seen[0] > 1


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_fewer_tokens_than_splits_and_a_whole_tile(tokens, device, splits_seen):
    call = make(200, [4] * tokens, [1] * tokens, device=device)
    call.check(*call.run())
    assert splits_seen and splits_seen[0] > 1


@pytest.mark.parametrize("shared", [0, 27, 64])
def test_tokens_that_fill_the_device_see_the_prefix_as_one_sequence(shared, device, splits_seen, monkeypatch):
    monkeypatch.setattr(cascade, "splits_of", lambda *_: 0)
    call = make(shared, [12, 11, 0, 2], [12, 9, 1, 1], pages=8, extra_rows=2, device=device)
    call.check(*call.run())
    assert not splits_seen


def test_graph_for_a_wide_table_gives_the_bits_of_a_narrow_one(device, splits_seen):
    """Splits lie where the length says, not the table: 200 keys in a table of 256 and of 2048 (with the splits of the first one)."""
    call = make(200, [5, 9, 1], [1, 3, 1], device=device)
    out, lse = call.run()
    wide = torch.full((8 * PAGES,), -1, dtype=torch.int32, device=device)
    wide[:PAGES] = call.shared_block_table
    call.shared_block_table = wide
    again, again_lse = call.run()
    call.check(again, again_lse)
    if splits_seen[0] == splits_seen[1]:  # on the CPU
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
    else:
        assert device.type == "cuda"


def test_a_padding_row_takes_nothing_from_what_the_prefix_left_unwritten(device, monkeypatch, splits_seen):
    """Rows of no sequence have no state of the prefix: whatever their memory holds, they come out zero and -inf."""

    def filled(*size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return (
            torch.full(*size, float("nan"), dtype=dtype, device=device)
            if dtype.is_floating_point
            else empty(*size, dtype=dtype, device=device)
        )

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", filled)
    call = make(100, [5, 0], [1, 1], extra_rows=12, device=device)
    out, lse = call.run()
    assert splits_seen
    assert (out[1:] == 0).all() and torch.isneginf(lse[1:]).all()
    call.check(out, lse)


@pytest.mark.parametrize("pages", [0, 4])
def test_no_sequence_no_token_and_no_table(pages, device):
    none = make(0, [], [], pages=pages, extra_rows=3, device=device)
    out, lse = none.run()
    assert (out == 0).all() and torch.isneginf(lse).all()
    assert make(8 * pages, [3], [0], pages=max(pages, 1), device=device).run()[0].shape[0] == 0
    call = make(8 * pages, [5], [1], pages=4, device=device)
    call.shared_block_table = call.shared_block_table[:pages]
    call.check(*call.run())


def test_run_to_run_identical(device):
    call = make(PAGES * 8, [5, 9, 1], [1, 3, 1], device=device)
    first = call.run()
    for _ in range(1 if device.type == "cpu" else 1000):
        assert all(map(torch.equal, first, call.run()))


def test_opcheck_and_errors(device):
    call = make(20, [9], [1], device=device)
    q, k_cache, v_cache, *own = call.case.tensors
    args = (q, k_cache, v_cache, call.shared_block_table, call.shared_len, *own)
    with reference_ops():
        call.check(*call.run())
    endless = call.shared_block_table.new_zeros(1).expand(1 << 28)
    for place, wrong, kind, message in (
        (3, call.shared_block_table.repeat(2, 1), ValueError, "shared_block_table: expected"),
        (3, call.shared_block_table.long(), TypeError, "shared_block_table: expected int32"),
        (3, endless, ValueError, "shared_block_table: expected rows of at most"),
        (4, call.shared_len.repeat(2), ValueError, r"shared_len: expected \[1\]"),
        (4, call.shared_len.long(), TypeError, "shared_len: expected int32"),
        (5, own[0].long(), TypeError, "block_table: expected int32"),
    ):
        with pytest.raises(kind, match=message):
            tkernels.cascade_attention(*args[:place], wrong, *args[place + 1 :], **call.case.keywords)


def test_the_prefix_of_64_rows_fills_a_hopper():
    """8192 shared keys, 64 tokens of 32 heads on 8 KV heads: 16 tiles, which as one sequence are 16 programs on 132 multiprocessors."""
    tiles = prefill_tiles("sm_90", 128, 2)
    splits = splits_of(tiles, 132, 64, 32, 8, 512 * 16)
    programs = splits * 8 * cdiv(64 * 4, tiles.block_m)
    assert 0.9 * 132 * tiles.programs_per_sm <= programs <= 132 * tiles.programs_per_sm
    assert splits_of(tiles, 132, 64, 32, 8, 1 << 17) == splits, "a graph for longer prefixes must not split shorter ones finer"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_splits_fill_one_wave_and_bound_the_workspace(arch, dim, itemsize):
    tiles = prefill_tiles(arch, dim, itemsize)
    slots = 132 * tiles.programs_per_sm
    for kv_heads, group in ((1, 1), (1, 71), (2, 7), (8, 4), (8, 8), (32, 1)):
        for tokens in (1, 2, 7, 16, 33, 64, 128, 256, 300, 4096):
            splits = splits_of(tiles, 132, tokens, kv_heads * group, kv_heads, 1 << 17)
            programs = cdiv(tokens, max(tiles.block_m, 128 if group == 71 else 1) // group) * kv_heads
            if splits:
                assert slots // 2 < splits * programs <= slots
            else:
                assert programs > 132 // 2, "prefill would leave half of the device idle"
            assert splits_of(tiles, 132, tokens, kv_heads * group, kv_heads, 64) <= 2, "splits too short to pay"


def test_a_decoded_step_is_three_launches_and_nothing_of_torch(device):
    """What a step costs the host, and what lets a call repeat an earlier one's launches."""
    call = make(200, [5, 9, 0], [1, 1, 1], extra_rows=1, device=device)
    q, k_cache, v_cache, *own = call.case.tensors
    notes, scale = list[_launch.Note](), call.case.keywords["scale"]
    recording = _launch.Recording(lambda size, dtype, where: torch.full(size, float("nan"), dtype=dtype, device=where))
    with _launch.noting(notes, binds=False), recording:
        out, lse = cascade._attend(
            q, k_cache, v_cache, call.shared_block_table[None], call.shared_len, *own, scale, 1, 0.0, None, None, None, 1.0
        )  # fmt: skip
    assert [note.kernel.__name__ for note in notes] == ["decode_kernel", "_prefix_kernel", "_merge_kernel"]
    assert not recording.others, "torch was asked for work"
    call.check(out, lse)
