"""A case: one op at one size, as launches to compile, check and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch

CACHE_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Element types of a paged cache, by their names in cases."""


class Limit(StrEnum):
    """What a share of 1.0 is measured against, in the same run."""

    COPY = "copy"
    """A device-to-device copy: bytes read plus bytes written, per second."""
    MATMUL = "matmul"
    """A large bf16 matrix product of the vendor's library."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One call of an op on inputs of its own."""

    launches: Sequence[Launch]
    """In order on one stream."""
    outputs: Sequence[torch.Tensor]
    """What the launches write."""
    expected: Callable[[], Sequence[torch.Tensor]]
    """The reference on the same inputs, one tensor per output."""
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Other implementations of the same op on the same inputs, timed beside it on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One row of the bench."""

    kernel: str
    """Name of its folder in kernels/."""
    name: str
    """Shapes and types, unique within the kernel."""
    make: Callable[[torch.device, Chip], Work]
    """New inputs on a device (``meta``: shapes alone), with tiles for a chip."""
    nbytes: int
    """Device memory that must move: every input once, every output once."""
    flops: int
    """FLOP of the matrix products and reductions; a multiply-add is two."""
    tolerance: float
    """Largest relative error ``max |out - expected| / max |expected|`` of a right result."""
    limit: Limit
    goal: float | None = None
    """Least share of the limit that an H200 should reach; None: reported only."""
    peer_goal: float | None = None
    """Least speed over the fastest peer."""
    matrix: bool = False
    """Whether the compiled code must use the matrix units, in one launch at least."""
    warp_group: bool = False
    """Whether tiles have 64 rows or more, so that it must use the large ones where a chip has them:
    wgmma on sm_90, tcgen05.mma on sm_100. Smaller tiles use mma.sync everywhere."""
    not_slower_than: str | None = None
    """Name of another case of the kernel that must take at least as long (FP8 KV beside bf16)."""
    in_ci: bool = False
    """Whether the compile test of CI takes it (a few per kernel: each costs seconds per chip)."""
    spills_allowed: int = 0
    """Bytes per thread; more than 0 needs a reason beside it (head dim > 128)."""
    candidates: Callable[[Chip], Mapping[str, Callable[[torch.device, Chip], Work]]] | None = None
    """For a tuning run: label of other tiles -> ``make`` with them."""
