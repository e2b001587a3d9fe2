"""What tells the weights of one model from those of another."""

from __future__ import annotations

import mmap
from pathlib import Path

import xxhash


def weights_digest(folder: Path) -> bytes:
    """128-bit digest of a model folder's configuration and weights, equal wherever the bytes are
    equal.
    """
    digest = xxhash.xxh3_128()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            digest.update(view)
    return digest.digest()
