"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.core.config import EMBEDDED_MODEL
from kvferry.models.load import resolve


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded default, ready in float32; fetched and converted once per host."""
    return resolve(EMBEDDED_MODEL, torch.float32)
