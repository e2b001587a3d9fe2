from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save, tiny_model
from tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer, ready to be served in float32."""
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    save(tiny_model("llama", torch.float32), folder)
    return save_tokenizer(folder)
