"""What this router heard of KV moved between its workers: totals by transport."""

from __future__ import annotations

from kvferry.proto import kvferry_pb2
from kvferry.proto import worker_pb2 as pb


class TransferTotals:
    """Sums of what both sides of all transfers say, whether or not their requests still listen."""

    def __init__(self) -> None:
        self._by_transport: dict[str, kvferry_pb2.TransferTotals] = {}

    def note(self, message: pb.WorkerMessage) -> None:
        """Add a Sent or a DecodeReady; other messages count nothing."""
        if message.HasField("sent"):
            account = message.sent.account
            totals = self._totals(account.transport)
            totals.packed_bytes += account.nbytes
            totals.pack_s += account.busy_s
            totals.wire_s += account.wire_s
            totals.credit_s += account.credit_s
            totals.exposed_s += account.exposed_s
            totals.resends += account.resends
        elif message.HasField("decode_ready") and message.decode_ready.HasField("account"):
            account = message.decode_ready.account
            totals = self._totals(account.transport)
            totals.transfers += 1
            totals.scattered_bytes += account.nbytes
            totals.scatter_s += account.busy_s

    def messages(self) -> list[kvferry_pb2.TransferTotals]:
        return list(self._by_transport.values())

    def _totals(self, transport: str) -> kvferry_pb2.TransferTotals:
        if transport not in self._by_transport:
            self._by_transport[transport] = kvferry_pb2.TransferTotals(transport=transport)
        return self._by_transport[transport]
