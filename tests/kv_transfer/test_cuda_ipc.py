"""Device memory shared between processes, over a CUDA driver that is built of host memory from
NVIDIA's own header: what is called, with which types, and when memory is given back.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_cuda import build_fake_cuda, fake_ipc_channel

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.transports.control import SocketListener, listen_unix
from kvferry.kv_transfer.transports.cuda_driver import GRANULE, CudaDriver, CudaError
from kvferry.kv_transfer.transports.cuda_ipc import IpcChannel, Shared, why_not_cuda_ipc

PEER = Path(__file__).with_name("ipc_peer.py")
SUPPORT = Path(__file__).parents[1] / "support"
NUM_SLABS, SLAB_BYTES = 3, 1000
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_fake_cuda(tmp_path_factory.mktemp("cuda")))


class Sides:
    """Both sides of a link in one process."""

    def __init__(self, library: str) -> None:
        self._library = library
        self.lib = ctypes.CDLL(library)
        near, far = socket.socketpair()
        self.receiver = fake_ipc_channel(library, near)
        self.sender = fake_ipc_channel(library, far)

    def live(self) -> tuple[int, int]:
        """Pieces of memory (owned, opened) that nobody gave back."""
        return self.lib.fake_cuda_live(1), self.lib.fake_cuda_live(0)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        wait_for_free()


def freeing() -> list[threading.Thread]:
    """Threads that have memory to free."""
    return [thread for thread in threading.enumerate() if thread.name == "kv-ipc-free"]


def wait_for_free() -> None:
    for thread in freeing():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def wait_in_vain() -> None:
    (thread,) = freeing()
    thread.join(0.1)
    assert thread.is_alive()


@pytest.fixture
def sides(library: str) -> Iterator[Sides]:
    sides = Sides(library)
    yield sides
    sides.close()
    assert sides.live() == (0, 0)


def test_both_sides_see_one_memory(sides: Sides) -> None:
    inlet = sides.receiver.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    sides.sender.wake()
    outlet = sides.sender.open_outlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    assert inlet.is_device
    assert not inlet.is_pulled
    for slab in range(NUM_SLABS):
        outlet.slab(slab).fill_(slab + 1)
    for slab in range(NUM_SLABS):
        assert len(inlet.slab(slab)) == SLAB_BYTES
        assert inlet.slab(slab).storage_offset() % 16 == 0
        assert (inlet.slab(slab) == slab + 1).all()
        assert inlet.arrived(slab, 1, SLAB_BYTES)


def test_memory_is_freed_only_once_the_sender_has_closed_it(sides: Sides) -> None:
    inlet = sides.receiver.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    outlet = sides.sender.open_outlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    inlet.close()
    sides.receiver.close()
    wait_in_vain()
    assert sides.live() == (1, 1)
    with pytest.raises(LinkLost):
        sides.sender.receive(TIMEOUT_S)
    outlet.slab(0).fill_(1)
    sides.sender.close()
    wait_for_free()
    assert sides.live() == (0, 0)


def test_a_sender_that_never_opens_is_no_leak(sides: Sides) -> None:
    sides.receiver.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    sides.receiver.close()
    assert sides.live() == (1, 0)


def test_a_receiver_that_shares_nothing_is_waited_for_no_longer_than_said(sides: Sides) -> None:
    with pytest.raises(LinkLost, match="opens no data path"):
        sides.sender.open_outlet(NUM_SLABS, SLAB_BYTES, 0.05)


UUID = bytes([100]) * 16


@pytest.mark.parametrize(
    ("frame", "error", "text"),
    [
        (b"garbage", ProtocolError, "checksum"),
        (encode(Shared(handle=b"x" * 63, uuid=UUID)), ProtocolError, "handle"),
        (encode(Shared(handle=b"x" * 64, uuid=b"u" * 17)), ProtocolError, "uuid"),
        (encode(Shared(handle=b"x" * 64, uuid=UUID)), LinkLost, "CUDA_ERROR_INVALID_VALUE"),
        (encode(Shared(handle=b"x" * 64, uuid=bytes(16))), LinkRefused, "not visible"),
        (encode(Shared(handle=b"x" * 64, uuid=bytes([102]) * 16)), LinkRefused, "no access"),
    ],
)
def test_what_a_peer_hands_over_is_checked(
    sides: Sides, frame: bytes, error: type[Exception], text: str
) -> None:
    sides.receiver.send(frame, 1.0)
    with pytest.raises(error, match=text):
        sides.sender.open_outlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)


def test_memory_that_is_smaller_than_announced_is_refused(sides: Sides) -> None:
    sides.receiver.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    with pytest.raises(ProtocolError, match="smaller"):
        sides.sender.open_outlet(2, GRANULE, TIMEOUT_S)


def test_the_memory_of_another_gpu_with_access_is_opened(library: str, sides: Sides) -> None:
    other = fake_ipc_channel(library, sides.sender.frames.sock.dup(), ordinal=1)
    inlet = sides.receiver.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    other.open_outlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S).slab(1).fill_(9)
    assert (inlet.slab(1) == 9).all()
    other.close()


def test_a_driver_without_memory_is_a_lost_link(library: str) -> None:
    near, far = socket.socketpair()
    channel = fake_ipc_channel(library, near)
    with pytest.raises(LinkLost, match="no slab memory to share"):
        channel.open_inlet(1 << 20, 1 << 40, TIMEOUT_S)
    channel.close()
    far.close()


class Broken:
    """A driver that names no device any more."""

    def __init__(self, driver: CudaDriver) -> None:
        self.allocate, self.export, self.free = driver.allocate, driver.export, driver.free

    @property
    def uuid(self) -> bytes:
        raise CudaError("cuDeviceGetUuid_v2: CUDA_ERROR_DEVICE_UNAVAILABLE")

    def why_not_reach(self, uuid: bytes) -> str | None:
        assert uuid != self.uuid
        return None


@pytest.mark.parametrize("is_receiver", [True, False], ids=["receiver", "sender"])
def test_a_driver_that_fails_is_a_lost_link_and_no_leak(library: str, is_receiver: bool) -> None:
    near, far = socket.socketpair()
    broken = IpcChannel(near, Broken(CudaDriver(0, library)), torch.device("cpu"))
    sound = fake_ipc_channel(library, far)
    if not is_receiver:
        sound.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    open_path = broken.open_inlet if is_receiver else broken.open_outlet
    with pytest.raises(LinkLost, match="DEVICE_UNAVAILABLE"):
        open_path(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    broken.close()
    sound.close()
    wait_for_free()
    assert ctypes.CDLL(library).fake_cuda_live(1) == 0


def test_the_drivers_errors_have_names(library: str) -> None:
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(9, library)
    with pytest.raises(OSError, match="libnone"):
        CudaDriver(0, "libnone.so.1")


def test_a_handle_opens_nothing_but_its_own_memory(library: str) -> None:
    """A piece smaller than the driver's unit would come with whatever else lies in it."""
    driver = CudaDriver(0, library)
    address = driver.allocate(10)
    opened, nbytes = driver.open(driver.export(address))
    assert nbytes == GRANULE
    driver.close(opened)
    driver.free(address)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_why_not() -> None:
    assert why_not_cuda_ipc() == "there is no CUDA device"


@pytest.fixture
def with_peer(library: str) -> Iterator[tuple[IpcChannel, subprocess.Popen[str]]]:
    """The receiver's channel, and a sender in a process of its own."""

    def channel(sock: socket.socket) -> IpcChannel:
        return fake_ipc_channel(library, sock)

    listener: SocketListener = listen_unix("cuda_ipc", channel)
    arguments = [library, listener.endpoint, str(NUM_SLABS), str(SLAB_BYTES)]
    peer = subprocess.Popen(
        [sys.executable, "-P", str(PEER), *arguments], env={"PYTHONPATH": str(SUPPORT)}, text=True
    )
    accepted = listener.accept(TIMEOUT_S)
    assert isinstance(accepted, IpcChannel)
    yield accepted, peer
    peer.kill()
    peer.wait()
    accepted.close()
    listener.close()
    wait_for_free()


def test_memory_of_two_processes_outlives_a_stopped_peer_and_no_dead_one(
    with_peer: tuple[IpcChannel, subprocess.Popen[str]], library: str
) -> None:
    channel, peer = with_peer
    lib = ctypes.CDLL(library)
    inlet = channel.open_inlet(NUM_SLABS, SLAB_BYTES, TIMEOUT_S)
    assert channel.receive(TIMEOUT_S) == b"filled"
    for slab in range(NUM_SLABS):
        assert (inlet.slab(slab) == slab + 1).all()
    peer.send_signal(signal.SIGSTOP)
    channel.close()
    wait_in_vain()
    assert lib.fake_cuda_live(1) == 1
    peer.kill()
    wait_for_free()
    assert lib.fake_cuda_live(1) == 0
