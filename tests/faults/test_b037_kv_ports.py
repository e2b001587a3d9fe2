"""B037: the ports that KV arrives at give strangers nothing, on a worker that is busy serving: what
they say costs them their connection, and runs nothing.

``kv_transfer/test_listener_fuzz.py`` says any bytes and any messages to each kind of port.
"""

from __future__ import annotations

import asyncio

import pytest
from fake_engine_model import expected
from local_system import LocalSystem, local_config, local_system
from strangers import BAD_INPUT, Marker, framed, open_socket

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 43))


BYTES = BAD_INPUT | {
    "control stream of a stranger": b"kvfC" + framed(b"x" * 20),
    "data stream of a stranger": b"kvfD" + b"x" * 32,
    "nothing": b"",
}


def endpoints(system: LocalSystem) -> list[str]:
    hello = system.workers["decode-0"].hello
    return [found.endpoint for found in hello.kv_endpoints]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_strangers_while_a_worker_serves(transport: str) -> None:
    config = local_config(transfer={"transport": transport})
    async with local_system(config) as system:
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        under_way = [
            asyncio.create_task(system.generate(PROMPT[i:], max_tokens=30)) for i in range(4)
        ]
        socks = []
        for endpoint in endpoints(system):
            for data in BYTES.values():
                sock = await asyncio.to_thread(open_socket, endpoint, b"")
                sock.sendall(data)
                socks.append(sock)
        answers = await asyncio.gather(*under_way)
        assert answers == [expected(PROMPT[i:], 30) for i in range(4)]
        for sock in socks:
            sock.close()
        assert await system.generate(PROMPT[5:]) == expected(PROMPT[5:], 8)
        assert not Marker.touched
        await system.settled()


async def test_a_worker_that_takes_no_kv_has_no_such_port() -> None:
    config = local_config(
        prefill={"workers": 0}, decode={"role": "both"}, transfer={"transport": "auto"}
    )
    async with local_system(config) as system:
        assert not system.workers["both-0"].hello.kv_endpoints
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
