"""Links over NIXL: one-sided writes, by RDMA where there is hardware for it, else by what its UCX
backend finds (TCP between hosts, a copy by the kernel on one host). Control over a TCP socket.

The receiver registers slab memory with an agent of the link and tells the sender where it is; the
sender writes packed slabs there. A write counts as done once it is in the receiver's memory.

NIXL's own progress thread spins, so both ends turn the agent themselves, and only while something
can move: the sender while a write is in flight, the receiver while it has granted memory.

A peer that is stopped inside a write and goes on after the link is gone (the kernel's copy between
processes asks nobody) must find memory with no other use: a receiver gives the pages of a closed
link back, but never its addresses.

UCX accepts whoever connects to it, so this transport is for trusted networks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.transports.control import (
    SocketChannel,
    SocketListener,
    dial_tcp,
    listen_tcp,
)
from kvferry.kv_transfer.transports.nixl_agent import NixlAgent, Turner

SCHEME = "nixl"
MAX_METADATA = 1 << 16
_retired: list[mmap.mmap] = []
"""Memory of closed inlets: empty, and never unmapped."""


class _Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sender needs to write into a receiver's slabs."""

    agent: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA)]
    address: Annotated[int, msgspec.Meta(ge=0)]


_memory_decoder = msgspec.msgpack.Decoder(_Memory)


class NixlInlet:
    """Slabs that the peer's agent writes into."""

    is_pulled = False
    is_device = False

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._granted: set[int] = set()
        self._turner = Turner(self._turn, "kv-nixl-inlet")

    def slab(self, index: int) -> memoryview:
        return self._agent.slab(index)

    def grant(self, slab: int, grant: int) -> None:
        """Without RDMA hardware nothing arrives in memory unless its owner turns its agent."""
        self._granted.add(slab)
        self._turner.stir()

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        raise ProtocolError("nixl is not pulled")

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return None

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        """The sender speaks of a slab only once its write has ended."""
        self._granted.discard(slab)
        return True

    def close(self) -> None:
        self._turner.close()
        self._agent.close()
        self._agent.map.madvise(mmap.MADV_DONTNEED)
        _retired.append(self._agent.map)

    def _turn(self) -> bool:
        with self._agent.lock:
            self._agent.nixl.get_new_notifs()
        return bool(self._granted)


class NixlOutlet:
    """Slabs that are written into the peer's memory."""

    is_pulled = False
    is_device = False
    is_followed = False

    def __init__(self, agent: NixlAgent, remote: _Memory, wake: Callable[[], None]) -> None:
        """Raises ProtocolError when the peer's memory is not what it announced."""
        self._agent = agent
        self._remote = remote
        self._wake = wake
        self._writes: dict[int, Any] = {}
        """slab -> NIXL's handle of a write that goes on."""
        self._broken = ""
        try:
            name = agent.nixl.add_remote_agent(remote.metadata)
            size = len(agent.bytes)
            agent.nixl.prep_xfer_dlist(name, [(remote.address, size, 0)], "DRAM").release()
        except Exception as error:  # NIXL's errors have no base of their own.
            raise ProtocolError(f"the peer's slab memory cannot be used: {error}") from None
        if name != remote.agent.encode():
            raise ProtocolError("the peer's agent is not the one that it announced")
        self._turner = Turner(self._turn, "kv-nixl-outlet")

    def slab(self, index: int) -> memoryview:
        return self._agent.slab(index)

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        nixl, offset = self._agent.nixl, slab * self._agent.slab_bytes
        with self._agent.lock:
            try:
                here = nixl.get_xfer_descs([(self._agent.address + offset, nbytes, 0)], "DRAM")
                there = nixl.get_xfer_descs([(self._remote.address + offset, nbytes, 0)], "DRAM")
                write = nixl.initialize_xfer("WRITE", here, there, self._remote.agent)
                self._writes[slab] = write
                self._see(slab, nixl.transfer(write))
            except Exception as error:  # NIXL's errors have no base of their own.
                self._broken = str(error)
        if slab in self._writes:
            self._turner.stir()

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return None

    def in_flight(self, slab: int) -> bool:
        if self._broken:
            raise LinkLost(f"the write to the peer failed: {self._broken}")
        return slab in self._writes

    def close(self) -> None:
        self._turner.close()
        with self._agent.lock:
            for slab in list(self._writes):
                self._drop(slab)
        self._agent.close()

    def _turn(self) -> bool:
        with self._agent.lock:
            before = len(self._writes)
            try:
                for slab, write in list(self._writes.items()):
                    self._see(slab, self._agent.nixl.check_xfer_state(write))
            except Exception as error:  # NIXL's errors have no base of their own.
                self._broken = str(error)
            goes_on = not self._broken and bool(self._writes)
            moved = self._broken or len(self._writes) < before
        if moved:
            self._wake()
        return goes_on

    def _see(self, slab: int, state: str) -> None:
        if state == "DONE":
            self._drop(slab)
        elif state != "PROC":
            self._broken = f"NIXL says {state}"

    def _drop(self, slab: int) -> None:
        """Forget a write that has ended, or end it."""
        # A write that NIXL cannot cancel ends with its agent.
        with contextlib.suppress(Exception):
            self._writes.pop(slab).release()


class NixlChannel(SocketChannel):
    """One side of a link."""

    transport = SCHEME

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> NixlInlet:
        sock = self.frames.sock
        agent = NixlAgent(num_slabs, slab_bytes, _is_loopback(sock.getsockname()[0]))
        memory = _Memory(
            agent=agent.name, metadata=agent.nixl.get_agent_metadata(), address=agent.address
        )
        try:
            self.send(msgspec.msgpack.encode(memory), timeout_s)
            return NixlInlet(agent)
        except LinkLost:
            agent.close()
            raise

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> NixlOutlet:
        frame = self.next_frame(timeout_s, 2 * MAX_METADATA)
        try:
            remote = _memory_decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the peer handed over no slab memory: {error}") from None
        agent = NixlAgent(num_slabs, slab_bytes, _is_loopback(self.frames.sock.getpeername()[0]))
        try:
            return NixlOutlet(agent, remote, self.wake)
        except ProtocolError:
            agent.close()
            raise


def listen_nixl(host: str) -> SocketListener:
    """Listen on a free port of an interface. Raises OSError when there is none such."""
    return listen_tcp(SCHEME, host, NixlChannel)


def connect_nixl(endpoint: str, timeout_s: float) -> NixlChannel:
    """Open a link to ``listen_nixl``. Raises LinkRefused, LinkLost."""
    return NixlChannel(dial_tcp(endpoint, timeout_s))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
