"""e4m3 quantisation and the ops that give e4m3 straight away, against their oracles; layer_norm, embedding and embedding_rms_norm.

Codes may be one apart from the reference's where its fp32 arithmetic lands on the other side of a tie, and then rarely.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FP8, assert_as_exact_as_reference, column_slice

import tkernels
from tkernels.embedding import embedding_ref, embedding_rms_norm_ref
from tkernels.fp8 import (
    add_rms_norm_fp8_dynamic_ref,
    add_rms_norm_fp8_ref,
    rms_norm_fp8_dynamic_ref,
    rms_norm_fp8_ref,
    silu_and_mul_fp8_dynamic_ref,
    silu_and_mul_fp8_ref,
)
from tkernels.layernorm import layer_norm_ref
from tkernels.quant import MIN_AMAX, quantize_fp8_dynamic_ref, quantize_fp8_ref

INF = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 3, 7, 16, 17, 352, 1000, 1368, 4095]


def _codes(x: torch.Tensor) -> torch.Tensor:
    """e4m3 as integers in the order of their values; NaN as 1000."""
    bits = x.view(torch.uint8).int()
    return torch.where(x.float().isnan(), 1000, torch.where(bits >= 128, 128 - bits, bits))


def _assert_same(got: Any, want: Any, exact: bool = False) -> None:
    for g, w in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and g.is_contiguous()
        if g.dtype == FP8:
            apart = (_codes(g) - _codes(w)).abs()
            assert apart.max() <= (0 if exact else 1)
            assert (apart > 0).float().mean() < 0.01
        else:
            torch.testing.assert_close(g, w, rtol=0 if exact else 1e-6, atol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_b108_quantise_any_width(width: int, device: torch.device) -> None:
    scale = torch.tensor([0.3], device=device)
    for dtype in DTYPES:
        x = column_slice((torch.randn(3, width, device=device) * torch.tensor([[1.0], [1e-3], [1e2]], device=device)).to(dtype))
        _assert_same(tkernels.quantize_fp8(x, scale), quantize_fp8_ref(x, scale), exact=True)
        _assert_same(tkernels.quantize_fp8_per_token(x), quantize_fp8_dynamic_ref(x, 0), exact=True)
        for block in (16, 128):
            _assert_same(tkernels.quantize_fp8_per_block(x, block), quantize_fp8_dynamic_ref(x, block), exact=True)


@pytest.mark.parametrize("function", [tkernels.quantize_fp8, quantize_fp8_ref], ids=["op", "reference"])
def test_b103_static_scale_saturates(function: Any, device: torch.device) -> None:
    x = torch.tensor([[448.0, 449, 464, 465, 480, 1e4, INF, -1e4, -INF, float("nan"), 0.0]], device=device)
    y = function(x, torch.ones(1, device=device)).float()[0]
    assert y[:7].tolist() == [448.0] * 7
    assert y[7:9].tolist() == [-448.0] * 2
    assert bool(y[9].isnan())
    assert y[10] == 0


@pytest.mark.parametrize("block", [0, 16])
def test_zero_rows_have_a_usable_scale(block: int, device: torch.device) -> None:
    x = torch.zeros(2, 32, device=device)
    x[1, 3] = 1e-30  # a scale of amax / 448 would be denormal
    for y, scales in (torch.ops.tkernels.quantize_fp8_dynamic(x, block), quantize_fp8_dynamic_ref(x, block)):
        assert bool((scales == torch.tensor(MIN_AMAX) / 448).all())
        assert not bool(y.float().any())


@pytest.mark.parametrize("block", [0, 16])
def test_infinities_and_nan_do_not_reach_their_neighbours(block: int, device: torch.device) -> None:
    x = torch.ones(1, 32, device=device)
    x[0, 0], x[0, 1], x[0, 2] = INF, float("nan"), -INF
    for y, scales in (torch.ops.tkernels.quantize_fp8_dynamic(x, block), quantize_fp8_dynamic_ref(x, block)):
        torch.testing.assert_close(scales, torch.full_like(scales, 1 / 448))
        assert y.float()[0, 0] == 448 and y.float()[0, 2] == -448
        assert y.float()[0, 1].isnan()
        assert bool((y.float()[0, 3:] == 448).all())


def test_largest_value_of_each_block_becomes_448(device: torch.device) -> None:
    x = torch.randn(4, 300, device=device) * torch.logspace(-3, 3, 4, device=device)[:, None]
    y, scales = tkernels.quantize_fp8_per_block(x)
    assert scales.shape == (4, 3)
    for i, columns in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
        assert bool((y[:, columns].float().abs().amax(-1) == 448).all())
        torch.testing.assert_close(scales[:, i], x[:, columns].abs().amax(-1) / 448)
    back = y.float() * scales.repeat_interleave(128, -1)[:, :300]
    assert ((back - x).abs() <= x.abs() / 16 + scales.repeat_interleave(128, -1)[:, :300] * 2**-10 * 1.01).all()


@pytest.mark.parametrize("width", [1, 7, 64, 352, 1368])
def test_fused_fp8_norms(width: int, device: torch.device) -> None:
    weight, scale = torch.randn(width, device=device), torch.tensor([0.02], device=device)
    for dtype in DTYPES:
        x, residual = (column_slice(torch.randn(5, width, device=device).to(dtype)) for _ in "xr")
        _assert_same(tkernels.rms_norm_fp8(x, weight, scale), rms_norm_fp8_ref(x, weight, scale, 1e-6))
        _assert_same(tkernels.add_rms_norm_fp8(x, residual, weight, scale), add_rms_norm_fp8_ref(x, residual, weight, scale, 1e-6))
        for block in (0, 16, 128):
            _assert_same(tkernels.rms_norm_fp8_dynamic(x, weight, 1e-6, block), rms_norm_fp8_dynamic_ref(x, weight, 1e-6, block))
            got = tkernels.add_rms_norm_fp8_dynamic(x, residual, weight, 1e-6, block)
            _assert_same(got, add_rms_norm_fp8_dynamic_ref(x, residual, weight, 1e-6, block))


@pytest.mark.parametrize("width", [1, 7, 64, 352, 1368, 4104])
def test_fused_fp8_silu(width: int, device: torch.device) -> None:
    scale = torch.tensor([0.02], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x = column_slice((torch.randn(3, 2 * width, device=device) * 3).to(dtype))
        _assert_same(tkernels.silu_and_mul_fp8(x, scale), silu_and_mul_fp8_ref(x, scale))
        for block in (0, 16, 128):
            _assert_same(tkernels.silu_and_mul_fp8_dynamic(x, block), silu_and_mul_fp8_dynamic_ref(x, block))


def test_weight_offset_reaches_the_fp8_norms(device: torch.device) -> None:
    x, weight, scale = torch.randn(2, 64, device=device), torch.randn(64, device=device), torch.tensor([0.1], device=device)
    _assert_same(tkernels.rms_norm_fp8(x, weight, scale, weight_offset=1.0), tkernels.rms_norm_fp8(x, weight + 1, scale))
    _assert_same(tkernels.rms_norm_fp8_dynamic(x, weight, weight_offset=1.0), tkernels.rms_norm_fp8_dynamic(x, weight + 1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: tkernels.quantize_fp8(x, torch.ones(2, device=x.device)), ValueError, r"scale: expected one element, got \[2\]"),
        (
            lambda x: tkernels.quantize_fp8(x, torch.ones(1, device=x.device).half()),
            TypeError,
            "scale: expected float32 for a static scale",
        ),
        (lambda x: tkernels.quantize_fp8_per_block(x, 100), ValueError, "block: expected 16, 32, 64, 128 or 256 columns, .* got 100"),
        (lambda x: tkernels.quantize_fp8_per_block(x, 0), ValueError, "quantize_fp8_per_token scales whole rows"),
        (lambda x: tkernels.rms_norm_fp8_dynamic(x, x[0], block=-1), ValueError, "block: expected"),
        (lambda x: tkernels.silu_and_mul_fp8_dynamic(x[:, :3]), ValueError, "x: expected .* .gate, then up.,"),
    ],
)
def test_errors_name_the_argument(call: Any, error: type[Exception], message: str, device: torch.device) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 8, device=device))


def test_b101_row_stride_past_32_bits(device: torch.device) -> None:
    base = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    x = base.as_strided((3, 32), (2**30, 1))
    x.copy_(torch.randn(3, 32, device=device))
    near, weight = x.contiguous(), torch.ones(32, device=device)
    _assert_same(tkernels.quantize_fp8_per_token(x), tkernels.quantize_fp8_per_token(near), exact=True)
    assert torch.equal(tkernels.layer_norm(x, weight), tkernels.layer_norm(near, weight))
    ids = torch.tensor([2, 0], device=device)
    assert torch.equal(tkernels.embedding_rms_norm(ids, x, weight)[1], near[ids])


# layer_norm


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_of_any_width(width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        x = column_slice(torch.randn(3, width, device=device).to(dtype))
        weight, bias = torch.randn(width, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
        assert_as_exact_as_reference(tkernels.layer_norm(x, weight, bias), layer_norm_ref, x, weight, bias)
        assert_as_exact_as_reference(tkernels.layer_norm(x, weight, None, 1e-3), layer_norm_ref, x, weight, None, 1e-3)


def test_layer_norm_with_a_large_common_offset(device: torch.device) -> None:
    """mean(x²) − mean(x)² would cancel here."""
    x = torch.randn(4, 200, device=device) + 3000
    weight = torch.ones(200, device=device)
    y = tkernels.layer_norm(x, weight)
    exact = torch.nn.functional.layer_norm(x.double(), (200,), eps=1e-5)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-3)  # x itself is rounded at 2.4e-4


def test_layer_norm_equals_torch_and_folds_strides(device: torch.device) -> None:
    wide = torch.randn(2, 5, 100, device=device)
    x, weight, bias = wide[:, 1:4, 3:27], torch.randn(24, device=device), torch.randn(24, device=device)
    torch.testing.assert_close(tkernels.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (24,), weight, bias))
    with pytest.raises(ValueError, match=r"bias: expected \[24\] like x's last dimension, got \[3\]"):
        tkernels.layer_norm(x, weight, bias[:3])


# embedding_rms_norm


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_embedding_gather_and_norm(width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        table = column_slice(torch.randn(11, width, device=device).to(dtype))
        weight = torch.randn(width, device=device).to(dtype)
        ids = torch.tensor([0, 10, 3, 3, 7], device=device)
        y, residual = tkernels.embedding_rms_norm(ids, table, weight)
        assert torch.equal(residual, table[ids])
        assert torch.equal(y, tkernels.rms_norm(table[ids], weight))
        assert_as_exact_as_reference(y, lambda t, w, i=ids: embedding_rms_norm_ref(i, t, w, 1e-6)[0], table, weight)


def test_ids_outside_the_table_give_nan(device: torch.device) -> None:
    ids = torch.tensor([-1, 2, 3, 2**40], device=device)
    for function in (tkernels.embedding_rms_norm, embedding_rms_norm_ref):
        for x in function(ids, torch.randn(3, 8, device=device), torch.ones(8, device=device), 1e-6):
            assert x.isnan().all(1).tolist() == [True, False, True, True]
            assert bool(x[1].isfinite().all())


@pytest.mark.parametrize("width", [1, 7, 64, 1500])
def test_embedding_of_tokens_that_only_the_device_has(width: int, device: torch.device) -> None:
    for dtype in DTYPES:
        table = column_slice(torch.randn(11, width, device=device).to(dtype))
        ids, source = torch.tensor([0, 10, -7, 3, 2**40, 7], device=device), torch.tensor([-1, -5, 1, 0, 2, -1], device=device)
        previous = torch.tensor([4, 99, 99, 9, 99, 6], device=device)[::3]  # [4, 9]
        want = table[torch.tensor([0, 10, 9, 4, 0, 7], device=device)]
        want[4] = float("nan")  # there is no third one
        for function in (tkernels.embedding, embedding_ref):
            torch.testing.assert_close(function(ids, table, source, previous), want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(tkernels.embedding(ids[[0, 1, 3]], table), table[ids[[0, 1, 3]]])
        assert tkernels.embedding(ids, table, source, previous[:0]).isnan().all(1).tolist() == [False, False, True, True, True, False]


def test_embedding_of_ids_outside_the_table_is_nan(device: torch.device) -> None:
    ids = torch.tensor([-1, 2, 3, 2**40], device=device)
    for function in (tkernels.embedding, embedding_ref):
        x = function(ids, torch.randn(3, 8, device=device))
        assert x.isnan().all(1).tolist() == [True, False, True, True]
        assert function(ids, torch.randn(0, 8, device=device)).isnan().all()


def test_embedding_wants_both_source_and_previous(device: torch.device) -> None:
    ids, table = torch.arange(2, device=device), torch.randn(3, 8, device=device)
    with pytest.raises(ValueError, match="source, previous: expected both or neither"):
        tkernels.embedding(ids, table, ids)
    with pytest.raises(ValueError, match=r"source: expected \[2\] like ids, got \[1\]"):
        tkernels.embedding(ids, table, ids[:1], ids)
    with pytest.raises(TypeError, match="previous: expected int64 token ids"):
        tkernels.embedding(ids, table, ids, ids.int())
    with pytest.raises(ValueError, match=r"previous: expected \[any\], got \[1, 2\]"):
        tkernels.embedding(ids, table, ids, ids[None])


def test_embedding_errors_name_the_argument(device: torch.device) -> None:
    ids, table, weight = torch.arange(2, device=device), torch.randn(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(TypeError, match="ids: expected int64 indices"):
        tkernels.embedding_rms_norm(ids.int(), table, weight)
    with pytest.raises(ValueError, match=r"ids: expected \[tokens\], got \[1, 2\]"):
        tkernels.embedding_rms_norm(ids[None], table, weight)
    with pytest.raises(ValueError, match=r"table: expected \[vocab, hidden\]"):
        tkernels.embedding_rms_norm(ids, table[0], weight)
    with pytest.raises(ValueError, match=r"weight: expected \[8\] like table's last dimension"):
        tkernels.embedding_rms_norm(ids, table, weight[:4])
