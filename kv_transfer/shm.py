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
import secrets
import select
import socket
import struct
import time

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.framing import FrameSocket, Wakeup
from kvferry.kv_transfer.messages import MAX_FRAME

SCHEME = "shm"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_UCRED = struct.Struct("3i")
_BACKLOG = 64
_PAUSE_S = 0.05


class ShmStaging:
    """Slabs in one mapping of a memfd."""

    def __init__(self, fd: int, num_slabs: int, slab_bytes: int) -> None:
        size = num_slabs * slab_bytes
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes: memoryview | None = memoryview(self._map)
        self._slab_bytes = slab_bytes

    def slab(self, index: int) -> memoryview:
        assert self._bytes is not None
        return self._bytes[index * self._slab_bytes : (index + 1) * self._slab_bytes]

    def close(self) -> None:
        # The mapping goes when the last view of it does; closing it under a view would raise.
        self._bytes = None


class ShmChannel:
    """One side of a link."""

    def __init__(self, sock: socket.socket) -> None:
        self._frames = FrameSocket(sock)

    def send(self, frame: bytes, timeout_s: float) -> None:
        self._frames.send(frame, timeout_s)

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        return self._frames.receive(timeout_s, limit)

    def wake(self) -> None:
        self._frames.wake()

    def close(self) -> None:
        self._frames.close()

    def grant_staging(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> ShmStaging:
        fd = os.memfd_create("kvferry-slabs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_slabs * slab_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            staging = ShmStaging(fd, num_slabs, slab_bytes)
            if not self._frames.wait_for(select.POLLOUT, timeout_s):
                raise LinkLost("the peer takes no messages")
            try:
                socket.send_fds(self._frames.sock, [b"\0"], [fd])
            except OSError as error:
                raise LinkLost(f"the link broke: {error.strerror}") from None
            return staging
        finally:
            os.close(fd)

    def accept_staging(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> ShmStaging:
        if not self._frames.wait_for(select.POLLIN, timeout_s):
            raise LinkLost("the peer hands over no slab memory")
        try:
            data, fds, _, _ = socket.recv_fds(self._frames.sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise LinkLost(f"the link broke: {error.strerror}") from None
        try:
            if not data:
                raise LinkLost("the peer closed the link")
            if len(fds) != 1:
                raise ProtocolError("the peer handed over no slab memory")
            _check_memfd(fds[0], num_slabs * slab_bytes)
            return ShmStaging(fds[0], num_slabs, slab_bytes)
        finally:
            for fd in fds:
                os.close(fd)


class ShmListener:
    """Listens on a fresh random name."""

    def __init__(self) -> None:
        self._name = f"kvferry-{secrets.token_hex(8)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(f"\0{self._name}")
        self._sock.listen(_BACKLOG)
        self._sock.setblocking(False)
        self._wakeup = Wakeup()

    @property
    def endpoint(self) -> str:
        return f"{SCHEME}:{self._name}"

    def accept(self, timeout_s: float) -> ShmChannel | None:
        if self._wakeup.wait_readable(self._sock, timeout_s):
            return None
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return None
        except OSError:
            # Out of descriptors, say: the caller waits in line still, so do not spin on it.
            time.sleep(min(timeout_s, _PAUSE_S))
            return None
        if not _same_user(sock):
            sock.close()
            return None
        return ShmChannel(sock)

    def stop(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._sock.close()
        self._wakeup.close()


def connect_shm(endpoint: str, timeout_s: float) -> ShmChannel:
    """Open a link to a ShmListener. Raises LinkRefused, LinkLost."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_s
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(f"\0{endpoint.removeprefix(f'{SCHEME}:')}")
    except ConnectionRefusedError:
        sock.close()
        raise LinkRefused(f"nobody listens at {endpoint}") from None
    except OSError as error:
        sock.close()
        raise LinkLost(f"{endpoint} does not answer: {error}") from None
    if not _same_user(sock):
        sock.close()
        raise LinkRefused(f"{endpoint} belongs to another user")
    return ShmChannel(sock)


def _same_user(sock: socket.socket) -> bool:
    """Abstract names have no file permissions: the kernel's word on the peer stands in."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return False
    _, uid, _ = _UCRED.unpack(packed)
    return bool(uid == os.geteuid())


def _check_memfd(fd: int, size: int) -> None:
    """Raises ProtocolError unless the size is final: touching past an end would kill us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != size:
        raise ProtocolError("the peer's slab memory is not sealed at the size it announced")
