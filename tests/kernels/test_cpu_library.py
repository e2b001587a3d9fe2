"""The CPU's library: loaded where it fits, done without where not; its threads share one call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from compiled_packs import COMPILER
from cpu_libraries import build_cpu_ops

from kvferry.kernels.cpu.library import ABI, CpuOps, Lanes, cpu_ops
from kvferry.kernels.cpu.linear import product
from kvferry.kernels.cpu.panels import packed


def test_a_library_of_another_version_is_not_loaded(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    path = tmp_path / "other.so"
    source = f"int kvferry_abi(void) {{ return {ABI + 1}; }}"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    with pytest.raises(OSError, match="another version"):
        CpuOps(path)


def test_what_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "cpu_ops.so").write_bytes(b"no library")
    with pytest.raises(OSError, match=r"cpu_ops\.so"):
        CpuOps(tmp_path / "cpu_ops.so")


def test_a_kind_that_this_cpu_is_not_is_refused(cpu_library: Path) -> None:
    with pytest.raises(OSError, match="NONE"):
        CpuOps(cpu_library, Lanes.NONE)


def test_on_another_kind_of_cpu_there_are_no_lanes(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    with pytest.raises(OSError, match="this CPU has no NONE"):
        CpuOps(build_cpu_ops(tmp_path, "-DNO_LANES"))


def test_the_installations_own_is_the_best_that_there_is() -> None:
    ours = cpu_ops()
    if ours is None:
        pytest.skip("the installation built no library")
    assert ours.lanes is not Lanes.NONE
    assert cpu_ops() is ours


def test_callers_at_the_same_time_all_get_their_own_results(cpu: CpuOps, two_threads: None) -> None:
    """One has the threads, the others work alone."""
    panels = packed(torch.randn(256, 64))
    inputs = [torch.randn(20, 64) for _ in range(4)]
    wanted = [product(cpu, x, panels) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(300):
            if not torch.equal(product(cpu, inputs[number], panels), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


CALL_AFTER_IDLE_AND_IN_A_CHILD = """
import os, sys, time, torch
from pathlib import Path
from kvferry.kernels.cpu.library import CpuOps
from kvferry.kernels.cpu.linear import product
from kvferry.kernels.cpu.panels import packed
cpu = CpuOps(Path(sys.argv[1]))
torch.set_num_threads(4)
x, panels = torch.randn(20, 64), packed(torch.randn(512, 64))
wanted = product(cpu, x, panels)
time.sleep(0.2)
used = time.process_time()
time.sleep(0.3)
assert time.process_time() - used < 0.1, "threads do not sleep"
assert torch.equal(product(cpu, x, panels), wanted)
child = os.fork()
if child == 0:
    ok = all(torch.equal(product(cpu, x, panels), wanted) for _ in range(50))
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(product(cpu, x, panels), wanted)
"""


def test_threads_sleep_between_calls_and_a_forked_child_has_its_own(cpu_library: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", CALL_AFTER_IDLE_AND_IN_A_CHILD, str(cpu_library)],
        env=os.environ,
        check=True,
        timeout=120,
    )
