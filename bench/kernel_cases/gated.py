"""SwiGLU and GeGLU of a decode and of a prefill step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.gated import reference
from kvferry.kernels.gated.activation import Activation
from kvferry.kernels.gated.wrapper import gated_launch

REFERENCES: dict[Activation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Activation.SILU: reference.swiglu,
    Activation.GELU_TANH: reference.geglu,
    Activation.GELU: partial(reference.geglu, approximate=False),
}


def cases() -> Iterator[Case]:
    """Tokens x intermediate size of Llama-3-8B and 70B; Gemma's activation once."""
    for num_tokens, size, activation in (
        (64, 14336, Activation.SILU),
        (8192, 14336, Activation.SILU),
        (8192, 28672, Activation.SILU),
        (8192, 14336, Activation.GELU_TANH),
    ):
        yield Case(
            kernel="gated",
            name=f"{activation.name.lower()}, {num_tokens} x {size} bf16",
            make=partial(_work, num_tokens, size, activation),
            nbytes=2 * 3 * num_tokens * size,
            flops=num_tokens * size,
            # The activation and the product are rounded to bf16, once each.
            tolerance=2**-7,
            limit=Limit.COPY,
            goal=0.85 if num_tokens == 8192 else None,
            in_ci=(num_tokens, size) == (8192, 14336),
        )


def _work(
    num_tokens: int, size: int, activation: Activation, device: torch.device, chip: Chip
) -> Work:
    both = torch.randn(num_tokens, 2 * size, device=device, dtype=torch.bfloat16)
    gate, up = both.chunk(2, dim=-1)
    out = torch.empty(num_tokens, size, device=device, dtype=torch.bfloat16)
    unit = partial(REFERENCES[activation], gate, up)
    return Work(
        launches=[gated_launch(gate, up, out, activation, chip)],
        outputs=[out],
        expected=lambda: [unit()],
        peers={"torch, two kernels": unit},
    )
