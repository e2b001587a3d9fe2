"""Marks of test modules that start Ray."""

from __future__ import annotations

import pytest

RAY = [
    pytest.mark.cluster,
    # Ray opens sockets and files that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
