"""Conversions into a ready folder: configuration, weights in the compute dtype, tokenizer files.

Tensors go through one at a time, so the peak is one tensor above the source's mapped pages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from kvferry.core.errors import ModelLoadError
from kvferry.models.checkpoint import Checkpoint, needed_tensors
from kvferry.models.gguf import GgufFile, save_tokenizer
from kvferry.models.safetensors_writer import DTYPE_NAMES, write_safetensors
from kvferry.models.spec import read_spec
from kvferry.models.tokenizer import TOKENIZER_FILE
from kvferry.models.weight_files import INDEX_FILE, SINGLE_FILE

_COPIED_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_ready(folder: Path, dtype: torch.dtype) -> bool:
    """Whether a folder's weights are stored in ``dtype`` and its tokenizer can be read as it is.

    Raises ModelLoadError for an incomplete or unsupported checkpoint.
    """
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    needed = needed_tensors(spec, checkpoint)
    stored = {checkpoint.layout(source)[0] for source in needed.values()}
    return stored == {DTYPE_NAMES[dtype]} and (folder / TOKENIZER_FILE).is_file()


def convert_folder(source: Path, dtype: torch.dtype, out: Path) -> None:
    """Write a Hugging Face folder anew with all weights in ``dtype``."""
    spec, checkpoint = read_spec(source), Checkpoint(source)
    needed = dict.fromkeys(needed_tensors(spec, checkpoint).values())
    shapes = {name: tuple(checkpoint.layout(name)[1]) for name in needed}
    write_safetensors(out / SINGLE_FILE, shapes, dtype, checkpoint.tensor)
    for pattern in _COPIED_PATTERNS:
        for path in source.glob(pattern):
            if path.name != INDEX_FILE:
                shutil.copy(path, out / path.name)
    if not (out / TOKENIZER_FILE).is_file():
        _save_fast_tokenizer(source, out)


def convert_gguf(path: Path, dtype: torch.dtype, out: Path) -> None:
    """Write a GGUF file as a Hugging Face folder with dequantised weights."""
    source = GgufFile(path)
    config = {**source.config(), "dtype": dtype_name(dtype)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(out / SINGLE_FILE, source.shapes(), dtype, source.tensor)
    save_tokenizer(source, out)


def _save_fast_tokenizer(source: Path, out: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(
            f"{source}: no tokenizer can be read from this folder: {error}"
        ) from None
    tokenizer.save_pretrained(out)
    if not (out / TOKENIZER_FILE).is_file():
        raise ModelLoadError(
            f"{source}: has no {TOKENIZER_FILE}, and its tokenizer has no fast form"
        )
