"""The error tree in the words of the OpenAI API: status, type, param, code."""

from __future__ import annotations

from typing import Any

from kvferry.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    Unavailable,
    UnknownModel,
)

RETRY_AFTER_S = 1

# Most specific first.
_TABLE: tuple[tuple[type[KvferryError], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (Cancelled, 499, "cancelled", "client_closed_request"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (Unavailable, 503, "service_unavailable", "unavailable"),
    (KvferryError, 500, "server_error", "internal_error"),
)
_TYPES = {404: "invalid_request_error", 405: "invalid_request_error"}


def error_status(error: KvferryError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status, *_ in _TABLE if isinstance(error, kind))


def error_body(error: KvferryError) -> dict[str, Any]:
    """The JSON body of an error."""
    _, _, kind, code = next(row for row in _TABLE if isinstance(error, row[0]))
    param = error.field if isinstance(error, InvalidRequest) else None
    # Details of an internal error are for the log, not for clients.
    message = "internal error" if code == "internal_error" else str(error)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: KvferryError) -> dict[str, str]:
    """Extra headers: when to come back, if that may help."""
    return {"retry-after": str(RETRY_AFTER_S)} if isinstance(error, Unavailable) else {}


def plain_error_body(status: int, message: str) -> dict[str, Any]:
    """The same shape for what the web framework refuses, such as an unknown path."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
