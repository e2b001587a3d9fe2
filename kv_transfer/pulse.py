"""Whether the other side of a link is still there, and whether it may think so of this one."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.core.errors import LinkLost
from kvferry.kv_transfer.handshake import LinkOptions


class Pulse:
    """Of one link that is open. All of it belongs to the link's thread."""

    def __init__(self, options: LinkOptions, clock: Callable[[], float]) -> None:
        self._silence_s, self._beat_s = options.silence_s, options.beat_s
        self._clock = clock
        self._heard_s = self._sent_s = clock()
        self._is_doubted = False
        """Whether the peer seems silent, but what is queued has not been read since."""

    def heard(self) -> None:
        """A message came."""
        self._heard_s = self._clock()

    def sent(self) -> None:
        """A message has left: it beats as well as any."""
        self._sent_s = self._clock()

    def is_doubtful(self) -> bool:
        """Whether the peer seems silent, so that what is queued must be read before anything else.

        Raises LinkLost when that was done.
        """
        if self._clock() < self._heard_s + self._silence_s:
            self._is_doubted = False
        elif self._is_doubted:
            raise LinkLost("the peer is silent")
        else:
            # It may be this process that stood still: what came meanwhile is read first.
            self._is_doubted = True
        return self._is_doubted

    def needs_beat(self) -> bool:
        """Whether the peer has heard nothing for so long that a beat is to be sent."""
        return self._clock() >= self._sent_s + self._beat_s

    def wait_s(self) -> float:
        """Seconds until a beat is due, or the peer seems silent."""
        return min(self._sent_s + self._beat_s, self._heard_s + self._silence_s) - self._clock()
