"""Weights in panels (see ``kernels/cpu/panels.py``): made once per host, mapped by all its workers.

They lie in the cache, in a folder named after the source's files: changed files have another. The
model's own folder stays as it is, and of its matrices nothing is read where there are panels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvferry.kernels.cpu.library import cpu_ops
from kvferry.kernels.cpu.panels import PANEL, can_be_packed, packed
from kvferry.models.checkpoint import Checkpoint, needed_tensors
from kvferry.models.decoder import Decoder, Linear
from kvferry.models.safetensors_writer import write_safetensors
from kvferry.models.spec import ModelSpec, read_spec
from kvferry.models.weight_cache import cache_root, cached_folder, source_digest
from kvferry.models.weight_files import SINGLE_FILE, weight_files

LAYOUT_VERSION = 1
"""Raised when the order of weights in panels changes, so that older files are not taken for it."""


def pack_weights(
    folder: Path,
    dtype: torch.dtype,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> None:
    """Pack the matrices of a ready folder, unless that has been done or nothing reads panels here.
    Damaged panels are made anew. Raises ModelLoadError for the checkpoint, OSError.
    """
    if cpu_ops() is None or dtype is not torch.float32:
        return
    spec = read_spec(folder)
    wanted = _panel_shapes(spec)
    if not wanted:
        return
    place = packed_file(folder, cache).parent

    def build(empty: Path) -> None:
        progress(f"packing the weights of {folder.name} for the CPU")
        checkpoint = Checkpoint(folder)
        sources = needed_tensors(spec, checkpoint)

        def panels(name: str) -> Tensor:
            return packed(checkpoint.tensor(sources[name]))

        write_safetensors(empty / SINGLE_FILE, wanted, dtype, panels)

    def is_whole(built: Path) -> bool:
        return _open(built / SINGLE_FILE, wanted) is not None

    cached_folder(place.parent, place.name, build, is_whole)


def packed_weights(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, cache: Path | None = None
) -> Mapping[str, Tensor]:
    """Parameter -> its panels, views of the mapped file; empty where there is none to be used."""
    if cpu_ops() is None or dtype is not torch.float32:
        return {}
    return _open(packed_file(folder, cache), _panel_shapes(spec)) or {}


def packed_file(folder: Path, cache: Path | None = None) -> Path:
    """Where a folder's panels are, if they are. Raises OSError for a missing weight file."""
    digest = source_digest([folder / "config.json", *weight_files(folder)])
    root = cache or cache_root()
    return root / f"{folder.resolve().name}-panels{LAYOUT_VERSION}-{digest}" / SINGLE_FILE


def _panel_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Of all matrices that can be packed, in the order in which a step reads them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in Decoder(spec).named_modules():
        if isinstance(module, Linear):
            outputs, inputs = module.weight.shape
            if can_be_packed((outputs, inputs), torch.float32):
                shapes[f"{name}.weight"] = (outputs // PANEL, inputs, PANEL)
    return shapes


def _open(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor] | None:
    """None for a file that is missing, damaged or holds other tensors than those wanted."""
    try:
        file = safe_open(path, framework="pt", device="cpu")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return None
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != dict(wanted):
        return None
    return tensors
