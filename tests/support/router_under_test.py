"""Both APIs of a router over real sockets, on the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
from fake_engine import MAX_MODEL_LEN, MODEL, ByteCodec, FakeEngine
from prometheus_client import CollectorRegistry

from kvferry.core.config import RouterConfig
from kvferry.router.grpc_api import make_grpc_server
from kvferry.router.http_api import make_app
from kvferry.router.http_server import make_http_server
from kvferry.router.intake import Intake
from kvferry.router.metrics import RouterMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterUnderTest:
    """The servers and a client of each."""

    engine: FakeEngine
    metrics: RouterMetrics
    http: httpx.AsyncClient
    http_port: int
    channel: grpc.aio.Channel
    grpc_port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


def fake_intake(config: RouterConfig | None = None) -> Intake:
    return Intake(
        ByteCodec(),
        model_name=MODEL,
        max_model_len=MAX_MODEL_LEN,
        config=config or RouterConfig(),
    )


@asynccontextmanager
async def running_router(config: RouterConfig | None = None) -> AsyncIterator[RouterUnderTest]:
    """Start both servers on free ports; stop them, and check that nothing is left running."""
    engine, intake, metrics = FakeEngine(), fake_intake(config), RouterMetrics(CollectorRegistry())
    metrics.watch(engine)
    http_server = make_http_server(make_app(engine, intake, metrics), "127.0.0.1", 0, grace_s=1)
    grpc_server = make_grpc_server(engine, intake, metrics, "127.0.0.1", 0)
    await http_server.start()
    await grpc_server.start()
    base_url, target = f"http://127.0.0.1:{http_server.port}", f"127.0.0.1:{grpc_server.port}"
    try:
        async with (
            httpx.AsyncClient(base_url=base_url, timeout=10, trust_env=False) as http,
            grpc.aio.insecure_channel(target) as channel,
        ):
            yield RouterUnderTest(
                engine=engine,
                metrics=metrics,
                http=http,
                http_port=http_server.port,
                channel=channel,
                grpc_port=grpc_server.port,
            )
            await engine.idle()
    finally:
        await grpc_server.stop(grace_s=1)
        await http_server.stop()
