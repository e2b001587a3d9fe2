"""The rates that this machine's media reach with nothing of ours in the way: what the rate of a
transport is compared to.
"""

from __future__ import annotations

import socket
import threading
import time
from functools import cache

import numpy as np
import torch

from kvferry.kv_transfer.endpoints import Medium

MEASURE_S = 0.03
BLOCK = 4 << 20
"""Above every cache that one core has to itself."""
DEVICE_BLOCK = 256 << 20


@cache
def peak_of(medium: Medium) -> float:
    """Bytes per second, measured once; 0 where it cannot be."""
    match medium:
        case Medium.MEMORY:
            return memory_peak()
        case Medium.NETWORK:
            return loopback_peak()
        case Medium.DEVICE:
            return device_peak()


def memory_peak() -> float:
    """One thread that copies."""
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(4)]
    started_s, copied = time.monotonic(), 0
    while time.monotonic() < started_s + MEASURE_S:
        np.copyto(blocks[copied % 2], blocks[2 + copied % 2])
        copied += 1
    return copied * BLOCK / (time.monotonic() - started_s)


def loopback_peak() -> float:
    """One TCP stream between two threads of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=1.0)
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.settimeout(1.0)
        thread = threading.Thread(target=_stream, args=(sender,), name="kv-peak")
        thread.start()
        buffer = bytearray(BLOCK)
        started_s, received = time.monotonic(), 0
        while got := receiver.recv_into(buffer):
            received += got
        elapsed_s = time.monotonic() - started_s
        thread.join()
    return received / elapsed_s


def _stream(sock: socket.socket) -> None:
    block = bytes(BLOCK)
    stop_s = time.monotonic() + MEASURE_S
    while time.monotonic() < stop_s:
        sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)


def device_peak() -> float:
    """Copies within the memory of the current CUDA device: bytes copied, read or written once."""
    if not torch.cuda.is_available():
        return 0.0
    source = torch.zeros(DEVICE_BLOCK, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(4):
        target.copy_(source)
    end.record()
    end.synchronize()
    elapsed_s: float = begin.elapsed_time(end) / 1e3
    return 4 * DEVICE_BLOCK / elapsed_s
