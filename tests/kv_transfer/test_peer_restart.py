"""A peer goes, comes back elsewhere, or someone else takes its port: B006, for all of its kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forwarder import Forwarder

from kvferry.core.ids import Incarnation
from kvferry.core.units import parse_address
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone, SendFailed
from kvferry.kv_transfer.transports.tcp_listener import CONTROL


def assert_transfers(sender: Any, receiver: Any, attempt: int, **changes: Any) -> None:
    """From one pair's sender to another pair's receiver."""
    receiver.expect(attempt=attempt, lease=attempt)
    sender.send(attempt=attempt, lease=attempt, **changes)
    assert isinstance(receiver.received.next(), ReceiveDone)
    assert isinstance(sender.sent.next(), SendDone)
    receiver.assert_equal()


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_a_receiver_that_restarts_is_found_at_its_new_endpoint(pairs_over, transport: str) -> None:
    make = pairs_over(transport)
    first, second = make(), make(incarnation=Incarnation(8))
    assert_transfers(first, first, 1)
    first.receiver.close()
    first.send(attempt=2, lease=2)
    event = first.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    assert_transfers(first, second, 3, peer=Incarnation(8), endpoints=second.receiver.endpoints)
    assert first.sender.num_links == 1  # that to the dead one is forgotten


def test_the_departure_need_not_have_been_noticed(pairs_over) -> None:
    """The next job names the new life while the link to the old one still stands."""
    make = pairs_over("tcp")
    first, second = make(), make(incarnation=Incarnation(8))
    assert_transfers(first, first, 1)
    assert_transfers(first, second, 2, peer=Incarnation(8), endpoints=second.receiver.endpoints)


class Stranger:
    """Listens where a receiver listened before, and writes down what it is told."""

    def __init__(self, endpoint: str, answer: bytes) -> None:
        self.heard = b""
        self._answer = answer
        self._server = socket.create_server(parse_address(endpoint.removeprefix("tcp:")))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(5.0)
                try:
                    sock.sendall(self._answer)
                    while data := sock.recv(1 << 16):
                        self.heard += data
                except OSError:
                    pass


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x04\xc1xxx"])
def test_a_stranger_at_the_old_port_gets_nothing(pairs_over, answer: bytes) -> None:
    pair = pairs_over("tcp")(silence_s=0.3, beat_s=0.1, progress_timeout_s=0.3)
    endpoint = pair.receiver.endpoints[0]
    pair.receiver.close()
    stranger = Stranger(endpoint, answer)
    try:
        pair.send(endpoints=(endpoint,))
        assert isinstance(pair.sent.next(), SendFailed)
    finally:
        pair.sender.close()
        stranger.close()
    assert stranger.heard == CONTROL * (len(stranger.heard) // len(CONTROL))


def test_a_receiver_of_another_cluster_at_the_old_port_is_refused(pairs_over) -> None:
    make = pairs_over("tcp")
    pair, other = make(), make(secret=b"another secret")
    other.expect()
    pair.send(endpoints=other.receiver.endpoints)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    other.received.assert_none()
    assert not other.target.slots.any()


@pytest.fixture
def forwarded() -> Iterator[Callable[[Any], Forwarder]]:
    made: list[Forwarder] = []

    def make(pair: Any) -> Forwarder:
        made.append(Forwarder(parse_address(pair.receiver.endpoints[0].removeprefix("tcp:"))))
        return made[-1]

    yield make
    for forwarder in made:
        forwarder.close()


def test_all_of_a_link_goes_through_one_forwarded_port(pairs_over, forwarded) -> None:
    pair = pairs_over("tcp")()
    forwarder = forwarded(pair)
    assert_transfers(pair, pair, 1, endpoints=(f"tcp:{forwarder.address}",))
    assert forwarder.connections == 3  # control and two streams


def test_half_open_connections_end_by_silence_and_the_transfer_goes_on(
    pairs_over, forwarded
) -> None:
    """Neither side is told that the way between them is gone."""
    pair = pairs_over("tcp")(silence_s=0.5, beat_s=0.1)
    forwarder = forwarded(pair)
    endpoints = (f"tcp:{forwarder.address}",)
    assert_transfers(pair, pair, 1, endpoints=endpoints)
    forwarder.freeze()
    started = time.monotonic()
    assert_transfers(pair, pair, 2, endpoints=endpoints)
    assert forwarder.connections == 6
    assert time.monotonic() - started < 15.0
