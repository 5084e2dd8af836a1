"""The context that captures run within, and the engine's: dependent launches of its own model's steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_toys import make

from runtime.config import ConfigError, RuntimeConfig
from runtime.engine import Engine
from runtime.graph import AS_IS, Within
from runtime.measure import fingerprint
from runtime.request import SamplingParams
from runtime.runner import _captures_within
from tests.runtime.tiny import tiny_model
from tkernels import _dependent


class Watched(torch.nn.Module):
    """Notes at each call whether it runs within."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.__dict__.update(inside=False, seen=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.inside)
        return x * self.weight

    @contextmanager
    def within(self) -> Iterator[None]:
        self.__dict__["inside"] = True
        try:
            yield
        finally:
            self.__dict__["inside"] = False


def _of(module: Watched, **graph: Any) -> Any:
    within = Within("watched", module.within)
    return make(module, within=within, dynamic={"x": {0: "tokens"}}, compile={"backend": "eager"}, mode="full", **graph)


def test_captures_and_the_calls_before_them_run_within(device: torch.device) -> None:
    module = Watched().to(device)
    fast = _of(module)
    fast.warmup(torch.ones(8, 4, device=device))
    assert any(module.seen)
    module.seen.clear()
    x = torch.randn(5, 4, device=device)
    assert torch.equal(fast(x), x) and not any(module.seen) and not module.inside
    module.seen.clear()
    fast.recapture()
    assert any(module.seen) and not module.inside
    assert copy.deepcopy(fast)._within.name == "watched"


def test_costs_hold_for_captures_within_the_same_context(device: torch.device, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    fast = _of(Watched().to(device), cost_table=str(file))
    fast.warmup(torch.ones(8, 4, device=device))
    assert json.loads(file.read_text())["valid_for"]["captured within"] == "watched"
    plain = make(Watched().to(device), dynamic={"x": {0: "tokens"}}, compile={"backend": "eager"}, mode="full", cost_table=str(file))
    plan = plain.warmup(torch.ones(8, 4, device=device))
    assert any("measured for captured within = 'watched', this is ''" in remark for remark in plan.remarks), plan.remarks


def test_costs_of_dependent_launches_are_of_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the variable turns them on everywhere, and a context off, or says nothing of them."""
    without = _captures_within(RuntimeConfig.load({"model": {"dependent_launch": False}}), torch.device("cuda"))
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv("TKERNELS_PDL", value)
        found += [fingerprint(torch.device("cpu"), "m", name) for name in (AS_IS.name, "watched", without.name)]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(
    ("wanted", "ranks", "device", "name", "on"),
    [
        ("auto", 1, "cuda", "dependent launch", True), ("auto", 2, "cuda", "", None), ("auto", 1, "cpu", "", None),
        (True, 2, "cuda", "dependent launch", True), (False, 1, "cuda", "no dependent launch", False),
    ],
)  # fmt: skip
def test_which_engines_capture_dependent_launches(wanted: Any, ranks: int, device: str, name: str, on: bool | None) -> None:
    config = RuntimeConfig.load({"model": {"dependent_launch": wanted}, "parallel": {"tensor": ranks}})
    within = _captures_within(config, torch.device(device))
    assert within.name == name and (within is AS_IS) == (on is None)
    if on is not None:
        before = _dependent.enabled()
        with within.enter():
            assert _dependent.enabled() == on
        assert _dependent.enabled() == before


def test_the_key_takes_no_other_value() -> None:
    with pytest.raises(ConfigError, match=r"model\.dependent_launch: expected \"auto\", true or false, got 'sometimes'"):
        RuntimeConfig.load({"model": {"dependent_launch": "sometimes"}})
    with pytest.raises(ConfigError, match=r'graph\.contexts: expected "auto" or a list of positive integers, got 0'):
        RuntimeConfig.load({"graph": {"contexts": 0}})
    with pytest.raises(ConfigError, match=r'cache\.num_pages: expected "auto" or a positive integer, got -1'):
        RuntimeConfig.load({"cache": {"num_pages": -1}})


def test_a_context_of_another_type_is_refused(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"within: expected a runtime\.graph\.Within \(name, enter\), got partial"):
        make(Watched().to(device), within=partial(_dependent.captures, True), dynamic={"x": {0: "tokens"}})


@pytest.mark.gpu
def test_an_engine_answers_the_same_with_and_without(device: torch.device) -> None:
    prompts = [[1, 2, 3], [7] * 40, list(range(20)), [5]]
    answers = {}
    for on in (False, True):
        sections = {
            "graph": {"mode": "full", "max_tokens": 16, "on_capture_error": "raise"}, "model": {"dependent_launch": on},
            "cache": {"num_pages": 65, "page_size": 8}, "scheduler": {"max_num_seqs": 4, "max_batch_tokens": 32},
            "compile": {"backend": "eager"},
        }  # fmt: skip
        engine = Engine(tiny_model(device), sections)
        answers[on] = [answer.token_ids for answer in engine.generate(prompts, SamplingParams(max_tokens=40))]
        assert sum(engine.counts()["modes"]["steps"]["full"].values()) > 20
    assert answers[False] == answers[True]
