"""Sampling on the GPU: same functions and meaning as ``reference``."""

from __future__ import annotations

import torch

from kvferry.kernels.sampling.launches import sample_launches
from kvferry.kernels.sampling.tensors import SampledTokens, SamplingTensors


def sample(
    logits: torch.Tensor, params: SamplingTensors, vocab_size: int, edited: bool = False
) -> SampledTokens:
    """Draw one token per row of ``logits`` [R, >= V]; the lowest id among equals.

    ``edited``: they come from ``apply_edits``, so that -inf is no mistake.
    """
    out = SampledTokens(
        token_ids=torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        invalid=torch.empty(len(logits), dtype=torch.bool, device=logits.device),
    )
    for launch in sample_launches(logits, params, out, vocab_size, edited):
        launch.run()
    return out
