"""Endpoints: the transport that each scheme names. One table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.errors import LinkRefused
from kvferry.kv_transfer.transport import Channel, Connect, Listener
from kvferry.kv_transfer.transports import cuda_ipc, loopback, nixl, process_group, shm, tcp
from kvferry.kv_transfer.transports.nixl_agent import why_not as why_not_nixl
from kvferry.kv_transfer.transports.torch_groups import why_not_gloo, why_not_nccl


class Medium(StrEnum):
    """What carries the bytes, and so what bounds their rate."""

    MEMORY = "memory"
    NETWORK = "network"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """What a listener needs to know."""

    host: str = "127.0.0.1"
    """Interface of transports between hosts."""
    streams: int = 2
    """TCP connections per link for KV bytes."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to move slabs."""

    name: str
    medium: Medium
    listen: Callable[[ListenOptions], Listener]
    connect: Connect
    why_not: Callable[[], str | None] = lambda: None
    """Why this process cannot use it, None when it can: a missing library, no device, ..."""
    authenticates: bool = True
    """False: its data path takes whoever connects, so it needs ``trusted_network``."""


TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport(
            "loopback",
            Medium.MEMORY,
            lambda _: loopback.LoopbackListener(),
            loopback.connect_loopback,
        ),
        Transport("shm", Medium.MEMORY, lambda _: shm.listen_shm(), shm.connect_shm),
        Transport(
            "tcp",
            Medium.NETWORK,
            lambda options: tcp.listen_tcp_link(options.host, options.streams),
            tcp.connect_tcp,
        ),
        Transport(
            "gloo",
            Medium.NETWORK,
            lambda options: process_group.listen_gloo(options.host),
            process_group.connect_gloo,
            why_not_gloo,
            authenticates=False,
        ),
        Transport(
            "nccl",
            Medium.DEVICE,
            lambda options: process_group.listen_nccl(options.host),
            process_group.connect_nccl,
            why_not_nccl,
            authenticates=False,
        ),
        Transport(
            "cuda_ipc",
            Medium.DEVICE,
            lambda _: cuda_ipc.listen_cuda_ipc(),
            cuda_ipc.connect_cuda_ipc,
            cuda_ipc.why_not_cuda_ipc,
        ),
        Transport(
            "nixl",
            Medium.NETWORK,
            lambda options: nixl.listen_nixl(options.host),
            nixl.connect_nixl,
            why_not_nixl,
            authenticates=False,
        ),
    )
}


def listen(name: str, options: ListenOptions | None = None) -> Listener:
    """Listen on a fresh endpoint of a transport. Raises KeyError for an unknown one."""
    return TRANSPORTS[name].listen(options or ListenOptions())


def connect(endpoint: str, timeout_s: float) -> Channel:
    """Open a link to ``scheme:address``. Raises LinkRefused, LinkLost."""
    transport = TRANSPORTS.get(endpoint.partition(":")[0])
    if transport is None:
        raise LinkRefused(f"{endpoint!r} names no transport; known: {', '.join(TRANSPORTS)}")
    reason = transport.why_not()
    if reason is not None:
        raise LinkRefused(f"{transport.name}: {reason}")
    return transport.connect(endpoint, timeout_s)
