"""What tells the weights of one model from those of another."""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash

from kvferry.models.weight_files import weight_files


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
