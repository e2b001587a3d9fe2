"""Reading and writing quantities with units."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    _UNITS[f"{_prefix}iB"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: Any) -> int:
    """``512MiB``, ``2GB``, ``"4096"`` or 4096 as a number of bytes. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be a size such as 512MiB or a whole number of bytes")
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people: ``23.6 MB``."""
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
