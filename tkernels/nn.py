"""Drop-in modules: the constructor, attributes, ``state_dict`` and dtypes of what they replace, with the package's kernels inside.

    torch.nn.RMSNorm, torch.nn.LayerNorm, torch.nn.Linear     RMSNorm, LayerNorm, Linear (subclasses, so isinstance still holds)
    transformers' LlamaRMSNorm (Qwen, Mistral, Phi) / Gemma*  LlamaRMSNorm / GemmaRMSNorm
    act(gate) · up, rotation, attention over pages            SiluAndMul, GeluAndMul, RotaryEmbedding, PagedAttention

Choices that hold for all of them:

- **Inference.** The forward pass runs the kernel whether or not gradients are recorded; a backward pass through it raises
  NotImplementedError with what to do. Train with the module that was replaced.
- **torch.compile.** Norms, activations and rotations are traced as their equations, which Inductor fuses with their neighbours (an
  opaque op would forbid it); linear layers and attention stay ops. Either way one graph, no break.
- **autocast.** torch's own operator runs there, since its casting rules belong to torch.
- A view that a kernel cannot read by strides is made contiguous first, as torch's operators do. A dtype without a kernel
  (fp64, integers) raises TypeError.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tkernels.activation import gelu_and_mul, gelu_and_mul_ref, silu_and_mul, silu_and_mul_ref
from tkernels.attention import paged_attention_out
from tkernels.attention.ref import output_dtype
from tkernels.layernorm import layer_norm, layer_norm_ref
from tkernels.linear import linear
from tkernels.rmsnorm import rms_norm, rms_norm_ref
from tkernels.rope import rope, rope_ref

_FP32_EPS = torch.finfo(torch.float32).eps


def rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy where its strides are more than the kernels take (last stride 1 and two leading dimensions)."""
    return x if x.is_contiguous() or (x.dim() <= 3 and x.stride(-1) == 1) else x.contiguous()


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """``rms_norm``, as its equation under torch.compile."""
    if torch.compiler.is_compiling():
        return rms_norm_ref(x, weight, eps, weight_offset)
    return rms_norm(rows(x), weight, eps, weight_offset)


def _autocast(x: torch.Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # torch has no autocast for meta, and raises


def _last_dimensions(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x with the dimensions ``shape``, its last, flattened into one."""
    if tuple(x.shape[max(x.dim() - len(shape), 0) :]) != tuple(shape):
        raise ValueError(f"x: expected [..., {', '.join(map(str, shape))}], got {list(x.shape)}")
    return x if len(shape) == 1 else x.flatten(-len(shape))


class _WithOnes(nn.Module):
    """A norm that may have a weight of ones in place of its own. It is not in the ``state_dict``, so nothing else would write its values
    after ``to_empty``."""

    _ones: torch.Tensor | None

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        before = self._ones
        super()._apply(fn, recurse)
        if self._ones is not None and self._ones is not before:
            self._ones = torch.ones_like(self._ones)
        return self


class RMSNorm(_WithOnes, nn.RMSNorm):
    """``torch.nn.RMSNorm(normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None)``.

    eps None is fp32's machine epsilon, as in torch for fp32, bf16 and fp16 (which torch normalises in fp32 too).
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        ones = None if elementwise_affine else torch.ones(math.prod(self.normalized_shape), device=device)
        self.register_buffer("_ones", ones, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = _last_dimensions(x, self.normalized_shape)
        if _autocast(x):
            return super().forward(x)
        weight = self._ones if self.weight is None else self.weight.flatten()
        return normalise(flat, weight, _FP32_EPS if self.eps is None else self.eps).view(x.shape)


class LayerNorm(_WithOnes, nn.LayerNorm):
    """``torch.nn.LayerNorm(normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None)``."""

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        ones = None if elementwise_affine else torch.ones(math.prod(self.normalized_shape), device=device)
        self.register_buffer("_ones", ones, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = _last_dimensions(x, self.normalized_shape)
        if _autocast(x):
            return super().forward(x)
        weight = self._ones if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        if torch.compiler.is_compiling():
            return layer_norm_ref(flat, weight, bias, self.eps).view(x.shape)
        return layer_norm(rows(flat), weight, bias, self.eps).view(x.shape)


class LlamaRMSNorm(nn.Module):
    """The RMSNorm of transformers' Llama, Qwen, Mistral and Phi models: ``LlamaRMSNorm(hidden_size, eps=1e-6)``.

    The result has the wider dtype of x and weight, as there. Differs: the weight multiply is in fp32 and rounded once.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return llama_norm(self, hidden_states)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def llama_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of any module with the ``weight`` and ``variance_epsilon`` of a Llama-style RMSNorm."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return normalise(x.to(torch.promote_types(x.dtype, weight.dtype)), weight, module.variance_epsilon)  # type: ignore[arg-type]


class GemmaRMSNorm(nn.Module):
    """The RMSNorm of transformers' Gemma models: ``GemmaRMSNorm(dim, eps=1e-6)``, y = x / rms(x) · (1 + weight), all in fp32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gemma_norm(self, x)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def gemma_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of any module with the ``weight`` and ``eps`` of a Gemma RMSNorm."""
    return normalise(x, module.weight, module.eps, weight_offset=1.0)  # type: ignore[arg-type]


class Linear(nn.Linear):
    """``torch.nn.Linear(in_features, out_features, bias=True, device=None, dtype=None)``: few rows stream the weights once.

    [..., in_features] → [..., out_features]; x and the weight of one dtype, fp16, bf16 or fp32.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _autocast(x):
            return super().forward(x)
        return linear(x, self.weight, self.bias)


class SiluAndMul(nn.Module):
    """y = silu(gate) · up for x = [gate | up], [..., 2 · width] → [..., width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul_ref(x) if torch.compiler.is_compiling() else silu_and_mul(rows(x))


class GeluAndMul(nn.Module):
    """y = gelu(gate) · up for x = [gate | up]; approximate: "none" or "tanh", with ``torch.nn.GELU``'s default."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f'approximate: expected "none" or "tanh", got {approximate!r}')
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return gelu_and_mul_ref(x, self.approximate)
        return gelu_and_mul(rows(x), self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class RotaryEmbedding(nn.Module):
    """Rotation of q and k by their positions, from a table of cos and sin in fp32.

    dim: elements of a head that are rotated, even; heads may be wider (partial rotary). base: of the frequencies base^(-2i/dim).
    inv_freq: [dim / 2] other frequencies (a scaled rope), attention_scaling: factor on cos and sin.
    interleaved: partners are even and odd elements rather than halves. The table is not part of the ``state_dict``.
    """

    cos_sin: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000.0,
        *,
        inv_freq: torch.Tensor | None = None,
        attention_scaling: float = 1.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim: expected an even number of rotated elements, got {dim}")
        if inv_freq is not None and tuple(inv_freq.shape) != (dim // 2,):
            raise ValueError(f"inv_freq: expected [{dim // 2}] (half of dim), got {list(inv_freq.shape)}")
        self.interleaved = interleaved
        self._dim, self._base, self._inv_freq, self._attention_scaling = dim, base, inv_freq, attention_scaling
        self.register_buffer("cos_sin", self._table(max_position_embeddings, device), persistent=False)

    def _table(self, positions: int, device: torch.device | str | None) -> torch.Tensor:
        inv_freq = self._inv_freq
        if inv_freq is None:
            inv_freq = self._base ** (-torch.arange(0, self._dim, 2, dtype=torch.float64, device=device) / self._dim)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64, device=inv_freq.device), inv_freq.double())
        return (torch.cat([angles.cos(), angles.sin()], -1) * self._attention_scaling).float()

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """``.to(bfloat16)`` moves the table but leaves it in fp32: bf16 holds positions only up to 256. After ``to_empty`` it is there
        again, which no ``state_dict`` would bring back; NaN if it was made of frequencies on the meta device."""
        table = self.cos_sin
        super()._apply(fn, recurse)
        moved = self.cos_sin
        if moved is not table:
            is_new = table.is_meta and not moved.is_meta
            table = self._table(len(table), moved.device) if is_new else table
            self.cos_sin = torch.full_like(moved, torch.nan, dtype=torch.float32) if is_new and table.is_meta else table.to(moved.device)
        return self

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [..., heads, head_dim], k [..., kv_heads, head_dim], positions [...] int64 → the two rotated, contiguous."""
        turn = rope_ref if torch.compiler.is_compiling() else rope
        lead = q.shape[:-2]
        q_out, k_out = turn(
            q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]), positions.expand(lead).reshape(-1), self.cos_sin,
            interleaved=self.interleaved,
        )  # fmt: skip
        return q_out.view(q.shape), k_out.view(k.shape)


class PagedAttention(nn.Module):
    """Attention over a paged KV cache, as a module with the settings that a model fixes. Call it after ``rope_and_cache``.

    num_heads, head_dim, num_kv_heads (None: num_heads). scale: None is head_dim^-½. causal, window, softcap: as in ``paged_attention``.
    sinks: whether each head has a learnt sink logit, the parameter ``sinks`` [num_heads].
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {num_heads}")
        self.scale = head_dim**-0.5 if scale is None else scale
        self.causal, self.window, self.softcap = causal, window, softcap
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype), requires_grad=False) if sinks else None

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_query_len: int,
        *,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """q [tokens, num_heads, head_dim] or [tokens, num_heads · head_dim] → the same shape and dtype, bf16 for e4m3 queries. The rest
        as in ``paged_attention``."""
        width = self.num_heads * self.head_dim  # another one could still be cut into heads, of other tokens
        if q.shape[-1] != width and q.shape[-2:] != (self.num_heads, self.head_dim):
            raise ValueError(f"q: expected [tokens, {self.num_heads}, {self.head_dim}] or [tokens, {width}], got {list(q.shape)}")
        if k_cache.dim() == 4 and k_cache.shape[2] != self.num_kv_heads:
            raise ValueError(f"k_cache: expected num_kv_heads = {self.num_kv_heads} in dimension 2, got {list(k_cache.shape)}")
        heads = q.view(-1, self.num_heads, self.head_dim)
        # by the caller of the splitting op: see docs/static-addresses.md
        out = torch.empty(heads.shape, dtype=output_dtype(q.dtype), device=q.device)
        paged_attention_out(
            heads, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=self.scale, max_query_len=max_query_len,
            causal=self.causal, window=self.window, softcap=self.softcap, sinks=self.sinks, k_scale=k_scale, v_scale=v_scale, out=out,
        )  # fmt: skip
        return out.view(q.shape)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        softcap = f", softcap={self.softcap}" if self.softcap else ""
        return f"{self.num_heads}, {self.head_dim}, num_kv_heads={self.num_kv_heads}{window}{softcap}"
