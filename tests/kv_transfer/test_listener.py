"""A listener meets strangers and peers that break the rules: they are bounded, and cost nobody else
anything. ``test_security`` says bad input to every transport.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from scripted_link import DIGESTS, ScriptedLink
from strangers import is_closed_by_peer, open_socket

from kvferry.core.errors import LinkRefused
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.frames import decode_to_sender, encode
from kvferry.kv_transfer.handshake import introduce
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendFailed
from kvferry.kv_transfer.receiver_links import MAX_STRANGERS


def test_a_stranger_does_not_hold_up_the_end(make_shm_pair) -> None:
    pair = make_shm_pair(silence_s=60.0)
    with open_socket(pair.receiver.endpoints[0]) as sock:
        assert sock.recv(1)  # the challenge: its link has a thread by now
        pair.receiver.close()
        assert is_closed_by_peer(sock)


def test_of_too_many_strangers_the_oldest_give_way(make_shm_pair) -> None:
    pair = make_shm_pair(silence_s=60.0)
    with ExitStack() as crowd:
        strangers = []
        for _ in range(MAX_STRANGERS + 3):
            strangers.append(crowd.enter_context(open_socket(pair.receiver.endpoints[0])))
            assert strangers[-1].recv(1)  # its challenge
        for oldest in strangers[:3]:
            assert is_closed_by_peer(oldest)
        # A peer finds room, whatever they do.
        pair.assert_works()
        strangers[-1].setblocking(False)
        strangers[-1].recv(4096)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)  # its link is open still


def test_bad_input_on_a_live_link_fails_no_other_link(make_shm_pair) -> None:
    pair = make_shm_pair()
    pair.expect()
    with ScriptedLink(pair) as link:
        link.channel.send(b"\xc1", 1.0)
        link.assert_closed()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    pair.assert_equal()


def test_a_wrong_secret_is_refused(make_pair) -> None:
    pair = make_pair()
    stranger = make_pair(secret=b"another secret")
    stranger.send(endpoints=pair.receiver.endpoints)
    event = stranger.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    assert "secret" in event.detail
    pair.assert_works()


def test_a_receiver_must_know_the_secret_too(make_pair) -> None:
    """A receiver that takes any proof still cannot make the sender trust it."""
    pair = make_pair()
    channel = connect(pair.receiver.endpoints[0], 1.0)
    relayed = RelabelledChannel(channel)
    with pytest.raises(LinkRefused, match="secret"):
        introduce(relayed, pair.options, 0, DIGESTS)
    channel.close()


class RelabelledChannel:
    """A man in the middle that changes the receiver's proof."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.send = channel.send

    def receive(self, *arguments: Any) -> bytes | None:
        frame = self._channel.receive(*arguments)
        if frame is not None:
            message = decode_to_sender(frame)
            if type(message).__name__ == "Welcome":
                fields = {name: getattr(message, name) for name in message.__struct_fields__}
                return encode(type(message)(**(fields | {"mac": b"x" * 32})))
        return frame
