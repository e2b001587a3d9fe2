"""Frames of a link's control channel: messages in msgpack, one or several, and a checksum."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.kv_transfer.messages import MAX_MESSAGES, Message, ToReceiver, ToSender


class _Tag(msgspec.Struct, frozen=True):
    type: str


_CHECKSUM = struct.Struct("!I")
_tag = msgspec.msgpack.Decoder(_Tag)
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
_Several = msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)
_all_to_sender: msgspec.msgpack.Decoder[ToSender | list[ToSender]]
_all_to_sender = msgspec.msgpack.Decoder(ToSender | Annotated[list[ToSender], _Several])
_all_to_receiver: msgspec.msgpack.Decoder[ToReceiver | list[ToReceiver]]
_all_to_receiver = msgspec.msgpack.Decoder(ToReceiver | Annotated[list[ToReceiver], _Several])
_Kind = TypeVar("_Kind")


def encode(message: Message) -> bytes:
    """A frame: the message, and a checksum of it. The network's own lets some damage pass, and a
    header with another token range would carry good bytes to the wrong place.
    """
    return _sealed(_encoder.encode(message))


def encode_all(messages: Sequence[Message]) -> bytes:
    """One frame of 1 to ``MAX_MESSAGES`` messages, which are handled in their order."""
    return encode(messages[0]) if len(messages) == 1 else _sealed(_encoder.encode(messages))


def _sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(zlib.crc32(body))


def split(frame: bytes) -> list[bytes]:
    """A frame for each message of a frame. Those that hold no such thing stay as they are."""
    try:
        bodies = _raws.decode(memoryview(frame)[: -_CHECKSUM.size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [frame]
    return [_sealed(bytes(body)) for body in bodies]


def tag_of(frame: bytes) -> str:
    """The tag of the one message in a frame, unchecked; empty when there is none."""
    try:
        return _tag.decode(frame[: -_CHECKSUM.size]).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def all_to_sender(frame: bytes) -> Sequence[ToSender]:
    """The messages of a frame, in order. Raises ProtocolError for anything else than a receiver
    may send.
    """
    found = decode(_all_to_sender, frame)
    return found if isinstance(found, list) else (found,)


def all_to_receiver(frame: bytes) -> Sequence[ToReceiver]:
    """The messages of a frame, in order. Raises ProtocolError for anything else than a sender may
    send.
    """
    found = decode(_all_to_receiver, frame)
    return found if isinstance(found, list) else (found,)


def decode_to_sender(frame: bytes) -> ToSender:
    """Raises ProtocolError for anything but one message that a receiver may send."""
    return decode(_to_sender, frame)


def decode_to_receiver(frame: bytes) -> ToReceiver:
    """Raises ProtocolError for anything but one message that a sender may send."""
    return decode(_to_receiver, frame)


def decode(decoder: msgspec.msgpack.Decoder[_Kind], frame: bytes) -> _Kind:
    """Raises ProtocolError for anything but one message that the decoder knows."""
    body = memoryview(frame)[: -_CHECKSUM.size]
    if zlib.crc32(body).to_bytes(_CHECKSUM.size, "big") != frame[len(body) :]:
        raise ProtocolError("not a message of a KV link: its checksum is wrong")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of a KV link: {error}") from None
