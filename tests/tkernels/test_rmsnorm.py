"""rms_norm and add_rms_norm against fp64: odd widths, strides per tensor, magnitudes, offsets past 2**31, errors."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_as_exact_as_reference, column_slice

import tkernels
from tkernels.rmsnorm import add_rms_norm_ref, rms_norm_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 3, 7, 17, 352, 1000, 1368, 4095]


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6) -> None:
    assert_as_exact_as_reference(tkernels.rms_norm(x, weight, eps), rms_norm_ref, x, weight, eps)
    if residual is not None:
        y, total = tkernels.add_rms_norm(x, residual, weight, eps)
        exact_total = (x.double() + residual.double()).to(x.dtype)
        torch.testing.assert_close(total, exact_total, rtol=0, atol=0)  # rounded once, before the norm
        assert_as_exact_as_reference(y, rms_norm_ref, total, weight, eps)
        assert torch.equal(total, add_rms_norm_ref(x, residual, weight, eps)[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_b108_odd_widths(width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        x, residual = (column_slice(torch.randn(3, width, device=device).to(dtype)) for _ in "xr")
        _check(x, torch.randn(width, device=device).to(dtype), residual)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33])
def test_row_counts_around_the_tile(rows: int, device: torch.device) -> None:
    """Width 64 packs 16 rows into a program."""
    _check(torch.randn(rows, 64, device=device), torch.randn(64, device=device), torch.randn(rows, 64, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_b110_each_tensor_has_its_own_strides(dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randn(24, device=device).to(dtype)
    wide = torch.randn(2, 5, 100, device=device).to(dtype)
    x = wide[:, 1:4, 3:27]  # the sliced middle dimension does not fold
    residual = torch.randn(24, 2, 3, device=device).to(dtype).permute(1, 2, 0).contiguous()[:, :, :]
    _check(x, weight, residual)
    _check(residual, weight, x)
    _check(wide[:, :, 70:94], weight, wide[:, :, 3:27])
    _check(x.transpose(0, 1), weight, residual.transpose(0, 1))
    assert tkernels.rms_norm(x, weight).is_contiguous()


def test_b110_nothing_is_written_outside_the_outputs(device: torch.device) -> None:
    wide = torch.full((4, 100), float("nan"), device=device)
    wide[:, 3:27] = torch.randn(4, 24, device=device)
    before = wide.clone()
    _, total = tkernels.add_rms_norm(wide[:, 3:27], wide[:, 3:27], torch.ones(24, device=device))
    torch.testing.assert_close(wide, before, rtol=0, atol=0, equal_nan=True)
    assert bool(total.isfinite().all())


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e-4])
def test_b111_rounding_order_and_magnitudes(magnitude: float, device: torch.device) -> None:
    """One rounding, after the weight: rows of very different size, and a Gemma weight 1 + 1/512 that bf16 cannot hold."""
    for dtype in DTYPES:
        x = (
            (torch.randn(4, 512, device=device) * torch.tensor([1.0, 1e-3, 1e3, 1.0], device=device)[:, None] * magnitude)
            .clamp(-6e4, 6e4)
            .to(dtype)
        )
        _check(x, 1 + torch.full((512,), 1 / 512, device=device))
        _check(x, torch.randn(512, device=device).bfloat16())


def test_sum_is_normalised_as_rounded(device: torch.device) -> None:
    """The fused op equals the two ops in a row, bit for bit."""
    x, residual, weight = (
        torch.randn(5, 96, device=device).half(),
        torch.randn(5, 96, device=device).half(),
        torch.randn(96, device=device),
    )
    y, total = tkernels.add_rms_norm(x, residual, weight)
    assert torch.equal(y, tkernels.rms_norm(total, weight))


def test_rows_do_not_depend_on_the_batch(device: torch.device) -> None:
    x, weight = torch.randn(40, 128, device=device), torch.randn(128, device=device)
    y = tkernels.rms_norm(x, weight)
    for rows in (1, 3, 17):
        assert torch.equal(tkernels.rms_norm(x[:rows], weight), y[:rows])


def test_zero_rows_stay_zero_and_nan_stays_in_its_row(device: torch.device) -> None:
    x = torch.randn(4, 64, device=device)
    x[1], x[2, 5] = 0, float("nan")
    y = tkernels.rms_norm(x, torch.ones(64, device=device))
    assert y[1].abs().max() == 0
    assert bool(y[2].isnan().all()) and bool(y[[0, 1, 3]].isfinite().all())


def test_one_dimension_and_scalars(device: torch.device) -> None:
    _check(torch.randn(24, device=device), torch.randn(24, device=device))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        tkernels.rms_norm(torch.tensor(1.0, device=device), torch.ones(1, device=device))


def test_errors_name_the_argument(device: torch.device) -> None:
    x, weight = torch.randn(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"weight: expected \[8\] like x's last dimension, got \[4\]"):
        tkernels.rms_norm(x, weight[:4])
    with pytest.raises(TypeError, match=r"x: expected float16, bfloat16 or float32, got .* int64"):
        tkernels.rms_norm(x.long(), weight)
    with pytest.raises(ValueError, match=r"residual: expected \[2, 8\] like x"):
        tkernels.add_rms_norm(x, x[:1], weight)
    with pytest.raises(TypeError, match="residual: expected float32 like x"):
        tkernels.add_rms_norm(x, x.half(), weight)
    with pytest.raises(ValueError, match="x: expected last stride 1"):
        tkernels.rms_norm(torch.randn(8, 8, device=device).t(), weight)
    with pytest.raises(ValueError, match="do not fold into rows"):
        tkernels.rms_norm(torch.randn(4, 4, 4, 8, device=device)[:, ::2, ::2].transpose(0, 2)[:, :, :, :], weight)
    with pytest.raises(ValueError, match="x: expected a last dimension of 1 to"):
        tkernels.rms_norm(x[:, :0], weight[:0])


@pytest.mark.slow
def test_compiled_by_inductor(device: torch.device) -> None:
    x, residual, weight = torch.randn(3, 24, device=device), torch.randn(3, 24, device=device), torch.randn(24, device=device)

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, total = torch.ops.tkernels.add_rms_norm(x * 2, residual, weight, 1e-6)
        return y + total

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(step, fullgraph=True)(x, residual), step(x, residual))


def test_b101_row_stride_past_32_bits(device: torch.device) -> None:
    """Three rows 2**30 elements apart: row 2 starts at 2**31. Memory that is never touched is never allocated on the CPU."""
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    x = base.as_strided((3, 32), (2**30, 1))
    x.copy_(torch.randn(3, 32, device=device))
    weight = torch.ones(32, device=device)
    assert torch.equal(tkernels.rms_norm(x, weight), tkernels.rms_norm(x.contiguous(), weight))
    assert torch.equal(tkernels.add_rms_norm(x, x, weight)[0], tkernels.add_rms_norm(x.contiguous(), x.contiguous(), weight)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 1024, 4096])
def test_b100_more_than_2_31_elements(width: int, device: torch.device) -> None:
    """Every variant of the launcher: many rows a program, one row a program; the last rows lie past 2**31 elements."""
    rows = 2**31 // width + 5
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    x[-3:] = torch.randn(3, width, device=device).bfloat16()
    weight = torch.ones(width, device=device)
    y = tkernels.rms_norm(x, weight)
    assert torch.equal(y[-3:], tkernels.rms_norm(x[-3:], weight))
    assert not bool(y[:-3].any())
