"""What a batch may hold: padding, empty rows, poisoned pages, lengths beyond the table; and a row's bits, which never depend on it."""

from __future__ import annotations

import sys

import pytest
import torch

import tkernels
import tkernels.attention.prefill as prefill_module
from tests.tkernels.attention.cases import Case, check, make_case
from tests.tkernels.attention.test_values import attend
from tkernels._counters import counters
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention._tiles import DecodeTiles, PrefillTiles, _entry, _table, decode_tiles
from tkernels.attention.decode import QUERY_LEN, _units, decode
from tkernels.attention.prefill import prefill


def part(case: Case, first: int, last: int, max_query_len: int | None = None) -> Case:
    """The sequences ``first : last`` alone."""
    starts = case.cu_seqlens_q[first : last + 1]
    rows = case.q[int(starts[0]) : int(starts[-1])]
    keywords = dict(case.keywords)
    keywords["max_query_len"] = max_query_len or int((starts[1:] - starts[:-1]).max())
    return Case(rows, case.k_cache, case.v_cache, case.block_table[first:last], case.seq_lens[first:last], starts - starts[0], keywords)


def test_b001_b015_rows_past_the_last_sequence_are_zero(device):
    case = make_case([3, 20, 9], [3, 12, 1], heads=2, kv_heads=1, dim=16, extra_rows=4, device=device)
    out, lse = attend(case)
    check(case, out, lse)
    assert (out[-4:] == 0).all() and torch.isneginf(lse[-4:]).all()


def test_b008_empty_row_with_a_table_of_minus_one(device):
    case = make_case([5, 0, 0], [1, 1, 12], heads=2, kv_heads=1, dim=16, max_pages=2, device=device)
    assert (case.block_table[1:] == -1).all()
    out, lse = attend(case)
    check(case, out, lse)
    assert (out[1:] == 0).all() and torch.isneginf(lse[1:]).all()


def test_b010_page_zero_is_never_taken(device):
    """Unused columns of the table point at page 0: clean or poisoned, the bits are the same."""
    case = make_case([5, 20], [1, 12], heads=2, kv_heads=1, dim=16, max_pages=6, device=device)
    case.block_table[case.block_table < 0] = 0
    poisoned, _ = attend(case)
    case.k_cache[0], case.v_cache[0] = 0.0, 0.0
    clean, _ = attend(case)
    assert torch.equal(poisoned, clean)
    check(case, poisoned)


def test_freed_pages_before_the_window_are_not_read(device):
    case = make_case([60, 60], [1, 12], heads=2, kv_heads=1, dim=16, window=8, device=device)
    expected, _ = attend(case)
    case.block_table[0, : (60 - 8) // 8] = -1
    case.block_table[1, : (60 - 12 - 8) // 8] = -1
    out, _ = attend(case)
    assert torch.equal(out, expected)


def test_b078_length_beyond_the_table_is_cut(device):
    case = make_case([8, 8], [1, 2], heads=2, kv_heads=1, dim=16, page_size=4, device=device)
    case.seq_lens = torch.tensor([9, 2**31 - 1], dtype=torch.int32, device=device)
    out, lse = attend(case)
    check(case, out, lse)  # the oracle cuts at 2 pages of 4 as well
    wide = torch.full((2, 4), 2**30, dtype=torch.int32, device=device)  # a page id that would fault, just past the table's columns
    wide[:, :2] = case.block_table
    case.block_table = wide[:, :2]
    again, _ = attend(case)
    assert torch.equal(out, again)


@pytest.mark.parametrize("lens", [[40, 40, 40], [70, 40, 9, 70, 130]], ids=str)
@pytest.mark.parametrize("prefix", [0, 33])
def test_every_tile_of_prompts_of_equal_and_of_other_lengths_is_found(lens, prefix, device):
    """Beside a sequence of one query token that is longer than all of them."""
    case = make_case([*(prefix + n for n in lens), 900], [*lens, 1], heads=2, kv_heads=1, dim=16, device=device)
    check(case, *attend(case))


@pytest.mark.parametrize("window", [None, 20])
def test_bits_of_a_prompt_do_not_depend_on_its_chunks(window, device):
    """A block of keys that ends the cache in one call, and is loaded with a mask there, is loaded whole in another. With finite values."""
    case = make_case([90], [90], heads=4, kv_heads=2, dim=16, dtype=torch.float16, device=device, window=window)
    expected, _ = attend(case)
    check(case, expected)
    for begin, end in ((0, 41), (41, 64), (64, 90)):
        chunk = Case(*case.tensors, dict(case.keywords))
        chunk.q, chunk.seq_lens = case.q[begin:end], torch.tensor([end], dtype=torch.int32, device=device)
        chunk.cu_seqlens_q = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        out, _ = attend(chunk)
        assert torch.equal(out, expected[begin:end])


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("keywords", [{}, {"window": 20}, {"softcap": 5.0, "dim": 24}, {"causal": False}], ids=str)
def test_bits_do_not_depend_on_whether_products_with_values_overlap_the_softmax(keywords, page_size, device):
    case = make_case([9, 50, 90], [9, 20, 90], page_size=page_size, dtype=torch.float16, device=device, **{"dim": 16, **keywords})
    results = []
    for overlap in (False, True):
        out = torch.full_like(case.q, float("nan"))
        lse = torch.full(case.q.shape[:2], float("nan"), device=device)
        prefill(checked(case), out, lse, 9, PrefillTiles(block_m=32, block_n=16, num_warps=4, num_stages=2, overlap=overlap))
        results.append((out, lse))
    check(case, *results[0])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lens, query_lens", [([70, 130, 48, 49], [70, 30, 48, 20]), ([40, 30], [40, 12]), ([200], [20]), ([0, 9], [90, 60])]
)
def test_rows_of_few_and_of_many_keys_are_all_written(lens, query_lens, causal, device, monkeypatch):
    """All on one side, prompts across the bound, ends right at it, and more queries than keys. The counter is left at zero."""
    words: list[torch.Tensor] = []
    monkeypatch.setattr(prefill_module, "counters", lambda *of: words.append(counters(*of)) or words[-1])
    case = make_case(lens, query_lens, heads=6, kv_heads=2, dim=16, max_pages=40, dtype=torch.float16, device=device, causal=causal)
    tiles = PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)
    long_tiles = PrefillTiles(block_m=32, block_n=32, num_warps=4, num_stages=2, overlap=True, beyond=48)
    out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"), device=device)
    prefill(checked(case), out, lse, 9, tiles, long_tiles)
    check(case, out, lse)
    assert len(words) == 1 and not words[0].any()


@pytest.mark.parametrize("group, launches", [(8, 2), (256, 1)])
def test_a_group_that_no_tile_for_many_keys_holds_has_one_launch(group, launches, device, monkeypatch):
    case = make_case([300], [20], heads=group, kv_heads=1, dim=16, dtype=torch.float16, device=device)
    places: list[int] = []
    monkeypatch.setattr(prefill_module._dependent, "launch", lambda *args, **options: places.append(options["PART"]))
    tiles = PrefillTiles(block_m=16, block_n=16, num_warps=4, num_stages=2)
    prefill(
        checked(case), torch.empty_like(case.q), None, 9, tiles, PrefillTiles(block_m=128, block_n=32, num_warps=4, num_stages=2, beyond=48)
    )
    assert len(places) == launches


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [12, 1, 9]])
def test_b091_batch_of_empty_rows(query_lens, device):
    case = make_case([0, 0, 0], query_lens, heads=2, kv_heads=1, dim=16, max_pages=1, device=device)
    out, lse = attend(case)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_b161_nothing_to_do(device):
    """0 tokens; tokens without a sequence; a table without columns."""
    case = make_case([], [], heads=2, kv_heads=1, dim=16, device=device)
    out, lse = tkernels.paged_attention(*case.tensors, **case.keywords, return_lse=True)
    assert out.shape == (0, 2, 16) and lse.shape == (0, 2)
    case = make_case([], [], heads=2, kv_heads=1, dim=16, extra_rows=3, device=device)
    out, lse = attend(case)
    assert (out == 0).all() and torch.isneginf(lse).all()
    case = make_case([0], [1], heads=2, kv_heads=1, dim=16, device=device)
    assert case.block_table.shape == (1, 0)
    out, _ = attend(case)
    assert (out == 0).all()


def test_b036_sequences_added_by_padding_change_nothing(device):
    """A fixed number of sequence rows: the surplus has no queries, and garbage where nothing may be read."""
    case = make_case([30, 5], [1, 1], heads=2, kv_heads=1, dim=16, device=device)
    expected, _ = attend(case)
    padded = Case(
        torch.cat((case.q, torch.full_like(case.q, float("nan")))), case.k_cache, case.v_cache,
        torch.cat((case.block_table, torch.full_like(case.block_table, 2**30))),
        torch.cat((case.seq_lens, torch.full_like(case.seq_lens, 2**30))),
        torch.cat((case.cu_seqlens_q, case.cu_seqlens_q[-1:].repeat(2))), case.keywords,
    )  # fmt: skip
    out, lse = attend(padded)
    assert torch.equal(out[:2], expected) and (out[2:] == 0).all() and torch.isneginf(lse[2:]).all()


def test_bits_of_a_row_do_not_depend_on_its_batch(device):
    """Alone, among others, in another order, in another bucket of max_query_len: the same bits, in decode and in prefill."""
    case = make_case([100, 33, 0, 20, 40, 3], [1, 3, 1, 12, 9, 1], heads=3, kv_heads=1, dim=16, device=device)
    out, lse = attend(case)
    check(case, out, lse)
    starts = case.cu_seqlens_q.tolist()
    for s in range(6):
        rows = slice(starts[s], starts[s + 1])
        alone, alone_lse = attend(part(case, s, s + 1))
        assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows]), f"sequence {s}"
    pair, _ = attend(part(case, 0, 2))  # bucket 8 instead of all
    assert torch.equal(pair, out[: starts[2]])


def checked(case: Case) -> Inputs:
    names = {"causal": True, "window": 0, "softcap": 0.0, "sinks": None, "k_scale": None, "v_scale": None, "v_factor": 1.0}
    return check_inputs(*case.tensors, case.keywords["scale"], *(case.keywords.get(name, default) for name, default in names.items()))


def shared_out(case: Case, programs: int, queries: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of the case in that many ranges a multiprocessor and KV head; 0: in one range."""
    out = torch.full_like(case.q, float("nan"))
    lse = torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    decode(checked(case), out, lse, queries, DecodeTiles(block_n=16, programs_per_sm=programs, num_warps=4, num_stages=2))
    return out, lse


def test_bits_do_not_depend_on_how_the_work_is_shared(device):
    """Every number of ranges, so every place to cut: whole rows, cuts between leaves and between branches, many rows in one range."""
    lens = [1, 0, 33, 300, 16, 17, 90, 700]
    case = make_case(lens, [1] * 8, heads=2, kv_heads=1, dim=16, device=device)
    results = [shared_out(case, programs) for programs in (0, 1, 2, 5)]
    check(case, *results[0])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_the_two_launches_beside_prompts_share_out_the_rows(device):
    """That for 2 to 8 query tokens writes no other row, that for one the rest of the short ones and the rows of no sequence."""
    case = make_case([40, 33, 0, 20, 70], [1, 3, 1, 12, 8], heads=9, kv_heads=1, dim=16, extra_rows=2, device=device)
    inputs, whole = checked(case), torch.full_like(case.q, float("nan"))
    decode(inputs, whole, None, QUERY_LEN)
    several, single = torch.full_like(whole, float("nan")), torch.full_like(whole, float("nan"))
    decode(inputs, several, None, QUERY_LEN, min_queries=2)
    decode(inputs, single, None, 1)
    row = torch.arange(len(whole), device=device)
    of_several, of_prompt = ((row >= 1) & (row < 4)) | ((row >= 17) & (row < 25)), (row >= 5) & (row < 17)
    assert torch.equal(~several.isnan().any((1, 2)), of_several)
    assert torch.equal(~single.isnan().any((1, 2)), ~of_several & ~of_prompt)
    both = torch.where(of_several[:, None, None], several, single)
    assert torch.equal(both[~of_prompt], whole[~of_prompt]) and whole[of_prompt].isnan().all()


@pytest.mark.parametrize("query_lens", [[1, 1], [5, 1]])
def test_strides_in_units_of_8_and_of_1(query_lens, device):
    case = make_case([40, 70], query_lens, heads=4, kv_heads=2, dim=8, device=device)
    expected, _ = attend(case)
    assert _units(checked(case))[0] == 8
    case.q, case.k_cache, case.v_cache = (
        torch.nn.functional.pad(x, (0, 1), value=float("nan"))[..., :8] for x in (case.q, case.k_cache, case.v_cache)
    )
    assert _units(checked(case))[0] == 1
    out, _ = attend(case)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("extra", [0, 8, 4])
@pytest.mark.parametrize("page_stride", [2**30, 2**31])
def test_b098_pages_past_32_bits(page_stride, extra, device):
    """The last page begins at 2**31 elements, in every unit of the strides: decode, several query tokens and prefill."""
    pages = 2**31 // page_stride + 1
    case = make_case([8 * (pages - 1)], [12], heads=2, kv_heads=1, dim=16, dtype=torch.float16, device=device)
    size = (pages, 8, 1, 16)
    store = torch.empty((pages - 1) * (page_stride + extra) + 8 * 16, dtype=torch.float16, device=device)  # mostly untouched
    near = torch.randn(size, device=device).half()
    far = store.as_strided(size, (page_stride + extra, 16, 16, 1)).copy_(near)
    case.block_table = torch.arange(1, pages, dtype=torch.int32, device=device).flip(0)[None]
    for query_len in (1, 3, 9):
        one = part(case, 0, 1)
        one.q, one.cu_seqlens_q = case.q[:query_len], torch.tensor([0, query_len], dtype=torch.int32, device=device)
        one.k_cache = one.v_cache = far
        out, _ = attend(one)
        one.k_cache = one.v_cache = near
        check(one, out)


def test_units_of_strides() -> None:
    """Eighths only where there are no sixteenths. An int32 eighth is multiplied by 8 in the kernel: those beyond int32 are passed whole."""
    case = make_case([4], [1], heads=2, kv_heads=2, dim=16, page_size=4)
    case.q, k = case.q.bfloat16(), torch.zeros(8 * 16 + 8, dtype=torch.bfloat16)
    for page_stride, offset, want in (
        (128, 0, (1, True)), (136, 0, (8, True)), (2**31 - 8, 0, (8, True)), (2**31, 0, (1, True)), (2**31 + 8, 0, (1, False)),
        (132, 0, (1, False)), (128, 4, (1, False)), (136, 4, (8, False)),
    ):  # fmt: skip
        case.k_cache = case.v_cache = k.as_strided((1, 4, 2, 16), (page_stride, 32, 16, 1), offset)
        assert _units(checked(case)) == want, (page_stride, offset)


@pytest.mark.parametrize("wide", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("cache", "pad", "want"), [("as q", 0, 32), ("as q", 8, 32), ("as q", 4, 8), ("fp8", 0, 8), ("fp8", 8, 8), ("both fp8", 0, 8)]
)
def test_only_keys_that_are_copied_as_they_are_take_more_than_8_columns(wide, cache, pad, want, monkeypatch):
    """Of 16 columns and more triton makes wgmma, and 3.6 gets it wrong for keys that come through registers."""
    case = make_case([40], [8], heads=4, kv_heads=1, dim=16, dtype=wide)
    if cache == "both fp8":
        case.q = case.q.to(torch.float8_e4m3fn)
    if "fp8" in cache:
        case.k_cache, case.v_cache = (c.float().to(torch.float8_e4m3fn) for c in (case.k_cache, case.v_cache))
    shape = (*case.k_cache.shape[:-1], 16 + pad)
    case.k_cache = case.v_cache = torch.zeros(shape, dtype=case.k_cache.dtype)[..., :16]
    launches: list[dict[str, object]] = []
    module = sys.modules[decode.__module__]
    monkeypatch.setattr(module._dependent, "launch", lambda *args, **options: launches.append(options))
    decode(checked(case), torch.empty_like(case.q), None, QUERY_LEN)
    assert launches[0]["BLOCK_M"] == want


@pytest.fixture
def stale_workspace(monkeypatch):
    """Fresh memory holds what looks like states of a softmax."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **keywords: empty(*args, **keywords).fill_(7))


@pytest.mark.parametrize("kind", ["large", "infinite", "capped", "several"])
def test_bits_of_ugly_values_do_not_depend_on_how_the_work_is_shared(kind, device, stale_workspace):
    """Logits beyond 2**24, where whole numbers have gaps; a whole branch of leaves at -inf; sinks under a soft-cap; several tokens."""
    capped = {"softcap": 3.0, "sinks": torch.tensor([9.0, -9.0], device=device)}
    keywords = {"capped": capped, "several": {"window": 400}}.get(kind, {})
    queries = 5 if kind == "several" else 1
    case = make_case([500], [queries], heads=2, kv_heads=2, dim=16, page_size=4, device=device, **keywords)
    if kind == "large":
        case.q *= 1e9
    if kind == "infinite":  # the first 320 keys; a branch is 256
        case.q[:] = 1e20
        case.k_cache.mul_(1e-20)
        case.k_cache[case.block_table[0, :80].long()] = -1e20
    results = [shared_out(case, programs, queries) for programs in (0, 1, 3)]  # 1, 2 and 6 ranges
    if kind == "infinite":
        visible = case.v_cache[case.block_table[0, 80:].long()].flatten(0, 1)[:180]
        logits = torch.einsum("hd,khd->hk", case.q[0], case.k_cache[case.block_table[0, 80:].long()].flatten(0, 1)[:180]) / 4
        torch.testing.assert_close(results[0][0][0], torch.einsum("hk,khd->hd", logits.softmax(-1), visible), atol=1e-5, rtol=1e-4)
    elif kind != "large":
        check(case, *results[0])
    assert torch.isfinite(results[0][0]).all()
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_b035_the_launch_is_a_function_of_the_shapes(device, monkeypatch):
    """The same kernels, grids and compile-time arguments whatever the lengths are; only the bucket of max_query_len counts."""
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **keywords):
                launches.append((self.kernel, grid, tuple(sorted((k, str(v)) for k, v in keywords.items()))))

            return launch

    module = sys.modules[decode.__module__]
    prefill_module = sys.modules["tkernels.attention.prefill"]
    for owner, name in ((module, "decode_kernel"), (prefill_module, "_prefill_kernel")):
        monkeypatch.setattr(owner, name, Recorder(name))
    case = make_case([40, 40], [1, 1], heads=2, kv_heads=1, dim=16, device=device)
    for max_query_len, kernels in ((1, 1), (2, 1), (8, 1), (9, 3), (500, 3)):
        seen = set()
        for lens in ([1, 1], [0, 0], [16, 17], [40, 1], [2**30, 0]):
            case.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
            launches.clear()
            case.q = torch.zeros(12, 2, 16, device=device)
            attend(Case(*case.tensors, {**case.keywords, "max_query_len": max_query_len}))
            assert len(launches) == kernels
            seen.add(tuple(launches))
        assert len(seen) == 1


def test_b033_lengths_are_read_from_the_device(device):
    """One set of buffers, as in a captured graph: the lengths change in place."""
    case = make_case([60, 60], [1, 1], heads=2, kv_heads=1, dim=16, device=device, poison=False)
    for lens in ([1, 60], [17, 0], [60, 59]):
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        check(case, *attend(case))


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100"])
def test_blocks_of_keys_are_the_same_in_every_bucket(arch: str) -> None:
    """BLOCK_N is part of the arithmetic, and so is the order in which the keys of a block are summed, which the number of warps fixes:
    a sequence must not change its bits when a neighbour has more query tokens, or when there are more sequences."""
    for dim in range(1, 257):
        for itemsize in (1, 2, 4):
            tiles = [decode_tiles(arch, dim, itemsize, rows, seqs) for rows in (1, 8, 16, 17, 128) for seqs in (1, 47, 48, 8192)]
            assert len({(t.block_n, t.num_warps) for t in tiles}) == 1, (dim, itemsize)


@pytest.mark.parametrize(("rows", "seqs", "stages"), [(8, 47, 3), (8, 48, 4), (9, 48, 3), (16, 8192, 3), (17, 48, 2)])
def test_tables_tell_rows_and_sequences_apart(rows: int, seqs: int, stages: int) -> None:
    assert decode_tiles("sm_90", 128, 2, rows, seqs).num_stages == stages


def test_every_entry_of_the_tables_is_reached() -> None:
    """The first entry that holds a shape is taken: one behind a wider one would never be."""
    for arch, kernels in _table().items():
        for kernel, entries in kernels.items():
            for entry in entries:
                shape = entry["dim"], entry["itemsize"], entry.get("max_rows", 1), entry.get("min_seqs", 0)
                assert _entry(kernel, arch, *shape) == entry["tiles"], (arch, kernel, *shape)
