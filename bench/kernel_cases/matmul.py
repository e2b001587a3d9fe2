"""The batch-invariant product at a square size and at the shapes of Llama-3-8B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.matmul import reference
from kvferry.kernels.matmul.wrapper import matmul_launch


def cases() -> Iterator[Case]:
    """M x N x K. No goal is promised: this product buys determinism, the library's buys speed."""
    for m, n, k in ((4096, 4096, 4096), (8192, 28672, 4096), (64, 4096, 4096), (1, 28672, 4096)):
        yield Case(
            kernel="matmul",
            name=f"{m} x {n} x {k} bf16",
            make=partial(_matmul, m, n, k),
            nbytes=2 * (m * k + n * k + m * n),
            flops=2 * m * n * k,
            tolerance=2**-7,
            limit=Limit.MATMUL if m > 256 else Limit.COPY,
            matrix=True,
            warp_group=True,
            in_ci=m == 4096 or m == 64,
        )


def _matmul(m: int, n: int, k: int, device: torch.device, chip: Chip) -> Work:
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return Work(
        launches=[matmul_launch(x, weight, None, out, chip)],
        outputs=[out],
        expected=lambda: [reference.matmul(x, weight)],
        peers={"torch": lambda: torch.nn.functional.linear(x, weight)},
    )
