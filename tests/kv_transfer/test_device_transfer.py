"""Whole transfers to and from caches on a device: between host and device, and over cuda_ipc.

Kernels run in the interpreter, streams are fakes that run late, and the CUDA driver is host memory.
"""

from __future__ import annotations

import queue
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import build_fake_cuda, fake_ipc_channel
from fake_device import FakeDevice

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.device_memory import DeviceKvMemory
from kvferry.kv_transfer.endpoints import TRANSPORTS, connect, listen
from kvferry.kv_transfer.jobs import ReceiveDone, ReceiveJob, SendDone, SendJob
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender
from kvferry.kv_transfer.transport import Connect, Listener
from kvferry.kv_transfer.transports.control import dial_unix, listen_unix
from kvferry.kv_transfer.transports.cuda_ipc import IpcChannel

TOKENS = Span(5, 90)
KEY = AttemptKey(Incarnation(9), RequestId(1), 1)
LEASE = LeaseId(1)
TIMEOUT_S = 60.0


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(random.Random(random.random()))


class Transfer:
    """One transfer of one sequence, from end to end."""

    def __init__(self, make_cache: Any, make_layout: Any, make_options: Any, wire: str) -> None:
        self.wire = wire
        self.options = make_options(slab_bytes=16384)
        self.source = make_cache(make_layout(4, head_dim=16), TOKENS.end, 1, fill=True)
        # Not any bits: what is not a number is not kept as it is by a conversion.
        self.source.slots.normal_()
        self.target = make_cache(make_layout(16, head_dim=16), TOKENS.end, 2, fill=False)

    def run(
        self,
        source: Any,
        target: Any,
        listener: Listener,
        connect: Connect = connect,
        choices: Choices | None = None,
    ) -> tuple[ReceiveDone, SendDone]:
        sent: queue.Queue[Any] = queue.Queue()
        received: queue.Queue[Any] = queue.Queue()
        receiver = KvReceiver(target, self.options, received.put, [listener])
        sender = KvSender(source, self.options, sent.put, connect, choices=choices)
        try:
            receiver.expect(
                ReceiveJob(
                    key=KEY,
                    lease=LEASE,
                    wire=self.wire,
                    tokens=TOKENS,
                    blocks=self.target.blocks,
                    deadline_s=time.monotonic() + TIMEOUT_S,
                )
            )
            sender.send(
                SendJob(
                    key=KEY,
                    peer=self.options.incarnation,
                    endpoints=receiver.endpoints,
                    lease=LEASE,
                    target=self.target.layout,
                    wire=self.wire,
                    tokens=TOKENS,
                    blocks=self.source.blocks,
                )
            )
            there, here = received.get(timeout=TIMEOUT_S), sent.get(timeout=TIMEOUT_S)
        finally:
            sender.close()
            receiver.close()
        assert isinstance(there, ReceiveDone)
        assert isinstance(here, SendDone)
        return there, here

    def assert_arrived(self) -> None:
        ours, theirs = (
            cache.read(*TOKENS).view(torch.float32) for cache in (self.source, self.target)
        )
        torch.testing.assert_close(theirs, ours.to(getattr(torch, self.wire)).float())


@pytest.fixture(params=["float32", "bfloat16"])
def transfer(
    request: pytest.FixtureRequest, make_cache: Any, make_layout: Any, make_options: Any
) -> Transfer:
    return Transfer(make_cache, make_layout, make_options, request.param)


def on_device(cache: Any, device: FakeDevice) -> DeviceKvMemory:
    return DeviceKvMemory(cache.slots, cache.layout, cache.generations, runtime=device)


@pytest.mark.parametrize("where", ["host to device", "device to host", "device to device"])
def test_host_and_device_agree_over_shared_memory(
    transfer: Transfer, device: FakeDevice, where: str
) -> None:
    source, _, target = where.partition(" to ")
    transfer.run(
        on_device(transfer.source, device) if source == "device" else transfer.source.memory,
        on_device(transfer.target, device) if target == "device" else transfer.target.memory,
        listen("shm"),
    )
    transfer.assert_arrived()


@pytest.fixture
def ipc(tmp_path: Path) -> tuple[Callable[[], Listener], Connect, Choices]:
    """cuda_ipc over the driver of host memory."""
    library = str(build_fake_cuda(tmp_path))

    def channel(sock: socket.socket) -> IpcChannel:
        return fake_ipc_channel(library, sock)

    usable = replace(TRANSPORTS["cuda_ipc"], why_not=lambda: None)
    return (
        lambda: listen_unix("cuda_ipc", channel),
        lambda endpoint, timeout_s: channel(dial_unix(endpoint, timeout_s)),
        Choices(transports={"cuda_ipc": usable}),
    )


def test_devices_share_memory(
    transfer: Transfer,
    device: FakeDevice,
    ipc: tuple[Callable[[], Listener], Connect, Choices],
) -> None:
    listen_ipc, connect_ipc, choices = ipc
    received, sent = transfer.run(
        on_device(transfer.source, device),
        on_device(transfer.target, device),
        listen_ipc(),
        connect_ipc,
        choices,
    )
    transfer.assert_arrived()
    assert received.account.transport == sent.account.transport == "cuda_ipc"
