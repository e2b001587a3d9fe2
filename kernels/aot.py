"""Compile a launch for a chip that is not there, and read from the result what it will cost.

Triton lowers to PTX for any target and its wheel brings ptxas and cuobjdump, so registers, spills,
shared memory and matrix instructions are known without a GPU. Needs a process in which Triton
compiles: not one with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import INTERPRETED, Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# SASS operations that only the matrix units execute: mma.sync, wgmma (Hopper), tcgen05 (Blackwell).
MATRIX_PTX = {
    "mma.sync": re.compile(r"\bmma\.sync\.aligned\.(?:m\w+)\S*"),
    "wgmma": re.compile(r"\bwgmma\.mma_async\S*"),
    "tcgen05.mma": re.compile(r"\btcgen05\.mma\S*"),
}

# Stores, atomics and reductions to global memory, by threads or by the tensor memory accelerator.
WRITES_PTX = re.compile(r"\b(?:st|atom|red)\.\S*global|\bcp\.\S*bulk\S*\.global\.shared")

_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint32: "u32",
    torch.uint64: "u64",
}
_ALIGNED = [["tt.divisibility", 16]]
_MARKS_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether Triton lists constants among the attributes, which is part of its cache's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a launch costs on a chip."""

    registers: int
    """Per thread."""
    spills: int
    """Bytes of local memory per thread: what did not fit in registers."""
    shared: int
    """Bytes of shared memory per thread block."""
    matrix_instructions: dict[str, int]
    """How often each of MATRIX_PTX occurs in the code."""
    uses_tma: bool
    """Whether the tensor memory accelerator moves tiles (cp.async.bulk.tensor)."""
    warp_specialised: bool
    """Whether warps have different roles (setmaxnreg)."""
    writes: bool
    """Whether anything is written to global memory. A compiler that proves, rightly or not, that
    nothing is observable leaves a kernel without code, and says nothing.
    """


def compile_launch(launch: Launch, chip: Chip) -> Compiled:
    """Compile for ``chip``. Raises RuntimeError in the interpreter, Triton's own errors for code
    that does not compile.
    """
    if INTERPRETED:
        raise RuntimeError(
            "Triton interprets in this process (TRITON_INTERPRET=1): none to compile"
        )
    signature, constants, attrs = _specialise(launch)
    built = triton.compile(
        ASTSource(launch.kernel, signature, constants, attrs),
        target=GPUTarget("cuda", chip.arch, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    ptx = built.asm["ptx"]
    registers, spills = _resources(built.asm["cubin"])
    found = Counter({name: len(pattern.findall(ptx)) for name, pattern in MATRIX_PTX.items()})
    return Compiled(
        registers=registers,
        spills=spills,
        shared=built.metadata.shared,
        matrix_instructions=dict(+found),
        uses_tma="cp.async.bulk.tensor" in ptx,
        warp_specialised="setmaxnreg" in ptx,
        writes=WRITES_PTX.search(ptx) is not None,
    )


def identity(launch: Launch) -> str:
    """A text that is equal for launches which compile to the same code on a chip."""
    return repr(
        (
            launch.kernel.__name__,
            sorted((name, *_seen(launch, name)) for name in launch.args),
            sorted((name, str(value)) for name, value in launch.constants.items()),
            launch.num_warps,
            launch.num_stages,
        )
    )


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Signature, constants and attributes, as Triton's own launcher derives them from arguments:
    1 and None become constants, multiples of 16 and aligned pointers are marked. They are the very
    same, so that what is compiled here is found in Triton's cache when it is launched.
    """
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attrs: dict[Any, Any] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.args.get(param.name)
        if param.name in launch.constants:
            signature[param.name], is_aligned = "constexpr", False
        else:
            signature[param.name], is_aligned = _seen(launch, param.name)
        if param.do_not_specialize and value is not None:
            continue
        if signature[param.name] == "constexpr":
            constants.setdefault(param.name, value)
            if _MARKS_CONSTANTS:
                attrs[(index,)] = []
        elif isinstance(value, torch.Tensor) or _is_int(value):
            attrs[(index,)] = _ALIGNED if is_aligned else []
    return signature, constants, attrs


def _seen(launch: Launch, name: str) -> tuple[str, bool]:
    """What the compiler sees of an argument: its type, and whether it is a multiple of 16."""
    value = launch.args.get(name)
    if value is not None and name in _unspecialised(launch.kernel):
        return _type_of(value), False
    if value is None or (_is_int(value) and value == 1):
        return "constexpr", False
    return _type_of(value), _is_aligned(value)


def _unspecialised(kernel: Any) -> Sequence[str]:
    """The names under do_not_specialize, of a kernel that is compiled or interpreted."""
    names = kernel.kwargs["do_not_specialize"] if INTERPRETED else kernel.do_not_specialize
    return names or ()


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if _is_int(value):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    raise TypeError(f"a kernel takes no {type(value).__name__}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return _is_int(value) and value % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of local memory per thread, from the cubin's own tables."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {done.stdout[:200]!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, max(stack, local)
