"""The ops all_reduce, all_gather and reduce_scatter.

They are functional and out-of-place: peers still read the input while the output is written, and an op of a compiled graph must not
return its input. The algorithm is chosen inside the op, where a compiler cannot bake the choice in. A group travels by name.
"""

from __future__ import annotations

from typing import Any

import torch

from tkernels import _checks
from tkernels._op import define
from tkernels._triton import INTERPRETED
from tkernels.collectives import library
from tkernels.collectives.group import Communicator, Group, find, group_name, in_group
from tkernels.collectives.kernels import all_gather_kernel, one_shot_kernel, reduce_scatter_kernel, two_shot_kernel
from tkernels.collectives.plan import Launch, plan_all_reduce, plan_gather

FLAT, ROWS, ELEMENTS = 0, 1, 2  # words.FLAT and so on, as host integers


def aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def launch(group: Communicator, op: int, plan: Launch, kernel: Any, tensors: tuple[Any, ...], sizes: tuple[Any, ...], slot: int, key: Any,
            layout: int, **constants: Any) -> None:  # fmt: skip
    """Run ``kernel`` on ``plan``'s grid. All ranks get here with the same op, plan and key; layout may differ, since it is about
    local addresses, so the first use compiles the general layout too."""
    fixed = dict(
        OP=op, RANK=group.rank, WORLD=group.world, SLOT=slot, HALF=group.sizes.half, FENCE=group.fences, LANES=plan.lanes,
        num_warps=max(1, min(32, plan.lanes // 32)), **constants,
    )  # fmt: skip
    args = (*tensors, *group.addresses(), *sizes)

    def compile_kernel() -> None:
        if not INTERPRETED:
            for each in {layout, ELEMENTS} if "OUT_LAYOUT" in fixed else {layout}:
                out = {"OUT_LAYOUT": ELEMENTS if each == ELEMENTS else fixed["OUT_LAYOUT"]} if "OUT_LAYOUT" in fixed else {}
                kernel.warmup(*args, grid=(plan.grid,), **{**fixed, "LAYOUT": each, **out})

    group.meet((kernel.__name__, str(tensors[0].dtype), plan.lanes, key), compile_kernel)
    group.check()
    group.order_streams()
    kernel[(plan.grid,)](*args, LAYOUT=layout, **fixed)
    if group.device.type == "cpu":
        group.check()  # the interpreter has finished


def check_tensor(name: str, x: torch.Tensor, group: Communicator) -> None:
    _checks.check_float(name, x)
    if x.device.type != group.device.type or (x.device.type == "cuda" and x.device != group.device):
        raise ValueError(f"{name}: expected a tensor on {group.device} like group {group.name}, got {_checks.describe(x)}")


def _layout(x: torch.Tensor) -> tuple[int, int, int]:
    """(layout, inner, stride) of x: element e lies at (e // inner) · stride + e % inner."""
    per = 16 // x.element_size()
    if x.is_contiguous():
        return (FLAT if aligned(x) and x.numel() % per == 0 else ELEMENTS), max(x.numel(), 1), x.numel()
    rows = _checks.rows_of("x", x)
    if rows.inner != 1:
        raise ValueError(
            f"x: strides {list(x.stride())} of shape {list(x.shape)} do not fold into rows at one stride; call .contiguous() first"
        )
    inner, stride = x.shape[-1], rows.stride_outer
    return (ROWS if aligned(x) and inner % per == 0 and stride % per == 0 else ELEMENTS), inner, stride


def all_reduce_kernel(x: torch.Tensor, group: str) -> torch.Tensor:
    found = find(group)
    check_tensor("x", x, found)
    if found.world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    layout, inner, stride = _layout(x)
    nbytes = x.numel() * x.element_size()
    plan = plan_all_reduce(nbytes, found.world, found.sizes, found.max_bytes)
    if found.workspace is None or plan.kind == "library":
        found.check()
        return library.all_reduce(x, found)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if nbytes == 0:
        return out  # on every rank: sizes are equal
    piece = max(found.max_bytes // 16, 1) * 16 // x.element_size()
    if x.numel() <= piece:
        _all_reduce_piece(x, out, found, layout, inner, stride)
        return out
    flat = x.reshape(-1)  # a copy if x is a view by strides: small beside the transfer of such a message
    for start in range(0, x.numel(), piece):
        part, part_out = flat[start : start + piece], out.view(-1)[start : start + piece]
        _all_reduce_piece(part, part_out, found, *_layout(part))
    return out


def _all_reduce_piece(x: torch.Tensor, out: torch.Tensor, group: Communicator, layout: int, inner: int, stride: int) -> None:
    plan = plan_all_reduce(x.numel() * x.element_size(), group.world, group.sizes, group.max_bytes)
    out_layout = FLAT if x.numel() % (16 // x.element_size()) == 0 else ELEMENTS  # out is ours, so aligned
    sizes = (x.numel(), inner, stride)
    if plan.kind == "one_shot":
        launch(group, 1, plan, one_shot_kernel, (x, out), sizes, group.sizes.one, plan.loop, layout, OUT_LAYOUT=out_layout, LOOP=plan.loop)
    else:
        launch(group, 2, plan, two_shot_kernel, (x, out), sizes, group.sizes.two, None, layout, OUT_LAYOUT=out_layout)


def all_reduce_ref(x: torch.Tensor, group: str) -> torch.Tensor:
    found = find(group)
    check_tensor("x", x, found)
    if found.world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    _layout(x)
    return library.all_reduce(x, found)


def _check_part(x: torch.Tensor, dim: int, group: Communicator, divided: bool) -> int:
    if x.device.type != group.device.type:
        raise ValueError(f"x: expected a tensor on {group.device} like group {group.name}, got {_checks.describe(x)}")
    if x.dim() == 0 or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected {-x.dim()} to {x.dim() - 1} for x {list(x.shape)}, got {dim}")
    if not x.is_contiguous():
        raise ValueError(
            f"x: expected a contiguous tensor, got strides {list(x.stride())} of shape {list(x.shape)}; call .contiguous() first"
        )
    dim %= x.dim()
    if divided and x.shape[dim] % group.world:
        raise ValueError(f"x: expected dimension {dim} to be a multiple of the {group.world} ranks, got {list(x.shape)}")
    return dim


def _scaled(x: torch.Tensor, dim: int, numerator: int, denominator: int) -> torch.Tensor:
    shape = [*x.shape[:dim], x.shape[dim] * numerator // denominator, *x.shape[dim + 1 :]]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    found = find(group)
    dim = _check_part(x, dim, found, divided=False)
    if found.world == 1:
        return x.clone()
    plan = plan_gather(x.numel() * x.element_size(), found.world, found.sizes)
    if found.workspace is None or plan.kind == "library" or x.dtype not in _checks.FLOATS:
        found.check()  # words of other types may equal the empty mark
        return library.all_gather(x, found, dim)
    out = _scaled(x, dim, found.world, 1)
    if x.numel():
        inner, per = x.numel() // max(x.shape[:dim].numel(), 1), 16 // x.element_size()
        layout = ELEMENTS if not aligned(x, out) or inner % per else FLAT if inner == x.numel() else ROWS
        sizes = (x.numel(), inner, found.world * inner)
        launch(found, 3, plan, all_gather_kernel, (x, out), sizes, found.sizes.one, inner == x.numel(), layout, OUT_LAYOUT=layout)
    return out


def _reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    found = find(group)
    check_tensor("x", x, found)
    dim = _check_part(x, dim, found, divided=True)
    if found.world == 1:
        return x.clone()
    out = _scaled(x, dim, 1, found.world)
    plan = plan_gather(out.numel() * x.element_size(), found.world, found.sizes)
    if found.workspace is None or plan.kind == "library":
        found.check()
        return library.reduce_scatter(x, found, dim)
    if out.numel():
        inner, per = out.numel() // max(out.shape[:dim].numel(), 1), 16 // x.element_size()
        layout = ELEMENTS if not aligned(x, out) or inner % per else FLAT if inner == out.numel() else ROWS
        out_layout = ELEMENTS if layout == ELEMENTS else FLAT
        sizes = (out.numel(), inner, found.world * inner)
        launch(found, 4, plan, reduce_scatter_kernel, (x, out), sizes, found.sizes.one, inner == out.numel(), layout, OUT_LAYOUT=out_layout)
    return out


def _part_ref(collective: Any, divided: bool) -> Any:
    def reference(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
        found = find(group)
        if divided:
            check_tensor("x", x, found)
        dim = _check_part(x, dim, found, divided)
        return x.clone() if found.world == 1 else collective(x, found, dim)

    return reference


_all_reduce_op = define(
    "all_reduce(Tensor x, str group) -> Tensor",
    kernel=all_reduce_kernel,
    reference=all_reduce_ref,
    fake=lambda x, group: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    repeats=in_group(1),
)
_all_gather_op = define(
    "all_gather(Tensor x, int dim, str group) -> Tensor",
    kernel=_all_gather,
    reference=_part_ref(library.all_gather, divided=False),
    fake=lambda x, dim, group: _scaled(x, dim % x.dim(), find(group).world, 1),
    repeats=in_group(2),
)
_reduce_scatter_op = define(
    "reduce_scatter(Tensor x, int dim, str group) -> Tensor",
    kernel=_reduce_scatter,
    reference=_part_ref(library.reduce_scatter, divided=True),
    fake=lambda x, dim, group: _scaled(x, dim % x.dim(), 1, find(group).world),
    repeats=in_group(2),
)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of x over the group's ranks, in rank order in fp32, rounded once: the same bits on every rank. A new tensor.

    x: any shape of fp16, bf16 or fp32, the same on all ranks; contiguous, or rows at one stride.
    group: the name from ``init_group``, its ProcessGroup or its DeviceMesh. With one rank the result is a copy.
    Beyond the table's sizes, on several hosts and without peer access NCCL adds up, in its own order.
    Raises CollectiveError when the group has failed, ValueError or TypeError naming the argument that is wrong.
    """
    return _all_reduce_op(x, group_name(group))


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """The x of all ranks, concatenated along ``dim`` in rank order.

    x: contiguous, any dtype, one shape on all ranks. group and errors as in ``all_reduce``.
    """
    return _all_gather_op(x, dim, group_name(group))


def reduce_scatter(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of x, the same bits as that part of ``all_reduce``.

    x: contiguous, fp16, bf16 or fp32, one shape on all ranks; its dimension ``dim`` a multiple of their number. group and errors as in
    ``all_reduce``.
    """
    return _reduce_scatter_op(x, dim, group_name(group))
