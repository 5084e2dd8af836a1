"""linear_rope_and_cache in tiles whose weights come by TMA. On the CPU: which calls. On a GPU: the bits of linear and rope_and_cache."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import FP8
from qkv_cases import EPS, PAGE_SIZE, PAGES, Case, make_case, same

import tkernels
from tests.tkernels.captured import captured
from tkernels import _linear_kernels, _linear_tma, _qkv_tma, _repeats, _target, qkv
from tkernels._linear_kernels import Tile
from tkernels._qkv_kernels import launch
from tkernels._qkv_tma import refusal
from tkernels.linear import table_of
from tkernels.qkv import linear_rope_and_cache_ref

TILE = Tile("tma", 16, 256, 4, 4, 2)
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    _repeats.forget()
    yield
    _repeats.forget()


# ---- which calls


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The norms and tiles of launches, which do nothing; for 8 rows, and weights [96, 128], as on Hopper."""
    calls: list[Any] = []
    monkeypatch.setattr(_linear_tma, "_gluon_problem", lambda: None)
    monkeypatch.setattr(qkv, "target_of", lambda device: _target.Target("sm_90", 132, True))
    monkeypatch.setattr(_qkv_tma, "launch", lambda *args: calls.append((args[3] is not None, args[-1])))
    for variant in ("plain", "norm", "rope", "norm+rope"):
        monkeypatch.setitem(table_of("sm_90"), (variant, 8, 96, 128), TILE)
    return calls


def test_calls_that_take_such_a_tile(launched: list[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for norm, dtype, cache_dtype, normed in (
        (False, torch.bfloat16, None, False),
        (True, torch.bfloat16, torch.float32, True),
        (False, torch.float16, None, False),
        (True, torch.float16, None, False),  # in a kernel of its own: x · norm_weight would be rounded before it is scaled
    ):
        case = make_case(8, (1, 1, 32, 32), device, norm=norm, k=128, dtype=dtype, cache_dtype=cache_dtype)
        assert tkernels.linear_rope_and_cache(*case.arguments(case.empty())).shape == (8, 1, 32)
        assert launched.pop() == (normed, TILE) and not launched
    for variant in ("rope", "norm+rope"):  # then the tile is that of the projection
        monkeypatch.delitem(table_of("sm_90"), (variant, 8, 96, 128))
    tkernels.linear_rope_and_cache(*case.arguments(case.empty()))
    assert launched == [(False, TILE)]


@pytest.mark.parametrize("why", ["interleaved", "partial", "heads", "cache", "strides", "k_scale", "q_weight"])
def test_calls_that_are_refused_are_composed(launched: list[Any], device: torch.device, why: str) -> None:
    shape = {"partial": (1, 1, 32, 16), "heads": (2, 1, 24, 24)}.get(why, (1, 1, 32, 32))
    case = make_case(8, shape, device, norm=True, k=128, cache_dtype=FP8 if why == "cache" else None)
    case.positions[-1] = 0
    more: dict[str, Any] = {"interleaved": True} if why == "interleaved" else {}
    if why == "k_scale":
        more["k_scale"] = torch.ones(1, device=device)
    if why == "q_weight":
        more["q_weight"] = torch.ones(32, device=device).bfloat16()
    if why == "strides":
        wide = torch.zeros(96, 132, device=device).bfloat16()
        case.weight = wide[:, :128].copy_(case.weight)
    ours, theirs = case.empty(), case.empty()
    q = tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS, **more)
    want = linear_rope_and_cache_ref(*case.arguments(theirs), eps=EPS, **more)
    assert not launched
    for got, expected in zip((q, *ours), (want, *theirs), strict=True):
        torch.testing.assert_close(got.float(), expected.float(), atol=0.3 if got.dtype == FP8 else 0.06, rtol=0.1)


@pytest.mark.parametrize("norm", [False, True])
def test_a_cache_that_is_refused_takes_the_tile_of_the_projection(
    launched: list[Any], device: torch.device, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """e4m3 caches: still one kernel, and the norm is where that tile has it; the bits are those of the two."""
    other = Tile("matrix", 16, 32, 1, 4, 2)
    for variant in ("plain", "norm"):
        monkeypatch.setitem(table_of("sm_90"), (variant, 8, 96, 128), other)
    took: list[Any] = []
    monkeypatch.setattr(qkv, "launch", lambda *args: (took.append((args[3] is not None, args[-1])), launch(*args)))
    monkeypatch.setattr(qkv, "launch_rope", lambda *args: pytest.fail("a kernel of its own"))
    case = make_case(8, (1, 1, 32, 32), device, norm=norm, k=128, cache_dtype=FP8)
    ours, theirs = case.empty(), case.empty()
    q = tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS)
    assert took == [(norm, other)] and not launched
    y = torch.empty(8, 96, device=device, dtype=case.x.dtype)
    _linear_kernels.launch(case.x, case.weight, case.bias, case.norm, None, False, EPS, y, other)
    want = case.rotated(y, theirs, False)
    assert same(q, want) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def test_reasons() -> None:
    weight, cache = torch.zeros(192, 128).bfloat16(), torch.zeros(1, 8, 1, 64).bfloat16()
    x = torch.zeros(8, 132).bfloat16()[:, :128]
    ask = lambda tile=TILE, weight=weight, k=cache, v=cache, rot=64, interleaved=False: (
        refusal(tile, x, weight, k, v, rot, interleaved) or ""
    )
    assert not ask() and not ask(k=cache.float()) and not ask(tile=dataclasses.replace(TILE, block_n=64))
    assert ask(interleaved=True).startswith("interleaved")
    assert ask(rot=32).startswith("32 of 64 elements")
    assert "a multiple of block_n, 128" in ask(tile=dataclasses.replace(TILE, block_n=128))
    assert "a cache of float8_e4m3fn" in ask(v=cache.to(FP8))
    assert "100 inputs" in ask(weight=weight[:, :100])
    assert ask(tile=Tile("tma", 64, 64, 1, 4, 3, 2)).startswith("x: strides [132, 1]"), "it comes by TMA in a tile of one slice"


# ---- on a GPU

CASES = [  # rows, head_dim, k, tile, bias, norm, dtypes of x and the caches
    (1, 64, 2048, (32, 512, 8, 8, 4), False, True, torch.bfloat16, None),
    (3, 64, 1088, (16, 512, 8, 4, 4), True, False, torch.bfloat16, None),
    (8, 64, 2048, (32, 512, 8, 8, 4), True, True, torch.bfloat16, None),
    (17, 64, 576, (16, 256, 4, 4, 2), False, True, torch.bfloat16, torch.float32),
    (64, 64, 1088, (64, 64, 1, 4, 4), True, False, torch.bfloat16, None),
    (1, 128, 1088, (16, 1024, 16, 8, 1), True, False, torch.float16, None),
    (3, 128, 2048, (32, 256, 4, 8, 3), False, True, torch.bfloat16, None),
    (8, 128, 1088, (64, 128, 2, 8, 3), False, True, torch.bfloat16, torch.float16),
    (17, 128, 576, (64, 64, 1, 4, 3), True, False, torch.float16, None),
    (1, 128, 4096, (64, 128, 1, 4, 3), False, False, torch.bfloat16, None),
    (17, 64, 576, (64, 64, 1, 4, 3, 2), True, False, torch.bfloat16, torch.float32),
    (33, 128, 1088, (64, 128, 1, 8, 4, 4), False, False, torch.bfloat16, None),
    (64, 64, 2048, (64, 64, 1, 4, 6, 4), True, False, torch.bfloat16, None),
    (64, 128, 192, (128, 64, 1, 8, 2, 2), False, False, torch.float16, None),
    (17, 64, 2048, (64, 64, 1, 4, 4, 8), True, False, torch.bfloat16, None),
    (40, 128, 1088, (128, 64, 1, 8, 2, 8), False, False, torch.bfloat16, torch.float32),
]


def _around(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Caches with odd strides, the one with heads before slots, the other as a part of more; and all of the memory they are views of."""
    kv_heads, dim = case.caches[0].shape[2:]
    of = {"device": case.x.device, "dtype": case.caches[0].dtype}
    memory = [torch.full((PAGES, kv_heads, PAGE_SIZE, dim + 1), 3.0, **of), torch.full((PAGES, 2, PAGE_SIZE, kv_heads, dim + 3), 3.0, **of)]
    return [memory[0][..., 1:].transpose(1, 2), memory[1][:, 1, :, :, :dim]], memory


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(("rows", "dim", "k", "sizes", "bias", "norm", "dtype", "cache_dtype"), CASES, ids=str)
def test_bits_are_those_of_the_two_kernels(
    rows: int, dim: int, k: int, sizes: tuple[int, ...], bias: bool, norm: bool, dtype: torch.dtype, cache_dtype: torch.dtype | None,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Weights with NaN between their rows, slots and positions outside what there is, in a column of a table."""
    tile = Tile("tma", *sizes)
    case = make_case(rows, (32, 8, dim, dim), device, bias=bias, norm=norm, k=k, dtype=dtype, cache_dtype=cache_dtype)
    n = len(case.weight)
    case.weight = torch.full((n, k + 64), float("nan"), device=device, dtype=dtype)[:, :k].copy_(case.weight)
    case.positions, case.slots = torch.stack([case.slots, case.positions, case.slots], 1).unbind(1)[1:]
    y = torch.full((rows, n), float("nan"), device=device, dtype=dtype)
    _linear_kernels.launch(case.x, case.weight, case.bias, case.norm, None, False, EPS, y, tile)
    theirs, expected = _around(case)
    want = case.rotated(y, theirs, False)
    assert not y.isnan().any() and want[:-1].isnan().sum() == 0
    for patience in (_linear_tma.PATIENCE, 0, 1):  # how long a program waits for the others of its tile
        monkeypatch.setattr(_linear_tma, "PATIENCE", patience)
        ours, got = _around(case)
        q = torch.full((rows, 32, dim), float("nan"), device=device, dtype=dtype)
        x, weight, bias_of, norm_of, *rest = case.arguments(ours)
        launch(x, weight, bias_of, norm_of, EPS, *rest, False, q, tile)
        assert same(q, want)
        assert all(torch.equal(a, b) or same(a, b) for a, b in zip(got, expected, strict=True))


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(("rows", "other"), [(1, (64, 128, 1, 4, 3)), (8, (64, 128, 1, 4, 3)), (64, (64, 128, 1, 8, 4, 2))])
def test_dependent_launches_give_the_same_bits(device: torch.device, rows: int, other: tuple[int, ...]) -> None:
    """A chain in which each kernel reads what the one before has written: x, positions and slots; replayed many times."""
    k, tiles = 2048, (Tile("tma", 32, 512, 8, 8, 4) if rows < 17 else Tile("tma", 64, 64, 1, 4, 6, 4), Tile("tma", *other))
    case = make_case(rows, (32, 8, 64, 64), device, norm=True, k=k)
    case.positions.clamp_(max=7)
    weights = [torch.randn(3072, k, device=device).bfloat16() * k**-0.5 for _ in range(6)]
    layers = [case.empty() for _ in weights]

    def chain() -> torch.Tensor:
        h = case.x
        for i, (weight, caches) in enumerate(zip(weights, layers, strict=True)):
            positions, slots, tile = (case.positions + i) % 8, case.slots + 0, tiles[i % 2]
            norm = case.norm if tile.slices > 1 else None
            q = torch.empty(rows, 32, 64, device=device, dtype=torch.bfloat16)
            launch(h, weight, None, norm, EPS, positions, case.cos_sin, *caches, slots, False, q, tile)
            h = torch.empty(rows, k, device=device, dtype=torch.bfloat16)
            _linear_kernels.launch(q.view(rows, k), weights[i - 1][:k], None, norm, None, False, EPS, h, tile)
        return h

    expected = chain()
    written = [[cache.clone() for cache in caches] for caches in layers]
    graph, h = captured(chain, dependent=True)
    for _ in range(50):
        h.fill_(float("nan"))
        for caches in layers:
            for cache in caches:
                cache.fill_(3.0)
        graph.replay()
        assert torch.equal(h, expected)
        assert all(torch.equal(a, b) for caches, once in zip(layers, written, strict=True) for a, b in zip(caches, once, strict=True))


@gpu
@pytest.mark.usefixtures("in_time")
def test_the_op_repeats_on_other_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third call on without Triton's launcher, with a descriptor of the weight of that call."""
    if _linear_tma.absence(_target.target_of(device).arch):
        pytest.skip("no Gluon kernel here")
    monkeypatch.setattr(importlib.import_module("tkernels.linear"), "choose", lambda target, dtype, variant, *shape: TILE)
    monkeypatch.setattr(_repeats, "ENABLED", True)
    for _ in range(5):
        case = make_case(8, (2, 1, 64, 64), device, norm=True, k=128)
        ours, theirs = case.empty(), case.empty()
        q = torch.full((8, 2, 64), float("nan"), device=device).bfloat16()
        x, weight, bias, norm, *rest = case.arguments(theirs)
        launch(x, weight, bias, norm, EPS, *rest, False, q, TILE)
        assert same(tkernels.linear_rope_and_cache(*case.arguments(ours), eps=EPS), q)
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    (plan,) = [plan for table in _repeats._tables for plan in table.values()]
    assert isinstance(plan, _repeats._Plan) and len(plan.launches) == 1
