"""The decode workers that a prefill worker may send to, as its routers say, and what was measured
of the ways there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.choices import Path
from kvferry.kv_transfer.prober import Probed
from kvferry.kv_transfer.wire import endpoints_of
from kvferry.proto import worker_pb2 as pb


class Probe(Protocol):
    """Measures all ways to one rank of a receiver, in the background."""

    def __call__(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> None: ...


class PeerBook:
    """Each life of a decode worker is measured once, whoever asks, and again when a way breaks."""

    def __init__(self, probe: Probe | None) -> None:
        """Without ``probe`` nothing is measured."""
        self._probe = probe
        self._peers: dict[Incarnation, dict[Incarnation, pb.Peer]] = {}
        """Router -> its peers by incarnation."""
        self._links: dict[Incarnation, pb.Links] = {}

    def update(
        self, router: Incarnation, peers: pb.Peers, routers: Container[Incarnation]
    ) -> list[pb.Links]:
        """A router says which peers there are; ``routers``: those with a session. What is known of
        them already; the rest is measured.
        """
        named = {Incarnation(peer.incarnation): peer for peer in peers.peers}
        self._peers = {r: known for r, known in self._peers.items() if r in routers}
        before = {peer for known in self._peers.values() for peer in known}
        self._peers[router] = named
        now = {peer for known in self._peers.values() for peer in known}
        self._links = {peer: links for peer, links in self._links.items() if peer in now}
        for incarnation, peer in named.items():
            if self._probe is not None and incarnation not in before:
                for rank in sorted({endpoint.rank for endpoint in peer.endpoints}):
                    self._probe(incarnation, rank, endpoints_of(peer.endpoints, rank))
        return [self._links[peer] for peer in named if peer in self._links]

    def probed(self, probed: Probed) -> pb.Links | None:
        """A rank was measured. What to tell the routers: rank 0 stands for all of a worker's."""
        names = (known[probed.peer] for known in self._peers.values() if probed.peer in known)
        peer = next(names, None)
        if peer is None or probed.rank != 0:
            return None
        links = pb.Links(
            peer=peer.worker_id, incarnation=probed.peer, links=_link_messages(probed.paths)
        )
        self._links[probed.peer] = links
        return links


def _link_messages(paths: Sequence[Path]) -> list[pb.Link]:
    return [
        pb.Link(
            transport=path.transport,
            rate=path.rate,
            peak=path.peak,
            chosen=path.chosen,
            reason=path.why_not,
        )
        for path in paths
    ]
