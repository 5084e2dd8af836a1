"""The drop-in modules against what they replace: values, attributes, state_dict, dtypes, views, torch.compile, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tkernels
import tkernels.nn as tk
from tkernels._op import reference_ops


@pytest.fixture(params=["kernels", "references"], autouse=True)
def _ops(request: pytest.FixtureRequest):
    if request.param == "references" and not torch.cuda.is_available():
        with reference_ops():
            yield request.param
    elif request.param == "references":
        pytest.skip("a GPU always runs the kernels")
    else:
        yield request.param


PAIRS = {
    "RMSNorm": lambda **kw: (tk.RMSNorm(24, eps=1e-5, **kw), nn.RMSNorm(24, eps=1e-5, **kw)),
    "RMSNorm, eps=None": lambda **kw: (tk.RMSNorm(24, **kw), nn.RMSNorm(24, **kw)),
    "RMSNorm without weight": lambda **kw: (
        tk.RMSNorm(24, elementwise_affine=False, **kw),
        nn.RMSNorm(24, elementwise_affine=False, **kw),
    ),
    "RMSNorm over two dimensions": lambda **kw: (tk.RMSNorm((3, 8), **kw), nn.RMSNorm((3, 8), **kw)),
    "LayerNorm": lambda **kw: (tk.LayerNorm(24, eps=1e-6, **kw), nn.LayerNorm(24, eps=1e-6, **kw)),
    "LayerNorm over two dimensions, no bias": lambda **kw: (tk.LayerNorm((3, 8), bias=False, **kw), nn.LayerNorm((3, 8), bias=False, **kw)),
    "LayerNorm without weight": lambda **kw: (
        tk.LayerNorm(24, elementwise_affine=False, **kw),
        nn.LayerNorm(24, elementwise_affine=False, **kw),
    ),
    "Linear": lambda **kw: (tk.Linear(24, 7, **kw), nn.Linear(24, 7, **kw)),
    "Linear without bias": lambda **kw: (tk.Linear(24, 7, bias=False, **kw), nn.Linear(24, 7, bias=False, **kw)),
}


def _randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRS)
def test_module_equals_what_it_replaces(device: torch.device, name: str, dtype: torch.dtype) -> None:
    mine, theirs = PAIRS[name](device=device, dtype=dtype)
    assert isinstance(mine, type(theirs))
    assert repr(mine) == repr(theirs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    _randomise(theirs)
    mine.load_state_dict(theirs.state_dict())
    shape = (2, 5, *theirs.normalized_shape) if hasattr(theirs, "normalized_shape") else (2, 5, 24)
    x = torch.randn(shape, device=device, dtype=dtype) * 1e-3  # small, so that eps matters
    with torch.no_grad():
        y, reference = mine(x), copy.deepcopy(theirs).float()(x.float()).double()  # not fp64: eps=None follows the dtype
    assert y.dtype == theirs(x).dtype and y.shape == theirs(x).shape
    ulp = 2**-8 if dtype == torch.bfloat16 else 3e-6
    assert torch.all((y.double() - reference).abs() <= ulp * reference.abs() + ulp * reference.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", [(tk.LlamaRMSNorm, LlamaRMSNorm), (tk.GemmaRMSNorm, Gemma3RMSNorm)], ids=["llama", "gemma"])
def test_transformers_norms(device: torch.device, pair: tuple[type, type], dtype: torch.dtype) -> None:
    mine, theirs = (kind(32, eps=1e-3).to(device) for kind in pair)
    assert repr(mine).split("(", 1)[1] == repr(theirs).split("(", 1)[1]
    theirs.weight.data += 0.01 * torch.randn_like(theirs.weight)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 32, device=device)
    reference = theirs.double()(x.to(dtype).double()) if pair[1] is LlamaRMSNorm else theirs(x.to(dtype).float()).double()
    theirs.float()
    for kept in (torch.float32, dtype):  # weights in fp32 under bf16 activations are usual
        mine.to(kept), theirs.to(kept)
        y = mine(x.to(dtype))
        assert y.dtype == theirs(x.to(dtype)).dtype
        tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-5
        assert torch.all((y.double() - reference).abs() <= tolerance * reference.abs() + 1e-5)


def test_fp32_weight_on_bf16_input_gives_torchs_dtype(device: torch.device) -> None:
    norm = tk.RMSNorm(16, device=device)
    assert norm(torch.randn(2, 16, device=device, dtype=torch.bfloat16)).dtype == torch.bfloat16  # torch.nn.RMSNorm: bf16 too


def test_any_view_is_taken(device: torch.device) -> None:
    wide = torch.randn(3, 4, 5, 48, device=device)
    views = [wide[..., 8:24], wide.transpose(0, 2)[..., ::3], wide.permute(3, 0, 1, 2)[:16].permute(1, 2, 3, 0), wide[:0, ..., :16]]
    norm, reference = tk.RMSNorm(16, eps=1e-6, device=device), nn.RMSNorm(16, eps=1e-6, device=device)
    for x in views:
        torch.testing.assert_close(norm(x), reference(x), rtol=1e-5, atol=1e-6)
    gate_up = wide.transpose(0, 2)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(tk.SiluAndMul()(gate_up), nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)
    for approximate in ("none", "tanh"):
        expected = nn.GELU(approximate)(gate) * up
        torch.testing.assert_close(tk.GeluAndMul(approximate)(gate_up), expected, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"x: expected \[..., 3, 8\], got \[2, 8, 3\]"):
        tk.RMSNorm((3, 8), device=device)(torch.randn(2, 8, 3, device=device))
    with pytest.raises(TypeError, match="x: expected float16, bfloat16 or float32"):
        tk.RMSNorm(8, device=device, dtype=torch.float64)(torch.randn(2, 8, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match='approximate: expected "none" or "tanh", got \'erf\''):
        tk.GeluAndMul("erf")
    with pytest.raises(ValueError, match="num_heads: expected a multiple of num_kv_heads = 3, got 8"):
        tk.PagedAttention(8, 64, 3)
    with pytest.raises(ValueError, match="dim: expected an even number of rotated elements, got 7"):
        tk.RotaryEmbedding(7)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])
def test_backward_raises_instead_of_giving_no_gradient(device: torch.device, name: str) -> None:
    module, _ = PAIRS[name](device=device)
    y = module(torch.randn(2, 24, device=device))
    with pytest.raises(NotImplementedError, match="is inference-only and has no backward"):
        y.sum().backward()


def test_autocast_keeps_torchs_casting(device: torch.device) -> None:
    mine, theirs = PAIRS["Linear"](device=device)
    x = torch.randn(2, 24, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert mine(x).dtype == theirs(x).dtype == torch.bfloat16


def _rotation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions = torch.tensor([[0, 3, 40], [7, 7, 2]], device=device)
    return torch.randn(2, 3, 4, 16, device=device), torch.randn(2, 3, 2, 16, device=device), positions


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_by_position_times_frequency(device: torch.device, interleaved: bool) -> None:
    module = tk.RotaryEmbedding(8, 64, base=100.0, interleaved=interleaved, device=device)
    q, k, positions = _rotation(device)
    angle = positions[..., None, None].double() * 100.0 ** (-torch.arange(0, 8, 2, device=device).double() / 8)
    for x, y in zip((q, k), module(q, k, positions), strict=True):
        turned = x.double().clone()
        first, second = (turned[..., 0:8:2], turned[..., 1:8:2]) if interleaved else (turned[..., :4], turned[..., 4:8])
        rotated = torch.polar(torch.ones_like(angle), angle) * torch.complex(first, second)
        first.copy_(rotated.real)
        second.copy_(rotated.imag)
        torch.testing.assert_close(y.double(), turned, rtol=1e-5, atol=1e-6)


def test_rotary_table_stays_in_fp32(device: torch.device) -> None:
    module = tk.RotaryEmbedding(8, 64, device=device)
    table = module.cos_sin.clone()
    module.to(torch.bfloat16)
    assert module.cos_sin.dtype == torch.float32 and torch.equal(module.cos_sin, table)
    assert not module.state_dict()


def test_paged_attention_module_equals_the_function(device: torch.device) -> None:
    module = tk.PagedAttention(4, 16, 2, window=3, softcap=5.0, sinks=True, device=device)
    assert repr(module) == "PagedAttention(4, 16, num_kv_heads=2, window=3, softcap=5.0)"
    assert list(module.state_dict()) == ["sinks"]
    module.sinks.data.normal_()
    caches = torch.randn(2, 4, 4, 2, 16, device=device)
    q = torch.randn(3, 4 * 16, device=device)
    step = (
        torch.tensor([[2, 1], [3, 0]], dtype=torch.int32, device=device),
        torch.tensor([6, 4], dtype=torch.int32, device=device),
        torch.tensor([0, 1, 3], dtype=torch.int32, device=device),
    )
    with torch.no_grad():
        out = module(q, caches[0], caches[1], *step, 2)
    expected = tkernels.paged_attention(
        q.view(3, 4, 16), caches[0], caches[1], *step, scale=0.25, max_query_len=2, window=3, softcap=5.0, sinks=module.sinks
    )  # fmt: skip
    assert out.shape == q.shape
    torch.testing.assert_close(out, expected.flatten(1), rtol=0, atol=0)


def test_paged_attention_module_gives_bf16_for_fp8_queries(device: torch.device) -> None:
    module = tk.PagedAttention(4, 16, 2, device=device)
    q, caches = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((2, 4 * 16), (2, 2, 4, 2, 16)))
    step = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[1], [0]], [4, 2], [0, 1, 2])]
    out = module(q, caches[0], caches[1], *step, 1, v_scale=0.5)
    expected = tkernels.paged_attention(q.view(2, 4, 16), caches[0], caches[1], *step, scale=0.25, max_query_len=1, v_scale=0.5)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected.flatten(1))


def test_paged_attention_module_refuses_other_heads(device: torch.device) -> None:
    """A wider q could be cut into heads of more tokens, and a cache of more KV heads into other groups: both gave other numbers."""
    module, caches = tk.PagedAttention(4, 16, 2, device=device), torch.randn(2, 4, 4, 2, 16, device=device)
    step = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[1]], [3], [0, 1])]
    for shape in ((1, 128), (1, 2, 16), (1, 4, 32)):
        with pytest.raises(ValueError, match=r"q: expected \[tokens, 4, 16\] or \[tokens, 64\], got"):
            module(torch.randn(shape, device=device), caches[0], caches[1], *step, 1)
    with pytest.raises(ValueError, match="k_cache: expected num_kv_heads = 2 in dimension 2"):
        module(torch.randn(1, 64, device=device), *torch.randn(2, 4, 4, 4, 16, device=device), *step, 1)


@pytest.mark.parametrize("name", PAIRS)
def test_shapes_are_found_on_the_meta_device(name: str) -> None:
    """As by torch's own modules: no values, no autocast there."""
    mine, theirs = PAIRS[name](device="meta")
    x = torch.empty((2, 5, *getattr(theirs, "normalized_shape", (24,))), device="meta")
    y = mine(x)
    assert y.device.type == "meta" and y.shape == theirs(x).shape


@pytest.mark.parametrize("name", [name for name in PAIRS if "without weight" in name])
def test_made_on_meta_and_loaded_norms_have_their_weight_of_ones(name: str, device: torch.device) -> None:
    module, reference = PAIRS[name](device="meta")
    with torch.no_grad():
        filled = module.to_empty(device=device)
        filled._apply(lambda x: torch.full_like(x, 7.0))  # memory as it may be found
    x = torch.randn(3, 24, device=device)
    torch.testing.assert_close(filled(x), reference.to_empty(device=device)(x))


def test_a_rotation_made_on_meta_has_its_table(device: torch.device) -> None:
    want = tk.RotaryEmbedding(8, 64, base=100.0, attention_scaling=0.5, device=device).cos_sin
    module = tk.RotaryEmbedding(8, 64, base=100.0, attention_scaling=0.5, device="meta").to_empty(device=device)
    assert torch.equal(module.cos_sin, want)
    assert torch.equal(module.to_empty(device=device).cos_sin, want), "one that was on a device already"
    unknown = tk.RotaryEmbedding(8, 64, inv_freq=torch.ones(4, device="meta")).to_empty(device=device)
    assert unknown.cos_sin.isnan().all(), "its frequencies had no values"
    assert tk.RotaryEmbedding(8, 64, device="meta").half().cos_sin.dtype == torch.float32, "also before it has values"


class _Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer_norm = tk.LayerNorm(32, device=device)
        self.norm, self.gemma = tk.RMSNorm(32, device=device), tk.GemmaRMSNorm(32).to(device)
        self.proj, self.act, self.gelu = tk.Linear(32, 64, device=device), tk.SiluAndMul(), tk.GeluAndMul("tanh")
        self.rotary = tk.RotaryEmbedding(8, 64, device=device)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        h = self.act(self.proj(self.norm(self.layer_norm(x)))) + self.gelu(self.proj(self.gemma(x)))
        heads = h.unflatten(-1, (4, 8))
        q, k = self.rotary(heads, heads, positions)
        return (q + k).flatten(-2)


def test_modules_compile_into_one_graph(device: torch.device, _ops: str) -> None:
    if _ops == "kernels" and device.type == "cpu":
        pytest.skip("Dynamo traces the same equations in both cases")
    block = _Block(device).requires_grad_(False)
    x, positions = torch.randn(2, 3, 32, device=device), torch.randint(0, 64, (2, 3), device=device)
    compiled = torch.compile(block, backend="inductor" if device.type == "cuda" else "aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 1):
        torch.testing.assert_close(compiled(x[:rows], positions[:rows]), block(x[:rows], positions[:rows]), rtol=1e-5, atol=1e-5)
