"""Element types of weights, computation and KV."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
KvDtype = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]
"""Of KV in a cache or on the wire."""

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BYTES: dict[str, int] = {"float8_e4m3fn": 1, "int8": 1}
"""Types with a scale per token and head."""
ELEMENT_BYTES = DTYPE_BYTES | QUANTISED_BYTES
HOLDS: dict[str, frozenset[str]] = {
    "float64": frozenset(DTYPE_BYTES),
    "float32": frozenset({"float32", "bfloat16", "float16"}),
}
"""Types of whose values another one holds every one; each of the rest holds its own alone."""


def kv_flavour(dtype: str, wire: str) -> str:
    """How exact the KV in a cache of ``dtype`` is that arrives as ``wire``: what tells its block
    hashes from those of another cache of the same tokens.
    """
    exact = dtype in HOLDS.get(wire, (wire,))
    return dtype if exact else f"{dtype} by way of {wire}"
