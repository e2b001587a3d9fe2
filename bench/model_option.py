"""The option of those benches that run a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.core.config import EMBEDDED_MODEL, ModelConfig
from kvferry.models.load import prepare


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=EMBEDDED_MODEL, help="folder, hub id or GGUF file (default: %(default)s)"
    )


def prepared(model: str) -> Path:
    """The ready float32 folder of ``--model``. Raises StartupError."""
    return prepare(ModelConfig(path=model, dtype="float32"))
