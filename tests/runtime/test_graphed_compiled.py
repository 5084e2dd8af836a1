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


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_a_module_compiled_whole_is_cut_while_capturing(device: torch.device) -> None:
    """On a device the compiled code calls the splitting op through the dispatcher, where the capture meets it. The emulator runs
    compiled code as one node and says that it cannot cut it."""
    module = toys.Layers().to(device)
    fast = make(module, mode="piecewise", compile={"backend": "inductor", "split": "capture"})
    if device.type == "cpu":
        with pytest.warns(UserWarning, match="the emulator cannot cut compiled code"):
            fast.warmup(*toys.step(8, device))
    else:
        fast.warmup(*toys.step(8, device))
        captured = next(iter(fast._steps.keys.values())).captured["piecewise", 8]  # type: ignore[union-attr]
        assert len(captured.step.segments) == 5
    args = toys.step(3, device)
    assert torch.allclose(fast(*args), module(*args), atol=1e-5)


@pytest.mark.parametrize("split", ["auto", "fx"])
def test_a_module_that_cannot_be_traced_is_cut_while_capturing(device: torch.device, split: str) -> None:
    class Untraceable(toys.Layers):
        def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(ids, factor)

    module = Untraceable().to(device)
    fast = make(module, mode="piecewise", compile={"backend": "inductor", "split": split})
    if split == "fx":
        with pytest.raises(ValueError):
            fast.warmup(*toys.step(8, device))
        return
    plan = fast.warmup(*toys.step(8, device))
    assert any("cut while capturing" in remark for remark in plan.remarks)
    args = toys.step(3, device)
    assert torch.allclose(fast(*args), module(*args), atol=1e-5) and sum(fast.stats()["steps"]["piecewise"].values()) == 1
