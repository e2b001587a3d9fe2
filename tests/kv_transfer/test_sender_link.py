"""Links of a sender: which endpoint, another when it breaks, a new one when its peer is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from unfollowed import Unfollowed

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.endpoints import connect, listen
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone, SendFailed
from kvferry.kv_transfer.push import Push
from kvferry.kv_transfer.receiver import KvReceiver

WAIT_S = 20.0


def transport_of(endpoint: str) -> str:
    return endpoint.partition(":")[0]


def assert_works(pair: Any, number: int = 1, **changes: Any) -> str:
    """A transfer goes through; over which transport."""
    pair.expect(lease=number, attempt=number)
    pair.send(lease=number, attempt=number, **changes)
    assert isinstance(pair.received.next(), ReceiveDone)
    sent = pair.sent.next()
    assert isinstance(sent, SendDone)
    pair.assert_equal()
    return sent.account.transport


class Dialler:
    """Connects, or does what the test says, by transport."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.dialled: list[str] = []
        self.wrap: Any = lambda channel: channel

    def __call__(self, endpoint: str, timeout_s: float) -> Any:
        name = transport_of(endpoint)
        self.dialled.append(name)
        if name in self.errors:
            raise self.errors[name]
        return self.wrap(connect(endpoint, timeout_s))


class BrokenPath:
    """A channel whose data path breaks at the first push."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.transport = channel.transport
        self.send, self.receive = channel.send, channel.receive
        self.wake, self.close = channel.wake, channel.close

    def open_outlet(self, *arguments: Any) -> Any:
        self._outlet = self._channel.open_outlet(*arguments)
        return self

    is_pulled = is_device = False

    def slab(self, index: int) -> Any:
        return self._outlet.slab(index)

    def push(self, *_: int) -> None:
        raise LinkLost("the path broke")

    def in_flight(self, slab: int) -> bool:
        return False

    is_followed = False

    def progress(self, slab: int, grant: int, nbytes: int) -> None: ...


@pytest.mark.parametrize("error", [LinkRefused("not today"), LinkLost("no answer")], ids=str)
def test_another_endpoint_is_taken_when_one_cannot_be_opened(make_loopback_pair, error) -> None:
    dialler = Dialler()
    pair = make_loopback_pair(connect=dialler, also=["shm"])
    dialler.errors["loopback"] = error
    assert assert_works(pair) == "shm"
    assert dialler.dialled == ["loopback", "shm"]
    paths = {path.transport: path for path in pair.sender.choices.rows()}
    assert paths["loopback"].why_not == str(error)
    assert paths["shm"].proven
    assert assert_works(pair, 2) == "shm"
    assert pair.sender.num_links == 1


def test_another_endpoint_is_taken_when_a_link_moves_nothing(make_loopback_pair) -> None:
    dialler = Dialler()
    pair = make_loopback_pair(connect=dialler, also=["shm"])
    dialler.wrap = lambda channel: (
        BrokenPath(channel) if channel.transport == "loopback" else channel
    )
    assert assert_works(pair) == "shm"


def test_a_link_that_worked_is_opened_again_before_another_is_tried(make_loopback_pair) -> None:
    """A peer that closes a link, for its memory or because it was idle, has no broken path."""
    channels: list[Any] = []
    dialler = Dialler()
    pair = make_loopback_pair(connect=dialler, also=["shm"])
    dialler.wrap = lambda channel: channels.append(channel) or channel
    assert_works(pair)
    channels[0].close()
    assert assert_works(pair, 2) == "loopback"
    assert [path.why_not for path in pair.sender.choices.rows()] == ["", ""]


def test_a_peer_that_is_gone_is_refused_once_all_its_endpoints_are(make_loopback_pair) -> None:
    """B006."""
    pair = make_loopback_pair(also=["shm"])
    endpoints = pair.receiver.endpoints
    pair.receiver.close()
    for attempt in (1, 2):
        pair.send(attempt=attempt, endpoints=endpoints)
        event = pair.sent.next()
        assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)


def test_a_successor_at_the_same_endpoint_is_another_peer(make_loopback_pair) -> None:
    """B006: leases of the one say nothing about the other."""
    pair = make_loopback_pair()
    pair.expect()
    pair.send(peer=Incarnation(8))
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    assert "restarted" in event.detail
    pair.received.assert_none()
    pair.send(attempt=1)
    assert isinstance(pair.sent.next(), SendDone)


def test_each_life_of_a_peer_has_a_link_of_its_own(make_loopback_pair, make_options) -> None:
    """B006: an old link that ends late takes nothing of its successor's with it."""
    gate, reached = threading.Event(), threading.Event()
    dialler = Dialler()
    pair = make_loopback_pair(connect=dialler, silence_s=0.5)
    old = pair.receiver.endpoints

    def held(channel: Any) -> Any:
        reached.set()
        assert gate.wait(WAIT_S)
        raise LinkRefused("nobody there")

    dialler.wrap = held
    pair.send(attempt=1, endpoints=old)
    assert reached.wait(WAIT_S)
    dialler.wrap = lambda channel: channel
    new_life = KvReceiver(
        pair.target.memory,
        make_options(incarnation=Incarnation(8), silence_s=0.5),
        pair.received,
        [listen("loopback")],
    )
    pair.receiver.close()
    pair.receiver = new_life
    try:
        assert assert_works(pair, 2, peer=Incarnation(8)) == "loopback"
        assert pair.sender.num_links == 2
        gate.set()
        event = pair.sent.next()
        assert (event.key, event.reason) == (pair.key(attempt=1), Reason.REFUSED)
        assert assert_works(pair, 3, peer=Incarnation(8)) == "loopback"
        assert dialler.dialled == ["loopback", "loopback"]
    finally:
        gate.set()


class Noted(Unfollowed):
    """A memory that says when something is packed."""

    def __init__(self, memory: Any, packed: threading.Event) -> None:
        self._memory, self._packed = memory, packed
        self.layout, self.rank, self.digests = memory.layout, memory.rank, memory.digests
        self.is_fresh = memory.is_fresh

    def pack(self, *arguments: Any) -> list[int]:
        self._packed.set()
        return self._memory.pack(*arguments)


def test_another_endpoint_is_preferred_once_it_is_measured(make_loopback_pair) -> None:
    """The open link is left when what is under way has ended, however much follows."""
    dialler, packed = Dialler(), threading.Event()
    dialler.errors["loopback"] = LinkLost("later")
    pair = make_loopback_pair(
        connect=dialler,
        also=["shm"],
        push=Push.LAYERS,
        wrap_source=lambda memory: Noted(memory, packed),
    )
    assert assert_works(pair) == "shm"
    packed.clear()
    pair.expect(lease=2, attempt=2)
    pair.begin(lease=2, attempt=2)
    pair.sender.computed(pair.key(attempt=2), 1, 150)
    assert packed.wait(WAIT_S)
    dialler.errors = {"shm": LinkLost("no more")}
    pair.sender.choices.failed(pair.options.incarnation, 0, pair.receiver.endpoints[1], "slow")
    pair.sender.probe(pair.options.incarnation, 0, pair.receiver.endpoints)
    chosen = [path.transport for path in pair.probed.get(timeout=WAIT_S).paths if path.chosen]
    assert chosen == ["loopback"]
    for attempt, transport in ((3, "shm"), (4, "loopback")):
        # Something is under way at every moment.
        pair.expect(lease=attempt, attempt=attempt)
        pair.begin(lease=attempt, attempt=attempt)
        pair.sender.computed(pair.key(attempt=attempt - 1), 3, 150)
        assert isinstance(pair.received.next(), ReceiveDone)
        sent = pair.sent.next()
        assert (sent.key, sent.account.transport) == (pair.key(attempt=attempt - 1), transport)
    pair.sender.abort(pair.key(attempt=4))
    pair.sent.next()


def test_a_forced_transport_that_the_peer_lacks_fails_and_is_named(make_loopback_pair) -> None:
    pair = make_loopback_pair(choices=Choices(forced="shm"))
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    assert event.detail == "transfer.transport is shm: the peer does not offer it"
