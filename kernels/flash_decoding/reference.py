"""Attention of a few new tokens per sequence over the paged cache, and its split plan, in torch.

Shapes: S sequences, T tokens of the step, Q new tokens per sequence at most, Hq query heads, H KV
heads, D head dimension. The tokens of sequence s are rows query_starts[s] to query_starts[s + 1] of
``q``; its i-th stands at position context_lens[s] + i, and its K and V are in the cache already.
Rows of ``q`` behind query_starts[S] pad a bucket: their output is zero.
"""

from __future__ import annotations

import math

import torch

from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import KvLayer, dequantised


def flash_decoding(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    splits: SplitPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * q k^T) + mask) v, in float32. q [T, Hq, D] -> like q.

    block_tables int32 [S, blocks], context_lens int32 [S], query_starts int32 [S + 1]. A query sees
    the keys up to its own position, the last ``window`` of them alone. cap(x) = softcap *
    tanh(x / softcap). ``lse`` float32 [T, Hq] receives the natural logarithm of the softmax's
    denominator, -inf for padding. The plan changes nothing here.
    """
    out = torch.empty_like(q) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    group = q.shape[1] // kv.num_kv_heads
    starts = query_starts.tolist()
    for i_seq, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[i_seq], starts[i_seq + 1])
        positions = context_len + torch.arange(rows.stop - rows.start)
        if not len(positions):
            continue
        first = 0 if window is None else max(0, context_len - window + 1)
        keys = torch.arange(first, context_len + len(positions))
        k, v = (x.repeat_interleave(group, 1) for x in _gather(kv, block_tables[i_seq], keys))
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(torch.float32), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = positions[:, None] - keys
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
        if lse is not None:
            lse[rows] = scores.logsumexp(-1).T
    return out


def _gather(
    kv: KvLayer, table: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 K and V [keys, H, D] of a sequence at some positions."""
    keys = keys.to(table.device)
    blocks, slots = table[keys // kv.block_size].long(), keys % kv.block_size
    k_scale, v_scale = (
        None if scale is None else scale[blocks, slots] for scale in (kv.k_scale, kv.v_scale)
    )
    return dequantised(kv.k[blocks, slots], k_scale), dequantised(kv.v[blocks, slots], v_scale)


def plan_splits(context_lens: torch.Tensor, query_starts: torch.Tensor, splits: SplitPlan) -> None:
    """Set the plan's items for context_lens int32 [S] and query_starts int32 [S + 1]."""
    tile, num_programs = splits.config.tile, splits.num_programs
    starts = query_starts.tolist()
    ranges = []
    for i_seq, context_len in enumerate(context_lens.tolist()):
        num_queries = starts[i_seq + 1] - starts[i_seq]
        first = 0 if splits.window is None else max(0, context_len - splits.window + 1)
        end = context_len + num_queries if num_queries else first
        ranges.append(range(first // tile, -(-end // tile) if num_queries else first // tile))
    per_program = max(1, -(-sum(map(len, ranges)) // num_programs))
    items: list[list[int]] = []
    item_programs: list[int] = []
    seq_items = [0]
    position = 0
    for i_seq, tiles in enumerate(ranges):
        for i_tile in tiles:
            cut = i_tile % splits.split_tiles if splits.split_tiles else position % per_program
            if i_tile == tiles.start or not cut:
                items.append([i_seq, i_tile, 0, 0])
                item_programs.append(position // per_program)
            items[-1][2] += 1
            position += 1
        seq_items.append(len(items))
    program_items = [sum(program < p for program in item_programs) for p in range(num_programs + 1)]
    splits.items[: len(items)] = torch.tensor(items, dtype=torch.int32).reshape(-1, 4)
    splits.seq_items.copy_(torch.tensor(seq_items))
    splits.program_items.copy_(torch.tensor(program_items))
