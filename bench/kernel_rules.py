"""What compiled code must keep to: the verdicts of `kvferry bench kernels --compile-only`."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.bench.kernel_cases.case import Case
from kvferry.kernels.aot import Compiled
from kvferry.kernels.chips import Chip

LARGE_UNITS = {90: "wgmma", 100: "tcgen05.mma"}
"""By arch, the instruction for tiles of 64 rows and more; elsewhere there is mma.sync alone."""


def launch_violations(case: Case, chip: Chip, compiled: Compiled) -> list[str]:
    """What one launch of a case breaks: each a phrase with both numbers."""
    found = []
    if not compiled.writes:
        found.append("writes nothing: the kernel was compiled to no code")
    if compiled.spills > case.spills_allowed:
        found.append(f"spills {compiled.spills} bytes, {case.spills_allowed} allowed")
    if compiled.shared > chip.shared_limit:
        found.append(f"shared memory {compiled.shared} bytes, {chip.name} has {chip.shared_limit}")
    return found


def case_violations(case: Case, chip: Chip, compiled: Sequence[Compiled]) -> list[str]:
    """What all launches of a case together break: the matrix instruction that none of them has."""
    if not case.matrix:
        return []
    found = {name for each in compiled for name in each.matrix_instructions}
    wanted = LARGE_UNITS.get(chip.arch, "mma.sync") if case.warp_group else None
    if found and wanted in (None, *found):
        return []
    return [
        f"expected {wanted or 'a matrix instruction'}, found {', '.join(sorted(found)) or 'none'}"
    ]
