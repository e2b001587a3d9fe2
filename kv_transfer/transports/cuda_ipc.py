"""Links between processes of one host whose GPUs reach each other: slabs in device memory.

The receiver owns one allocation; its handle reaches the sender over the unix control socket. The
sender packs straight into it, by its own device: a Header follows only when the pack has ended, so
the bytes are there. Nothing else moves.

Memory that a peer has open must not be freed under it. The sender closes what it opened before it
closes the link; the receiver hangs up, and frees once the other end of the connection is gone,
however its process ended.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import cache
from typing import Annotated, Protocol

import msgspec
import torch

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.frames import decode, encode
from kvferry.kv_transfer.messages import MAX_HANDSHAKE_FRAME, Message
from kvferry.kv_transfer.transports.control import (
    SocketChannel,
    SocketListener,
    dial_unix,
    listen_unix,
)
from kvferry.kv_transfer.transports.cuda_driver import (
    HANDLE_BYTES,
    UUID_BYTES,
    CudaDriver,
    CudaError,
)
from kvferry.kv_transfer.transports.shared_slabs import SharedSlabs

SCHEME = "cuda_ipc"
SLAB_ALIGNMENT = 256
"""Bytes at which slabs begin."""


class Shared(Message, frozen=True):
    """The receiver's slab memory."""

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    uuid: Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
    """Of the device that it is on."""


_decoder: msgspec.msgpack.Decoder[Shared] = msgspec.msgpack.Decoder(Shared)


class Driver(Protocol):
    """What ``cuda_driver.CudaDriver`` does."""

    @property
    def uuid(self) -> bytes: ...

    def why_not_reach(self, uuid: bytes) -> str | None: ...

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes: ...

    def open(self, handle: bytes) -> tuple[int, int]: ...

    def close(self, address: int) -> None: ...


class IpcSlabs(SharedSlabs):
    """Slabs in one piece of device memory: both ends of the data path."""

    is_device = True

    def __init__(self, address: int, device: torch.device, num_slabs: int, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._stride = _stride(slab_bytes)
        self._memory: torch.Tensor | None = _view(address, device, num_slabs * self._stride)

    def slab(self, index: int) -> torch.Tensor:
        assert self._memory is not None
        begin = index * self._stride
        return self._memory[begin : begin + self._slab_bytes]

    def close(self) -> None:
        # The memory itself goes with the channel.
        self._memory = None


class IpcChannel(SocketChannel):
    """One side of a link. ``driver``: of the device that this process computes on."""

    transport = SCHEME

    def __init__(self, sock: socket.socket, driver: Driver, device: torch.device) -> None:
        super().__init__(sock)
        self._driver = driver
        self._device = device
        self._owned: int | None = None
        self._opened: int | None = None

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> IpcSlabs:
        try:
            self._owned = self._driver.allocate(num_slabs * _stride(slab_bytes))
            shared = Shared(handle=self._driver.export(self._owned), uuid=self._driver.uuid)
        except CudaError as error:
            raise LinkLost(f"no slab memory to share: {error}") from None
        self.send(encode(shared), timeout_s)
        return IpcSlabs(self._owned, self._device, num_slabs, slab_bytes)

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> IpcSlabs:
        shared = decode(_decoder, self.next_frame(timeout_s, MAX_HANDSHAKE_FRAME))
        try:
            reason = self._driver.why_not_reach(shared.uuid)
            if reason is not None:
                raise LinkRefused(reason)
            self._opened, nbytes = self._driver.open(shared.handle)
        except CudaError as error:
            raise LinkLost(f"the peer's slab memory cannot be opened: {error}") from None
        if nbytes < num_slabs * _stride(slab_bytes):
            raise ProtocolError("the peer's slab memory is smaller than it announced")
        return IpcSlabs(self._opened, self._device, num_slabs, slab_bytes)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            _quietly(lambda: self._driver.close(opened))
        owned, self._owned = self._owned, None
        if owned is not None:
            connection = self.frames.sock.dup()
            threading.Thread(
                target=_free_once_alone,
                args=(connection, lambda: self._driver.free(owned)),
                name="kv-ipc-free",
                daemon=True,
            ).start()
        super().close()


def _free_once_alone(connection: socket.socket, free: Callable[[], None]) -> None:
    """Hang up, and free once the peer has, or is dead."""
    with connection:
        try:
            connection.setblocking(True)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            pass  # it is gone
    _quietly(free)


def _quietly(release: Callable[[], None]) -> None:
    """What a broken device cannot give back, it has lost already."""
    try:
        release()
    except CudaError:
        return


def _stride(slab_bytes: int) -> int:
    return -(-slab_bytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


def _view(address: int, device: torch.device, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over memory that torch does not own, as memory of ``device``: a peer's memory
    is used by this device's kernels.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


@cache
def _driver_of(ordinal: int) -> CudaDriver:
    return CudaDriver(ordinal)


def _channel(sock: socket.socket) -> IpcChannel:
    ordinal = torch.cuda.current_device()
    return IpcChannel(sock, _driver_of(ordinal), torch.device("cuda", ordinal))


def listen_cuda_ipc() -> SocketListener:
    """Listen on a fresh random name, for processes on this host."""
    return listen_unix(SCHEME, _channel)


def connect_cuda_ipc(endpoint: str, timeout_s: float) -> IpcChannel:
    """Open a link to ``listen_cuda_ipc``. Raises LinkRefused, LinkLost."""
    return _channel(dial_unix(endpoint, timeout_s))


def why_not_cuda_ipc() -> str | None:
    """Why this process cannot share device memory; None when it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        _driver_of(torch.cuda.current_device())
    except (OSError, CudaError) as error:
        return f"the CUDA driver does not answer: {error}"
    return None
