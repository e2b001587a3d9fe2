"""The router with its two APIs on their ports."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from kvferry.core.config import Config
from kvferry.core.units import parse_address
from kvferry.router.engine import TokenEngine
from kvferry.router.grpc_api import GrpcServer, make_grpc_server
from kvferry.router.http_api import make_app
from kvferry.router.http_server import HttpServer, make_http_server
from kvferry.router.intake import Intake, TextCodec
from kvferry.router.metrics import RouterMetrics


class ApiServer:
    """gRPC and HTTP in front of one engine."""

    def __init__(
        self,
        config: Config,
        engine: TokenEngine,
        codec: TextCodec,
        max_model_len: int,
        model_vocab_size: int | None = None,
    ) -> None:
        self._engine = engine
        self._grace_s = config.cluster.stop_timeout_s
        self._metrics = RouterMetrics(CollectorRegistry())
        self._metrics.watch(engine)
        self._intake = Intake(
            codec,
            model_name=config.model.name,
            max_model_len=max_model_len,
            config=config.router,
            model_vocab_size=model_vocab_size,
        )
        self._grpc_address = parse_address(config.router.grpc)
        self._http_address = parse_address(config.router.http)
        self._grpc: GrpcServer | None = None
        self._http: HttpServer | None = None

    async def start(self) -> tuple[str, str]:
        """Listen. Returns the addresses of gRPC and HTTP, HOST:PORT. Raises StartupError."""
        parts = self._engine, self._intake, self._metrics
        self._grpc = make_grpc_server(*parts, *self._grpc_address)
        self._http = make_http_server(make_app(*parts), *self._http_address, grace_s=self._grace_s)
        await self._grpc.start()
        await self._http.start()
        return f"{self._grpc.host}:{self._grpc.port}", f"{self._http.host}:{self._http.port}"

    async def stop(self) -> None:
        """Take nothing new; what is under way may end within ``cluster.stop_timeout_s``."""
        stops = []
        if self._http is not None:
            stops.append(self._http.stop())
        if self._grpc is not None:
            stops.append(self._grpc.stop(self._grace_s))
        await asyncio.gather(*stops)
