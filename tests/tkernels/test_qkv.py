"""linear_rope_and_cache: in every tile the bits of linear and rope_and_cache after it, and where no tile fits, these two."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FP8, assert_close_to_exact
from qkv_cases import EPS, make_case, same

import tkernels
from tkernels import _linear_kernels, _repeats, _target, qkv
from tkernels._linear_kernels import Tile
from tkernels._qkv_kernels import launch, run_length
from tkernels.linear import choose
from tkernels.qkv import linear_rope_and_cache_ref

DIRECT = Tile("matrix", 16, 32, 2, 2, 1, splits=2)
TILES = [
    Tile("vector", 4, 64, 1, 4, 1), Tile("vector", 16, 64, 1, 4, 1), Tile("matrix", 16, 32, 1, 4, 2), Tile("matrix", 16, 16, 4, 4, 2),
    Tile("matrix", 64, 32, 1, 4, 3), Tile("matrix", 16, 16, 2, 4, 2, splits=3), Tile("matrix", 32, 32, 2, 2, 1), DIRECT,
]  # fmt: skip
# (heads, kv_heads, head_dim, rot_dim), interleaved: heads that a tile straddles, partial rotary, odd halves, no query head
SHAPES = [((1, 1, 16, 16), False), ((1, 1, 12, 8), False), ((1, 2, 20, 20), False), ((0, 1, 6, 6), False), ((1, 1, 12, 8), True)]


def _use(monkeypatch: pytest.MonkeyPatch, tile: Tile | None) -> None:
    """``tile`` for every call of at most 64 rows without a norm, and with one unless it splits."""
    pick = lambda target, dtype, variant, *shape: None if tile is None or ("norm" in variant and tile.splits > 1) else tile
    monkeypatch.setattr(importlib.import_module("tkernels.linear"), "choose", pick)
    _repeats.forget()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    _repeats.forget()


@pytest.mark.parametrize(("shape", "interleaved"), SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.kind}-{t.block_n}-{t.slices}-{t.num_stages}-{t.splits}")
def test_bits_are_those_of_the_two_kernels(tile: Tile, shape: tuple[int, ...], interleaved: bool, device: torch.device) -> None:
    for rows in (1, 2, 3) if tile.kind == "vector" else (7, 9) if tile.num_stages == 1 else (17,):
        case = make_case(rows, shape, device, bias=rows != 2, norm=tile.splits == 1 and rows != 1, k=72)
        ours, theirs = case.empty(), case.empty()
        x, weight, bias, norm, *rest = case.arguments(ours)
        q = torch.full((rows, shape[0], shape[2]), float("nan"), dtype=x.dtype, device=device)
        launch(x, weight, bias, norm, EPS, *rest, interleaved, q, tile)
        y = torch.full((rows, weight.shape[0]), float("nan"), dtype=x.dtype, device=device)
        _linear_kernels.launch(x, weight, bias, norm, None, False, EPS, y, tile)
        assert same(q, case.rotated(y, theirs, interleaved))
        assert all(same(got, want) for got, want in zip(ours, theirs, strict=True))
        if rows > 2:
            assert q[-1].isnan().any() or not q.numel()  # its position is outside the table
            assert not q[:-1].isnan().any()


MODELS = [((32, 8, 64, 64), 2048, False), ((32, 8, 128, 128), 4096, False), ((32, 8, 80, 32), 2560, True)]
VECTORS = [Tile("vector", 2, 1024, 1, 4, 1), Tile("vector", 4, 1024, 1, 4, 1)]
MATRICES = [
    Tile("matrix", 16, 128, 4, 4, 3), Tile("matrix", 64, 64, 1, 4, 4), Tile("matrix", 64, 128, 1, 4, 3, splits=4),
    Tile("matrix", 32, 64, 4, 4, 3), Tile("matrix", 16, 128, 8, 8, 1),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize(("shape", "k", "interleaved"), MODELS, ids=str)
def test_bits_at_the_sizes_of_models(
    rows: int, shape: tuple[int, ...], k: int, interleaved: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the compiler makes of both ways is one arithmetic: no product is contracted otherwise. None: cuBLAS in both."""
    for tile in (*(VECTORS if rows <= 4 else MATRICES if rows <= 16 else MATRICES[:-1]), None):
        _use(monkeypatch, tile)
        for bias in (False, True):
            case = make_case(rows, shape, device, bias=bias, norm=True, k=k)
            if bias:  # rows of x as models have them; without, rows that start anywhere
                case.x = case.x.contiguous()
            ours, theirs = case.empty(), case.empty()
            q = tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS, interleaved=interleaved)
            y = tkernels.linear(case.x, case.weight, case.bias, norm_weight=case.norm, eps=EPS)
            assert same(q, case.rotated(y, theirs, interleaved)), (tile, bias)
            assert all(same(got, want) for got, want in zip(ours, theirs, strict=True)), (tile, bias)


@pytest.mark.parametrize("tile", [TILES[1], TILES[2], None], ids=["vector", "matrix", "composed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_is_as_exact_as_the_reference(tile: Tile | None, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, tile)
    case = make_case(3, (3, 1, 16, 16), device, bias=True, norm=True, dtype=dtype)
    case.positions[-1] = 0
    ours, low, wide = case.empty(), case.empty(), [cache.double() for cache in case.caches]
    q = tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS)
    q_low = linear_rope_and_cache_ref(*case.arguments(low), eps=EPS)
    exact = (a.double() if a is not None and a.is_floating_point() else a for a in case.arguments(wide)[:6])
    q_exact = linear_rope_and_cache_ref(*exact, *wide, case.slots, eps=EPS)
    assert_close_to_exact(q, q_exact, q_low)
    for got, want, near in zip(ours, wide, low, strict=True):
        assert_close_to_exact(got.flatten(0, 2), want.flatten(0, 2), near.flatten(0, 2))


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=["fp32", "e4m3"])
def test_b105_caches_of_another_dtype(cache_dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded from the rounded projection, as rope_and_cache does; scales are divided by there."""
    _use(monkeypatch, TILES[2])
    case = make_case(3, (2, 1, 16, 16), device, cache_dtype=cache_dtype)
    for scales in ({}, {"k_scale": torch.tensor([0.5], device=device), "v_scale": torch.tensor([4.0], device=device)}):
        ours, theirs = case.empty(), case.empty()
        q = tkernels.linear_rope_and_cache(*case.arguments(ours), **scales)
        heads = tkernels.linear(case.x, case.weight).view(3, -1, 16).split(case.heads, 1)
        want = tkernels.rope_and_cache(*heads, case.positions, case.cos_sin, *theirs, case.slots, **scales)
        assert same(q, want) and all(same(got, cache) for got, cache in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tile", [TILES[2], None], ids=["tile", "cuBLAS"])
def test_qk_norm_is_composed(tile: Tile | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, tile)
    monkeypatch.setattr(qkv, "launch", lambda *_: pytest.fail("a program does not hold whole heads"))
    case = make_case(2, (2, 1, 16, 16), device)
    weights = {name: torch.rand(16, device=device).bfloat16() for name in ("q_weight", "k_weight")}
    ours, theirs = case.empty(), case.empty()
    q = tkernels.linear_rope_and_cache(*case.arguments(ours), **weights, weight_offset=1.0)
    heads = tkernels.linear(case.x, case.weight).view(2, -1, 16).split(case.heads, 1)
    want = tkernels.rope_and_cache(*heads, case.positions, case.cos_sin, *theirs, case.slots, **weights, weight_offset=1.0)
    assert same(q, want) and all(same(got, cache) for got, cache in zip(ours, theirs, strict=True))


def test_a_qk_norm_after_a_tile_is_repeated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v are views of the projection, which is a temporary."""
    monkeypatch.setattr(_repeats, "ENABLED", True)
    _use(monkeypatch, TILES[2])
    for _ in range(4):
        case = make_case(3, (2, 1, 16, 16), device, norm=True)
        weights = {name: torch.rand(16, device=device).bfloat16() for name in ("q_weight", "k_weight")}
        ours, theirs = case.empty(), case.empty()
        q = tkernels.linear_rope_and_cache(*case.arguments(ours), **weights)
        monkeypatch.setattr(_repeats, "ENABLED", False)
        want = tkernels.linear_rope_and_cache(*case.arguments(theirs), **weights)
        monkeypatch.setattr(_repeats, "ENABLED", True)
        assert same(q, want) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    (plan,) = [plan for table in _repeats._tables for plan in table.values()]
    assert isinstance(plan, _repeats._Plan) and len(plan.launches) == 2


def test_row_does_not_depend_on_the_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a row class: other classes may have other tiles."""
    _use(monkeypatch, TILES[3])
    case = make_case(16, (3, 1, 16, 16), device, norm=True)
    whole = case.empty()
    q = tkernels.linear_rope_and_cache(*case.arguments(whole))
    for last in (9, 12):
        part = dataclasses.replace(case, x=case.x[:last], positions=case.positions[:last], slots=case.slots[:last])
        alone = part.empty()
        assert same(tkernels.linear_rope_and_cache(*part.arguments(alone)), q[:last])
        for slot in part.slots[2:].tolist():
            assert all(same(a.flatten(0, 1)[slot], w.flatten(0, 1)[slot]) for a, w in zip(alone, whole, strict=True))


def test_one_launch_with_the_norm_and_two_without(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls, with other numbers in other memory."""
    monkeypatch.setattr(_repeats, "ENABLED", True)
    for splits, launches in ((1, 1), (2, 2)):
        _use(monkeypatch, Tile("matrix", 16, 32, 1, 4, 2, splits=splits))
        for _ in range(4):
            case = make_case(3, (2, 1, 16, 16), device, norm=True)
            ours, theirs = case.empty(), case.empty()
            q = tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS)
            monkeypatch.setattr(_repeats, "ENABLED", False)
            y = tkernels.linear(case.x, case.weight, norm_weight=case.norm, eps=EPS)
            monkeypatch.setattr(_repeats, "ENABLED", True)
            assert same(q, case.rotated(y, theirs, False)) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        (plan,) = [plan for table in _repeats._tables for plan in table.values()]
        assert isinstance(plan, _repeats._Plan) and len(plan.launches) == launches


def test_b098_pages_past_32_bits(device: torch.device) -> None:
    """Page 2 starts 2**31 elements into the cache. On the CPU memory that is never touched is never allocated."""
    case = make_case(2, (1, 1, 16, 16), device, cache_dtype=FP8)
    far = [torch.empty(2**31 + 64, dtype=FP8, device=device).as_strided((3, 2, 1, 16), (2**30, 16, 16, 1)) for _ in "kv"]
    near = [torch.zeros(3, 2, 1, 16, device=device).to(FP8) for _ in "kv"]
    slots, results = torch.tensor([4, 5], device=device), []
    for caches in (far, near):
        q = torch.empty(2, 1, 16, dtype=case.x.dtype, device=device)
        launch(case.x, case.weight, None, None, EPS, case.positions, case.cos_sin, *caches, slots, False, q, TILES[2])
        results.append(q)
    assert same(*results) and all(torch.equal(f[2].float(), n[2].float()) for f, n in zip(far, near, strict=True))


def test_runs_of_partners() -> None:
    wide, narrow = Tile("matrix", 64, 32, 1, 4, 2), Tile("vector", 4, 64, 1, 4, 1)
    for dim, rot, run in ((64, 64, 8), (80, 80, 8), (80, 32, 8), (20, 20, 2), (6, 6, 1), (7, 4, 0)):
        assert run_length(wide, dim, rot, False) == run, (dim, rot)
    assert run_length(narrow, 64, 64, False) == 2 and run_length(wide, 64, 64, True) == 1
    assert run_length(dataclasses.replace(narrow, block_n=1), 64, 64, True) == 0, "partners are in two programs"


def test_the_tile_is_the_projections_unless_the_rotation_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target, shape = _target.Target("sm_90", 132, True), (1, 3072, 2048)
    module = importlib.import_module("tkernels.linear")
    plain, norm, own = Tile("vector", 2, 64, 1, 4, 1), Tile("vector", 4, 64, 1, 4, 1), Tile("vector", 8, 64, 1, 4, 1)
    table: dict[Any, Tile | None] = {("plain", *shape): plain, ("norm", *shape): norm}
    monkeypatch.setattr(module, "table_of", lambda arch: table)
    pick = lambda variant: choose(target, torch.bfloat16, variant, *shape)
    assert pick("rope") == plain and pick("norm+rope") == norm
    table[("norm+rope", *shape)] = own
    assert pick("rope") == plain and pick("norm+rope") == own
    table[("rope", *shape)] = None  # measured, and the composition won
    assert pick("rope") is None and pick("plain") == plain


def test_a_table_says_where_the_composition_won(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ``tune`` writes it."""
    module, tile = importlib.import_module("tkernels.linear"), TILES[0]
    entries = [{"variant": "rope", "rows": rows, "n": 192, "k": 64, "us": us, "composed_us": 2.0, "tile": way}
               for rows, us, way in ((1, 1.0, vars(tile)), (2, None, None))]  # fmt: skip
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "linear_here.json").write_text(json.dumps({"entries": entries}))
    monkeypatch.setattr(module, "__file__", str(tmp_path / "linear.py"))
    assert module.table_of.__wrapped__("here") == {("rope", 1, 192, 64): tile, ("rope", 2, 192, 64): None}


def test_errors_name_the_argument(device: torch.device) -> None:
    case = make_case(2, (2, 1, 16, 16), device)
    names = ("x", "weight", "bias", "norm_weight", "positions", "cos_sin", "k_cache", "v_cache", "slot_mapping")
    right = dict(zip(names, case.arguments(case.caches), strict=True))
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("x", case.x[None], ValueError, r"x: expected \[tokens, 96\], got \[1, 2, 96\]"),
        ("weight", case.weight[:60], ValueError, r"weight: expected \(heads \+ 2 · 1\) · 16 rows .* got \[60, 96\]"),
        ("weight", case.weight[:16], ValueError, r"weight: expected .* got \[16, 96\]"),
        ("bias", case.x[0], ValueError, r"bias: expected \[64\]"),
        ("positions", case.positions[:1], ValueError, r"positions: expected \[2\] one per token of x, got \[1\]"),
        ("slot_mapping", case.slots.int(), TypeError, "slot_mapping: expected int64"),
        ("cos_sin", case.cos_sin[:, :5], ValueError, "cos_sin: expected .* rot_dim even and 2 to 16"),
        ("cos_sin", case.cos_sin.half(), TypeError, "cos_sin: expected float32"),
        ("k_cache", case.caches[0][0], ValueError, r"k_cache: expected \[pages, page_size, kv_heads, head_dim\]"),
        ("v_cache", case.caches[1][:1], ValueError, r"v_cache: expected \[9, 8, 1, 16\] like k_cache, got \[1, 8, 1, 16\]"),
        ("v_cache", case.caches[1].double(), TypeError, "v_cache: expected float16, bfloat16, float32 or float8_e4m3fn"),
        ("k_scale", torch.ones(3, device=device), ValueError, r"k_scale: expected one element or \[1\]"),
        ("q_weight", torch.ones(8, device=device), ValueError, r"q_weight: expected \[16\] \(head_dim\)"),
    ]
    for name, value, kind, message in wrong:
        with pytest.raises(kind, match=message):
            tkernels.linear_rope_and_cache(**{**right, name: value})
