"""All cases of all kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from kvferry.bench.kernel_cases import (
    embedding,
    flash_attention,
    flash_decoding,
    gated,
    kv_pack,
    matmul,
    quant_matmul,
    rms_norm,
    rope_kv_write,
    sampling,
)
from kvferry.bench.kernel_cases.case import Case
from kvferry.kernels.chips import Chip

MODULES = (
    flash_attention,
    flash_decoding,
    rms_norm,
    rope_kv_write,
    gated,
    embedding,
    kv_pack,
    matmul,
    sampling,
    quant_matmul,
)

TILES_MARK = " @ "
"""Between the name of a case and the label of its tiles."""


@cache
def all_cases() -> tuple[Case, ...]:
    """Kernel by kernel, each in the order of its module."""
    return tuple(case for module in MODULES for case in module.cases())


def chosen_cases(kernel: str | None = None, *, ci_only: bool = False) -> list[Case]:
    """Those of one kernel, or of CI's subset. Raises ValueError for a kernel that has none."""
    cases = all_cases()
    names = list(dict.fromkeys(case.kernel for case in cases))
    if kernel is not None and kernel not in names:
        raise ValueError(f"{kernel!r} is none of: {', '.join(names)}")
    return [case for case in cases if kernel in (None, case.kernel) and (case.in_ci or not ci_only)]


def variants(case: Case, chip: Chip) -> list[Case]:
    """The case, and a copy of it for each candidate of other tiles, named ``case @ label``."""
    candidates = case.candidates(chip) if case.candidates is not None else {}
    return [
        case,
        *(
            replace(case, name=f"{case.name}{TILES_MARK}{label}", make=make)
            for label, make in candidates.items()
        ),
    ]


def find_case(kernel: str, name: str, chip: Chip) -> Case:
    """A case or a variant of one. Raises LookupError where there is none."""
    shape = name.partition(TILES_MARK)[0]
    for case in all_cases():
        if (case.kernel, case.name) == (kernel, shape):
            for variant in variants(case, chip) if shape != name else [case]:
                if variant.name == name:
                    return variant
    raise LookupError(f"{kernel} has no case {name!r}")
