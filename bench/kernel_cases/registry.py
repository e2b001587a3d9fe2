"""All cases of all kernels."""

from __future__ import annotations

from kvferry.bench.kernel_cases import rms_norm
from kvferry.bench.kernel_cases.case import Case

MODULES = (rms_norm,)


def all_cases() -> list[Case]:
    """Kernel by kernel, each in the order of its module."""
    return [case for module in MODULES for case in module.cases()]


def chosen_cases(kernel: str | None = None, *, ci_only: bool = False) -> list[Case]:
    """Those of one kernel, or of CI's subset. Raises ValueError for a kernel that has none."""
    cases = all_cases()
    names = list(dict.fromkeys(case.kernel for case in cases))
    if kernel is not None and kernel not in names:
        raise ValueError(f"{kernel!r} is none of: {', '.join(names)}")
    return [case for case in cases if kernel in (None, case.kernel) and (case.in_ci or not ci_only)]


def find_case(kernel: str, name: str) -> Case:
    """Raises LookupError where there is none."""
    for case in all_cases():
        if (case.kernel, case.name) == (kernel, name):
            return case
    raise LookupError(f"{kernel} has no case {name!r}")
