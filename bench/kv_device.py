"""The KV plane on a device: caches, shared memory between processes, NCCL, and a push beside the
computation. One step of `kvferry bench gpu`, in a process of its own.

Prints a report as one line of JSON. With ``--send ENDPOINT`` it is the other process of a part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvferry.bench import kv_device_checks, kv_device_ipc, kv_device_nccl, kv_device_overlap
from kvferry.bench.kv_device_kit import Kit, cuda_kit
from kvferry.bench.report import Better, Claim, Report, Scalar
from kvferry.core.errors import KvferryError, StartupError
from kvferry.kv_transfer.endpoints import TRANSPORTS, connect, listen
from kvferry.kv_transfer.transport import Channel

CHECKED_TOKENS = 600
PAIRS = 20
NCCL_ROUNDS = 10
CONNECT_S = 60.0
Results = tuple[list[dict[str, Scalar]], list[Claim]]
StartPeer = Callable[[str], subprocess.Popen[bytes]]


def checks_part(kit: Kit) -> Results:
    rows, claim = kv_device_checks.check_all(kit, CHECKED_TOKENS)
    return rows, [claim]


def ipc_part(kit: Kit) -> Results:
    """Two processes on this GPU."""
    sizes = kv_device_ipc.sizes_for(kit.free_nbytes)
    with peer_over("cuda_ipc", start_peer()) as channel:
        return kv_device_ipc.receive_all(channel, kit, sizes, PAIRS)


def overlap_part(kit: Kit) -> Results:
    return kv_device_overlap.measure(kit, kv_device_overlap.Size())


def nccl_part(kit: Kit) -> Results:
    """Two processes with a GPU each. Raises StartupError where there is one only."""
    if torch.cuda.device_count() < 2:
        raise StartupError("NCCL takes no two ranks on one GPU, and there is one")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with peer_over("nccl", start_peer(visible[1])) as channel:
        return kv_device_nccl.receive_slabs(channel, kit, NCCL_ROUNDS)


PARTS: tuple[tuple[str, Callable[[Kit], Results]], ...] = (
    ("memory", checks_part),
    ("cuda_ipc", ipc_part),
    ("overlap", overlap_part),
    ("nccl", nccl_part),
)


def start_peer(visible: str | None = None) -> StartPeer:
    """Starts this module as the sender of an endpoint, on the same GPU or on one by name."""

    def start(endpoint: str) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-P", "-m", "kvferry.bench.kv_device", "--send", endpoint]
        return subprocess.Popen(command, env=environment, stdout=sys.stderr)

    return start


@contextmanager
def peer_over(transport: str, start: StartPeer) -> Iterator[Channel]:
    """A channel to a sender in a process of its own, which ends with it. Raises StartupError."""
    reason = TRANSPORTS[transport].why_not()
    if reason is not None:
        raise StartupError(f"{transport}: {reason}")
    listener = listen(transport)
    peer = start(listener.endpoint)
    try:
        channel = listener.accept(CONNECT_S)
        if channel is None:
            raise StartupError(f"the sender over {transport} did not connect")
        try:
            yield channel
        finally:
            channel.close()
    finally:
        listener.close()
        peer.kill()
        peer.wait()


def send(endpoint: str, kit: Kit) -> None:
    """The other process."""
    channel = connect(endpoint, CONNECT_S)
    try:
        if channel.transport == "nccl":
            kv_device_nccl.send_slabs(channel, NCCL_ROUNDS)
        else:
            kv_device_ipc.send_all(channel, kit)
    finally:
        channel.close()


def run_parts(
    kit: Kit,
    parts: Sequence[tuple[str, Callable[[Kit], Results]]],
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """All parts; one that cannot, or breaks, costs only its own results."""
    deadline = clock() + budget_s
    rows: list[dict[str, Scalar]] = []
    claims: list[Claim] = []
    for name, part in parts:
        if clock() >= deadline:
            rows.append({"part": name, "outcome": "cannot: no time is left"})
            continue
        try:
            found = part(kit)
        except StartupError as error:
            rows.append({"part": name, "outcome": f"cannot: {error}"})
            continue
        # Whatever a device does wrong is a result.
        except (KvferryError, RuntimeError, ValueError, OSError) as error:
            found = [{"part": name, "outcome": f"failed: {error}"[:300]}], [broken(name)]
        rows += found[0]
        claims += found[1]
    return Report(bench="gpu", rows=rows, claims=claims)


def broken(name: str) -> Claim:
    """A claim that is not met."""
    return Claim(id=f"kv.{name}_failed", value=1, better=Better.LOWER, goal=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--budget", type=float, default=90.0, metavar="SECONDS")
    parser.add_argument("--send", metavar="ENDPOINT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.send is not None:
        send(options.send, cuda_kit())
    else:
        print(json.dumps(run_parts(cuda_kit(), PARTS, options.budget).to_json()))


if __name__ == "__main__":
    main()
