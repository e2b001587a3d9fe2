"""The tensors of a Hugging Face folder, and a decoder filled from them without a second copy.

Every parameter is filled from the checkpoint or loading fails and names it; nothing is ever
initialised at random. A tensor stored in the compute dtype becomes a view of the memory-mapped
file: workers of one host share its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvferry.core.errors import ModelLoadError
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder
from kvferry.models.safetensors_writer import DTYPE_NAMES
from kvferry.models.spec import ModelSpec
from kvferry.models.weight_files import INDEX_FILE, weight_files, weight_map

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_TIED_HINT = "; if this model ties its embeddings, config.json must say tie_word_embeddings: true"


class Checkpoint:
    """The safetensors files of one folder, memory-mapped and checked against each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        named = weight_map(folder)
        files = {path: _open(path, named is not None) for path in weight_files(folder)}
        self._files = files
        held = {path: set(file.keys()) for path, file in files.items()}
        self._where = named or {name: path for path, names in held.items() for name in names}
        for name, path in self._where.items():
            if name not in held[path]:
                raise ModelLoadError(f"{folder / INDEX_FILE}: tensor {name} is not in {path.name}")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor in the mapped file, in its stored dtype."""
        return self._files[self._where[name]].get_tensor(name)

    def layout(self, name: str) -> tuple[str, list[int]]:
        """Stored dtype as safetensors names it, and shape, without touching the data."""
        part = self._files[self._where[name]].get_slice(name)
        return part.get_dtype(), part.get_shape()


def needed_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, str]:
    """Parameter -> the tensor that fills it, for all parameters of the decoder.

    Raises ModelLoadError naming the first tensor that is missing or has the wrong shape or type.
    """
    sources = {}
    for name, parameter in Decoder(spec).named_parameters():
        sources[name] = source = _source_of(name, spec, checkpoint)
        if source not in checkpoint:
            hint = _TIED_HINT if source == HEAD else ""
            raise ModelLoadError(
                f"{checkpoint.folder}: the checkpoint has no tensor {source}{hint}"
            )
        stored, shape = checkpoint.layout(source)
        if shape != list(parameter.shape):
            raise ModelLoadError(
                f"{checkpoint.folder}: tensor {source} has shape {shape}, "
                f"config.json asks for {list(parameter.shape)}"
            )
        if stored not in DTYPE_NAMES.values():
            raise ModelLoadError(
                f"{checkpoint.folder}: tensor {source} has type {stored}; "
                f"supported are {', '.join(DTYPE_NAMES.values())}"
            )
    return sources


def fill_decoder(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    backend: Backend = Backend.TORCH,
    panels: Mapping[str, Tensor] | None = None,
) -> Decoder:
    """Assign every parameter; tied embeddings share one. ``panels``: those of some matrices, which
    take their place (see ``models/packed.py``). Raises as needed_tensors does.
    """
    sources = needed_tensors(spec, checkpoint)
    decoder = Decoder(spec, backend)
    tensors = {source: checkpoint.tensor(source).to(dtype) for source in {*sources.values()}}
    weights = {name: tensors[source] for name, source in sources.items()}
    decoder.load_state_dict(weights, strict=True, assign=True)
    if sources[HEAD] == sources[EMBEDDING]:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    for name, tensor in (panels or {}).items():
        decoder.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(tensor)
    _refuse_unfilled(decoder)
    return decoder.requires_grad_(False).eval()


def _source_of(name: str, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """The checkpoint tensor that fills a parameter.

    Tied models may store either end or both. Where both are stored and differ, the file is right
    and the flag is not: the reference implementation unties them too.
    """
    if not spec.tie_word_embeddings or name not in (EMBEDDING, HEAD):
        return name
    if HEAD in checkpoint and EMBEDDING in checkpoint:
        equal = torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))
        return EMBEDDING if equal else name
    return HEAD if HEAD in checkpoint else EMBEDDING


def _refuse_unfilled(decoder: nn.Module) -> None:
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        if tensor.is_meta:
            raise ModelLoadError(f"parameter {name} was not filled from the checkpoint")


def _open(path: Path, named_by_index: bool) -> safe_open:
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
