"""Proofs of earlier starts: taken over when everything they rest on is the same, made again when anything is not."""

from __future__ import annotations

import importlib
import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graph_toys as toys
import pytest
import torch
from torch import nn

import runtime.steps
from runtime.contract import same_bits
from runtime.graph import CaptureError
from runtime.graphed import GraphedModule, graphed
from runtime.measure import interleaved_ms
from runtime.proofs import _text, code_digest, file_beside, owners_digest

DEVICE = torch.device("cpu")


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that were proved in full."""
    names: list[str] = []
    original = runtime.steps.prove

    def noting(*args: Any) -> Any:
        names.append(args[6])
        return original(*args)

    monkeypatch.setattr(runtime.steps, "prove", noting)
    return names


def start(costs: Path, module: nn.Module | None = None, **graph: Any) -> GraphedModule:
    config = {
        "graph": {"capture_sizes": [2, 4], "max_tokens": 4, "cost_table": str(costs), **graph},
        "scheduler": {"max_num_seqs": 4},
        "compile": {"backend": "eager", "splitting_ops": [toys.SPLIT]},
    }
    torch.manual_seed(0)
    fast = graphed(module or toys.Layers(), config, dynamic={"ids": 0, "factor": 0}, pad={})
    fast.warmup(*toys.step(4, DEVICE))
    return fast


RUNS: list[int] = []


class Counting(toys.Layers):
    """Notes how many rows each real run had."""

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        RUNS.append(ids.shape[0])
        return super().forward(ids, factor)


class Scaled(toys.Layers):
    def __init__(self, scale: float, fresh: bool = False) -> None:
        super().__init__(fresh=fresh)
        self.scale = scale

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(ids, factor)


class Rows(toys.Layers):
    """Real rows change with padding rows."""

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, factor) + factor.sum()


def edit(costs: Path, change: Callable[[Any], None]) -> None:
    path = file_beside(str(costs))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_second_start_proves_nothing_again_and_says_so(tmp_path: Path, proved: list[str]) -> None:
    first = start(tmp_path / "costs.json")
    assert len(proved) == 4
    assert first.plan is not None and not any("earlier" in remark for remark in first.plan.remarks)
    proved.clear()
    second = start(tmp_path / "costs.json")
    assert proved == []
    assert second.plan is not None and any("proved by earlier starts" in remark and "4 on 20" in remark for remark in second.plan.remarks)
    rows = [row for table in second.addresses().values() for row in table]
    assert rows and all(row.verified and row.proved_on for row in rows)
    args = toys.step(3, DEVICE)
    assert same_bits(second(*args), first(*args))
    assert second.stats()["steps"] == first.stats()["steps"]


def test_a_second_start_runs_the_module_only_to_capture_it(tmp_path: Path) -> None:
    """Each size once to bring in what is lazy, and once for each capture: nothing to find out about padding, outputs or state."""
    runs = []
    for _ in range(2):
        RUNS.clear()
        start(tmp_path / "costs.json", Counting())
        runs.append(sorted(RUNS))
    assert runs[1] == [2, 2, 2, 4, 4, 4]
    assert len(runs[0]) > 3 * len(runs[1])


def test_modes_of_a_size_are_compared_with_the_same_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[int] = []
    original = runtime.steps.expect

    def noting(reference: Any, given: Any, *rest: Any) -> Any:
        ran.append(given.real["tokens"])
        return original(reference, given, *rest)

    monkeypatch.setattr(runtime.steps, "expect", noting)
    start(tmp_path / "costs.json")
    assert sorted(ran) == [1, 2, 3, 4]  # a full and a padded set for each of two sizes, not for each of four steps


@pytest.mark.parametrize("name", ["code", "values", "settings", "device", "model", "torch", "triton", "python", "proofs"])
def test_all_is_proved_again_when_what_it_rests_on_has_changed(tmp_path: Path, proved: list[str], name: str) -> None:
    start(tmp_path / "costs.json")
    edit(tmp_path / "costs.json", lambda data: data["valid_for"].update({name: "another"}))
    proved.clear()
    fast = start(tmp_path / "costs.json")
    assert len(proved) == 4
    assert not any(row.proved_on for table in fast.addresses().values() for row in table)


def test_another_frozen_value_is_another_proof(tmp_path: Path, proved: list[str]) -> None:
    for scale, expected in ((1.0, 4), (1.0, 4), (2.0, 8)):
        start(tmp_path / "costs.json", Scaled(scale))
        assert len(proved) == expected


def test_poison_proves_all_again(tmp_path: Path, proved: list[str]) -> None:
    start(tmp_path / "costs.json")
    start(tmp_path / "costs.json", check="poison")
    assert len(proved) == 8


def test_a_step_whose_owners_differ_from_the_proved_ones_is_proved_again(tmp_path: Path, proved: list[str]) -> None:
    start(tmp_path / "costs.json")
    edit(tmp_path / "costs.json", lambda data: data["steps"][0].update(owners="others"))
    proved.clear()
    start(tmp_path / "costs.json")
    assert len(proved) == 1


def test_the_owners_digest_sees_a_piece_that_comes_from_elsewhere(tmp_path: Path) -> None:
    fast = start(tmp_path / "costs.json")
    rows = fast.addresses()["-, piecewise at size 4"]
    kinds = ["graph", toys.SPLIT, "graph", toys.SPLIT, "graph"]
    proved = owners_digest(rows, kinds)
    assert proved == owners_digest([replace(row, address=row.address + 64) for row in rows], kinds)
    for change in ({"owner": "held"}, {"producer": "elsewhere"}, {"input": "another"}, {"segment": 77}):
        assert proved != owners_digest([replace(rows[0], **change), *rows[1:]], kinds), change
    assert proved != owners_digest(rows[:-1], kinds) and proved != owners_digest(rows, kinds[:-1])


def test_what_padding_does_is_remembered(tmp_path: Path) -> None:
    """A module whose rows mix is served at exact sizes also where that was found out by an earlier start."""
    for _ in range(2):
        module = Rows()
        fast = start(tmp_path / "costs.json", module)
        assert fast.plan is not None and any("exactly their size" in remark for remark in fast.plan.remarks)
        args = toys.step(3, DEVICE)
        assert torch.allclose(fast(*args), module(*args), atol=1e-5)


def test_a_damaged_file_proves_nothing(tmp_path: Path, proved: list[str]) -> None:
    costs = tmp_path / "costs.json"
    for text in ("", "[]", "{}", '{"valid_for": null, "steps": [], "keys": []}'):
        file_beside(str(costs)).write_text(text)
        proved.clear()
        start(costs)
        assert len(proved) == 4
    edit(costs, lambda data: data["steps"][0].pop("owners"))
    proved.clear()
    start(costs)
    assert len(proved) == 4


def test_a_failed_proof_is_not_remembered(tmp_path: Path, proved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise CaptureError("it differs")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="it differs"):
        patch.setattr(runtime.steps, "prove", failing)
        start(tmp_path / "costs.json")
    start(tmp_path / "costs.json")
    assert len(proved) == 4


def test_code_without_a_file_of_its_own_is_always_proved(tmp_path: Path, proved: list[str]) -> None:
    class Local(toys.Layers):  # may depend on this function's variables
        pass

    hooked = toys.Layers()
    hooked.register_forward_hook(lambda module, args, output: None)
    assert code_digest(Local()) is None and code_digest(hooked) is None
    for _ in range(2):
        proved.clear()
        start(tmp_path / "costs.json", Local())
        assert len(proved) == 4


def test_changed_source_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a helper in the module's package, which no class of the module is defined in."""
    package = tmp_path / "a_users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("FACTOR = 1\n")
    (package / "model.py").write_text("import torch\nclass Model(torch.nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("a_users_package.model").Model()
    first = code_digest(model)
    assert first is not None and first == code_digest(model)
    (package / "helper.py").write_text("FACTOR = 2\n")
    assert code_digest(model) != first


def test_a_changed_module_beside_the_users_file_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are in no package and import each other by name, also through a third one."""
    for name, text in (
        ("users_constants", "FACTOR = 1\n"),
        ("users_helper", "import users_constants\ndef mix(x):\n    return x * users_constants.FACTOR\n"),
        ("users_model", "import torch\nfrom users_helper import mix\nclass Model(torch.nn.Module):\n    pass\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("users_model").Model()
    first = code_digest(model)
    assert first is not None and first == code_digest(model)
    (tmp_path / "users_constants.py").write_text("FACTOR = 2\n")
    assert code_digest(model) != first


class Options:
    def __init__(self, mixes: bool) -> None:
        self.inner = SimpleNamespace(mixes=mixes)


class Configured(toys.Layers):
    """Whether rows depend on each other stands in an object that the module holds."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids, factor)
        return x + x.sum(0) if self.options.inner.mixes else x


def test_values_in_objects_that_a_module_holds_are_part_of_the_proof(tmp_path: Path, proved: list[str]) -> None:
    for mixes, expected in ((False, 4), (False, 4), (True, 8)):
        module = Configured(Options(mixes))
        fast = start(tmp_path / "costs.json", module)
        assert len(proved) == expected
        args = toys.step(3, DEVICE)
        assert torch.allclose(fast(*args), module(*args), atol=1e-5)


@pytest.mark.parametrize("value", [partial(start, 1), object(), weakref.ref(toys.Layers)])
def test_an_object_that_does_not_say_what_it_holds_is_never_the_same(value: object) -> None:
    assert " at 0x" in _text(value, set())


class Unruly:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


unruly = Unruly()


def test_values_that_cannot_be_looked_at_keep_no_proofs_and_break_nothing(tmp_path: Path, proved: list[str]) -> None:
    class Silent:
        __slots__ = ()

        def __repr__(self) -> str:
            raise RuntimeError("no text")

    for _ in range(2):
        proved.clear()
        start(tmp_path / "costs.json", Configured(SimpleNamespace(inner=SimpleNamespace(mixes=False), silent=Silent())))
        assert len(proved) == 4
    assert code_digest(Configured(Options(False))) is not None, "this file holds an object that raises when it is asked for its module"


def test_functions_say_their_name_and_what_they_hold() -> None:
    def made(number: int) -> Callable[[], int]:
        return lambda: number

    assert _text(made(1), set()) == _text(made(1), set()) != _text(made(2), set())
    assert _text(toys.Layers.forward, set()) != _text(Scaled.forward, set())
    assert _text(Options(True).__init__, set()) != _text(Options(False).__init__, set())  # type: ignore[misc]
    loop: list[Any] = [SimpleNamespace()]
    loop[0].loop = loop[0]
    assert "again" in _text(loop, set())


class Counter(toys.Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return super().forward(ids, factor)


def test_state_that_moved_after_a_start_without_proofs_is_put_back_where_it_is(tmp_path: Path) -> None:
    for _ in range(2):
        fast = start(tmp_path / "costs.json", Counter(), mode="full")
        fast.steps = torch.full((), 10.0)
        fast(*toys.step(4, DEVICE))
        assert fast.steps.item() == 11, "captures count as steps"


def test_moved_weights_are_proved_where_they_are(tmp_path: Path, proved: list[str]) -> None:
    start(tmp_path / "costs.json", mode="full")
    fast = start(tmp_path / "costs.json", mode="full")
    proved.clear()
    fast.linears[0].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).float().t())  # other strides: other code may run
    args = toys.step(4, DEVICE)
    assert torch.allclose(fast(*args), fast.module(*args), atol=1e-5)
    assert len(proved) == 2


def test_a_slow_first_call_is_a_round() -> None:
    """Steps that take longer than the budget are timed three times, not four; quick ones have their first call dropped."""
    calls = {"slow": 0, "quick": 0}

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.005)

    def quick() -> None:
        calls["quick"] += 1

    interleaved_ms({"": slow}, DEVICE, budget_ms=1.0)
    interleaved_ms({"": quick}, DEVICE, budget_ms=1e6, repeats=5)
    assert calls == {"slow": 3, "quick": 6}
