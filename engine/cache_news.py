"""What the routers hear of the blocks that can be found on a worker: one snapshot, then changes."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cache.block_pool import BlockPool
from kvferry.engine.ports import RouterPort
from kvferry.proto import worker_pb2 as pb

SNAPSHOT_HASHES = 8192
"""Hashes per piece of a cache snapshot: 16 bytes each and a little framing, under 256 KiB."""


class CacheNews:
    """Numbers the changes of one pool, for all routers alike."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence = 0

    def send_snapshot(self, port: RouterPort) -> None:
        """All that can be found, to a new router. Changes must have been sent before."""
        hashes = self._pool.snapshot()
        for start in range(0, max(len(hashes), 1), SNAPSHOT_HASHES):
            piece = hashes[start : start + SNAPSHOT_HASHES]
            delta = pb.CacheDelta(
                sequence=self._sequence,
                added=piece,
                snapshot=True,
                last=start + SNAPSHOT_HASHES >= len(hashes),
            )
            port.send(pb.WorkerMessage(cache_delta=delta))

    def send_changes(self, ports: Iterable[RouterPort]) -> None:
        """What has changed since the last time, if anything."""
        events = self._pool.drain_events()
        if not (events.added or events.removed):
            return
        self._sequence += 1
        delta = pb.CacheDelta(sequence=self._sequence, added=events.added, removed=events.removed)
        for port in ports:
            port.send(pb.WorkerMessage(cache_delta=delta))
