"""What a gRPC call fails with, as core's error tree."""

from __future__ import annotations

import grpc

from kvferry.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    ProtocolError,
    Unavailable,
    UnknownModel,
)

FIELD_METADATA = "kvferry-field"
"""Trailing metadata that names the wrong field."""

_INVALID: dict[grpc.StatusCode, type[InvalidRequest]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
}
_KINDS: dict[grpc.StatusCode, type[KvferryError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}


def from_rpc_error(error: grpc.RpcError, target: str) -> KvferryError:
    """The error that the router meant, or that the way to it met."""
    code, details = error.code(), error.details() or ""
    if code in _INVALID:
        metadata = dict(error.trailing_metadata() or ())
        field = str(metadata.get(FIELD_METADATA, "request"))
        return _INVALID[code](field, details.removeprefix(f"{field}: "))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"no kvferry router answers at {target}: {details}"
    if code is grpc.StatusCode.UNAVAILABLE:
        details = f"{target}: {details}"
    return _KINDS.get(code, KvferryError)(details or code.name)
