"""Who connects to a listener and is no peer."""

from __future__ import annotations

import pickle
import random
import socket
import struct
from contextlib import suppress
from typing import Any

from kvferry.core.units import parse_address
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.messages import MAX_HANDSHAKE_FRAME, Beat, Proof
from kvferry.kv_transfer.transports.tcp_listener import CONTROL


class Marker:
    """Unpickling it would leave a trace."""

    touched = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Marker, "touched", True))


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def wrong_proof(nonce: bytes = b"n" * 32, mac: bytes = b"m" * 32) -> bytes:
    return encode(Proof(nonce=nonce, mac=mac, incarnation=1, rank=0, digests=["xxh3"]))


BAD_INPUT = {
    "random": random.Random(1).randbytes(5000),
    "huge length": struct.pack("!I", 1 << 30) + b"x" * 100,
    "largest length": b"\xff" * 100,
    "zero length": struct.pack("!I", 0),
    "above the handshake's limit": framed(b"x" * (MAX_HANDSHAKE_FRAME + 1)),
    "pickle": framed(pickle.dumps(Marker())),
    "bare pickle": pickle.dumps(Marker()),
    "no proof first": framed(encode(Beat())),
    "wrong proof": framed(wrong_proof()),
    "garbage in a frame": framed(b"\xc1" * 40),
    "deep nesting": framed(b"\x91" * 1000),
    "half a message": framed(wrong_proof())[:-1],
    "half a length": b"\0\0",
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


def open_socket(endpoint: str, greeting: bytes | None = None) -> socket.socket:
    """A bare control channel. ``greeting``: what to say in place of what the transport wants."""
    scheme, _, address = endpoint.partition(":")
    if ":" in address:
        sock = socket.create_connection(parse_address(address), 20.0)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(20.0)
        sock.connect(f"\0{address}")
    if greeting is None:
        greeting = CONTROL if scheme == "tcp" else b""
    with suppress(ConnectionError):  # closed already: what is read next tells
        sock.sendall(greeting)
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
