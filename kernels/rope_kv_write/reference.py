"""Rotary positions (Su et al., "RoFormer", arXiv:2104.09864) and the write of keys and values into
the paged cache, in plain torch.

Shapes: T tokens, Hq query heads, Hkv key/value heads, D head size, R <= D rotated elements.
"""

from __future__ import annotations

import torch

from kvferry.kernels.kv_layer import KvLayer, quantised
from kvferry.kernels.rms_norm.reference import rms_norm


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: KvLayer,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate q and k, write k and v to their slots of the cache; the rotated q, [T, Hq, D].

    q [T, Hq, D]; k, v [T, Hkv, D]; cos, sin [T, R/2]. Before it is rotated, a head is normed where
    a weight [D] is given (``eps`` is of both norms). Slot s (int64 [T]) is offset s % B of block
    s // B; nothing is written for a slot of -1. Slots are distinct and inside the cache.

    The rotation is in float32 and rounded once, to the type of q; only then are keys converted to
    what the cache keeps (``kv_layer.quantised``).
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    written = slots >= 0
    block, offset = slots[written] // kv.block_size, slots[written] % kv.block_size
    for cache, scales, x in (
        (kv.k, kv.k_scale, rotated(k, cos, sin)),
        (kv.v, kv.v_scale, v),
    ):
        elements, scale = quantised(x[written], cache.dtype)
        cache[block, offset] = elements
        if scales is not None:
            scales[block, offset] = scale
    return rotated(q, cos, sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The pairs (i, i + R/2) of the first R elements, turned; the others as they are. x [T, H, D],
    cos and sin [T, R/2].
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    low, high = (part.to(dtype) for part in (x[..., :half], x[..., half : 2 * half]))
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)
