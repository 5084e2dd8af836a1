"""Gated activations against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_as_exact_as_reference, column_slice

import tkernels
from tkernels.activation import gelu_and_mul_ref, silu_and_mul_ref, silu_mul_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("width", [1, 3, 7, 17, 352, 1000, 1368, 4095, 4104])
def test_b113_odd_widths(width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        x = column_slice(torch.randn(3, 2 * width, device=device).to(dtype) * 3)
        assert_as_exact_as_reference(tkernels.silu_and_mul(x), silu_and_mul_ref, x)
        gate, up = x.chunk(2, -1)
        assert_as_exact_as_reference(tkernels.silu_mul(gate, up), silu_mul_ref, gate, up)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(approximate: str, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(5, 2 * 100, device=device) * 4).to(dtype)
    assert_as_exact_as_reference(tkernels.gelu_and_mul(x, approximate), gelu_and_mul_ref, x, approximate)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33])
def test_row_counts_around_the_tile(rows: int, device: torch.device) -> None:
    """Width 64 packs 32 rows into a program."""
    x = torch.randn(rows, 128, device=device)
    assert_as_exact_as_reference(tkernels.silu_and_mul(x), silu_and_mul_ref, x)


def test_gate_and_up_have_their_own_strides(device: torch.device) -> None:
    wide = torch.randn(2, 5, 100, device=device)
    gate, up = wide[:, 1:4, 3:27], torch.randn(3, 2, 24, device=device).transpose(0, 1)
    assert_as_exact_as_reference(tkernels.silu_mul(gate, up), silu_mul_ref, gate, up)
    assert_as_exact_as_reference(tkernels.silu_mul(up, gate), silu_mul_ref, up, gate)
    assert tkernels.silu_mul(up, gate).is_contiguous()


def test_extremes(device: torch.device) -> None:
    """Large negative gates give −0, not NaN, though exp overflows; infinities and NaN do as torch does."""
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, float("inf"), -float("inf"), float("nan")]], device=device)
    up = torch.ones_like(gate)
    got, want = tkernels.silu_mul(gate, up), silu_mul_ref(gate, up)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-36, equal_nan=True)


def test_zero_width_and_zero_rows(device: torch.device) -> None:
    for shape, want in (((0, 8), (0, 4)), ((3, 0), (3, 0)), ((2, 0, 8), (2, 0, 4))):
        assert tkernels.silu_and_mul(torch.empty(shape, device=device)).shape == want


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: tkernels.silu_and_mul(x[:, :5]), ValueError, r"x: expected \[\.\.\., 2 · width\] \(gate, then up\), got \[4, 5\]"),
        (lambda x: tkernels.gelu_and_mul(x, "erf"), ValueError, 'approximate: expected "tanh" or "none", got \'erf\''),
        (lambda x: tkernels.silu_mul(x, x[:, :4]), ValueError, r"up: expected \[4, 8\] like gate, got \[4, 4\]"),
        (lambda x: tkernels.silu_mul(x, x.half()), TypeError, "up: expected float32 like gate"),
        (lambda x: tkernels.silu_and_mul(x.int()), TypeError, "x: expected float16, bfloat16 or float32"),
        (lambda x: tkernels.silu_and_mul(x.t()), ValueError, "x: expected last stride 1"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], message: str, device: torch.device) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(4, 8, device=device))


def test_b101_row_stride_past_32_bits(device: torch.device) -> None:
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    x = base.as_strided((3, 32), (2**30, 1))
    x.copy_(torch.randn(3, 32, device=device))
    assert torch.equal(tkernels.silu_and_mul(x), tkernels.silu_and_mul(x.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4, 4096])
def test_b100_more_than_2_31_elements(width: int, device: torch.device) -> None:
    rows = 2**31 // width + 5
    x = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device=device)
    x[-3:] = torch.randn(3, 2 * width, device=device).bfloat16()
    y = tkernels.silu_and_mul(x)
    assert torch.equal(y[-3:], tkernels.silu_and_mul(x[-3:]))
    assert not bool(y[:-3].any())
