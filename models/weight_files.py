"""Which files of a Hugging Face folder hold its weights.

The shards that ``model.safetensors.index.json`` names if there is one, else ``model.safetensors``.
Other weight files in the folder are ignored: left-overs of another download must not matter.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.core.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The files that count, sorted, whether they exist or not. Raises ModelLoadError."""
    named = weight_map(folder)
    return [folder / SINGLE_FILE] if named is None else sorted(set(named.values()))


def weight_map(folder: Path) -> dict[str, Path] | None:
    """Tensor name -> shard, from the index; None if there is none. Raises ModelLoadError."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(shard) for name, shard in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: is not a safetensors index: {error!r}") from None
    if not pairs:
        raise ModelLoadError(f"{path}: names no tensors")
    for shard in pairs.values():
        if Path(shard).name != shard:
            raise ModelLoadError(f"{path}: shard {shard!r} is not a plain file name")
    return {name: folder / shard for name, shard in pairs.items()}
