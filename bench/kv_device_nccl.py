"""NCCL between two processes with a GPU each: slabs pulled in order, as a link does it."""

from __future__ import annotations

from kvferry.bench.kv_device_kit import Kit
from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import bootstrap_median
from kvferry.kv_transfer.frames import decode_to_sender, encode
from kvferry.kv_transfer.messages import Pull
from kvferry.kv_transfer.transport import Channel, Inlet

NUM_SLABS = 8
SLAB_BYTES = 32 << 20
TIMEOUT_S = 60.0


def send_slabs(channel: Channel, rounds: int, slab_bytes: int = SLAB_BYTES) -> None:
    """The sender's side: push whatever is pulled, slab after slab filled with its number."""
    outlet = channel.open_outlet(NUM_SLABS, slab_bytes, TIMEOUT_S)
    for slab in range(NUM_SLABS):
        outlet.slab(slab)[:] = slab + 1 if outlet.is_device else bytes([slab + 1]) * slab_bytes
    for _ in range(rounds * NUM_SLABS):
        frame = channel.receive(TIMEOUT_S)
        while frame is None:
            frame = channel.receive(TIMEOUT_S)
        pull = decode_to_sender(frame)
        assert isinstance(pull, Pull), pull
        outlet.push(pull.slab, pull.grant, slab_bytes)
    while any(outlet.in_flight(slab) for slab in range(NUM_SLABS)):
        channel.receive(TIMEOUT_S)


def receive_slabs(
    channel: Channel, kit: Kit, rounds: int, slab_bytes: int = SLAB_BYTES
) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """The receiver's side: one row and its claim."""
    inlet = channel.open_inlet(NUM_SLABS, slab_bytes, TIMEOUT_S)
    seconds = []
    for number in range(rounds):
        started_s = kit.clock()
        pull_all(channel, inlet, number * NUM_SLABS, slab_bytes)
        seconds.append(kit.clock() - started_s)
    wrong = sum(
        int(inlet.slab(slab)[at]) != slab + 1
        for slab in range(NUM_SLABS)
        for at in (0, slab_bytes // 2, slab_bytes - 1)
    )
    # The first round makes connections.
    rate = bootstrap_median(
        [NUM_SLABS * slab_bytes / took_s / 1e9 for took_s in seconds[1:] or seconds]
    )
    row: dict[str, Scalar] = {
        "part": "nccl",
        "case": f"{NUM_SLABS} slabs of {slab_bytes / 2**20:g} MiB",
        "outcome": f"{wrong} wrong bytes" if wrong else "right",
        "gbs": rate.median,
    }
    return [row], [
        claim_from(rate, id="kv.nccl_gbs", better=Better.HIGHER, unit="GB/s"),
        Claim(id="kv.nccl_wrong", value=wrong, better=Better.LOWER, goal=0),
    ]


def pull_all(channel: Channel, inlet: Inlet, first_grant: int, slab_bytes: int) -> None:
    """Every slab once, all asked for before the first is there."""
    for slab in range(NUM_SLABS):
        inlet.grant(slab, first_grant + slab)
        inlet.pull(slab, first_grant + slab, slab_bytes)
        channel.send(encode(Pull(slab=slab, grant=first_grant + slab)), TIMEOUT_S)
    for slab in range(NUM_SLABS):
        while not inlet.arrived(slab, first_grant + slab, slab_bytes):
            channel.receive(TIMEOUT_S)
