"""What tells one model from another."""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash

from kvferry.models.weight_files import weight_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def weights_digest(folder: Path) -> bytes:
    """128-bit digest of a folder's configuration and weights, equal wherever the bytes are equal.

    Raises ModelLoadError for a damaged index, OSError for a missing file.
    """
    digest = xxhash.xxh3_128()
    for path in [folder / "config.json", *weight_files(folder)]:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            digest.update(view)
    value: bytes = digest.digest()
    return value


def tokenizer_digest(folder: Path) -> bytes:
    """128-bit digest of a folder's tokenizer; of nothing where it has none."""
    digest = xxhash.xxh3_128()
    for name in TOKENIZER_FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}".encode())
        digest.update(content)
    value: bytes = digest.digest()
    return value
