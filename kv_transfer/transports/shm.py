"""Links between processes of one host: slabs in shared memory, control over a unix socket.

Nothing has a name in a file system: the socket lives in the abstract namespace, the slab memory is
a memfd of the receiver that reaches the sender once, by SCM_RIGHTS. When the last process that maps
it dies, however it dies, the kernel takes it back. The memfd is sealed in size, so neither side can
shrink it under the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kernels.kv_pack.progress import WORD_BYTES, progress_words
from kvferry.kv_transfer.transports.control import (
    SocketChannel,
    SocketListener,
    dial_unix,
    listen_unix,
)
from kvferry.kv_transfer.transports.shared_slabs import SharedSlabs

SCHEME = "shm"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmSlabs(SharedSlabs):
    """Slabs in one mapping of a memfd: both ends of the data path, since nothing has to move."""

    is_followed = True

    def __init__(self, fd: int, num_slabs: int, slab_bytes: int) -> None:
        size = _memory_bytes(num_slabs, slab_bytes)
        shared = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes: memoryview | None = memoryview(shared)
        self._words = progress_words(self._bytes[-num_slabs * WORD_BYTES :])
        self._slab_bytes = slab_bytes

    def slab(self, index: int) -> memoryview:
        assert self._bytes is not None
        return self._bytes[index * self._slab_bytes : (index + 1) * self._slab_bytes]

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return self._words[slab] if self._words else None

    def close(self) -> None:
        # The mapping goes with the last view of it; closing it under a view would raise.
        self._bytes = None
        self._words = []


class ShmChannel(SocketChannel):
    """One side of a link."""

    transport = SCHEME
    awake_s = 3e-4
    """About what the other side needs for a slab of 2 MiB."""

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> ShmSlabs:
        try:
            fd = os.memfd_create("kvferry-slabs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _lost(error) from None
        try:
            os.ftruncate(fd, _memory_bytes(num_slabs, slab_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            slabs = ShmSlabs(fd, num_slabs, slab_bytes)
            if not self.frames.wait_for(select.POLLOUT, timeout_s):
                raise LinkLost("the peer takes no messages")
            socket.send_fds(self.frames.sock, [b"\0"], [fd])
            self.frames.read_ahead()
            return slabs
        except OSError as error:
            raise _lost(error) from None
        finally:
            os.close(fd)

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> ShmSlabs:
        if not self.frames.wait_for(select.POLLIN, timeout_s):
            raise LinkLost("the peer hands over no slab memory")
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(self.frames.sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise LinkLost("the peer closed the link")
            if len(fds) != 1:
                raise ProtocolError("the peer handed over no slab memory")
            _check_memfd(fds[0], _memory_bytes(num_slabs, slab_bytes))
            self.frames.read_ahead()
            return ShmSlabs(fds[0], num_slabs, slab_bytes)
        except OSError as error:
            raise _lost(error) from None
        finally:
            for fd in fds:
                os.close(fd)


def listen_shm() -> SocketListener:
    """Listen on a fresh random name."""
    return listen_unix(SCHEME, ShmChannel)


def connect_shm(endpoint: str, timeout_s: float) -> ShmChannel:
    """Open a link to ``listen_shm``. Raises LinkRefused, LinkLost."""
    return ShmChannel(dial_unix(endpoint, timeout_s))


def _memory_bytes(num_slabs: int, slab_bytes: int) -> int:
    """Slabs, then a word for each, each in a cache line."""
    return -(-num_slabs * slab_bytes // WORD_BYTES) * WORD_BYTES + num_slabs * WORD_BYTES


def _check_memfd(fd: int, size: int) -> None:
    """Raises ProtocolError unless the size is final: touching past an end would kill us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != size:
        raise ProtocolError("the peer's slab memory is not sealed at the size it announced")


def _lost(error: OSError) -> LinkLost:
    return LinkLost(f"the link broke: {error.strerror}")
