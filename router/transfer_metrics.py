"""Prometheus metrics of KV on its way from prefill to decode, read from a status at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.proto import kvferry_pb2

Family = CounterMetricFamily | GaugeMetricFamily


class TransferMetrics(Collector):
    """A collector: sums by transport are this router's, drops and endings the workers' own."""

    def __init__(self, status: Callable[[], kvferry_pb2.StatusResponse]) -> None:
        self._status = status

    def collect(self) -> Iterator[Family]:
        return _families(self._status())

    def describe(self) -> Iterator[Family]:
        """Names without values: nothing is asked of the engine when this is registered."""
        return _families(kvferry_pb2.StatusResponse())


def _families(status: kvferry_pb2.StatusResponse) -> Iterator[Family]:
    yield from _by_operation(status)
    yield from _by_transport(status)
    yield from _by_worker(status)
    yield from _links(status)


def _by_operation(status: kvferry_pb2.StatusResponse) -> Iterator[Family]:
    nbytes = CounterMetricFamily(
        "kvferry_transfer_bytes",
        "KV bytes packed on prefill workers and scattered on decode workers.",
        labels=("operation", "transport"),
    )
    busy = CounterMetricFamily(
        "kvferry_transfer_busy_seconds",
        "What packing and scattering these bytes took.",
        labels=("operation", "transport"),
    )
    for totals in status.transfers:
        nbytes.add_metric(("pack", totals.transport), totals.packed_bytes)
        nbytes.add_metric(("scatter", totals.transport), totals.scattered_bytes)
        busy.add_metric(("pack", totals.transport), totals.pack_s)
        busy.add_metric(("scatter", totals.transport), totals.scatter_s)
    yield nbytes
    yield busy


def _by_transport(status: kvferry_pb2.StatusResponse) -> Iterator[Family]:
    for field, name, help_text in (
        ("transfers", "transfers", "Transfers that decode workers verified as a whole."),
        ("wire_s", "transfer_wire_seconds", "Bytes in flight, summed over slabs."),
        ("credit_s", "transfer_credit_wait_seconds", "Bytes ready, no memory granted for them."),
        (
            "exposed_s",
            "transfer_after_compute_seconds",
            "From all of a prompt computed to all of it acknowledged.",
        ),
        ("resends", "transfer_resends", "Slabs sent once more."),
    ):
        family = CounterMetricFamily(f"kvferry_{name}", help_text, labels=("transport",))
        for totals in status.transfers:
            family.add_metric((totals.transport,), getattr(totals, field))
        yield family


def _by_worker(status: kvferry_pb2.StatusResponse) -> Iterator[Family]:
    for field, name, help_text, label in (
        ("dropped", "transfer_dropped", "KV offers and slabs not taken, by reason.", "reason"),
        ("endings", "transfer_endings", "KV leases and transfers ended, by how.", "ending"),
        ("link_events", "link_events", "What else happened on KV links, by kind.", "event"),
        ("preemptions", "preemptions", "Sequences that had to give up blocks, by how.", "how"),
    ):
        family = CounterMetricFamily(f"kvferry_{name}", help_text, labels=("worker", label))
        for worker in status.workers:
            for what, count in getattr(worker, field).items():
                family.add_metric((worker.worker_id, what), count)
        yield family


def _links(status: kvferry_pb2.StatusResponse) -> Iterator[Family]:
    family = GaugeMetricFamily(
        "kvferry_link_bytes_per_second",
        "KV per second over each way between two workers, as measured.",
        labels=("prefill_worker", "decode_worker", "transport"),
    )
    for link in status.links:
        if link.rate:
            family.add_metric((link.prefill_worker, link.decode_worker, link.transport), link.rate)
    yield family
