"""What ``model.deterministic`` needs: a row's numbers must not depend on the rest of the batch."""

from __future__ import annotations

import torch

from kvferry.cache.paged import PagedKV
from kvferry.core.errors import ConfigError
from kvferry.engine.cpu_attention import compiled_attention
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder, Linear

KEY = "model.deterministic"


def check_deterministic(decoder: Decoder, kv: PagedKV) -> None:
    """Raises ConfigError where products or attention round by the shape of the batch.

    float64 is let through on the CPU: torch's products do round by shape there, but 1e-16 of a
    logit decides between two tokens only where these are equal to every reader.
    """
    if decoder.backend is Backend.TRITON_BATCH_INVARIANT or decoder.dtype is torch.float64:
        return
    if decoder.backend.is_triton:
        raise ConfigError(KEY, "the kernels of this model are not batch-invariant")
    if compiled_attention(kv, decoder.spec.num_heads, decoder.dtype) is None:
        raise ConfigError(
            KEY,
            f"on the CPU it takes float64, or float32 with the compiled kernels of the "
            f"installation; here is {str(decoder.dtype).removeprefix('torch.')} without: "
            "set model.dtype: float64",
        )
    products = [m for m in decoder.modules() if isinstance(m, Linear)]
    loose = next((p for p in products if p.weight.dim() == 2), None)
    if loose is not None:
        rows, columns = loose.weight.shape
        raise ConfigError(
            KEY,
            f"a matrix of {rows} x {columns} is not in panels, so that torch multiplies by it: "
            "set model.dtype: float64",
        )
