"""pytest-benchmark set-up: the ``measure`` fixture, groups by case, machine facts in the JSON.

pytest bench/                                             everything; on a CPU a smoke test with tiny sizes
pytest bench/test_elementwise.py --benchmark-json=a.json  one family
pytest bench/ -k "rms_norm and (tkernels or Liger)"       some cases, some peers
pytest bench/ --benchmark-autosave, then --benchmark-compare   against the run before
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from bench import harness, suite
from bench.peers import versions, why_absent

_OF_A_RUN = ("commit", "sm_clock", "memory_clock")
_CLOCK = suite.VirtualClock()
_measured: dict[tuple[Any, ...], tuple[suite.Problem, dict[str, suite.Outcome]] | Exception] = {}


def _case_of(item: pytest.Item) -> tuple[Any, ...]:
    """What the peers of one table row have in common: the test function and its parameters but the peer."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    return (str(item.path), getattr(item, "originalname", item.name), *(str(value) for key, value in params.items() if key != "peer"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The peers of a case one after the other, so that its inputs are made once.
    first = {case: index for index, case in reversed(list(enumerate(map(_case_of, items))))}
    items.sort(key=lambda item: first[_case_of(item)])
    for item in items:
        if {"measure", "report"} & set(getattr(item, "fixturenames", ())):
            group = " ".join(_case_of(item)[1:])
            item.add_marker(pytest.mark.benchmark(timer=_CLOCK, group=group))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.update({name: fact for name, fact in harness.machine().items() if name not in _OF_A_RUN})
    machine_info["peers"] = versions()


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """What may differ between two runs on one machine stays out of machine_info, which --benchmark-compare wants equal."""
    output_json["run"] = {name: fact for name, fact in harness.machine().items() if name in _OF_A_RUN}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def measure(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Callable[[], suite.Problem]], None]:
    """measure(build): check and time the test's ``peer`` on the problem that build() makes; build runs once for all peers of a case."""

    def run(build: Callable[[], suite.Problem]) -> None:
        params = request.node.callspec.params
        peer, case = params["peer"], _case_of(request.node)
        absent = why_absent(peer)
        if absent is not None:
            pytest.skip(f"{peer}: absent, {absent}")
        if case not in _measured:
            _measured.clear()  # one case's tensors at a time
            torch._dynamo.reset()  # or Dynamo refuses the ninth shape of a function that a suite compiles case by case
            try:
                problem = build()
            except Exception as failure:
                _measured[case] = failure
                raise
            others = [item.callspec.params["peer"] for item in request.session.items if _case_of(item) == case]
            selected = [name for name in others if name in problem.peers and why_absent(name) is None]
            _measured[case] = (problem, suite.measure(problem, selected))
            problem.peers.clear()
        measured = _measured[case]
        if isinstance(measured, Exception):
            pytest.fail(f"the case could not be set up: {measured}", pytrace=False)
        problem, outcomes = measured
        if peer not in outcomes:
            pytest.skip(f"{peer}: has no such operation")
        outcome = outcomes[peer]
        if outcome.failure is not None:
            raise outcome.failure
        _report(request, benchmark, problem, outcome)

    return run


def _report(request: pytest.FixtureRequest, benchmark: Any, problem: suite.Problem, outcome: suite.Outcome) -> None:
    params = request.node.callspec.params
    peer = str(params["peer"])
    case = request.node.callspec.id.removeprefix(f"{peer}-").removesuffix(f"-{peer}")
    benchmark.extra_info |= suite.extra_info(problem, outcome) | {"peer": peer, "case": case}
    left = iter(outcome.seconds)
    benchmark.pedantic(lambda: _CLOCK.advance(next(left)), rounds=len(outcome.seconds))


@pytest.fixture
def report(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[suite.Problem, suite.Outcome], None]:
    """report(problem, outcome): for what was checked and timed elsewhere, in other processes, say."""
    return lambda problem, outcome: _report(request, benchmark, problem, outcome)
