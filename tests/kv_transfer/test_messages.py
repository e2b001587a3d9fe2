"""Messages survive the wire; nothing else gets past the decoder."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ProtocolError
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.kv_transfer import messages as m
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.plan import Span

KEY = AttemptKey(Incarnation(2**63 - 1), RequestId(5), 2)
HEADER = m.SlabHeader(
    key=KEY,
    lease=3,
    index=1,
    count=4,
    layers=(0, 2),
    heads=(0, 3),
    tokens=(5, 90),
    flavour="float32",
    chain_hash=b"h" * 16,
    nbytes=123,
    digests=[0, 2**64 - 1],
)
TO_RECEIVER = [
    m.Proof(nonce=b"n" * 32, mac=b"m" * 32, incarnation=1),
    m.Offer(key=KEY, lease=3, slabs=4, nbytes=9),
    m.Header(slab=0, grant=9, header=HEADER),
    m.Return(slab=1, grant=9),
]
TO_SENDER = [
    m.Challenge(protocol=1, nonce=b"n" * 32),
    m.Welcome(mac=b"m" * 32, incarnation=1, slab_bytes=8, num_slabs=2),
    m.Refused(detail="no"),
    m.Credit(lease=3, slab=1, grant=9),
    m.Ack(lease=3, index=1, grant=9),
    m.Resend(lease=3, index=1, grant=9),
    m.Complete(key=KEY, lease=3),
]
BOTH = [m.Abort(key=KEY, lease=3, reason=Reason.STALE), m.Beat()]


@pytest.mark.parametrize("message", TO_RECEIVER + BOTH, ids=lambda x: type(x).__name__)
def test_messages_to_the_receiver_round_trip(message) -> None:
    assert m.decode_to_receiver(m.encode(message)) == message


@pytest.mark.parametrize("message", TO_SENDER + BOTH, ids=lambda x: type(x).__name__)
def test_messages_to_the_sender_round_trip(message) -> None:
    assert m.decode_to_sender(m.encode(message)) == message


def test_a_header_keeps_its_key_and_spans() -> None:
    decoded = m.decode_to_receiver(m.encode(m.Header(slab=0, grant=9, header=HEADER)))
    assert isinstance(decoded, m.Header)
    assert isinstance(decoded.header.key, AttemptKey)
    assert decoded.header.move.tokens == Span(5, 90)


@pytest.mark.parametrize("message", TO_SENDER, ids=lambda x: type(x).__name__)
def test_a_receiver_takes_no_message_of_a_receiver(message) -> None:
    with pytest.raises(ProtocolError):
        m.decode_to_receiver(m.encode(message))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        pickle.dumps({"type": "beat"}),
        m.encode(m.Beat()) + b"x",
        m.encode(m.Offer(key=KEY, lease=3, slabs=4, nbytes=9))[:-1],
        msgspec.msgpack.encode({"type": "beat", "more": 1}),
        msgspec.msgpack.encode(
            {"type": "offer", "key": [1, 2, 3], "lease": -1, "slabs": 4, "nbytes": 9}
        ),
        msgspec.msgpack.encode(
            {"type": "offer", "key": [1, 2], "lease": 1, "slabs": 4, "nbytes": 9}
        ),
        msgspec.msgpack.encode({"type": "return", "slab": "1", "grant": 4}),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode_to_receiver(frame)


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(frame: bytes) -> None:
    for decode in (m.decode_to_receiver, m.decode_to_sender):
        try:
            decode(frame)
        except ProtocolError:
            continue
