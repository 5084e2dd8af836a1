"""Comparison with fp64, with tolerances derived from data: twice the error that the reference itself makes at that precision.

``assert_as_exact_as_reference(actual, reference, *inputs)`` runs the reference in fp64 (the oracle) and at the inputs' own
precision (what plain PyTorch would give). Errors are taken relative to each row's largest exact value, so that a row of small
numbers cannot hide behind a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FP8 = torch.float8_e4m3fn


def to_double(value: Any) -> Any:
    """A tensor of floats in fp64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _floor(dtype: torch.dtype) -> float:
    """What is always granted: one unit in the last place, and the few roundings of fp32 arithmetic."""
    return max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)


def row_error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The largest error of each row, relative to the row's largest exact value; shape [...] without the last dimension."""
    exact = exact.double()
    scale = exact.abs().amax(-1).clamp_min(1e-30)
    return (actual.double() - exact).abs().amax(-1) / scale


def assert_close_to_exact(actual: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor) -> None:
    """actual errs at most twice as much as reference, both against exact, or than `_floor`."""
    assert actual.shape == reference.shape == exact.shape, (actual.shape, reference.shape, exact.shape)
    assert actual.dtype == reference.dtype, (actual.dtype, reference.dtype)
    if not actual.numel():
        return
    torch.testing.assert_close(actual.isnan(), exact.isnan(), msg="NaN in other places than the oracle's")
    where = exact.isfinite() & reference.isfinite()
    torch.testing.assert_close(
        torch.where(where, 0, actual.double()), torch.where(where, 0, reference.double()), rtol=0, atol=0, equal_nan=True
    )
    clean = [torch.where(where, x.double(), 0.0) for x in (actual, exact, reference)]
    error, allowed = row_error(clean[0], clean[1]).max().item(), row_error(clean[2], clean[1]).max().item()
    allowed = max(2 * allowed, _floor(actual.dtype))
    assert error <= allowed, f"largest row error {error:.3e}, allowed {allowed:.3e}"


def assert_as_exact_as_reference(actual: Any, reference: Callable[..., Any], *inputs: Any, **kwargs: Any) -> None:
    exact = reference(*map(to_double, inputs), **{k: to_double(v) for k, v in kwargs.items()})
    low = reference(*inputs, **kwargs)
    for got, want, near in zip(_tuple(actual), _tuple(exact), _tuple(low), strict=True):
        assert_close_to_exact(got, want, near)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def column_slice(x: torch.Tensor, left: int = 3, right: int = 5) -> torch.Tensor:
    """x as a slice of a wider tensor whose other columns are NaN: a kernel that takes the wrong stride or tail shows it."""
    wide = torch.full((*x.shape[:-1], left + x.shape[-1] + right), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., left : left + x.shape[-1]] = x
    return wide[..., left : left + x.shape[-1]]


def storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
