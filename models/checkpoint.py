"""The weight files of a Hugging Face folder, and a decoder filled from them without a second
copy.

Which files are read: the shards that ``model.safetensors.index.json`` names if there is one, else
``model.safetensors``. Other weight files in the folder are ignored. Every parameter is filled
from the checkpoint or loading fails and names it; nothing is ever initialised at random.

A tensor stored in the compute dtype becomes a view of the memory-mapped file: workers of one host
share its pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvferry.core.errors import ModelLoadError
from kvferry.models.decoder import Decoder
from kvferry.models.spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Checkpoint:
    """The safetensors files of one folder, memory-mapped and checked against each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._named = _weight_map(folder)
        paths = (
            sorted(set(self._named.values())) if self._named is not None else [folder / SINGLE_FILE]
        )
        self.paths = paths
        self._files = {path: _open(path, named_by_index=self._named is not None) for path in paths}
        if self._named is None:
            self._where = dict.fromkeys(self._files[paths[0]].keys(), paths[0])
        else:
            self._where = self._named
            self._check_index()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterator[str]:
        """Names of all tensors, in file order of the index."""
        return iter(self._where)

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor in the mapped file, in its stored dtype. Raises ModelLoadError if
        there is none.
        """
        if name not in self._where:
            raise ModelLoadError(f"{self.folder}: the checkpoint has no tensor {name}")
        return self._files[self._where[name]].get_tensor(name)

    def layout(self, name: str) -> tuple[str, list[int]]:
        """Stored dtype as safetensors names it, and shape, without touching the data."""
        part = self._files[self._where[name]].get_slice(name)
        return part.get_dtype(), part.get_shape()

    def _check_index(self) -> None:
        held = {path: set(file.keys()) for path, file in self._files.items()}
        for name, path in self._where.items():
            if name not in held[path]:
                raise ModelLoadError(
                    f"{self.folder / INDEX_FILE}: tensor {name} is not in {path.name}"
                )


def fill_decoder(spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> Decoder:
    """Assign every parameter. Tied embeddings share one storage. Raises ModelLoadError naming the
    tensor.
    """
    decoder = Decoder(spec)
    weights: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        source = _source_of(name, spec, checkpoint)
        if source not in checkpoint and source == HEAD:
            raise ModelLoadError(
                f"{checkpoint.folder}: the checkpoint has no tensor {HEAD}; if this model ties its "
                "embeddings, config.json must say tie_word_embeddings: true"
            )
        if source in weights:
            weights[name] = weights[source]
            continue
        stored = checkpoint.tensor(source)
        if stored.shape != parameter.shape:
            raise ModelLoadError(
                f"{checkpoint.folder}: tensor {source} has shape {list(stored.shape)}, "
                f"config.json asks for {list(parameter.shape)}"
            )
        if not stored.is_floating_point():
            raise ModelLoadError(
                f"{checkpoint.folder}: tensor {source} has type {stored.dtype}, not a float type"
            )
        weights[name] = stored.to(dtype)
    decoder.load_state_dict(weights, strict=True, assign=True)
    if weights[HEAD] is weights[EMBEDDING]:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    _refuse_unfilled(decoder)
    return decoder.requires_grad_(False).eval()


def _source_of(name: str, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """The checkpoint tensor that fills a parameter.

    Tied models may store either end or both. Where both are stored and differ, the file is right
    and the flag is not: the reference implementation unties them too.
    """
    if not spec.tie_word_embeddings or name not in (EMBEDDING, HEAD):
        return name
    other = EMBEDDING if name == HEAD else HEAD
    if name not in checkpoint:
        return other
    if (
        name == HEAD
        and EMBEDDING in checkpoint
        and torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))
    ):
        return EMBEDDING
    return name


def _refuse_unfilled(decoder: nn.Module) -> None:
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        if tensor.is_meta:
            raise ModelLoadError(f"parameter {name} was not filled from the checkpoint")


def _weight_map(folder: Path) -> dict[str, Path] | None:
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


def _open(path: Path, *, named_by_index: bool) -> safe_open:
    if not path.is_file():
        why = (
            f"{INDEX_FILE} names it; download the checkpoint again"
            if named_by_index
            else "no weights in this folder"
        )
        raise ModelLoadError(f"{path}: file is missing ({why})")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: truncated or damaged: {error}") from None
