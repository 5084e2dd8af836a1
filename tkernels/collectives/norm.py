"""The op all_reduce_add_rms_norm: one launch where the plan has one, else all_reduce and then add_rms_norm."""

from __future__ import annotations

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels.collectives.fused import one_shot_norm_kernel, two_shot_norm_kernel
from tkernels.collectives.group import Communicator, Group, find, group_name, in_group
from tkernels.collectives.ops import ELEMENTS, FLAT, aligned, all_reduce_kernel, all_reduce_ref, check_tensor, launch
from tkernels.collectives.plan import plan_fused
from tkernels.quant import FP8, to_fp8_ref
from tkernels.rmsnorm import add_rms_norm


def _check_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, group: Communicator) -> None:
    check_tensor("x", x, group)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected [..., hidden] with hidden of 1 or more, got {list(x.shape)}")
    _checks.check_shape("residual", residual, tuple(x.shape), "like x")
    _checks.check_dtype("residual", residual, x.dtype, "like x")
    _checks.check_device("residual", residual, x, "x")
    _checks.check_shape("weight", weight, (x.shape[-1],), "like x's last dimension")
    _checks.check_float("weight", weight)
    _checks.check_last_stride("weight", weight)
    _checks.check_device("weight", weight, x, "x")
    if scale is not None:
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(f"scale: expected one float32 value, got {_checks.describe(scale)}")
        _checks.check_device("scale", scale, x, "x")


def _unfused(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, total = add_rms_norm(x, residual, weight, eps)
    return (y if scale is None else to_fp8_ref(y.float() / scale)), total


def _norm_rows(name: str, x: torch.Tensor, flat: bool) -> tuple[torch.Tensor, int, bool]:
    """(x, its row stride, whether its rows are aligned). flat: a kernel that needs aligned rows gets a copy where they are not."""
    rows = _checks.rows_of(name, x)
    if rows.inner != 1:
        raise ValueError(f"{name}: strides {list(x.stride())} of shape {list(x.shape)} do not fold into rows; call .contiguous() first")
    per = 16 // x.element_size()
    good = aligned(x) and x.shape[-1] % per == 0 and (rows.stride_outer % per == 0 or rows.count == 1)
    if flat and not good:
        return x.clone(memory_format=torch.contiguous_format), x.shape[-1], True
    return x, rows.stride_outer if rows.count > 1 else x.shape[-1], good


def _all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = find(group)
    _check_norm(x, residual, weight, scale, found)
    if found.world == 1:
        return _unfused(x, residual, weight, eps, scale)
    hidden, rows = x.shape[-1], x.numel() // x.shape[-1]
    plan = plan_fused(rows, hidden, x.element_size(), found.world, found.sizes, found.max_bytes)
    if found.workspace is None or plan.kind == "library":
        return _unfused(all_reduce_kernel(x, group), residual, weight, eps, scale)
    y = torch.empty(x.shape, dtype=x.dtype if scale is None else FP8, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y, total
    two = plan.kind == "two_shot"
    x, x_stride, x_good = _norm_rows("x", x, flat=two)
    residual, residual_stride, residual_good = _norm_rows("residual", residual, flat=two)
    layout = FLAT if x_good and residual_good else ELEMENTS
    if not aligned(weight) and layout == FLAT:
        weight = weight.clone()  # a parameter inside a flat buffer, say; a few KiB
    tensors = (x, residual, weight, y, total, weight if scale is None else scale)
    sizes = (rows, hidden, x_stride, residual_stride, eps)
    key = (plan.loop, plan.split, scale is not None, weight.dtype)
    if two:
        launch(found, 6, plan, two_shot_norm_kernel, tensors, sizes, found.sizes.two, key, layout, FP8=scale is not None)
    else:
        launch(
            found,
            5,
            plan,
            one_shot_norm_kernel,
            tensors,
            sizes,
            found.sizes.one,
            key,
            layout,
            FP8=scale is not None,
            SPLIT=plan.split,
            LOOP=plan.loop,
        )
    return y, total


def _norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_norm(x, residual, weight, scale, find(group))
    return _unfused(all_reduce_ref(x, group), residual, weight, eps, scale)


_norm_op = define(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str group, Tensor? scale=None) -> (Tensor, Tensor)",
    kernel=_all_reduce_add_rms_norm,
    reference=_norm_ref,
    repeats=in_group(4),
    fake=lambda x, residual, weight, eps, group, scale=None: (
        torch.empty(x.shape, dtype=x.dtype if scale is None else FP8, device=x.device),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    ),
)


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: Group, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, new_residual): new_residual = all_reduce(x) + residual, rounded after each of the two; y = rms_norm(new_residual) · weight.

    x, residual: [..., hidden], one dtype, rows at one stride; residual and weight [hidden] are the same on all ranks.
    scale: one fp32 value on the device; with it y is e4m3, saturate(y / scale) of the y rounded to x.dtype.
    One launch up to ``max_bytes``; longer ones are ``all_reduce`` and ``add_rms_norm``. group and errors as in ``all_reduce``.
    """
    return _norm_op(x, residual, weight, eps, group_name(group), scale)
