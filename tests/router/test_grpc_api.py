"""The gRPC API over real sockets, on the scripted engine."""

from __future__ import annotations

import grpc
from fake_engine import ANSWER

from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc


async def test_stream(channel: grpc.aio.Channel) -> None:
    stub = kvferry_pb2_grpc.KvferryStub(channel)
    responses = [r async for r in stub.Generate(kvferry_pb2.GenerateRequest(text="Hi"))]
    assert "".join(r.text for r in responses) == ANSWER
    print(responses[-1])
