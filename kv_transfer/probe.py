"""Measures the path to a receiver over a link of its own: slabs are filled, moved, verified and
acknowledged as those of transfers are, as fast as it goes, for a moment.

A probe takes slab memory that no lease wants just then, and ends after a bounded time whatever the
peer does.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import all_to_sender, encode
from kvferry.kv_transfer.handshake import Greeted, LinkOptions, introduce
from kvferry.kv_transfer.messages import (
    Ack,
    Beat,
    Credit,
    Measure,
    Message,
    Pull,
    Resend,
    Sample,
    ToSender,
)
from kvferry.kv_transfer.transport import Channel, Connect, Slab

PINGS = 4
PING_BYTES = 64
MAX_SAMPLES = 64
POLL_S = 0.001
"""Between two looks at slabs in flight, should their data path not wake us."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a probe may take. Seconds."""

    stream_s: float = 0.04
    """Slabs are sent for so long, twice."""
    turn_s: float = 8.0
    """A receiver that lets others probe for so long is not waited for."""
    answer_s: float = 2.0
    """Longest wait for anything else."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Speed:
    """What a path was found to do."""

    bytes_per_s: float
    """Of slabs filled and verified."""
    bare_bytes_per_s: float
    """Of slabs neither filled nor verified."""
    round_trip_s: float


def measure(
    endpoint: str,
    connect: Connect,
    options: LinkOptions,
    rank: int,
    digests: Sequence[str],
    limits: Limits = LIMITS,
    clock: Callable[[], float] = time.monotonic,
) -> Speed:
    """Open a link and measure it. Raises LinkLost, LinkRefused, ProtocolError."""
    channel = connect(endpoint, limits.answer_s)
    try:
        brief = replace(options, silence_s=limits.answer_s)
        greeted = introduce(channel, brief, rank, digests, is_probe=True)
        try:
            return _Probe(channel, greeted, options.beat_s, limits, clock).run()
        finally:
            greeted.outlet.close()
    finally:
        channel.close()


@dataclass(slots=True)
class _Filled:
    """A sample in granted memory."""

    message: Sample
    awaits_pull: bool
    is_flying: bool = False


class _Probe:
    """One link that measures."""

    def __init__(
        self,
        channel: Channel,
        greeted: Greeted,
        beat_s: float,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._outlet = greeted.outlet
        self._num_slabs = greeted.num_slabs
        self._slab_bytes = greeted.slab_bytes
        self._beat_s = beat_s
        self._limits = limits
        self._clock = clock
        contents = np.frombuffer(secrets.token_bytes(greeted.slab_bytes), np.uint8)
        self._contents = contents.copy()  # torch wants it writable
        self._device_contents: Any = None
        self._filled: dict[int, _Filled] = {}
        """By grant."""
        self._credits: deque[Credit] = deque()
        self._num_filled = 0
        self._sent_s = clock()

    def run(self) -> Speed:
        self._send(Measure(slabs=PINGS + 2 * MAX_SAMPLES))
        self._until(lambda: bool(self._credits), self._limits.turn_s)
        round_trips = []
        for _ in range(PINGS):
            self._until(lambda: bool(self._credits), self._limits.answer_s)
            started_s = self._clock()
            self._fill(PING_BYTES)
            self._until(lambda: not self._filled, self._limits.answer_s)
            round_trips.append(self._clock() - started_s)
        return Speed(self._stream(), self._stream(bare=True), min(round_trips))

    def _stream(self, *, bare: bool = False) -> float:
        """Bytes per second of whole slabs, as many at once as are granted."""
        started_s, before = self._clock(), self._num_filled
        stop_s = started_s + self._limits.stream_s

        def goes_on() -> bool:
            num_left = before + MAX_SAMPLES - self._num_filled
            return self._num_filled == before or (num_left > 0 and self._clock() < stop_s)

        while goes_on():
            if self._credits:
                self._fill(self._slab_bytes, bare=bare)
            else:
                self._until(lambda: bool(self._credits) or not goes_on(), self._limits.answer_s)
        self._until(lambda: not self._filled, self._limits.answer_s)
        nbytes = (self._num_filled - before) * self._slab_bytes
        return nbytes / max(self._clock() - started_s, 1e-9)

    def _fill(self, nbytes: int, *, bare: bool = False) -> None:
        """Use the next credit."""
        credit = self._credits.popleft()
        digest = 0
        if not bare:
            self._write(self._outlet.slab(credit.slab)[:nbytes])
            digest = xxhash.xxh3_64_intdigest(self._contents[:nbytes].data)
        sample = Sample(
            slab=credit.slab,
            grant=credit.grant,
            index=self._num_filled,
            nbytes=nbytes,
            digest=digest,
        )
        self._num_filled += 1
        filled = self._filled[credit.grant] = _Filled(sample, self._outlet.is_pulled)
        if filled.awaits_pull:
            self._send(sample)
        else:
            self._push(filled)

    def _write(self, slab: Slab) -> None:
        nbytes = len(slab)
        if not self._outlet.is_device:
            np.copyto(np.frombuffer(slab, np.uint8), self._contents[:nbytes])
            return
        if self._device_contents is None:
            self._device_contents = slab.new_tensor(self._contents)
        slab.copy_(self._device_contents[:nbytes])
        slab[-1].item()  # waits for the copy, as a pack does

    def _push(self, filled: _Filled) -> None:
        sample = filled.message
        filled.awaits_pull, filled.is_flying = False, True
        self._outlet.push(sample.slab, sample.grant, sample.nbytes)
        self._land()

    def _land(self) -> bool:
        """Announce what has arrived. Whether more is in flight."""
        for filled in self._filled.values():
            if filled.is_flying and not self._outlet.in_flight(filled.message.slab):
                filled.is_flying = False
                if not self._outlet.is_pulled:
                    self._send(filled.message)
        return any(filled.is_flying for filled in self._filled.values())

    def _until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Raises LinkLost after ``timeout_s``, or when the link breaks; ProtocolError."""
        deadline = self._clock() + timeout_s
        while not is_done():
            now = self._clock()
            if now >= deadline:
                raise LinkLost("the probe got no answer in time")
            if now >= self._sent_s + self._beat_s:
                self._send(Beat())
            wait_s = min(deadline, self._sent_s + self._beat_s) - now
            frame = self._channel.receive(POLL_S if self._land() else wait_s)
            if frame is not None:
                self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        for message in all_to_sender(frame):
            self._handle_one(message)

    def _handle_one(self, message: ToSender) -> None:
        match message:
            case Credit():
                if message.slab >= self._num_slabs:
                    raise ProtocolError(f"a credit for slab {message.slab} of {self._num_slabs}")
                self._credits.append(message)
            case Pull():
                filled = self._filled.get(message.grant)
                if filled is None or not filled.awaits_pull:
                    raise ProtocolError("a pull of a slab that was not announced")
                self._push(filled)
            case Ack():
                self._filled.pop(message.grant, None)
            case Resend():
                raise LinkLost("it damages slabs")
            case _:
                pass

    def _send(self, message: Message) -> None:
        self._channel.send(encode(message), self._limits.answer_s)
        self._sent_s = self._clock()
