"""B037: a worker's session port gives strangers nothing: no secret, no session; whatever bytes
arrive cost their sender the connection and nobody else anything.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine_model import expected
from local_system import SECRET, LocalSystem, local_config, local_system
from strangers import BAD_INPUT, Marker

from kvferry.proto import worker_pb2_grpc
from kvferry.proto.session import SECRET_KEY

PROMPT = list(range(20, 43))


BYTES = BAD_INPUT | {"half of a preface": b"PRI * HTTP/2.0\r\n\r\nSM"}


def addresses(system: LocalSystem) -> list[str]:
    return [worker.session_address for worker in system.router.status().workers]


@pytest.mark.parametrize("name", BYTES)
async def test_bytes_that_are_no_session(name: str) -> None:
    async with local_system(local_config(), grpc=True) as system:
        under_way = asyncio.create_task(system.generate(PROMPT, max_tokens=30))
        for address in addresses(system):
            host, port = address.rsplit(":", 1)
            assert host == "127.0.0.1"
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(BYTES[name])
            await writer.drain()
            writer.close()
        assert await under_way == expected(PROMPT, 30)
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        assert not Marker.touched


@pytest.mark.parametrize("secret", [None, "", "wrong", SECRET[:-1], SECRET + "x"])
async def test_without_the_secret_there_is_no_session(secret: str | None) -> None:
    metadata = () if secret is None else ((SECRET_KEY, secret),)
    async with local_system(local_config(), grpc=True) as system:
        for address in addresses(system):
            async with grpc.aio.insecure_channel(address) as channel:
                call = worker_pb2_grpc.WorkerStub(channel).Session(metadata=metadata)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
