"""What the modules and the patcher ask of the ops beside the basic form: an offset of the norm weight, gelu from two tensors."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import tkernels


def test_b111_gemma_offset_is_added_in_fp32(device: torch.device) -> None:
    """1 + 1/512 is 1 in bf16: an offset added there would lose the weight."""
    x = torch.randn(3, 64, device=device, dtype=torch.bfloat16) * 1000
    weight = torch.full((64,), 1 / 512, device=device, dtype=torch.bfloat16)
    y = tkernels.rms_norm(x, weight, 1e-6, weight_offset=1.0)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
    # one rounding to bf16: half a unit in the last place
    assert torch.all((y.double() - expected).abs() <= expected.abs() * 2**-8)
    lost = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    assert not torch.equal(y, lost)


def test_offset_of_the_fused_norm_equals_the_unfused(device: torch.device) -> None:
    x, residual = torch.randn(2, 5, 48, device=device), torch.randn(2, 5, 48, device=device)
    weight = torch.randn(48, device=device)
    y, total = tkernels.add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    torch.testing.assert_close(y, tkernels.rms_norm(total, weight, 1e-5, weight_offset=1.0), rtol=0, atol=0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("width", [1, 352, 1000])
def test_b113_gelu_mul_of_any_width(device: torch.device, width: int, approximate: str) -> None:
    both = torch.randn(3, 2 * width + 2, device=device)
    gate, up = both[:, 1 : 1 + width], both[:, 1 + width : 1 + 2 * width]  # views of one projection, by strides
    expected = torch.nn.functional.gelu(gate.double(), approximate=approximate) * up.double()
    torch.testing.assert_close(tkernels.gelu_mul(gate, up, approximate).double(), expected, rtol=2e-6, atol=2e-6)
    assert tkernels.gelu_mul(gate[:0], up[:0], approximate).shape == (0, width)


def test_gelu_mul_names_the_wrong_argument(device: torch.device) -> None:
    gate = torch.randn(2, 4, device=device)
    with pytest.raises(ValueError, match=r"up: expected \[2, 4\] like gate, got \[2, 3\]"):
        tkernels.gelu_mul(gate, gate[:, :3])
    with pytest.raises(ValueError, match='approximate: expected "tanh" or "none", got \'erf\''):
        tkernels.gelu_mul(gate, gate, "erf")


def test_ops_pass_opcheck(device: torch.device) -> None:
    x, weight = torch.randn(2, 16, device=device), torch.randn(16, device=device)
    opcheck(torch.ops.tkernels.gelu_mul.default, (x, x, "none"))
    opcheck(torch.ops.tkernels.rms_norm.default, (x, weight, 1e-5, 1.0))
    opcheck(torch.ops.tkernels.add_rms_norm.default, (x, x, weight, 1e-5, 1.0))
