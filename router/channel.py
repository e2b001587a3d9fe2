"""gRPC streams to workers."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from kvferry.proto import worker_pb2 as pb
from kvferry.proto import worker_pb2_grpc
from kvferry.proto.session import MAX_MESSAGE_BYTES, SECRET_KEY


class GrpcStream:
    """One ``Worker.Session`` call and the channel it runs on."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel = channel
        stub = worker_pb2_grpc.WorkerStub(channel)
        self._call = stub.Session(metadata=((SECRET_KEY, secret),))

    async def write(self, message: pb.RouterMessage) -> None:
        # Either error says that the call is over, which the reader sees too.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def read(self) -> pb.WorkerMessage | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return None if message is grpc.aio.EOF else message

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


class GrpcDial:
    """Opens sessions with the cluster's secret."""

    def __init__(self, secret: str, timeout_s: float) -> None:
        self._secret = secret
        self._timeout_s = timeout_s

    async def __call__(self, address: str) -> GrpcStream:
        size = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)
        channel = grpc.aio.insecure_channel(address, options=[size])
        try:
            async with asyncio.timeout(self._timeout_s):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close()
            raise ConnectionError(f"{address} does not answer") from None
        except asyncio.CancelledError:
            await channel.close()
            raise
        return GrpcStream(channel, self._secret)
