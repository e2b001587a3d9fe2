"""Processes of workers that Ray must not merely ask to leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from gates import eventually
from ray_marks import RAY

from kvferry.cluster.processes import Processes
from kvferry.cluster.runtime import start_ray
from kvferry.core.config import parse_config

pytestmark = [*RAY, pytest.mark.timeout(300)]


@pytest.fixture
def on_ray(tmp_path: Path) -> Iterator[None]:
    start_ray(parse_config({}), str(tmp_path))
    yield
    ray.shutdown()


async def test_processes_whose_threads_still_run_are_gone_after_each_of_many_lives(
    on_ray: None,
) -> None:
    class Busy:
        """As a worker whose step loop has died: its other threads wait for things to do."""

        def __init__(self) -> None:
            threading.Thread(target=threading.Event().wait).start()

        async def pid(self) -> int:
            return os.getpid()

    processes, pids = Processes(), []
    for _ in range(12):
        processes.kill()
        kind = ray.remote(Busy).options(num_cpus=0)
        lives = [processes.add(kind.remote()) for _ in range(2)]
        pids += [await actor.pid.remote() for actor in lives]
        del lives
    processes.kill()
    assert len(set(pids)) == 24
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
