"""How the two sides of a link become a process group: the control channel stands in for a store.

torch.distributed wants a key-value store for the addresses of its ranks. Its own stores listen on a
port and ask nobody who they are. Here each side sends what it sets over the link's control channel,
which has proved itself, and nothing listens at all. Once the group stands, both say so: from then
on the channel carries the link's messages alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated

import msgspec
import torch.distributed as dist

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import decode, encode
from kvferry.kv_transfer.messages import Message, Text
from kvferry.kv_transfer.transport import Channel

MAX_ENTRIES = 64
MAX_VALUE = 4096
_MAX_SETUP_FRAME = 8192


class Entry(Message, frozen=True):
    """The peer has set a key."""

    key: Text
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE)]


class Ready(Message, frozen=True):
    """The peer's group stands."""


_decoder: msgspec.msgpack.Decoder[Entry | Ready] = msgspec.msgpack.Decoder(Entry | Ready)


class ChannelStore(dist.Store):
    """Keys that either side of a channel sets. torch calls it on the thread that builds a group.

    ``deadline``: on ``clock``, by which all has to be over.
    """

    def __init__(
        self, channel: Channel, deadline: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._channel = channel
        self._deadline = deadline
        self._clock = clock
        self._entries: dict[str, bytes] = {}
        self._is_done = False
        self._is_peer_ready = False

    def set(self, key: str, value: bytes | str) -> None:
        """Raises LinkLost."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = data
        if not self._is_done:
            self._send(Entry(key=key, value=data))

    def get(self, key: str) -> bytes:
        """Waits for the peer to set it. Raises LinkLost, ProtocolError."""
        while key not in self._entries:
            if self._is_done or self._is_peer_ready:
                raise LinkLost(f"the peer has not set {key!r}")
            self._receive()
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """The deadline is the store's own."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def clone(self) -> ChannelStore:
        return self

    def finish(self) -> None:
        """Both sides' groups stand. Raises LinkLost, ProtocolError when the peer's does not."""
        self._send(Ready())
        while not self._is_peer_ready:
            self._receive()
        self._is_done = True

    def _send(self, message: Message) -> None:
        self._channel.send(encode(message), max(0.0, self._deadline - self._clock()))

    def _receive(self) -> None:
        """Take in one message of the peer, or be woken for nothing."""
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise LinkLost("the peer has not joined the process group in time")
        frame = self._channel.receive(left_s, _MAX_SETUP_FRAME)
        if frame is None:
            return
        message = decode(_decoder, frame)
        match message:
            case Entry():
                if len(self._entries) >= MAX_ENTRIES:
                    raise ProtocolError("too many keys in a group's set-up")
                self._entries[message.key] = message.value
            case Ready():
                self._is_peer_ready = True
