"""Linear layers whose weights come by TMA. On the CPU: which calls take such a tile. On a GPU: against fp64, bits, its handshakes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import tkernels
from tests.tkernels.captured import captured
from tkernels import _counters, _linear_tma
from tkernels._candidates import candidates
from tkernels._linear_kernels import ROW_CLASSES, Tile, launch
from tkernels._linear_tma import PATIENCE, absence, check_rows_tile, refusal, shared_bytes, shares, sizes
from tkernels._target import Target
from tkernels._triton import INTERPRETED
from tkernels.linear import choose, linear_ref, table_of

LINEAR = importlib.import_module("tkernels.linear")  # the package has a function of that name
HOPPER = Target("sm_90", 132, True)
TILE = Tile("tma", 16, 256, 4, 4, 2)
ONE = Tile("tma", 64, 64, 1, 4, 3, 2)  # of one slice: x comes by TMA too
EPS = 1e-5


@pytest.fixture
def gluon_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are taken or refused as on Hopper."""
    monkeypatch.setattr(_linear_tma, "_gluon_problem", lambda: None)


@pytest.fixture
def in_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in ("plain", "norm", "gated"):
        monkeypatch.setitem(table_of("sm_90"), (variant, 8, 96, 128), TILE)


# ---- which calls


def test_only_where_gluon_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear_tma, "_gluon_problem", lambda: None)
    assert absence("sm_90") is None
    assert [absence(arch) for arch in ("sm_80", "sm_100", "gfx942")] == [
        f"architecture {arch}: the kernel is for sm_90" for arch in ("sm_80", "sm_100", "gfx942")
    ]
    monkeypatch.undo()
    if INTERPRETED:
        assert absence("sm_90") == "Triton's interpreter has no Gluon"


@pytest.mark.parametrize(
    ("tile", "normed", "message"),
    [
        (Tile("tma", 64, 64, 1, 4, 2), True, "norms with tiles of slices"),
        (Tile("tma", 64, 64, 1, 4, 1), False, "a stage is filled again"),
        (Tile("tma", 64, 64, 1, 4, 2, 3), False, "in pairs"),
        (Tile("tma", 64, 64, 1, 4, 2, 8), False, "the parts of a share"),
        (Tile("tma", 256, 64, 1, 8, 2, 32), False, "the parts of a share"),
    ],
)
def test_what_no_table_may_hold(tile: Tile, normed: bool, message: str) -> None:
    check_rows_tile(ONE, 16, 128, None)
    check_rows_tile(Tile("tma", 64, 64, 1, 4, 1, 2), 16, 128, None)
    with pytest.raises(AssertionError, match=message):
        check_rows_tile(tile, 16, 256, torch.ones(256) if normed else None)


def test_weights_that_no_descriptor_describes_are_refused() -> None:
    wide = torch.zeros(32, 136, dtype=torch.bfloat16)
    x = torch.zeros(8, 132, dtype=torch.bfloat16)[:, :128]
    ask = lambda weight, x=x, tile=TILE: refusal(tile, weight, x) or ""
    assert not ask(wide[:, :128]) and not ask(wide[:1, :128])
    assert "100 inputs: expected a multiple of 64" in ask(wide[:, :100])
    assert "address" in ask(wide[:, 1:129])
    assert "strides [132, 1]" in ask(torch.zeros(32, 132, dtype=torch.bfloat16)[:, :128])


def test_a_tile_of_one_slice_reads_x_by_a_descriptor_too() -> None:
    weight, wide = torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(8, 136, dtype=torch.bfloat16)
    ask = lambda x: refusal(ONE, weight, x) or ""
    assert not ask(wide[:, :128]) and not ask(wide[:, 8:]) and not ask(torch.zeros(1, 132, dtype=torch.bfloat16)[:, :128])
    assert not ask(torch.zeros(2, 4, 128, dtype=torch.bfloat16))
    assert ask(wide[:, 1:129]).startswith("x: its address")
    assert ask(torch.zeros(8, 132, dtype=torch.bfloat16)[:, :128]).startswith("x: strides")
    assert ask(torch.zeros(1, 128, dtype=torch.bfloat16).expand(8, 128)).startswith("x: strides")


def test_splits_leave_their_sums_and_count_who_has_arrived(device: torch.device) -> None:
    assert TILE.workspace(7, 64, device) == (None, None)
    for rows, block_m in ((1, 8), (17, 32), (64, 64)):
        parts, arrivals = ONE.workspace(7, rows, device)
        assert parts is not None and arrivals is not None and not arrivals.any() and len(arrivals) >= 7
        assert parts.dtype == torch.float32 and len(parts) == 7 * 2 * 64 * block_m
    # BLOCK_M, BLOCK_N, STAGE_CHUNKS, STAGES, X_STAGES, STEPS, SPLITS, PATIENCE: no ring has more stages than the part of a split
    assert sizes(ONE, 33, 192) == (64, 64, 1, 2, 2, 2, 2, PATIENCE)
    assert sizes(Tile("tma", 64, 128, 1, 8, 10, 4), 64, 8192) == (64, 64, 2, 10, 4, 16, 4, PATIENCE)
    for tile in (ONE, Tile("tma", 64, 128, 1, 8, 10, 4), Tile("tma", 64, 256, 1, 8, 5, 8)):
        for k in (64, 192, 576, 1088, 8192):
            *_, chunks, stages, x_stages, steps, splits, _ = sizes(tile, 64, k)
            assert max(stages, x_stages) <= steps and splits * steps * chunks * 64 >= k
            assert min(stages, x_stages) > 1 or steps == 1, "a step is waited for before the one before it is refilled"


@pytest.mark.usefixtures("gluon_compiles", "in_table")
def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (8, 96, 128)
    assert [choose(HOPPER, torch.bfloat16, variant, *shape) for variant in ("plain", "norm", "gated", "residual")] == [TILE] * 4
    assert [choose(HOPPER, torch.bfloat16, variant, *shape) for variant in ("rope", "norm+rope")] == [TILE] * 2
    assert choose(HOPPER, torch.float16, "plain", *shape) == TILE
    assert choose(HOPPER, torch.float16, "norm", *shape) is None, "x · norm_weight is rounded before it is scaled"
    assert choose(HOPPER, torch.float32, "plain", *shape) is None
    monkeypatch.setattr(_linear_tma, "_gluon_problem", lambda: "no Gluon")
    assert choose(HOPPER, torch.bfloat16, "plain", *shape) is None, "then the composition, as without an entry"
    other = Tile("matrix", 16, 128, 4, 4, 3)
    for variant, tile in (("residual", TILE), ("norm+rope", TILE), ("plain", other), ("norm", other)):
        monkeypatch.setitem(table_of("sm_90"), (variant, *shape), tile)
    assert [choose(HOPPER, torch.bfloat16, variant, *shape) for variant in ("residual", "norm+rope")] == [other] * 2


@pytest.mark.usefixtures("gluon_compiles", "in_table")
def test_a_weight_that_is_refused_is_composed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(LINEAR, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(_linear_tma, "launch", lambda *args: launched.append(args[-1]))
    x, weight = torch.zeros(8, 128, device=device).bfloat16(), torch.zeros(96, 128, device=device).bfloat16()
    assert LINEAR.streamed(x, weight) is not None and launched == [TILE]
    odd = torch.zeros(96, 132, device=device).bfloat16()[:, :128]
    assert LINEAR.streamed(x, odd) is None and len(launched) == 1
    assert not tkernels.linear(x, odd).any() and len(launched) == 1
    odd = torch.zeros(8, 132, device=device).bfloat16()[:, :128]
    assert LINEAR.streamed(odd, weight) is not None and len(launched) == 2
    monkeypatch.setitem(table_of("sm_90"), ("plain", 8, 96, 128), ONE)
    assert LINEAR.streamed(x, weight) is not None and launched.pop() == ONE
    assert LINEAR.streamed(odd, weight) is None and not tkernels.linear(odd, weight).any() and len(launched) == 2


@pytest.mark.usefixtures("gluon_compiles", "in_table")
def test_the_greedy_head_takes_no_such_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the largest of a program's outputs."""
    head = importlib.import_module("tkernels.head")
    monkeypatch.setattr(head, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(head, "launch", lambda *args: pytest.fail("launched"))
    x, weight = torch.randn(8, 128, device=device).bfloat16(), torch.randn(96, 128, device=device).bfloat16()
    assert tkernels.linear_argmax(x, weight).tolist() == linear_ref(x, weight).argmax(-1).tolist()


def test_what_is_tried_fits_and_leaves_room_for_two_programs_a_multiprocessor_at_most() -> None:
    for variant, n, k in (
        ("norm", 3072, 2048),
        ("norm+rope", 3072, 2048),
        ("residual", 2048, 2048),
        ("norm+gated", 16384, 2048),
        ("gated", 16384, 2048),
        ("rope", 3072, 2048),
        ("plain", 4096, 14336),
    ):
        for rows in ROW_CLASSES:
            tiles = [tile for tile in candidates(variant, rows, n, k, 132, tma=True) if tile.kind == "tma"]
            gated = "gated" in variant
            assert (tiles or rows > 16) and len(set(tiles)) == len(tiles)
            for tile in tiles:
                programs = (n // 2 if gated else n) / tile.block_n * tile.splits
                assert 0.7 * 132 <= programs <= 264
                shared = shared_bytes(tile, rows, k, gated)
                assert tile.block_k % (64 * tile.slices) == 0
                if tile.slices > 1:
                    assert tile.splits == 1 and shared <= 225 << 10
                    assert tile.block_n * min(tile.slices, tile.num_warps) >= 16 * tile.num_warps
                    continue
                assert rows >= 8 and shared <= (225 << 10 if programs <= 132 else 112 << 10), "all programs are there at once"
                assert tile.splits in (1, 2, 4, 8, 16) and not (gated and tile.splits > 1)
                assert tile.splits == 1 or shares(tile, rows)
                assert tile.block_n % 64 == 0 and tile.block_n * tile.block_m(rows) >= 128 * tile.num_warps
                assert tile.num_stages * tile.block_k * tile.splits < k + tile.block_k * tile.splits, "no stage is empty"
                assert tile.num_stages > 1 or tile.block_k * tile.splits >= k, "a stage is filled again while the next one is used"
            if rows != 8 or "norm" in variant:  # 8 rows: there are programs enough only where there are shares for them
                assert any(tile.slices == 1 for tile in tiles) == (rows > 8 and "norm" not in variant)
    kinds = lambda *args, **more: {tile.kind for tile in candidates(*args, 132, **more)}
    assert "tma" not in kinds("norm", 1, 3072, 2048) | kinds("rope", 1, 3072, 2048) | kinds("plain", 1, 3072, 2040, tma=True)
    assert "tma" not in kinds("plain", 1, 128256, 2048, tma=True), "the LM head of one row is read at memory speed as it is"


# ---- on a GPU

TILES = [  # both kinds of product; rings of fewer stages than steps, of as many, of one; one and several rounds of a stage
    Tile("tma", 16, 256, 4, 4, 2), Tile("tma", 16, 512, 8, 4, 4), Tile("tma", 16, 1024, 16, 8, 1), Tile("tma", 32, 256, 4, 8, 3),
    Tile("tma", 64, 128, 2, 8, 3), Tile("tma", 64, 64, 1, 4, 2), Tile("tma", 64, 128, 1, 4, 3),
]  # fmt: skip
SPLIT = [
    Tile("tma", 64, 64, 1, 4, 3, 2),
    Tile("tma", 64, 128, 1, 4, 4, 4),
    Tile("tma", 128, 64, 1, 8, 2, 2),
    Tile("tma", 64, 64, 1, 8, 4, 8),
    Tile("tma", 128, 64, 1, 8, 3, 8),
    Tile("tma", 256, 64, 1, 8, 2, 16),
]
SHAPES = [(1, 64, 64), (1, 100, 1088), (2, 1, 128), (5, 37, 576), (8, 130, 2048), (17, 70, 192), (33, 96, 320), (64, 48, 1152)]
FUSED = [
    (1, "norm bias"),
    (1, "norm gated residual"),
    (3, "norm wide residual"),
    (8, "norm gated bias"),
    (16, "gated"),
    (64, "norm residual"),
    (64, "norm gated"),
]
gpu = pytest.mark.gpu


def _some(cases: list[Any], k: Any) -> list[Any]:
    """Three of the tiles for each case, since each is a compilation, and each tile for several; none that takes too much memory."""
    pairs = [(TILES[(i + step) % len(TILES)], *case) for i, case in enumerate(cases) for step in (0, 2, 5)]
    return [pair for pair in pairs if shared_bytes(pair[0], pair[1], k(pair), "gated" in str(pair[-1])) <= 225 << 10]


def _case(rows: int, n: int, k: int, fused: str, dtype: torch.dtype, device: torch.device, tile: Tile = TILE) -> dict[str, Any]:
    """Strided, with NaN between what is to be read; x oddly so where ``tile`` allows it. No norm with a tile of one slice."""
    gated, normed = "gated" in fused, "norm" in fused and tile.slices > 1

    def within(rows: int, columns: int, more: int) -> torch.Tensor:
        return torch.full((rows, columns + more), float("nan"), device=device, dtype=dtype)[:, :columns].copy_(
            torch.randn(rows, columns, device=device)
        )

    weight = within(2 * n if gated else n, k, 64)
    return {
        "x": within(rows, k, 3 if tile.slices > 1 else 8), "weight": weight.mul_(k**-0.5),
        "bias": torch.randn(len(weight), device=device).to(dtype) if "bias" in fused else None,
        "norm_weight": torch.rand(k, device=device).add_(0.5).to(torch.float32 if "wide" in fused else dtype) if normed else None,
        "residual": within(rows, n, 8) if "residual" in fused else None, "gated": gated,
    }  # fmt: skip


def _run(case: dict[str, Any], tile: Tile) -> torch.Tensor:
    n = case["weight"].shape[0] // (2 if case["gated"] else 1)
    y = torch.full((len(case["x"]), n), float("nan"), device=case["x"].device, dtype=case["x"].dtype)
    launch(*(case[name] for name in ("x", "weight", "bias", "norm_weight", "residual", "gated")), EPS, y, tile)
    return y


def _verify(case: dict[str, Any], tile: Tile) -> None:
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    exact, low = linear_ref(**wide, eps=EPS), linear_ref(**case, eps=EPS)
    y = _run(case, tile)
    assert (y.double() - exact).abs().max() <= 2 * (low.double() - exact).abs().max() + 1e-5
    assert all(torch.equal(_run(case, tile), y) for _ in range(3))


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(("tile", "rows", "n", "k"), _some(SHAPES, lambda pair: pair[-1]), ids=str)
def test_tiles_match_fp64(device: torch.device, tile: Tile, rows: int, n: int, k: int) -> None:
    _verify(_case(rows, n, k, "bias" if n % 2 else "", torch.bfloat16, device, tile), tile)


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(("tile", "rows", "fused"), _some(FUSED, lambda pair: 1088), ids=str)
def test_fusions_match_fp64(device: torch.device, tile: Tile, rows: int, fused: str) -> None:
    _verify(_case(rows, 72, 1088, fused, torch.bfloat16, device, tile), tile)


@gpu
@pytest.mark.usefixtures("in_time")
def test_fp16(device: torch.device) -> None:
    for tile in (TILES[0], TILES[-1]):
        _verify(_case(8, 72, 1088, "gated bias", torch.float16, device, tile), tile)
    _verify(_case(40, 72, 1088, "bias residual", torch.float16, device, SPLIT[0]), SPLIT[0])


def _counted() -> int:
    """Words of all counters that are not at zero."""
    torch.cuda.synchronize()
    return sum(int(words.count_nonzero()) for held in _counters._words.values() for words in (held._ring, held._kept))


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("tile", SPLIT, ids=str)
@pytest.mark.parametrize("fused", ["bias", "residual", "bias residual"])
def test_splits_match_fp64(device: torch.device, tile: Tile, fused: str) -> None:
    """Parts of the inputs that are empty, shorter than a stage, and as long as the rings; the last rows of weights and x are missing.
    Shares of all outputs and of some of them."""
    for rows, n, k in ((9, 130, 192), (17, 70, 64), (64, 300, 1088), (33, 64, 2048)):
        if shares(tile, rows):
            case = _case(rows, n, k, fused, torch.bfloat16, device, tile)
            _verify(case, tile)
    y = _run(case, tile)
    for _ in range(200):
        assert torch.equal(_run(case, tile), y), "the parts are added in their order"
    assert not _counted()


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("tile", SPLIT, ids=str)
@pytest.mark.parametrize("patience", [0, 1, 2])
def test_a_program_that_does_not_wait_leaves_its_share_to_the_last(
    device: torch.device, tile: Tile, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no patience the last one adds everything, with little some of it."""
    rows = 33 if shares(tile, 33) else 64
    case = _case(rows, 1000, 1088, "bias residual", torch.bfloat16, device, tile)
    y = _run(case, tile)
    monkeypatch.setattr(_linear_tma, "PATIENCE", patience)
    _verify(case, tile)
    assert all(torch.equal(_run(case, tile), y) for _ in range(200)) and not _counted()


@gpu
@pytest.mark.usefixtures("in_time")
def test_launches_of_two_streams_at_once_change_no_bit(device: torch.device) -> None:
    """Of more programs than a device holds, on streams of which one goes first."""
    tile, rows = Tile("tma", 128, 128, 1, 8, 5, 8), 64
    cases = [_case(rows, 128 * 100, 8192, "residual", torch.bfloat16, device, tile) for _ in range(2)]
    expected = [_run(case, tile) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(10):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[which].append(_run(cases[which], tile))
    torch.cuda.synchronize()
    assert all(torch.equal(y, once) for ys, once in zip(got, expected, strict=True) for y in ys) and not _counted()


@gpu
@pytest.mark.usefixtures("in_time")
def test_every_number_of_rows(device: torch.device) -> None:
    for rows in range(17, 65):
        for tile in (SPLIT[0], SPLIT[1]):
            _verify(_case(rows, 70, 576, "residual", torch.bfloat16, device, tile), tile)


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_dependent_launches_give_the_same_bits(device: torch.device, rows: int) -> None:
    """A chain in which each kernel reads what the one before has written, replayed many times."""
    k, one = 2048, Tile("tma", 64, 128, 1, 4, 2)
    wide = SPLIT[4] if rows == 64 else SPLIT[2]
    tiles = (Tile("tma", 16, 256, 4, 4, 4), SPLIT[2 if rows < 64 else 1], one, wide, SPLIT[0], Tile("tma", 32, 256, 4, 8, 3))
    weights = [torch.randn(k, k, device=device).bfloat16() * k**-0.5 for _ in range(12)]
    norm = torch.rand(k, device=device).bfloat16() + 0.5
    x = torch.randn(rows, k, device=device).bfloat16()

    def chain() -> torch.Tensor:
        h = x
        for i, weight in enumerate(weights):
            y = torch.empty_like(h)
            tile = tiles[i % len(tiles)]
            launch(h, weight, None, norm if tile.slices > 1 else None, h, False, EPS, y, tile)
            h = y
        return h

    expected = chain()
    graph, y = captured(chain, dependent=True)
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
    assert not _counted()


@gpu
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("tile", [TILE, ONE], ids=str)
def test_the_op_repeats_on_other_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """From the third call on without Triton's launcher, with descriptors of the weight and the x of that call."""
    if absence(tkernels._target.target_of(device).arch):
        pytest.skip("no Gluon kernel here")
    monkeypatch.setattr(LINEAR, "choose", lambda target, dtype, variant, *shape: tile)
    tkernels._repeats.forget()
    for _ in range(5):
        x, weight = torch.randn(8, 128, device=device).bfloat16(), torch.randn(96, 128, device=device).bfloat16()
        y = torch.full((8, 96), float("nan"), device=device).bfloat16()
        launch(x, weight, None, None, None, False, EPS, y, tile)
        assert torch.equal(tkernels.linear(x, weight), y)
    tkernels._repeats.forget()
