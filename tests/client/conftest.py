"""A router's gRPC API on the scripted engine, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_engine import MAX_MODEL_LEN, MODEL, ByteCodec, FakeEngine
from prometheus_client import CollectorRegistry

from kvferry.client.client import KvferryClient
from kvferry.core.config import RouterConfig
from kvferry.router.grpc_api import make_grpc_server
from kvferry.router.intake import Intake
from kvferry.router.metrics import RouterMetrics


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def target(engine: FakeEngine) -> AsyncIterator[str]:
    config = RouterConfig()
    intake = Intake(ByteCodec(), model_name=MODEL, max_model_len=MAX_MODEL_LEN, config=config)
    metrics = RouterMetrics(CollectorRegistry())
    server = make_grpc_server(engine, intake, metrics, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(grace_s=1)


@pytest.fixture
async def client(target: str) -> AsyncIterator[KvferryClient]:
    async with KvferryClient(target) as client:
        yield client
