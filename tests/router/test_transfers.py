"""What a router keeps of the transfers between its workers, and how it is scraped."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvferry.proto import kvferry_pb2
from kvferry.proto import worker_pb2 as pb
from kvferry.router.transfer_metrics import TransferMetrics
from kvferry.router.transfers import TransferTotals


def sent(transport: str = "shm", **fields: float) -> pb.WorkerMessage:
    return pb.WorkerMessage(sent=pb.Sent(account=pb.Account(transport=transport, **fields)))


def ready(transport: str = "shm", **fields: float) -> pb.WorkerMessage:
    account = pb.Account(transport=transport, **fields)
    return pb.WorkerMessage(decode_ready=pb.DecodeReady(account=account))


def test_bytes_and_seconds_of_one_operation_are_added_up_together() -> None:
    totals = TransferTotals()
    totals.note(sent(nbytes=100, busy_s=2.0, wire_s=0.5, credit_s=0.25, exposed_s=4.0, resends=1))
    totals.note(sent(nbytes=10, busy_s=1.0, resends=2))
    totals.note(ready(nbytes=90, busy_s=3.0, wall_s=9.0))
    totals.note(ready("tcp", nbytes=7, busy_s=1.5))
    totals.note(pb.WorkerMessage(decode_ready=pb.DecodeReady()))  # a local prefill
    totals.note(pb.WorkerMessage(busy=pb.Busy()))
    shm, tcp = totals.messages()
    assert shm == kvferry_pb2.TransferTotals(
        transport="shm",
        transfers=1,
        packed_bytes=110,
        pack_s=3.0,
        scattered_bytes=90,
        scatter_s=3.0,
        wire_s=0.5,
        credit_s=0.25,
        exposed_s=4.0,
        resends=3,
    )
    assert (tcp.transport, tcp.scattered_bytes, tcp.packed_bytes) == ("tcp", 7, 0)


STATUS = kvferry_pb2.StatusResponse(
    transfers=[
        kvferry_pb2.TransferTotals(
            transport="shm",
            transfers=3,
            packed_bytes=110,
            pack_s=0.5,
            scattered_bytes=90,
            scatter_s=0.75,
            wire_s=1.5,
            credit_s=2.5,
            exposed_s=3.5,
            resends=4,
        )
    ],
    workers=[
        kvferry_pb2.WorkerStatus(
            worker_id="decode-0",
            dropped={"damaged": 2},
            endings={"complete": 5, "failed: timeout": 1},
            link_events={"resend": 6},
            preemptions={"swap": 4},
        )
    ],
    links=[
        kvferry_pb2.LinkStatus(
            prefill_worker="prefill-0", decode_worker="decode-0", transport="shm", rate=2e9
        ),
        kvferry_pb2.LinkStatus(
            prefill_worker="prefill-0", decode_worker="decode-0", transport="tcp", reason="lost"
        ),
    ],
)
SHM = {"transport": "shm"}
SAMPLES = [
    ("kvferry_transfer_bytes_total", SHM | {"operation": "pack"}, 110),
    ("kvferry_transfer_busy_seconds_total", SHM | {"operation": "pack"}, 0.5),
    ("kvferry_transfer_bytes_total", SHM | {"operation": "scatter"}, 90),
    ("kvferry_transfer_busy_seconds_total", SHM | {"operation": "scatter"}, 0.75),
    ("kvferry_transfers_total", SHM, 3),
    ("kvferry_transfer_wire_seconds_total", SHM, 1.5),
    ("kvferry_transfer_credit_wait_seconds_total", SHM, 2.5),
    ("kvferry_transfer_after_compute_seconds_total", SHM, 3.5),
    ("kvferry_transfer_resends_total", SHM, 4),
    ("kvferry_transfer_dropped_total", {"worker": "decode-0", "reason": "damaged"}, 2),
    ("kvferry_transfer_endings_total", {"worker": "decode-0", "ending": "complete"}, 5),
    ("kvferry_transfer_endings_total", {"worker": "decode-0", "ending": "failed: timeout"}, 1),
    ("kvferry_link_events_total", {"worker": "decode-0", "event": "resend"}, 6),
    ("kvferry_preemptions_total", {"worker": "decode-0", "how": "swap"}, 4),
    (
        "kvferry_link_bytes_per_second",
        SHM | {"prefill_worker": "prefill-0", "decode_worker": "decode-0"},
        2e9,
    ),
]


@pytest.mark.parametrize(("name", "labels", "value"), SAMPLES, ids=str)
def test_every_number_is_scraped(name: str, labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    registry.register(TransferMetrics(lambda: STATUS))
    assert registry.get_sample_value(name, labels) == value


def test_nothing_else_is_scraped_and_nothing_is_asked_before() -> None:
    asked = []

    def status() -> kvferry_pb2.StatusResponse:
        asked.append(1)
        return STATUS

    registry = CollectorRegistry()
    registry.register(TransferMetrics(status))
    assert not asked
    samples = [s for family in registry.collect() for s in family.samples]
    assert len(samples) == len(SAMPLES)
    assert asked == [1]
