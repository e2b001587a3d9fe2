"""What kernels need to know of a chip, and the limits that rooflines are drawn from.

Numbers are the makers' data sheets, dense (no sparsity): NVIDIA A100, H100 SXM, H200 SXM, B200 and
GeForce RTX 5060. ``shared_limit`` is the largest dynamic shared memory of one thread block (CUDA
programming guide, "technical specifications per compute capability").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One kind of GPU. ``arch`` is 10 x major + minor of the compute capability."""

    name: str
    arch: int
    num_sms: int
    shared_limit: int
    """Bytes of shared memory that one thread block can have."""
    bandwidth: float
    """Bytes per second of device memory."""
    matmul_flops: float
    """Dense bf16 FLOP/s of the matrix units; a multiply-add is two."""
    l2_nbytes: int

    def floor_seconds(self, nbytes: float, flops: float) -> float:
        """The least time that moving ``nbytes`` and computing ``flops`` can take: the roofline
        (Williams, Waterman, Patterson, CACM 2009).
        """
        return max(nbytes / self.bandwidth, flops / self.matmul_flops)

    @property
    def has_native_e4m3(self) -> bool:
        """Whether the chip converts FP8 E4M3 in one instruction."""
        return self.arch >= 89


def _chip(
    name: str,
    arch: int,
    sms: int,
    shared_kib: int,
    terabytes_per_s: float,
    tera_flops: float,
    l2_mib: int,
) -> Chip:
    return Chip(
        name=name,
        arch=arch,
        num_sms=sms,
        shared_limit=shared_kib * 1024,
        bandwidth=terabytes_per_s * 1e12,
        matmul_flops=tera_flops * 1e12,
        l2_nbytes=l2_mib * 1024 * 1024,
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _chip("A100", 80, 108, 163, 2.039, 312, 40),
        _chip("H100", 90, 132, 227, 3.35, 989, 50),
        _chip("H200", 90, 132, 227, 4.8, 989, 50),
        _chip("B200", 100, 148, 227, 8.0, 2250, 126),
        _chip("RTX 5060", 120, 30, 99, 0.448, 77, 32),
    )
}
"""By name."""

INTERPRETER = _chip("interpreter", 90, 4, 227, 0.01, 0.1, 1)
"""Triton's interpreter on the CPU: tiles as on an H100, a grid that stays small."""
