"""The messages of a step, against ones that are put together field by field."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from role_ports import NotingPort

from kvferry.core.ids import Incarnation
from kvferry.core.request import FinishReason
from kvferry.engine.emit import emit_tokens
from kvferry.engine.plan import RowLogprobs
from kvferry.engine.table import SequenceTable
from kvferry.proto import worker_pb2 as pb

ROUTERS = (Incarnation(5), Incarnation(2**63 - 1))
GONE = 9
"""A router whose session has ended: nobody hears of its rows."""


ROWS = st.lists(
    st.tuples(
        st.sampled_from([*ROUTERS, GONE]),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**31 - 1),
    ),
    max_size=200,
)


@given(ROWS, st.data())
def test_each_router_hears_of_its_own_rows_in_order(
    rows: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    table = SequenceTable(max(len(rows), 1), 4, 4)
    # Rows of a step stand anywhere in the table.
    where = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    for at, (router, request, attempt, _) in zip(where, rows, strict=True):
        table.router[at], table.request[at], table.attempt[at] = router, request, attempt
    indexes = st.sets(st.sampled_from(range(len(rows)))) if rows else st.just(set())
    finished = dict.fromkeys(data.draw(indexes), FinishReason.LENGTH)
    logprobs = {i: RowLogprobs(i, -1.5, ((3, -0.5),)) for i in data.draw(indexes)}
    tokens = np.array([row[3] for row in rows], np.int64)
    ports = {router: NotingPort() for router in ROUTERS}
    emit_tokens(table, ports, where, tokens, finished, logprobs)
    for router, port in ports.items():
        mine = [i for i, row in enumerate(rows) if row[0] == router]
        assert len(port.sent) == bool(mine)
        if mine:
            sent = port.sent[0].tokens
            assert list(sent.requests) == [rows[i][1] for i in mine]
            assert list(sent.attempts) == [rows[i][2] for i in mine]
            assert list(sent.token_ids) == [rows[i][3] for i in mine]
            ended = {(f.key.request, f.key.attempt, f.reason) for f in sent.finished}
            assert ended == {(rows[i][1], rows[i][2], "length") for i in mine if i in finished}
            assert len(sent.finished) == sum(i in finished for i in mine)
            if logprobs:
                assert [found.token_id for found in sent.logprobs] == [
                    i if i in logprobs else 0 for i in mine
                ]
                wanted = [bool(found.ByteSize()) for found in sent.logprobs]
                assert wanted == [i in logprobs for i in mine]


def test_a_message_reads_the_same_once_encoded() -> None:
    table = SequenceTable(300, 4, 4)
    table.request[:], table.router[:] = np.arange(300), ROUTERS[0]
    port = NotingPort()
    emit_tokens(table, {ROUTERS[0]: port}, np.arange(300), np.arange(300), {}, {})
    read = pb.WorkerMessage.FromString(port.sent[0].SerializeToString())
    assert read.tokens == pb.Tokens(
        requests=range(300), token_ids=range(300), attempts=np.zeros(300, int).tolist()
    )
