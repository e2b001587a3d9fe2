"""Links over torch.distributed process groups, one per rank pair: ``gloo`` and ``nccl``.

Neither library can tell peers apart, or give up on one operation. So:

* The control channel is a TCP connection of ours; the group is set up over it (``group_store``).
* A receive is posted for an announced slab alone, and the send when the receiver has said that it
  is. Both sides post in the order of the Pulls, and never more than ``MAX_OUTSTANDING`` at once: an
  operation without its partner hangs.
* A thread per path waits for completions, oldest first, and wakes the channel. How long one may
  take is decided here: time-outs inside torch.distributed lie far beyond. The only thing that ends
  an operation is to abort the group, and with it the link; the sender then connects anew and sends
  again from its blocks.

Whoever reaches a group's ports while it is set up could join it: it needs ``trusted_network``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core.errors import KvferryError, LinkLost, ProtocolError
from kvferry.kv_transfer.transport import Slab
from kvferry.kv_transfer.transports.control import (
    SocketChannel,
    SocketListener,
    dial_tcp,
    listen_tcp,
)
from kvferry.kv_transfer.transports.group_store import ChannelStore
from kvferry.kv_transfer.transports.torch_groups import GlooGroup, Group, Operation, nccl_group

GLOO = "gloo"
NCCL = "nccl"
MAX_OUTSTANDING = 4
RECEIVER, SENDER = 0, 1
"""Ranks in the group."""
SLAB_ALIGNMENT = 256
"""Bytes at which slabs begin."""
OPERATION_S = 5.0
SLOWEST = 10e6
"""The oldest operation has hung after OPERATION_S and what a slab takes at SLOWEST bytes/s."""
LINGER_S = 5.0
"""How long a path that closes waits for its thread."""

Post = Callable[[torch.Tensor, int], Operation]
BuildGroup = Callable[[ChannelStore, int, float], Group]
"""(store, rank, seconds that it may take) -> group."""


@dataclass(frozen=True, slots=True)
class _Move:
    """One push or pull."""

    slab: int
    grant: int
    nbytes: int


class GroupPath:
    """One end of a data path over a group: the outlet when it pushes, the inlet when it pulls."""

    is_pulled = True
    is_followed = False

    def __init__(
        self,
        group: Group,
        num_slabs: int,
        slab_bytes: int,
        wake: Callable[[], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout_s``: the oldest operation that takes longer has hung."""
        self.is_device = group.is_device
        self._group = group
        self._slab_bytes = slab_bytes
        self._stride = -(-slab_bytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        self._memory = group.memory(num_slabs * self._stride)
        self._wake = wake
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        """Guards all that follows, and that operations are posted in order."""
        self._waiting: deque[tuple[_Move, Post]] = deque()
        self._posted: deque[tuple[_Move, Operation]] = deque()
        self._head_since = 0.0
        """When the oldest posted operation became the oldest."""
        self._arrived: dict[int, _Move] = {}
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._watch, name="kv-group", daemon=True)
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether its thread runs still."""
        return self._thread.is_alive()

    def slab(self, index: int) -> Slab:
        tensor = self._tensor(index)
        return tensor if self.is_device else memoryview(tensor.numpy())

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._post(_Move(slab, grant, nbytes), self._group.send)

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return None

    def in_flight(self, slab: int) -> bool:
        with self._changed:
            self._check()
            return any(move.slab == slab for move, _ in (*self._waiting, *self._posted))

    def grant(self, slab: int, grant: int) -> None:
        with self._changed:
            self._arrived.pop(slab, None)

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        self._post(_Move(slab, grant, nbytes), self._group.receive)

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        with self._changed:
            self._check()
            return self._arrived.get(slab) == _Move(slab, grant, nbytes)

    def close(self) -> None:
        """Abort the group. Idempotent."""
        with self._changed:
            if self._fault is None:
                self._fault = "the link is closed"
            self._changed.notify_all()
        self._group.abort()
        self._thread.join(LINGER_S)

    def _tensor(self, index: int) -> torch.Tensor:
        begin = index * self._stride
        return self._memory[begin : begin + self._slab_bytes]

    def _post(self, move: _Move, post: Post) -> None:
        if not 0 < move.nbytes <= self._slab_bytes:
            raise ProtocolError(f"{move.nbytes} bytes in a slab of {self._slab_bytes}")
        with self._changed:
            self._check()
            self._waiting.append((move, post))
            self._post_waiting()

    def _post_waiting(self) -> None:
        """Post in order for as long as there may be more. The lock is held."""
        while self._waiting and len(self._posted) < MAX_OUTSTANDING and self._fault is None:
            move, post = self._waiting.popleft()
            if not self._posted:
                self._head_since = self._clock()
            try:
                self._posted.append((move, post(self._tensor(move.slab), move.nbytes)))
            except RuntimeError as error:
                self._fault = f"the process group broke: {_first_line(error)}"
        self._changed.notify_all()

    def _check(self) -> None:
        """Raises LinkLost when the path is of no use any more. The lock is held."""
        waited_s = self._clock() - self._head_since if self._posted else 0.0
        if self._fault is None and waited_s > self._timeout_s:
            self._fault = f"a slab has not moved for {self._timeout_s:.0f} s"
        if self._fault is not None:
            raise LinkLost(self._fault)

    def _watch(self) -> None:
        """Wait for each posted operation in turn, until the path breaks."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._posted or self._fault is not None)
                if not self._posted:
                    return
                move, operation = self._posted[0]
            fault = None
            try:
                operation.wait()
            except RuntimeError as error:
                fault = f"the process group broke: {_first_line(error)}"
            with self._changed:
                self._posted.popleft()
                if fault is None:
                    self._arrived[move.slab] = move
                    self._head_since = self._clock()
                    self._post_waiting()
                elif self._fault is None:
                    self._fault = fault
            self._wake()


class GroupChannel(SocketChannel):
    """One side of a link."""

    def __init__(self, sock: socket.socket, transport: str, build: BuildGroup | None = None):
        super().__init__(sock)
        self.transport = transport
        self._build = build or _builder(transport, sock.getsockname()[0])
        self._path: GroupPath | None = None

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> GroupPath:
        return self._open(RECEIVER, num_slabs, slab_bytes, timeout_s)

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> GroupPath:
        return self._open(SENDER, num_slabs, slab_bytes, timeout_s)

    def close(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            path.close()
        super().close()

    def _open(self, rank: int, num_slabs: int, slab_bytes: int, timeout_s: float) -> GroupPath:
        store = ChannelStore(self, time.monotonic() + timeout_s)
        group = _within(timeout_s, lambda: self._build(store, rank, timeout_s))
        try:
            store.finish()
        except KvferryError:
            group.abort()
            raise
        hung_after_s = OPERATION_S + slab_bytes / SLOWEST
        self._path = GroupPath(group, num_slabs, slab_bytes, self.wake, hung_after_s)
        return self._path


def listen_gloo(host: str) -> SocketListener:
    """Listen on a free port of an interface. Raises OSError."""
    return listen_tcp(GLOO, host, lambda sock: GroupChannel(sock, GLOO))


def listen_nccl(host: str) -> SocketListener:
    """Listen on a free port of an interface. Raises OSError."""
    return listen_tcp(NCCL, host, lambda sock: GroupChannel(sock, NCCL))


def connect_gloo(endpoint: str, timeout_s: float) -> GroupChannel:
    """Open a link to ``listen_gloo``. Raises LinkRefused, LinkLost."""
    return GroupChannel(dial_tcp(endpoint, timeout_s), GLOO)


def connect_nccl(endpoint: str, timeout_s: float) -> GroupChannel:
    """Open a link to ``listen_nccl``. Raises LinkRefused, LinkLost."""
    return GroupChannel(dial_tcp(endpoint, timeout_s), NCCL)


def _builder(transport: str, host: str) -> BuildGroup:
    """``host``: the interface of the control channel, which the peer can reach."""
    if transport == GLOO:
        return lambda store, rank, timeout_s: GlooGroup(store, rank, host, timeout_s)
    device = torch.device("cuda", torch.cuda.current_device())
    return lambda store, rank, timeout_s: nccl_group(store, rank, device)


def _within(timeout_s: float, build: Callable[[], Group]) -> Group:
    """Build on a thread of its own, since nothing ends a set-up whose peer has died.

    Raises LinkLost, ProtocolError.
    """
    lock = threading.Lock()
    outcome: list[Group | Exception] = []
    is_late = False

    def work() -> None:
        try:
            group = build()
        except (KvferryError, RuntimeError) as error:
            outcome.append(error)
            return
        with lock:
            outcome.append(group)
            is_unwanted = is_late
        if is_unwanted:
            group.abort()

    thread = threading.Thread(target=work, name="kv-group-setup", daemon=True)
    thread.start()
    thread.join(timeout_s)
    with lock:
        is_late = not outcome
    if is_late:
        raise LinkLost("the process group is not set up in time")
    built = outcome.pop()
    if not isinstance(built, Exception):
        return built
    try:
        if isinstance(built, KvferryError):
            raise built
        raise LinkLost(f"the process group is not set up: {_first_line(built)}")
    finally:
        # It refers to this frame: sockets would stay until the garbage collector comes by.
        del built


def _first_line(error: Exception) -> str:
    """What torch says, without the place in its source."""
    line = str(error).partition("\n")[0].rpartition("] ")[2]
    return line.partition(". ")[0][:200]
