"""NIXL's agents between two ends in this process and, where a peer has to die, between two."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.endpoints import TRANSPORTS
from kvferry.kv_transfer.jobs import ReceiveDone, SendDone
from kvferry.kv_transfer.transports.nixl import NixlChannel, connect_nixl, listen_nixl
from kvferry.kv_transfer.transports.nixl_agent import Turner, why_not

SLAB = 64 << 10

needs_nixl = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.fixture
def channels() -> Iterator[tuple[NixlChannel, Any]]:
    """Sender's and receiver's end."""
    listener = listen_nixl("127.0.0.1")
    sender = connect_nixl(listener.endpoint, 1.0)
    receiver = listener.accept(1.0)
    yield sender, receiver
    for end in (sender, receiver, listener):
        end.close()


@pytest.fixture
def paths(channels) -> Iterator[tuple[Any, Any]]:
    """Inlet and outlet of three slabs, closed whatever happens: their threads would hold us."""
    sender, receiver = channels
    inlet = receiver.open_inlet(3, SLAB, 1.0)
    outlet = sender.open_outlet(3, SLAB, 1.0)
    yield inlet, outlet
    outlet.close()
    inlet.close()


def await_end(channel: NixlChannel, outlet: Any, slab: int) -> None:
    """The end of a push, of which the channel is woken."""
    deadline = time.monotonic() + 10
    while outlet.in_flight(slab):
        assert channel.receive(10.0) is None
        assert time.monotonic() < deadline


@needs_nixl
def test_what_is_pushed_lands_in_the_same_slab_and_nowhere_else(channels, paths) -> None:
    (sender, _), (inlet, outlet) = channels, paths
    for grant, slab in enumerate((1, 0, 1), start=1):
        outlet.slab(slab)[:] = bytes([grant]) * SLAB
        inlet.grant(slab, grant)
        outlet.push(slab, grant, SLAB - 5)
        await_end(sender, outlet, slab)
        assert inlet.arrived(slab, grant, SLAB - 5)
        assert bytes(inlet.slab(slab)) == bytes([grant]) * (SLAB - 5) + bytes(5)
    assert not any(inlet.slab(2))


@needs_nixl
@pytest.mark.parametrize(
    "damage",
    [
        lambda memory: b"",
        lambda memory: b"\xc1",
        lambda memory: memory | {"metadata": b""},
        lambda memory: memory | {"metadata": memory["metadata"][:-1]},
        lambda memory: memory | {"metadata": bytes(len(memory["metadata"]))},
        lambda memory: memory | {"metadata": bytes(1 << 17)},
        lambda memory: memory | {"agent": "f" * 32},
        lambda memory: memory | {"agent": "f"},
        lambda memory: memory | {"address": memory["address"] + 1},
        lambda memory: memory | {"address": 0},
        lambda memory: memory | {"address": -1},
        lambda memory: memory | {"more": 1},
    ],
)
def test_memory_that_is_not_what_it_says_is_refused(channels, damage) -> None:
    sender, receiver = channels
    with_inlet = connect_nixl_pair()
    inlet = with_inlet[1].open_inlet(2, SLAB, 1.0)
    frame = with_inlet[0].receive(1.0)
    damaged = damage(msgspec.msgpack.decode(frame))
    encoded = damaged if isinstance(damaged, bytes) else msgspec.msgpack.encode(damaged)
    if encoded:
        receiver.send(encoded, 1.0)
    try:
        with pytest.raises((ProtocolError, LinkLost)):
            sender.open_outlet(2, SLAB, 0.2).close()
    finally:
        inlet.close()
        for end in with_inlet:
            end.close()


def connect_nixl_pair() -> tuple[NixlChannel, Any]:
    listener = listen_nixl("127.0.0.1")
    sender = connect_nixl(listener.endpoint, 1.0)
    receiver = listener.accept(1.0)
    listener.close()
    return sender, receiver


@needs_nixl
def test_less_memory_than_announced_is_refused(channels) -> None:
    sender, receiver = channels
    inlet = receiver.open_inlet(2, SLAB, 1.0)
    with pytest.raises(ProtocolError, match="cannot be used"):
        sender.open_outlet(3, SLAB, 1.0)
    inlet.close()


@needs_nixl
def test_a_closed_inlet_keeps_its_addresses_and_gives_its_memory_back(channels) -> None:
    """A write that a stopped peer ends after all must not land in anything else."""
    sender, receiver = channels
    inlet = receiver.open_inlet(64, SLAB, 1.0)
    address = msgspec.msgpack.decode(sender.receive(1.0))["address"]
    view = inlet.slab(0)
    view[:] = b"x" * SLAB
    inlet.close()
    assert not any(view)
    view.release()
    del inlet, view
    gc.collect()
    with Path("/proc/self/maps").open() as maps:
        spans = [line.split()[0].split("-") for line in maps]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@needs_nixl
def test_nobody_but_loopback_is_listened_to(paths) -> None:
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    listening = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            listening.append(words[1].partition(":")[0])
    assert len(listening) >= 2
    assert set(listening) == {"0100007F"}


PEER = """
import sys
from kvferry.kv_transfer.transports.nixl import connect_nixl, listen_nixl
slab = int(sys.argv[1])
listener = listen_nixl("127.0.0.1")
print(listener.endpoint, flush=True)
channel = listener.accept(10.0)
inlet = channel.open_inlet(2, slab, 10.0)
inlet.grant(0, 1)
print("open", flush=True)
sys.stdin.read()
"""


@needs_nixl
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_or_dies_holds_nobody(how: signal.Signals) -> None:
    """Over TCP, where each write needs the peer: closing ends what is in flight."""
    script = f"import os\nos.environ['UCX_TLS'] = 'tcp'\n{PEER}"
    # The sender's half runs in a process of its own too: UCX reads its settings once.
    sender = """
import os, sys, time
os.environ["UCX_TLS"] = "tcp"
from kvferry.core.errors import LinkLost
from kvferry.kv_transfer.transports.nixl import connect_nixl
slab = int(sys.argv[1])
channel = connect_nixl(sys.argv[2], 10.0)
outlet = channel.open_outlet(2, slab, 10.0)
outlet.push(0, 1, slab)
while outlet.in_flight(0):
    channel.receive(10.0)
print("moved", flush=True)
sys.stdin.readline()
outlet.push(1, 2, slab)
try:
    for _ in range(20):
        if not outlet.in_flight(1):
            break
        try:
            channel.receive(0.05)
        except LinkLost:
            pass
    print("in flight", outlet.in_flight(1), flush=True)
except LinkLost as error:
    print("lost", error, flush=True)
outlet.close()
channel.close()
print("closed", flush=True)
"""
    slab = str(8 << 20)
    with (
        start(script, slab) as peer,
        start(sender, slab, peer.stdout.readline().strip()) as ours,
    ):
        assert peer.stdout.readline() == "open\n"
        assert ours.stdout.readline() == "moved\n"
        peer.send_signal(how)
        ours.stdin.write("\n")
        ours.stdin.flush()
        said = ours.stdout.readline()
        assert said == "in flight True\n" or said.startswith("lost")
        assert ours.stdout.readline() == "closed\n"
        assert ours.wait(10) == 0


@contextmanager
def start(script: str, *args: str) -> Iterator[Any]:
    """A process that does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_nixl
def test_whole_transfers(pairs_over) -> None:
    pair = pairs_over("nixl")()
    for number in range(1, 4):
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        assert isinstance(pair.sent.next(), SendDone)
        assert isinstance(pair.received.next(), ReceiveDone)
        pair.assert_equal()


@needs_nixl
def test_the_library_leaves_no_word_on_standard_output(capfd, channels) -> None:
    _, receiver = channels
    inlet = receiver.open_inlet(1, SLAB, 1.0)
    inlet.close()
    assert capfd.readouterr().out == ""


def test_the_table_says_what_to_install_and_whom_to_trust() -> None:
    transport = TRANSPORTS["nixl"]
    assert not transport.authenticates
    reason = transport.why_not()
    assert reason is None or "kvferry[rdma]" in reason


def test_without_the_library_a_link_is_refused() -> None:
    blocked = (
        "import sys\n"
        "sys.modules['nixl_cu12'] = None\n"
        "from kvferry.core.errors import LinkRefused\n"
        "from kvferry.kv_transfer.transports.nixl_agent import load_nixl\n"
        "try:\n    load_nixl()\n"
        "except LinkRefused as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, check=True
    )
    assert "NIXL cannot be loaded" in done.stdout


def test_a_turner_rests_until_stirred_and_turns_while_there_is_a_reason() -> None:
    turns = threading.Semaphore(0)
    left = [0]

    def turn() -> bool:
        left[0] -= 1
        turns.release()
        return left[0] > 0

    turner = Turner(turn, "test")
    for wanted in (3, 1):
        left[0] = wanted
        turner.stir()
        for _ in range(wanted):
            assert turns.acquire(timeout=10)
        # Nothing is left to turn for, so it rests: closing it must not cost a turn.
    turner.close()
    assert left[0] == 0
