"""What tests of several kernels need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_packs import COMPILER, build_pack
from cpu_libraries import build_cpu_ops

from kvferry.kernels.cpu.library import CpuOps, Lanes
from kvferry.kernels.kv_pack.host_compiled import LANES, CompiledPack, compiled_pack


@pytest.fixture(scope="session")
def cpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU's operations, compiled."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    return build_cpu_ops(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(params=[Lanes.AVX2, Lanes.AVX512], ids=lambda lanes: lanes.name)
def cpu(request: pytest.FixtureRequest, cpu_library: Path) -> CpuOps:
    """The same, as each kind of CPU runs them."""
    try:
        return CpuOps(cpu_library, request.param)
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scribbled() -> Callable[[memoryview], AbstractContextManager[None]]:
    """Another thread writes all over some memory for the time of a block."""

    @contextmanager
    def scribble_on(memory: memoryview) -> Iterator[None]:
        done, data = threading.Event(), np.frombuffer(memory, np.uint8)

        def scribble() -> None:
            value = 0
            while not done.is_set():
                value = (value + 1) % 256
                data[::61] = value

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    return scribble_on


@pytest.fixture
def compiled() -> CompiledPack:
    """The installation's own."""
    found = compiled_pack()
    if found is None:
        pytest.skip("the installation built no host pack")
    return found


@pytest.fixture(scope="session", params=sorted(LANES), ids=lambda lanes: LANES[lanes])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CompiledPack:
    """The compiled gather and scatter, as each kind of CPU runs them."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    found = build_pack(tmp_path_factory.mktemp("pack"), request.param)
    if found.lanes != LANES[request.param]:
        pytest.skip(f"this CPU has no {LANES[request.param]}")
    return found
