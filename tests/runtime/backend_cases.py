"""What tests of the stitched callable share: how they compile, compare and count compilations."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_flatten

from runtime.backend import Compiled, compile_callable, inductor_available
from runtime.config import CompileConfig

NO_INDUCTOR = inductor_available("cuda" if torch.cuda.is_available() else "cpu")
needs_inductor = pytest.mark.skipif(NO_INDUCTOR is not None, reason=str(NO_INDUCTOR))


def compiled(module, *args, backend="eager", splitting=("toysplit::attend_out",), dynamic=None, sizes=(), **kwargs) -> Compiled:
    config = CompileConfig(backend=backend, splitting_ops=list(splitting), compile_sizes=list(sizes))
    return compile_callable(module, args, kwargs, config, dynamic or {})


def same(mine, theirs) -> None:
    mine, theirs = tree_flatten(mine), tree_flatten(theirs)
    assert mine[1] == theirs[1]
    for a, b in zip(mine[0], theirs[0], strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        else:
            assert type(a) is type(b) and a == b


def close(mine, theirs) -> None:
    torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)  # fp32: Inductor fuses and reorders


class Counting:
    """Counts what Dynamo and Inductor compile while it is active."""

    def __enter__(self):
        self.frames, self.inductor = 0, 0
        self._backends = mock.patch("torch._inductor.standalone_compile", side_effect=self._standalone)
        import torch._inductor

        self._real = torch._inductor.standalone_compile
        self._backends.start()
        torch._dynamo.utils.counters.clear()
        return self

    def _standalone(self, *args, **kwargs):
        self.inductor += 1
        return self._real(*args, **kwargs)

    def __exit__(self, *exc):
        self._backends.stop()
        self.frames = sum(torch._dynamo.utils.counters["frames"].values()) + sum(torch._dynamo.utils.counters["stats"].values())
