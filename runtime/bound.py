"""The proof of bound calls: each equals its op, on other values than those it was bound with.

The proof of a step (runtime/contract.py) replays it on the values of its capture too, where a bound call that had kept a copy of
them would still look right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runtime.captured_step import CapturedStep, EagerCall
from runtime.contract import RESTORED_BYTES, difference, same_bits
from runtime.graph import CaptureError, Pool
from runtime.op_arguments import written_arguments


def prove_bound(step: CapturedStep, pool: Pool, static: Iterable[torch.Tensor], name: str) -> None:
    """Compare every bound call of a step with its op, bit for bit, after its float arguments were given other values.

    Only memory that each replay fills anew is changed: the pool's and the arena's, not the persistent tensors of the step and the
    ``static`` ones. It is left with other values. Raises CaptureError naming the step and the op.
    """
    kept = {t.untyped_storage().data_ptr() for t in (*step.persistent.values(), *static)}
    for call in step.segments:
        if isinstance(call, EagerCall) and call.bound is not None:
            problem = _differs(call, pool, kept)
            if problem:
                raise CaptureError(f"{name}: {call.op}: its bound call is not the op: {problem}")


def _differs(call: EagerCall, pool: Pool, kept: set[int]) -> str:
    written = [t for t in written_arguments(call.op, call.args, call.kwargs) if t.nbytes <= RESTORED_BYTES]
    tensors = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, torch.Tensor)]
    ours = [t for t in tensors if t.dtype.is_floating_point and t.untyped_storage().data_ptr() not in kept]
    for t in ours:  # without random numbers, whose sequence is the user's
        t.copy_(torch.arange(t.numel(), device=t.device).remainder(97).sub(48).div(16).view(t.shape))
    before = [t.clone() for t in written]
    call.op(*call.args, **call.kwargs)
    expected = [t.clone() for t in written]
    for t, value in zip(written, before, strict=True):
        t.copy_(value)
    pool.workspace.overwrite()
    assert call.bound is not None
    call.bound()
    pool.synchronize()
    for i, (want, got) in enumerate(zip(expected, written, strict=True)):
        if not same_bits(want, got):
            return f"written argument {i} differs ({difference(want, got)})"
    return ""
