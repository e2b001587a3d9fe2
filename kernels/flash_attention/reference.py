"""Attention of a ragged batch over the paged cache, in plain torch.

Shapes: T query tokens of S sequences, Hq query heads, H KV heads, D head dimension. Sequence s has
the queries [query_starts[s], query_starts[s + 1]) at positions from context_lens[s]; K and V of all
its tokens, those of this step too, are in the cache.
"""

from __future__ import annotations

import torch

from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.workspace import StepWorkspace
from kvferry.kernels.kv_layer import KvLayer, dequantised


def flash_attention(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    workspace: StepWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * q @ k^T)) @ v over the keys that each query sees. q [T, Hq, D] -> like q.

    A query at position p sees the keys 0 to p, the last ``window`` of them if given. cap(s) =
    softcap * tanh(s / softcap) if given. Query heads i * Hq/H to (i + 1) * Hq/H - 1 share KV head
    i. block_tables int32 [S, blocks], query_starts int32 [S + 1], context_lens int32 [S]. ``plan``
    says how kernels split the work and ``workspace`` where they keep converted keys and values:
    nothing here depends on either.
    """
    out = torch.empty_like(q) if out is None else out
    starts = query_starts.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        num_tokens = context + end - begin
        keys, values = (
            dequantised(
                _tokens_of(cache, block_tables[seq], num_tokens),
                None if scales is None else _tokens_of(scales, block_tables[seq], num_tokens),
            )
            for cache, scales in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
        )
        query_at = torch.arange(context, num_tokens, device=q.device)[:, None]
        key_at = torch.arange(num_tokens, device=q.device)[None, :]
        visible = key_at <= query_at
        if window is not None:
            visible &= key_at > query_at - window
        group = q.shape[1] // kv.num_kv_heads
        # One KV head at a time: the scores of all of a long prompt would not fit in memory.
        for i in range(kv.num_kv_heads):
            heads = slice(i * group, (i + 1) * group)
            scores = scale * torch.einsum(
                "qhd,kd->hqk", q[begin:end, heads].to(torch.float32), keys[:, i]
            )
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
            out[begin:end, heads] = torch.einsum("hqk,kd->qhd", weights, values[:, i]).to(q.dtype)
    return out


def _tokens_of(cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first ``num_tokens`` of a sequence, in order. [N, B, ...] -> [num_tokens, ...]."""
    block_size = cache.shape[1]
    used = blocks[: -(-num_tokens // block_size)].to(torch.int64)
    return cache[used].flatten(0, 1)[:num_tokens]
