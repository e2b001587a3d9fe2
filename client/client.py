"""The asynchronous client of a kvferry router.

    async with KvferryClient("127.0.0.1:50051") as client:
        async for delta in client.generate("The capital of France is"):
            print(delta.text, end="")

Leaving the loop early (``aclose`` on the iterator), or cancelling the task, stops the request
everywhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

import grpc

from kvferry.client.convert import fill_usage, to_delta, to_request
from kvferry.client.errors import from_rpc_error
from kvferry.core.request import TextDelta, Usage
from kvferry.core.sampling import SamplingParams
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 32 * 2**20),
    ("grpc.max_send_message_length", 32 * 2**20),
)
STATUS_TIMEOUT_S = 10.0


class KvferryClient:
    """One connection to a router, for any number of requests at a time."""

    def __init__(self, target: str) -> None:
        """``target``: HOST:PORT of the router's gRPC API. Connects when first used."""
        self._target = target
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub = kvferry_pb2_grpc.KvferryStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and with it every request that is still running."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        timeout_s: float | None = None,
        client_request_id: str = "",
        usage: Usage | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the choices of one prompt, text or token ids; ``sampling.n`` of them, by index.

        ``timeout_s``: the request's deadline. ``usage`` is filled in by the last message. Raises
        InvalidRequest, UnknownModel, Overloaded, Unavailable, DeadlineExceeded, Cancelled.
        """
        request = to_request(prompt, sampling, model=model, client_request_id=client_request_id)
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                if usage is not None:
                    fill_usage(usage, response)
                yield to_delta(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from None
        finally:
            call.cancel()

    async def status(self) -> kvferry_pb2.StatusResponse:
        """Pools, workers, blocks by state and load. Raises Unavailable."""
        try:
            status: kvferry_pb2.StatusResponse = await self._stub.Status(
                kvferry_pb2.StatusRequest(), timeout=STATUS_TIMEOUT_S
            )
            return status
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from None
