"""pytest-benchmark set-up: the ``measure`` fixture, groups by case, machine facts in the JSON.

pytest bench/                                             everything; on a CPU a smoke test with tiny sizes
pytest bench/test_elementwise.py --benchmark-json=a.json  one family
pytest bench/ -k "rms_norm and (tkernels or Liger)"       some cases, some peers
pytest bench/ --benchmark-autosave, then --benchmark-compare   against the run before
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from bench import harness, suite
from bench.peers import versions, why_absent, why_not_compiled

_OF_A_RUN = ("commit", "sm_clock", "memory_clock")
_CLOCK = suite.VirtualClock()
_measured: dict[tuple[Any, ...], tuple[suite.Problem, dict[str, suite.Outcome]] | BaseException] = {}


def _case_of(item: pytest.Item) -> tuple[Any, ...]:
    """What the peers of one table row have in common: the test function and its parameters but the peer."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    return (str(item.path), getattr(item, "originalname", item.name), *(str(value) for key, value in params.items() if key != "peer"))


def pytest_report_header() -> list[str]:
    if torch.cuda.is_available():
        return []
    return ["bench: no GPU, so a smoke test with tiny sizes: kernels run in Triton's interpreter, and times say nothing about them"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The peers of a case one after the other, so that its inputs are made once.
    first = {case: index for index, case in reversed(list(enumerate(map(_case_of, items))))}
    items.sort(key=lambda item: first[_case_of(item)])
    for item in items:
        if {"measure", "report"} & set(getattr(item, "fixturenames", ())):
            group = " ".join(_case_of(item)[1:])
            item.add_marker(pytest.mark.benchmark(timer=_CLOCK, group=group))


def pytest_collection_finish() -> None:
    """Each capture collects garbage first; over all that torch and transformers hold, that takes longer than the timing."""
    gc.collect()
    gc.freeze()


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
                others = [item.callspec.params["peer"] for item in request.session.items if _case_of(item) == case]
                selected = [name for name in others if name in problem.peers and why_absent(name) is None]
                outcomes = suite.measure(problem, selected)
            except (Exception, SystemExit) as failure:
                _say(request, f"failed: {failure!r}"[:160])
                _measured[case] = failure
                raise
            _measured[case] = (problem, outcomes)
            _say(request, suite.summary(outcomes))
            problem.peers.clear()
        measured = _measured[case]
        if isinstance(measured, BaseException):
            pytest.fail(f"the case could not be set up: {measured}", pytrace=False)
        problem, outcomes = measured
        if peer not in outcomes:
            pytest.skip(f"{peer}: has no such operation")
        outcome = outcomes[peer]
        reason = why_not_compiled(peer, outcome.failure)
        if reason is not None:
            pytest.skip(f"{peer}: absent, {reason}")
        if outcome.failure is not None:
            raise outcome.failure
        _report(request, benchmark, problem, outcome)

    return run


def _name_of(request: pytest.FixtureRequest) -> str:
    """The case without its peer, as in the JSON."""
    peer = str(request.node.callspec.params["peer"])
    return str(request.node.callspec.id).removeprefix(f"{peer}-").removesuffix(f"-{peer}")


def _say(request: pytest.FixtureRequest, text: str) -> None:
    """A line on the terminal as soon as a case is done: a long run can be followed, and one that is cut short has said what it found."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        print(f"\n{request.node.originalname.removeprefix('test_')} {_name_of(request)}: {text}", flush=True)


def _report(request: pytest.FixtureRequest, benchmark: Any, problem: suite.Problem, outcome: suite.Outcome) -> None:
    peer = str(request.node.callspec.params["peer"])
    benchmark.extra_info |= suite.extra_info(problem, outcome) | {"peer": peer, "case": _name_of(request)}
    left = iter(outcome.seconds)
    benchmark.pedantic(lambda: _CLOCK.advance(next(left)), rounds=len(outcome.seconds))


@pytest.fixture
def report(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[suite.Problem, suite.Outcome], None]:
    """report(problem, outcome): for what was checked and timed elsewhere, in other processes, say."""
    return lambda problem, outcome: _report(request, benchmark, problem, outcome)
