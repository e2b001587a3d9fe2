"""Shared memory: sealed, nameless, and gone with its last user."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.jobs import ReceiveDone
from kvferry.kv_transfer.transports.shm import ShmChannel, connect_shm, listen_shm


@pytest.fixture
def channels() -> Iterator[tuple[ShmChannel, ShmChannel]]:
    listener = listen_shm()
    sender = connect_shm(listener.endpoint, 1.0)
    receiver = listener.accept(1.0)
    assert receiver is not None
    yield sender, receiver
    for end in (sender, receiver, listener):
        end.close()


def open_files() -> set[str]:
    """What the descriptors of this process point at, sockets and memory files by their number."""
    links = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.add(f"{fd.name}:{fd.readlink()}")
        except FileNotFoundError:
            continue
    return links


def mapped_slabs() -> int:
    return Path("/proc/self/maps").read_text().count("kvferry-slabs")


def test_both_sides_see_the_same_bytes(channels) -> None:
    sender, receiver = channels
    theirs = receiver.open_inlet(3, 4096, 1.0)
    ours = sender.open_outlet(3, 4096, 1.0)
    ours.slab(1)[:5] = b"hello"
    assert bytes(theirs.slab(1)[:5]) == b"hello"
    assert not any(theirs.slab(0))
    assert not any(theirs.slab(2))
    assert theirs.slab(2).nbytes == 4096


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_can_shrink_is_refused(channels, seals: int) -> None:
    """A peer that truncates what we mapped would kill us at the next touch."""
    sender, receiver = channels
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    socket.send_fds(receiver.frames.sock, [b"\0"], [fd])
    os.close(fd)
    with pytest.raises(ProtocolError, match="sealed"):
        sender.open_outlet(1, 4096, 1.0)


def test_memory_of_another_size_or_none_is_refused(channels) -> None:
    sender, receiver = channels
    before = open_files()
    receiver.open_inlet(1, 4096, 1.0)
    with pytest.raises(ProtocolError, match="sealed"):
        sender.open_outlet(2, 4096, 1.0)
    receiver.frames.sock.send(b"\0")
    with pytest.raises(ProtocolError, match="no slab memory"):
        sender.open_outlet(1, 4096, 1.0)
    with pytest.raises(LinkLost):
        sender.open_outlet(1, 4096, 0.01)
    read_end, write_end = os.pipe()
    socket.send_fds(receiver.frames.sock, [b"\0"], [read_end])
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(ProtocolError, match="sealed"):
        sender.open_outlet(1, 4096, 1.0)
    assert open_files() == before


def test_granted_memory_cannot_be_resized_or_unsealed(channels) -> None:
    sender, receiver = channels
    receiver.open_inlet(1, 4096, 1.0)
    _, (fd,), _, _ = socket.recv_fds(sender.frames.sock, 1, 1)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with mmap.mmap(fd, 4096) as view:
        view[0] = 1
    os.close(fd)


def test_nobody_listens(make_shm_pair) -> None:
    with pytest.raises(LinkRefused, match="nobody listens"):
        connect("shm:kvferry-none", 1.0)
    with pytest.raises(LinkRefused, match="nobody listens"):
        connect("loopback:none", 1.0)
    with pytest.raises(LinkRefused, match="names no transport"):
        connect("carrier-pigeon:none", 1.0)


def test_a_listener_that_never_accepts_does_not_hold_its_callers() -> None:
    listener = listen_shm()
    callers = []
    with contextlib.suppress(LinkLost):
        for _ in range(1000):
            callers.append(connect_shm(listener.endpoint, 0.05))
    assert 0 < len(callers) < 1000
    for caller in callers:
        caller.close()
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(make_shm_pair) -> None:
    pair = make_shm_pair()
    script = (
        "import socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX)\n"
        "sock.connect(sys.argv[1].replace('shm:', chr(0)))\n"
        "sock.settimeout(20)\n"
        "sys.exit(len(sock.recv(100)))\n"
    )
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no Python that another user may run")
    command = [python, "-S", "-c", script, pair.receiver.endpoints[0]]
    assert subprocess.run(command, user=65534, check=False).returncode == 0
    assert subprocess.run(command, check=False).returncode > 0


def test_stop_ends_an_accept_that_waits() -> None:
    listener = listen_shm()
    timer = threading.Timer(0.05, listener.stop)
    timer.start()
    started = time.monotonic()
    assert listener.accept(60.0) is None
    assert time.monotonic() - started < 20.0
    timer.join()
    listener.close()
    listener.stop()


def test_nothing_is_left_behind(make_shm_pair) -> None:
    """Descriptors, mappings, threads: all as before, link by link and at the end."""
    names = set(os.listdir("/dev/shm"))
    gc.collect()  # what earlier tests left to it must not be closed, or mistaken for ours, below
    before = open_files()
    for _ in range(3):
        pair = make_shm_pair()
        pair.expect()
        pair.send()
        assert isinstance(pair.received.next(), ReceiveDone)
        assert mapped_slabs() == 2
        assert set(os.listdir("/dev/shm")) <= names
        pair.sender.close()
        pair.receiver.close()
    gc.collect()
    assert mapped_slabs() == 0
    assert {entry.split(":", 1)[0] for entry in open_files()} <= {
        entry.split(":", 1)[0] for entry in before
    }
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]
