"""flash_decoding on the GPU: same functions and meaning as ``reference``."""

from __future__ import annotations

import torch
import triton.language as tl

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_decoding.kernel import (
    flash_decoding_kernel,
    merge_splits_kernel,
)
from kvferry.kernels.flash_decoding.plan_kernel import plan_splits_kernel
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import HEAD_DIMS, KvLayer, kind_of
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require

MERGED_AT_ONCE = 32
"""Partial results that the merge holds in registers; fixed, as it is an order of addition."""
_TL_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    """softmax(cap(scale * q k^T) + mask) v. q [T, Hq, D] -> like q.

    block_tables int32 [S, blocks], context_lens int32 [S], query_starts int32 [S + 1]. A query sees
    the keys up to its own position, the last ``window`` of them alone. cap(x) = softcap *
    tanh(x / softcap). ``lse`` float32 [T, Hq] receives the natural logarithm of the softmax's
    denominator, -inf for padding. The plan is one that ``plan_splits`` made for these lengths; its
    partial results are overwritten.

    q has the cache's type, unless that is quantised: then products are taken in float16, by which
    a bf16 q loses nothing.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for launch in flash_decoding_launches(
        q,
        kv,
        block_tables,
        context_lens,
        query_starts,
        splits,
        chip_of(q.device),
        out,
        scale=scale,
        window=window,
        softcap=softcap,
        lse=lse,
    ):
        launch.run()
    return out


def plan_splits(context_lens: torch.Tensor, query_starts: torch.Tensor, splits: SplitPlan) -> None:
    """Set the plan's items for context_lens int32 [S] and query_starts int32 [S + 1]."""
    plan_splits_launch(context_lens, query_starts, splits).run()


def flash_decoding_launches(
    q: torch.Tensor,
    kv: KvLayer,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    splits: SplitPlan,
    chip: Chip,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[Launch, Launch]:
    """The split attention and the merge. Raises ValueError naming what does not fit."""
    kv.check()
    _check(q, kv, splits, out, lse)
    _check_lengths(context_lens, query_starts, splits)
    require(
        block_tables.dtype is torch.int32
        and block_tables.shape[:-1] == (splits.num_seqs,)
        and block_tables.stride(1) == 1,
        "block_tables",
        f"must be int32 [{splits.num_seqs}, blocks] with contiguous rows",
    )
    require(window == splits.window, "window", f"the plan is for {splits.window}")
    group = q.shape[1] // kv.num_kv_heads
    rows = group * splits.max_query_len
    k, v = kv.storage()
    split = Launch(
        kernel=flash_decoding_kernel,
        grid=(kv.num_kv_heads * -(-rows // splits.rows_per_tile), splits.num_programs),
        args={
            "p_q": q,
            "p_k": k,
            "p_v": v,
            "p_k_scale": kv.k_scale,
            "p_v_scale": kv.v_scale,
            "p_tables": block_tables,
            "p_context_lens": context_lens,
            "p_query_starts": query_starts,
            "p_items": splits.items,
            "p_program_items": splits.program_items,
            "p_partial_out": splits.partial_out,
            "p_partial_lse": splits.partial_lse,
            "scale": float(scale),
            "softcap": None if softcap is None else float(softcap),
            "window": window,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "kv_block_stride": k.stride(0),
            "kv_slot_stride": k.stride(1),
            "kv_head_stride": k.stride(2),
            "table_stride": block_tables.stride(0),
            "num_kv_heads": kv.num_kv_heads,
        },
        constants={
            "GROUP": group,
            "ROWS": rows,
            "HEAD_DIM": kv.head_dim,
            "BLOCK_SIZE": kv.block_size,
            "KIND": kind_of(kv.k.dtype, chip),
            "SOFTCAP": softcap is not None,
            "WINDOW": window is not None,
            "INVARIANT": splits.split_tiles > 0,
            "BLOCK_M": splits.rows_per_tile,
            "BLOCK_N": splits.config.tile,
            "BLOCK_D": next_power_of_2(kv.head_dim),
            "DTYPE": _TL_TYPES.get(kv.k.dtype, tl.float16),
        },
        num_warps=splits.config.num_warps,
        num_stages=splits.config.num_stages,
    )
    return split, _merge_launch(kv, query_starts, splits, out, lse)


def _merge_launch(
    kv: KvLayer,
    query_starts: torch.Tensor,
    splits: SplitPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Launch:
    num_tokens, num_heads, head_dim = out.shape
    return Launch(
        kernel=merge_splits_kernel,
        grid=(splits.num_seqs * splits.max_query_len, num_heads),
        args={
            "p_partial_out": splits.partial_out,
            "p_partial_lse": splits.partial_lse,
            "p_items": splits.items,
            "p_seq_items": splits.seq_items,
            "p_query_starts": query_starts,
            "p_out": out,
            "p_lse": lse,
            "num_tokens": num_tokens,
            "num_seqs": splits.num_seqs,
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "num_kv_heads": kv.num_kv_heads,
            "num_heads": num_heads,
        },
        constants={
            "QUERY_LEN": splits.max_query_len,
            "GROUP": num_heads // kv.num_kv_heads,
            "HEAD_DIM": head_dim,
            "SPLIT_TILES": splits.split_tiles,
            "BLOCK_C": MERGED_AT_ONCE,
            "BLOCK_D": next_power_of_2(head_dim),
        },
        num_warps=4,
    )


def plan_splits_launch(
    context_lens: torch.Tensor, query_starts: torch.Tensor, splits: SplitPlan
) -> Launch:
    """One program per sequence and per program. Raises ValueError naming what does not fit."""
    _check_lengths(context_lens, query_starts, splits)
    return Launch(
        kernel=plan_splits_kernel,
        grid=(splits.num_seqs + splits.num_programs + 2,),
        args={
            "p_context_lens": context_lens,
            "p_query_starts": query_starts,
            "p_items": splits.items,
            "p_program_items": splits.program_items,
            "p_seq_items": splits.seq_items,
            "window": splits.window,
            "num_seqs": splits.num_seqs,
            "num_programs": splits.num_programs,
        },
        constants={
            "WINDOW": splits.window is not None,
            "SPLIT_TILES": splits.split_tiles,
            "TILE": splits.config.tile,
            "BLOCK_S": next_power_of_2(splits.num_seqs),
            "BLOCK_C": 64,
        },
        num_warps=4,
    )


def _check(
    q: torch.Tensor, kv: KvLayer, splits: SplitPlan, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    require(q.dim() == 3 and q.stride(2) == 1, "q", "must be [T, Hq, D] with contiguous heads")
    fits = q.dtype in _TL_TYPES and (kv.is_quantised or q.dtype is kv.k.dtype)
    require(fits, "q", f"{q.dtype} over a cache of {kv.k.dtype}")
    require(q.shape[2] == kv.head_dim, "q", f"head dimension is not the cache's {kv.head_dim}")
    require(kv.head_dim in HEAD_DIMS, "q", f"head dimension {kv.head_dim} is none of {HEAD_DIMS}")
    rows = q.shape[1] // kv.num_kv_heads * splits.max_query_len
    expected = (kv.num_kv_heads, rows, kv.head_dim)
    require(
        q.shape[1] % kv.num_kv_heads == 0 and splits.partial_out.shape[1:] == expected,
        "splits",
        f"made for other heads than q's {q.shape[1]} over the cache's {kv.num_kv_heads}",
    )
    room = splits.num_seqs * splits.max_query_len
    require(q.shape[0] <= room, "q", f"{q.shape[0]} tokens, the plan has room for {room}")
    require(
        out.shape == q.shape and out.dtype is q.dtype and out.stride(2) == 1,
        "out",
        "must be like q with contiguous heads",
    )
    require(
        lse is None
        or (lse.shape == q.shape[:2] and lse.dtype is torch.float32 and lse.is_contiguous()),
        "lse",
        "must be float32 [T, Hq], contiguous",
    )


def _check_lengths(
    context_lens: torch.Tensor, query_starts: torch.Tensor, splits: SplitPlan
) -> None:
    for name, tensor, size in (
        ("context_lens", context_lens, splits.num_seqs),
        ("query_starts", query_starts, splits.num_seqs + 1),
    ):
        fits = tensor.shape == (size,) and tensor.dtype is torch.int32 and tensor.is_contiguous()
        require(fits, name, f"must be int32 [{size}], contiguous")
