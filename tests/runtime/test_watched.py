"""The sweep over a module's slots, and when it can be left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runtime import addresses, watched
from runtime.persistent import Persistent
from runtime.watched import Epoch, _counts_changes


class Watcher:
    """Numbers changes of the dictionaries that it was asked about, as CPython's watchers make torch do. Looks when it is asked."""

    def __init__(self, blind_to: Callable[[str], bool] = lambda key: False) -> None:
        self.count, self.known, self.blind_to = 0, dict[int, tuple[dict[Any, Any], dict[Any, int], int]](), blind_to

    def _state(self, d: dict[Any, Any]) -> dict[Any, int]:
        return {key: id(value) for key, value in d.items() if not self.blind_to(key)}

    def __call__(self, d: dict[Any, Any]) -> int:
        for at, (each, then, _) in reversed(list(self.known.items())):  # the probe, which changes as it is asked, is the first
            if self._state(each) != then:
                self.count += 1
                self.known[at] = each, self._state(each), self.count
        if id(d) not in self.known:
            self.count += 1
            self.known[id(d)] = d, self._state(d), self.count
        return self.known[id(d)][2]


def test_the_trial_accepts_a_counter_that_sees_everything_and_no_other() -> None:
    assert _counts_changes(Epoch(Watcher()))
    for unseen in ("scale", "training", "weight", "forward", 1):
        assert not _counts_changes(Epoch(Watcher(lambda key, unseen=unseen: key == unseen))), unseen  # type: ignore[misc]
    ticking = Watcher()

    def version(d: dict[Any, Any]) -> int:  # as before Python 3.12: every change of any dictionary counts
        ticking.count += 1
        return ticking(d) + ticking.count

    assert not _counts_changes(Epoch(version))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="dictionaries are watched from Python 3.12 on")
def test_this_interpreter_and_torch_count_changes() -> None:
    assert watched.EPOCH is not None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(2, 2) for _ in range(60))
        self.register_buffer("cache", torch.zeros(3, 4))
        self.scale = 2.0


@pytest.fixture(params=["watched", "swept"])
def persistent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Persistent:
    monkeypatch.setattr(watched, "EPOCH", Epoch(Watcher()) if request.param == "watched" else None)
    made = Persistent(Scaled())
    assert made.moved() is None
    if request.param == "watched":
        monkeypatch.setattr(made._values, "now", lambda: pytest.fail("the values were read, though no dictionary has changed"))
        assert made.moved() is None and made.moved() is None
        monkeypatch.undo()
        monkeypatch.setattr(watched, "EPOCH", watched.EPOCH or Epoch(Watcher()))
    return made


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m.linears[3].weight, "data", torch.zeros(2, 2)), "linears.3.weight"),
        (lambda m: m.linears[3]._parameters.__setitem__("bias", nn.Parameter(torch.zeros(2))), "linears.3.bias"),
        (lambda m: setattr(m, "scale", 2), "scale"),  # equal, and another number to a kernel
        (lambda m: m.linears[5].eval(), "linears.5.training"),
        (lambda m: setattr(m.linears[5], "forward", lambda x: x), "forward of linears.5"),
        (lambda m: m.linears[5].register_forward_hook(lambda *a: None), "the hooks of linears.5"),
        (lambda m: delattr(m, "scale"), "scale"),
        (lambda m: m.linears.__delitem__(7), "the children of linears"),
        (lambda m: m.linears.pop(59), "the children of linears"),
        (lambda m: m.linears.insert(3, nn.Linear(2, 2)), "the children of linears"),
        (lambda m: m._modules.update(linears=nn.ModuleList()), "the children of the module"),
    ],
)  # fmt: skip
def test_each_change_is_named_at_the_next_look(persistent: Persistent, change: Callable[[Any], object], name: str) -> None:
    change(persistent._root)
    assert persistent.moved() == name
    assert persistent.moved() == name, "and again, until it is put right"
    persistent.refresh()
    assert persistent.moved() is None


def test_a_registration_that_changes_nothing_hides_no_other_change(persistent: Persistent) -> None:
    root: Any = persistent._root
    root.linears[5].weight = root.linears[5].weight
    root.linears[5].register_forward_hook(lambda *a: None)
    assert persistent.moved() == "the hooks of linears.5"
    persistent.refresh()
    root.linears[5].weight = root.linears[5].weight
    assert persistent.moved() is None


@pytest.mark.parametrize("way", ["C", "torch"])
def test_another_layout_at_the_same_address_is_named(persistent: Persistent, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    root: Any = persistent._root
    looks = 1
    if way == "torch" or addresses.native() is None:
        monkeypatch.setattr(addresses, "native", lambda: None)
        persistent.refresh()
        assert persistent.moved() is None
        looks = 3  # 121 tensors, 48 in a look
    for tensor, name in ((root.linears[50].weight, "linears.50.weight"), (root.cache, "cache")):
        for other in (tensor.data.t(), tensor.data.view(torch.bfloat16)):
            own, tensor.data = tensor.data, other
            found = [persistent.moved() for _ in range(looks)]
            assert name in found, found
            tensor.data = own
            assert [persistent.moved() for _ in range(looks)] == [None] * looks


def test_sizes_that_repeat_what_the_parameters_say_are_not_read() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 3)
            self.window = 5

    root = nn.Module()
    root.own = Own()
    names = Persistent(root)._values.names
    assert "own.window" in names and "own.training" in names
    assert "own.in_features" not in names and "own._is_full_backward_hook" not in names
