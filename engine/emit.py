"""Turns the tokens of a step into one message per router.

NOTE. The numbers of a message are laid out as numpy has them and taken in as a whole: only what has
finished, or wants log-probabilities, costs Python per sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import Incarnation
from kvferry.core.request import FinishReason
from kvferry.engine.commit import logprob_message
from kvferry.engine.plan import Int64, RowLogprobs
from kvferry.engine.ports import RouterPort
from kvferry.engine.table import Rows, SequenceTable
from kvferry.proto import worker_pb2 as pb

_FIELDS = pb.Tokens.DESCRIPTOR.fields_by_name
_LENGTH_DELIMITED = 2
"""Wire type of packed fields."""


def emit_tokens(
    table: SequenceTable,
    ports: dict[Incarnation, RouterPort],
    rows: Rows,
    token_ids: Int64,
    finished: dict[int, FinishReason],
    logprobs: dict[int, RowLogprobs],
) -> None:
    """Send each router its part of a step. ``finished`` and ``logprobs`` are keyed by index
    into ``rows``.
    """
    routers = table.router[rows]
    for incarnation, port in ports.items():
        mine = np.flatnonzero(routers == incarnation)
        if not mine.size:
            continue
        owned = rows[mine]
        message = pb.WorkerMessage()
        tokens = message.tokens
        tokens.MergeFromString(
            _packed("requests", table.request[owned], "<u8")
            + _packed("attempts", table.attempt[owned], "<u4")
            + _packed("token_ids", token_ids[mine], "<u4")
        )
        if finished:
            tokens.finished.extend(
                pb.Finished(key=_key(table, int(rows[i])), reason=why)
                for i, why in finished.items()
                if routers[i] == incarnation
            )
        if logprobs:
            empty = pb.Logprob()
            tokens.logprobs.extend(
                logprob_message(logprobs[i]) if i in logprobs else empty for i in mine.tolist()
            )
        port.send(message)


def _packed(field: str, values: NDArray[np.integer], element: str) -> bytes:
    """A packed field of fixed-width integers as it stands in a message: tag, length, elements."""
    data = values.astype(element).tobytes()
    tag = _FIELDS[field].number << 3 | _LENGTH_DELIMITED
    return _varint(tag) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; all but the last byte have their top bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _key(table: SequenceTable, row: int) -> pb.Key:
    return pb.Key(request=int(table.request[row]), attempt=int(table.attempt[row]))
