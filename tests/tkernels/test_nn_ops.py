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


def test_rope_norms_heads_before_it_rotates(device: torch.device) -> None:
    """QK-norm in the rope kernel equals the norm by itself, then the rotation; with Gemma's offset and a partial rotary."""
    q, k = torch.randn(5, 4, 24, device=device), torch.randn(5, 2, 24, device=device)
    q_weight, k_weight = torch.randn(24, device=device) * 0.1, torch.randn(24, device=device) * 0.1
    angles = torch.rand(9, 8, device=device)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 8, 3, 3, 1], device=device)
    got = tkernels.rope(q, k, positions, table, q_weight=q_weight, k_weight=k_weight, eps=1e-5, weight_offset=1.0)
    normed = (tkernels.rms_norm(q, q_weight, 1e-5, 1.0), tkernels.rms_norm(k, k_weight, 1e-5, 1.0))
    for out, expected in zip(got, tkernels.rope(*normed, positions, table), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    opcheck(torch.ops.tkernels.rope.default, (q, k, positions, table, False, q_weight, k_weight, 1e-5, 1.0))


def test_rope_and_cache_takes_the_offset(device: torch.device) -> None:
    q, k, v = torch.randn(3, 4, 16, device=device), torch.randn(3, 2, 16, device=device), torch.randn(3, 2, 16, device=device)
    weight = torch.randn(16, device=device) * 0.1
    table = torch.cat([torch.ones(4, 8, device=device), torch.zeros(4, 8, device=device)], -1)  # no rotation
    caches = torch.zeros(2, 2, 4, 2, 16, device=device)
    out = tkernels.rope_and_cache(
        q, k, v, torch.arange(3, device=device), table, caches[0], caches[1], torch.tensor([0, 5, -1], device=device),
        q_weight=weight, k_weight=weight, eps=1e-5, weight_offset=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, tkernels.rms_norm(q, weight, 1e-5, 1.0))
    torch.testing.assert_close(caches[0, 1, 1], tkernels.rms_norm(k, weight, 1e-5, 1.0)[1])
    assert caches[0].count_nonzero() == 2 * 2 * 16
