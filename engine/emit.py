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


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; all but the last byte have their top bit set."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_LENGTH_DELIMITED = 2
"""Wire type of packed fields."""


class _Packed:
    """A repeated field of fixed-width integers."""

    def __init__(self, name: str, element: str) -> None:
        number: int = pb.Tokens.DESCRIPTOR.fields_by_name[name].number
        self._tag = _varint(number << 3 | _LENGTH_DELIMITED)
        self._element = np.dtype(element)

    def __call__(self, values: NDArray[np.integer]) -> bytes:
        """As it stands in a message: tag, length, elements."""
        data = values.astype(self._element).tobytes()
        return self._tag + _varint(len(data)) + data


_REQUESTS = _Packed("requests", "<u8")
_ATTEMPTS = _Packed("attempts", "<u4")
_TOKEN_IDS = _Packed("token_ids", "<u4")


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
        mine = (routers == incarnation).nonzero()[0]
        if not mine.size:
            continue
        is_all = mine.size == rows.size
        owned, tokens_of = (rows, token_ids) if is_all else (rows[mine], token_ids[mine])
        message = pb.WorkerMessage()
        tokens = message.tokens
        tokens.MergeFromString(
            _REQUESTS(table.request[owned])
            + _ATTEMPTS(table.attempt[owned])
            + _TOKEN_IDS(tokens_of)
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


def _key(table: SequenceTable, row: int) -> pb.Key:
    return pb.Key(request=int(table.request[row]), attempt=int(table.attempt[row]))
