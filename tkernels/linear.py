"""Linear layers for few rows: kernels that stream the weights once, with what stands before and after a projection fused in.

    y = act(norm(x) · weightᵀ + bias) + residual

norm is an RMSNorm or nothing, act is silu(gate) · up over the two halves of the outputs or nothing. With 1 to 64 rows a
projection is bound by reading its weights, and between two of them the launches of norms and activations cost more than their
work. Three kernels stream weights: for the CUDA cores, for tensor cores through shared memory or past it, and on Hopper by TMA. Which, with
which tile, or cuBLAS after all, is read from a table measured on the device (``tables/linear_<arch>.json``, made by
``python -m tkernels tune``). What the table does not hold is composed from cuBLAS and the single ops, so the answer never depends on a
guess.

The projection and the activation are rounded to x's dtype as in the composition. A fused norm multiplies x by its weight first and
scales the sums afterwards, so the normalised x itself is never rounded; in fp16 only where that product is kept in fp32, since it may
overflow. The order of summation depends on the shape and the number of rows alone, so a call repeats bit for bit.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from tkernels import _checks, _linear_tma, _repeats
from tkernels._linear_kernels import Tile, launch, row_class
from tkernels._op import define
from tkernels._target import Target, target_of
from tkernels.activation import silu_and_mul, silu_and_mul_ref
from tkernels.rmsnorm import normalise, rms_norm_ref

MAX_ROWS = 64  # more rows than this are never in the table: cuBLAS has reached its stride by then


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The oracle: the single steps one after another."""
    y = F.linear(x if norm_weight is None else rms_norm_ref(x, norm_weight, eps), weight, bias)
    y = silu_and_mul_ref(y) if gated else y
    return y if residual is None else y + residual  # y first: its strides are the result's


@functools.cache
def table_of(arch: str) -> dict[tuple[str, int, int, int], Tile | None]:
    """(variant, row class, out_features, in_features) → tile. What the composition wins has no entry, or None."""
    path = Path(__file__).parent / "tables" / f"linear_{arch}.json"
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {(e["variant"], e["rows"], e["n"], e["k"]): Tile(**e["tile"]) if e["tile"] else None for e in entries}


def choose(target: Target, dtype: torch.dtype, variant: str, rows: int, n: int, k: int) -> Tile | None:
    """The tile for a call, or None: a function of the device, the dtype and the shape only.

    variant: "plain", "residual" (added at the end), "norm", "gated" or "norm+gated"; with a rotation "rope" or "norm+rope". With a residual
    or a rotation the tile is that of what is without it, where it was not measured itself or its tile cannot run here. n: rows of the
    weight.
    """
    if rows > MAX_ROWS or dtype not in (torch.bfloat16, torch.float16):
        return None
    table, shape = table_of(target.arch), (row_class(rows), n, k)
    tile = table.get((variant, *shape))
    absent = tile is not None and tile.kind == "tma" and _linear_tma.absence(target.arch) is not None
    if ("rope" in variant or variant == "residual") and (absent or (variant, *shape) not in table):
        return choose(target, dtype, "norm" if "norm" in variant else "plain", rows, n, k)
    if absent:
        return None
    if tile is not None and tile.kind != "vector" and dtype == torch.float16 and "norm" in variant:
        return None  # it rounds x · norm_weight before it knows x's scale, and fp16 would overflow where an activation is large
    return tile


def choose_with_norm(target: Target, dtype: torch.dtype, variant: str, normed: bool, rows: int, n: int, k: int) -> tuple[Tile | None, bool]:
    """The tile of ``variant``, and whether the norm of a call that has one is a kernel of its own before it: no tile joins them."""
    if normed:
        joined = choose(target, dtype, {"plain": "norm", "residual": "norm"}.get(variant, f"norm+{variant}"), rows, n, k)
        if joined is not None:
            return joined, False
    return choose(target, dtype, variant, rows, n, k), normed


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> None:
    _checks.check_float("x", x)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out_features, in_features], got {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: expected a last dimension of {weight.shape[1]} like weight's, got {list(x.shape)}")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight: expected an even number of rows (gate, then up) with gated=True, got {list(weight.shape)}")
    _checks.check_dtype("weight", weight, x.dtype, "like x")
    _checks.check_device("weight", weight, x, "x")
    if bias is not None:
        _checks.check_shape("bias", bias, (weight.shape[0],), "like weight's first dimension")
        _checks.check_dtype("bias", bias, x.dtype, "like x")
        _checks.check_device("bias", bias, x, "x")
    if norm_weight is not None:
        _checks.check_shape("norm_weight", norm_weight, (weight.shape[1],), "like x's last dimension")
        _checks.check_float("norm_weight", norm_weight)
        _checks.check_last_stride("norm_weight", norm_weight)
        _checks.check_device("norm_weight", norm_weight, x, "x")
        _checks.rows_of("x", x)
    if residual is not None:
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        _checks.check_shape("residual", residual, (*x.shape[:-1], outputs), "like the output")
        _checks.check_dtype("residual", residual, x.dtype, "like x")
        _checks.check_device("residual", residual, x, "x")


def streamable(*tensors: torch.Tensor | None) -> bool:
    """Rows with last stride 1 that fold to two dimensions without a copy; others go to cuBLAS, which takes any strides."""
    return all(t is None or (t.stride(-1) == 1 and (t.dim() == 2 or t.is_contiguous())) for t in tensors)


_normalise_again = _repeats.repeating(normalise)  # beside cuBLAS, whose calls are not repeated


def streamed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor | None:
    """``linear`` by our kernels alone, unchecked; None where the table or the strides leave it to cuBLAS. For other ops too."""
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    if not 0 < rows <= MAX_ROWS or not streamable(x, weight, bias, residual):
        return None
    variant = "gated" if gated else "plain" if residual is None else "residual"
    tile, norm_apart = choose_with_norm(target_of(x.device), x.dtype, variant, norm_weight is not None, rows, n, k)
    if tile is None or (tile.kind == "tma" and _linear_tma.refusal(tile, weight, x)):
        return None
    if norm_weight is not None and norm_apart:
        x, norm_weight = normalise(x, norm_weight, eps), None
    outputs = n // 2 if gated else n
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    flat = None if residual is None else residual.view(rows, outputs)
    launch(x.view(rows, k), weight, bias, norm_weight, flat, gated, eps, y.view(rows, outputs), tile)
    return y


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    check(x, weight, bias, norm_weight, residual, gated)
    y = streamed(x, weight, bias, norm_weight, residual, gated, eps)
    if y is not None:
        return y
    if norm_weight is not None:
        x = _normalise_again(x, norm_weight, eps)
    if residual is not None and bias is None and not gated and x.dim() == 2:
        return torch.addmm(residual, x, weight.t())  # cuBLAS adds the residual before it rounds
    y = F.linear(x, weight, bias)
    y = silu_and_mul(y) if gated else y
    return y if residual is None else y + residual  # y first: its strides are the result's


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0]), dtype=x.dtype, device=x.device)


_linear_op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, Tensor? residual=None, bool gated=False, "
    "float eps=1e-6) -> Tensor",
    kernel=_linear,
    reference=_checks.checked(check, linear_ref),
    fake=_fake,
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """y = act(norm(x) · weightᵀ + bias) + residual, like ``torch.nn.functional.linear`` with its neighbours fused in.

    x: [..., in_features] fp16, bf16 or fp32. weight: [out_features, in_features], like x. bias: [out_features] or None.
    norm_weight: [in_features]; x is RMS-normalised first, ``eps`` added to its mean square.
    gated: silu(first half of the outputs) · second half; the result has out_features / 2 columns.
    residual: like the result; added last.
    Returns [..., out_features] like x, contiguous; fp32 accumulation, rounded after the projection, the activation and the sum. Where
    cuBLAS computes the product of a two-dimensional x without bias and gate, it adds the residual before it rounds.
    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _linear_op(x, weight, bias, norm_weight, residual, gated, eps)
