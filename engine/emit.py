"""Turns the tokens of a step into one message per router."""

from __future__ import annotations

import numpy as np

from kvferry.core.ids import Incarnation
from kvferry.core.request import FinishReason
from kvferry.engine.commit import logprob_message
from kvferry.engine.plan import Int64, RowLogprobs
from kvferry.engine.ports import RouterPort
from kvferry.engine.table import Rows, SequenceTable
from kvferry.proto import worker_pb2 as pb


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
        message = pb.Tokens(
            requests=table.request[owned].tolist(),
            attempts=table.attempt[owned].tolist(),
            token_ids=token_ids[mine].tolist(),
        )
        wanted = mine.tolist()
        if finished:
            message.finished.extend(
                pb.Finished(key=_key(table, int(rows[i])), reason=finished[i])
                for i in wanted
                if i in finished
            )
        if logprobs:
            empty = pb.Logprob()
            message.logprobs.extend(
                logprob_message(logprobs[i]) if i in logprobs else empty for i in wanted
            )
        port.send(pb.WorkerMessage(tokens=message))


def _key(table: SequenceTable, row: int) -> pb.Key:
    return pb.Key(request=int(table.request[row]), attempt=int(table.attempt[row]))
