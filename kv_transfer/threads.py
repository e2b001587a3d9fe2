"""Ending threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Wait for threads that were told to end, for so long together.

    Raises TimeoutError, after all others were waited for, naming those that do not end.
    """
    deadline = time.monotonic() + timeout_s
    left = []
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    if left:
        raise TimeoutError(f"{', '.join(left)}: no end after {timeout_s:g} s")
