"""The gRPC API over real sockets, on the scripted engine."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import grpc
import pytest
from fake_engine import ANSWER, BOS, EOS, MODEL, FakeEngine, Hold, script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from router_under_test import RouterUnderTest

from kvferry.client import errors as client_errors
from kvferry.core.errors import (
    DeadlineExceeded,
    KvferryError,
    Overloaded,
    ProtocolError,
    StartupError,
    Unavailable,
    WorkerLost,
)
from kvferry.core.request import Timeline, TokenStep
from kvferry.core.sampling import SamplingParams
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc
from kvferry.router import grpc_api
from kvferry.router.grpc_api import make_grpc_server
from kvferry.router.intake import Intake
from kvferry.router.metrics import RouterMetrics

# One router meets all tests, one after the other.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def router(shared_router: RouterUnderTest) -> RouterUnderTest:
    shared_router.engine.reset()
    return shared_router


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def stub(router: RouterUnderTest) -> kvferry_pb2_grpc.KvferryAsyncStub:
    return kvferry_pb2_grpc.KvferryStub(router.channel)  # type: ignore[return-value]


async def ask(
    stub: kvferry_pb2_grpc.KvferryAsyncStub, request: kvferry_pb2.GenerateRequest
) -> list[kvferry_pb2.GenerateResponse]:
    return [response async for response in stub.Generate(request)]


async def test_choices_with_usage_on_the_last_message(
    stub: kvferry_pb2_grpc.KvferryAsyncStub,
) -> None:
    request = kvferry_pb2.GenerateRequest(
        model=MODEL, text="Hi", sampling=kvferry_pb2.SamplingParams(n=3)
    )
    responses = await ask(stub, request)
    for index in range(3):
        mine = [r for r in responses if r.index == index]
        assert "".join(r.text for r in mine) == ANSWER
        assert [t for r in mine for t in r.token_ids] == [*ANSWER.encode(), EOS]
        assert [r.finish_reason for r in mine if r.finish_reason] == ["stop"]
        assert mine[-1].timeline.output_tokens == len(ANSWER.encode()) + 1
        assert not any(r.HasField("timeline") for r in mine[:-1])
    usage = responses[-1].usage
    assert not any(r.HasField("usage") for r in responses[:-1])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 60, 2)


async def test_token_ids_and_stop_string(
    router: RouterUnderTest, stub: kvferry_pb2_grpc.KvferryAsyncStub
) -> None:
    request = kvferry_pb2.GenerateRequest(
        token_ids=kvferry_pb2.TokenIds(ids=[BOS, 72]),
        sampling=kvferry_pb2.SamplingParams(stop=["caf", "zzz"], logprobs=1),
    )
    responses = await ask(stub, request)
    assert "".join(r.text for r in responses) == " Paris, "
    assert responses[-1].stop_string == "caf"
    assert [entry.token_id for r in responses for entry in r.logprobs] == list(b" Paris, ")
    assert router.engine.requests[0].prompt_token_ids == (BOS, 72)
    assert router.engine.closed_early == 1


async def test_unset_means_default_and_zero_means_zero(
    router: RouterUnderTest, stub: kvferry_pb2_grpc.KvferryAsyncStub
) -> None:
    await ask(stub, kvferry_pb2.GenerateRequest(text="Hi"))
    zero = kvferry_pb2.SamplingParams(temperature=0, seed=0, logprobs=0)
    await ask(stub, kvferry_pb2.GenerateRequest(text="Hi", sampling=zero))
    unset, zeroed = (request.sampling for request in router.engine.requests)
    assert unset.seed is not None
    assert unset == SamplingParams(seed=unset.seed, max_tokens=198)
    assert zeroed == SamplingParams(seed=0, max_tokens=198, temperature=0.0, logprobs=0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("nobody"), grpc.StatusCode.UNAVAILABLE),
        (WorkerLost("gone"), grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ProtocolError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_errors(
    router: RouterUnderTest,
    stub: kvferry_pb2_grpc.KvferryAsyncStub,
    error: KvferryError,
    code: grpc.StatusCode,
    num_tokens: int,
) -> None:
    router.engine.script = lambda request, index: [*script("abc")[:num_tokens], error]
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012
        async for response in stub.Generate(kvferry_pb2.GenerateRequest(text="Hi")):
            received.append(response.text)
    assert caught.value.code() is code
    assert "".join(received) == "abc"[:num_tokens]
    assert "secret" not in (caught.value.details() or "")
    router.engine.script = lambda request, index: script("fine")
    good = await ask(stub, kvferry_pb2.GenerateRequest(text="Hi"))
    assert "".join(r.text for r in good) == "fine"


async def test_unknown_model(stub: kvferry_pb2_grpc.KvferryAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="model: 'other'") as caught:
        await ask(stub, kvferry_pb2.GenerateRequest(text="Hi", model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_client_request_id_is_echoed_and_no_identity(
    router: RouterUnderTest, stub: kvferry_pb2_grpc.KvferryAsyncStub
) -> None:
    """Fault B030: two live requests of one id; one is cancelled, the other one ends well."""
    holds = [Hold(), Hold()]
    waiting = iter(holds)
    router.engine.script = lambda request, index: [next(waiting), *script("fine")]
    request = kvferry_pb2.GenerateRequest(text="Hi", client_request_id="a/b\x00" + "c" * 500)
    first = stub.Generate(request)
    await holds[0].reached.wait()
    second = asyncio.create_task(ask(stub, request))
    await holds[1].reached.wait()
    first.cancel()
    await router.engine.until_running(1)
    holds[1].release.set()
    responses = await second
    assert "".join(r.text for r in responses) == "fine"
    assert {r.client_request_id for r in responses} == {"ab" + "c" * 124}


async def test_a_defect_ends_one_call_only(
    router: RouterUnderTest, stub: kvferry_pb2_grpc.KvferryAsyncStub
) -> None:
    router.engine.script = lambda request, index: [TokenStep((65,)), ZeroDivisionError("oh")]
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(stub, kvferry_pb2.GenerateRequest(text="Hi"))
    router.engine.script = lambda request, index: script("fine")
    good = await ask(stub, kvferry_pb2.GenerateRequest(text="Hi"))
    assert "".join(r.text for r in good) == "fine"


async def test_status(router: RouterUnderTest, stub: kvferry_pb2_grpc.KvferryAsyncStub) -> None:
    assert (await stub.Status(kvferry_pb2.StatusRequest())).ready
    router.engine.not_ready = "no worker"
    status = await stub.Status(kvferry_pb2.StatusRequest())
    assert (status.ready, status.reason) == (False, "no worker")


@pytest.mark.parametrize("service", ["", "kvferry.v1.Kvferry"])
async def test_health_follows_readiness(router: RouterUnderTest, service: str) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    watch = health.Watch(request)
    assert (await health.Check(request)).status == SERVING
    assert (await watch.read()).status == SERVING
    router.engine.not_ready = "no worker"
    assert (await health.Check(request)).status == NOT_SERVING
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_health_of_an_unknown_service(router: RouterUnderTest) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_names_the_services(router: RouterUnderTest) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"kvferry.v1.Kvferry", "grpc.health.v1.Health"} <= names


async def test_port_in_use(engine: FakeEngine, intake: Intake) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    first = make_grpc_server(engine, intake, metrics, "127.0.0.1", 0)
    await first.start()
    with pytest.raises(StartupError, match=rf"router.grpc: .*127\.0\.0\.1:{first.port}.*--grpc"):
        make_grpc_server(engine, intake, metrics, "127.0.0.1", first.port)
    await first.stop(0)


async def test_both_sides_agree() -> None:
    assert grpc_api.FIELD_METADATA == client_errors.FIELD_METADATA
    message = kvferry_pb2.Timeline.DESCRIPTOR.fields_by_name
    assert [field.name for field in fields(Timeline)] == list(message)
    sampling = kvferry_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(SamplingParams.model_fields) == set(sampling)
