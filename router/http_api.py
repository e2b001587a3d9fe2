"""The OpenAI-compatible HTTP API.

One coroutine serves one request from its first byte to its last (``Exchange``). A client that hangs
up cancels it, whether it streams or not, and with it everything it started.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.core.errors import InvalidRequest, KvferryError
from kvferry.core.request import TextDelta
from kvferry.router.choices import UsageMeter, generate_text
from kvferry.router.engine import TokenEngine
from kvferry.router.http_tokens import detokenize_body, tokenize_body
from kvferry.router.intake import Intake, safe_request_id
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai_errors import (
    error_body,
    error_headers,
    error_status,
    plain_error_body,
)
from kvferry.router.openai_fields import parse_body
from kvferry.router.openai_reply import encode_json
from kvferry.router.openai_routes import Job, Prepare, prepare_chat, prepare_completion

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
MAX_IGNORED_HEADER_CHARS = 512


class ClientGone(Exception):
    """The client hung up while its request was read: there is nobody to answer."""


class Exchange(Response):
    """One generating request: reads the body and writes the answer, whole or streamed."""

    def __init__(self, api: HttpApi, name: str, prepare: Prepare) -> None:
        super().__init__()
        self._api = api
        self._name = name
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(receive)
        except ClientGone:
            return
        except InvalidRequest as error:
            await error_response(error)(scope, receive, send)
            return
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._answer(raw, scope, receive, send))
            watch = group.create_task(_cancel_at_hangup(receive, work))
            work.add_done_callback(lambda _: watch.cancel())

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            with self._api.metrics.request(self._name):
                job = await self._prepare(self._api.intake, parse_body(raw))
                headers = _ignored_headers(job.ignored, self._name)
                meter = UsageMeter(job.prompts)
                async with aclosing(self._deltas(job, meter)) as deltas:
                    if not job.stream:
                        async for delta in deltas:
                            job.reply.add(delta)
                        body = job.reply.body(meter.usage)
                        response = Response(body, headers=headers, media_type="application/json")
                        await response(scope, receive, send)
                        return
                    async for delta in deltas:
                        # Not before the first token: an error until then has its own status.
                        if not started:
                            await send(_stream_start(headers))
                            started = True
                        await _send_chunk(send, job.reply.event(delta, meter.usage))
                await _send_chunk(send, job.reply.last_event(meter.usage), more=False)
        except KvferryError as error:
            _log_error(error, self._name)
            if started:
                event = b"data: " + encode_json(error_body(error)) + b"\n\n"
                await _send_chunk(send, event, more=False)
            else:
                await error_response(error)(scope, receive, send)

    async def _deltas(self, job: Job, meter: UsageMeter) -> AsyncGenerator[TextDelta, None]:
        api = self._api
        async with aclosing(generate_text(api.engine, api.intake.codec, job.prompts)) as deltas:
            async for delta in deltas:
                meter.add(delta)
                api.metrics.observe(delta)
                yield delta


class HttpApi:
    """The endpoints."""

    def __init__(self, engine: TokenEngine, intake: Intake, metrics: RouterMetrics) -> None:
        self.engine = engine
        self.intake = intake
        self.metrics = metrics

    async def completions(self, request: Request) -> Response:
        return Exchange(self, "completions", prepare_completion)

    async def chat(self, request: Request) -> Response:
        return Exchange(self, "chat", prepare_chat)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        try:
            self.intake.check_model(request.path_params["name"])
        except InvalidRequest as error:
            return error_response(error)
        return json_response(self._model())

    async def tokenize(self, request: Request) -> Response:
        try:
            body = parse_body(await read_body(request.receive))
            return json_response(await tokenize_body(self.intake, body))
        except InvalidRequest as error:
            return error_response(error)

    async def detokenize(self, request: Request) -> Response:
        try:
            body = parse_body(await read_body(request.receive))
            return json_response(await detokenize_body(self.intake, body))
        except InvalidRequest as error:
            return error_response(error)

    async def live(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        ready, reason = self.engine.ready()
        if ready:
            return json_response({"status": "ok"})
        return json_response({"status": "not ready", "reason": reason}, status=503)

    async def prometheus(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, object]:
        return {
            "id": self.intake.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvferry",
            "max_model_len": self.intake.max_model_len,
        }


def make_app(engine: TokenEngine, intake: Intake, metrics: RouterMetrics) -> ASGIApp:
    """The HTTP API as an ASGI application."""
    api = HttpApi(engine, intake, metrics)
    app = FastAPI(title="kvferry", openapi_url=None, docs_url=None, redoc_url=None)
    routes = (
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/chat/completions", api.chat),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
        ("GET", "/health", api.ready),
        ("GET", "/health/live", api.live),
        ("GET", "/health/ready", api.ready),
        ("GET", "/metrics", api.prometheus),
    )
    for method, path, endpoint in routes:
        app.add_route(path, endpoint, methods=[method], include_in_schema=False)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _internal_error)
    return RequestIds(app)


class RequestIds:
    """Gives every answer an ``x-request-id``: the client's own, made safe, or a random one.

    It is only ever echoed; nothing inside is known by it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
        shown = safe_request_id(given.decode("latin-1")) or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"x-request-id", shown.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises ClientGone; InvalidRequest when it is larger than MAX_BODY_BYTES."""
    chunks: list[bytes] = []
    nbytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        nbytes += len(chunk)
        if nbytes > MAX_BODY_BYTES:
            raise InvalidRequest("body", f"must not be larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def json_response(body: object, status: int = 200) -> Response:
    return Response(encode_json(body), status_code=status, media_type="application/json")


def error_response(error: KvferryError) -> Response:
    return Response(
        encode_json(error_body(error)),
        status_code=error_status(error),
        headers=error_headers(error),
        media_type="application/json",
    )


async def _cancel_at_hangup(receive: Receive, work: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def _stream_start(headers: dict[str, str]) -> Message:
    fields = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        **headers,
    }
    encoded = [(key.encode(), value.encode("latin-1")) for key, value in fields.items()]
    return {"type": "http.response.start", "status": 200, "headers": encoded}


async def _send_chunk(send: Send, chunk: bytes, *, more: bool = True) -> None:
    if chunk or not more:
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


def _ignored_headers(ignored: list[str], api: str) -> dict[str, str]:
    if not ignored:
        return {}
    names = ",".join(ascii(name)[1:-1] for name in ignored)[:MAX_IGNORED_HEADER_CHARS]
    log.info("%s: ignored unknown fields: %s", api, names)
    return {"x-kvferry-ignored-fields": names}


def _log_error(error: KvferryError, api: str) -> None:
    if error_status(error) == 500:
        log.error("%s: internal error", api, exc_info=error)


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = plain_error_body(error.status_code, str(error.detail))
    response = json_response(body, status=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    return json_response(plain_error_body(500, "internal error"), status=500)
