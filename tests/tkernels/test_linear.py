"""The weight-streaming linear kernels: every tile kind, every fusion, ragged shapes, strided inputs, and the choice from the table."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

from tkernels import _linear_tma, _target, linear
from tkernels._linear_kernels import ROW_CLASSES, Tile, launch
from tkernels.linear import choose, choose_with_norm, linear_ref
from tkernels.linear import table_of as linear_table

TILES = [
    Tile("vector", 4, 64, 1, 4, 1),
    Tile("vector", 8, 128, 1, 4, 1),
    Tile("matrix", 16, 32, 1, 4, 2),
    Tile("matrix", 16, 32, 4, 4, 2),
    Tile("matrix", 64, 32, 1, 4, 3),
    Tile("matrix", 16, 32, 1, 4, 2, splits=3),
    Tile("matrix", 16, 16, 2, 4, 2, splits=4),
    Tile("matrix", 16, 32, 2, 2, 1),
    Tile("matrix", 32, 64, 2, 2, 1, splits=3),
]
SHAPES = [(1, 64, 128), (1, 37, 100), (2, 21, 70), (3, 16, 64), (4, 70, 129), (5, 64, 256), (17, 33, 65)]
CASES = [(tile, *shape) for tile in TILES for shape in SHAPES if tile.kind == "matrix" or shape[0] <= 4]
EPS = 1e-5


def _close(y: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> None:
    """Within twice the error that the composition makes at this precision against fp64."""
    assert (y.double() - exact).abs().max() <= 2 * (low.double() - exact).abs().max() + 1e-5


@pytest.mark.parametrize(("tile", "rows", "n", "k"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_tiles_match_fp64(device, tile, rows, n, k, dtype):
    x = torch.randn(rows, 2 * k + 8, device=device).to(dtype)[:, 8 : 8 + k]  # a strided view
    weight = torch.randn(n, k + 8, device=device).to(dtype)[:, :k] / k**0.5
    bias = torch.randn(n, device=device).to(dtype) if n % 2 else None
    y = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
    launch(x, weight, bias, None, None, False, EPS, y, tile)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    _close(y, exact, exact.to(dtype))


@pytest.mark.parametrize("tile", [TILES[0], TILES[2], TILES[3], TILES[7]], ids=lambda t: f"{t.kind}-{t.slices}-{t.num_stages}")
@pytest.mark.parametrize("fused", ["norm", "gated", "residual", "all"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 32, 64), (3, 21, 100)])
def test_fusions_match_the_composition(device, tile, fused, rows, n, k):
    dtype = torch.bfloat16
    gated = "gated" in fused or fused == "all"
    x = torch.randn(rows, k, device=device).to(dtype)
    weight = torch.randn(2 * n if gated else n, k, device=device).to(dtype) / k**0.5
    norm_weight = torch.randn(k, device=device).to(dtype) if fused in ("norm", "all") else None
    residual = torch.randn(rows, 2 * n, device=device).to(dtype)[:, :n] if "residual" in fused or fused == "all" else None
    y = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
    launch(x, weight, None, norm_weight, residual, gated, EPS, y, tile)
    wide = [None if t is None else t.double() for t in (x, weight, None, norm_weight, residual)]
    low = linear_ref(*[None if t is None else t.cpu() for t in (x, weight, None, norm_weight, residual)], gated, EPS)
    _close(y, linear_ref(*wide, gated, EPS), low.to(device))


def test_splits_repeat_bit_for_bit(device):
    x, weight = torch.randn(3, 96, device=device).bfloat16(), torch.randn(40, 96, device=device).bfloat16()
    tile = Tile("matrix", 16, 16, 1, 4, 2, splits=3)
    outs = [torch.full((3, 40), float("nan"), device=device, dtype=torch.bfloat16) for _ in range(3)]
    for y in outs:
        launch(x, weight, None, None, None, False, EPS, y, tile)
    assert all(torch.equal(y, outs[0]) for y in outs) and not outs[0].isnan().any()


def test_splits_keep_no_memory_between_calls(device, monkeypatch):
    """A private pool, such as one that torch.compile's CUDA graphs warm up in, hands such memory out a second time."""
    made: list[weakref.ref[torch.Tensor]] = []
    for name in ("empty", "zeros"):
        original = getattr(torch, name)

        def spy(*args, original=original, **kwargs):
            tensor = original(*args, **kwargs)
            if tensor.dtype == torch.float32:  # the partial sums; counters are the launch's own on purpose
                made.append(weakref.ref(tensor))
            return tensor

        monkeypatch.setattr(torch, name, spy)
    x, weight = torch.ones(3, 96, device=device).bfloat16(), torch.ones(40, 96, device=device).bfloat16()
    y = torch.full((3, 40), 0.0, device=device, dtype=torch.bfloat16)
    launch(x, weight, None, None, None, False, EPS, y, Tile("matrix", 16, 16, 1, 4, 2, splits=3))
    gc.collect()
    assert len(made) == 1 and made[0]() is None


@pytest.mark.gpu
def test_graphs_with_splits_replay_at_the_same_time(device):
    """Both are captured on one stream, as torch.cuda.graph does."""
    tile = Tile("matrix", 64, 64, 1, 4, 3, splits=8)
    weight = torch.randn(4096, 8192, device=device).bfloat16()
    inputs = [torch.randn(16, 8192, device=device).bfloat16() for _ in range(2)]
    outs = [torch.empty(16, 4096, device=device, dtype=torch.bfloat16) for _ in inputs]
    expected, graphs, streams = [], [], [torch.cuda.Stream() for _ in inputs]
    for x, y in zip(inputs, outs, strict=True):
        launch(x, weight, None, None, None, False, EPS, y, tile)
        expected.append(y.clone())
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(50):
                launch(x, weight, None, None, None, False, EPS, y, tile)
    for _ in range(20):
        for graph, stream, y in zip(graphs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                y.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, want) for y, want in zip(outs, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (2, 3, 32), (2, 0, 32)], ids=str)
def test_linear_has_the_shapes_of_torch(device, shape):
    x, weight = torch.randn(shape, device=device), torch.randn(24, 32, device=device)
    assert torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-5)
    assert linear(x, weight, gated=True).shape == (*shape[:-1], 12)


@pytest.mark.parametrize("rows", [1, 70])
def test_composition_adds_norm_activation_and_residual(device, rows):
    x, weight = torch.randn(rows, 32, device=device), torch.randn(24, 32, device=device)
    norm_weight, residual = torch.randn(32, device=device), torch.randn(rows, 24, device=device)
    assert torch.allclose(
        linear(x, weight, norm_weight=norm_weight, residual=residual), linear_ref(x, weight, None, norm_weight, residual), atol=1e-5
    )
    half = residual[:, :12]
    assert torch.allclose(linear(x, weight, residual=half, gated=True), linear_ref(x, weight, None, None, half, True), atol=1e-5)


def test_errors_name_the_argument(device):
    x, weight = torch.randn(2, 32, device=device), torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match=r"x: expected a last dimension of 16 like weight's, got \[2, 32\]"):
        linear(x, weight)
    weight = torch.randn(7, 32, device=device)
    with pytest.raises(TypeError, match="weight: expected float32 like x"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match="weight: expected an even number of rows"):
        linear(x, weight, gated=True)
    with pytest.raises(ValueError, match=r"residual: expected \[2, 7\] like the output, got \[2, 8\]"):
        linear(x, weight, residual=torch.randn(2, 8, device=device))


def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of at most 64 rows finds a tile."""
    monkeypatch.setattr(sys.modules["tkernels.linear"], "choose", lambda *_: TILES[2])  # the attribute of that name is the function


@pytest.mark.parametrize("stride", [0, 2])
def test_a_strided_bias_is_read_by_its_stride(device, monkeypatch, stride):
    """No kernel of ours takes it, even where the table has one: it goes to cuBLAS, whose sums may differ in the last bit."""
    _forced(monkeypatch)
    x, weight = torch.randn(2, 32, device=device).bfloat16(), torch.randn(24, 32, device=device).bfloat16()
    bias = torch.randn(48, device=device).bfloat16().as_strided((24,), (stride,))
    exact = F.linear(x.double(), weight.double(), bias.double())
    for given in (bias, bias.contiguous()):
        _close(linear(x, weight, given), exact, exact.bfloat16())


def test_a_strided_norm_weight_is_refused(device, monkeypatch):
    _forced(monkeypatch)
    x, weight = torch.randn(2, 32, device=device).bfloat16(), torch.randn(24, 32, device=device).bfloat16()
    with pytest.raises(ValueError, match="norm_weight: expected last stride 1"):
        linear(x, weight, norm_weight=torch.randn(64, device=device).bfloat16()[::2])


@pytest.mark.parametrize("gated", [False, True])
def test_b073_a_transposed_residual_leaves_the_result_contiguous(device, gated):
    x, weight, bias = torch.randn(3, 32, device=device), torch.randn(24, 32, device=device), torch.randn(24, device=device)
    residual = torch.randn(12 if gated else 24, 3, device=device).t()
    for y in (linear(x, weight, bias, residual=residual, gated=gated), linear_ref(x, weight, bias, None, residual, gated)):
        assert y.is_contiguous()


def test_the_choice_depends_on_the_shape_only():
    target = _target.Target("sm_90", 132, True)
    assert choose(target, torch.bfloat16, "plain", 1, 128256, 2048) is not None
    for rows in range(1, 65):
        size = next(c for c in ROW_CLASSES if rows <= c)
        assert choose(target, torch.bfloat16, "plain", rows, 3072, 2048) == choose(target, torch.bfloat16, "plain", size, 3072, 2048)
    assert choose(target, torch.bfloat16, "plain", 65, 128256, 2048) is None
    assert choose(target, torch.bfloat16, "residual", 32, 2048, 2048) == choose(target, torch.bfloat16, "plain", 32, 2048, 2048) is not None
    assert choose(target, torch.float32, "plain", 1, 128256, 2048) is None
    assert choose(_target.Target("sm_70", 80, False), torch.bfloat16, "plain", 1, 128256, 2048) is None


def test_64_rows_of_a_layer_have_their_norms_apart(monkeypatch):
    """As measured: TMA is faster for all but the gate."""
    target = _target.Target("sm_90", 132, True)
    take = lambda variant, normed, n, k: choose_with_norm(target, torch.bfloat16, variant, normed, 64, n, k)
    for absent in (None, "no Gluon"):
        monkeypatch.setattr(_linear_tma, "absence", lambda arch, absent=absent: absent)
        (rope, rope_apart), (gated, gated_apart) = take("rope", True, 3072, 2048), take("gated", True, 16384, 2048)
        (o, _), (down, _) = take("residual", False, 2048, 2048), take("residual", False, 2048, 8192)
        assert rope_apart and gated_apart and gated is not None and gated.kind == "matrix"
        assert [tile and tile.kind for tile in (rope, o, down)] == [None if absent else "tma"] * 3
    assert choose(target, torch.bfloat16, "plain", 64, 2048, 2048) is None


def test_large_fp16_activations_do_not_overflow_before_the_norm_scales_them(device):
    """30000 · 4 is no fp16 number: of the tiles only those that multiply in fp32 may take a norm then."""
    target = _target.Target("sm_90", 132, True)
    entries = [key for key, tile in linear_table("sm_90").items() if tile is not None and tile.kind != "tma" and "norm" in key[0]]
    taken = [tile for key in entries if (tile := choose(target, torch.float16, *key)) is not None]
    assert taken and all(tile.kind == "vector" for tile in taken) and len(taken) < len(entries)
    assert {choose(target, torch.bfloat16, *key).kind for key in entries} == {"vector", "matrix"}
    x = torch.randn(2, 64, device=device).half()
    x[:, 3] = 30000
    weight, norm_weight = torch.randn(16, 64, device=device).half() / 8, torch.full((64,), 4.0, device=device).half()
    y = torch.empty(2, 16, device=device).half()
    launch(x, weight, None, norm_weight, None, False, EPS, y, TILES[0])
    exact = linear_ref(x.double(), weight.double(), None, norm_weight.double(), None, False, EPS)
    _close(y, exact, linear_ref(x, weight, None, norm_weight, None, False, EPS))
