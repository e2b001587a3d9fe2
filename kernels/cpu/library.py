"""The library that ``cpu_ops.c`` becomes, where the installation has built it.

It is optional: without it, or on another kind of CPU, torch does the same work. It is called
through ctypes, which lets other threads run meanwhile. Whoever calls has checked the tensors.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI = 3
"""As in ``cpu_ops.c``: a library left behind by an older version is not used."""
NAME = "_cpu_ops"
_OPERATIONS = ("product", "norm", "swiglu", "rotate", "attention")


class Lanes(IntEnum):
    """Kinds of CPU, each of which does all that the ones before it do."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2


def _struct(name: str, *fields: str) -> type[ctypes.Structure]:
    """A structure of ``types.h``. Fields are int64, but for pointers (*) and floats (~)."""
    kinds = {"*": ctypes.c_void_p, "~": ctypes.c_float}
    typed = [(field.strip("*~"), kinds.get(field[0], ctypes.c_int64)) for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": typed, "__slots__": ()})


Product = _struct(
    "Product", "*x", "x_stride", "*w", "panel_stride", "*bias", "*y", "y_stride", "rows", "depth",
    "panels",
)  # fmt: skip
Norm = _struct(
    "Norm", "*x", "x_stride", "*residual", "residual_stride", "*weight", "*total", "*y", "rows",
    "size", "~eps",
)  # fmt: skip
Swiglu = _struct("Swiglu", "*gate", "*up", "gate_stride", "up_stride", "*y", "rows", "size")
Cache = _struct(
    "Cache", "*k", "*v", "*k_scale", "*v_scale", "block_stride", "token_stride", "head_stride",
    "block_size", "heads", "head_dim", "type",
)  # fmt: skip
Batch = _struct(
    "Batch", "tokens", "*cos", "*sin", "*slots", "*spans", "num_spans", "*tables", "table_stride",
    "*scratch", "scratch_stride",
)  # fmt: skip
Rotation = _struct(
    "Rotation", "*batch", "*q", "*k", "*v", "q_stride", "k_stride", "v_stride", "*q_norm",
    "*k_norm", "*out", "*cache", "q_heads", "half", "~eps",
)  # fmt: skip
Attention = _struct("Attention", "*batch", "*q", "*out", "*cache", "group", "~scale")
Step = _struct("Step", "kind", "*call")


class CpuOps:
    """One library. Raises OSError when it cannot be loaded, has another version or does not know
    this kind of CPU.
    """

    def __init__(self, path: Path, lanes: Lanes | None = None) -> None:
        library = ctypes.CDLL(str(path))
        if library.kvferry_abi() != ABI:
            raise OSError(f"{path} was built for another version")
        best = Lanes(library.kvferry_lanes())
        self.lanes = best if lanes is None else lanes
        """What it computes with. Results do not depend on it."""
        if not Lanes.NONE < self.lanes <= best:
            raise OSError(f"{path}: this CPU has no {self.lanes.name}")
        found = {name: getattr(library, f"kvferry_{name}") for name in _OPERATIONS}
        for function in found.values():
            function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
            function.restype = None
        # Each takes a structure by reference, the lanes and the number of threads.
        self.product = found["product"]
        self.norm = found["norm"]
        self.swiglu = found["swiglu"]
        self.rotate = found["rotate"]
        self.attention = found["attention"]
        self.run = library.kvferry_run
        """Takes an array of steps, their number, a batch, the lanes and the number of threads."""
        self.run.argtypes = (
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
        )  # fmt: skip
        self.run.restype = None


@cache
def cpu_ops() -> CpuOps | None:
    """The library of this installation; None when there is none that can be used."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(NAME + suffix)
        if path.exists():
            try:
                return CpuOps(path)
            except (OSError, AttributeError):
                return None
    return None
