"""Hosts have names: looking one up takes no longer than the link may."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from kvferry.kv_transfer.transports.control import addresses_of


class NameServer:
    """``socket.getaddrinfo`` where nothing is known but what the test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.go = threading.Event()

    def __call__(self, host: str, port: int, *, type: int, flags: int = 0) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return socket.getaddrinfo(host, port, type=type, flags=flags)
        self.asked.append(threading.current_thread().name)
        assert self.go.wait(20.0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_digits_ask_nobody(host: str) -> None:
    server = NameServer(OSError("asked"))
    assert addresses_of(host, 80, 0.0, server)[0][4][:2] == (host, 80)
    assert server.asked == []


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "unknown"), UnicodeError()])
def test_a_name_is_looked_up_and_what_goes_wrong_is_said(error: Exception) -> None:
    server = NameServer(["an address"])
    server.go.set()
    assert addresses_of("decode-0.local", 80, 20.0, server) == ["an address"]
    server.answer = error
    with pytest.raises(type(error)):
        addresses_of("decode-0.local", 80, 20.0, server)


def test_a_name_server_that_does_not_answer_is_not_waited_for() -> None:
    server = NameServer([])
    with pytest.raises(TimeoutError, match=r"decode-0\.local"):
        addresses_of("decode-0.local", 80, 0.05, server)
    server.go.set()
