"""The session port under routers that read nothing, lag, or are none at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from fake_engine_model import expected
from gates import eventually
from local_system import SECRET, LocalSystem, local_config, local_system

from kvferry.core.ids import Incarnation
from kvferry.engine.outbox import MAX_MESSAGES, Outbox
from kvferry.proto import worker_pb2 as pb
from kvferry.proto import worker_pb2_grpc
from kvferry.proto.session import PROTOCOL, SECRET_KEY

ME = Incarnation(5)


@asynccontextmanager
async def deaf_router(system: LocalSystem, worker: str) -> AsyncIterator[None]:
    """Says hello and beats as it should, and never reads."""
    address = next(w.session_address for w in system.router.status().workers if w.role in worker)
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session(metadata=((SECRET_KEY, SECRET),))
        hello = pb.RouterHello(incarnation=ME, protocol=PROTOCOL)
        await call.write(pb.RouterMessage(hello=hello))

        async def beat() -> None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(pb.RouterMessage(renew=pb.Renew()))
                    await asyncio.sleep(0.05)

        beats = asyncio.create_task(beat())
        yield
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        call.cancel()


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_a_router_that_reads_nothing_loses_its_session_and_nobody_else_anything(
    worker: str,
) -> None:
    config = local_config(cluster={"silence_s": 0.8})
    async with local_system(config, grpc=True) as system:
        loop, ports = system.workers[worker].loop, system.workers[worker].role.ports
        async with deaf_router(system, worker):
            await eventually(lambda: ME in ports)
            port = ports[ME]
            hashes = [random.randbytes(16) for _ in range(8192)]

            def flood() -> None:
                for sequence in range(100):
                    delta = pb.CacheDelta(sequence=sequence, added=hashes)
                    port.send(pb.WorkerMessage(cache_delta=delta))

            loop.post(flood)
            await eventually(lambda: ME not in ports, what="the session ended")
            assert port.take() is None
            assert await system.generate([1, 2, 3]) == expected([1, 2, 3], 8)
        await system.settled()


async def test_noise_on_the_session_port_disturbs_nobody() -> None:
    async with local_system(local_config(), grpc=True) as system:
        for worker in system.router.status().workers:
            host, port = worker.session_address.rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(random.randbytes(100_000))
            with suppress(ConnectionError):
                await writer.drain()
                await reader.read()
            writer.close()
        assert await system.generate([1, 2, 3]) == expected([1, 2, 3], 8)


def test_an_outbox_that_has_overflowed_takes_no_more() -> None:
    notified: list[bool] = []
    outbox = Outbox(ME, lambda: notified.append(outbox.overflowed))
    for number in range(2 * MAX_MESSAGES):
        busy = pb.Busy(key=pb.Key(request=number, attempt=1))
        outbox.send(pb.WorkerMessage(busy=busy))
    assert outbox.overflowed
    assert notified == [False, True]
    held = 0
    while outbox.take() is not None:
        held += 1
    assert held == MAX_MESSAGES + 1
