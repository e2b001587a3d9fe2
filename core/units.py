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


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT`` as (host, port). Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:8000")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{text!r} is ambiguous; write an IPv6 address as [HOST]:PORT")
    return host, int(port)


def format_bytes(nbytes: int) -> str:
    """A number of bytes for people: ``23.6 MB``."""
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
