"""Measuring a path: real receivers, paths that pull, and peers that do not play along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer import handshake
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.frames import decode_to_receiver, encode
from kvferry.kv_transfer.jobs import ReceiveDone, SendDone
from kvferry.kv_transfer.messages import (
    PROBE_LEASE,
    Ack,
    Beat,
    Credit,
    Measure,
    Message,
    Pull,
    Resend,
    Sample,
)
from kvferry.kv_transfer.peaks import device_peak, loopback_peak, memory_peak
from kvferry.kv_transfer.probe import MAX_SAMPLES, PINGS, Limits, measure
from kvferry.kv_transfer.transports.loopback import LoopbackListener, LoopbackSlabs

BRIEF = Limits(stream_s=0.01, turn_s=0.2, answer_s=0.2)
WAIT_S = 20.0


class Peer:
    """A receiver's side of a probe that does as the test says."""

    def __init__(self, options: Any, act: Callable[[Peer, Message], None], **path: Any) -> None:
        self.options, self.act = options, act
        self.path = path
        self.listener = LoopbackListener()
        self.heard: list[Message] = []
        self.grant = 0
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def send(self, message: Message) -> None:
        self.channel.send(encode(message), 1.0)

    def credit(self) -> None:
        self.grant += 1
        self.send(Credit(lease=PROBE_LEASE, slab=self.grant % 3, grant=self.grant))

    def close(self) -> None:
        self.listener.close()
        self.thread.join(WAIT_S)

    def _run(self) -> None:
        channel = self.listener.accept(WAIT_S)
        assert channel is not None
        self.channel = channel
        try:
            proof = handshake.challenge(channel, self.options)
        except LinkRefused:
            return
        assert proof.is_probe
        admitted = handshake.welcome(channel, self.options, proof, proof.digests[0], 3)
        for name, value in self.path.items():
            setattr(admitted.inlet, name, value)
        self.slabs = admitted.inlet
        try:
            while True:
                frame = channel.receive(WAIT_S)
                if frame is not None:
                    message = decode_to_receiver(frame)
                    if not isinstance(message, Beat):
                        self.heard.append(message)
                    self.act(self, message)
        except LinkLost:
            channel.close()


@pytest.fixture
def make_peer(make_options: Callable[..., Any]) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(act: Callable[[Peer, Message], None], **path: Any) -> Peer:
        peers.append(Peer(make_options(), act, **path))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def probe(peer: Peer, limits: Limits = BRIEF) -> Any:
    return measure(peer.listener.endpoint, connect, peer.options, 0, ("xxh3",), limits)


def plays_along(peer: Peer, message: Message) -> None:
    if isinstance(message, Measure):
        for _ in range(3):
            peer.credit()
    elif isinstance(message, Sample):
        peer.send(Ack(lease=PROBE_LEASE, index=message.index, grant=message.grant))
        peer.credit()


def test_a_credit_for_a_slab_that_is_not_there_ends_the_probe(make_peer) -> None:
    def lies(peer: Peer, message: Message) -> None:
        if isinstance(message, Measure):
            peer.send(Credit(lease=PROBE_LEASE, slab=3, grant=1))

    with pytest.raises(ProtocolError, match="slab 3"):
        probe(make_peer(lies))


def test_samples_are_whole_slabs_after_a_few_pings(make_peer) -> None:
    peer = make_peer(plays_along)
    speed = probe(peer)
    assert speed.bytes_per_s > 0
    assert speed.bare_bytes_per_s > 0
    assert speed.round_trip_s > 0
    measure_, *samples = peer.heard
    assert measure_ == Measure(slabs=PINGS + 2 * MAX_SAMPLES)
    slab_bytes = peer.options.slab_bytes
    assert [sample.nbytes for sample in samples[:PINGS]] == [64] * PINGS
    assert {sample.nbytes for sample in samples[PINGS:]} == {slab_bytes}
    assert [sample.index for sample in samples] == list(range(len(samples)))
    verified = [sample for sample in samples[PINGS:] if sample.digest]
    bare = samples[PINGS + len(verified) :]
    assert 1 <= len(verified) <= MAX_SAMPLES
    assert 1 <= len(bare) <= MAX_SAMPLES
    assert not any(sample.digest for sample in bare)


def test_no_more_samples_than_were_asked_for(make_peer) -> None:
    peer = make_peer(plays_along)
    probe(peer, Limits(stream_s=60.0, turn_s=5.0, answer_s=5.0))
    assert len(peer.heard) == 1 + PINGS + 2 * MAX_SAMPLES


def pulled(push: Callable[[int, int, int], None]) -> Callable[..., Any]:
    """Connects to a path that is pulled; ``push`` is what its pushes do."""

    def connect_pulled(endpoint: str, timeout_s: float) -> Any:
        channel = connect(endpoint, timeout_s)
        inner = channel.open_outlet

        def open_outlet(*arguments: Any) -> LoopbackSlabs:
            outlet: Any = inner(*arguments)
            outlet.is_pulled = True
            outlet.push = push
            return outlet

        channel.open_outlet = open_outlet
        return channel

    return connect_pulled


def test_a_path_that_pulls_is_pushed_at_its_pulls(make_peer) -> None:
    pushed: list[tuple[int, int]] = []

    def act(peer: Peer, message: Message) -> None:
        if isinstance(message, Sample):
            before = len(pushed)
            peer.send(Pull(slab=message.slab, grant=message.grant))
            assert peer.pushed.wait(WAIT_S)
            peer.pushed.clear()
            assert len(pushed) == before + 1
        plays_along(peer, message)

    peer = make_peer(act, is_pulled=True)
    peer.pushed = threading.Event()

    def push(slab: int, grant: int, nbytes: int) -> None:
        pushed.append((slab, grant))
        peer.pushed.set()

    measure(peer.listener.endpoint, pulled(push), peer.options, 0, ("xxh3",), BRIEF)
    samples = [message for message in peer.heard if isinstance(message, Sample)]
    assert pushed == [(sample.slab, sample.grant) for sample in samples]


@pytest.mark.parametrize(
    "act",
    [
        lambda peer, message: None,
        lambda peer, message: peer.credit() if isinstance(message, Measure) else None,
    ],
    ids=["no turn", "no answer"],
)
def test_a_peer_that_does_not_answer_costs_a_bounded_time(make_peer, act) -> None:
    with pytest.raises(LinkLost, match="no answer in time"):
        probe(make_peer(act))


def test_a_path_that_damages_slabs_is_no_path(make_peer) -> None:
    def act(peer: Peer, message: Message) -> None:
        if isinstance(message, Sample):
            peer.send(Resend(lease=PROBE_LEASE, index=message.index, grant=message.grant))
        else:
            plays_along(peer, message)

    with pytest.raises(LinkLost, match="damages"):
        probe(make_peer(act))


def test_a_pull_of_what_was_not_announced_ends_the_probe(make_peer) -> None:
    peer = make_peer(lambda peer, message: peer.send(Pull(slab=0, grant=9)))
    with pytest.raises(ProtocolError, match="not announced"):
        probe(peer)


@pytest.mark.parametrize("is_pulled", [False, True], ids=["pushed", "pulled"])
def test_a_pull_on_a_pushed_path_and_a_second_pull_end_the_probe(make_peer, is_pulled) -> None:
    pushed: list[int] = []

    def act(peer: Peer, message: Message) -> None:
        if isinstance(message, Sample):
            for _ in range(1 + is_pulled):
                peer.send(Pull(slab=message.slab, grant=message.grant))
        plays_along(peer, message)

    peer = make_peer(act)
    connect_to = pulled(lambda slab, grant, nbytes: pushed.append(grant)) if is_pulled else connect
    with pytest.raises(ProtocolError, match="not announced"):
        measure(peer.listener.endpoint, connect_to, peer.options, 0, ("xxh3",), BRIEF)
    assert pushed == [1] * is_pulled
    assert [type(message) for message in peer.heard] == [Measure, Sample]


def test_a_peer_that_refuses_is_heard(make_peer, make_options) -> None:
    peer = make_peer(plays_along)
    other = make_options(secret=b"another")
    with pytest.raises(LinkRefused):
        measure(peer.listener.endpoint, connect, other, 0, ("xxh3",), BRIEF)


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_probes_and_transfers_do_not_disturb_each_other(pairs_over, transport: str) -> None:
    """Over the same transport, from the same sender, in turn and at once."""
    pair = pairs_over(transport)(slab_bytes=1 << 14)
    for number in range(1, 6):
        pair.expect(lease=number, request=number)
        pair.begin(lease=number, request=number)
        pair.sender.computed(pair.key(number), 1, 150)
        pair.sender.probe(pair.options.incarnation, 0, pair.receiver.endpoints)
        (path,) = pair.probed.get(timeout=WAIT_S).paths
        assert (path.transport, path.why_not, path.chosen) == (transport, "", True)
        assert path.rate > 0
        assert path.peak > 0
        assert path.round_trip_s > 0
        pair.sender.computed(pair.key(number), 3, 150)
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
        pair.assert_equal()
    assert pair.sender.num_links == 1
    assert pair.receiver.tallies[Tally.LINK_REPLACED] == 0
    assert pair.receiver.tallies[Tally.LINK] == 1 + 5, "the probes', and one for all transfers"


def test_peaks_of_media_are_rates() -> None:
    assert memory_peak() > 1e6
    assert loopback_peak() > 1e6
    assert (device_peak() > 0) is torch.cuda.is_available()
