"""The links of one receiver: a thread each, greeted, given their part of the slab memory, and
replaced when their peer comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer import handshake
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.handshake import Admitted, LinkOptions
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.messages import MAX_LINK_BYTES, Proof
from kvferry.kv_transfer.receiver_link import ReceiverLink
from kvferry.kv_transfer.receiver_probes import ProbeTurn
from kvferry.kv_transfer.staging import StagingPool
from kvferry.kv_transfer.transport import Channel

MAX_STRANGERS = 16
"""Connections that have not proved themselves yet, at once: the oldest gives way to the newest."""

_Name = tuple[Incarnation, int, str, bool]
"""(life of the peer, its rank, transport, whether it is a probe): one link each."""


@dataclass(slots=True)
class _Open:
    """A link that serves."""

    link: ReceiverLink
    name: _Name
    num_slabs: int


class ReceiverLinks:
    """Safe to call from any thread."""

    def __init__(
        self,
        memory: KvMemory,
        options: LinkOptions,
        leases: LeaseTable,
        closing: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._options = options
        self._leases = leases
        self._closing = closing
        self._clock = clock
        self._probes = ProbeTurn(clock)
        self._changed = threading.Condition()
        least_links = -(-options.staging_bytes // MAX_LINK_BYTES)
        self._staging = StagingPool(
            options.staging_bytes // options.slab_bytes, max(options.expected_links, least_links)
        )
        self._channels: dict[threading.Thread, Channel] = {}
        self._open: list[_Open] = []
        """The one that opened last is last."""
        self._strangers: dict[threading.Thread, threading.Event] = {}
        """Those that have not proved themselves, the oldest first; set: it has to go."""

    @property
    def count(self) -> int:
        with self._changed:
            return len(self._open)

    def adopt(self, channel: Channel) -> None:
        """Serve a new connection. The oldest stranger makes room for it, if there are too many;
        it is closed at once when they do not go, or there is no thread for it.
        """
        with self._changed:
            if len(self._strangers) >= 2 * MAX_STRANGERS or self._closing.is_set():
                channel.close()
                return
            staying = [who for who, must_go in self._strangers.items() if not must_go.is_set()]
            if len(staying) >= MAX_STRANGERS:
                self._strangers[staying[0]].set()
                self._channels[staying[0]].wake()
            thread = threading.Thread(target=self._run, args=(channel,), name="kv-receiver-link")
            self._channels[thread], self._strangers[thread] = channel, threading.Event()
            try:
                # Under the lock, so that stop never returns a thread that cannot be joined.
                thread.start()
            except RuntimeError:
                del self._channels[thread], self._strangers[thread]
                channel.close()

    def stop(self) -> list[threading.Thread]:
        """Wake all links, now that the receiver is closing. Their threads, which will end."""
        with self._changed:
            channels = dict(self._channels)
        for channel in channels.values():
            channel.wake()
        return list(channels)

    def _run(self, channel: Channel) -> None:
        num_slabs = 0
        try:
            proof = self._challenge(channel)
            digest = handshake.agree(channel, self._options, proof, self._memory.digests)
            name = (Incarnation(proof.incarnation), proof.rank, channel.transport, proof.is_probe)
            self._replace(name)
            num_slabs = self._take_slabs(proof.is_probe)
            if not num_slabs:
                handshake.refuse(channel, self._options, "no slab memory left for another link")
            self._serve(
                channel,
                handshake.welcome(channel, self._options, proof, digest, num_slabs),
                name,
            )
        except LinkRefused:
            pass
        except (LinkLost, ProtocolError):
            # This connection ends and no other; the leases that it served wait for a new one.
            self._leases.counters.tally(Tally.LINK_LOST)
        finally:
            channel.close()
            with self._changed:
                self._staging.give_back(num_slabs)
                del self._channels[threading.current_thread()]
                self._changed.notify_all()

    def _challenge(self, channel: Channel) -> Proof:
        stranger = threading.current_thread()
        must_go = self._strangers[stranger]
        try:
            return handshake.challenge(
                channel, self._options, lambda: must_go.is_set() or self._closing.is_set()
            )
        finally:
            with self._changed:
                del self._strangers[stranger]

    def _replace(self, name: _Name) -> None:
        """End the links of the same name: their sender has given them up, though nothing may have
        told us so.
        """
        with self._changed:
            for other in self._open:
                if other.name == name and not other.link.is_retiring:
                    self._leases.counters.tally(Tally.LINK_REPLACED)
                    other.link.retire()

    def _take_slabs(self, is_probe: bool) -> int:
        """Slab memory for a new link, another one's if need be and it is not to be measured only;
        0 when each has one slab only, and none has ended within a beat.
        """
        now = time.monotonic()
        with self._changed:
            num_slabs = self._staging.take()
            while not num_slabs and not is_probe:
                wait_s = self._options.silence_s if self._retire_one() else self._options.beat_s
                if not self._changed.wait(now + wait_s - time.monotonic()):
                    break
                num_slabs = self._staging.take()
            return num_slabs

    def _retire_one(self) -> bool:
        """Whether some link gives its memory back soon."""
        if any(one.link.is_retiring for one in self._open):
            return True
        idle_before_s = self._clock() - self._options.beat_s
        idle = {
            one.link.idle_since_s: one
            for one in self._open
            if one.link.idle_since_s is not None and one.link.idle_since_s <= idle_before_s
        }
        large = [one for one in self._open if one.num_slabs > 1]
        if idle:
            one = idle[min(idle)]
        elif large:
            one = max(large, key=lambda one: one.num_slabs)
        else:
            return False
        self._leases.counters.tally(Tally.LINK_RETIRED)
        one.link.retire()
        return True

    def _serve(self, channel: Channel, admitted: Admitted, name: _Name) -> None:
        """Until the link is lost, replaced, retired, or the receiver closes.

        Raises LinkLost, ProtocolError.
        """
        link = ReceiverLink(
            channel,
            admitted,
            self._memory,
            self._leases,
            self._options,
            self._probes,
            self._clock,
        )
        entry = _Open(link, name, admitted.num_slabs)
        self._leases.counters.tally(Tally.LINK)
        with self._changed:
            self._open.append(entry)
        try:
            link.serve(self._closing)
        finally:
            with self._changed:
                self._open.remove(entry)
