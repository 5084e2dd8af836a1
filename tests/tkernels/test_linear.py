"""The weight-streaming linear kernels: every tile kind, ragged shapes, strided inputs, and the choice from the table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tkernels import _target, linear
from tkernels.linear import ROW_CLASSES, Tile, choose, launch

TILES = [
    Tile("vector", 4, 64, 1, 4, 1),
    Tile("vector", 8, 128, 1, 4, 1),
    Tile("matrix", 16, 32, 1, 4, 2),
    Tile("matrix", 16, 32, 4, 4, 2),
    Tile("matrix", 64, 32, 1, 4, 3),
]


SHAPES = [(1, 64, 128), (1, 37, 100), (3, 16, 64), (4, 70, 129), (5, 64, 256), (17, 33, 65)]
CASES = [(tile, *shape) for tile in TILES for shape in SHAPES if tile.kind == "matrix" or shape[0] <= 4]


@pytest.mark.parametrize(("tile", "rows", "n", "k"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_tiles_match_fp64(device, tile, rows, n, k, dtype):
    x = torch.randn(rows, 2 * k + 8, device=device).to(dtype)[:, 8 : 8 + k]  # a strided view
    weight = torch.randn(n, k + 8, device=device).to(dtype)[:, :k] / k**0.5
    bias = torch.randn(n, device=device).to(dtype) if n % 2 else None
    y = torch.full((rows, n), float("nan"), dtype=dtype, device=device)
    launch(x, weight, bias, y, tile)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (y.double() - exact).abs().max() <= 2 * rounding + 1e-5


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (2, 3, 32), (2, 0, 32)], ids=str)
def test_linear_has_the_shapes_of_torch(device, shape):
    x, weight = torch.randn(shape, device=device), torch.randn(24, 32, device=device)
    assert torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-5)


def test_errors_name_the_argument(device):
    x, weight = torch.randn(2, 32, device=device), torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match=r"x: expected a last dimension of 16 like weight's, got \[2, 32\]"):
        linear(x, weight)
    with pytest.raises(TypeError, match="weight: expected float32 like x"):
        linear(x, weight.half().repeat(1, 2))


def test_the_choice_depends_on_the_shape_only():
    target = _target.Target("sm_90", 132, 227 << 10, True, True)
    for rows in range(1, 65):
        first = choose(target, torch.bfloat16, rows, 3072, 2048)
        size = next(c for c in ROW_CLASSES if rows <= c)
        assert first == choose(target, torch.bfloat16, size, 3072, 2048)
    assert choose(target, torch.bfloat16, 65, 3072, 2048) is None
    assert choose(target, torch.float32, 1, 3072, 2048) is None
    assert choose(_target.Target("sm_70", 80, 96 << 10, False, False), torch.bfloat16, 1, 3072, 2048) is None
