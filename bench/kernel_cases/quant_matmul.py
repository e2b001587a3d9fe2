"""Quantised products at the shapes of Llama-3-8B and 70B, in decode and in prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.quant_matmul import reference
from kvferry.kernels.quant_matmul.layout import UNIT, QuantWeight
from kvferry.kernels.quant_matmul.wrapper import quant_matmul_launches

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate+up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B down": (8192, 28672),
}
GROUP_SIZE = 128


def cases() -> Iterator[Case]:
    """W4A16 for every layer at batch 1 and 16; batch 64, prefill and W8A16 at one."""
    for layer in SHAPES:
        for m in (1, 16):
            yield _case(4, layer, m)
    yield _case(4, "8B gate+up", 64, goal=None)
    yield _case(4, "8B gate+up", 4096, goal=None)
    for m in (1, 16):
        yield _case(8, "8B gate+up", m)


def _case(bits: int, layer: str, m: int, goal: float | None = 0.85) -> Case:
    n, k = SHAPES[layer]
    return Case(
        kernel="quant_matmul",
        name=f"W{bits}A16 {layer}, {m} x {n} x {k} bf16",
        make=partial(_quant_matmul, bits, m, n, k),
        nbytes=n * k * bits // 8 + 2 * n * (k // GROUP_SIZE) + 2 * m * (n + k),
        flops=2 * m * n * k,
        tolerance=2**-7,
        limit=Limit.MATMUL if m > 256 else Limit.COPY,
        goal=goal,
        matrix=True,
        in_ci=layer == "8B gate+up" and m in (1, 16),
    )


def _quant_matmul(bits: int, m: int, n: int, k: int, device: torch.device, chip: Chip) -> Work:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    # Random words are random codes: quantising as large a weight would take longer than its test.
    words = (k // UNIT, n, 8 * bits)
    weight = QuantWeight(
        packed=torch.randint(-(2**15), 2**15, words, device=device, dtype=torch.int16),
        scales=torch.rand(k // UNIT, n, UNIT // GROUP_SIZE, device=device, dtype=torch.float16),
        zeros=None,
        bits=bits,
        group_size=GROUP_SIZE,
        num_inputs=k,
    )
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return Work(
        launches=quant_matmul_launches(x, weight, None, out, chip),
        outputs=[out],
        expected=lambda: [reference.quant_matmul(x, weight)],
        peers={},
    )
