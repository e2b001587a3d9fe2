"""The same without asyncio, for scripts: one connection per call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from kvferry.client.client import CHANNEL_OPTIONS, STATUS_TIMEOUT_S
from kvferry.client.convert import to_delta, to_request
from kvferry.client.errors import from_rpc_error
from kvferry.core.request import TextDelta
from kvferry.core.sampling import SamplingParams
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc


def generate(
    target: str,
    prompt: str | Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    model: str = "",
    timeout_s: float | None = None,
) -> Iterator[TextDelta]:
    """Stream the choices of one prompt. Closing the iterator stops the request everywhere.

    Raises InvalidRequest, UnknownModel, Overloaded, Unavailable, DeadlineExceeded, Cancelled.
    """
    request = to_request(prompt, sampling, model=model)
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        call = kvferry_pb2_grpc.KvferryStub(channel).Generate(request, timeout=timeout_s)
        try:
            for response in call:
                yield to_delta(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from None
        finally:
            call.cancel()


def status(target: str) -> kvferry_pb2.StatusResponse:
    """Pools, workers, blocks by state and load. Raises Unavailable."""
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        try:
            request = kvferry_pb2.StatusRequest()
            answer: kvferry_pb2.StatusResponse = stub.Status(request, timeout=STATUS_TIMEOUT_S)
            return answer
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from None
