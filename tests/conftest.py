"""Rules that hold in every test: seeded, on poisoned memory, nothing left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# Read once, when Triton is imported. Tests marked gpu run in a process of their own (`make gpu`).
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("kvferry", print_blob=True, derandomize=False, deadline=None)
settings.load_profile("kvferry")

EXIT_STATUS = pytest.StashKey[int]()

LINGER_S = 5.0
"""How long children and threads that were told to stop may take to be gone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run with its random seed")
    parser.addoption(
        "--schedule-seed", type=int, default=None, help="play one schedule of the simulator alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**32)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: {config.option.seed} (repeat with --seed {config.option.seed})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Threads that a failed test left running do not keep the run from ending."""
    left = [t.name for t in _lasting(threading.enumerate()) if t is not threading.main_thread()]
    if left and EXIT_STATUS in config.stash:
        print(f"ends in spite of {', '.join(left)}", flush=True)
        os._exit(int(config.stash[EXIT_STATUS]))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    """Seeds every generator that is loaded, the same for each test whatever runs before it."""
    seed: int = request.config.option.seed
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True)
def poisoned_empty() -> None:
    """Memory that nobody wrote holds NaN, or for integers a loud pattern, once torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None or hasattr(torch.empty, "poisoned"):
        return
    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, _poisoning(torch, getattr(torch, name)))


def _poisoning(torch: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif not tensor.is_complex() and tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max - 0x2A)
        return tensor

    poisoned.poisoned = True  # type: ignore[attr-defined]
    return poisoned


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests end the child processes and threads that they start."""
    children, threads = _children(), set(threading.enumerate())
    yield
    if request.node.get_closest_marker("cluster"):
        return
    deadline = time.monotonic() + LINGER_S
    while (left := _left(children, threads)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind: {', '.join(left)}"


def _left(children: set[int], threads: set[threading.Thread]) -> list[str]:
    found = [f"process {pid} ({_command(pid)})" for pid in _children() - children]
    started = set(threading.enumerate()) - threads
    found += [f"thread {thread.name}" for thread in _lasting(started)]
    return [name for name in found if "resource_tracker" not in name]


def _lasting(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Those that the interpreter would wait for."""
    return [thread for thread in threads if not thread.daemon and thread.is_alive()]


def _children() -> set[int]:
    """Process ids of this process's children; empty where /proc does not tell."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in task.read_text().split())
        except OSError:
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "zombie"
    except OSError:
        return "gone"
