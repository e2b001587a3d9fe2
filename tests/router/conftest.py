"""A router of both APIs over real sockets, on the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from fake_engine import MAX_MODEL_LEN, MODEL, ByteCodec, FakeEngine
from prometheus_client import CollectorRegistry

from kvferry.core.config import RouterConfig
from kvferry.router.grpc_api import make_grpc_server
from kvferry.router.http_api import make_app
from kvferry.router.http_server import make_http_server
from kvferry.router.intake import Intake
from kvferry.router.metrics import RouterMetrics


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def intake() -> Intake:
    return Intake(
        ByteCodec(), model_name=MODEL, max_model_len=MAX_MODEL_LEN, config=RouterConfig()
    )


@pytest.fixture
def metrics(engine: FakeEngine) -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.watch(engine)
    return metrics


@pytest.fixture
async def base_url(
    engine: FakeEngine, intake: Intake, metrics: RouterMetrics
) -> AsyncIterator[str]:
    server = make_http_server(make_app(engine, intake, metrics), "127.0.0.1", 0, grace_s=1)
    await server.start()
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=10, trust_env=False) as client:
        yield client


@pytest.fixture
async def grpc_target(
    engine: FakeEngine, intake: Intake, metrics: RouterMetrics
) -> AsyncIterator[str]:
    server = make_grpc_server(engine, intake, metrics, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(grace_s=1)


@pytest.fixture
async def channel(grpc_target: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        yield channel
