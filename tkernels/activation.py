"""Gated activations: ``y = act(gate) · up``, from one tensor [gate | up] or from two.

    silu(g) = g / (1 + exp(−g))
    gelu(g) = g · (1 + erf(g / √2)) / 2, or with approximate="tanh" g / (1 + exp(−2 · √(2/π) · (g + 0.044715 · g³)))

The tanh form is written as a sigmoid, ``(1 + tanh u) / 2 = 1 / (1 + exp(−2u))``, which does not cancel for negative g.
All arithmetic is in fp32 and rounded once, at the store.

Source: arXiv 2002.05202 (gated units), arXiv 1606.08415 (GELU).
"""

from __future__ import annotations

import torch

from tkernels import _checks, _dependent
from tkernels._dependent import wait
from tkernels._op import define
from tkernels._target import target_of
from tkernels._triton import cast, cdiv, next_power_of_2, tl, triton
from tkernels.quant import BLOCK, FP8, divide, num_groups, quantize_groups, scales_like, store_scales, tile_of, to_fp8

_SILU, _GELU, _GELU_TANH = "silu", "gelu", "gelu_tanh"
_APPROXIMATE = {"none": _GELU, "tanh": _GELU_TANH}
_MOST, _LEAST = 1024, 512  # elements of a program: 8 a thread, one 16-byte access of bf16, at 2 or 4 warps
_QUANT_TILE = 2048  # elements of a program that finds scales


def _act_ref(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if act == _SILU:
        y = torch.nn.functional.silu(wide)
    else:
        y = torch.nn.functional.gelu(wide, approximate="tanh" if act == _GELU_TANH else "none")
    return (y * up.to(wide.dtype)).to(gate.dtype).contiguous()


def silu_and_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """The oracle of ``silu_and_mul``."""
    gate, up = x.chunk(2, -1)
    return _act_ref(gate, up, _SILU)


def gelu_and_mul_ref(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The oracle of ``gelu_and_mul``."""
    gate, up = x.chunk(2, -1)
    return _act_ref(gate, up, _APPROXIMATE[approximate])


def silu_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The oracle of ``silu_mul``."""
    return _act_ref(gate, up, _SILU)


def gelu_mul_ref(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """The oracle of ``gelu_mul``."""
    return _act_ref(gate, up, _APPROXIMATE[approximate])


@triton.jit
def activate(gate, ACT: tl.constexpr):
    """act(gate) in fp32."""
    if ACT == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu_tanh":
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    gate_ptr, up_ptr, y_ptr, scale_ptr, gate_inner, stride_go, stride_gi, up_inner, stride_uo, stride_ui,
    up_offset, num_rows, num_scales,
    WIDTH: tl.constexpr, ACT: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows × BLOCK_N columns; column tiles of one row are neighbours, so that reads run through memory in order.
    WIDTH belongs to the model: a constant, so that finding the tile takes no division.
    QUANT: "none", "static" or "dynamic" scales of an e4m3 y; a scale's columns are never shared between programs."""
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    rows = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tile = tl.program_id(0) % tiles_n
    offs = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_m = rows < num_rows
    mask = mask_m & (offs < WIDTH)
    # 64-bit: rows * stride passes 2**31 on large prompts
    gate_rows = (rows // gate_inner).to(tl.int64) * stride_go + (rows % gate_inner).to(tl.int64) * stride_gi
    up_rows = (rows // up_inner).to(tl.int64) * stride_uo + (rows % up_inner).to(tl.int64) * stride_ui + up_offset
    wait(PDL)
    gate = tl.load(gate_ptr + gate_rows + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_rows + offs, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, ACT) * up
    out = y_ptr + rows.to(tl.int64) * WIDTH + offs
    if QUANT == "none":
        tl.store(out, cast(y, y_ptr.dtype.element_ty), mask=mask)
    elif QUANT == "static":
        tl.store(out, to_fp8(divide(y, tl.load(scale_ptr))), mask=mask)
    else:
        codes, scales = quantize_groups(y, mask, GROUP)
        tl.store(out, codes, mask=mask)
        store_scales(scale_ptr, rows, scales, tile * (BLOCK_N // GROUP), num_scales, mask_m)


def tile_size(elements: int, num_sms: int) -> int:
    """Elements of a program that needs no neighbours: few where there are few, so that every multiprocessor gets some."""
    return min(_MOST, max(_LEAST, next_power_of_2(cdiv(elements, 2 * num_sms))))


def launch(
    gate: torch.Tensor,
    up: torch.Tensor,
    width: int,
    up_offset: int,
    act: str,
    *,
    scale: torch.Tensor | None = None,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """gate and up: [..., ≥ width] seen as rows; up's columns start at up_offset. Returns y and the scales of a dynamic e4m3 y.

    scale: y is e4m3 by this static scale. block: e4m3 by dynamic ones (0: per row).
    """
    gate_rows, up_rows = _checks.rows_of("gate" if up is not gate else "x", gate), _checks.rows_of("up" if up is not gate else "x", up)
    y = torch.empty((*gate.shape[:-1], width), dtype=gate.dtype if scale is None and block is None else FP8, device=gate.device)
    scales = None if block is None else scales_like(y, width, block)
    if y.numel():
        tile = _QUANT_TILE if block is not None else tile_size(y.numel(), target_of(y.device).num_sms)
        block_n, group = tile_of(width, BLOCK if block is None else block, tile)
        block_m = max(1, tile // block_n) if gate_rows.count > 1 else 1
        num_warps = max(1, block_m * block_n // 256) if block is None else min(32, max(4, block_n // 512))
        _dependent.launch(
            _gated_kernel, (cdiv(gate_rows.count, block_m) * cdiv(width, block_n),), gate.device,
            gate, up, y, scale if block is None else scales, gate_rows.inner, gate_rows.stride_outer, gate_rows.stride_inner,
            up_rows.inner, up_rows.stride_outer, up_rows.stride_inner, up_offset, gate_rows.count, num_groups(width, block or 0),
            WIDTH=width, ACT=act, QUANT="dynamic" if block is not None else "none" if scale is None else "static", GROUP=group,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    return y, scales


def check_packed(x: torch.Tensor, approximate: str = "tanh") -> None:
    _checks.check_float("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x: expected [..., 2 · width] (gate, then up), got {list(x.shape)}")
    _checks.rows_of("x", x)
    _check_approximate(approximate)


def _check_approximate(approximate: str) -> None:
    if approximate not in _APPROXIMATE:
        raise ValueError(f'approximate: expected "tanh" or "none", got {approximate!r}')


def _check_pair(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> None:
    _checks.check_float("gate", gate)
    if gate.dim() == 0:
        raise ValueError("gate: expected at least one dimension, got a scalar")
    _checks.check_shape("up", up, tuple(gate.shape), "like gate")
    _checks.check_dtype("up", up, gate.dtype, "like gate")
    _checks.check_device("up", up, gate, "gate")
    _checks.rows_of("gate", gate)
    _checks.rows_of("up", up)
    _check_approximate(approximate)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    check_packed(x)
    return launch(x, x, x.shape[-1] // 2, x.shape[-1] // 2, _SILU)[0]


def _gelu_and_mul(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    check_packed(x, approximate)
    return launch(x, x, x.shape[-1] // 2, x.shape[-1] // 2, _APPROXIMATE[approximate])[0]


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    _check_pair(gate, up)
    return launch(gate, up, gate.shape[-1], 0, _SILU)[0]


def _gelu_mul(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    _check_pair(gate, up, approximate)
    return launch(gate, up, gate.shape[-1], 0, _APPROXIMATE[approximate])[0]


def _fake_packed(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


_silu_and_mul_op = define(
    "silu_and_mul(Tensor x) -> Tensor",
    kernel=_silu_and_mul,
    reference=_checks.checked(check_packed, silu_and_mul_ref),
    fake=_fake_packed,
)
_gelu_and_mul_op = define(
    'gelu_and_mul(Tensor x, str approximate="tanh") -> Tensor',
    kernel=_gelu_and_mul,
    reference=_checks.checked(check_packed, gelu_and_mul_ref),
    fake=_fake_packed,
)
_silu_mul_op = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    kernel=_silu_mul,
    reference=_checks.checked(_check_pair, silu_mul_ref),
    fake=lambda gate, up: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
)


_gelu_mul_op = define(
    'gelu_mul(Tensor gate, Tensor up, str approximate="tanh") -> Tensor',
    kernel=_gelu_mul,
    reference=_checks.checked(_check_pair, gelu_mul_ref),
    fake=lambda gate, up, approximate="tanh": torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) · up with x = [gate | up].

    x: [..., 2 · width] fp16, bf16 or fp32, last stride 1; leading dimensions by strides (at most two that do not fold).
    Returns [..., width] like x, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _silu_and_mul_op(x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """y = gelu(gate) · up with x = [gate | up]; approximate: "tanh" or "none" as in torch. Shapes and errors as in silu_and_mul."""
    return _gelu_and_mul_op(x, approximate)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) · up from two tensors.

    gate, up: [..., width] fp16, bf16 or fp32, one shape and dtype, each by its own strides, last stride 1.
    Returns [..., width] like gate, contiguous. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _silu_mul_op(gate, up)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """y = gelu(gate) · up from two tensors; approximate: "tanh" or "none" as in torch. Shapes and errors as in silu_mul."""
    return _gelu_mul_op(gate, up, approximate)
