"""B037: the ports that KV arrives at give strangers nothing, on a worker that is busy serving: what
they say costs them their connection, and runs nothing.

``kv_transfer/test_listener_fuzz.py`` says any bytes and any messages to each kind of port.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import struct

import pytest
from fake_engine_model import expected
from local_system import LocalSystem, local_config, local_system

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 43))


class Marker:
    touched = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (Marker, "touched", True))


BYTES = {
    "random": random.Random(1).randbytes(5000),
    "pickle": pickle.dumps(Marker()),
    "framed pickle": struct.pack("!I", 64) + pickle.dumps(Marker()).ljust(64, b"."),
    "huge length": struct.pack("!I", 1 << 30) + b"x" * 100,
    "half a message": struct.pack("!I", 500) + b"x" * 20,
    "control stream of a stranger": b"kvfC" + struct.pack("!I", 20) + b"x" * 20,
    "data stream of a stranger": b"kvfD" + b"x" * 32,
    "nothing": b"",
}


def endpoints(system: LocalSystem) -> list[str]:
    hello = system.workers["decode-0"].hello
    return [found.endpoint for found in hello.kv_endpoints]


def connected(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition(":")
    if scheme == "tcp":
        host, port = address.rsplit(":", 1)
        assert host == "127.0.0.1"
        return socket.create_connection((host, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + address)
    return sock


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
                sock = await asyncio.to_thread(connected, endpoint)
                sock.sendall(data)
                socks.append(sock)
        answers = await asyncio.gather(*under_way)
        assert answers == [expected(PROMPT[i:], 30) for i in range(4)]
        for sock in socks:
            sock.close()
        assert await system.generate(PROMPT[5:]) == expected(PROMPT[5:], 8)
        assert not Marker.touched
        await system.settled()
