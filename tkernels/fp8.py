"""RMSNorm and SiLU·mul that give e4m3 straight away, so that the fp32 result is rounded once and never written in 16 bits.

The scales are those of ``tkernels.quant``: static (one given element), or dynamic, per token (block 0) or per ``block`` columns.
"""

from __future__ import annotations

import torch

from tkernels import _checks, activation, rmsnorm
from tkernels._op import define
from tkernels.quant import FP8, check_block, check_scale, quantize_fp8_dynamic_ref, quantize_fp8_ref, scales_like


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm_fp8_ref(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """The oracle of ``rms_norm_fp8``."""
    return quantize_fp8_ref(rmsnorm.rms_norm_ref(_wide(x), weight, eps, weight_offset), scale)


def rms_norm_fp8_dynamic_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of ``rms_norm_fp8_dynamic``."""
    return quantize_fp8_dynamic_ref(rmsnorm.rms_norm_ref(_wide(x), weight, eps, weight_offset), block)


def add_rms_norm_fp8_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of ``add_rms_norm_fp8``."""
    total = (x + residual).contiguous()
    return rms_norm_fp8_ref(total, weight, scale, eps, weight_offset), total


def add_rms_norm_fp8_dynamic_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle of ``add_rms_norm_fp8_dynamic``."""
    total = (x + residual).contiguous()
    return *rms_norm_fp8_dynamic_ref(total, weight, eps, block, weight_offset), total


def silu_and_mul_fp8_ref(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The oracle of ``silu_and_mul_fp8``."""
    return quantize_fp8_ref(activation.silu_and_mul_ref(_wide(x)), scale)


def silu_and_mul_fp8_dynamic_ref(x: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of ``silu_and_mul_fp8_dynamic``."""
    return quantize_fp8_dynamic_ref(activation.silu_and_mul_ref(_wide(x)), block)


def _check_norm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0) -> None:
    rmsnorm.check(x, weight, eps)
    check_scale(scale, x)


def _check_norm_dynamic(x: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0) -> None:
    rmsnorm.check(x, weight, eps)
    check_block(block)


def _check_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> None:
    rmsnorm.check_add(x, residual, weight, eps)
    check_scale(scale, x)


def _check_add_dynamic(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0
) -> None:
    rmsnorm.check_add(x, residual, weight, eps)
    check_block(block)


def _check_silu(x: torch.Tensor, scale: torch.Tensor) -> None:
    _check_width(x)
    check_scale(scale, x)


def _check_silu_dynamic(x: torch.Tensor, block: int = 0) -> None:
    _check_width(x)
    check_block(block)


def _check_width(x: torch.Tensor) -> None:
    activation.check_packed(x)
    if not 0 < x.shape[-1] <= 2 * 32768:
        raise ValueError(f"x: expected a last dimension of 2 to 65536 (gate, then up), got {list(x.shape)}")


def _rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    _check_norm(x, weight, scale, eps)
    return rmsnorm.launch(x, weight, eps, weight_offset, scale=scale).y


def _rms_norm_fp8_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_norm_dynamic(x, weight, eps, block)
    y, _, scales = rmsnorm.launch(x, weight, eps, weight_offset, block=block)
    assert scales is not None
    return y, scales


def _add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_add(x, residual, weight, scale, eps)
    y, total, _ = rmsnorm.launch(x, weight, eps, weight_offset, residual=residual, scale=scale)
    assert total is not None
    return y, total


def _add_rms_norm_fp8_dynamic(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_add_dynamic(x, residual, weight, eps, block)
    y, total, scales = rmsnorm.launch(x, weight, eps, weight_offset, residual=residual, block=block)
    assert total is not None and scales is not None
    return y, scales, total


def _silu_and_mul_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    _check_silu(x, scale)
    return activation.launch(x, x, x.shape[-1] // 2, x.shape[-1] // 2, "silu", scale=scale)[0]


def _silu_and_mul_fp8_dynamic(x: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    _check_silu_dynamic(x, block)
    y, scales = activation.launch(x, x, x.shape[-1] // 2, x.shape[-1] // 2, "silu", block=block)
    assert scales is not None
    return y, scales


def _fp8_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=FP8, device=x.device)


def _half_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=FP8, device=x.device)


def _sum_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm_fp8_op = define(
    "rms_norm_fp8(Tensor x, Tensor weight, Tensor scale, float eps, float weight_offset=0.0) -> Tensor",
    kernel=_rms_norm_fp8,
    reference=_checks.checked(_check_norm, rms_norm_fp8_ref),
    fake=lambda x, weight, scale, eps, weight_offset=0.0: _fp8_like(x),
)
_rms_norm_fp8_dynamic_op = define(
    "rms_norm_fp8_dynamic(Tensor x, Tensor weight, float eps, int block=0, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_rms_norm_fp8_dynamic,
    reference=_checks.checked(_check_norm_dynamic, rms_norm_fp8_dynamic_ref),
    fake=lambda x, weight, eps, block=0, weight_offset=0.0: (_fp8_like(x), scales_like(x, x.shape[-1], block)),
)
_add_rms_norm_fp8_op = define(
    "add_rms_norm_fp8(Tensor x, Tensor residual, Tensor weight, Tensor scale, float eps, float weight_offset=0.0) -> (Tensor, Tensor)",
    kernel=_add_rms_norm_fp8,
    reference=_checks.checked(_check_add, add_rms_norm_fp8_ref),
    fake=lambda x, residual, weight, scale, eps, weight_offset=0.0: (_fp8_like(x), _sum_like(x)),
)
_add_rms_norm_fp8_dynamic_op = define(
    "add_rms_norm_fp8_dynamic(Tensor x, Tensor residual, Tensor weight, float eps, int block=0, float weight_offset=0.0) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_add_rms_norm_fp8_dynamic,
    reference=_checks.checked(_check_add_dynamic, add_rms_norm_fp8_dynamic_ref),
    fake=lambda x, residual, weight, eps, block=0, weight_offset=0.0: (_fp8_like(x), scales_like(x, x.shape[-1], block), _sum_like(x)),
)
_silu_and_mul_fp8_op = define(
    "silu_and_mul_fp8(Tensor x, Tensor scale) -> Tensor",
    kernel=_silu_and_mul_fp8,
    reference=_checks.checked(_check_silu, silu_and_mul_fp8_ref),
    fake=lambda x, scale: _half_like(x),
)
_silu_and_mul_fp8_dynamic_op = define(
    "silu_and_mul_fp8_dynamic(Tensor x, int block=0) -> (Tensor, Tensor)",
    kernel=_silu_and_mul_fp8_dynamic,
    reference=_checks.checked(_check_silu_dynamic, silu_and_mul_fp8_dynamic_ref),
    fake=lambda x, block=0: (_half_like(x), scales_like(x, x.shape[-1] // 2, block)),
)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """``saturate(rms_norm(x) / scale)`` in e4m3, [..., hidden], contiguous.

    scale: one fp32 element on x's device. The rest as in rms_norm. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _rms_norm_fp8_op(x, weight, scale, eps, weight_offset)


def rms_norm_fp8_dynamic(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scales) of rms_norm(x): y e4m3, scales [..., groups] fp32, one per row (block 0) or per ``block`` columns.

    block: 0, 16, 32, 64, 128 or 256. The rest as in rms_norm. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _rms_norm_fp8_dynamic_op(x, weight, eps, block, weight_offset)


def add_rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, new_residual) as add_rms_norm, with y e4m3 by a static scale.

    scale: one fp32 element on x's device. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _add_rms_norm_fp8_op(x, residual, weight, scale, eps, weight_offset)


def add_rms_norm_fp8_dynamic(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, block: int = 0, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, scales, new_residual) as add_rms_norm, with y e4m3 and scales [..., groups] fp32 as in rms_norm_fp8_dynamic.

    Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _add_rms_norm_fp8_dynamic_op(x, residual, weight, eps, block, weight_offset)


def silu_and_mul_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``saturate(silu_and_mul(x) / scale)`` in e4m3, [..., width], contiguous.

    scale: one fp32 element on x's device. x as in silu_and_mul. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _silu_and_mul_fp8_op(x, scale)


def silu_and_mul_fp8_dynamic(x: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scales) of silu_and_mul(x): y e4m3, scales [..., groups] fp32, one per row (block 0) or per ``block`` columns.

    block: 0, 16, 32, 64, 128 or 256. x as in silu_and_mul. Raises ValueError or TypeError naming the argument that is wrong.
    """
    return _silu_and_mul_fp8_dynamic_op(x, block)
