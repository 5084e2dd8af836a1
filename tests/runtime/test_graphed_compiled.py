"""Graphs over compiled pieces: what ``compile_callable`` stitches is captured whole and piecewise, on the emulator as opaque nodes."""

from __future__ import annotations

import graph_toys as toys
import pytest
import torch
from graph_toys import make

from runtime.backend import inductor_available

NO_COMPILER = inductor_available("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [{"backend": "eager", "split": "fx"}]
if NO_COMPILER is None:
    BACKENDS.append({"backend": "inductor"})


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto"])
@pytest.mark.parametrize("compile", BACKENDS, ids=lambda c: c["backend"])
def test_compiled_pieces_are_captured(device: torch.device, mode: str, compile: dict[str, str]) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode=mode, compile=compile)
    plan = fast.warmup(*toys.step(8, device))
    assert not [r for r in plan.remarks if "not captured" in r], plan.remarks
    for n in (1, 2, 3, 8, 9):
        args = toys.step(n, device)
        assert torch.allclose(fast(*args), module(*args), atol=1e-5)
    if mode != "auto":
        assert sum(fast.stats()["steps"][mode].values()) == 4
        captured = next(c for (m, _), c in next(iter(fast._steps.keys.values())).captured.items() if m == mode)  # type: ignore[union-attr]
        assert len(captured.step.segments) == (1 if mode == "full" else 5)
        assert all(a.verified for a in captured.step.addresses)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_weights_that_move_are_recaptured_in_compiled_code(device: torch.device) -> None:
    module = toys.Layers().to(device)
    fast = make(module, mode="full", compile={"backend": "inductor"})
    args = toys.step(4, device)
    fast(*args)
    module.linears[0].weight = torch.nn.Parameter(torch.randn(4, 4, device=device))
    assert torch.allclose(fast(*args), module(*args), atol=1e-5)
    module.linears[1].weight.data = torch.randn(4, 4, device=device)
    assert torch.allclose(fast(*args), module(*args), atol=1e-5)
    assert sum(fast.stats()["steps"]["full"].values()) == 3
