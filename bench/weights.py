"""The whole of a model's weights in this process, every page of them read."""

from __future__ import annotations

from pathlib import Path

import torch

from kvferry.models.decoder import Decoder
from kvferry.models.load import load_model


def load_and_touch(folder: Path) -> Decoder:
    """A float32 decoder whose every weight has been read once."""
    torch.set_num_threads(1)
    decoder = load_model(folder, torch.float32)
    for parameter in decoder.parameters():
        parameter.sum()
    return decoder
