"""Two real processes over shared memory, and one of them killed or stopped at a copy."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_caches import slots_of

from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, ReceiveFailed, SendDone, SendFailed
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("peer_process.py")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_process", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer_process = load_script()


class Peer:
    """The other process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Let it close its side and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20.0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20.0)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Here:
    """This process's side."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.events: queue.Queue[Any] = queue.Queue()
        block_size = 4 if role == "sender" else 16
        self.slots, self.memory, self.blocks = peer_process.peer_cache(
            block_size, fill=role == "sender"
        )
        options = peer_process.options()
        if role == "sender":
            self.side: Any = KvSender(self.memory, options, self.events.put)
        else:
            self.side = KvReceiver(self.memory, options, self.events.put, [listen("shm")])

    def send(self, endpoint: str, lease: int) -> None:
        self.side.send(peer_process.send_job(self.memory, self.blocks, endpoint, lease))

    def expect(self, lease: int) -> None:
        self.side.expect(peer_process.receive_job(self.blocks, lease, 60.0))

    def next(self) -> Any:
        return self.events.get(timeout=30.0)

    def assert_received(self) -> None:
        """The blocks hold what the sender's process filled in, whatever the block sizes."""
        slots, memory, blocks = peer_process.peer_cache(4, fill=True)
        tokens = peer_process.TOKENS
        theirs = slots_of(blocks.block_ids, *tokens, memory.layout.block_size)
        ours = slots_of(self.blocks.block_ids, *tokens, 16)
        assert torch.equal(self.slots[:, :, ours], slots[:, :, theirs])


@pytest.fixture
def cleanup() -> Iterator[list[Any]]:
    names = set(os.listdir("/dev/shm"))
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.close()
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize("fate", ["lives", "killed", "stopped"])
def test_receiving_from_a_process(cleanup, fate: str) -> None:
    here = Here("receiver")
    cleanup.append(here.side)
    for lease in (1, 2):
        here.expect(lease)
    peer = Peer("sender", here.side.endpoints[0], "-1" if fate == "lives" else "5")
    cleanup.append(peer)
    if fate == "lives":
        assert [type(here.next()), type(here.next())] == [ReceiveDone, ReceiveDone]
        assert [peer.line() for _ in range(3)] == ["SendDone", "SendDone", "done"]
        assert peer.finish() == 0
        here.assert_received()
        return
    assert peer.line() == "stopped"
    peer.process.send_signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    for lease in (1, 2):
        here.side.renew(lease, time.monotonic() + 0.2)
    for event in (here.next(), here.next()):
        assert (type(event), event.reason) == (ReceiveFailed, Reason.DEADLINE)
    # A new process takes over with new leases.
    here.slots.zero_()
    for lease in (1, 2):
        here.expect(lease)
    cleanup.append(Peer("sender", here.side.endpoints[0], "-1"))
    assert [type(here.next()), type(here.next())] == [ReceiveDone, ReceiveDone]
    here.assert_received()


@pytest.mark.parametrize("fate", ["lives", "killed", "stopped"])
def test_sending_to_a_process(cleanup, fate: str) -> None:
    here = Here("sender")
    cleanup.append(here.side)
    peer = Peer("receiver", "-", "-1" if fate == "lives" else "5")
    cleanup.append(peer)
    endpoint = peer.line()
    for lease in (1, 2):
        here.send(endpoint, lease)
    if fate == "lives":
        assert [type(here.next()), type(here.next())] == [SendDone, SendDone]
        assert [peer.line() for _ in range(3)] == ["ReceiveDone", "ReceiveDone", "done"]
        assert peer.finish() == 0
        return
    assert peer.line() == "stopped"
    peer.process.send_signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    expected = Reason.REFUSED if fate == "killed" else Reason.TIMEOUT
    for event in (here.next(), here.next()):
        assert (type(event), event.reason) == (SendFailed, expected)
    assert here.side.num_links == 0 or fate == "stopped"
