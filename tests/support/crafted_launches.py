"""Launches that break a rule each, compiled by ``python crafted_launches.py``: JSON on stdout.

A program of its own, for Triton compiles only in a process that does not interpret.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from kvferry.bench.kernel_cases.registry import all_cases
from kvferry.kernels.aot import compile_launch
from kvferry.kernels.chips import CHIPS
from kvferry.kernels.launch import Launch


@triton.jit
def product_kernel(p_a, p_b, p_out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out = a @ b for one tile."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(p_a + o_m[:, None] * K + o_k[None, :])
    b_b = tl.load(p_b + o_k[:, None] * N + o_n[None, :])
    tl.store(p_out + o_m[:, None] * N + o_n[None, :], tl.dot(b_a, b_b))


@triton.jit
def copy_kernel(p_x, p_out, p_extra, size, stride, eps, BLOCK: tl.constexpr):
    """out = x + eps, with a few arguments that specialise."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x * stride, mask=o_x < size, other=0.0)
    if p_extra is not None:
        b_x += tl.load(p_extra + o_x)
    tl.store(p_out + o_x, b_x + eps, mask=o_x < size)


@triton.jit
def idle_kernel(p_x, p_out, WRITES: tl.constexpr):
    """Reads, and what it reads goes nowhere unless WRITES, by an atomic sum."""
    b_x = tl.load(p_x + tl.arange(0, 128))
    if WRITES:
        tl.atomic_add(p_out + tl.arange(0, 128), b_x)


@triton.jit
def stored_kernel(d_x, d_out):
    """out = x, both through tensor descriptors."""
    d_out.store([0, 0], d_x.load([0, 0]))


@triton.jit
def described_kernel(d_x, p_out, M: tl.constexpr, N: tl.constexpr):
    """out = x, read through a tensor descriptor."""
    b_x = d_x.load([0, 0])
    o_m, o_n = tl.arange(0, M), tl.arange(0, N)
    tl.store(p_out + o_m[:, None] * N + o_n[None, :], b_x)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def product(m: int, n: int, k: int, num_warps: int) -> Launch:
    return Launch(
        kernel=product_kernel,
        grid=(1,),
        args={"p_a": empty(m, k), "p_b": empty(k, n), "p_out": empty(m, n, dtype=torch.float32)},
        constants={"M": m, "N": n, "K": k},
        num_warps=num_warps,
    )


def copy(size: int, stride: int = 1, *, extra: bool = False, offset: int = 0) -> Launch:
    def tensor() -> torch.Tensor:
        return empty(4096, dtype=torch.float32)

    return Launch(
        kernel=copy_kernel,
        grid=(4,),
        args={
            "p_x": tensor()[offset:],
            "p_out": tensor(),
            "p_extra": tensor() if extra else None,
            "size": size,
            "stride": stride,
            "eps": 0.5,
        },
        constants={"BLOCK": 1024},
    )


def described() -> Launch:
    return Launch(
        kernel=described_kernel,
        grid=(1,),
        args={
            "d_x": TensorDescriptor(empty(256, 128), [256, 128], [128, 1], [64, 64]),
            "p_out": empty(64, 64),
        },
        constants={"M": 64, "N": 64},
    )


def idle(*, writes: bool) -> Launch:
    args = {name: empty(128, dtype=torch.float32) for name in ("p_x", "p_out")}
    return Launch(kernel=idle_kernel, grid=(1,), args=args, constants={"WRITES": writes})


def stored() -> Launch:
    args = {
        name: TensorDescriptor(empty(256, 128), [256, 128], [128, 1], [64, 64])
        for name in ("d_x", "d_out")
    }
    return Launch(kernel=stored_kernel, grid=(1,), args=args, constants={})


EACH_ARCH = ("A100", "H100", "B200")
LAUNCHES = (
    ("small product", product(16, 16, 64, 1), EACH_ARCH),
    ("large product", product(128, 128, 64, 4), EACH_ARCH),
    ("spills", product(128, 128, 16, 1), ("H100",)),
    ("too much shared memory", product(64, 256, 512, 4), ("H100",)),
    ("copy", copy(1000), ("H100",)),
    ("described", described(), ("H100",)),
    ("stored by descriptor", stored(), ("H100",)),
    ("atomic", idle(writes=True), ("H100",)),
    ("idle", idle(writes=False), ("H100",)),
)


class NoDevice:
    """What Triton's launcher asks a driver for when it compiles without launching."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CHIPS["H100"].arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled() -> Iterator[tuple[str, dict[str, Any]]]:
    """``launch on chip`` -> fields of Compiled."""
    for name, launch, chips in LAUNCHES:
        for chip in chips:
            yield f"{name} on {chip}", asdict(compile_launch(launch, CHIPS[chip]))


def missed_by_launcher() -> dict[str, int]:
    """Launch -> entries that Triton's own launcher adds to the cache after ``compile_launch``."""
    triton.runtime.driver.set_active(NoDevice())
    launches = {
        "copy": copy(1000),
        "one, aligned": copy(1024, 1),
        "strided": copy(1000, 48),
        "unaligned pointer": copy(1000, 3, offset=1),
        "with the optional": copy(2**33, 2, extra=True),
        "product": product(16, 16, 16, 1),
        "described": described(),
    }
    rms_norm = next(case for case in all_cases() if case.kernel == "rms_norm")
    work = rms_norm.make(torch.device("meta"), CHIPS["H100"])
    launches["rms_norm"] = work.launches[0]
    missed = {}
    for name, launch in launches.items():
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            compile_launch(launch, CHIPS["H100"])
            before = set(os.listdir(cache))
            launch.kernel.run(
                **launch.args,
                **launch.constants,
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                grid=launch.grid,
                warmup=True,
            )
            missed[name] = len(set(os.listdir(cache)) - before)
    return missed


def main() -> None:
    json.dump({"compiled": dict(compiled()), "missed": missed_by_launcher()}, sys.stdout)


if __name__ == "__main__":
    main()
