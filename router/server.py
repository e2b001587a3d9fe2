"""The router with its two APIs on their ports."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvferry.core.config import Config
from kvferry.core.errors import ConfigError
from kvferry.router.engine import TokenEngine
from kvferry.router.grpc_api import GrpcServer, make_grpc_server
from kvferry.router.http_api import make_app
from kvferry.router.http_server import HttpServer, make_http_server
from kvferry.router.intake import Intake, TextCodec
from kvferry.router.metrics import RouterMetrics


class ApiServer:
    """gRPC and HTTP in front of one engine."""

    def __init__(
        self, config: Config, engine: TokenEngine, codec: TextCodec, max_model_len: int
    ) -> None:
        self._engine = engine
        self._metrics = RouterMetrics(CollectorRegistry())
        self._metrics.watch(engine)
        self._intake = Intake(
            codec,
            model_name=config.model.name,
            max_model_len=max_model_len,
            config=config.router,
        )
        self._grpc_address = split_address("router.grpc", config.router.grpc)
        self._http_address = split_address("router.http", config.router.http)
        self._grpc: GrpcServer | None = None
        self._http: HttpServer | None = None

    async def start(self) -> tuple[str, str]:
        """Listen. Returns the addresses of gRPC and HTTP, HOST:PORT. Raises StartupError."""
        parts = self._engine, self._intake, self._metrics
        self._grpc = make_grpc_server(*parts, *self._grpc_address)
        self._http = make_http_server(make_app(*parts), *self._http_address)
        await self._grpc.start()
        await self._http.start()
        return f"{self._grpc.host}:{self._grpc.port}", f"{self._http.host}:{self._http.port}"

    async def stop(self, grace_s: float) -> None:
        """Take nothing new; what is under way may end within ``grace_s``."""
        if self._http is not None:
            await self._http.stop()
        if self._grpc is not None:
            await self._grpc.stop(grace_s)


def split_address(key: str, address: str) -> tuple[str, int]:
    """HOST:PORT, IPv6 hosts in brackets. Raises ConfigError naming ``key``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(key, f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
