"""Folders made once per host, whole or not at all; safetensors written tensor by tensor."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvferry.models.safetensors_writer import write_safetensors
from kvferry.models.weight_cache import cache_root, cached_folder, source_digest


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_builds_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("whole")

    root = tmp_path / "cache"
    first = cached_folder(root, "model", build)
    assert cached_folder(root, "model", build) == first == root / "model"
    assert (first / "file").read_text() == "whole"
    assert len(built) == 1
    assert folders(root) == ["model"]


def test_concurrent_workers_build_once_and_all_see_it_whole(tmp_path: Path) -> None:
    """Eight threads want the folder at once; the builder writes only when all have asked."""
    asked = threading.Barrier(8)
    built, seen = [], []

    def build(folder: Path) -> None:
        built.append(folder)
        for part in range(20):
            (folder / str(part)).write_text("x")

    def worker() -> None:
        asked.wait(10)
        seen.append(len(list(cached_folder(tmp_path, "model", build).iterdir())))

    threads = [threading.Thread(target=worker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [20] * 8
    assert len(built) == 1


def test_a_failed_build_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_folder(tmp_path, "model", fails)
    assert folders(tmp_path) == []
    cached_folder(tmp_path, "model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_what_a_killed_build_left_is_not_taken_and_is_removed(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from kvferry.models.weight_cache import cached_folder
def build(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
cached_folder(Path({str(tmp_path)!r}), "model", build)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert killed.returncode == -9
    assert len(folders(tmp_path)) == 1
    assert not (tmp_path / "model").exists()
    cached_folder(tmp_path, "model", lambda folder: (folder / "whole").touch())
    assert folders(tmp_path) == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_names_do_not_disturb_each_other(tmp_path: Path) -> None:
    """One name may be the start of another's."""

    def outer(folder: Path) -> None:
        cached_folder(tmp_path, "model", lambda inner: (inner / "file").touch())
        (folder / "file").touch()

    cached_folder(tmp_path, "model-float32", outer)
    assert folders(tmp_path) == ["model", "model-float32"]


def test_digest_changes_with_the_source(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("a")
    digest = source_digest([one, two])
    assert source_digest([two, one]) == digest
    assert source_digest([one]) != digest
    two.write_text("ab")
    assert source_digest([one, two]) != digest


def test_cache_root_is_in_the_users_cache() -> None:
    code = "from kvferry.models.weight_cache import cache_root; print(cache_root())"
    environment = {"XDG_CACHE_HOME": "/somewhere", "HOME": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "/somewhere/kvferry/models"
    assert cache_root().parts[-2:] == ("kvferry", "models")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_written_files_are_read_by_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(5, 7, dtype=torch.float64),
        "transposed": torch.randn(3, 4, dtype=torch.float64).T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "näme": torch.randn(9),
    }
    produced: list[str] = []

    def produce(name: str) -> torch.Tensor:
        produced.append(name)
        return tensors[name]

    path = tmp_path / "x.safetensors"
    write_safetensors(path, {n: tuple(t.shape) for n, t in tensors.items()}, dtype, produce)
    read = load_file(path)
    assert produced == list(tensors)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.to(dtype)), name


def test_data_starts_on_a_cache_line(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": (16,)}, torch.float32, lambda name: torch.ones(16))
    assert (path.stat().st_size - 64) % 64 == 0
    assert int.from_bytes(path.read_bytes()[:8], "little") % 64 == 56


def test_a_tensor_of_another_shape_than_announced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a: shape"):
        write_safetensors(
            tmp_path / "x", {"a": (2, 3)}, torch.float32, lambda name: torch.ones(3, 2)
        )


def test_a_written_tensor_is_gone_before_the_next_is_made(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def produce(name: str) -> torch.Tensor:
        assert [ref for ref in made if ref() is not None] == []
        tensor = torch.ones(8)
        made.append(weakref.ref(tensor))
        return tensor

    shapes = dict.fromkeys("abc", (8,))
    write_safetensors(tmp_path / "x.safetensors", shapes, torch.float32, produce)
    assert len(made) == 3
