"""A sender of KV that follows no rules, over a real link."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

from kvferry.core.errors import LinkLost
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.frames import all_to_sender, encode
from kvferry.kv_transfer.handshake import introduce
from kvferry.kv_transfer.messages import Beat, Credit, Message, Offer, SlabHeader, Spare

DIGESTS = ["xxh3"]


class ScriptedLink:
    """A sender that follows no rules."""

    def __init__(self, pair: Any, incarnation: int = 7, rank: int = 0) -> None:
        self.pair, self.incarnation, self.rank = pair, incarnation, rank
        self.channel = connect(pair.receiver.endpoints[0], 5.0)
        options = replace(pair.options, incarnation=Incarnation(incarnation))
        try:
            greeted = introduce(self.channel, options, rank, DIGESTS)
        except LinkLost:
            self.channel.close()
            raise
        self.outlet, self.num_slabs = greeted.outlet, greeted.num_slabs
        self._heard: deque[Message] = deque()

    def __enter__(self) -> ScriptedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def send(self, message: Message) -> None:
        self.channel.send(encode(message), 5.0)

    def next(self) -> Message:
        """The next message that is neither a beat nor of a spare slab."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._heard:
                return self._heard.popleft()
            frame = self.channel.receive(1.0)
            messages = all_to_sender(frame) if frame is not None else ()
            self._heard += [m for m in messages if not isinstance(m, Beat | Spare)]
        raise AssertionError("the receiver says nothing")

    def is_closed(self) -> bool:
        """Whether the receiver has closed the link by now."""
        try:
            while self.channel.receive(0.0) is not None:
                pass
        except LinkLost:
            return True
        return False

    def assert_closed(self) -> None:
        deadline = time.monotonic() + 20
        try:
            while time.monotonic() < deadline:
                self.channel.receive(1.0)
        except LinkLost:
            return
        raise AssertionError("the receiver keeps the link")

    def offer(self, lease: int = 1) -> Credit:
        nbytes = self.pair.tokens.length * self.pair.source.layout.token_bytes
        self.send(Offer(key=self.pair.key(), lease=lease, slabs=1, nbytes=nbytes))
        credit = self.next()
        assert isinstance(credit, Credit)
        return credit

    def header(self, **changes: Any) -> SlabHeader:
        values = {
            "key": self.pair.key(),
            "lease": 1,
            "index": 0,
            "layers": (0, 1),
            "heads": (0, 2),
            "tokens": (5, 6),
            "wire": "float32",
            "chain_hash": b"h" * 16,
            "nbytes": 128,
            "digests": [0],
        }
        return SlabHeader(**(values | changes))
