"""What one side of a link has to say, sent together: each frame wakes the peer."""

from __future__ import annotations

from kvferry.kv_transfer.frames import encode_all
from kvferry.kv_transfer.messages import MAX_MESSAGES, Message
from kvferry.kv_transfer.pulse import Pulse
from kvferry.kv_transfer.transport import Channel


class Outbox:
    """All of it belongs to the link's thread, which flushes it before it waits or copies."""

    def __init__(self, channel: Channel, pulse: Pulse, timeout_s: float) -> None:
        """``timeout_s``: a peer that takes nothing for so long is lost."""
        self._channel = channel
        self._pulse = pulse
        self._timeout_s = timeout_s
        self._messages: list[Message] = []

    def __bool__(self) -> bool:
        """Whether there is something to say."""
        return bool(self._messages)

    def put(self, message: Message) -> None:
        """Say it at the next flush, or sooner. Raises LinkLost."""
        self._messages.append(message)
        if len(self._messages) == MAX_MESSAGES:
            self.flush()

    def flush(self) -> None:
        """Raises LinkLost."""
        if self._messages:
            self._channel.send(encode_all(self._messages), self._timeout_s)
            self._messages.clear()
            self._pulse.sent()
