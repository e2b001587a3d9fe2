"""Folders that are made once per host and then shared by all its workers.

A folder appears under its final name whole or not at all: it is built beside it and renamed. A
lock makes concurrent workers wait for one build; what a killed build left behind is removed by
the next.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

CONVERTER_VERSION = 1
"""Raised when the conversion changes, so that older results are not taken for new ones."""


def cache_root() -> Path:
    """``kvferry/models`` under the user's cache folder (``$XDG_CACHE_HOME``, else ``~/.cache``)."""
    return user_cache_path("kvferry") / "models"


def cached_folder(
    root: Path,
    name: str,
    build: Callable[[Path], None],
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """``root/name``, built by ``build(empty folder)`` if it is not there yet, or not whole. Raises
    what ``build`` raises.
    """
    final = root / name
    if is_whole(final):
        return final
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{name}.lock"):
        if is_whole(final):
            return final
        if final.is_dir():
            shutil.rmtree(final)
        # Only the holder of the lock makes such folders: those that exist are of builds that died.
        for left_over in root.glob(f".{name}.partial-*"):
            shutil.rmtree(left_over)
        partial = root / f".{name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            build(partial)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


def source_digest(paths: Iterable[Path]) -> str:
    """Short name of a set of source files by path, size and time: equal while nobody changes
    them.
    """
    digest = hashlib.blake2b(f"{CONVERTER_VERSION}".encode(), digest_size=6)
    for path in sorted(paths):
        status = path.stat()
        digest.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
