"""Ray, real worker processes, real sockets, on a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
import ray
import torch
from gates import eventually
from ray_marks import RAY
from tiny_models import save, tiny_model
from tiny_tokenizer import save_tokenizer
from whole_cluster import blocks_are_back, config_for, ready, tokens

from kvferry.client.client import KvferryClient
from kvferry.cluster.system import System
from kvferry.core.errors import ConfigError, ModelLoadError, StartupError

pytestmark = [*RAY, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(tiny_model("llama", torch.float32, max_position_embeddings=128), path)
    save_tokenizer(path)
    return path


async def test_workers_die_and_come_back_and_nothing_is_left(folder: Path) -> None:
    said: list[str] = []
    async with (
        System(config_for(folder), report=said.append) as system,
        KvferryClient(system.grpc_address) as client,
    ):
        answer = await tokens(client)
        assert len(answer) == 10

        for name in ("prefill-0", "decode-0"):
            os.kill(worker_pid(name), signal.SIGKILL)
            await eventually(lambda name=name: any(f"{name} is back" in s for s in said), 120)
            await ready(client)
            assert await tokens(client) == answer

        status = await client.status()
        assert [w.state for w in status.workers] == ["ready", "ready"]
        await blocks_are_back(client)
        pids = [worker_pid(name) for name in ("prefill-0", "decode-0")]
    assert not ray.is_initialized()
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def test_actors_import_the_installed_packages_and_no_bare_folder(folder: Path) -> None:
    """Ray puts the driver's folder on every actor's path; ours must not be there."""
    async with System(config_for(folder), report=lambda stage: None):
        assert await asyncio.to_thread(ray.get, spec_of.remote("kvferry.router"), timeout=60)
        for bare in ("router", "kernels", "proto"):
            found = await asyncio.to_thread(ray.get, spec_of.remote(bare), timeout=60)
            assert found is None or "kvferry" not in found, (bare, found)


async def test_a_model_that_does_not_load_fails_the_start_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    save(tiny_model("llama", torch.float32), tmp_path)
    save_tokenizer(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        async with System(config_for(tmp_path), report=lambda stage: None):
            pass
    assert not ray.is_initialized()


async def test_too_little_kv_memory_fails_the_start_with_the_arithmetic(folder: Path) -> None:
    config = config_for(folder, decode={"kv_memory": "40KiB"})
    with pytest.raises(ConfigError, match=r"decode\.kv_memory"):
        async with System(config, report=lambda stage: None):
            pass
    assert not ray.is_initialized()


async def test_a_port_in_use_is_found_before_anything_is_started(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = config_for(folder, router={"http": address})
        with pytest.raises(StartupError, match=f"router.http.*{address}"):
            async with System(config, report=lambda stage: None):
                pass
    assert not ray.is_initialized()


@ray.remote(num_cpus=0)
def spec_of(name: str) -> str | None:
    import importlib.util

    spec = importlib.util.find_spec(name)
    return None if spec is None else str(spec.origin)


def worker_pid(worker_id: str) -> int:
    """The process whose Ray title shows the actor class of this worker."""
    kind = "PrefillActor" if worker_id.startswith("prefill") else "DecodeActor"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if kind in (folder / "cmdline").read_text():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"no process of {worker_id}")
