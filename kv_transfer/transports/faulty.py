"""A transport at fault: wraps any other and does to its links what a schedule says.

    faults = Faults(Chances({Fault.DROP: 0.01, Fault.FLIP_SLAB: 0.02}), seed=7, clock=clock)
    listener = FaultyListener(listen("loopback"), faults)  # what the receiver sends is at fault
    connect = FaultyConnect(connect_any, faults)           # what the sender sends is at fault
    ...
    faults.heal()                                          # from now on nothing goes wrong

A fault befalls what the wrapped side sends: wrap both sides for faults in both directions. What
may go wrong where is in ``faults.FAULTS_AT``; ``Chances`` draws, ``Script`` names single faults:
``Script([Step(Fault.DROP, message="ack"), Step(Fault.STALE_SLAB, Place.PUSH, nth=2)])``.

Everything is decided by the seed, the link's number and what the link does; nothing here waits or
has a thread. What is late leaves when its time has come by the injected clock *and* its channel is
used: in ``send``, ``receive``, ``in_flight`` or ``pump``, which tells when it wants to be called
again. A driver on a virtual clock calls ``receive(0.0)`` and ``pump()`` in turn; threads need only
``receive``, which never sleeps past the time.

By default a link is at fault once its slab memory is open: before that, damage is just a link that
does not come about (``from_start=True`` includes it). Frames may vanish, double or overtake each
other though the links' sockets would rather break: the sessions must bear both. A slab that
arrives damaged is damaged in the sender's own slab memory, so it works over shared memory too; for
slabs on a device only the timing can be at fault.
"""

from __future__ import annotations

import math

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.kernels.kv_pack.progress import Stream
from kvferry.kv_transfer.frames import split, tag_of
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.transport import Channel, Connect, Inlet, Listener, Outlet, Slab
from kvferry.kv_transfer.transports.faults import Fault, Faults, LinkFaults, Place, Side, flip


class FaultyChannel:
    """One side of a link. Owns the channel it wraps."""

    def __init__(self, inner: Channel, link: LinkFaults) -> None:
        self.transport = inner.transport
        self._inner = inner
        self._link = link
        self._opened = link.faults.from_start
        self._silent = False
        self._dead = False
        self._late: list[tuple[float, bytes]] = []
        """Frames that leave at a time, in the order in which they will."""
        self._ordered_until = 0.0
        self._outlet: FaultyOutlet | None = None

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Each message has its own fault."""
        for one in split(frame):
            self._send(one, timeout_s)

    def _send(self, frame: bytes, timeout_s: float) -> None:
        self.pump()
        self.check()
        fault = self._link.fault_at(Place.SEND, tag_of(frame)) if self._opened else None
        older = self._link.faults.swap_frame(self._link.side, frame, self._link.random)
        now, at = self._link.faults.clock(), max(self._link.faults.clock(), self._ordered_until)
        match fault:
            case Fault.DIE:
                self.die()
            case Fault.SILENCE:
                self.fall_silent()
            case Fault.DROP:
                return
            case Fault.DELAY:
                at = self._ordered_until = max(at, self._link.late())
            case Fault.REORDER:
                at = max(at, self._link.late())
            case Fault.DUPLICATE:
                self._post(at, frame, timeout_s)
            case Fault.REPLAY:
                self._post(now, older, timeout_s)
            case Fault.TRUNCATE:
                frame = frame[: self._link.random.randrange(1, max(2, len(frame)))]
            case Fault.FLIP:
                damaged = bytearray(frame)
                flip(memoryview(damaged), self._link.random)
                frame = bytes(damaged)
        self._post(at, frame, timeout_s)

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        next_s = self.pump()
        self.check()
        frame = self._inner.receive(min(timeout_s, next_s), limit)
        self.pump()
        return frame

    def pump(self) -> float:
        """Let leave what is due. Seconds until there is more; infinite when nothing is late."""
        now = self._link.faults.clock()
        while self._late and self._late[0][0] <= now and not self._dead:
            # Nobody waits for a late frame: a link that broke meanwhile says so to the next call.
            self._inner.send(self._late.pop(0)[1], self._link.faults.delay_s)
        due = [self._late[0][0] - now] if self._late else []
        if self._outlet is not None and not self._dead:
            due.append(self._outlet.pump())
        return max(0.0, min(due, default=math.inf))

    def wake(self) -> None:
        self._inner.wake()

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Inlet:
        self._open()
        return self._inner.open_inlet(num_slabs, slab_bytes, timeout_s)

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> FaultyOutlet:
        self._open()
        inner = self._inner.open_outlet(num_slabs, slab_bytes, timeout_s)
        self._outlet = FaultyOutlet(inner, self._link, self)
        return self._outlet

    def close(self) -> None:
        self._dead = True
        self._late.clear()
        self._inner.close()

    @property
    def is_silent(self) -> bool:
        return self._silent

    def fall_silent(self) -> None:
        self._silent = True
        self._late.clear()

    def check(self) -> None:
        """Raises LinkLost once the link has died."""
        if self._dead:
            raise LinkLost("the link died, by schedule")

    def die(self) -> None:
        """Raises LinkLost, always."""
        self.close()
        self.check()

    def _open(self) -> None:
        self.check()
        if self._link.fault_at(Place.OPEN) is Fault.DIE:
            self.die()
        self._opened = True

    def _post(self, at: float, frame: bytes, timeout_s: float) -> None:
        if self._silent:
            return
        if at > self._link.faults.clock():
            self._late.append((at, frame))
            self._late.sort(key=lambda entry: entry[0])
        else:
            self._inner.send(frame, timeout_s)


class FaultyOutlet:
    """The sender's end of a data path at fault."""

    def __init__(self, inner: Outlet, link: LinkFaults, channel: FaultyChannel) -> None:
        self.is_pulled, self.is_device = inner.is_pulled, inner.is_device
        self._inner = inner
        self._link = link
        self._channel = channel
        self._late: dict[int, tuple[float, int, int]] = {}
        """slab -> when, grant, number of bytes"""

    def slab(self, index: int) -> Slab:
        return self._inner.slab(index)

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._channel.check()
        fault = self._link.fault_at(Place.PUSH)
        if not self.is_device:
            self._damage(fault, self._inner.slab(slab)[:nbytes])
        if fault is Fault.DIE:
            self._channel.die()
        if fault is Fault.SILENCE:
            self._channel.fall_silent()
        if self._channel.is_silent:
            return
        if fault is Fault.LATE_SLAB:
            self._late[slab] = (self._link.late(), grant, nbytes)
        else:
            self._inner.push(slab, grant, nbytes)

    @property
    def is_followed(self) -> bool:
        return self._inner.is_followed

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | Stream | None:
        """Whoever follows a slab reads it before its faults."""
        self._channel.check()
        return self._inner.progress(slab, grant, nbytes)

    def in_flight(self, slab: int) -> bool:
        self._channel.check()
        self.pump()
        return slab in self._late or self._inner.in_flight(slab)

    def pump(self) -> float:
        """Let leave what is due. Seconds until there is more."""
        now = self._link.faults.clock()
        for slab, (at, grant, nbytes) in list(self._late.items()):
            if at <= now:
                del self._late[slab]
                self._inner.push(slab, grant, nbytes)
        return min((at - now for at, _, _ in self._late.values()), default=math.inf)

    def close(self) -> None:
        self._late.clear()
        self._inner.close()

    def _damage(self, fault: Fault | None, data: memoryview) -> None:
        older = self._link.faults.swap_slab(bytes(data), self._link.random)[: len(data)]
        half = len(data) // 2
        match fault:
            case Fault.FLIP_SLAB:
                flip(data, self._link.random)
            case Fault.STALE_SLAB:
                data[: len(older)] = older
            case Fault.TORN_SLAB:
                data[half : len(older)] = older[half:]


class FaultyConnect:
    """Opens links at fault."""

    def __init__(self, inner: Connect, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __call__(self, endpoint: str, timeout_s: float) -> FaultyChannel:
        link = LinkFaults(self._faults, Side.SENDER)
        fault = link.fault_at(Place.CONNECT)
        if fault is Fault.REFUSE:
            raise LinkRefused(f"{endpoint} refuses, by schedule")
        if fault is Fault.DIE:
            raise LinkLost(f"{endpoint} does not answer, by schedule")
        return FaultyChannel(self._inner(endpoint, timeout_s), link)


class FaultyListener:
    """Accepts links at fault. Owns the listener it wraps."""

    def __init__(self, inner: Listener, faults: Faults) -> None:
        self.endpoint = inner.endpoint
        self._inner = inner
        self._faults = faults

    def accept(self, timeout_s: float) -> FaultyChannel | None:
        channel = self._inner.accept(timeout_s)
        return (
            None
            if channel is None
            else FaultyChannel(channel, LinkFaults(self._faults, Side.RECEIVER))
        )

    def stop(self) -> None:
        self._inner.stop()

    def close(self) -> None:
        self._inner.close()
