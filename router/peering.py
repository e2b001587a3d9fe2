"""Which decode workers each prefill worker may send KV to, and what it measured of the ways there.

Every prefill worker hears of all decode workers when its session opens, and again whenever one of
them comes, goes or is another process than before. Requests do not wait for what it answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.proto import kvferry_pb2
from kvferry.proto import worker_pb2 as pb
from kvferry.router.session import WorkerSession
from kvferry.router.workers import Role, WorkerView


class Peering:
    """``sessions``: those of the router; the list is read, never changed."""

    def __init__(self, sessions: Sequence[WorkerSession]) -> None:
        self._sessions = sessions
        self._told: dict[int, list[int]] = {}
        """Number of a prefill worker -> incarnations of the decode workers that it knows."""
        self._links: dict[tuple[str, str], tuple[int, pb.Links]] = {}
        """(prefill, decode) -> incarnation of the prefill worker, and what it said."""

    def update(self) -> None:
        """Tell whoever does not know."""
        decode = self._views(Role.DECODE)
        incarnations = [view.hello.incarnation for view in decode]
        for session in self._sessions:
            view = session.view
            if view.role is not Role.PREFILL:
                continue
            if not view.routable:
                self._told.pop(view.number, None)
            elif self._told.get(view.number) != incarnations:
                self._told[view.number] = incarnations
                peers = pb.Peers(peers=[_peer(other) for other in decode])
                session.send(pb.RouterMessage(peers=peers))

    def measured(self, view: WorkerView, links: pb.Links) -> None:
        """A prefill worker's answer, which replaces its earlier one on the same decode worker."""
        self._links[view.worker_id, links.peer] = view.hello.incarnation, links

    def unmeasured(self) -> list[tuple[str, str]]:
        """Pairs of workers (prefill, decode) that are there and of which nothing is known yet."""
        return [
            (p.worker_id, d.worker_id)
            for p in self._views(Role.PREFILL)
            for d in self._views(Role.DECODE)
            if self._known(p, d) is None
        ]

    def rows(self) -> list[kvferry_pb2.LinkStatus]:
        """All that is known, pair by pair."""
        return [
            kvferry_pb2.LinkStatus(
                prefill_worker=p.worker_id,
                decode_worker=d.worker_id,
                transport=link.transport,
                rate=link.rate,
                peak=link.peak,
                chosen=link.chosen,
                reason=link.reason,
            )
            for p in self._views(Role.PREFILL)
            for d in self._views(Role.DECODE)
            if (known := self._known(p, d)) is not None
            for link in known.links
        ]

    def _known(self, p: WorkerView, d: WorkerView) -> pb.Links | None:
        """What p measured of its ways to d, in their present lives."""
        incarnation, links = self._links.get((p.worker_id, d.worker_id), (0, None))
        lives = p.hello.incarnation == incarnation
        return links if links and lives and links.incarnation == d.hello.incarnation else None

    def _views(self, role: Role) -> list[WorkerView]:
        return [s.view for s in self._sessions if s.view.role is role and s.view.routable]


def _peer(view: WorkerView) -> pb.Peer:
    hello = view.hello
    return pb.Peer(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        endpoints=hello.kv_endpoints,
        layout=hello.layout,
        wire=hello.kv_wire,
    )
