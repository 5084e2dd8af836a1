"""Metrics over HTTP: what they count, that they end with the engine, and what is said when they cannot be served."""

from __future__ import annotations

import gc
import socket
import sys
import urllib.request
from typing import Any

import pytest
import torch

from runtime.config import ConfigError
from runtime.engine import Engine
from runtime.request import SamplingParams
from tests.runtime.engine_rig import make_engine
from tests.runtime.tiny import prompt_of


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def engine_on(device: torch.device, port: int) -> Engine:
    return make_engine(device, metrics={"port": port})


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_happened_can_be_scraped(device: torch.device) -> None:
    port = free_port()
    engine = engine_on(device, port)
    before = scrape(port)
    assert before["tkernels_generated_tokens_total"] == 0 and before["tkernels_cache_share_held"] == 0
    engine.generate([prompt_of(20), prompt_of(3)], SamplingParams(max_tokens=6))
    gone, running = engine.submit([1, 2], SamplingParams(max_tokens=50)), engine.submit([3], SamplingParams(max_tokens=50))
    engine.step()
    engine.abort(gone)
    now = scrape(port)
    stats = engine.stats()
    for name in ("generated_tokens", "prompt_tokens", "cached_tokens", "preemptions", "evicted_pages"):
        assert now[f"tkernels_{name}_total"] == stats[name]
    assert now['tkernels_requests_total{reason="length"}'] == 2 and now['tkernels_requests_total{reason="abort"}'] == 1
    assert now['tkernels_steps_total{mode="eager"}'] >= stats["steps"]
    assert now["tkernels_requests_running"] == 1 and now["tkernels_requests_waiting"] == 0
    assert now["tkernels_cache_pages_held"] == len({page for each in (gone, running) for page in each.request.pages}) > 0
    arrived = 2 + (len(gone.request.generated) > 0) + (len(running.request.generated) > 0)
    assert now["tkernels_time_to_first_token_seconds_count"] == arrived
    assert now["tkernels_time_between_tokens_seconds_count"] == stats["generated_tokens"] - arrived
    assert now["tkernels_request_seconds_count"] == 3
    assert 0 < now["tkernels_time_to_first_token_seconds_sum"] < now["tkernels_request_seconds_sum"] * 3


def test_the_port_is_free_again_when_the_engine_is_gone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    engine = engine_on(device, port)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=f"metrics.port: cannot listen on 127.0.0.1:{port}.*another port"):
        patch.setattr("runtime.engine.Runner", None)  # it is said before the warm-up
        engine_on(device, port)
    assert engine.metrics is not None
    engine.metrics.close()
    del engine
    gc.collect()
    second = engine_on(device, port)
    del second
    gc.collect()
    with pytest.raises(OSError):
        scrape(port)


def test_a_missing_client_is_said(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr("runtime.engine.Runner", None)  # it is said before anything is made
    with pytest.raises(ConfigError, match=r"metrics\.port: 9000 asks for metrics, and prometheus-client is not installed: pip install"):
        engine_on(device, 9000)
    monkeypatch.undo()
    assert make_engine(device).metrics is None


@pytest.mark.parametrize("value", [-1, 65536, "a"])
def test_a_port_that_is_none_is_refused(device: torch.device, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.port"):
        make_engine(device, metrics={"port": value})


def test_an_address_of_another_host_is_said(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.Runner", None)
    with pytest.raises(ConfigError, match=r"metrics\.port: cannot listen on 203\.0\.113\.1:9000"):
        make_engine(device, metrics={"port": 9000, "address": "203.0.113.1"})
