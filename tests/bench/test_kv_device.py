"""The device checks of the KV plane, run on stand-ins: kernels in the interpreter, streams that run
late, a CUDA driver of host memory, gloo in NCCL's place.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_cuda import build_fake_cuda, fake_ipc_channel
from fake_device import FakeDevice
from kernel_bench import FakeClock

from kvferry.bench import kv_device_checks, kv_device_ipc, kv_device_nccl, kv_device_overlap
from kvferry.bench.gpu import read_report
from kvferry.bench.kv_device import PARTS, nccl_part, run_parts
from kvferry.bench.kv_device_kit import Kit
from kvferry.bench.report import Better, Claim
from kvferry.core.errors import LinkLost, StartupError
from kvferry.kv_transfer.transports.control import SocketChannel
from kvferry.kv_transfer.transports.process_group import connect_gloo, listen_gloo

TIMEOUT_S = 60.0


@pytest.fixture
def kit() -> Kit:
    device = FakeDevice(random.Random(random.random()))
    return Kit(
        device=torch.device("cpu"),
        runtime=device,
        compute=device.stream,
        settle=lambda: None,
        free_nbytes=1 << 30,
        clock=FakeClock(step=0.5),
        heads=2,
        head_dim=16,
    )


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# Every pair of types, in slabs on the device and in host memory by turns.
SOME = [case for n, case in enumerate(kv_device_checks.cases(20)) if n % 4 in (0, 3)]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_device_and_host_agree(kit: Kit, case: kv_device_checks.Case) -> None:
    assert kv_device_checks.check(kit, case) is None


def test_ipc_packs_and_scatters_every_size(kit: Kit, tmp_path: Path) -> None:
    library = str(build_fake_cuda(tmp_path))
    near, far = socket.socketpair()
    receiver, sender = fake_ipc_channel(library, near), fake_ipc_channel(library, far)
    peer = beside(lambda: kv_device_ipc.send_all(sender, kit))
    rows, claims = kv_device_ipc.receive_all(receiver, kit, [1 << 13, 1 << 14], 2)
    peer.join(TIMEOUT_S)
    sender.close()
    receiver.close()
    assert [row["case"] for row in rows] == ["0.0078125 MiB in 4 slabs", "0.015625 MiB in 4 slabs"]
    assert [row["outcome"] for row in rows] == ["verified", "verified"]
    assert [(claim.id, claim.met) for claim in claims] == [("kv.cuda_ipc_wrong", True)]


def test_ipc_takes_the_sizes_that_fit() -> None:
    assert kv_device_ipc.sizes_for(16 << 30) == list(kv_device_ipc.SIZES)
    assert kv_device_ipc.sizes_for(4 << 30) == list(kv_device_ipc.SIZES[:3])
    with pytest.raises(StartupError, match="too few"):
        kv_device_ipc.sizes_for(1 << 20)


def test_the_push_beside_the_computation(kit: Kit) -> None:
    size = kv_device_overlap.Size(layers=2, nbytes=1 << 13, width=8, products=2, rounds=2)
    (row,), (claim,) = kv_device_overlap.measure(kit, size)
    assert row["outcome"] == "done"
    assert (claim.id, claim.goal) == ("kv.device_exposed", 0.2)


def test_slabs_are_pulled_and_right(kit: Kit) -> None:
    listener = listen_gloo("127.0.0.1")
    sender = connect_gloo(listener.endpoint, TIMEOUT_S)
    receiver = listener.accept(TIMEOUT_S)
    assert isinstance(receiver, SocketChannel)
    peer = beside(lambda: kv_device_nccl.send_slabs(sender, 2, 4096))
    (row,), claims = kv_device_nccl.receive_slabs(receiver, kit, 2, 4096)
    peer.join(TIMEOUT_S)
    sender.close()
    receiver.close()
    listener.close()
    assert row["outcome"] == "right"
    assert claims[1].met


def test_one_gpu_is_named_as_too_few(kit: Kit) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several")
    with pytest.raises(StartupError, match="no two ranks on one GPU"):
        nccl_part(kit)


def test_a_part_that_cannot_or_breaks_costs_only_itself(kit: Kit) -> None:
    def cannot(kit: Kit) -> tuple[list[dict[str, object]], list[Claim]]:
        raise StartupError("no such thing")

    def breaks(kit: Kit) -> tuple[list[dict[str, object]], list[Claim]]:
        raise LinkLost("the peer closed the link")

    good = Claim(id="good", value=1, better=Better.HIGHER, goal=1)
    parts = [("a", cannot), ("b", breaks), ("c", lambda kit: ([{"part": "c"}], [good]))]
    report = run_parts(kit, parts, 100.0, FakeClock())
    assert list(report.rows) == [
        {"part": "a", "outcome": "cannot: no such thing"},
        {"part": "b", "outcome": "failed: the peer closed the link"},
        {"part": "c"},
    ]
    assert {claim.id: claim.met for claim in report.claims} == {"kv.b_failed": False, "good": True}


def test_no_part_begins_when_no_time_is_left(kit: Kit) -> None:
    report = run_parts(kit, PARTS, 0.0)
    assert {row["outcome"] for row in report.rows} == {"cannot: no time is left"}


def test_the_step_reads_what_the_process_wrote(kit: Kit) -> None:
    good = Claim(id="good", value=1, better=Better.HIGHER, goal=1, n=3, spread=0.1, unit="GB/s")
    report = run_parts(kit, [("c", lambda kit: ([{"part": "c"}], [good]))], 100.0)
    found = read_report(json.dumps(report.to_json()))
    assert found.rows == [{"part": "c"}]
    assert found.claims == [good]


# Of what a GPU host need not have; msgspec and xxhash it must.
ABSENT = ["ray", "grpc", "transformers", "tokenizers", "fastapi", "nixl", "msgpack", "platformdirs"]


@pytest.mark.slow
def test_the_process_needs_no_server() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import kvferry.bench.kv_device"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
