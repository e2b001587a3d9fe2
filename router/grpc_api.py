"""The gRPC API: Generate and Status, beside the standard health and reflection services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    StartupError,
    Unavailable,
    UnknownModel,
)
from kvferry.core.request import TextDelta, Timeline, Usage
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc
from kvferry.router.choices import UsageMeter, generate_text
from kvferry.router.engine import TokenEngine
from kvferry.router.intake import Intake, safe_request_id
from kvferry.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 * 2**20
HEALTH_BEAT_S = 1.0
KEEPALIVE_MS = 15_000
FIELD_METADATA = "kvferry-field"
SERVICE = kvferry_pb2.DESCRIPTOR.services_by_name["Kvferry"].full_name

# Most specific first.
_CODES: tuple[tuple[type[KvferryError], grpc.StatusCode], ...] = (
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (KvferryError, grpc.StatusCode.INTERNAL),
)
_SERVING = health_pb2.HealthCheckResponse.ServingStatus


class GenerateService(kvferry_pb2_grpc.KvferryServicer):
    """Generate and Status."""

    def __init__(self, engine: TokenEngine, intake: Intake, metrics: RouterMetrics) -> None:
        self._engine = engine
        self._intake = intake
        self._metrics = metrics

    # Written as a coroutine, not a generator, so that cancelling the call unwinds this very frame.
    async def Generate(  # type: ignore[override]
        self,
        request: kvferry_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            kvferry_pb2.GenerateRequest, kvferry_pb2.GenerateResponse
        ],
    ) -> None:
        try:
            with self._metrics.request("grpc"):
                await self._generate(request, context)
        except KvferryError as error:
            await _abort(context, error)

    async def Status(
        self, request: kvferry_pb2.StatusRequest, context: object
    ) -> kvferry_pb2.StatusResponse:
        return self._engine.status()

    async def _generate(
        self,
        request: kvferry_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            kvferry_pb2.GenerateRequest, kvferry_pb2.GenerateResponse
        ],
    ) -> None:
        intake = self._intake
        client_request_id = safe_request_id(request.client_request_id)
        intake.check_model(request.model)
        prompts = await intake.completion(
            _prompt(request), _sampling(request.sampling), context.time_remaining()
        )
        meter = UsageMeter(prompts)
        open_choices = sum(prompt.num_choices for prompt in prompts)
        async with aclosing(generate_text(self._engine, intake.codec, prompts)) as deltas:
            async for delta in deltas:
                meter.add(delta)
                self._metrics.observe(delta)
                open_choices -= delta.finish_reason is not None
                response = _response(delta, None if open_choices else meter.usage)
                response.client_request_id = client_request_id
                await context.write(response)


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The standard health service. Its state is the engine's readiness at the time of asking."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    async def Check(  # type: ignore[no-untyped-def]
        self, request: health_pb2.HealthCheckRequest, context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._state(request.service))

    async def Watch(  # type: ignore[no-untyped-def]
        self, request: health_pb2.HealthCheckRequest, context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Sends the state at first and on each change, looked for once per beat."""
        shown = None
        while True:
            state = self._state(request.service)
            if state != shown:
                shown = state
                yield health_pb2.HealthCheckResponse(status=state)
            await asyncio.sleep(HEALTH_BEAT_S)

    def _state(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in ("", SERVICE):
            return _SERVING.SERVICE_UNKNOWN
        return _SERVING.SERVING if self._engine.ready()[0] else _SERVING.NOT_SERVING


class GrpcServer:
    """One listening gRPC server. ``port`` is the real one, also when 0 was asked for."""

    def __init__(self, server: grpc.aio.Server, host: str, port: int) -> None:
        self._server = server
        self.host = host
        self.port = port

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new calls, let those under way end within the grace time, then cancel them."""
        await self._server.stop(grace_s)


def make_grpc_server(
    engine: TokenEngine, intake: Intake, metrics: RouterMetrics, host: str, port: int
) -> GrpcServer:
    """Listen on ``host:port``; call inside a running event loop. Raises StartupError."""
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # A client whose host vanished ends as one that hung up.
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        )
    )
    kvferry_pb2_grpc.add_KvferryServicer_to_server(GenerateService(engine, intake, metrics), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(engine), server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((SERVICE, health_name, reflection.SERVICE_NAME), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(
            f"router.grpc: cannot listen on {address}: {error}; "
            "choose another address with --grpc HOST:PORT, or port 0 for a free one"
        ) from None
    return GrpcServer(server, host, bound)


async def _abort(context: Any, error: KvferryError) -> NoReturn:
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    if code is grpc.StatusCode.INTERNAL:
        log.error("Generate: internal error", exc_info=error)
        await context.abort(code, "internal error")
    metadata = ((FIELD_METADATA, error.field),) if isinstance(error, InvalidRequest) else ()
    await context.abort(code, str(error), metadata)
    raise AssertionError("abort always raises")


def _prompt(request: kvferry_pb2.GenerateRequest) -> str | list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is required: set text or token_ids")
    return request.text if kind == "text" else list(request.token_ids.ids)


def _sampling(message: kvferry_pb2.SamplingParams) -> dict[str, Any]:
    """Fields under the names of core's SamplingParams; unset optional ones keep its defaults."""
    values = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = tuple(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return values


def _response(delta: TextDelta, usage: Usage | None) -> kvferry_pb2.GenerateResponse:
    response = kvferry_pb2.GenerateResponse(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason or "",
        stop_string=delta.stop_reason if isinstance(delta.stop_reason, str) else "",
    )
    for entry in delta.logprobs:
        shown = response.logprobs.add(token_id=entry.token_id, logprob=entry.logprob)
        for token_id, logprob in entry.top:
            shown.top.add(token_id=token_id, logprob=logprob)
    if delta.timeline is not None:
        response.timeline.CopyFrom(_timeline(delta.timeline))
    if usage is not None:
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.completion_tokens = usage.completion_tokens
        response.usage.cached_tokens = usage.cached_tokens
    return response


def _timeline(timeline: Timeline) -> kvferry_pb2.Timeline:
    names = kvferry_pb2.Timeline.DESCRIPTOR.fields_by_name
    return kvferry_pb2.Timeline(**{name: getattr(timeline, name) for name in names})
