"""Messages survive the wire; nothing else gets past the decoder."""

from __future__ import annotations

import pickle
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ProtocolError
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer import frames
from kvferry.kv_transfer import messages as m
from kvferry.kv_transfer.jobs import Reason

KEY = AttemptKey(Incarnation(2**63 - 1), RequestId(5), 2)
HEADER = m.SlabHeader(
    key=KEY,
    lease=3,
    index=1,
    layers=Span(0, 2),
    heads=Span(0, 3),
    tokens=Span(5, 90),
    wire="float32",
    chain_hash=b"h" * 16,
    nbytes=123,
    digests=[0, 2**64 - 1],
)
TO_RECEIVER = [
    m.Proof(nonce=b"n" * 32, mac=b"m" * 32, incarnation=1, rank=3, digests=["xxh3", "other"]),
    m.Offer(key=KEY, lease=3, slabs=4, nbytes=9, ranks=2),
    m.Header(slab=0, grant=9, header=HEADER),
    m.Return(slab=1, grant=9),
    m.Measure(slabs=8),
    m.Sample(slab=1, grant=9, index=3, nbytes=100, digest=2**64 - 1),
]
TO_SENDER = [
    m.Challenge(protocol=1, nonce=b"n" * 32),
    m.Welcome(mac=b"m" * 32, incarnation=1, slab_bytes=8, num_slabs=2, digest="xxh3"),
    m.Refused(detail="no"),
    m.Credit(lease=3, slab=1, grant=9),
    m.Spare(slab=1, grant=9),
    m.Ack(lease=3, index=1, grant=9),
    m.Resend(lease=3, index=1, grant=9),
    m.Pull(slab=1, grant=9),
    m.Missing(lease=3, begin=1, end=4),
    m.Complete(key=KEY, lease=3),
]
BOTH = [m.Abort(key=KEY, lease=3, reason=Reason.STALE), m.Beat()]


@pytest.mark.parametrize("message", TO_RECEIVER + BOTH, ids=lambda x: type(x).__name__)
def test_messages_to_the_receiver_round_trip(message) -> None:
    assert frames.decode_to_receiver(frames.encode(message)) == message


@pytest.mark.parametrize("message", TO_SENDER + BOTH, ids=lambda x: type(x).__name__)
def test_messages_to_the_sender_round_trip(message) -> None:
    assert frames.decode_to_sender(frames.encode(message)) == message


@pytest.mark.parametrize("count", [1, 2, m.MAX_MESSAGES])
def test_several_messages_of_a_frame_come_in_their_order(count: int) -> None:
    to_sender = [m.Ack(lease=3, index=index, grant=9) for index in range(count)]
    frame = frames.encode_all(to_sender)
    assert list(frames.all_to_sender(frame)) == to_sender
    assert frames.split(frame) == [frames.encode(message) for message in to_sender]
    to_receiver = [m.Return(slab=slab, grant=9) for slab in range(count)]
    assert list(frames.all_to_receiver(frames.encode_all(to_receiver))) == to_receiver


@pytest.mark.parametrize("count", [0, m.MAX_MESSAGES + 1])
def test_too_many_messages_of_a_frame_are_refused(count: int) -> None:
    frame = sealed(msgspec.msgpack.encode([m.Beat()] * count))
    for decode in (frames.all_to_receiver, frames.all_to_sender):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_a_frame_that_cannot_be_split_stays_as_it_is() -> None:
    for frame in (b"", b"\xc1", frames.encode(m.Beat()), b"\x91" * 1000):
        assert frames.split(frame) == [frame]


def test_a_header_keeps_its_key_and_spans() -> None:
    decoded = frames.decode_to_receiver(frames.encode(m.Header(slab=0, grant=9, header=HEADER)))
    assert isinstance(decoded, m.Header)
    assert isinstance(decoded.header.key, AttemptKey)
    assert decoded.header.move.tokens == Span(5, 90)


@pytest.mark.parametrize("message", TO_SENDER, ids=lambda x: type(x).__name__)
def test_a_receiver_takes_no_message_of_a_receiver(message) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_to_receiver(frames.encode(message))


def sealed(body: bytes) -> bytes:
    """A frame whose checksum is right."""
    return body + zlib.crc32(body).to_bytes(4, "big")


@pytest.mark.parametrize("message", TO_RECEIVER + BOTH, ids=lambda x: type(x).__name__)
def test_a_damaged_message_is_no_message(message) -> None:
    frame = frames.encode(message)
    for place in range(len(frame)):
        damaged = bytearray(frame)
        damaged[place] ^= 0x04
        with pytest.raises(ProtocolError, match="checksum"):
            frames.decode_to_receiver(bytes(damaged))


@pytest.mark.parametrize("seal", [bytes, sealed], ids=["bare", "sealed"])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        pickle.dumps({"type": "beat"}),
        frames.encode(m.Beat())[:-4] + b"x",
        frames.encode(m.Offer(key=KEY, lease=3, slabs=4, nbytes=9))[:-5],
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
def test_what_is_no_message_is_refused(frame: bytes, seal) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_to_receiver(seal(frame))


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_raise_nothing_else(frame: bytes, is_sealed: bool) -> None:
    for decode in (
        frames.decode_to_receiver,
        frames.decode_to_sender,
        frames.all_to_receiver,
        frames.all_to_sender,
    ):
        try:
            decode(sealed(frame) if is_sealed else frame)
        except ProtocolError:
            continue
