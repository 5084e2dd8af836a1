"""Metrics of an engine for Prometheus, at ``http://ADDRESS:PORT/metrics``.

Counters and gauges are read from the engine when somebody asks, so they cost its steps nothing; only latencies are noted as tokens
arrive. Needs prometheus-client (the extra "metrics").
"""

from __future__ import annotations

import socket
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Protocol

from runtime.config import ConfigError, MetricsConfig

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds


class Source(Protocol):
    """What is asked for its numbers."""

    def counts(self) -> dict[str, Any]:
        """Since the start."""
        ...

    def load(self) -> dict[str, float]:
        """What there is now, by name."""
        ...


def client(config: MetricsConfig) -> Any:
    """The module that serves metrics. Raises ConfigError where it is not installed."""
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ConfigError(
            f"metrics.port: {config.port} asks for metrics, and prometheus-client is not installed: pip install prometheus-client, or "
            "set it to 0"
        ) from error
    return prometheus_client


def check(config: MetricsConfig) -> None:
    """Whether ``Metrics`` could serve; raises ConfigError where not. Asked before an engine's warm-up, which may take minutes."""
    client(config)
    try:
        family, kind, _, _, where = socket.getaddrinfo(config.address, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(where)
            probe.listen()
    except OSError as error:
        raise _unusable(config, error) from error


def _unusable(config: MetricsConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"metrics.port: cannot listen on {config.address}:{config.port}: {error}; choose another port (or metrics.address), or 0 for none"
    )


class Metrics:
    """Serves an engine's numbers until the engine is gone, or ``close``. Raises ConfigError naming the key where that cannot be."""

    def __init__(self, engine: Source, config: MetricsConfig) -> None:
        prometheus = client(config)
        self._core, self._engine = prometheus.core, weakref.ref(engine)
        registry = prometheus.CollectorRegistry()
        self._first = _Latency("tkernels_time_to_first_token_seconds", "from a request's arrival to its first token")
        self._between = _Latency("tkernels_time_between_tokens_seconds", "between two tokens of a request")
        self._whole = _Latency("tkernels_request_seconds", "from a request's arrival to its end")
        self._ended = prometheus.Counter("tkernels_requests", "requests that have ended, by why", ["reason"], registry=registry)
        self._times: dict[int, tuple[float, float]] = {}  # request number -> arrival, newest token (0: none yet)
        registry.register(self)
        try:
            self._server, self._thread = prometheus.start_http_server(config.port, config.address, registry)
        except (OSError, OverflowError) as error:
            raise _unusable(config, error) from error
        self.port: int = self._server.server_port
        self.close = weakref.finalize(engine, _stop, self._server)

    def arrived(self, number: int) -> None:
        self._times[number] = time.perf_counter(), 0.0

    def tokens(self, numbers: Iterable[int]) -> None:
        """Each of these requests has got a token, in one step: most of them waited equally long for it, and are noted together."""
        now, times = time.perf_counter(), self._times
        since: Counter[float] = Counter()
        for number in numbers:
            arrival, newest = times[number]
            if newest:
                since[newest] += 1
            else:
                self._first.observe(now - arrival)
            times[number] = arrival, now
        for then, count in since.items():
            self._between.observe(now - then, count)

    def ended(self, number: int, reason: str) -> None:
        self._whole.observe(time.perf_counter() - self._times.pop(number)[0])
        self._ended.labels(reason).inc()

    def collect(self) -> Iterator[Any]:
        """For the registry: the engine's numbers as they are now."""
        engine = self._engine()
        if engine is None:
            return
        for latency in (self._first, self._between, self._whole):
            yield latency.family(self._core)
        counts, load = _read(engine)
        for name, text in (
            ("prompt_tokens", "prompt tokens computed"),
            ("generated_tokens", "tokens generated"),
            ("cached_tokens", "prompt tokens taken from the prefix cache"),
            ("preemptions", "requests that had to give their pages back"),
            ("evicted_pages", "pages of cached prefixes that were given away"),
        ):
            yield self._core.CounterMetricFamily(f"tkernels_{name}", text, counts[name])
        steps = self._core.CounterMetricFamily("tkernels_steps", "steps, by mode", labels=["mode"])
        for mode, by_size in counts["modes"]["steps"].items():
            steps.add_metric([mode], sum(by_size.values()))
        yield steps
        yield self._core.CounterMetricFamily("tkernels_rows", "rows of all steps, padding included", counts["modes"]["rows"])
        yield self._core.CounterMetricFamily("tkernels_padding_rows", "padding rows of graphs", counts["modes"]["padding_rows"])
        for name, value in load.items():
            yield self._core.GaugeMetricFamily(f"tkernels_{name}", name.replace("_", " "), value)


class _Latency:
    """A histogram of seconds that takes many equal ones at once."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self._counts = [0] * (len(_LATENCY) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(_LATENCY, seconds)] += count
        self._sum += seconds * count

    def family(self, core: Any) -> Any:
        """As prometheus-client takes it: how many are at or below each bound."""
        bounds = [*(str(float(bound)) for bound in _LATENCY), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts.copy()), strict=True))
        return core.HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self._sum)


def _read(engine: Source) -> tuple[dict[str, Any], dict[str, float]]:
    """The engine works in another thread meanwhile: a table that grows while it is read is read again."""
    for _ in range(20):
        try:
            return engine.counts(), engine.load()
        except RuntimeError:
            continue
    return engine.counts(), engine.load()


def _stop(server: Any) -> None:
    server.shutdown()
    server.server_close()
