"""Prometheus metrics of one router, in a registry of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    Unavailable,
)
from kvferry.core.request import TextDelta
from kvferry.router.engine import TokenEngine
from kvferry.router.transfer_metrics import TransferMetrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (InvalidRequest, "invalid"),
    (DeadlineExceeded, "deadline"),
    (Cancelled, "cancelled"),
    (asyncio.CancelledError, "cancelled"),
    (Overloaded, "overloaded"),
    (Unavailable, "unavailable"),
    (KvferryError, "error"),
)


class RouterMetrics:
    """All of a router's metrics. Clock: seconds, monotonic."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = registry
        self._clock = clock
        self._requests = Counter(
            "kvferry_request", "Requests by API and outcome.", ("api", "outcome"), registry=registry
        )
        self._e2e = self._seconds("e2e", "From arrival to the last byte of the answer.")
        self._ttft = self._seconds("ttft", "From dispatch to the first token of a choice.")
        self._tpot = self._seconds("tpot", "Mean time per output token after the first.")
        self._queue = self._seconds("queue", "In the router's queue.")
        self._prefill = self._seconds("prefill", "Computing the prompt.")
        self._exposed = self._seconds("transfer_exposed", "KV transfer that nothing hid.")
        self._prompt = self._tokens("prompt", "Prompt tokens of finished choices.")
        self._cached = self._tokens("cached_prompt", "Prompt tokens found in a prefix cache.")
        self._output = self._tokens("output", "Tokens generated.")

    def watch(self, engine: TokenEngine) -> None:
        """Read the running and queued gauges, and readiness, from ``engine`` at each scrape."""
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("kvferry_running", "Choices being served.", lambda: engine.status().running),
            ("kvferry_queued", "Choices waiting for workers.", lambda: engine.status().queued),
            ("kvferry_ready", "1 when requests can be served.", lambda: engine.ready()[0]),
        )
        for name, help_text, read in gauges:
            Gauge(name, help_text, registry=self.registry).set_function(read)
        self.registry.register(TransferMetrics(engine.status))

    @contextmanager
    def request(self, api: str) -> Iterator[None]:
        """Count one request by how the block ends, and time it."""
        began = self._clock()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        except BaseException as error:
            outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), outcome)
            raise
        finally:
            self._requests.labels(api, outcome).inc()
            if outcome == "ok":
                self._e2e.observe(self._clock() - began)

    def observe(self, delta: TextDelta) -> None:
        """Account for a choice that ended; other deltas count nothing."""
        timeline = delta.timeline
        if timeline is None:
            return
        self._ttft.observe(timeline.ttft_s)
        if timeline.output_tokens > 1:
            self._tpot.observe(timeline.tpot_s)
        self._queue.observe(timeline.queue_s)
        self._prefill.observe(timeline.prefill_s)
        if timeline.transfer_bytes:
            self._exposed.observe(timeline.transfer_exposed_s)
        self._prompt.inc(timeline.prompt_tokens)
        self._cached.inc(timeline.cached_tokens_prefill)
        self._output.inc(timeline.output_tokens)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return Histogram(
            f"kvferry_{name}_seconds", help_text, buckets=_SECONDS, registry=self.registry
        )

    def _tokens(self, name: str, help_text: str) -> Counter:
        return Counter(f"kvferry_{name}_tokens", help_text, registry=self.registry)
