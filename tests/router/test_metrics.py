"""What a scrape shows after some requests."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine, Hold
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from router_under_test import RouterUnderTest

from kvferry.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from kvferry.core.request import TextDelta, Timeline
from kvferry.router.metrics import RouterMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry(), Clock())


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (InvalidRequest("a", "b"), "invalid"),
        (Overloaded("x"), "overloaded"),
        (Unavailable("x"), "unavailable"),
        (WorkerLost("x"), "unavailable"),
        (DeadlineExceeded("x"), "deadline"),
        (Cancelled("x"), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (ProtocolError("x"), "error"),
        (ZeroDivisionError(), "error"),
    ],
)
def test_outcomes(metrics: RouterMetrics, error: BaseException | None, outcome: str) -> None:
    def one_request() -> None:
        with metrics.request("chat"):
            if error is not None:
                raise error

    if error is None:
        one_request()
    else:
        with pytest.raises(type(error)):
            one_request()
    assert value(metrics, "kvferry_request_total", api="chat", outcome=outcome) == 1
    assert value(metrics, "kvferry_e2e_seconds_count") == (error is None)


def test_end_to_end_time(metrics: RouterMetrics) -> None:
    clock = Clock()
    metrics = RouterMetrics(CollectorRegistry(), clock)
    with metrics.request("grpc"):
        clock.now += 2
    assert value(metrics, "kvferry_e2e_seconds_sum") == 2


def test_timeline(metrics: RouterMetrics) -> None:
    metrics.observe(TextDelta(index=0, text="no timeline yet"))
    assert value(metrics, "kvferry_ttft_seconds_count") == 0
    timeline = Timeline(
        queue_s=0.5,
        ttft_s=2.0,
        prefill_s=1.0,
        decode_s=3.0,
        transfer_bytes=100,
        transfer_exposed_s=0.25,
        prompt_tokens=40,
        cached_tokens_prefill=30,
        output_tokens=4,
    )
    metrics.observe(TextDelta(index=0, timeline=timeline))
    metrics.observe(TextDelta(index=1, timeline=Timeline(prompt_tokens=5, output_tokens=1)))
    expected = {
        "kvferry_ttft_seconds_sum": 2.0,
        "kvferry_tpot_seconds_sum": 1.0,
        "kvferry_tpot_seconds_count": 1,
        "kvferry_queue_seconds_sum": 0.5,
        "kvferry_prefill_seconds_sum": 1.0,
        "kvferry_transfer_exposed_seconds_sum": 0.25,
        "kvferry_transfer_exposed_seconds_count": 1,
        "kvferry_prompt_tokens_total": 45,
        "kvferry_cached_prompt_tokens_total": 30,
        "kvferry_output_tokens_total": 5,
    }
    assert {name: value(metrics, name) for name in expected} == expected


def test_two_routers_of_one_process_do_not_meet() -> None:
    first, second = (RouterMetrics(CollectorRegistry()) for _ in range(2))
    first.watch(FakeEngine())
    second.watch(FakeEngine())
    with first.request("chat"):
        pass
    assert value(second, "kvferry_request_total", api="chat", outcome="ok") is None


async def test_scrape(router: RouterUnderTest) -> None:
    hold = Hold()
    await router.http.post("/v1/completions", json={"prompt": "x", "n": 2})
    router.engine.script = lambda request, index: [hold]
    waiting = asyncio.create_task(router.http.post("/v1/completions", json={"prompt": "x"}))
    await hold.reached.wait()
    response = await router.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["kvferry_running"] == 1
    assert samples["kvferry_queued"] == 0
    assert samples["kvferry_ready"] == 1
    assert samples["kvferry_output_tokens_total"] == 40
    waiting.cancel()
