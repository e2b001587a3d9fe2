"""RMSNorm of a decode and of a prefill step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.rms_norm import reference
from kvferry.kernels.rms_norm.wrapper import rms_norm_launch

EPS = 1e-5


def cases() -> Iterator[Case]:
    """Rows x hidden size of Llama-3-8B and 70B, and of a short and of the longest row."""
    for num_tokens, size in ((64, 4096), (8192, 4096), (8192, 8192), (8192, 576), (1024, 65536)):
        yield Case(
            kernel="rms_norm",
            name=f"add, {num_tokens} x {size} bf16",
            make=partial(_add_rms_norm, num_tokens, size),
            nbytes=2 * (4 * num_tokens * size + size),
            flops=4 * num_tokens * size,
            # The normed value and the output are rounded to bf16, once each.
            tolerance=2**-7,
            limit=Limit.COPY,
            goal=0.85 if num_tokens == 8192 and size >= 4096 else None,
            in_ci=(num_tokens, size) in ((64, 4096), (1024, 65536)),
        )


def _add_rms_norm(num_tokens: int, size: int, device: torch.device, chip: Chip) -> Work:
    x, residual = (
        torch.randn(num_tokens, size, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    weight = torch.randn(size, device=device, dtype=torch.bfloat16)
    out, total = torch.empty_like(x), torch.empty_like(x)
    return Work(
        launches=[rms_norm_launch(x, residual, weight, EPS, out, total, chip)],
        outputs=[out, total],
        expected=lambda: reference.add_rms_norm(x, residual, weight, EPS),
    )
